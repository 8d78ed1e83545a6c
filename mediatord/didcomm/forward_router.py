"""
Routing 2.0: checks forwards, stores their payloads and dispatches them (UC-021 main flow, reference section 4), on a
general path and on a fast path.

Each payload is stored with a keyed 63-bit fingerprint of its sender, specific to the recipient's queue (UC-021 AF-4).
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import NamedTuple

from twisted.logger import Logger

from mediatord.delivery.connections import LiveDispatcher
from mediatord.didcomm.context import DIDCommContext
from mediatord.didcomm.messages import (
    ForwardWrapper,
    MessageOrigin,
    UnpackedMessage,
    WrapError,
)
from mediatord.didcomm.pickup import LiveDelivery
from mediatord.didcomm.replay_protection import RecentDigests
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
from mediatord.observability.event_recorder import RequestRecord
from mediatord.protocol.canonical_did import DID_PEER_3, canonicalize_did, make_did_comparison_key
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
from mediatord.ratelimit.rate_limiter import compute_request_cost
from mediatord.store.interfaces.messages import EnqueueRequest, EnqueueResult, Payload, StoredMessage

_log = Logger()

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
        if sender is None:
            return network
        sender = make_did_comparison_key(sender)
        data = f"{len(sender)} {sender}{recipient}".encode("utf-8", "surrogatepass")
        tag = blake2b(data, digest_size=_HALF_BYTES, key=self._key, person=b"sender").digest()
        return network | (int.from_bytes(tag) or 1)


FORWARD_KEY = ("routing", 2, "forward")
FORWARD_NAME = "routing/2.0/forward"
MAX_FORWARD_DEPTH = 3
# Envelopes to the mediator inside one message.
MAX_INNER_ENVELOPES = 8


class ForwardSender(NamedTuple):
    """
    Who sent a forward.

    :param proven: authenticated DID, if any; `claimed` is what the message says.
    :param digest: of the envelope.
    """

    proven: str | None
    claimed: str | None
    digest: bytes


class _ForwardPlan(NamedTuple):
    """A forward that passed all checks."""

    recipient: str
    fingerprint: int
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


class ForwardRouter:
    """
    General path of forwards.

    :param dispatcher: passes stored messages to whoever may take them now.
    :param schedule_wakeup: called with the time at which a stored message becomes visible.
    :param uniform: as `random.uniform`.
    """

    def __init__(
        self,
        context: DIDCommContext,
        forward_wrapper: ForwardWrapper,
        live: LiveDelivery,
        dispatcher: LiveDispatcher[StoredMessage],
        schedule_wakeup: Callable[[float], None],
        fingerprints: SenderFingerprint,
        uniform: Callable[[float, float], float],
    ) -> None:
        self._context = context
        self._forward_wrapper = forward_wrapper
        self._live = live
        self._dispatcher = dispatcher
        self._schedule_wakeup = schedule_wakeup
        self._fingerprints = fingerprints
        self._uniform = uniform
        self._seen = RecentDigests()

    async def forward(self, record: RequestRecord, received: UnpackedMessage, origin: MessageOrigin) -> None:
        """
        Store every payload of a forward, then dispatch them; done once they are durable.

        The checks are in the order of reference 4.1, and nothing is stored unless all of them pass.
        """
        await self._context.rate_limiter.charge_anonymous(origin.peer, compute_request_cost(record.size))
        plans = await self._plan(received, origin, _NestedForwardState())
        await self._store(record, [await self._make_request(plan) for plan in plans], received.sender)

    async def store_payload(
        self,
        record: RequestRecord,
        recipient: str,
        payload: ForwardPayload,
        expires_time: float | None,
        sender: ForwardSender,
        peer: str,
    ) -> str:
        """
        As :meth:`forward`, for the payload of a forward of DIDComm v1, which has been read and charged.

        :return: id of the stored message.

        :param recipient: as it is stored.
        :param expires_time: seconds since the epoch; None for none.
        """
        context, now = self._context, self._context.clock.seconds()
        known = await self._check_sender(sender, peer, 1)
        data, form = payload
        if len(data) > context.max_payload:
            raise PayloadTooLarge
        stored = Payload(context.new_stored_id(now), data, form)
        expires_at = compute_expiry(expires_time, now, context.ttl)
        fingerprint = self._fingerprints.compute(recipient, peer, known)
        await self._store(
            record, [EnqueueRequest(recipient, (stored,), expires_at, origin=fingerprint)], sender.proven
        )
        return stored.id

    async def _store(self, record: RequestRecord, requests: Sequence[EnqueueRequest], sender: str | None) -> None:
        if len(requests) > 1:
            enqueued = await self._context.store.enqueue_all(requests)
        else:
            (only,) = requests
            enqueued = [
                await self._context.store.enqueue(
                    only.recipient_did,
                    only.payloads,
                    expires_at=only.expires_at,
                    due_at=only.due_at,
                    origin=only.origin,
                )
            ]
        taken_here = self.push(enqueued)
        for one in enqueued:
            self.dispatch(record, one, sender, taken_here)

    async def _plan(
        self, received: UnpackedMessage, origin: MessageOrigin, descent: _NestedForwardState
    ) -> list[_ForwardPlan]:
        context, message = self._context, received.message
        next_ = read_next(message)
        count = len(message.attachments or ())
        if not 0 < count <= MAX_ATTACHMENTS:
            raise InvalidAttachment
        did = canonicalize_did(next_)
        ours = did in context.own_dids
        recipient = "" if ours else await self.find_recipient(did)
        if descent.depth == 0:
            sender = ForwardSender(received.sender, message.sender, received.digest)
            descent.sender = await self._check_sender(sender, origin.peer, count)
        # One was charged when it was received, or opened.
        await context.rate_limiter.charge_anonymous(origin.peer, count - 1)
        now = context.clock.seconds()
        expires_at = compute_expiry(message.expires_time, now, context.ttl)
        payloads = read_payloads(message, encrypted_only=context.encrypted_only or ours)
        if ours:
            return await self._unwrap(payloads, origin, descent)
        held = compute_delay(message, context.max_delay, self._uniform)
        fingerprint = self._fingerprints.compute(recipient, origin.peer, descent.sender)
        return [_ForwardPlan(recipient, fingerprint, payloads, expires_at, now + held if held > 0 else None)]

    async def _check_sender(self, sender: ForwardSender, peer: str, count: int) -> str | None:
        """The sender for accounting and quotas; None if anonymous or repeated."""
        if sender.proven is not None and self._context.access.denies(sender.proven):
            raise MediationNotGranted
        # A repeated forward may be a replay by somebody else, and is not charged to its sender again.
        is_new = self._seen.add(sender.digest)
        if is_new:
            await self._context.rate_limiter.charge_sender(sender.proven, sender.claimed, peer, count)
        if self._context.registered_senders_only:
            if sender.proven is None or await self._context.store.get_account(sender.proven) is None:
                raise MediationNotGranted
        return sender.proven if is_new else None

    @property
    def remembered(self) -> int:
        """Number of remembered forwards."""
        return len(self._seen)

    async def find_recipient(self, did: str) -> str:
        """
        The recipient DID as it is stored.

        :param did: in its canonical form.

        :raise UnknownRecipient: no account has registered it.
        """
        if did.startswith(DID_PEER_3):
            names = await self._context.store.list_spellings(did)
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

    async def _make_request(self, plan: _ForwardPlan) -> EnqueueRequest:
        """The request that stores the payloads, wrapped if configured."""
        context, stored = self._context, []
        for payload in plan.payloads:
            data, form = await self._wrap(payload, plan.recipient)
            if len(data) > context.max_payload:
                raise PayloadTooLarge
            stored.append(Payload(context.new_stored_id(context.clock.seconds()), data, form))
        return EnqueueRequest(plan.recipient, tuple(stored), plan.expires_at, plan.due_at, plan.fingerprint)

    async def _wrap(self, payload: ForwardPayload, recipient: str) -> ForwardPayload:
        data, form = payload
        try:
            if self._context.rewrap:
                data = await self._forward_wrapper.wrap(data, recipient, [recipient])
            if keys := self._context.routing_keys.get(recipient):
                data = await self._forward_wrapper.wrap(data, recipient, keys)
        except WrapError:
            # The payload is encrypted to the recipient anyway: better deliver it unwrapped than not at all.
            return payload
        return data, form

    def push(self, enqueued: Sequence[EnqueueResult]) -> Container[str]:
        """
        Push messages that are durable, of one request or of several, to sockets of this process.

        Never fails, and :meth:`dispatch` has to follow.

        :return: ids of the messages that a socket took.
        """
        messages: list[StoredMessage] = []
        for one in enqueued:
            for message in one.messages:
                if message.due_at is None:
                    messages.append(message)
        return self._dispatcher.push(messages)

    def dispatch(
        self, record: RequestRecord, enqueued: EnqueueResult, sender: str | None, taken_here: Container[str]
    ) -> None:
        """
        Dispatch messages that are durable; if this fails, the sender gets an error and the messages stay queued.

        :param sender: authenticated DID of the sender, if any.
        :param taken_here: the result of :meth:`push`.
        """
        recorder = self._context.recorder
        for evicted in enqueued.evicted:
            recorder.record_eviction(evicted)
            self._live.resolve_push(evicted.id)
        for message in enqueued.messages:
            record_accept = partial(recorder.record_accept, record.request, message, sender, "didcomm")
            if message.due_at is None:
                self._dispatcher.dispatch(message, record_accept, taken_here)
            else:
                record_accept(False)
                self._schedule_wakeup(message.due_at)
