"""
Dispatcher of DIDComm messages: bytes and their origin in, a reply out; with replay protection, and the protocols that
need no account (reference section 7).

Replay protection (reference section 11, row 24): a forward may come twice by design. Any other authenticated message
changes or shows something, and a recorded one must not be served again, however much later. Since digests cannot be
kept for ever, a replay is detected by its digest or by its age.

* The digest of a message with `created_time` is kept for as long as the message is accepted, an hour from then; later
  the message is refused.
* The digest of one without it, or dated too far ahead, is kept for an hour, and for 30 days if it changes recipient
  DIDs, as a replay would change what is stored. Other messages change nothing lasting: `messages-received` names ids,
  which are never used again, or digests; a second grant changes nothing; the rest ends with the connection.

The capacity for digests is limited. When it is used up, only messages that change recipient DIDs or rotate an account
are refused, with 503. Others may use a quarter of it; beyond that they are served without being kept, since queues
that cannot be read or acknowledged while others are busy would be worse than a query that is answered twice. Digests
kept for 30 days may use half; beyond that they are kept for an hour.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
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
from mediatord.log_redaction_and_throttle import redact_failure, release_traceback
from mediatord.observability.event_recorder import EventRecorder, RequestRecord
from mediatord.protocol.didcomm import jwe
from mediatord.protocol.didcomm.did_document import strip_did_url
from mediatord.protocol.didcomm.discover_features import DISCLOSE, parse_queries, select_features
from mediatord.protocol.didcomm.message import MessageType, OutgoingMessage
from mediatord.protocol.didcomm.message_pickup import parse_message_ids
from mediatord.ratelimit.access_control import AccessList, RegistrationQuota
from mediatord.ratelimit.rate_limiter import RateLimiter, compute_request_cost
from mediatord.ratelimit.sliding_window import SlidingWindowLimiter
from mediatord.store.interfaces.messages import AcknowledgementResult
from mediatord.store.interfaces.store import FIRST_DAY_SECONDS, Account, INonceCache, IStore

# Seconds after `created_time` during which a message is accepted; clocks of wallets may be off by as much.
REPLAY_WINDOW = 3600.0
LONG_RETENTION = 30 * 86_400.0
# Seconds that a digest is kept after its message is no longer accepted.
_CLAIM_EXPIRY_MARGIN = 1.0
# Shares of the capacity: for digests that need not be kept, for those kept for long, and for those that have to be.
ORDINARY_SHARE, LONG_RETENTION_SHARE, FULL_SHARE = 0.25, 0.5, 1.0
# Messages that change the recipient DIDs of an account.
_KEYLIST_UPDATES = frozenset(
    (("coordinatemediation", 2, "keylistupdate"), ("coordinatemediation", 3, "recipientupdate"))
)
_ACKNOWLEDGEMENT = MessageType.parse("https://didcomm.org/messagepickup/3.0/messages-received").key


class ReplayRetention(NamedTuple):
    """
    How long a digest is kept.

    :param until: when it may be dropped.
    :param share: of the capacity that may be in use for it to be kept.
    :param fallback: retention where more is in use; None for none.
    :param needed: whether the message is refused if its digest cannot be kept.
    """

    until: float
    share: float
    fallback: ReplayRetention | None = None
    needed: bool = True


def choose_replay_retention(received: UnpackedMessage, account: Account | None, now: float) -> ReplayRetention:
    """
    Retention of a message's digest.

    :param account: of its sender.
    :raise ExpiredMessage: its `created_time` is so long ago that its digest may have been dropped.
    """
    # Without an authenticated sender a message neither changes nor shows anything.
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
    Whether a message with this digest is new, or need not be known.

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
    Trust ping, discover features, problem reports and empty messages.

    :param max_receive_bytes: returns the constraint to disclose.
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
        """A `ping-response`, unless none is requested or the sender is not authenticated."""
        if (
            received.message.require_body().get("response_requested", True) is False
            or received.authcrypt_sender is None
        ):
            return None
        return self._packer.answer(received.message, "https://didcomm.org/trust-ping/2.0/ping-response", {})

    async def queries(
        self, received: UnpackedMessage, account: Account | None, origin: MessageOrigin
    ) -> OutgoingMessage | None:
        """The features that match the queries."""
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
        """No reply; only the headers of the message have an effect."""
        return None


_log = Logger()

MessageHandler = Callable[[UnpackedMessage, Account | None, MessageOrigin], Awaitable[OutgoingMessage | None]]


@dataclass(frozen=True, slots=True)
class DIDCommProtocols:
    """The handlers that messages are dispatched to."""

    forward_router: ForwardRouter
    mediation_coordinator: MediationCoordinator
    pickup: Pickup
    small_protocols: SmallProtocols


@dataclass(frozen=True, slots=True)
class DIDCommContext:
    """Collaborators of the dispatcher."""

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
    """Opens, charges and serves messages of all transports."""

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
        """The handler of each message type except the forward."""
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
        Serve one message; never raises.

        The reply is for the connection that it came on. With 202, the effect of the message is durable.
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
            # Also if it failed late: resolving a sender may cost more than decrypting.
            admission.charge_failure(origin.peer, len(raw))
            raise

    async def _serve(self, record: RequestRecord, received: UnpackedMessage, origin: MessageOrigin) -> DIDCommReply:
        if received.message.type.key == FORWARD_KEY:
            await self._protocols.forward_router.forward(record, received, origin)
            return ACCEPTED
        account = await self._account(received)
        self._context.admission.check_allowance(account.did if account else None, origin.peer)
        ids = None if account is None else self._find_acknowledged(received, account, origin)
        acknowledged: AcknowledgementResult | None = None
        if account is not None and ids:
            acknowledged = await self._acknowledge_once(record, received, account, ids, origin)
        else:
            await self._refuse_replayed(record, received, account, origin)
        try:
            if account is not None and acknowledged is not None:
                answer = await self._answer_acknowledged(received, account, acknowledged, origin)
            else:
                await self._charge(record, account, origin)
                answer = await self._answer(received, account, origin)
        except Exception as error:
            if isinstance(error, (StoreUnavailable, RateLimitExceeded)) or not isinstance(error, MediatorError):
                # It was not served, so the same message may be sent again.
                await self._context.store.release_nonce(received.digest)
            raise
        if answer is None or received.authcrypt_sender is None:
            return ACCEPTED
        return await self._context.reply_router.send(answer, received.message, received.authcrypt_sender, origin)

    async def _refuse_replayed(
        self, record: RequestRecord, received: UnpackedMessage, account: Account | None, origin: MessageOrigin
    ) -> None:
        """
        Keep the message's digest.

        :raise ReplayedMessage: it came before.
        :raise ExpiredMessage: it is too old for that to be known.
        """
        now = self._context.clock.seconds()
        try:
            if not await claim_once(
                self._context.store, received.digest, choose_replay_retention(received, account, now)
            ):
                raise ReplayedMessage
        except (ReplayedMessage, ExpiredMessage) as error:
            self._record_replay(record, received, error, origin, now)
            raise

    def _record_replay(
        self,
        record: RequestRecord,
        received: UnpackedMessage,
        error: MediatorError,
        origin: MessageOrigin,
        now: float,
    ) -> None:
        # A replay is charged to the peer that sends it, which need not be the author.
        self._context.admission.charge_failure(origin.peer, record.size)
        created_time = received.message.created_time
        age_ms = None if created_time is None else (now - created_time) * 1000
        self._context.recorder.record_replay("didcomm", received.sender, error, age_ms=age_ms)

    def _find_acknowledged(
        self, received: UnpackedMessage, account: Account, origin: MessageOrigin
    ) -> list[str] | None:
        """
        Message ids of an acknowledgement that can be served in one store operation.

        :return: None for other messages, for those that are refused, and for those that change anything else.
        """
        message, sender = received.message, received.authcrypt_sender
        if message.type.key != _ACKNOWLEDGEMENT or message.from_prior is not None or sender is None:
            return None
        now = self._context.clock.seconds()
        if (message.expires_time is not None and message.expires_time <= now) or self._is_contact_due(account, now):
            return None
        if origin.session is not None and self._context.live.can_bind(origin.session, sender.did):
            return None
        try:
            self._require_authcrypt_sender(received)
            return parse_message_ids(message.require_body())
        except MediatorError as error:
            release_traceback(error)
            return None

    async def _acknowledge_once(
        self,
        record: RequestRecord,
        received: UnpackedMessage,
        account: Account,
        ids: Sequence[str],
        origin: MessageOrigin,
    ) -> AcknowledgementResult:
        """
        Keep the message's digest and remove the messages; the order and the errors are those of other messages.

        :raise ReplayedMessage: it came before.
        :raise ExpiredMessage: it is too old for that to be known.
        """
        context, now = self._context, self._context.clock.seconds()
        assert received.authcrypt_sender is not None
        with_status = not context.reply_router.is_reply_discarded(received.message, received.authcrypt_sender, origin)
        cost = compute_request_cost(record.size)
        try:
            retention = choose_replay_retention(received, account, now)
            await context.admission.charge_account(account.did, origin.peer, cost)
            try:
                acknowledged = await self._protocols.pickup.acknowledge_once(
                    account, ids, (received.digest, retention.until, retention.share), with_status=with_status
                )
                if acknowledged is None:
                    raise ReplayedMessage
            except MediatorError:
                context.admission.refund(account.did, origin.peer, outgoing=False, cost=cost)
                raise
        except (ReplayedMessage, ExpiredMessage) as error:
            self._record_replay(record, received, error, origin, now)
            raise
        return acknowledged

    async def _answer_acknowledged(
        self,
        received: UnpackedMessage,
        account: Account,
        acknowledged: AcknowledgementResult,
        origin: MessageOrigin,
    ) -> OutgoingMessage | None:
        """Record an acknowledgement that was carried out; returns the reply."""
        pickup, sender = self._protocols.pickup, received.authcrypt_sender
        assert sender is not None
        pickup.record_removed(acknowledged.removed)
        if sender.did != sender.document.did:
            await self._remember_sender(sender)
        if acknowledged.status is not None:
            return self._draft(received, pickup.make_status(account, origin, acknowledged.status))
        if self._context.reply_router.is_reply_discarded(received.message, sender, origin):
            return None
        return self._draft(received, await pickup.status(account, origin))

    async def _remember_sender(self, sender: AuthcryptSender) -> None:
        """Store the long form of an account's DID, if it has one."""
        # On a full disk it cannot be stored, but messages can be fetched and deleted all the same.
        with suppress(StoreUnavailable):
            await self._context.unpacker.keep(sender)

    async def _account(self, received: UnpackedMessage) -> Account | None:
        """The sender's account; None for a denied sender."""
        authcrypt_sender = received.authcrypt_sender
        if authcrypt_sender is None or self._context.access.denies(authcrypt_sender.did):
            return None
        return await self._context.store.get_account(authcrypt_sender.did)

    async def _charge(self, record: RequestRecord, account: Account | None, origin: MessageOrigin) -> None:
        """Charge the account, or the address if there is none, for opening a message."""
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
            if self._is_contact_due(account, self._context.clock.seconds()):
                await self._context.store.record_contact(account.did)
            if received.authcrypt_sender.did != received.authcrypt_sender.document.did:
                await self._remember_sender(received.authcrypt_sender)
            if origin.session is not None:
                await self._context.live.bind(origin.session, received.authcrypt_sender)
        return await handler(received, account, origin)

    async def _rotate(self, received: UnpackedMessage, origin: MessageOrigin) -> bool:
        """Rotate an account whose holder proves to have a new DID (reference 2.3); whether that was done."""
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

    def _is_contact_due(self, account: Account, now: float) -> bool:
        """Whether the account's last contact has to be recorded, once a day."""
        return not 0 <= now - account.seen_at < FIRST_DAY_SECONDS

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
        """Replies with a `status`; as that costs as much as the rest, only if the reply goes anywhere."""
        authcrypt_sender = self._require_authcrypt_sender(received)
        if account is None:
            raise MediationNotGranted
        await self._protocols.pickup.acknowledge(received, account)
        if self._context.reply_router.is_reply_discarded(received.message, authcrypt_sender, origin):
            return None
        return self._draft(received, await self._protocols.pickup.status(account, origin))

    def _require_authcrypt_sender(self, received: UnpackedMessage) -> AuthcryptSender:
        """
        The authenticated sender of a request that changes or shows something.

        :raise AuthcryptRequired: there is none.
        :raise MisaddressedMessage: it is meant for somebody else, or signed and addressed to nobody (reference 1.8).
        """
        authcrypt_sender = received.authcrypt_sender
        if authcrypt_sender is None:
            raise AuthcryptRequired
        to = received.message.to
        for one in to:
            if self._context.owns(strip_did_url(one)):
                return authcrypt_sender
        if to or received.signer:
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
