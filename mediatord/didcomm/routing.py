"""Routing 2.0: a forward is opened, its payloads are stored, then pushed (UC-021 main flow, reference section 4)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from twisted.internet.interfaces import IReactorTime

from mediatord.didcomm.admission import Admission
from mediatord.didcomm.exchange import Origin, Received
from mediatord.didcomm.unpacking import Unpacking
from mediatord.didcomm.wrapping import Unwrappable, Wrapping
from mediatord.errors import BadAttachment, NotEnrolled, RecipientUnknown, RoutingLoop, Unsupported
from mediatord.interfaces import IStore, Payload, StoredMessage
from mediatord.journal import Journal
from mediatord.protocol.didcomm import envelope as jwe
from mediatord.protocol.didcomm.did import did_of
from mediatord.protocol.didcomm.forward import (
    Opaque,
    delay,
    expiry,
    read_next,
    read_payloads,
    registered_names,
)
from mediatord.protocol.didcomm.message import Message

FORWARD_KEY = ("routing", 2, "forward")
MAX_DEPTH = 3


@dataclass(frozen=True, slots=True)
class RoutingSettings:
    """
    :param ttl: seconds a message may wait.
    :param max_delay: longest `delay_milli` that is honoured, in seconds.
    :param routing_keys: recipient DID to the keys to wrap for before delivery, told to us out of band.
    :param rewrap: whether every payload goes into a fresh forward to its recipient.
    :param registered_senders_only: refuse forwards that no account is proven to have sent.
    :param encrypted_only: refuse payloads that do not look like an envelope.
    """

    ttl: float = 259_200.0
    max_delay: float = 86_400.0
    routing_keys: Mapping[str, Sequence[str]] = field(default_factory=dict)
    rewrap: bool = False
    registered_senders_only: bool = False
    encrypted_only: bool = True


@dataclass(frozen=True, slots=True)
class _Deposit:
    """What one forward comes down to once everything about it was checked."""

    recipient: str
    payloads: list[Opaque]
    expires_at: float
    due_at: float | None


@dataclass(frozen=True, slots=True)
class Deliveries:
    """
    What happens to a message once it is stored.

    :param push: to the recipient's sockets; False when none took it.
    :param fail_over: told of a message that was not pushed.
    :param wait_for: told when a delayed message becomes due.
    """

    push: Callable[[StoredMessage], bool]
    fail_over: Callable[[StoredMessage], None]
    wait_for: Callable[[float], None]


@dataclass(frozen=True, slots=True)
class Sources:
    """
    Where chance comes from.

    :param new_message_id: ids of stored messages: unique, URI-safe.
    :param uniform: as `random.uniform`.
    """

    new_message_id: Callable[[], str]
    uniform: Callable[[float, float], float]


@dataclass(frozen=True, slots=True)
class Route:
    """The rooms that routing works with."""

    clock: IReactorTime
    store: IStore
    unpacking: Unpacking
    wrapping: Wrapping
    admission: Admission
    deliveries: Deliveries
    journal: Journal
    owns: Callable[[str], bool]
    sources: Sources


class Routing:
    """Takes forwards."""

    def __init__(self, route: Route, settings: RoutingSettings) -> None:
        self._route = route
        self._settings = settings

    async def forward(self, received: Received, origin: Origin) -> None:
        """
        Store every payload of a forward, then push it; done once that is durable.

        The checks come in the order of reference 4.1, and nothing is stored unless all of them pass.
        """
        self._route.admission.stranger(origin.peer)
        deposits = await self._plan(received, origin, depth=0)
        for deposit in deposits:
            await self._deliver(deposit, received)

    async def _plan(self, received: Received, origin: Origin, depth: int) -> list[_Deposit]:
        message = received.message
        next_ = read_next(message)
        if not message.attachments:
            raise BadAttachment
        if self._route.owns(did_of(next_)):
            return await self._unwrap(message, received, origin, depth)
        recipient = await self._registered(next_)
        if depth == 0:
            await self._check_sender(received, origin)
        now = self._route.clock.seconds()
        expires_at = expiry(message, now, self._settings.ttl)
        payloads = read_payloads(message, encrypted_only=self._settings.encrypted_only)
        held = delay(message, self._settings.max_delay, self._route.sources.uniform)
        return [_Deposit(recipient, payloads, expires_at, now + held if held > 0 else None)]

    async def _check_sender(self, received: Received, origin: Origin) -> None:
        self._route.admission.sender(received, origin.peer)
        if self._settings.registered_senders_only:
            sender = received.sender
            if sender is None or await self._route.store.account(sender) is None:
                raise NotEnrolled

    async def _registered(self, next_: str) -> str:
        for name in registered_names(next_):
            if await self._route.store.owner(name) is not None:
                return name
        raise RecipientUnknown

    async def _unwrap(self, message: Message, received: Received, origin: Origin, depth: int) -> list[_Deposit]:
        """
        A forward to ourselves, as senders make it when a wallet lists us both as endpoint and as routing key: what
        it carries is a new message to us (reference 4.3).
        """
        if depth >= MAX_DEPTH:
            raise RoutingLoop
        if depth == 0:
            await self._check_sender(received, origin)
        expiry(message, self._route.clock.seconds(), self._settings.ttl)
        deposits: list[_Deposit] = []
        for payload, _ in read_payloads(message):
            inner = await self._route.unpacking.open(payload, jwe.parse(payload), origin.peer)
            if inner.message.type.key != FORWARD_KEY:
                raise Unsupported
            deposits += await self._plan(inner, origin, depth + 1)
        return deposits

    async def _deliver(self, deposit: _Deposit, received: Received) -> None:
        payloads = [
            Payload(self._route.sources.new_message_id(), *await self._wrapped(opaque, deposit.recipient))
            for opaque in deposit.payloads
        ]
        deposited = await self._route.store.deposit(
            deposit.recipient, payloads, expires_at=deposit.expires_at, due_at=deposit.due_at
        )
        journal, deliveries = self._route.journal, self._route.deliveries
        for evicted in deposited.evicted:
            journal.evicted(evicted)
        for message in deposited.messages:
            pushed = message.due_at is None and deliveries.push(message)
            journal.accepted(message, received.sender, "live" if pushed else "queue")
            if message.due_at is not None:
                deliveries.wait_for(message.due_at)
            elif not pushed:
                deliveries.fail_over(message)

    async def _wrapped(self, opaque: Opaque, recipient: str) -> Opaque:
        data, form = opaque
        keys = self._settings.routing_keys.get(recipient, ())
        if not keys and not self._settings.rewrap:
            return opaque
        try:
            if self._settings.rewrap:
                data = await self._route.wrapping.rewrap(data, recipient)
            if keys:
                data = await self._route.wrapping.wrap(data, recipient, keys)
        except Unwrappable:
            # The payload itself is for the recipient anyway: better delivered without decoration than not at all.
            return opaque
        return data, form
