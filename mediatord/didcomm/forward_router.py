"""
Routing 2.0: checks forwards, stores their payloads and dispatches them (UC-021 main flow, reference section 4).

Each payload is stored with a keyed 63-bit fingerprint of its sender, specific to the recipient's queue (UC-021 AF-4).
"""

from __future__ import annotations

import hmac
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b

from twisted.internet.interfaces import IReactorTime

from mediatord.didcomm.housekeeping import DelayedMessageScheduler
from mediatord.didcomm.live_delivery import DeliveryDispatcher, LiveDelivery
from mediatord.didcomm.messages import ForwardWrapper, MessageOrigin, MessageUnpacker, UnpackedMessage, WrapError
from mediatord.errors import (
    InvalidAttachment,
    MediationNotGranted,
    MediatorError,
    PayloadTooLarge,
    RateLimitExceeded,
    RoutingLoop,
    StoreUnavailable,
    UnknownRecipient,
    UnsupportedMessageType,
)
from mediatord.observability.event_recorder import EventRecorder, RequestRecord
from mediatord.protocol.canonical_did import canonicalize_did, is_did_peer_3, make_did_comparison_key
from mediatord.protocol.didcomm import jwe
from mediatord.protocol.didcomm.forward import (
    MAX_ATTACHMENTS,
    ForwardPayload,
    compute_delay,
    compute_expiry,
    read_next,
    read_payloads,
)
from mediatord.protocol.probe_markers import PROBE_CLIENT
from mediatord.ratelimit.access_control import AccessList
from mediatord.ratelimit.rate_limiter import RateLimiter, compute_request_cost
from mediatord.store.interfaces.messages import EnqueueRequest, EnqueueResult, Payload
from mediatord.store.interfaces.store import IStore

# Size of each half; 0 means unknown. The network half has one bit less, so that databases can store both as one
# integer.
_HALF_BYTES = 4
_HALF_BITS = 8 * _HALF_BYTES
# DID methods with several canonical forms.
_ALIASED_METHODS = ("did:peer:2", "did:peer:3")
_NETWORK_MASK = (1 << _HALF_BITS - 1) - 1


class SenderFingerprint:
    """
    Computes sender fingerprints (:class:`~mediatord.store.interfaces.messages.QueueLimits`), equal for all processes
    of a mediator and across restarts.

    Each half is a keyed hash of network or sender DID together with the recipient. So a sender has different
    fingerprints in different queues, and without the key they reveal nothing.

    :param seed: a secret of the mediator.
    """

    def __init__(self, seed: bytes) -> None:
        self._key = hmac.digest(seed, b"mediatord origins of deposits", "sha256")

    def compute(self, recipient: str, peer: str, sender: str | None) -> int:
        """
        Fingerprint of a sender in a recipient's queue; 0 for the daemon's own probes.

        :param recipient: in any canonical form; all forms of a DID give the same result.
        :param peer: rate limit key of the client's network
            (:meth:`mediatord.http.client_address.ClientAddressResolver.rate_limit_key`); empty if unknown.
        :param sender: authenticated DID of the sender, if any, in any canonical form.
        """
        if peer == PROBE_CLIENT:
            return 0
        # On the fast path of every message: no call more than necessary.
        if recipient.startswith(_ALIASED_METHODS):
            recipient = make_did_comparison_key(recipient)
        data = f"{len(peer)} {peer}{recipient}".encode("utf-8", "surrogatepass")
        tag = blake2b(data, digest_size=_HALF_BYTES, key=self._key, person=b"network").digest()
        network = (int.from_bytes(tag) & _NETWORK_MASK or 1) << _HALF_BITS if peer else 0
        return network if sender is None else network | self._sender(recipient, sender)

    def _sender(self, recipient: str, sender: str) -> int:
        if sender.startswith(_ALIASED_METHODS):
            sender = make_did_comparison_key(sender)
        data = f"{len(sender)} {sender}{recipient}".encode("utf-8", "surrogatepass")
        return int.from_bytes(blake2b(data, digest_size=_HALF_BYTES, key=self._key, person=b"sender").digest()) or 1


FORWARD_KEY = ("routing", 2, "forward")
FORWARD_NAME = "routing/2.0/forward"
MAX_FORWARD_DEPTH = 3
# Envelopes to the mediator inside one message.
MAX_INNER_ENVELOPES = 8
# Forwards that are remembered to detect repetitions.
MAX_REMEMBERED_FORWARDS = 10_000


