"""
Dispatcher of DIDComm messages: bytes and their origin in, a reply out; with replay protection, and routing of
replies: back on the connection, by POST to the sender's endpoint, or nowhere (reference 3.3).
"""

from __future__ import annotations

from collections.abc import Coroutine
from contextlib import suppress
from functools import partial
from typing import Any, Literal, TypeVar

from twisted.internet.defer import Deferred, succeed

from mediatord.didcomm.context import AccountRequestHandler, DIDCommContext, MessageRequest
from mediatord.didcomm.endpoint_delivery import EndpointDelivery
from mediatord.didcomm.forward_router import FORWARD_KEY, FORWARD_NAME, ForwardRouter
from mediatord.didcomm.mediation import MediationCoordinator
from mediatord.didcomm.messages import ACCEPTED, AuthcryptSender, MessageOrigin, UnpackedMessage
from mediatord.didcomm.pickup import LiveDelivery, Pickup
from mediatord.didcomm.push_notifications import PushNotifications
from mediatord.didcomm.replay_protection import ACKNOWLEDGEMENT, ReplayProtection, is_pickup_request
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
    ReplayedMessage,
    StoreUnavailable,
    UnsupportedMediaType,
    UnsupportedMessageType,
)
from mediatord.observability.event_recorder import RequestRecord
from mediatord.protocol.didcomm import jwe
from mediatord.protocol.didcomm.did_document import strip_did_url
from mediatord.protocol.didcomm.jwe import ENCRYPTED_MEDIA_TYPE
from mediatord.protocol.didcomm.message import DIDCOMM_ORG, Message, MessageType, OutgoingMessage
from mediatord.protocol.didcomm.message_pickup import parse_message_ids
from mediatord.ratelimit.admission import RequestAdmission, RequestReply
from mediatord.ratelimit.rate_limiter import compute_request_cost
from mediatord.runtime.memory_reclaimer import release_traceback
from mediatord.store.interfaces.messages import PAYLOAD_DIGEST_LENGTH, AcknowledgementRequest
from mediatord.store.interfaces.store import FIRST_DAY_SECONDS, Account

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
        self._replays = ReplayProtection(context.store, context.clock)
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
        account_handlers: dict[str, AccountRequestHandler] = {
            "coordinate-mediation/2.0/keylist-update": self._mediation.update,
            "coordinate-mediation/2.0/keylist-query": self._mediation.query,
            "coordinate-mediation/3.0/recipient-update": self._mediation.update,
            "coordinate-mediation/3.0/recipient-query": self._mediation.query,
            "messagepickup/3.0/status-request": pickup.status_request,
            "messagepickup/3.0/delivery-request": pickup.delivery_request,
            "messagepickup/3.0/messages-received": self._messages_received,
            "messagepickup/3.0/live-delivery-change": pickup.live_delivery_change,
        }
        if context.devices is not None:
            account_handlers |= PushNotifications(context, context.devices).handlers()
        self._account_handlers = _parse_names(account_handlers)
        self._names = {FORWARD_KEY: FORWARD_NAME}
        self._names |= {key: name for key, (name, _) in self._handlers.items()}
        self._names |= {key: name for key, (name, _) in self._account_handlers.items()}

    @property
    def remembered(self) -> int:
        """Number of pickup requests that are remembered."""
        return len(self._replays)

    def receive(
        self, raw: bytes, origin: MessageOrigin, already_opened: UnpackedMessage | None = None
    ) -> Coroutine[Any, Any, RequestReply]:
        """
        Serve one message.

        The reply is for the connection that it came on. With 202, the effect of the message is durable.

        :param already_opened: the message, if :meth:`MessageUnpacker.open_at_once` has opened it.
        :raise ShutdownInProgress: the daemon is stopping; nothing else is raised.
        """
        opened = [] if already_opened is None else [already_opened]
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
        if not opened:
            opened.append(await self._open(raw, origin, cost))
        (received,) = opened
        record.crypto.seconds += received.seconds
        message = received.message
        record.kind, record.sender = self._names.get(message.type.key), received.sender
        if message.type.key == FORWARD_KEY:
            await self._forward_router.forward(record, received, origin)
            return ACCEPTED
        account = await self.find_account(received)
        context.rate_limiter.check_allowance(account.did if account else None, origin.peer)
        request = MessageRequest(received, origin, record, cost, account)
        return self.reply(request, await self._answer_once(request))

    def reply(self, request: MessageRequest, answer: OutgoingMessage | None) -> RequestReply:
        """Send the answer to a request where it has to go; the reply for the connection that the request came on."""
        message, sender, origin = request.received.message, request.received.authcrypt_sender, request.origin
        if answer is None or sender is None:
            return ACCEPTED
        route = self._choose_route(message, sender, origin)
        if route == "nowhere":
            return ACCEPTED
        packed = self._context.packer.pack(answer, sender)
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
        binds = self._binds(request.received, request.origin)
        try:
            await self._replays.claim(request.received, account, binds=binds)
        except (ReplayedMessage, ExpiredMessage) as error:
            self._record_replay(request, error)
            raise
        try:
            if account is None:
                await limiter.charge_anonymous(peer, request.cost)
            else:
                await limiter.charge_account(account.did, peer, request.cost)
            return await self._answer(request)
        except Exception as error:
            if isinstance(error, (StoreUnavailable, RateLimitExceeded)) or not isinstance(error, MediatorError):
                # It was not served, so the same message may be sent again.
                await self._replays.release(request.received, binds=binds)
            raise

    def _binds(self, received: UnpackedMessage, origin: MessageOrigin) -> bool:
        """Whether a message authenticates the socket that it came on, if its sender has an account."""
        session, sender = origin.session, received.authcrypt_sender
        if session is None or sender is None or received.message.type.key == ACKNOWLEDGEMENT:
            return False
        return self._live.can_bind(session, sender.did)

    async def _open(self, raw: bytes, origin: MessageOrigin, cost: int) -> UnpackedMessage:
        limiter = self._context.rate_limiter
        await limiter.check_before_read(origin.peer, len(raw), cost)
        if (received := self._context.unpacker.open_at_once(raw)) is not None:
            return received
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

    def _record_replay(self, request: MessageRequest, error: MediatorError) -> None:
        # A replay is charged to the peer that sends it, which need not be the author.
        self._context.rate_limiter.charge_failure(request.origin.peer, request.record.size)
        created_time, now = request.received.message.created_time, self._context.clock.seconds()
        age_ms = None if created_time is None else (now - created_time) * 1000
        self._context.recorder.record_replay("didcomm", request.received.sender, error, age_ms=age_ms)

    def begin_acknowledgement(self, request: MessageRequest, account: Account) -> AcknowledgementRequest | None:
        """
        Begin to serve a message of this account, if it is an acknowledgement that takes one operation of the store
        and nothing else: its digest is kept, and it is charged. Otherwise None, and nothing has happened.

        After a failure, :meth:`cancel_acknowledgement` has to be called.
        """
        context, received, origin = self._context, request.received, request.origin
        message, sender, now = received.message, received.authcrypt_sender, context.clock.seconds()
        if message.type.key != ACKNOWLEDGEMENT or sender is None or not is_pickup_request(received):
            return None
        is_expired = message.expires_time is not None and message.expires_time <= now
        if is_expired or not self._is_seen_today(account) or not context.unpacker.is_kept(sender):
            return None
        try:
            self._require_authcrypt_sender(received)
            ids = parse_message_ids(message.require_body())
            if PAYLOAD_DIGEST_LENGTH in map(len, ids):
                return None  # those of a payload have to be looked up first
            self._replays.claim_in_memory(received, account)
        except MediatorError as error:
            release_traceback(error)  # the general path finds it again
            return None
        if not context.rate_limiter.try_charge_account(account.did, origin.peer, request.cost):
            self._replays.cancel(received)
            return None
        request.account = account
        request.record.kind, request.record.sender = self._names[ACKNOWLEDGEMENT], sender.did
        # As a status costs as much as the rest, it is only read if the reply goes anywhere.
        with_status = self._choose_route(message, sender, origin) != "nowhere"
        return AcknowledgementRequest(account.did, ids, with_status)

    def cancel_acknowledgement(self, request: MessageRequest) -> None:
        """An acknowledgement was not served, so the same message may be sent again."""
        self._replays.cancel(request.received)

    async def _messages_received(self, request: MessageRequest, account: Account) -> OutgoingMessage | None:
        """An acknowledgement, with the status of the queue if the reply goes anywhere."""
        message, sender = request.received.message, request.received.authcrypt_sender
        with_status = sender is not None and self._choose_route(message, sender, request.origin) != "nowhere"
        return await self._pickup.acknowledge(request, account, with_status=with_status)

    async def _remember_long_form(self, sender: AuthcryptSender) -> None:
        """Store the long form of an account's DID."""
        # On a full disk it cannot be stored, but messages can be fetched and deleted all the same.
        with suppress(StoreUnavailable):
            await self._context.unpacker.keep(sender)

    def find_account(self, received: UnpackedMessage) -> Deferred[Account | None]:
        """
        Fires with the sender's account; None for a denied sender.

        :raise StoreUnavailable: it cannot be read.
        """
        sender = received.authcrypt_sender
        if sender is None or self._context.access.denies(sender.did):
            return succeed(None)
        return self._context.store.get_account(sender.did)

    async def _answer(self, request: MessageRequest) -> OutgoingMessage | None:
        received, message, now = request.received, request.received.message, self._context.clock.seconds()
        if message.type.key not in self._names:
            raise UnsupportedMessageType
        if message.expires_time is not None and message.expires_time <= now:
            raise ExpiredMessage
        if message.from_prior is not None and await self._rotate(request):
            request.account = await self.find_account(received)
        if request.account is not None and received.authcrypt_sender is not None:
            await self._record_contact(request, request.account, received.authcrypt_sender)
        if message.type.key in self._handlers:
            return await self._handlers[message.type.key][1](request)
        self._require_authcrypt_sender(received)
        if request.account is None:
            raise MediationNotGranted
        return await self._account_handlers[message.type.key][1](request, request.account)

    def _is_seen_today(self, account: Account) -> bool:
        """Whether the contact need not be recorded; it is once a day."""
        return 0 <= self._context.clock.seconds() - account.seen_at < FIRST_DAY_SECONDS

    async def _record_contact(self, request: MessageRequest, account: Account, sender: AuthcryptSender) -> None:
        if not self._is_seen_today(account):
            await self._context.store.record_contact(account.did)
        if sender.did != sender.document.did:
            await self._remember_long_form(sender)
        if request.origin.session is not None and self._binds(request.received, request.origin):
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
    """
    Name and handler by the key of the message type.

    :param handlers: by type URI; those of didcomm.org without its prefix.
    """
    uris = [(uri.rpartition(DIDCOMM_ORG)[2], handler) for uri, handler in handlers.items()]
    return {MessageType.parse(name if ":" in name else DIDCOMM_ORG + name).key: (name, each) for name, each in uris}
