"""
For how long a request is remembered, so that nobody can repeat it (reference section 11, row 24).

A forward may come twice by design. Any other authenticated message changes or shows something: whoever has recorded
one must not have it carried out again, however much later. It cannot be remembered for ever, so it is told by two
things: whether it is remembered, and when it was made.

* One that says when it was made is remembered for as long as it is taken, an hour from then, and refused after that.
* One that does not say so, or is dated too far ahead, is remembered for an hour, and for 30 days where it is about
  which DIDs are registered: of those a repetition would change what is stored. The others change nothing that stays
  (`messages-received` names ids, which are never used again, or digests; a grant is the same the second time), and
  end with the connection that they came on.

There is room for so many at most. Only what changes registrations, or moves an account, is refused with 503 where it
is taken. All else may use a quarter, and beyond that is carried out without being remembered: mail that nobody can
fetch or acknowledge because others are busy would be worse than a question that is answered twice. What is remembered
for long may use half; beyond that it is remembered for an hour.

Trust ping, discover features, problem reports and empty messages (reference section 7).

The DIDComm half as the transports see it: bytes and their origin in, a reply out.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger

from mediatord.didcomm.endpoint_delivery import ReplyRouter
from mediatord.didcomm.forward_router import FORWARD_KEY, FORWARD_NAME, ForwardRouter
from mediatord.didcomm.live_delivery import LiveDelivery
from mediatord.didcomm.mediation import MediationCoordinator
from mediatord.didcomm.messages import (
    ACCEPTED,
    AuthcryptSender,
    DIDCommReply,
    MessageOrigin,
    MessagePacker,
    MessageUnpacker,
    ResponseContent,
    UnpackedMessage,
)
from mediatord.didcomm.pickup import Pickup
from mediatord.errors import (
    AuthcryptRequired,
    ExpiredMessage,
    InternalFault,
    InvalidEnvelope,
    MediationNotGranted,
    MediatorError,
    MisaddressedMessage,
    RateLimitExceeded,
    ReplayCacheFull,
    ReplayedMessage,
    StoreUnavailable,
    TooManyErrors,
    UnsupportedMediaType,
    UnsupportedMessageType,
)
from mediatord.failure_logging import redact_failure, release_traceback
from mediatord.observability.event_recorder import EventRecorder, RequestRecord
from mediatord.protocol.didcomm import jwe
from mediatord.protocol.didcomm.did_document import strip_did_url
from mediatord.protocol.didcomm.discover_features import (
    DISCLOSE,
    parse_queries,
    select_features,
)
from mediatord.protocol.didcomm.message import MessageType, OutgoingMessage
from mediatord.ratelimit.access_control import AccessList, RegistrationQuota
from mediatord.ratelimit.rate_limiter import RateLimiter, compute_request_cost
from mediatord.ratelimit.sliding_window import SlidingWindowLimiter
from mediatord.store.interfaces.accounts import FIRST_DAY_SECONDS, Account
from mediatord.store.interfaces.store import INonceCache, IStore

# Seconds from when a message says it was made to when it is taken at last; clocks of wallets may be off by that much.
REPLAY_WINDOW = 3600.0
LONG_RETENTION = 30 * 86_400.0
# Seconds by which a claim outlives the last moment at which its message is taken.
_CLAIM_EXPIRY_MARGIN = 1.0
# Of all the room there is: for what need not be remembered, for what is remembered for long, and for what has to be.
ORDINARY_SHARE, LONG_RETENTION_SHARE, FULL_SHARE = 0.25, 0.5, 1.0
# What changes the registrations of an account.
_KEYLIST_UPDATES = frozenset(
    (("coordinatemediation", 2, "keylistupdate"), ("coordinatemediation", 3, "recipientupdate"))
)


class ReplayRetention(NamedTuple):
    """
    :param until: when it may be forgotten.
    :param share: of all the room there is, how much may be taken already.
    :param otherwise: how it is remembered where that is taken; None for not at all.
    :param needed: whether it is refused if it cannot be remembered.
    """

    until: float
    share: float
    fallback: ReplayRetention | None = None
    needed: bool = True


def choose_replay_retention(received: UnpackedMessage, account: Account | None, now: float) -> ReplayRetention:
    """
    How a message is to be remembered.

    :param account: of its sender.
    :raise ExpiredMessage: it was made too long ago for anybody to know whether it came before.
    """
    # What nobody is proven to have sent changes nothing, and shows nothing.
    made = None if received.authcrypt_sender is None else received.message.created_time
    registers = account is not None and received.message.type.key in _KEYLIST_UPDATES
    needed = registers or received.message.from_prior is not None
    share = FULL_SHARE if needed else ORDINARY_SHARE
    if made is not None and made <= now + REPLAY_WINDOW:
        if made < now - REPLAY_WINDOW:
            raise ExpiredMessage
        return ReplayRetention(max(now, made) + REPLAY_WINDOW + _CLAIM_EXPIRY_MARGIN, share, needed=needed)
    brief = ReplayRetention(now + REPLAY_WINDOW, share, needed=needed)
    return ReplayRetention(now + LONG_RETENTION, LONG_RETENTION_SHARE, fallback=brief) if registers else brief


async def claim_once(store: INonceCache, digest: bytes, memory: ReplayRetention) -> bool:
    """
    Whether a message with this digest is new, as far as that has to be known.

    :raise ReplayCacheFull: it would be, and has to be remembered.
    """
    try:
        return await store.claim_nonce(digest, memory.until, memory.share)
    except ReplayCacheFull:
        if memory.fallback is not None:
            return await claim_once(store, digest, memory.fallback)
        if memory.needed:
            raise
        return True


MAX_PROBLEM_REPORTS = 10
PROBLEM_REPORT_PERIOD = 3600.0


class SmallProtocols:
    """
    Answers that need no account.

    :param max_receive_bytes: disclosed as a constraint, as it is now.
    """

    def __init__(self, clock: IReactorTime, packer: MessagePacker, max_receive_bytes: Callable[[], int]) -> None:
        self._clock = clock
        self._packer = packer
        self._max_receive_bytes = max_receive_bytes
        self._reports = SlidingWindowLimiter(MAX_PROBLEM_REPORTS, PROBLEM_REPORT_PERIOD)
        self._told = SlidingWindowLimiter(1, PROBLEM_REPORT_PERIOD)

    async def ping(
        self, received: UnpackedMessage, account: Account | None, origin: MessageOrigin
    ) -> OutgoingMessage | None:
        """A `ping-response`, unless none is wanted or nobody is known to send it to."""
        if (
            received.message.require_body().get("response_requested", True) is False
            or received.authcrypt_sender is None
        ):
            return None
        return self._packer.answer(received.message, "https://didcomm.org/trust-ping/2.0/ping-response", {})

    async def queries(
        self, received: UnpackedMessage, account: Account | None, origin: MessageOrigin
    ) -> OutgoingMessage | None:
        """What is served, as far as it was asked for."""
        found = select_features(parse_queries(received.message.require_body()), self._max_receive_bytes())
        return self._packer.answer(received.message, DISCLOSE, {"disclosures": found})

    async def problem_report(
        self, received: UnpackedMessage, account: Account | None, origin: MessageOrigin
    ) -> OutgoingMessage | None:
        """
        Never answered, but for one `max-errors-exceeded` to a peer that sends too many (reference 7.3).

        :raise TooManyErrors: once an hour and peer.
        """
        who, now = received.sender or origin.peer, self._clock.seconds()
        if self._reports.admit(who, now) and not self._told.admit(who, now) and received.authcrypt_sender:
            raise TooManyErrors
        return None

    async def ignore(
        self, received: UnpackedMessage, account: Account | None, origin: MessageOrigin
    ) -> OutgoingMessage | None:
        """Only the headers of the message matter."""
        return None


_log = Logger()

MessageHandler = Callable[[UnpackedMessage, Account | None, MessageOrigin], Awaitable[OutgoingMessage | None]]


@dataclass(frozen=True, slots=True)
class DIDCommProtocols:
    """The use cases that messages are dispatched to."""

    forward_router: ForwardRouter
    mediation_coordinator: MediationCoordinator
    pickup: Pickup
    small_protocols: SmallProtocols


@dataclass(frozen=True, slots=True)
class DIDCommContext:
    """The rooms that every message passes."""

    clock: IReactorTime
    store: IStore
    admission: RateLimiter
    registrations: RegistrationQuota
    unpacker: MessageUnpacker
    packer: MessagePacker
    reply_router: ReplyRouter
    live: LiveDelivery
    recorder: EventRecorder
    owns: Callable[[str], bool]
    access: AccessList


class DIDCommDispatcher:
    """Receives messages from all transports, whatever they are."""

    def __init__(self, context: DIDCommContext, protocols: DIDCommProtocols) -> None:
        self._context = context
        self._protocols = protocols
        self._names = {FORWARD_KEY: FORWARD_NAME}
        self._handlers: dict[tuple[str, int, str], MessageHandler] = {}
        for name, handler in self._table().items():
            key = MessageType.parse(f"https://didcomm.org/{name}").key
            self._names[key] = name
            self._handlers[key] = handler

    def _table(self) -> Mapping[str, MessageHandler]:
        """Every message type that is served, but for the forward."""
        mediation_coordinator, pickup, small_protocols = (
            self._protocols.mediation_coordinator,
            self._protocols.pickup,
            self._protocols.small_protocols,
        )
        update, query = (
            self._for_account(mediation_coordinator.update),
            self._for_account(mediation_coordinator.query),
        )
        return {
            "coordinate-mediation/2.0/mediate-request": self._mediate_request,
            "coordinate-mediation/2.0/keylist-update": update,
            "coordinate-mediation/2.0/keylist-query": query,
            "coordinate-mediation/3.0/mediate-request": self._mediate_request,
            "coordinate-mediation/3.0/recipient-update": update,
            "coordinate-mediation/3.0/recipient-query": query,
            "messagepickup/3.0/status-request": self._for_account(pickup.status_request),
            "messagepickup/3.0/delivery-request": self._for_account(pickup.delivery_request),
            "messagepickup/3.0/messages-received": self._messages_received,
            "messagepickup/3.0/live-delivery-change": self._for_account(pickup.live_delivery_change),
            "trust-ping/2.0/ping": small_protocols.ping,
            "trust-ping/2.0/ping-response": small_protocols.ignore,
            "discover-features/2.0/queries": small_protocols.queries,
            "discover-features/2.0/disclose": small_protocols.ignore,
            "report-problem/2.0/problem-report": small_protocols.problem_report,
            "empty/1.0/empty": small_protocols.ignore,
        }

    async def receive(self, raw: bytes, origin: MessageOrigin) -> DIDCommReply:
        """
        Take one message; never raises.

        The reply is for the connection it came on. A 202 means that whatever it asked for is durable.
        """
        record = self._context.recorder.begin_request("didcomm", origin.peer, len(raw))
        received: UnpackedMessage | None = None
        memory, peer, size = self._context.admission.memory, origin.peer, len(raw)
        has_memory = memory.try_acquire(peer, size)
        try:
            if not has_memory:
                await memory.acquire(peer, size)
                has_memory = True
            received = await self._open(raw, origin)
            reply = await self._serve(record, received, origin)
        except MediatorError as error:
            release_traceback(error)
            reply = self._context.packer.refuse(error, received)
        except Exception as error:
            _log.failure("serving a message failed", redact_failure())
            release_traceback(error)
            reply = self._context.packer.refuse(InternalFault(), None)
        finally:
            if has_memory:
                memory.release(peer, size)
        self._finish_record(record, received, reply, origin)
        return reply

    async def _open(self, raw: bytes, origin: MessageOrigin) -> UnpackedMessage:
        admission = self._context.admission
        await admission.check_before_read(origin.peer, len(raw), compute_request_cost(len(raw)))
        try:
            envelope = jwe.parse_envelope(raw)
        except MediatorError as error:
            try:
                admission.check_before_decryption(origin.peer, authenticated=False)
            finally:
                admission.charge_failure(origin.peer, len(raw))
            if origin.has_foreign_content_type and isinstance(error, InvalidEnvelope):
                raise UnsupportedMediaType from None
            raise
        admission.check_before_decryption(origin.peer, authenticated=envelope.authenticated)
        try:
            return await self._context.unpacker.open(envelope, origin.peer)
        except (StoreUnavailable, RateLimitExceeded):
            raise
        except MediatorError:
            # Also what only failed late: resolving a sender may cost more than decrypting.
            admission.charge_failure(origin.peer, len(raw))
            raise

    async def _serve(self, record: RequestRecord, received: UnpackedMessage, origin: MessageOrigin) -> DIDCommReply:
        if received.message.type.key == FORWARD_KEY:
            await self._protocols.forward_router.forward(record, received, origin)
            return ACCEPTED
        account = await self._account(received)
        self._context.admission.check_allowance(account.did if account else None, origin.peer)
        await self._refuse_replayed(record, received, account, origin)
        try:
            await self._charge(record, account, origin)
            answer = await self._answer(received, account, origin)
        except Exception as error:
            if isinstance(error, (StoreUnavailable, RateLimitExceeded)) or not isinstance(error, MediatorError):
                # It was not done, so the very same message may come again.
                await self._context.store.release_nonce(received.digest)
            raise
        if answer is None or received.authcrypt_sender is None:
            return ACCEPTED
        return await self._context.reply_router.send(answer, received.message, received.authcrypt_sender, origin)

    async def _refuse_replayed(
        self, record: RequestRecord, received: UnpackedMessage, account: Account | None, origin: MessageOrigin
    ) -> None:
        """
        Remember it.

        :raise ReplayedMessage: it came before.
        :raise ExpiredMessage: it is too old for that to be known.
        """
        now, message = self._context.clock.seconds(), received.message
        try:
            if not await claim_once(
                self._context.store, received.digest, choose_replay_retention(received, account, now)
            ):
                raise ReplayedMessage
        except (ReplayedMessage, ExpiredMessage) as error:
            # Whoever sends it again pays for that, which need not be who wrote it.
            self._context.admission.charge_failure(origin.peer, record.size)
            age_ms = None if message.created_time is None else (now - message.created_time) * 1000
            self._context.recorder.record_replay("didcomm", received.sender, error, age_ms=age_ms)
            raise

    async def _account(self, received: UnpackedMessage) -> Account | None:
        """The sender's account; one that is denied is answered as if it had none."""
        authcrypt_sender = received.authcrypt_sender
        if authcrypt_sender is None or self._context.access.denies(authcrypt_sender.did):
            return None
        return await self._context.store.get_account(authcrypt_sender.did)

    async def _charge(self, record: RequestRecord, account: Account | None, origin: MessageOrigin) -> None:
        """Whatever a message turns out to be, it was opened: its account pays for that, or its address."""
        if account is None:
            await self._context.admission.charge_anonymous(origin.peer, compute_request_cost(record.size))
        else:
            await self._context.admission.charge_account(account.did, origin.peer, compute_request_cost(record.size))

    async def _answer(
        self, received: UnpackedMessage, account: Account | None, origin: MessageOrigin
    ) -> OutgoingMessage | None:
        message = received.message
        handler = self._handlers.get(message.type.key)
        if handler is None:
            raise UnsupportedMessageType
        if message.expires_time is not None and message.expires_time <= self._context.clock.seconds():
            raise ExpiredMessage
        if await self._rotate(received, origin):
            account = await self._account(received)
        if account is not None and received.authcrypt_sender is not None:
            await self._touch(account)
            # On a full disk it cannot be kept, and what waits can be fetched and deleted all the same.
            with suppress(StoreUnavailable):
                await self._context.unpacker.keep(received.authcrypt_sender)
            if origin.session is not None:
                await self._context.live.bind(origin.session, received.authcrypt_sender)
        return await handler(received, account, origin)

    async def _rotate(self, received: UnpackedMessage, origin: MessageOrigin) -> bool:
        """Move an account whose holder proves to go by a new DID (reference 2.3); whether that was done."""
        if received.message.from_prior is None:
            return False
        authcrypt_sender = self._require_authcrypt_sender(received)
        prior = await self._context.unpacker.rotation(received.message, origin.peer)
        if prior is None or any(map(self._context.access.denies, (prior, authcrypt_sender.did))):
            return False
        size = len(authcrypt_sender.did) + len(authcrypt_sender.document.did)
        await self._context.registrations.charge_registration(origin.peer, size)
        try:
            moved = await self._context.store.move_account(prior, authcrypt_sender.did)
        except MediatorError:
            self._context.registrations.refund(origin.peer, size)
            raise
        if not moved:
            self._context.registrations.refund(origin.peer, size)
            return False
        self._context.recorder.record_did_rotation(authcrypt_sender.did)
        await self._context.live.rotate(prior, authcrypt_sender, origin.session)
        return True

    async def _touch(self, account: Account) -> None:
        """Record that it was in contact, once a day."""
        if not 0 <= self._context.clock.seconds() - account.seen_at < FIRST_DAY_SECONDS:
            await self._context.store.record_contact(account.did)

    def _for_account(
        self, handler: Callable[[UnpackedMessage, Account, MessageOrigin], Awaitable[ResponseContent]]
    ) -> MessageHandler:
        """Let only enrolled accounts through (reference 5.3, 6.1)."""

        async def enrolled(
            received: UnpackedMessage, account: Account | None, origin: MessageOrigin
        ) -> OutgoingMessage:
            self._require_authcrypt_sender(received)
            if account is None:
                raise MediationNotGranted
            return self._draft(received, await handler(received, account, origin))

        return enrolled

    async def _mediate_request(
        self, received: UnpackedMessage, account: Account | None, origin: MessageOrigin
    ) -> OutgoingMessage:
        authcrypt_sender = self._require_authcrypt_sender(received)
        answer = await self._protocols.mediation_coordinator.mediate_request(
            received, authcrypt_sender, account, origin
        )
        await self._context.unpacker.keep(authcrypt_sender)
        return self._draft(received, answer)

    async def _messages_received(
        self, received: UnpackedMessage, account: Account | None, origin: MessageOrigin
    ) -> OutgoingMessage | None:
        """Answered with a `status`, which costs as much as the rest: it is only made for who wants it."""
        authcrypt_sender = self._require_authcrypt_sender(received)
        if account is None:
            raise MediationNotGranted
        await self._protocols.pickup.acknowledge(received, account)
        if self._context.reply_router.is_reply_discarded(received.message, authcrypt_sender, origin):
            return None
        return self._draft(received, await self._protocols.pickup.status(account, origin))

    def _require_authcrypt_sender(self, received: UnpackedMessage) -> AuthcryptSender:
        """
        The authenticated sender of a request that changes or reveals something.

        :raise AuthcryptRequired: there is none.
        :raise MisaddressedMessage: it is meant for somebody else, or signed and addressed to nobody (reference 1.8).
        """
        authcrypt_sender = received.authcrypt_sender
        if authcrypt_sender is None:
            raise AuthcryptRequired
        to = received.message.to
        if (to or received.signer) and not any(self._context.owns(strip_did_url(one)) for one in to):
            raise MisaddressedMessage
        return authcrypt_sender

    def _draft(self, received: UnpackedMessage, answer: ResponseContent) -> OutgoingMessage:
        return OutgoingMessage(
            id=self._context.packer.new_id(),
            type=answer.type,
            body=answer.body,
            thid=received.message.thread,
            attachments=answer.attachments,
        )

    def _finish_record(
        self, record: RequestRecord, received: UnpackedMessage | None, reply: DIDCommReply, origin: MessageOrigin
    ) -> None:
        self._context.recorder.end_request(
            record,
            status=reply.status,
            fault=reply.fault,
            kind=self._names.get(received.message.type.key) if received else None,
            sender=received.sender if received else None,
            session=origin.session.name if origin.session else None,
            code=reply.code,
        )
