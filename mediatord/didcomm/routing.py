"""Routing 2.0: a forward is opened, its payloads are stored, then pushed (UC-021 main flow, reference section 4)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from twisted.internet.interfaces import IReactorTime

from mediatord.admission import AccessList, Admission, Origins, weight
from mediatord.didcomm.exchange import Origin, Received
from mediatord.didcomm.unpacking import Unpacking
from mediatord.didcomm.wrapping import Unwrappable, Wrapping
from mediatord.errors import (
    BadAttachment,
    MediatorError,
    NotEnrolled,
    RateLimited,
    RecipientUnknown,
    RoutingLoop,
    StoreUnavailable,
    TooLarge,
    Unsupported,
)
from mediatord.interfaces import Deposit, Deposited, IStore, Payload, StoredMessage
from mediatord.journal import Journal, Told
from mediatord.protocol.canonical_did import canonical_did, is_short_of_other
from mediatord.protocol.didcomm import envelope as jwe
from mediatord.protocol.didcomm.forward import (
    MAX_ATTACHMENTS,
    Opaque,
    delay,
    expiry,
    read_next,
    read_payloads,
)

FORWARD_KEY = ("routing", 2, "forward")
FORWARD_NAME = "routing/2.0/forward"
MAX_DEPTH = 3
# Envelopes to ourselves inside one message.
MAX_INNER = 8
# Forwards whose repetition is noticed.
MAX_SEEN = 10_000


@dataclass(frozen=True, slots=True)
class RoutingSettings:
    """
    :param ttl: seconds a message may wait.
    :param max_delay: longest `delay_milli` that is honoured, in seconds.
    :param routing_keys: recipient DID to the keys to wrap for before delivery, told to us out of band.
    :param rewrap: whether every payload goes into a fresh forward to its recipient.
    :param registered_senders_only: refuse forwards that no account is proven to have sent.
    :param encrypted_only: refuse payloads that do not look like an envelope.
    :param max_payload: bytes of one payload; a queue that is smaller could not keep it.
    :param access: whose list says of whom no forward is taken, if it is proven to be theirs.
    """

    ttl: float = 259_200.0
    max_delay: float = 86_400.0
    routing_keys: Mapping[str, Sequence[str]] = field(default_factory=dict)
    rewrap: bool = False
    registered_senders_only: bool = False
    encrypted_only: bool = True
    max_payload: int = 67_108_864
    access: AccessList = field(default_factory=AccessList)


@dataclass(frozen=True, slots=True)
class _Plan:
    """What one forward comes down to once everything about it was checked."""

    recipient: str
    origin: int
    payloads: list[Opaque]
    expires_at: float
    due_at: float | None


@dataclass(slots=True)
class _Descent:
    """
    How far forwards to ourselves have led, and how many envelopes were opened on the way.

    :param sender: the DID that is proven to have sent the outermost, if any.
    """

    depth: int = 0
    opened: int = 0
    sender: str | None = None


@dataclass(frozen=True, slots=True)
class Deliveries:
    """
    What happens to a message once it is stored.

    :param hand_over: to whoever takes it, and tells whether a socket did.
    :param wait_for: told when a delayed message becomes due.
    :param settle: told of messages that are gone.
    """

    hand_over: Callable[[StoredMessage, Callable[[bool], None]], None]
    wait_for: Callable[[float], None]
    settle: Callable[[Iterable[str]], object]


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
    origins: Origins
    sources: Sources


class Routing:
    """Takes forwards."""

    def __init__(self, route: Route, settings: RoutingSettings) -> None:
        self._route = route
        self._settings = settings
        self._seen: OrderedDict[bytes, None] = OrderedDict()

    async def forward(self, told: Told, received: Received, origin: Origin) -> None:
        """
        Store every payload of a forward, then push it; done once that is durable.

        The checks come in the order of reference 4.1, and nothing is stored unless all of them pass.
        """
        await self._route.admission.stranger(origin.peer, weight(told.size))
        plans = await self._plan(received, origin, _Descent())
        deposited = await self._deposit([await self._ready(plan) for plan in plans])
        for one in deposited:
            self.hand_over(told, one, received.sender)

    async def _plan(self, received: Received, origin: Origin, descent: _Descent) -> list[_Plan]:
        message = received.message
        next_ = read_next(message)
        count = len(message.attachments or ())
        if not 0 < count <= MAX_ATTACHMENTS:
            raise BadAttachment
        did = canonical_did(next_)
        ours = self._route.owns(did)
        recipient = "" if ours else await self._registered(did)
        if descent.depth == 0:
            descent.sender = await self._check_sender(received, origin, count)
        # One was paid for when it came in, or was opened.
        await self._route.admission.stranger(origin.peer, count - 1)
        now = self._route.clock.seconds()
        expires_at = expiry(message, now, self._settings.ttl)
        payloads = read_payloads(message, encrypted_only=self._settings.encrypted_only or ours)
        if ours:
            return await self._unwrap(payloads, origin, descent)
        held = delay(message, self._settings.max_delay, self._route.sources.uniform)
        party = self._route.origins.of(recipient, origin.peer, descent.sender)
        return [_Plan(recipient, party, payloads, expires_at, now + held if held > 0 else None)]

    async def _check_sender(self, received: Received, origin: Origin, count: int) -> str | None:
        """Who is charged for it, and has sent it in the eyes of a queue."""
        if received.sender is not None and self._settings.access.denies(received.sender):
            raise NotEnrolled
        # The very same forward again may be somebody else's doing, and is never charged to its sender twice.
        is_new = self._is_new(received.digest)
        if is_new:
            await self._route.admission.sender(received.sender, received.message.sender, origin.peer, count)
        if self._settings.registered_senders_only:
            sender = received.sender
            if sender is None or await self._route.store.account(sender) is None:
                raise NotEnrolled
        return received.sender if is_new else None

    @property
    def remembered(self) -> int:
        """Forwards whose repetition would be noticed."""
        return len(self._seen)

    def _is_new(self, digest: bytes) -> bool:
        if digest in self._seen:
            return False
        self._seen[digest] = None
        if len(self._seen) > MAX_SEEN:
            self._seen.popitem(last=False)
        return True

    async def _registered(self, did: str) -> str:
        """
        The recipient DID as it is kept.

        :raise RecipientUnknown: nobody has registered it.
        """
        if is_short_of_other(did):
            names = await self._route.store.spellings(did)
            if names:
                return canonical_did(names[0])
        elif await self._route.store.owner(did) is not None:
            return did
        raise RecipientUnknown

    async def _unwrap(self, payloads: list[Opaque], origin: Origin, descent: _Descent) -> list[_Plan]:
        """
        A forward to ourselves, as senders make it when a wallet lists us both as endpoint and as routing key: what
        it carries are new messages to us (reference 4.3).
        """
        if descent.depth >= MAX_DEPTH:
            raise RoutingLoop
        descent.opened += len(payloads)
        if descent.opened > MAX_INNER:
            raise BadAttachment
        deposits: list[_Plan] = []
        for payload, _ in payloads:
            try:
                inner = await self._route.unpacking.open(jwe.parse(payload), origin.peer)
            except (StoreUnavailable, RateLimited):
                raise
            except MediatorError:
                raise BadAttachment from None
            if inner.message.type.key != FORWARD_KEY:
                raise Unsupported
            descent.depth += 1
            deposits += await self._plan(inner, origin, descent)
            descent.depth -= 1
        return deposits

    async def _ready(self, plan: _Plan) -> Deposit:
        """The payloads in the form in which they are stored."""
        payloads = []
        for opaque in plan.payloads:
            data, form = await self._wrapped(opaque, plan.recipient)
            if len(data) > self._settings.max_payload:
                raise TooLarge
            payloads.append(Payload(self._route.sources.new_message_id(), data, form))
        return Deposit(plan.recipient, tuple(payloads), plan.expires_at, plan.due_at, plan.origin)

    async def _deposit(self, deposits: Sequence[Deposit]) -> Sequence[Deposited]:
        if len(deposits) > 1:
            return await self._route.store.deposit_all(deposits)
        (only,) = deposits
        return [
            await self._route.store.deposit(
                only.recipient_did,
                only.payloads,
                expires_at=only.expires_at,
                due_at=only.due_at,
                origin=only.origin,
            )
        ]

    def hand_over(self, told: Told, deposited: Deposited, sender: str | None) -> None:
        """
        Pass on what is durable now: whatever fails from here on, the sender is told so and the message waits.

        :param sender: the DID that is proven to have sent it, if any.
        """
        journal, deliveries = self._route.journal, self._route.deliveries
        if deposited.evicted:
            for evicted in deposited.evicted:
                journal.evicted(evicted)
            deliveries.settle([evicted.id for evicted in deposited.evicted])
        for message in deposited.messages:
            tell = partial(self._accepted, told, message, sender)
            if message.due_at is None:
                deliveries.hand_over(message, tell)
            else:
                tell(False)
                deliveries.wait_for(message.due_at)

    def _accepted(self, told: Told, message: StoredMessage, sender: str | None, pushed: bool) -> None:
        self._route.journal.accepted(told.request, message, sender, "live" if pushed else "queue", "didcomm")

    async def _wrapped(self, opaque: Opaque, recipient: str) -> Opaque:
        data, form = opaque
        keys = self._settings.routing_keys.get(recipient, ())
        try:
            if self._settings.rewrap:
                data = await self._route.wrapping.rewrap(data, recipient)
            if keys:
                data = await self._route.wrapping.wrap(data, recipient, keys)
        except Unwrappable:
            # The payload itself is for the recipient anyway: better delivered without decoration than not at all.
            return opaque
        return data, form
