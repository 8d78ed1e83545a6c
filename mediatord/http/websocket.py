"""
What Autobahn keeps of a socket, kept once for all of them.

Its protocol has about a hundred attributes: options, what it read in the handshake, room for a close that is far
away. Those of a socket at rest are alike, so they belong to the class; each socket has only what differs.

Finding out which peers are gone: a ping for every socket now and then, all of them by one timer.

The WebSocket half of the transport: frames to both protocol halves, replies and pushes to frames (contract 3).

Makes the sockets of upgraded requests, and keeps what they have in common.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from types import FunctionType
from typing import Any, Literal, Protocol, cast
from urllib.parse import unquote

import txaio
from autobahn.twisted.websocket import WebSocketServerFactory, WebSocketServerProtocol
from autobahn.websocket import USES_NVX
from autobahn.websocket.protocol import TrafficStats
from twisted.internet.defer import Deferred, succeed
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.internet.tcp import Connection
from twisted.logger import Logger

from mediatord.delivery.connections import ConnectionManager, WebSocketSession
from mediatord.delivery.send_queue import SendQueue
from mediatord.errors import ShutdownInProgress
from mediatord.failure_logging import redact_failure
from mediatord.http.client_address import ClientAddressResolver
from mediatord.http.flow_control import RoundRobinScheduler, write_immediately
from mediatord.http.memory_reclaimer import LARGE_BUFFER_BYTES, MemoryReclaimer
from mediatord.http.protocol_switch import (
    DIDCommSocketHandler,
    ProtocolSocketHandler,
    ProtocolSwitch,
    ReceiveMessage,
    SocketHandler,
)
from mediatord.http.websocket_frames import (
    BINARY_FRAME,
    PING_FRAME,
    PONG_FRAME,
    build_text_header,
    find_simple_frame,
    unmask_payload,
)
from mediatord.observability.event_recorder import EventRecorder
from mediatord.protocol.probe_requests import PROBE_HEADER

_OPEN_SOCKET_ATTRIBUTES: dict[str, Any] = {
    "state": WebSocketServerProtocol.STATE_OPEN,
    "send_state": WebSocketServerProtocol.SEND_STATE_GROUND,
    "connected": 1,
    "data": b"",
    "inside_message": False,
    "current_frame": None,
    "websocket_version": 13,
    "websocket_protocol_in_use": None,
    "trackTimings": False,
    "trackedTimings": None,
    "triggered": False,
    "autoPingPendingSeq": 0,
    "_perMessageCompress": None,
    "_isMessageCompressed": False,
    "utf8validateIncomingCurrentMessage": False,
    **dict.fromkeys(
        "wasMaxFramePayloadSizeExceeded wasMaxMessagePayloadSizeExceeded closedByMe failedByMe droppedByMe wasClean "
        "wasServerConnectionDropTimeout wasOpenHandshakeTimeout wasCloseHandshakeTimeout "
        "wasServingFlashSocketPolicyFile".split(),
        False,
    ),
    **dict.fromkeys(
        "wasNotCleanReason localCloseCode localCloseReason remoteCloseCode remoteCloseReason "
        "openHandshakeTimeoutCall closeHandshakeTimeoutCall autoPingTimeoutCall autoPingPending autoPingPendingCall "
        "autoPingPendingSent message_data frame_data control_frame_data".split(),
    ),
}

# Of the handshake or of the last message; what is still asked for has a stand-in in the class.
_DISCARDED_ATTRIBUTES = frozenset(
    "http_request_data http_status_line http_headers http_request_uri http_request_path http_request_params "
    "http_request_host http_response_data websocket_protocols websocket_origin websocket_extensions "
    "websocket_extensions_in_use _wskey _transport_details _valid_events _results _listeners _parent utf8validator "
    "utf8validateLast current_frame_masker message_is_binary message_data_total_length frame_length "
    "is_open is_closed peer trafficStats send_queue".split()
)


class _NullDeferred:
    """Takes the place of Deferreds that nobody waits for."""

    def callback(self, result: object) -> None:
        """It has happened."""


def build_class_defaults(factory: WebSocketServerFactory) -> dict[str, Any]:
    """The attributes of a class whose sockets, once they are open, have them alike."""
    return {
        **{name: _as_class_attribute(getattr(factory, name)) for name in WebSocketServerProtocol.CONFIG_ATTRS},
        # Or they would be copied to every socket, and printed for a log that is none.
        "CONFIG_ATTRS": (),
        **_OPEN_SOCKET_ATTRIBUTES,
        "is_open": _NullDeferred(),
        "is_closed": _NullDeferred(),
        "peer": "",
        "trafficStats": TrafficStats(),
        "send_queue": (),
        "factory": factory,
    }


def _as_class_attribute(value: Any) -> Any:
    """As an attribute of a class; a function would become a method."""
    return staticmethod(value) if isinstance(value, FunctionType) else value


def drop_instance_defaults(socket: WebSocketServerProtocol) -> None:
    """Let an open socket that is in no message have of its own only what differs from its class."""
    alike = type(socket).__dict__
    own = vars(socket)
    different = {
        name: value
        for name, value in own.items()
        if name not in _DISCARDED_ATTRIBUTES and alike.get(name, alike) is not value
    }
    # A dictionary does not become smaller by itself.
    own.clear()
    own.update(different)


_log = Logger()

# A socket has its turn every so many ticks.
KEEPALIVE_SLOTS = 30
# Sockets that are looked at in one turn of the reactor.
_PINGS_PER_ITERATION = 100


class KeepaliveSocket(Protocol):
    """
    A socket.

    :ivar turn: when it has its turn; for the pulse alone.
    """

    turn: int

    def beat(self) -> None:
        """Send a ping; give the peer up if it has not been heard since the last one."""

    def __hash__(self) -> int: ...


class KeepaliveScheduler:
    """
    Lets every socket beat once in an interval, for the first time an interval after it was opened.

    Time is counted in ticks, so that setting the clock makes no peer look dead.

    :param interval: seconds.
    """

    def __init__(self, clock: IReactorTime, interval: float) -> None:
        self._clock = clock
        self._tick_seconds = interval / KEEPALIVE_SLOTS
        self._ring: list[set[KeepaliveSocket]] = [set() for _ in range(KEEPALIVE_SLOTS)]
        self._now = 0
        self._count = 0
        self._late: list[KeepaliveSocket] = []
        self._timer: IDelayedCall | None = None

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[KeepaliveSocket]:
        """The sockets that are open."""
        return chain.from_iterable(self._ring)

    def add(self, socket: KeepaliveSocket) -> None:
        """A socket is open."""
        socket.turn = self._now
        self._ring[self._now].add(socket)
        self._count += 1
        if self._timer is None:
            self._timer = self._clock.callLater(self._tick_seconds, self._tick)

    def remove(self, socket: KeepaliveSocket) -> None:
        """It is gone."""
        if socket not in self._ring[socket.turn]:
            return
        self._ring[socket.turn].discard(socket)
        self._count -= 1
        if not self._count and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick(self) -> None:
        self._timer = self._clock.callLater(self._tick_seconds, self._tick)
        self._now = (self._now + 1) % KEEPALIVE_SLOTS
        late = bool(self._late)
        self._late += self._ring[self._now]
        if not late:
            self._go_on()

    def _go_on(self) -> None:
        """Some of those whose turn it is, the rest when others have had theirs: many may have come at once."""
        now, self._late = self._late[:_PINGS_PER_ITERATION], self._late[_PINGS_PER_ITERATION:]
        for socket in now:
            if socket in self._ring[socket.turn]:
                _ping_socket(socket)
        if self._late:
            self._clock.callLater(0, self._go_on)


def _ping_socket(socket: KeepaliveSocket) -> None:
    """One that fails stops no other: nobody would find their dead peers any more."""
    try:
        socket.beat()
    except Exception:
        _log.failure("a socket has no pulse", redact_failure())


MAX_FRAGMENTS = 1024
# Bytes of pushes that wait for one socket.
MAX_SEND_QUEUE_BYTES = 1_048_576
# Messages of one socket, and bytes of them, that may wait for their turn before reading from it stops.
MAX_QUEUED_MESSAGES = 8
MAX_QUEUED_BYTES = 262_144
# Plain messages that are read in one go, and bytes in which others may begin; the rest in quanta of the scheduler.
_MESSAGES_PER_QUANTUM = 8
_CHUNK_BYTES = 256
# Frames that are charged together, and bytes that cost as much as one.
_FRAMES_PER_CHARGE = 16

# Where Autobahn keeps parts of frames and messages; its protocol is in reference cycles when the connection is gone.
_PARTIAL_MESSAGE_ATTRIBUTES = ("data", "message_data", "frame_data", "control_frame_data")


def has_native_masking() -> bool:
    """Whether Autobahn unmasks frames in C; without it, reading is many times slower."""
    return bool(USES_NVX)


@dataclass(frozen=True, slots=True)
class SocketContext:
    """
    What every socket works with.

    :param receive: takes a DIDComm message, gives the reply.
    :param converse: begins to speak Decentrl.
    :param memory: told of large buffers that are free again.
    :param scheduler: of sockets that have sent more than is served at once.
    :param admits: charges an address for frames of any kind: whether it is within its limit.
    """

    receive: ReceiveMessage
    converse: Callable[[WebSocketSession], SocketHandler]
    connections: ConnectionManager[Any]
    recorder: EventRecorder
    peers: ClientAddressResolver
    clock: IReactorTime
    memory: MemoryReclaimer
    scheduler: RoundRobinScheduler
    admits: Callable[[str, int], bool]


class NullLogger:
    """Takes the place of Autobahn's loggers: they tell addresses and what clients wrote. Our events tell the rest."""

    def __getattr__(self, level: str) -> Callable[..., None]:
        return lambda *args, **values: None


