"""The WebSocket half of the transport: frames to both protocol halves, replies and pushes to frames (contract 3)."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import unquote
from weakref import WeakSet

import txaio
from autobahn.twisted.websocket import WebSocketServerFactory, WebSocketServerProtocol
from autobahn.websocket import USES_NVX
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.logger import Logger

from mediatord.errors import ShuttingDown
from mediatord.faults import without_text
from mediatord.journal import Journal
from mediatord.outbox import Outbox
from mediatord.presence import Connections, Session
from mediatord.synthetic import HEADER
from mediatord.web.peers import Peers
from mediatord.web.speech import Conversation, Envelopes, FirstMessageDecides, Receive, Speech

_log = Logger()

MAX_FRAGMENTS = 1024
# Frames of one socket that may wait for their turn before reading from it stops.
MAX_WAITING = 8


def native_masking() -> bool:
    """Whether Autobahn unmasks frames in C; without it, reading is many times slower."""
    return bool(USES_NVX)


@dataclass(frozen=True, slots=True)
class Sockets:
    """
    What every socket works with.

    :param receive: takes a DIDComm message, gives the reply.
    :param converse: begins to speak Decentrl.
    """

    receive: Receive
    converse: Callable[[Session], Conversation]
    connections: Connections[Any]
    journal: Journal
    peers: Peers
    clock: IReactorTime


def frame_header(length: int) -> bytes:
    """The header of an unmasked, final text frame (RFC 6455 section 5.2)."""
    if length < 126:
        return bytes((0x81, length))
    if length < 65_536:
        return b"\x81\x7e" + length.to_bytes(2, "big")
    return b"\x81\x7f" + length.to_bytes(8, "big")


class _Silence:
    """Takes the place of Autobahn's loggers: they tell addresses and what clients wrote. Our events tell the rest."""

    def __getattr__(self, level: str) -> Callable[..., None]:
        return lambda *args, **values: None


class MediatorSocket(WebSocketServerProtocol):
    """
    One socket. It translates and nothing more.

    Messages of one socket are served one after the other, so that what a wallet asks for in a row is answered in
    that order; while too many wait, the socket is not read.
    """

    log: Any = _Silence()

    def __init__(self, sockets: Sockets) -> None:
        super().__init__()
        self.client = ""
        self.name = secrets.token_hex(8)
        self._sockets = sockets
        self._outbox = Outbox(self._write_frame, cleared=self._go_on)
        self._speech: Speech = Envelopes(sockets.receive, self, self._outbox.put)
        self._waiting: deque[tuple[bytes, bool]] = deque()
        self._serving = False
        self._reading = True
        self._fragments = 0
        self._opened = False
        self._line: Any = None
        self._traffic = [0, 0, 0, 0]

    def onConnect(self, request: Any) -> None:
        """The handshake was read; no sub-protocol is ever selected."""
        token = request.headers.get(HEADER, "").encode("latin-1", "replace")
        self.client = self._sockets.peers.payer(_host(self), request.headers.get("x-forwarded-for"), token)
        if unquote(request.path).strip("/") == "ws":
            self._speech = FirstMessageDecides(self._sockets.converse(self), self._speech)

    def failHandshake(self, reason: str, code: int = 400, responseHeaders: Any = None) -> None:  # noqa: N802, N803
        """The handshake is none; Autobahn's reason quotes headers, and goes to the client and to the log."""
        super().failHandshake("bad handshake", code, responseHeaders)

    def onOpen(self) -> None:
        """The handshake is done."""
        # After the upgrade the HTTP channel is still the transport's producer.
        self._line = self.transport
        self._line.unregisterProducer()
        self._line.registerProducer(self._outbox, True)
        self._opened = True
        self._sockets.journal.connection_opened(self.name, self.client)
        self._sockets.connections.opened(self)
        self._speech.begin()

    def onMessageBegin(self, isBinary: bool) -> None:  # noqa: N803
        """A message starts."""
        self._fragments = 0
        super().onMessageBegin(isBinary)

    def onMessageFrameBegin(self, length: int) -> None:
        """A fragment starts; even empty ones cost memory, so their number is bounded too."""
        self._fragments += 1
        super().onMessageFrameBegin(length)
        if self._fragments > MAX_FRAGMENTS and not self.failedByMe:
            self._fail_connection(1009, "too many fragments")

    def onMessage(self, payload: bytes, isBinary: bool) -> None:  # noqa: N803
        """A whole message, text or binary."""
        if self.state != self.STATE_OPEN:  # it is being closed, and what still comes is not served
            return
        self._traffic[0] += 1
        self._traffic[2] += len(payload)
        self._waiting.append((payload, isBinary))
        if len(self._waiting) >= MAX_WAITING and self._reading:
            self._reading = False
            self._line.pauseProducing()
        self._go_on()

    def _go_on(self) -> None:
        """Serve what waits. A peer that does not read its answers gets no further ones made."""
        if self._waiting and not self._serving and self._outbox.is_clear:
            self._serving = True
            served = Deferred.fromCoroutine(self._serve())
            served.addErrback(lambda failure: _log.failure("serving a socket failed", without_text(failure)))

    async def _serve(self) -> None:
        try:
            while self._waiting and self._outbox.is_clear:
                payload, is_binary = self._waiting.popleft()
                if not self._reading and len(self._waiting) < MAX_WAITING // 2:
                    self._reading = True
                    self._line.resumeProducing()
                try:
                    await self._speech.hear(payload, is_binary)
                except ShuttingDown:
                    self.close(1001, "going away")
        finally:
            self._serving = False

    def limit(self, max_message: int) -> None:
        """Take messages of so many bytes from now on."""
        # What Autobahn has copied from the factory.
        self.maxFramePayloadSize = self.maxMessagePayloadSize = max_message

    def send(self, frame: bytes) -> bool:
        """Queue one text frame; False when the socket cannot take it now."""
        return self.state == self.STATE_OPEN and self._outbox.offer(frame)

    def close(self, code: int, reason: str) -> None:
        """Begin the closing handshake; a peer that does not answer is dropped after two seconds."""
        if self.state == self.STATE_OPEN:
            self._waiting.clear()
            # sendClose takes only the codes of applications.
            self.sendCloseFrame(code, reason.encode(), isReply=False)

    def _write_frame(self, payload: bytes) -> None:
        if self.state != self.STATE_OPEN:  # nothing may come after a close frame
            return
        # Autobahn's sendMessage costs three times as much, and would refuse what is longer than it would read.
        self._traffic[1] += 1
        self._traffic[3] += len(payload)
        self._line.write(frame_header(len(payload)) + payload)

    def onClose(self, wasClean: bool, code: int | None, reason: str | None) -> None:  # noqa: N803
        """
        The socket is gone; also called when the handshake failed.

        What was received before is served all the same: a sender of forwards may say what it has to and leave.
        """
        self._outbox.stopProducing()
        if self._opened:
            self._opened = False
            ours = self.localCloseCode if self.closedByMe else None
            by: Literal["us", "peer"] = "us" if ours is not None else "peer"
            self._sockets.journal.connection_closed(
                self.name, self._speech.half, ours or code, by, tuple(self._traffic)
            )
            self._speech.end()
        self._sockets.connections.closed(self)


