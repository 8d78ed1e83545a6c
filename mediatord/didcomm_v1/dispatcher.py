"""
Dispatcher of DIDComm v1 messages: bytes and their origin in, a reply out; with replay protection, and routing of
replies by `return_route` (Aries RFC 0092): back on the connection, or by POST to the wallet's endpoint.

The messages have no time, so a replay is known by its digest alone. Digests are kept for an hour, and for 30 days
where a replay would change something, or have mail pushed to a socket of somebody else. Requests of Message Pickup
only show the wallet what it has, encrypted to it, or name ids that are never used again, so their digests are kept in
memory; a batch that is requested again may end one batch early. A message that is refused for its type or its sender
is not kept.
"""

from __future__ import annotations

from collections.abc import Coroutine, Mapping
from functools import partial
from typing import Any, TypeVar

from mediatord.didcomm.messages import ACCEPTED, MessageOrigin
from mediatord.didcomm.replay_protection import (
    FULL_SHARE,
    LONG_RETENTION,
    LONG_RETENTION_SHARE,
    ORDINARY_SHARE,
    REPLAY_WINDOW,
    RecentDigests,
    ReplayProtection,
    ReplayRetention,
)
from mediatord.didcomm_v1.context import (
    ReceivedV1Message,
    V1AccountRequestHandler,
    V1Context,
    V1Endpoints,
    V1Request,
    V1RequestHandler,
)
from mediatord.didcomm_v1.forwarding import V1ForwardRouter
from mediatord.didcomm_v1.messages import V1Packer, V1Unpacker, make_reply, takes_reply
from mediatord.errors import (
    AuthcryptRequired,
    ExpiredMessage,
    InternalFault,
    MediationNotGranted,
    MediatorError,
    MisaddressedMessage,
    RateLimitExceeded,
    ReplayedMessage,
    SenderMismatch,
    StoreUnavailable,
    UnsupportedMessageType,
)
from mediatord.observability.event_recorder import RequestRecord
from mediatord.protocol.didcomm.push_notifications import PUSH_PROTOCOLS
from mediatord.protocol.didcomm_v1.envelope import parse_envelope
from mediatord.protocol.didcomm_v1.forward import FORWARD_KEY, FORWARD_NAME
from mediatord.protocol.didcomm_v1.message import DIDCOMM_ORG, HANDSHAKE_REQUESTS, TypeKey, V1Answer, parse_type
from mediatord.ratelimit.admission import RequestAdmission, RequestReply
from mediatord.ratelimit.rate_limiter import compute_request_cost
from mediatord.store.interfaces.store import FIRST_DAY_SECONDS, Account
from mediatord.store.interfaces.v1_connections import V1Connection

# Requests that may be served twice without harm.
_PICKUP_REQUESTS = frozenset(
    (
        ("messagepickup", 1, "status-request"),
        ("messagepickup", 2, "status-request"),
        ("messagepickup", 2, "delivery-request"),
        ("messagepickup", 2, "messages-received"),
    )
)
# Requests of an account that change what is stored, or have mail pushed to a socket.
_LASTING_CHANGES = frozenset(
    (
        ("coordinate-mediation", 1, "keylist-update"),
        ("messagepickup", 2, "live-delivery-change"),
        ("did-rotate", 1, "hangup"),
        *(parse_type(protocol.type("set")).key for protocol in PUSH_PROTOCOLS.values()),
    )
)
_PING: TypeKey = ("trust_ping", 1, "ping")

# Families of messages to the key of the invitation, from wallets that have not connected yet.
HANDSHAKE_FAMILIES = frozenset(("didexchange", "connections", "out-of-band"))