@dataclass(frozen=True, slots=True)
class ForwardSettings:
    """
    :param ttl: seconds that a message may be queued.
    :param max_delay: longest `delay_milli` that is honoured, in seconds.
    :param routing_keys: by recipient DID: keys to wrap payloads for before delivery, configured by the operator.
    :param rewrap: whether every payload is wrapped in a new forward to its recipient.
    :param registered_senders_only: refuse forwards without an authenticated sender that has an account.
    :param encrypted_only: refuse payloads that do not look like an envelope.
    :param max_payload: bytes of one payload; a queue that is smaller could not keep it.
    :param access: access list for authenticated senders of forwards.
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
class _ForwardPlan:
    """A forward that passed all checks."""

    recipient: str
    origin: int
    payloads: list[ForwardPayload]
    expires_at: float
    due_at: float | None


@dataclass(slots=True)
class _NestedForwardState:
    """
    State of unwrapping forwards to the mediator itself: depth, and number of envelopes opened.

    :param sender: authenticated DID of the outermost sender, if any.
    """

    depth: int = 0
    opened: int = 0
    sender: str | None = None


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """
    Collaborators of both paths of a forward.

    :param owns: whether a canonical DID is one of the mediator's.
    :param new_message_id: id of a stored message for a time: unique, URI-safe.
    :param uniform: as `random.uniform`.
    """

    clock: IReactorTime
    store: IStore
    unpacker: MessageUnpacker
    forward_wrapper: ForwardWrapper
    admission: RateLimiter
    dispatcher: DeliveryDispatcher
    delayed: DelayedMessageScheduler
    live: LiveDelivery
    recorder: EventRecorder
    owns: Callable[[str], bool]
    origins: SenderFingerprint
    new_message_id: Callable[[float], str]
    uniform: Callable[[float, float], float]


class ForwardRouter:
    """General path of forwards."""

    def __init__(self, context: ForwardContext, settings: ForwardSettings) -> None:
        self._context = context
        self._settings = settings
        self._seen: OrderedDict[bytes, None] = OrderedDict()

    async def forward(self, record: RequestRecord, received: UnpackedMessage, origin: MessageOrigin) -> None:
        """
        Store every payload of a forward, then dispatch them; done once they are durable.

        The checks are in the order of reference 4.1, and nothing is stored unless all of them pass.
        """
        await self._context.admission.charge_anonymous(origin.peer, compute_request_cost(record.size))
        plans = await self._plan(received, origin, _NestedForwardState())
        enqueued = await self._deposit([await self._ready(plan) for plan in plans])
        for one in enqueued:
            self.dispatch(record, one, received.sender)

    async def _plan(
        self, received: UnpackedMessage, origin: MessageOrigin, descent: _NestedForwardState
    ) -> list[_ForwardPlan]:
        message = received.message
        next_ = read_next(message)
        count = len(message.attachments or ())
        if not 0 < count <= MAX_ATTACHMENTS:
            raise InvalidAttachment
        did = canonicalize_did(next_)
        ours = self._context.owns(did)
        recipient = "" if ours else await self._registered(did)
        if descent.depth == 0:
            descent.sender = await self._check_sender(received, origin, count)
        # One was charged when it was received, or opened.
        await self._context.admission.charge_anonymous(origin.peer, count - 1)
        now = self._context.clock.seconds()
        expires_at = compute_expiry(message, now, self._settings.ttl)
        payloads = read_payloads(message, encrypted_only=self._settings.encrypted_only or ours)
        if ours:
            return await self._unwrap(payloads, origin, descent)
        held = compute_delay(message, self._settings.max_delay, self._context.uniform)
        party = self._context.origins.compute(recipient, origin.peer, descent.sender)
        return [_ForwardPlan(recipient, party, payloads, expires_at, now + held if held > 0 else None)]

    async def _check_sender(self, received: UnpackedMessage, origin: MessageOrigin, count: int) -> str | None:
        """The sender for accounting and quotas; None if anonymous or repeated."""
        if received.sender is not None and self._settings.access.denies(received.sender):
            raise MediationNotGranted
        # A repeated forward may be a replay by somebody else, and is not charged to its sender again.
        is_new = self._is_new(received.digest)
        if is_new:
            await self._context.admission.charge_sender(received.sender, received.message.sender, origin.peer, count)
        if self._settings.registered_senders_only:
            sender = received.sender
            if sender is None or await self._context.store.get_account(sender) is None:
                raise MediationNotGranted
        return received.sender if is_new else None

    @property
    def remembered(self) -> int:
        """Number of remembered forwards."""
        return len(self._seen)

    def _is_new(self, digest: bytes) -> bool:
        if digest in self._seen:
            return False
        self._seen[digest] = None
        if len(self._seen) > MAX_REMEMBERED_FORWARDS:
            self._seen.popitem(last=False)
        return True

    async def _registered(self, did: str) -> str:
        """
        The recipient DID as it is stored.

        :raise UnknownRecipient: no account has registered it.
        """
        if is_did_peer_3(did):
            names = await self._context.store.list_registered_names(did)
            if names:
                return canonicalize_did(names[0])
        elif await self._context.store.find_owner(did) is not None:
            return did
        raise UnknownRecipient

    async def _unwrap(
        self, payloads: list[ForwardPayload], origin: MessageOrigin, descent: _NestedForwardState
    ) -> list[_ForwardPlan]:
        """
        The plans of a forward to the mediator itself, whose payloads are again messages to the mediator. Senders make
        one when a wallet lists the mediator both as endpoint and as routing key (reference 4.3).
        """
        if descent.depth >= MAX_FORWARD_DEPTH:
            raise RoutingLoop
        descent.opened += len(payloads)
        if descent.opened > MAX_INNER_ENVELOPES:
            raise InvalidAttachment
        deposits: list[_ForwardPlan] = []
        for payload, _ in payloads:
            try:
                inner = await self._context.unpacker.open(jwe.parse_envelope(payload), origin.peer)
            except (StoreUnavailable, RateLimitExceeded):
                raise
            except MediatorError:
                raise InvalidAttachment from None
            if inner.message.type.key != FORWARD_KEY:
                raise UnsupportedMessageType
            descent.depth += 1
            deposits += await self._plan(inner, origin, descent)
            descent.depth -= 1
        return deposits

    async def _ready(self, plan: _ForwardPlan) -> EnqueueRequest:
        """The request that stores the payloads, wrapped if configured."""
        payloads = []
        for opaque in plan.payloads:
            data, form = await self._wrapped(opaque, plan.recipient)
            if len(data) > self._settings.max_payload:
                raise PayloadTooLarge
            payloads.append(Payload(self._context.new_message_id(self._context.clock.seconds()), data, form))
        return EnqueueRequest(plan.recipient, tuple(payloads), plan.expires_at, plan.due_at, plan.origin)

    async def _deposit(self, deposits: Sequence[EnqueueRequest]) -> Sequence[EnqueueResult]:
        if len(deposits) > 1:
            return await self._context.store.enqueue_all(deposits)
        (only,) = deposits
        return [
            await self._context.store.enqueue(
                only.recipient_did,
                only.payloads,
                expires_at=only.expires_at,
                due_at=only.due_at,
                origin=only.origin,
            )
        ]

    def dispatch(self, record: RequestRecord, enqueued: EnqueueResult, sender: str | None) -> None:
        """
        Dispatch messages that are durable; if this fails, the sender gets an error and the messages stay queued.

        :param sender: authenticated DID of the sender, if any.
        """
        context = self._context
        if enqueued.evicted:
            for evicted in enqueued.evicted:
                context.recorder.record_eviction(evicted)
            context.live.resolve_pushes([evicted.id for evicted in enqueued.evicted])
        for message in enqueued.messages:
            record_accept = partial(context.recorder.record_accept, record.request, message, sender, "didcomm")
            if message.due_at is None:
                context.dispatcher.dispatch(message, record_accept)
            else:
                record_accept(False)
                context.delayed.schedule_wakeup(message.due_at)

    async def _wrapped(self, opaque: ForwardPayload, recipient: str) -> ForwardPayload:
        data, form = opaque
        keys = self._settings.routing_keys.get(recipient, ())
        try:
            if self._settings.rewrap:
                data = await self._context.forward_wrapper.rewrap(data, recipient)
            if keys:
                data = await self._context.forward_wrapper.wrap(data, recipient, keys)
        except WrapError:
            # The payload is encrypted to the recipient anyway: better deliver it unwrapped than not at all.
            return opaque
        return data, form