def _host(protocol: Any) -> str:
    return getattr(protocol.transport.getPeer(), "host", "") or ""


class _Timers:
    """
    Takes the place of Autobahn's batched timer, which puts calls for the same moment on one timer of the reactor.

    When the clock is set, a timer keeps the time that it has left and is at another moment from then on: what is
    asked for then would find one that fires much earlier or later.
    """

    def __init__(self, reactor: Any) -> None:
        self._reactor = reactor

    def call_later(self, delay: float, call: Callable[..., None], *args: Any, **options: Any) -> IDelayedCall:
        """Have something called after so many seconds."""
        timer: IDelayedCall = self._reactor.callLater(delay, call, *args, **options)
        return timer


class SocketFactory(WebSocketServerFactory):
    """
    Makes sockets for upgraded requests.

    :param max_message: bytes of a message, and of a frame.
    """

    log: Any = _Silence()

    def __init__(self, reactor: Any, sockets: Sockets, max_message: int, *, ping_interval: float = 30.0) -> None:
        super().__init__(url=None, server="mediatord", reactor=reactor)
        # Autobahn's timers run on this.
        txaio.config.loop = reactor  # type: ignore[attr-defined]  # made at run time
        # There is no public way: txaio's own takes the moments from the reactor.
        self._batched_timer = _Timers(reactor)
        self._sockets = sockets
        self._made: WeakSet[MediatorSocket] = WeakSet()
        self.limit(max_message)
        self.setProtocolOptions(
            # Fail with a close code, not by cutting the line.
            failByDrop=False,
            openHandshakeTimeout=10,
            closeHandshakeTimeout=2,
            autoPingInterval=ping_interval,
            autoPingTimeout=ping_interval,
            tcpNoDelay=True,
            # JSON is checked to be UTF-8 when it is parsed.
            utf8validateIncoming=False,
        )

    def limit(self, max_message: int) -> None:
        """Take messages and frames of so many bytes from now on, also on sockets that are open."""
        self.setProtocolOptions(maxFramePayloadSize=max_message, maxMessagePayloadSize=max_message)
        for socket in self._made:
            socket.limit(max_message)

    def buildProtocol(self, addr: object) -> MediatorSocket:
        """One socket."""
        protocol = MediatorSocket(self._sockets)
        protocol.factory = self
        self._made.add(protocol)
        return protocol
