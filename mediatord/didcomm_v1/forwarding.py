"""Routing 1.0: forwards of DIDComm v1, stored and delivered as those of v2 are (Aries RFC 0094)."""

from __future__ import annotations

from collections import Counter, OrderedDict
from contextlib import suppress
from hashlib import sha256

from twisted.internet.defer import DeferredLock
from twisted.internet.task import deferLater

from mediatord.didcomm.forward_router import MAX_FORWARD_DEPTH, ForwardRouter, ForwardSender
from mediatord.didcomm.messages import MessageOrigin
from mediatord.didcomm_v1.context import ReceivedV1Message, V1Context
from mediatord.didcomm_v1.messages import V1Unpacker
from mediatord.errors import (
    InvalidAttachment,
    MediatorError,
    RateLimitExceeded,
    RoutingLoop,
    StoreUnavailable,
    UnknownRecipient,
    UnsupportedMessageType,
)
from mediatord.observability.event_recorder import RequestRecord
from mediatord.protocol.canonical_did import canonicalize_did
from mediatord.protocol.didcomm.forward import ForwardPayload
from mediatord.protocol.didcomm_v1.envelope import parse_envelope
from mediatord.protocol.didcomm_v1.forward import FORWARD_KEY, Forward, read_forward
from mediatord.ratelimit.rate_limiter import compute_request_cost

# Wallets hand out a key before it is registered: a forward to an unknown one waits, in steps, in seconds.
REGISTRATION_WAIT = 1.0
_WAIT_STEP = 0.25
# Forwards that wait at once, in all and from one address, and their bytes; others are refused at once.
MAX_WAITING = 512
MAX_WAITING_PER_PEER = 8
MAX_WAITING_SIZE = 65_536
# Forwards of which the message is remembered, 150 bytes each.
MAX_REMEMBERED_FORWARDS = 10_000


class V1ForwardRouter:
    """
    Unwraps forwards, and passes them to the router of both versions.

    A forward that comes again while its message is still queued is accepted without effect: senders repeat it when
    they have missed the answer, and v1 has no other way to recognise a replay. That is remembered by each process, so
    delivery is at least once.
    """

    def __init__(self, context: V1Context, router: ForwardRouter, unpacker: V1Unpacker) -> None:
        self._common = context.common
        self._router = router
        self._unpacker = unpacker
        self._waiting: Counter[str] = Counter()
        self._storing: dict[bytes, DeferredLock] = {}
        self._stored: OrderedDict[bytes, str] = OrderedDict()

    @property
    def remembered(self) -> int:
        """Number of forwards whose message is remembered."""
        return len(self._stored)

    async def forward(self, record: RequestRecord, received: ReceivedV1Message, origin: MessageOrigin) -> None:
        """
        Store the message of a forward and dispatch it; done once it is durable.

        :raise InvalidAttachment: there is no envelope in it.
        :raise UnknownRecipient: nobody has registered the key, also a second later.
        """
        await self._common.rate_limiter.charge_anonymous(origin.peer, compute_request_cost(record.size))
        forward = await self._unwrap(received, origin.peer)
        recipient = await self._find_recipient(canonicalize_did(forward.to), len(forward.payload), origin.peer)
        key = sha256(f"{recipient} ".encode() + forward.payload).digest()
        # One that comes again while it is being stored waits for the result.
        lock = self._storing.setdefault(key, DeferredLock())
        await lock.acquire()
        try:
            if not await self._is_queued(key):
                sender = ForwardSender(received.sender, None, received.digest)
                payload: ForwardPayload = forward.payload, "json"
                self._remember(
                    key,
                    await self._router.store_payload(
                        record, recipient, payload, forward.expires_time, sender, origin.peer
                    ),
                )
        finally:
            lock.release()
            if not (lock.locked or lock.waiting):
                self._storing.pop(key, None)

    def _remember(self, key: bytes, message_id: str) -> None:
        self._stored[key] = message_id
        if len(self._stored) > MAX_REMEMBERED_FORWARDS:
            self._stored.popitem(last=False)

    async def _unwrap(self, received: ReceivedV1Message, peer: str) -> Forward:
        """The forward to somebody else, out of those to the mediator itself around it."""
        for _ in range(MAX_FORWARD_DEPTH + 1):
            if received.message.type.key != FORWARD_KEY:
                raise UnsupportedMessageType
            forward = read_forward(received.message)
            if not self._unpacker.owns(forward.to):
                return forward
            await self._common.rate_limiter.charge_anonymous(peer, 1)
            try:
                received = await self._unpacker.open(parse_envelope(forward.payload))
            except (StoreUnavailable, RateLimitExceeded):
                raise
            except MediatorError:
                raise InvalidAttachment from None
        raise RoutingLoop

    async def _find_recipient(self, did: str, size: int, peer: str) -> str:
        """The recipient as it is stored; waits for a while until it is registered."""
        waits = 0 if size > MAX_WAITING_SIZE else int(REGISTRATION_WAIT / _WAIT_STEP)
        try:
            return await self._router.find_recipient(did)
        except UnknownRecipient:
            if self._waiting.total() >= MAX_WAITING or self._waiting[peer] >= MAX_WAITING_PER_PEER:
                raise
        self._waiting[peer] += 1
        try:
            for _ in range(waits):
                await deferLater(self._common.clock, _WAIT_STEP, lambda: None)
                with suppress(UnknownRecipient):
                    return await self._router.find_recipient(did)
        finally:
            self._waiting[peer] -= 1
            if not self._waiting[peer]:
                del self._waiting[peer]
        raise UnknownRecipient

    async def _is_queued(self, key: bytes) -> bool:
        message_id = self._stored.get(key)
        if message_id is None:
            return False
        if await self._common.store.find_messages([message_id]):
            return True
        self._stored.pop(key, None)
        return False
