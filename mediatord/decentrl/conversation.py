"""One Decentrl socket: authentication, pings, and nothing else from its side (DCTRL-0004 section 10)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.logger import Logger

from mediatord.admission import AccessList, Admission
from mediatord.decentrl.authentication import Authentication, nonce_key
from mediatord.errors import (
    AuthTimeout,
    DuplicateNonce,
    InternalFault,
    InvalidMessage,
    MediatorError,
    RateLimited,
    StoreUnavailable,
    UnauthorizedCommand,
)
from mediatord.faults import release_frames, without_text
from mediatord.gate import Gate
from mediatord.interfaces import IStore
from mediatord.journal import Journal, Told
from mediatord.presence import Connections, Session
from mediatord.protocol import jsontext
from mediatord.protocol.decentrl.commands import Authenticate, parse_authenticate
from mediatord.wire import socket_wire_for

_log = Logger()

PATIENCE = 10.0
PING_INTERVAL = 30.0

_AUTHENTICATE = "AUTHENTICATE"
_SUCCESS = jsontext.dumps({"type": "AUTH_SUCCESS"})


@dataclass(frozen=True, slots=True)
class Switchboard:
    """
    What every Decentrl socket works with.

    :param read_backlog: notes what waits for a DID when a socket is for it; None where there are no other nodes.
    """

    clock: IReactorTime
    store: IStore
    gate: Gate
    connections: Connections[None]
    admission: Admission
    authentication: Authentication
    journal: Journal
    access: AccessList
    read_backlog: Callable[[Session, str], Awaitable[None]] | None = None


class Conversation:
    """
    A socket until it is gone.

    Its first message has to be an AUTHENTICATE, within ten seconds. From then on it gets pings and what comes for its
    DID; whatever it says is ignored, PONG included: a peer that is gone is found out by the pings of the WebSocket
    itself.
    """

    def __init__(self, session: Session, switchboard: Switchboard) -> None:
        self._session = session
        self._board = switchboard
        self._timer: IDelayedCall | None = None
        self._heard = False

    def begin(self) -> None:
        """The socket is open."""
        self._timer = self._board.clock.callLater(PATIENCE, self._too_late)

    def end(self) -> None:
        """The socket is gone, or is none of Decentrl's."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def hear(self, frame: bytes, binary: bool) -> None:
        """
        One message from the other side.

        :param binary: whether it came as a binary message, which none of the protocol's is.
        :raise ShuttingDown: the daemon is stopping.
        """
        if not self._heard:
            self._heard = True
            self.end()
            await self._board.gate.through(lambda: self._begin_to_serve(frame, binary))

    async def _begin_to_serve(self, frame: bytes, binary: bool) -> None:
        told = self._board.journal.begin("decentrl", self._session.client, len(frame))
        try:
            did = await self._authenticate(frame, binary)
            # What comes before this is what the other side asks for first; what comes after it is pushed.
            await self._board.connections.expect(self._session, did)
            if self._board.read_backlog is not None:
                await self._board.read_backlog(self._session, did)
        except MediatorError as error:
            release_frames(error)
            self._fail(told, type(error))
        except Exception as error:
            _log.failure("authenticating a socket failed", without_text())
            release_frames(error)
            self._fail(told, InternalFault)
        else:
            self._succeed(did)
            self._tell(told, 200, did)

    async def _authenticate(self, frame: bytes, binary: bool) -> str:
        """
        The DID that the socket is for, in the order of DCTRL-0004 10.2.

        :raise MediatorError: one of :data:`mediatord.wire.SOCKET_WIRE`.
        """
        board, peer = self._board, self._session.client
        await board.admission.before_reading(peer, len(frame))
        try:
            message = self._read(frame, binary)
            claimed = await board.store.claim(
                nonce_key(b"socket", message.did, message.nonce), board.authentication.until(message.timestamp_ms)
            )
            if not claimed:
                board.journal.replayed("decentrl", message.did, DuplicateNonce())
                raise DuplicateNonce
            if board.access.denies(message.did) or await board.store.decentrl.registered_until(message.did) is None:
                raise UnauthorizedCommand
        except (StoreUnavailable, RateLimited):
            raise
        except MediatorError:
            board.admission.in_vain(peer, len(frame))
            raise
        await board.admission.account(message.did, peer)
        return message.did

    def _read(self, frame: bytes, binary: bool) -> Authenticate:
        if binary:
            raise InvalidMessage
        message = parse_authenticate(frame)
        self._board.authentication.check_time(message.timestamp_ms)
        self._board.authentication.check_signature(
            message.did, message.signing_key_id, message.signed, message.signature
        )
        return message

    def _succeed(self, did: str) -> None:
        if self._session not in self._board.connections:
            return  # it has gone meanwhile
        self._session.send(_SUCCESS)
        known = self._board.connections.subscribe(self._session, did, None)
        # Other nodes knew a moment ago, and will again.
        known.addErrback(lambda failure: failure.trap(StoreUnavailable))
        self._board.journal.connection_bound("decentrl", self._session.name, did)
        self._timer = self._board.clock.callLater(PING_INTERVAL, self._ping)

    def _fail(self, told: Told, fault: type[MediatorError]) -> None:
        wire = socket_wire_for(fault)
        self._session.send(jsontext.dumps({"type": "AUTH_FAILED", "code": wire.code}))
        self._session.close(wire.close, wire.code)
        self._board.journal.connection_refused(self._session.name, wire.code)
        self._tell(told, wire.status, None, fault, wire.code)

    def _tell(
        self,
        told: Told,
        status: int,
        did: str | None,
        fault: type[MediatorError] | None = None,
        code: str | None = None,
    ) -> None:
        self._board.journal.end(
            told,
            status=status,
            fault=fault,
            kind=_AUTHENTICATE,
            sender=did,
            session=self._session.name,
            code=code,
        )

    def _too_late(self) -> None:
        self._timer = None
        self._heard = True
        self._fail(self._board.journal.begin("decentrl", self._session.client, 0), AuthTimeout)

    def _ping(self) -> None:
        self._timer = None
        now_ms = int(self._board.clock.seconds() * 1000)
        self._session.send(jsontext.dumps({"type": "PING", "timestamp": now_ms}))
        self._timer = self._board.clock.callLater(PING_INTERVAL, self._ping)