class V1Dispatcher:
    """
    Opens, charges and serves messages of all transports.

    :param handlers: of any connected wallet, and of handshakes, by type without prefix.
    :param account_handlers: of enrolled accounts.
    """

    def __init__(
        self,
        context: V1Context,
        requests: RequestAdmission,
        unpacker: V1Unpacker,
        packer: V1Packer,
        forward_router: V1ForwardRouter,
        endpoints: V1Endpoints,
        handlers: Mapping[str, V1RequestHandler],
        account_handlers: Mapping[str, V1AccountRequestHandler],
    ) -> None:
        self._context = context
        self._common = context.common
        self._requests = requests
        self._unpacker = unpacker
        self._packer = packer
        self._forward_router = forward_router
        self._endpoints = endpoints
        self._replays = ReplayProtection(self._common.store, self._common.clock)
        self._recent = RecentDigests()
        self._handlers = _parse_names(handlers)
        self._account_handlers = _parse_names(account_handlers)
        self._names = {FORWARD_KEY: FORWARD_NAME}
        self._names |= {key: name for key, (name, _) in (self._handlers | self._account_handlers).items()}

    @property
    def remembered(self) -> int:
        """Number of pickup requests that are remembered."""
        return len(self._recent)

    def receive(self, raw: bytes, origin: MessageOrigin) -> Coroutine[Any, Any, RequestReply]:
        """
        Serve one message.

        The reply is for the connection that it came on. With 202, the effect of the message is durable.

        :raise ShutdownInProgress: the daemon is stopping; nothing else is raised.
        """
        opened: list[ReceivedV1Message] = []
        work, refuse = partial(self._serve, raw, origin, opened), partial(self._refuse, origin, opened)
        session = origin.session.name if origin.session else None
        return self._requests.serve("didcomm_v1", origin.peer, len(raw), work, refuse, session)

    def _refuse(self, origin: MessageOrigin, opened: list[ReceivedV1Message], error: MediatorError) -> RequestReply:
        is_opened = opened and not isinstance(error, InternalFault)
        return self._packer.refuse(error, opened[0] if is_opened else None, origin)

    async def _serve(
        self, raw: bytes, origin: MessageOrigin, opened: list[ReceivedV1Message], record: RequestRecord
    ) -> RequestReply:
        cost = compute_request_cost(len(raw))
        received = await self._open(raw, origin, cost)
        opened.append(received)
        key = received.message.type.key
        record.kind, record.sender = self._names.get(key), received.sender
        if key == FORWARD_KEY:
            await self._forward_router.forward(record, received, origin)
            return ACCEPTED
        account = await self._find_account(received)
        self._common.rate_limiter.check_allowance(account.did if account else None, origin.peer)
        request = V1Request(received, origin, record, cost, account)
        return await self._reply(request, await self._answer_once(request))

    async def _open(self, raw: bytes, origin: MessageOrigin, cost: int) -> ReceivedV1Message:
        limiter = self._common.rate_limiter
        await limiter.check_before_read(origin.peer, len(raw), cost)
        try:
            envelope = parse_envelope(raw)
            if not envelope.is_authcrypt:
                limiter.check_before_decryption(origin.peer, authenticated=False)
            return await self._unpacker.open(envelope)
        except (StoreUnavailable, RateLimitExceeded):
            raise
        except MediatorError:
            limiter.charge_failure(origin.peer, len(raw))
            raise

    async def _find_account(self, received: ReceivedV1Message) -> Account | None:
        sender = received.sender
        if sender is None or self._common.access.denies(sender):
            return None
        return await self._common.store.get_account(sender)

    async def _answer_once(self, request: V1Request) -> V1Answer | None:
        """
        The answer, unless the message is a replay.

        :raise ReplayedMessage: it came before; otherwise as :meth:`_check`.
        """
        limiter, peer, account = self._common.rate_limiter, request.origin.peer, request.account
        digest = request.received.digest
        try:
            self._check(request)
        except MediatorError:
            await limiter.charge_anonymous(peer, request.cost)
            raise
        try:
            is_claimed = await self._claim(request)
        except ReplayedMessage as error:
            limiter.charge_failure(peer, request.record.size)
            self._common.recorder.record_replay("didcomm_v1", request.received.sender, error)
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
                self._recent.discard(digest)
                if is_claimed:
                    await self._common.store.release_nonce(digest)
            raise

    async def _claim(self, request: V1Request) -> bool:
        """Claim the digest of a message; whether that is in the store."""
        key, now = request.message.type.key, self._common.clock.seconds()
        if key in _PICKUP_REQUESTS:
            if not self._recent.add(request.received.digest, now, now + REPLAY_WINDOW):
                raise ReplayedMessage
            return False
        retention = ReplayRetention(now + REPLAY_WINDOW, ORDINARY_SHARE, needed=False)
        if key in HANDSHAKE_REQUESTS:
            retention = ReplayRetention(now + LONG_RETENTION, LONG_RETENTION_SHARE, fallback=retention)
        elif request.account is not None and (key in _LASTING_CHANGES or self._starts_pushing(request)):
            brief = ReplayRetention(now + REPLAY_WINDOW, FULL_SHARE)
            retention = ReplayRetention(now + LONG_RETENTION, LONG_RETENTION_SHARE, fallback=brief)
        try:
            await self._replays.claim_digest(request.received.digest, retention)
        except ReplayedMessage:
            if not await self._is_latest_handshake(request):
                raise
            return False
        return True

    async def _is_latest_handshake(self, request: V1Request) -> bool:
        """Whether a repeated request to connect is the last one of its wallet, which gets the same answer again."""
        received = request.received
        if received.message.type.key not in HANDSHAKE_REQUESTS or received.sender is None:
            return False
        connection = await self._context.connections.get_connection(received.sender)
        return connection is not None and connection.request_id == received.message.id

    def _starts_pushing(self, request: V1Request) -> bool:
        """Whether a message is a ping of implicit pickup, on any transport, as it could be replayed on a socket."""
        message = request.message
        is_silent = message.members.get("response_requested", True) is False
        return message.type.key == _PING and is_silent and message.return_route == "all"

    def _check(self, request: V1Request) -> None:
        """
        Check that a request can be served, and is of the wallet that the key of the mediator was made for.

        :raise UnsupportedMessageType: its type is unknown.
        :raise ExpiredMessage: its time has passed.
        :raise AuthcryptRequired: its sender is not authenticated, or it was encrypted to others, too.
        :raise MisaddressedMessage: it was encrypted to the wrong key of the mediator.
        :raise SenderMismatch: it is of another wallet.
        :raise MediationNotGranted: it needs an account, and the sender has none.
        """
        received, message, key = request.received, request.message, request.message.type.key
        if key not in self._names:
            raise UnsupportedMessageType
        if message.expires_time is not None and message.expires_time <= self._common.clock.seconds():
            raise ExpiredMessage
        if received.sender is None:
            raise AuthcryptRequired
        if received.connection is None and message.type.family not in HANDSHAKE_FAMILIES:
            raise MisaddressedMessage
        if received.connection is not None and received.connection.account != received.sender:
            raise SenderMismatch
        if request.account is None and key in self._account_handlers:
            raise MediationNotGranted

    async def _answer(self, request: V1Request) -> V1Answer | None:
        key, connection, account = request.message.type.key, request.received.connection, request.account
        if connection is not None:
            await self._record_contact(request, connection)
        if key in self._handlers or account is None:
            return await self._handlers[key][1](request)
        return await self._account_handlers[key][1](request, account)

    async def _record_contact(self, request: V1Request, connection: V1Connection) -> None:
        """Record that the wallet is there, and continue what waits for that."""
        account = request.account
        if account is None:
            return
        if not 0 <= self._common.clock.seconds() - account.seen_at < FIRST_DAY_SECONDS:
            await self._common.store.record_contact(account.did)
        if request.origin.session is not None:
            self._context.live.record_authenticated(request.origin.session, account.did, "didcomm_v1")
        self._endpoints.resume(connection)

    async def _reply(self, request: V1Request, answer: V1Answer | None) -> RequestReply:
        """Send the answer to a request where it has to go; the reply for the connection that the request came on."""
        if answer is None:
            return ACCEPTED
        packed = self._packer.pack(answer, request.received)
        if takes_reply(request.message):
            return make_reply(request, packed)
        connection, endpoints = request.received.connection, self._endpoints
        if connection is None and request.received.sender is not None:
            connection = await self._context.connections.get_connection(request.received.sender)
        if connection is not None and endpoints.can_reply(connection, request.origin.peer):
            endpoints.reply(connection, packed, request.origin.peer)
            return ACCEPTED
        return make_reply(request, packed)


HandlerT = TypeVar("HandlerT")


def _parse_names(handlers: Mapping[str, HandlerT]) -> dict[TypeKey, tuple[str, HandlerT]]:
    """Name and handler by the key of the message type."""
    uris = {name: name if ":" in name else DIDCOMM_ORG + name for name in handlers}
    return {parse_type(uri).key: (name, handlers[name]) for name, uri in uris.items()}
