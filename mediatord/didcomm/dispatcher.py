"""
Dispatcher of DIDComm messages: bytes and their origin in, a reply out; with replay protection, and routing of
replies: back on the connection, by POST to the sender's endpoint, or nowhere (reference 3.3).

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

from collections.abc import Coroutine
from contextlib import suppress
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar

from mediatord.didcomm.context import DIDCommContext, MessageRequest
from mediatord.didcomm.endpoint_delivery import EndpointDelivery
from mediatord.didcomm.forward_router import FORWARD_KEY, FORWARD_NAME, ForwardRouter
from mediatord.didcomm.mediation import MediationCoordinator
from mediatord.didcomm.messages import ACCEPTED, AuthcryptSender, MessageOrigin, UnpackedMessage
from mediatord.didcomm.pickup import LiveDelivery, Pickup
from mediatord.didcomm.utility_protocols import UtilityProtocols
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
    UnsupportedMediaType,
    UnsupportedMessageType,
)
from mediatord.observability.event_recorder import RequestRecord
from mediatord.protocol.didcomm import jwe
from mediatord.protocol.didcomm.did_document import strip_did_url
from mediatord.protocol.didcomm.jwe import ENCRYPTED_MEDIA_TYPE
from mediatord.protocol.didcomm.message import Message, MessageType, OutgoingMessage
from mediatord.protocol.didcomm.message_pickup import parse_message_ids
from mediatord.ratelimit.admission import RequestAdmission, RequestReply
from mediatord.ratelimit.rate_limiter import compute_request_cost
from mediatord.runtime.memory_reclaimer import release_traceback
from mediatord.store.interfaces.messages import AcknowledgementResult
from mediatord.store.interfaces.store import FIRST_DAY_SECONDS, Account, INonceCache

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


ReplyRoute = Literal["connection", "endpoint", "nowhere"]


class DIDCommDispatcher:
    """Opens, charges and serves messages of all transports."""

    def __init__(
        self,
        context: DIDCommContext,
        requests: RequestAdmission,
        forward_router: ForwardRouter,
        live: LiveDelivery,
        pickup: Pickup,
        utility_protocols: UtilityProtocols,
        endpoints: EndpointDelivery,
    ) -> None:
        self._context = context
        self._requests = requests
        self._forward_router = forward_router
        self._live = live
        self._pickup = pickup
        self._endpoints = endpoints
        self._mediation = MediationCoordinator(context)
        self._handlers = _parse_names(
            {
                "coordinate-mediation/2.0/mediate-request": self._mediate_request,
                "coordinate-mediation/3.0/mediate-request": self._mediate_request,
                "trust-ping/2.0/ping": utility_protocols.ping,
                "trust-ping/2.0/ping-response": utility_protocols.ignore,
                "discover-features/2.0/queries": utility_protocols.queries,
                "discover-features/2.0/disclose": utility_protocols.ignore,
                "report-problem/2.0/problem-report": utility_protocols.problem_report,
                "empty/1.0/empty": utility_protocols.ignore,
            }
        )
        # Of enrolled accounts only (reference 5.3, 6.1).
        self._account_handlers = _parse_names(
            {
                "coordinate-mediation/2.0/keylist-update": self._mediation.update,
                "coordinate-mediation/2.0/keylist-query": self._mediation.query,
                "coordinate-mediation/3.0/recipient-update": self._mediation.update,
                "coordinate-mediation/3.0/recipient-query": self._mediation.query,
                "messagepickup/3.0/status-request": pickup.status_request,
                "messagepickup/3.0/delivery-request": pickup.delivery_request,
                "messagepickup/3.0/messages-received": self._messages_received,
                "messagepickup/3.0/live-delivery-change": pickup.live_delivery_change,
            }
        )
        self._names = {FORWARD_KEY: FORWARD_NAME}
        self._names |= {key: name for key, (name, _) in self._handlers.items()}
        self._names |= {key: name for key, (name, _) in self._account_handlers.items()}

    def receive(self, raw: bytes, origin: MessageOrigin) -> Coroutine[Any, Any, RequestReply]:
        """
        Serve one message.

        The reply is for the connection that it came on. With 202, the effect of the message is durable.

        :raise ShutdownInProgress: the daemon is stopping; nothing else is raised.
        """
        opened: list[UnpackedMessage] = []
        work, refuse = partial(self._serve, raw, origin, opened), partial(self._refuse, opened)
        session = origin.session.name if origin.session else None
        return self._requests.serve("didcomm", origin.peer, len(raw), work, refuse, session)

    def _refuse(self, opened: list[UnpackedMessage], error: MediatorError) -> RequestReply:
        is_opened = opened and not isinstance(error, InternalFault)
        return self._context.packer.refuse(error, opened[0] if is_opened else None)

    async def _serve(
        self, raw: bytes, origin: MessageOrigin, opened: list[UnpackedMessage], record: RequestRecord
    ) -> RequestReply:
        context, cost = self._context, compute_request_cost(len(raw))
        received = await self._open(raw, origin, cost)
        opened.append(received)
        message, sender = received.message, received.authcrypt_sender
        record.kind, record.sender = self._names.get(message.type.key), received.sender
        if message.type.key == FORWARD_KEY:
            await self._forward_router.forward(record, received, origin)
            return ACCEPTED
        account = await self._find_account(received)
        context.rate_limiter.check_allowance(account.did if account else None, origin.peer)
        request = MessageRequest(received, origin, record, cost, account)
        answer = await self._answer_once(request)
        if answer is None or sender is None:
            return ACCEPTED
        route = self._choose_route(message, sender, origin)
        if route == "nowhere":
            return ACCEPTED
        packed = context.packer.pack(answer, sender)
        if route == "connection":
            return RequestReply(200, packed, ENCRYPTED_MEDIA_TYPE)
        self._endpoints.reply(sender.document, packed, origin.peer)
        return ACCEPTED

    async def _answer_once(self, request: MessageRequest) -> OutgoingMessage | None:
        """
        The answer, unless the message is a replay.

        :raise ReplayedMessage: it came before.
        :raise ExpiredMessage: it is too old for that to be known.
        """
        limiter, peer, account = self._context.rate_limiter, request.origin.peer, request.account
        sender = request.received.authcrypt_sender
        acknowledged: AcknowledgementResult | None = None
        if account is not None and sender is not None and (ids := self._find_acknowledged(request, account, sender)):
            acknowledged = await self._acknowledge_once(request, account, sender, ids)
        else:
            await self._refuse_replayed(request)
        try:
            if account is not None and sender is not None and acknowledged is not None:
                self._live.record_removed(acknowledged.removed)
                if sender.did != sender.document.did:
                    await self._remember_long_form(sender)
                if acknowledged.status is None:
                    return await self._status_if_wanted(request, account, sender)
                return self._pickup.make_status(request, account, acknowledged.status)
            if account is None:
                await limiter.charge_anonymous(peer, request.cost)
            else:
                await limiter.charge_account(account.did, peer, request.cost)
            return await self._answer(request)
        except Exception as error:
            if isinstance(error, (StoreUnavailable, RateLimitExceeded)) or not isinstance(error, MediatorError):
                # It was not served, so the same message may be sent again.
                await self._context.store.release_nonce(request.received.digest)
            raise

    async def _open(self, raw: bytes, origin: MessageOrigin, cost: int) -> UnpackedMessage:
        limiter = self._context.rate_limiter
        await limiter.check_before_read(origin.peer, len(raw), cost)
        try:
            envelope = jwe.parse_envelope(raw)
        except MediatorError as error:
            try:
                limiter.check_before_decryption(origin.peer, authenticated=False)
            finally:
                limiter.charge_failure(origin.peer, len(raw))
            if origin.has_foreign_content_type and isinstance(error, InvalidEnvelope):
                raise UnsupportedMediaType from None
            raise
        if envelope.sender_kid is None:
            limiter.check_before_decryption(origin.peer, authenticated=False)
        try:
            return await self._context.unpacker.open(envelope, origin.peer)
        except (StoreUnavailable, RateLimitExceeded):
            raise
        except MediatorError:
            # Also if it failed late: resolving a sender may cost more than decrypting.
            limiter.charge_failure(origin.peer, len(raw))
            raise

    def _choose_route(self, to: Message, sender: AuthcryptSender, origin: MessageOrigin) -> ReplyRoute:
        """Where a reply goes, by `return_route` and the sender's document."""
        route = (to.return_route or "").lower()
        if route == "thread" and to.return_route_thread not in (None, to.thread):
            route = "none"
        if route in ("all", "thread"):
            return "connection"
        if route != "none" and origin.session is not None:
            return "connection"
        if self._endpoints.can_reply(sender.document, origin.peer):
            return "endpoint"
        return "nowhere" if route == "none" else "connection"

    async def _refuse_replayed(self, request: MessageRequest) -> None:
        """
        Keep the message's digest.

        :raise ReplayedMessage: it came before.
        :raise ExpiredMessage: it is too old for that to be known.
        """
        received, now = request.received, self._context.clock.seconds()
        try:
            retention = choose_replay_retention(received, request.account, now)
            if not await claim_once(self._context.store, received.digest, retention):
                raise ReplayedMessage
        except (ReplayedMessage, ExpiredMessage) as error:
            self._record_replay(request, error, now)
            raise

    def _record_replay(self, request: MessageRequest, error: MediatorError, now: float) -> None:
        # A replay is charged to the peer that sends it, which need not be the author.
        self._context.rate_limiter.charge_failure(request.origin.peer, request.record.size)
        created_time = request.received.message.created_time
        age_ms = None if created_time is None else (now - created_time) * 1000
        self._context.recorder.record_replay("didcomm", request.received.sender, error, age_ms=age_ms)

    def _find_acknowledged(
        self, request: MessageRequest, account: Account, sender: AuthcryptSender
    ) -> list[str] | None:
        """
        Message ids of an acknowledgement that can be served in one store operation.

        :return: None for other messages, for those that are refused, and for those that change anything else.
        """
        message, session, now = request.received.message, request.origin.session, self._context.clock.seconds()
        if message.type.key != _ACKNOWLEDGEMENT or message.from_prior is not None:
            return None
        is_expired = message.expires_time is not None and message.expires_time <= now
        # The last contact is recorded once a day.
        if is_expired or not 0 <= now - account.seen_at < FIRST_DAY_SECONDS:
            return None
        if session is not None and self._live.can_bind(session, sender.did):
            return None
        try:
            self._require_authcrypt_sender(request.received)
            return parse_message_ids(message.require_body())
        except MediatorError as error:
            release_traceback(error)
            return None

    async def _acknowledge_once(
        self, request: MessageRequest, account: Account, sender: AuthcryptSender, ids: list[str]
    ) -> AcknowledgementResult:
        """
        Keep the message's digest, remove the messages and read the status, in one store operation; the order and the
        errors are those of other messages. Without capacity for the digest, the messages are removed all the same.

        :raise ReplayedMessage: it came before.
        :raise ExpiredMessage: it is too old for that to be known.
        """
        context, peer, now = self._context, request.origin.peer, self._context.clock.seconds()
        message, digest = request.received.message, request.received.digest
        # As a status costs as much as the rest, it is only read if the reply goes anywhere.
        with_status = self._choose_route(message, sender, request.origin) != "nowhere"
        try:
            until, share, *_ = choose_replay_retention(request.received, account, now)
            await context.rate_limiter.charge_account(account.did, peer, request.cost)
            try:
                try:
                    acknowledged = await context.store.acknowledge_once(
                        account.did, ids, digest, until, share, with_status=with_status
                    )
                except ReplayCacheFull:
                    acknowledged = AcknowledgementResult(await context.store.acknowledge(account.did, ids))
                if acknowledged is None:
                    raise ReplayedMessage
            except MediatorError:
                context.rate_limiter.refund(account.did, peer, outgoing=False, cost=request.cost)
                raise
        except (ReplayedMessage, ExpiredMessage) as error:
            self._record_replay(request, error, now)
            raise
        return acknowledged

    async def _messages_received(self, request: MessageRequest, account: Account) -> OutgoingMessage | None:
        """The general path of acknowledgements."""
        await self._pickup.acknowledge(request, account)
        assert request.received.authcrypt_sender is not None
        return await self._status_if_wanted(request, account, request.received.authcrypt_sender)

    async def _status_if_wanted(
        self, request: MessageRequest, account: Account, sender: AuthcryptSender
    ) -> OutgoingMessage | None:
        if self._choose_route(request.received.message, sender, request.origin) == "nowhere":
            return None
        return await self._pickup.status(request, account)

    async def _remember_long_form(self, sender: AuthcryptSender) -> None:
        """Store the long form of an account's DID."""
        # On a full disk it cannot be stored, but messages can be fetched and deleted all the same.
        with suppress(StoreUnavailable):
            await self._context.unpacker.keep(sender)

    async def _find_account(self, received: UnpackedMessage) -> Account | None:
        """The sender's account; None for a denied sender."""
        sender = received.authcrypt_sender
        if sender is None or self._context.access.denies(sender.did):
            return None
        return await self._context.store.get_account(sender.did)

    async def _answer(self, request: MessageRequest) -> OutgoingMessage | None:
        received, message, now = request.received, request.received.message, self._context.clock.seconds()
        if message.type.key not in self._names:
            raise UnsupportedMessageType
        if message.expires_time is not None and message.expires_time <= now:
            raise ExpiredMessage
        if message.from_prior is not None and await self._rotate(request):
            request.account = await self._find_account(received)
        if request.account is not None and received.authcrypt_sender is not None:
            await self._record_contact(request, request.account, received.authcrypt_sender)
        if message.type.key in self._handlers:
            return await self._handlers[message.type.key][1](request)
        self._require_authcrypt_sender(received)
        if request.account is None:
            raise MediationNotGranted
        return await self._account_handlers[message.type.key][1](request, request.account)

    async def _record_contact(self, request: MessageRequest, account: Account, sender: AuthcryptSender) -> None:
        if not 0 <= self._context.clock.seconds() - account.seen_at < FIRST_DAY_SECONDS:
            await self._context.store.record_contact(account.did)
        if sender.did != sender.document.did:
            await self._remember_long_form(sender)
        if request.origin.session is not None:
            await self._live.bind(request.origin.session, sender)

    async def _rotate(self, request: MessageRequest) -> bool:
        """Rotate an account whose holder proves to have a new DID (reference 2.3); whether that was done."""
        context, peer = self._context, request.origin.peer
        sender = self._require_authcrypt_sender(request.received)
        prior = await context.unpacker.rotation(request.received.message, peer)
        if prior is None or any(map(context.access.denies, (prior, sender.did))):
            return False
        size, moved = len(sender.did) + len(sender.document.did), False
        await context.registrations.charge(peer, size)
        try:
            moved = await context.store.move_account(prior, sender.did)
        finally:
            if not moved:
                context.registrations.refund(peer, size)
        if moved:
            context.recorder.record_did_rotation(sender.did)
            await self._live.rotate(prior, sender, request.origin.session)
        return moved

    async def _mediate_request(self, request: MessageRequest) -> OutgoingMessage:
        sender = self._require_authcrypt_sender(request.received)
        answer = await self._mediation.mediate_request(request, sender)
        await self._context.unpacker.keep(sender)
        return answer

    def _require_authcrypt_sender(self, received: UnpackedMessage) -> AuthcryptSender:
        """
        The authenticated sender of a request that changes or shows something.

        :raise AuthcryptRequired: there is none.
        :raise MisaddressedMessage: it is meant for somebody else, or signed and addressed to nobody (reference 1.8).
        """
        sender, to = received.authcrypt_sender, received.message.to
        if sender is None:
            raise AuthcryptRequired
        for one in to:
            if one in self._context.own_dids or self._context.owns(strip_did_url(one)):
                return sender
        if to or received.signer:
            raise MisaddressedMessage
        return sender


HandlerT = TypeVar("HandlerT")


def _parse_names(handlers: dict[str, HandlerT]) -> dict[tuple[str, int, str], tuple[str, HandlerT]]:
    """Name and handler by the key of the message type."""
    return {
        MessageType.parse(f"https://didcomm.org/{name}").key: (name, handler) for name, handler in handlers.items()
    }
