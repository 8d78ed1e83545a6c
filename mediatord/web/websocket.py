"""The WebSocket half of the transport: frames to both protocol halves, replies and pushes to frames (contract 3)."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import unquote

from autobahn.twisted.websocket import WebSocketServerProtocol
from autobahn.websocket import USES_NVX
from twisted.internet.defer import Deferred, succeed
from twisted.internet.interfaces import IReactorTime
from twisted.internet.tcp import Connection
from twisted.logger import Logger

from mediatord.errors import ShuttingDown
from mediatord.faults import without_text
from mediatord.journal import Journal
from mediatord.memory import LARGE, MemoryReclaimer
from mediatord.outbox import Outbox
from mediatord.presence import Connections, Session
from mediatord.synthetic import HEADER
from mediatord.web.direct import send
from mediatord.web.frames import BINARY, PING, PONG, header, payload_of, read_frame
from mediatord.web.peers import Peers
from mediatord.web.pulse import Pulse
from mediatord.web.resting import rest
from mediatord.web.round_robin import RoundRobinScheduler
from mediatord.web.speech import Conversation, Envelopes, FirstMessageDecides, Receive, Speech

_log = Logger()

MAX_FRAGMENTS = 1024
# Bytes of pushes that wait for one socket.
MAX_OUTBOX = 1_048_576
# Messages of one socket, and bytes of them, that may wait for their turn before reading from it stops.
MAX_WAITING = 8
MAX_WAITING_BYTES = 262_144
# Plain messages that are read in one go, and bytes in which others may begin; the rest in quanta of the scheduler.
_MESSAGES = 8
_PIECE = 256
# Frames that are charged together, and bytes that cost as much as one.
_FRAMES = 16

# Where Autobahn keeps parts of frames and messages; its protocol is in reference cycles when the connection is gone.
_UNFINISHED = ("data", "message_data", "frame_data", "control_frame_data")


def native_masking() -> bool:
    """Whether Autobahn unmasks frames in C; without it, reading is many times slower."""
    return bool(USES_NVX)


@dataclass(frozen=True, slots=True)
class Sockets:
    """
    What every socket works with.

    :param receive: takes a DIDComm message, gives the reply.
    :param converse: begins to speak Decentrl.
    :param memory: told of large buffers that are free again.
    :param scheduler: of sockets that have sent more than is served at once.
    :param admits: charges an address for frames of any kind: whether it is within its limit.
    """

    receive: Receive
    converse: Callable[[Session], Conversation]
    connections: Connections[Any]
    journal: Journal
    peers: Peers
    clock: IReactorTime
    memory: MemoryReclaimer
    scheduler: RoundRobinScheduler
    admits: Callable[[str, int], bool]


class Silence:
    """Takes the place of Autobahn's loggers: they tell addresses and what clients wrote. Our events tell the rest."""

    def __getattr__(self, level: str) -> Callable[..., None]:
        return lambda *args, **values: None


