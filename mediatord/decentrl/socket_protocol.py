"""Protocol of one Decentrl socket: authentication, then pushes and pings (DCTRL-0004 section 10)."""

from __future__ import annotations

from dataclasses import replace

from twisted.internet.interfaces import IDelayedCall
from twisted.logger import Logger

from mediatord.decentrl.context import DecentrlContext
from mediatord.delivery.connections import WebSocketSession
from mediatord.errors import (
    AuthTimeout,
    DuplicateNonce,
    InternalFault,
    InvalidMessage,
    MediatorError,
    RateLimitExceeded,
    StoreUnavailable,
    UnauthorizedCommand,
)
from mediatord.observability.event_recorder import RequestRecord
from mediatord.protocol import encoding
from mediatord.protocol.decentrl.commands import parse_authentication_request
from mediatord.protocol.error_codes import get_decentrl_close_code
from mediatord.runtime.failure_logging import redact_failure
from mediatord.runtime.memory_reclaimer import release_traceback

_log = Logger()

AUTH_TIMEOUT = 10.0
PING_INTERVAL = 30.0

_AUTH_SUCCESS_FRAME = encoding.dumps({"type": "AUTH_SUCCESS"})


class DecentrlSocketProtocol:
    """
    Protocol of one open socket.

    The first message has to be an AUTHENTICATE within ten seconds. From then on the peer gets pings and pushes for
    its DID. Its own messages are ignored, PONG included: a dead peer is detected by WebSocket pings.
    """

    def __init__(self, session: WebSocketSession, context: DecentrlContext) -> None:
        self._session = session
        self._context = context
        self._timer: IDelayedCall | None = None
        self._has_first_frame = False

    def start(self) -> None:
        """The socket is open."""
        self._timer = self._context.clock.callLater(AUTH_TIMEOUT, self._time_out)

    def stop(self) -> None:
        """The socket is closed, or speaks DIDComm."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def handle_message(self, frame: bytes, binary: bool) -> None:
        """
        Serve one message of the peer.

        :param binary: whether it is a binary message, which the protocol does not use.
        :raise ShutdownInProgress: the daemon is stopping.
        """
        if not self._has_first_frame:
            self._has_first_frame = True
            self.stop()
            await self._context.gate.run_request(lambda: self._serve(frame, binary))

    async def _serve(self, frame: bytes, binary: bool) -> None:
        record = self._begin_record(len(frame))
        try:
            did = await self._authenticate(frame, binary)
            # The peer queries events stored before this; later ones are pushed.
            await self._context.connections.announce_subscription(self._session, did)
            if self._context.record_backlog is not None:
                await self._context.record_backlog(self._session, did)
        except MediatorError as error:
            release_traceback(error)
            self._fail(record, type(error))
        except Exception as error:
            _log.failure("authenticating a socket failed", redact_failure())
            release_traceback(error)
            self._fail(record, InternalFault)
        else:
            self._succeed(did)
            record.sender = did
            self._context.recorder.end_request(record, status=200, fault=None)

    async def _authenticate(self, frame: bytes, binary: bool) -> str:
        """
        The DID that the peer proves to have; checks are in the order of DCTRL-0004 10.2.

        :raise MediatorError: one of :data:`mediatord.protocol.error_codes.DECENTRL_CLOSE_CODES`.
        """
        context, peer = self._context, self._session.client
        await context.rate_limiter.check_before_read(peer, len(frame))
        try:
            if binary:
                raise InvalidMessage
            message, signed = parse_authentication_request(frame)
            did, authenticator = message.did, context.authenticator
            guard = authenticator.make_guard(b"socket", did, message.nonce, message.timestamp)
            authenticator.verify_signature(did, message.signing_key_id, signed, message.signature)
            await context.store.check_guard(replace(guard, sender=did))
            if context.access.denies(did):
                raise UnauthorizedCommand
        except (StoreUnavailable, RateLimitExceeded):
            raise
        except MediatorError as error:
            if isinstance(error, DuplicateNonce):
                context.recorder.record_replay("decentrl", did, error)
            context.rate_limiter.charge_failure(peer, len(frame))
            raise
        await context.rate_limiter.charge_account(did, peer)
        return did

    def _succeed(self, did: str) -> None:
        if self._session not in self._context.connections:
            return  # it was closed meanwhile
        self._session.send(_AUTH_SUCCESS_FRAME)
        known = self._context.connections.subscribe(self._session, did, None)
        # Presence was published before; it is only lost for a while.
        known.addErrback(lambda failure: failure.trap(StoreUnavailable))
        self._context.recorder.record_connection_authenticated("decentrl", self._session.name, did)
        self._timer = self._context.clock.callLater(PING_INTERVAL, self._ping)

    def _fail(self, record: RequestRecord, fault: type[MediatorError]) -> None:
        wire = get_decentrl_close_code(fault)
        self._session.send(encoding.dumps({"type": "AUTH_FAILED", "code": wire.code}))
        self._session.close(wire.close_code, wire.code)
        self._context.recorder.record_authentication_failure(self._session.name, wire.code)
        self._context.recorder.end_request(record, status=wire.status, fault=fault, code=wire.code)

    def _begin_record(self, size: int) -> RequestRecord:
        record = self._context.recorder.begin_request("decentrl", self._session.client, size)
        record.kind, record.session = "AUTHENTICATE", self._session.name
        return record

    def _time_out(self) -> None:
        self._timer = None
        self._has_first_frame = True
        self._fail(self._begin_record(0), AuthTimeout)

    def _ping(self) -> None:
        self._timer = None
        now_ms = int(self._context.clock.seconds() * 1000)
        self._session.send(encoding.dumps({"type": "PING", "timestamp": now_ms}))
        self._timer = self._context.clock.callLater(PING_INTERVAL, self._ping)