class MediatorSocket(WebSocketServerProtocol):
    """
    One socket. It translates and nothing more.

    Messages of one socket are served one after the other, so that what a wallet asks for in a row is answered in
    that order; while too many wait, the socket is not read.

    Autobahn shakes hands, closes, and reads whatever is not plain. Plain frames are read and written here
    (:mod:`mediatord.http.websocket_frames`): it would spend more on one than all the rest of its way takes.
    """

    # For thousands of them: Autobahn's own attributes are those of the class (:mod:`mediatord.http.websocket`).
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

    log: Any = NullLogger()
    transport: Any
    # As Autobahn calls them.
    maxFramePayloadSize: int  # noqa: N815
    maxMessagePayloadSize: int  # noqa: N815
    _sockets: SocketContext
    _pulse: KeepaliveScheduler
    _max_outbox: int

    def __init__(self) -> None:
        super().__init__()
        self.client = ""
        self.name = secrets.token_hex(8)
        self.turn = 0
        self._outbox = SendQueue(self._write_frame, max_bytes=self._max_outbox, on_drained=self._cleared)
        self._speech: ProtocolSocketHandler = DIDCommSocketHandler(self._sockets.receive, self, self._outbox.put)
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
        return self._outbox.waiting, self._outbox.waiting_bytes + _count_unsent_bytes(self.transport)

    @property
    def unserved(self) -> tuple[int, int]:
        """Messages that wait for their turn, and their bytes, with those of one that is not complete yet."""
        waiting = self._waiting or ()
        begun = self.message_data_total_length if self.inside_message else 0
        return len(waiting), sum(len(payload) for payload, _ in waiting) + len(self.data) + len(self._ahead) + begun

    def onConnect(self, request: Any) -> None:
        """The handshake was read; no sub-protocol is ever selected."""
        token = request.headers.get(PROBE_HEADER, "").encode("latin-1", "replace")
        self.client = self._sockets.peers.rate_limit_key(
            _get_peer_host(self), request.headers.get("x-forwarded-for"), token
        )
        if unquote(request.path).strip("/") == "ws":
            self._speech = ProtocolSwitch(self._sockets.converse(self), self._speech)

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
        self._sockets.recorder.record_connection_opened(self.name, self.client)
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
        elif not self._full and not (self._is_plain() and find_simple_frame(data, at, self.maxMessagePayloadSize)):
            self._resting = False
            begins = True
            while at < len(data) and (begins or self._payload_left()):
                begins = False
                end = at + max(self._payload_left(), _CHUNK_BYTES)
                self._dataReceived(data[at:end])
                at = end
            self._charge(0)
        if self._opened and self.state == self.STATE_OPEN and self._is_between_messages():
            drop_instance_defaults(self)
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
        if self._frames >= _FRAMES_PER_CHARGE:
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
        while at < len(data) and frames < _MESSAGES_PER_QUANTUM and self.state == self.STATE_OPEN and not self._full:
            frame = find_simple_frame(data, at, self.maxMessagePayloadSize)
            if frame is None:
                break
            at = frame.end
            frames += 1
            if frame.kind != PONG_FRAME:
                self.onMessage(unmask_payload(data, frame), frame.kind == BINARY_FRAME)
        self._frames += frames
        if self._frames >= _FRAMES_PER_CHARGE:
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
        if len(payload) >= LARGE_BUFFER_BYTES:
            self._sockets.memory.released(len(payload))
            self._frames += len(payload) // LARGE_BUFFER_BYTES
        if self._waiting is None:
            self._waiting = deque()
        self._waiting.append((payload, isBinary))
        self._go_on()
        if self._waiting and self._is_full(MAX_QUEUED_MESSAGES):
            self._full = True
            self._pause()

    def _is_full(self, messages: int) -> bool:
        """Whether so many messages wait, or too many bytes."""
        waiting = self._waiting or ()
        return len(waiting) >= messages or sum([len(payload) for payload, _ in waiting]) > MAX_QUEUED_BYTES

    def onPing(self, payload: bytes) -> None:  # noqa: N802
        """Answer it; to a peer that does not read only the last one, once it does (RFC 6455 section 5.5.3)."""
        if self._outbox.is_drained:
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
        if self._waiting and not self._serving and self._outbox.is_drained:
            self._serving = True
            served = Deferred.fromCoroutine(self._serve())
            served.addErrback(lambda failure: _log.failure("serving a socket failed", redact_failure(failure)))

    async def _serve(self) -> None:
        try:
            while self._waiting and self._outbox.is_drained:
                payload, is_binary = self._waiting.popleft()
                if self._full and not self._is_full(MAX_QUEUED_MESSAGES // 2):
                    self._full = False
                    self._read_on()
                try:
                    await self._speech.hear(payload, is_binary)
                except ShutdownInProgress:
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
        write_immediately(self.transport, PING_FRAME)

    def limit_outbox(self, max_bytes: int) -> None:
        """Keep so many bytes of pushes from now on while the peer does not read."""
        self._outbox.limit(max_bytes)

    def _write_frame(self, payload: bytes) -> None:
        if self.state != self.STATE_OPEN:  # nothing may come after a close frame
            return
        # Autobahn's sendMessage costs three times as much, and would refuse what is longer than it would read.
        self._messages_out += 1
        self._bytes_out += len(payload)
        if len(payload) >= LARGE_BUFFER_BYTES:
            self._sockets.memory.released(len(payload))
        write_immediately(self.transport, build_text_header(len(payload)) + payload)

    def onClose(self, wasClean: bool, code: int | None, reason: str | None) -> None:  # noqa: N803
        """
        The socket is gone; also called when the handshake failed.

        What was received before is served all the same: a sender of forwards may say what it has to and leave.
        """
        self._sockets.memory.released(self.unserved[1] + self.unsent[1])
        self._sockets.scheduler.discard(self)
        self._ahead = b""
        self._outbox.stopProducing()
        for name in _PARTIAL_MESSAGE_ATTRIBUTES:
            vars(self).pop(name, None)
        if self._opened:
            self._opened = False
            self._pulse.remove(self)
            ours = self.localCloseCode if self.closedByMe else None
            by: Literal["us", "peer"] = "us" if ours is not None else "peer"
            traffic = (self._messages_in, self._messages_out, self._bytes_in, self._bytes_out)
            self._sockets.recorder.record_connection_closed(self.name, self._speech.half, ours or code, by, traffic)
            self._speech.end()
        self._sockets.connections.closed(self)


def _get_peer_host(protocol: Any) -> str:
    return getattr(protocol.transport.getPeer(), "host", "") or ""


def _count_unsent_bytes(transport: Any) -> int:
    """Bytes that Twisted keeps until the kernel takes them; 0 where that is not known, as under TLS."""
    if not isinstance(transport, Connection):
        return 0
    return len(transport.dataBuffer) - transport.offset + transport._tempDataLen


class _UnbatchedTimer:
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


class MediatorSocketFactory(WebSocketServerFactory):
    """
    Makes sockets for upgraded requests.

    :param max_message: bytes of a message, and of a frame.
    """

    log: Any = NullLogger()

    def __init__(
        self, reactor: Any, sockets: SocketContext, max_message: int, *, ping_interval: float = 30.0
    ) -> None:
        super().__init__(url=None, server="mediatord", reactor=reactor)
        # Autobahn's timers run on this.
        txaio.config.loop = reactor  # type: ignore[attr-defined]  # made at run time
        # There is no public way: txaio's own takes the moments from the reactor.
        self._batched_timer = _UnbatchedTimer(reactor)
        self.setProtocolOptions(
            # Fail with a close code, not by cutting the line.
            failByDrop=False,
            openHandshakeTimeout=10,
            closeHandshakeTimeout=2,
            # One timer for each socket would be more than all else it takes; see the pulse.
            autoPingInterval=0,
            tcpNoDelay=True,
            # JSON is checked to be UTF-8 when it is parsed.
            utf8validateIncoming=False,
        )
        own = {"__slots__": (), "_sockets": sockets, "_pulse": KeepaliveScheduler(reactor, ping_interval)}
        self._make: type[MediatorSocket] = type("Socket", (MediatorSocket,), {**build_class_defaults(self), **own})
        self.limit(max_message)

    def limit(self, max_message: int, max_outbox: int = MAX_SEND_QUEUE_BYTES) -> None:
        """
        Take messages and frames of so many bytes from now on, also on sockets that are open, and keep so many bytes
        of pushes for each.
        """
        self._make._max_outbox = max_outbox
        for socket in self._open():
            socket.limit_outbox(max_outbox)
        self.setProtocolOptions(maxFramePayloadSize=max_message, maxMessagePayloadSize=max_message)
        # What Autobahn asks for is of the class.
        self._make.maxFramePayloadSize = self._make.maxMessagePayloadSize = max_message

    def unsent(self) -> tuple[int, int]:
        """Of all open sockets together; see :attr:`MediatorSocket.unsent`."""
        return _sum_usage(socket.unsent for socket in self._open())

    def unserved(self) -> tuple[int, int]:
        """Likewise; see :attr:`MediatorSocket.unserved`."""
        return _sum_usage(socket.unserved for socket in self._open())

    def _open(self) -> Iterator[MediatorSocket]:
        return cast(Iterator[MediatorSocket], iter(self._make._pulse))

    def buildProtocol(self, addr: object) -> MediatorSocket:
        """One socket."""
        return self._make()


def _sum_usage(held: Iterable[tuple[int, int]]) -> tuple[int, int]:
    entries = size = 0
    for more, bytes_ in held:
        entries, size = entries + more, size + bytes_
    return entries, size