class MediatorSocket(WebSocketServerProtocol):
    """
    One socket. It translates and nothing more.

    Messages of one socket are served one after the other, so that what a wallet asks for in a row is answered in
    that order; while too many wait, the socket is not read.

    Autobahn shakes hands, closes, and reads whatever is not plain. Plain frames are read and written here
    (:mod:`mediatord.web.frames`): it would spend more on one than all the rest of its way takes.
    """

    # For thousands of them: Autobahn's own attributes are those of the class (:mod:`mediatord.web.resting`).
    __slots__ = (
        "_bytes_in",
        "_bytes_out",
        "_ahead",
        "_fragments",
        "_frames",
        "_full",
        "_heard",
        "_messages_in",
        "_messages_out",
        "_opened",
        "_outbox",
        "_owed",
        "_pinged",
        "_reading",
        "_resting",
        "_serving",
        "_speech",
        "_waiting",
        "client",
        "name",
        "transport",
        "turn",
    )

    log: Any = Silence()
    transport: Any
    # As Autobahn calls them.
    maxFramePayloadSize: int  # noqa: N815
    maxMessagePayloadSize: int  # noqa: N815
    _sockets: Sockets
    _pulse: Pulse
    _max_outbox: int

    def __init__(self) -> None:
        super().__init__()
        self.client = ""
        self.name = secrets.token_hex(8)
        self.turn = 0
        self._outbox = Outbox(self._write_frame, max_bytes=self._max_outbox, cleared=self._cleared)
        self._speech: Speech = Envelopes(self._sockets.receive, self, self._outbox.put)
        self._waiting: deque[tuple[bytes, bool]] | None = None
        self._serving = False
        self._reading = True
        self._full = False
        # What was received and not looked at yet.
        self._ahead = b""
        self._frames = 0
        self._opened = False
        self._resting = False
        self._heard = False
        self._pinged = False
        self._owed: bytes | None = None
        self._fragments = 0
        self._messages_in = self._messages_out = self._bytes_in = self._bytes_out = 0

    @property
    def unsent(self) -> tuple[int, int]:
        """Frames that wait until the transport has room, and bytes that wait for the peer to read, those included."""
        return self._outbox.waiting, self._outbox.waiting_bytes + _unsent(self.transport)

    @property
    def unserved(self) -> tuple[int, int]:
        """Messages that wait for their turn, and their bytes, with those of one that is not complete yet."""
        waiting = self._waiting or ()
        begun = self.message_data_total_length if self.inside_message else 0
        return len(waiting), sum(len(payload) for payload, _ in waiting) + len(self.data) + len(self._ahead) + begun

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
        self.transport.unregisterProducer()
        self.transport.registerProducer(self._outbox, True)
        self._opened = True
        self._pulse.add(self)
        self._sockets.journal.connection_opened(self.name, self.client)
        self._sockets.connections.opened(self)
        self._speech.begin()

    def dataReceived(self, data: bytes) -> None:
        """Some bytes of one or several frames, or a part of one."""
        self._heard = True
        if self._ahead:
            self._ahead += data
            return
        at = self._read_plain(data) if self._resting else 0
        if at != len(data):
            self._read_some(data, at)

    def run_quantum(self) -> None:
        """Read some of what was received before."""
        if self._full:
            return
        data, self._ahead = self._ahead, b""
        at = self._read_plain(data) if self._resting else 0
        if at != len(data):
            self._read_some(data, at)
        self._read_on()

    def _read_some(self, data: bytes, at: int) -> None:
        """Have Autobahn read a frame that is not plain, or some small ones; the rest waits for a quantum."""
        if self.state == self.STATE_CONNECTING:
            self._dataReceived(data)
            at = len(data)
        elif not self._full and not (self._is_plain() and read_frame(data, at, self.maxMessagePayloadSize)):
            self._resting = False
            begins = True
            while at < len(data) and (begins or self._payload_left()):
                begins = False
                end = at + max(self._payload_left(), _PIECE)
                self._dataReceived(data[at:end])
                at = end
            self._charge(0)
        if self._opened and self.state == self.STATE_OPEN and self._is_between_messages():
            rest(self)
            self._resting = True
        if at < len(data) and self.state != self.STATE_CLOSED and not self.transport.disconnecting:
            self._ahead = data[at:]
            self._pause()
            self._sockets.scheduler.add(self)

    def _is_plain(self) -> bool:
        return self._resting and self.state == self.STATE_OPEN

    def _payload_left(self) -> int:
        """Bytes of the frame that has begun, which are still to come."""
        frame = self.current_frame
        left: int = frame.length - self.current_frame_masker.pointer() if frame is not None else 0
        return left

    def onFrameBegin(self) -> None:  # noqa: N802
        """A frame of any kind starts."""
        self._frames += 1
        super().onFrameBegin()

    def _charge(self, frames: int) -> None:
        """Charge the address for frames, once there are some."""
        self._frames += frames
        if self._frames >= _FRAMES:
            frames, self._frames = self._frames, 0
            if not self._sockets.admits(self.client, frames):
                self.close(1008, "too many frames")
                self.transport.loseConnection()

    def _pause(self) -> None:
        if self._reading:
            self._reading = False
            self.transport.pauseProducing()

    def _read_on(self) -> None:
        """Read from the peer again, unless something waits."""
        if self._ahead:
            self._sockets.scheduler.add(self)
        elif not (self._reading or self._full):
            self._reading = True
            self.transport.resumeProducing()

    def _is_between_messages(self) -> bool:
        return not (self.data or self.inside_message or self.current_frame)

    def _read_plain(self, data: bytes) -> int:
        """Take the messages in whole, plain frames; how many bytes they are."""
        at = frames = 0
        while at < len(data) and frames < _MESSAGES and self.state == self.STATE_OPEN and not self._full:
            frame = read_frame(data, at, self.maxMessagePayloadSize)
            if frame is None:
                break
            at = frame.end
            frames += 1
            if frame.kind != PONG:
                self.onMessage(payload_of(data, frame), frame.kind == BINARY)
        self._frames += frames
        if self._frames >= _FRAMES:
            self._charge(0)
        return at

    def fire(self, event: str, *args: Any, **values: Any) -> Deferred[None]:
        """Autobahn tells listeners of every message; there are none."""
        return succeed(None)

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
        self._messages_in += 1
        self._bytes_in += len(payload)
        if len(payload) >= LARGE:
            self._sockets.memory.released(len(payload))
            self._frames += len(payload) // LARGE
        if self._waiting is None:
            self._waiting = deque()
        self._waiting.append((payload, isBinary))
        self._go_on()
        if self._waiting and self._is_full(MAX_WAITING):
            self._full = True
            self._pause()

    def _is_full(self, messages: int) -> bool:
        """Whether so many messages wait, or too many bytes."""
        waiting = self._waiting or ()
        return len(waiting) >= messages or sum([len(payload) for payload, _ in waiting]) > MAX_WAITING_BYTES

    def onPing(self, payload: bytes) -> None:  # noqa: N802
        """Answer it; to a peer that does not read only the last one, once it does (RFC 6455 section 5.5.3)."""
        if self._outbox.is_clear:
            super().onPing(payload)
        else:
            self._owed = payload

    def _cleared(self) -> None:
        owed, self._owed = self._owed, None
        if owed is not None:
            super().onPing(owed)
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
                if self._full and not self._is_full(MAX_WAITING // 2):
                    self._full = False
                    self._read_on()
                try:
                    await self._speech.hear(payload, is_binary)
                except ShuttingDown:
                    self.close(1001, "going away")
        finally:
            self._serving = False
            if not self._waiting:  # an empty deque takes more than half a kilobyte
                self._waiting = None

    def send(self, frame: bytes) -> bool:
        """Queue one text frame; False when the socket cannot take it now."""
        return self.state == self.STATE_OPEN and self._outbox.offer(frame)

    def close(self, code: int, reason: str) -> None:
        """Begin the closing handshake; a peer that does not answer is dropped after two seconds."""
        if self.state == self.STATE_OPEN:
            self._waiting = None
            # sendClose takes only the codes of applications.
            self.sendCloseFrame(code, reason.encode(), isReply=False)

    def beat(self) -> None:
        """Send a ping; a peer of whom nothing has come since the last one is gone."""
        if self.state != self.STATE_OPEN:  # there is a time-out for closing
            return
        if self._pinged and not self._heard:
            self.onAutoPingTimeout()
            return
        self._pinged, self._heard = True, False
        send(self.transport, PING)

    def limit_outbox(self, max_bytes: int) -> None:
        """Keep so many bytes of pushes from now on while the peer does not read."""
        self._outbox.limit(max_bytes)

    def _write_frame(self, payload: bytes) -> None:
        if self.state != self.STATE_OPEN:  # nothing may come after a close frame
            return
        # Autobahn's sendMessage costs three times as much, and would refuse what is longer than it would read.
        self._messages_out += 1
        self._bytes_out += len(payload)
        if len(payload) >= LARGE:
            self._sockets.memory.released(len(payload))
        send(self.transport, header(len(payload)) + payload)

    def onClose(self, wasClean: bool, code: int | None, reason: str | None) -> None:  # noqa: N803
        """
        The socket is gone; also called when the handshake failed.

        What was received before is served all the same: a sender of forwards may say what it has to and leave.
        """
        self._sockets.memory.released(self.unserved[1] + self.unsent[1])
        self._sockets.scheduler.discard(self)
        self._ahead = b""
        self._outbox.stopProducing()
        for name in _UNFINISHED:
            vars(self).pop(name, None)
        if self._opened:
            self._opened = False
            self._pulse.remove(self)
            ours = self.localCloseCode if self.closedByMe else None
            by: Literal["us", "peer"] = "us" if ours is not None else "peer"
            traffic = (self._messages_in, self._messages_out, self._bytes_in, self._bytes_out)
            self._sockets.journal.connection_closed(self.name, self._speech.half, ours or code, by, traffic)
            self._speech.end()
        self._sockets.connections.closed(self)


def _host(protocol: Any) -> str:
    return getattr(protocol.transport.getPeer(), "host", "") or ""


def _unsent(transport: Any) -> int:
    """Bytes that Twisted keeps until the kernel takes them; 0 where that is not known, as under TLS."""
    if not isinstance(transport, Connection):
        return 0
    return len(transport.dataBuffer) - transport.offset + transport._tempDataLen
