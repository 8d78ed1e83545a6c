"""
WebSockets: messages of both protocols in frames, replies and pushes, keepalive pings (contract section 3).

The protocol of a socket at `/ws` is chosen by its first message: DIDComm if that is an envelope, else Decentrl.

Autobahn does the handshake, the closing, and all but plain frames (RFC 6455 section 5), which are read and written
here. Its protocol has about a hundred attributes: options, the handshake, state of a close. Those of an idle socket
have equal values, so they are moved to the class, and each instance has only those that differ.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from types import FunctionType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol
from urllib.parse import unquote

import txaio
from autobahn.twisted.websocket import WebSocketServerFactory, WebSocketServerProtocol
from autobahn.websocket import USES_NVX
from autobahn.websocket.protocol import TrafficStats
from autobahn.websocket.xormasker import create_xor_masker  # type: ignore[attr-defined]  # chosen at run time
from twisted.internet.defer import Deferred, succeed
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.internet.tcp import Connection
from twisted.logger import Logger

from mediatord.delivery.connections import MAX_RECEIPTS, SendQueue
from mediatord.didcomm.messages import MessageOrigin, UnpackedMessage, is_unreadable
from mediatord.errors import ShutdownInProgress
from mediatord.http.client_address import get_host
from mediatord.observability.event_recorder import ProtocolName
from mediatord.protocol.decentrl.commands import is_didcomm_envelope
from mediatord.protocol.probe_markers import PROBE_HEADER
from mediatord.ratelimit.admission import RequestReply
from mediatord.runtime.failure_logging import redact_failure
from mediatord.runtime.memory_reclaimer import LARGE_BUFFER_BYTES
from mediatord.runtime.socket_writes import write_immediately

if TYPE_CHECKING:
    from mediatord.http.resources import HTTPContext

_log = Logger()

TEXT_FRAME, BINARY_FRAME, PONG_FRAME = 0x81, 0x82, 0x8A
_PING_FRAME = 0x89
PING_FRAME = b"\x89\x04ping"

# Digits of the number of a frame.
_MAX_RECEIPT_BYTES = 20

_MASK_BIT = 0x80
_EXTENDED_LENGTH = 126
# Up to this size XOR of integers is faster than Autobahn's native code; without native code it always is.
_MAX_INTEGER_XOR = 768 if USES_NVX else 1 << 62


class FrameBounds(NamedTuple):
    """
    Position of a frame in a buffer.

    :param kind: its first byte, one of those above.
    :param begin: start of its payload, right behind the mask.
    :param end: end of its payload.
    """

    kind: int
    begin: int
    end: int


def find_simple_frame(data: bytes, at: int, max_payload: int) -> FrameBounds | None:
    """
    The frame at `at`, if it is complete and plain: final, masked, without extensions, its length in the shortest form
    of at most 16 bits, and a text, binary or pong frame. None for all others, invalid ones included.

    :param max_payload: bytes.
    """
    left = len(data) - at
    if left < 6:
        return None
    kind, length, begin = data[at], data[at + 1] - _MASK_BIT, at + 6
    if kind not in (TEXT_FRAME, BINARY_FRAME, PONG_FRAME) or length < 0:
        return None
    if length >= _EXTENDED_LENGTH:
        if length > _EXTENDED_LENGTH or left < 8 or kind == PONG_FRAME:
            return None
        length, begin = data[at + 2] << 8 | data[at + 3], at + 8
        if length < _EXTENDED_LENGTH:
            return None
    end = begin + length
    return FrameBounds(kind, begin, end) if end <= len(data) and length <= max_payload else None


def unmask_payload(data: bytes, frame: FrameBounds) -> bytes:
    """The payload of a frame without the mask."""
    begin, end = frame.begin, frame.end
    mask, masked = data[begin - 4 : begin], data[begin:end]
    size = end - begin
    if size < _MAX_INTEGER_XOR:
        repeated = (mask * (size // 4 + 1))[:size]
        return (int.from_bytes(masked, "big") ^ int.from_bytes(repeated, "big")).to_bytes(size, "big")
    unmasked: bytes = create_xor_masker(mask, size).process(masked)
    return unmasked


def build_text_header(length: int) -> bytes:
    """The header of an unmasked, final text frame (section 5.2)."""
    if length < _EXTENDED_LENGTH:
        return bytes((TEXT_FRAME, length))
    if length < 65_536:
        return b"\x81\x7e" + length.to_bytes(2, "big")
    return b"\x81\x7f" + length.to_bytes(8, "big")


def build_ping(payload: bytes) -> bytes:
    """An unmasked ping, whose payload may have 125 bytes."""
    return bytes((_PING_FRAME, len(payload))) + payload


class FrameWithReceipt(bytes):
    """
    The payload of a text frame that is followed by a ping.

    :ivar number: of the ping.
    """

    number: int


class ReceiptTracker:
    """
    Pings behind frames of one socket, and what to call when they are answered. Their payloads are numbers.

    A peer may answer only the last of several pings (RFC 6455 section 5.5.3), so a pong also stands for those before.
    """

    __slots__ = ("_last", "_missing", "_written")

    def __init__(self) -> None:
        self._last = self._written = 0
        self._missing: deque[tuple[int, Callable[[], None]]] = deque()

    @property
    def is_full(self) -> bool:
        """Whether as many answers are missing as may be."""
        return len(self._missing) >= MAX_RECEIPTS

    def add(self, frame: bytes) -> FrameWithReceipt:
        """A frame to be queued; :meth:`expect` follows if it was."""
        numbered = FrameWithReceipt(frame)
        numbered.number = self._last + 1
        return numbered

    def expect(self, on_receipt: Callable[[], None]) -> None:
        """Call back for the frame that was added last."""
        self._last += 1
        self._missing.append((self._last, on_receipt))

    def follow_frame(self, frame: bytes) -> bytes:
        """The ping to write behind a frame, if it has one."""
        if not isinstance(frame, FrameWithReceipt):
            return b""
        self._written = frame.number
        return self.make_keepalive()

    def make_keepalive(self) -> bytes:
        """A ping that may be sent at any time: it repeats the last one, whose answer it may replace."""
        return build_ping(b"%d" % self._written)

    def receive_pong(self, payload: bytes) -> None:
        """Call back for all frames before a pong; one that answers no ping is ignored."""
        if len(payload) > _MAX_RECEIPT_BYTES or not payload.isdigit() or int(payload) > self._written:
            return
        answered = int(payload)
        while self._missing and self._missing[0][0] <= answered:
            _, on_receipt = self._missing.popleft()
            try:
                on_receipt()
            except Exception:
                _log.failure("processing a pong failed", redact_failure())


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

# Of the handshake or of the last message; those still read have a default in the class.
_DISCARDED_ATTRIBUTES = frozenset(
    "http_request_data http_status_line http_headers http_request_uri http_request_path http_request_params "
    "http_request_host http_response_data websocket_protocols websocket_origin websocket_extensions "
    "websocket_extensions_in_use _wskey _transport_details _valid_events _results _listeners _parent utf8validator "
    "utf8validateLast current_frame_masker message_is_binary message_data_total_length frame_length "
    "is_open is_closed peer trafficStats send_queue".split()
)


class _NullDeferred:
    """Replaces Autobahn's Deferreds, which are not used here."""

    def callback(self, result: object) -> None:
        """Does nothing."""


def build_class_defaults(factory: WebSocketServerFactory) -> dict[str, Any]:
    """The attributes that have the same value in all open sockets of a class."""
    return {
        **{name: _as_class_attribute(getattr(factory, name)) for name in WebSocketServerProtocol.CONFIG_ATTRS},
        # Or they would be copied to every socket and formatted for the disabled log.
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
    """The value as a class attribute; a function would become a method."""
    return staticmethod(value) if isinstance(value, FunctionType) else value


def drop_instance_defaults(socket: WebSocketServerProtocol) -> None:
    """Remove the attributes of an open socket between messages that equal those of its class."""
    alike = type(socket).__dict__
    own = vars(socket)
    different = {
        name: value
        for name, value in own.items()
        if name not in _DISCARDED_ATTRIBUTES and alike.get(name, alike) is not value
    }
    # A dict does not shrink by deletion.
    own.clear()
    own.update(different)


# Seconds between two pings of a socket.
PING_INTERVAL = 30.0
# Ticks in a ping interval; each socket is pinged in one of them.
KEEPALIVE_SLOTS = 30
# Sockets that are pinged in one reactor iteration.
_PINGS_PER_ITERATION = 100


class KeepaliveScheduler:
    """
    Pings every socket once in an interval, first an interval after it was opened, with a single timer.

    Time is counted in ticks, so that a step of the clock makes no peer look dead.

    :param interval: seconds.
    """

    def __init__(self, clock: IReactorTime, interval: float) -> None:
        self._clock = clock
        self._tick_seconds = interval / KEEPALIVE_SLOTS
        self._ring: list[set[Any]] = [set() for _ in range(KEEPALIVE_SLOTS)]
        self._now = 0
        self._due: list[Any] = []
        self._timer: IDelayedCall | None = None

    def __len__(self) -> int:
        return sum(map(len, self._ring))

    def __iter__(self) -> Iterator[Any]:
        """All open sockets."""
        return chain.from_iterable(self._ring)

    def add(self, socket: Any) -> None:
        """Begin to ping a socket."""
        socket.keepalive_slot = self._now
        self._ring[self._now].add(socket)
        if self._timer is None:
            self._timer = self._clock.callLater(self._tick_seconds, self._tick)

    def remove(self, socket: Any) -> None:
        """Stop pinging a socket; it may have been removed before."""
        self._ring[socket.keepalive_slot].discard(socket)
        if self._timer is not None and not any(self._ring):
            self._timer.cancel()
            self._timer = None

    def _tick(self) -> None:
        self._timer = self._clock.callLater(self._tick_seconds, self._tick)
        self._now = (self._now + 1) % KEEPALIVE_SLOTS
        is_running = bool(self._due)
        self._due += self._ring[self._now]
        if not is_running:
            self._ping_some()

    def _ping_some(self) -> None:
        """Ping some of the due sockets, and the rest in further reactor iterations: many may be due at once."""
        now, self._due = self._due[:_PINGS_PER_ITERATION], self._due[_PINGS_PER_ITERATION:]
        for socket in now:
            if socket in self._ring[socket.keepalive_slot]:
                try:
                    socket.ping()
                except Exception:  # it must not stop the pings of others
                    _log.failure("sending a keepalive ping failed", redact_failure())
        if self._due:
            self._clock.callLater(0, self._ping_some)


MAX_FRAGMENTS = 1024
# Unreadable messages after which a DIDComm socket is closed (DIDComm reference 3.2).
MAX_UNDECRYPTABLE = 3
# Messages of one socket, and their bytes, that may be queued before reading from it is paused.
MAX_QUEUED_MESSAGES = 8
MAX_QUEUED_BYTES = 262_144
# Plain messages read in one go, and bytes given to Autobahn at once; the rest is read in quanta of the scheduler.
_MESSAGES_PER_QUANTUM = 8
_CHUNK_BYTES = 256
# Frames that are charged together.
_FRAMES_PER_CHARGE = 16

# Attributes in which Autobahn keeps parts of frames and messages; closed, its protocol is in reference cycles.
_PARTIAL_MESSAGE_ATTRIBUTES = ("data", "message_data", "frame_data", "control_frame_data")


def has_native_masking() -> bool:
    """Whether Autobahn unmasks frames in C; without it, reading is many times slower."""
    return bool(USES_NVX)


class DecentrlSocketHandler(Protocol):
    """Handles the messages of one Decentrl socket."""

    def start(self) -> None:
        """Called when the socket is open."""

    async def handle_message(self, frame: bytes, binary: bool) -> None:
        """
        Handle a message; replies go to the session.

        :raise ShutdownInProgress: it was not processed.
        """

    def stop(self) -> None:
        """Called when the socket is closed, or its protocol is DIDComm after all."""


class NullLogger:
    """Replaces Autobahn's loggers, which log addresses and content."""

    def __getattr__(self, level: str) -> Callable[..., None]:
        return lambda *args, **values: None


class MediatorSocket(WebSocketServerProtocol):
    """
    One open WebSocket.

    Its messages are served one after the other and answered in order; while too many are queued, reading is paused.
    Plain frames are read and written without Autobahn (:mod:`mediatord.http.websocket`), which would take
    longer than everything else.
    """

    # Small, as there are thousands of them.
    __slots__ = (
        "_bytes_in",
        "_bytes_out",
        "_unparsed",
        "_fragments",
        "_frames",
        "_full",
        "_heard_since_ping",
        "_messages_in",
        "_messages_out",
        "_opened",
        "_send_queue",
        "_pending_pong",
        "_pinged",
        "_reading",
        "_receipts",
        "_has_class_defaults",
        "_serving",
        "_decentrl",
        "_protocol_name",
        "_undecryptable",
        "_queued",
        "client",
        "name",
        "transport",
        "keepalive_slot",
    )

    log: Any = NullLogger()
    transport: Any
    # As Autobahn calls them.
    maxFramePayloadSize: int  # noqa: N815
    maxMessagePayloadSize: int  # noqa: N815
    _context: HTTPContext
    _keepalive: KeepaliveScheduler
    _max_send_queue: int

    def __init__(self) -> None:
        super().__init__()
        self.client = ""
        self.name = secrets.token_hex(8)
        self.keepalive_slot = 0
        self._send_queue = SendQueue(self._write_frame, max_bytes=self._max_send_queue, on_drained=self._drained)
        self._decentrl: DecentrlSocketHandler | None = None
        # None before the first message of a socket that may be of either protocol.
        self._protocol_name: ProtocolName | None = "didcomm"
        self._undecryptable = 0
        self._queued: deque[tuple[bytes, bool]] | None = None
        self._serving = False
        self._reading = True
        self._full = False
        # Bytes received and not parsed yet.
        self._unparsed = b""
        self._frames = 0
        self._opened = False
        self._has_class_defaults = False
        self._heard_since_ping = False
        self._pinged = False
        self._pending_pong: bytes | None = None
        # None until a frame is sent with a receipt.
        self._receipts: ReceiptTracker | None = None
        self._fragments = 0
        self._messages_in = self._messages_out = self._bytes_in = self._bytes_out = 0

    @property
    def unsent(self) -> tuple[int, int]:
        """Number of queued frames, and bytes not sent yet, those of the transport included."""
        return self._send_queue.queued_frames, self._send_queue.queued_bytes + _count_unsent_bytes(self.transport)

    @property
    def unserved(self) -> tuple[int, int]:
        """Number of queued messages, and their bytes with those not parsed yet."""
        queued = self._queued or ()
        size = sum(len(payload) for payload, _ in queued) + len(self.data) + len(self._unparsed)
        return len(queued), size + (self.message_data_total_length if self.inside_message else 0)

    def onConnect(self, request: Any) -> None:
        """The handshake was read; no sub-protocol is ever selected."""
        token = request.headers.get(PROBE_HEADER, "").encode("latin-1", "replace")
        self.client = self._context.client_addresses.rate_limit_key(
            get_host(self.transport.getPeer()), request.headers.get("x-forwarded-for"), token
        )
        if unquote(request.path).strip("/") == "ws":
            self._protocol_name = None
            self._decentrl = self._context.open_decentrl_socket(self)

    def failHandshake(self, reason: str, code: int = 400, responseHeaders: Any = None) -> None:  # noqa: N802, N803
        """Refuse an invalid handshake, without Autobahn's reason, which quotes headers."""
        super().failHandshake("bad handshake", code, responseHeaders)

    def onOpen(self) -> None:
        """The handshake is done."""
        # After the upgrade the HTTP channel is still the transport's producer.
        self.transport.unregisterProducer()
        self.transport.registerProducer(self._send_queue, True)
        self._opened = True
        self._keepalive.add(self)
        self._context.recorder.record_connection_opened(self.name, self.client)
        self._context.connections.opened(self)
        if self._decentrl is not None:
            self._decentrl.start()

    def dataReceived(self, data: bytes) -> None:
        """Parse frames; a part of one is kept."""
        self._heard_since_ping = True
        if self._unparsed:
            self._unparsed += data
            return
        at = self._read_plain(data) if self._has_class_defaults else 0
        if at != len(data):
            self._read_some(data, at)

    def run_quantum(self) -> None:
        """Parse some of the bytes received before."""
        if self._full:
            return
        data, self._unparsed = self._unparsed, b""
        at = self._read_plain(data) if self._has_class_defaults else 0
        if at != len(data):
            self._read_some(data, at)
        self._read_on()

    def _read_some(self, data: bytes, at: int) -> None:
        """Have Autobahn read a frame that is not plain, or some small ones; the rest is left for a quantum."""
        is_plain = self._has_class_defaults and self.state == self.STATE_OPEN
        if self.state == self.STATE_CONNECTING:
            self._dataReceived(data)
            at = len(data)
        elif not self._full and not (is_plain and find_simple_frame(data, at, self.maxMessagePayloadSize)):
            self._has_class_defaults = False
            begins = True
            while at < len(data) and (begins or self._payload_left()):
                begins = False
                end = at + max(self._payload_left(), _CHUNK_BYTES)
                self._dataReceived(data[at:end])
                at = end
            self._charge()
        is_between_messages = not (self.data or self.inside_message or self.current_frame)
        if self._opened and self.state == self.STATE_OPEN and is_between_messages:
            drop_instance_defaults(self)
            self._has_class_defaults = True
        if at < len(data) and self.state != self.STATE_CLOSED and not self.transport.disconnecting:
            self._unparsed = data[at:]
            self._pause()
            self._context.scheduler.add(self)

    def _payload_left(self) -> int:
        """Missing bytes of the current frame."""
        frame = self.current_frame
        left: int = frame.length - self.current_frame_masker.pointer() if frame is not None else 0
        return left

    def onFrameBegin(self) -> None:  # noqa: N802
        """Count a frame of any kind."""
        self._frames += 1
        super().onFrameBegin()

    def _charge(self) -> None:
        """Charge the address for frames, in batches."""
        if self._frames >= _FRAMES_PER_CHARGE:
            frames, self._frames = self._frames, 0
            if not self._context.admits(self.client, frames):
                self.close(1008, "too many frames")
                self.transport.loseConnection()

    def _pause(self) -> None:
        if self._reading:
            self._reading = False
            self.transport.pauseProducing()

    def _read_on(self) -> None:
        """Resume reading, unless there are unparsed bytes or too many queued messages."""
        if self._unparsed:
            self._context.scheduler.add(self)
        elif not (self._reading or self._full):
            self._reading = True
            self.transport.resumeProducing()

    def _read_plain(self, data: bytes) -> int:
        """Take the messages of whole, plain frames; returns the number of bytes parsed."""
        at = frames = 0
        while at < len(data) and frames < _MESSAGES_PER_QUANTUM and self.state == self.STATE_OPEN and not self._full:
            frame = find_simple_frame(data, at, self.maxMessagePayloadSize)
            if frame is None:
                break
            at = frame.end
            frames += 1
            if frame.kind != PONG_FRAME:
                self.onMessage(unmask_payload(data, frame), frame.kind == BINARY_FRAME)
            elif self._receipts is not None:
                self._receipts.receive_pong(unmask_payload(data, frame))
        self._frames += frames
        if self._frames >= _FRAMES_PER_CHARGE:
            self._charge()
        return at

    def fire(self, event: str, *args: Any, **values: Any) -> Deferred[None]:
        """Autobahn's notification of listeners, of which there are none."""
        return succeed(None)

    def onMessageBegin(self, isBinary: bool) -> None:  # noqa: N803
        """Begin to count the fragments of a message."""
        self._fragments = 0
        super().onMessageBegin(isBinary)

    def onMessageFrameBegin(self, length: int) -> None:
        """Bound the number of fragments, as even empty ones take memory."""
        self._fragments += 1
        super().onMessageFrameBegin(length)
        if self._fragments > MAX_FRAGMENTS and not self.failedByMe:
            self._fail_connection(1009, "too many fragments")

    def onMessage(self, payload: bytes, isBinary: bool) -> None:  # noqa: N803
        """Queue and serve a message, text or binary."""
        if self.state != self.STATE_OPEN:  # closing: further messages are not served
            return
        self._messages_in += 1
        self._bytes_in += len(payload)
        if len(payload) >= LARGE_BUFFER_BYTES:
            self._context.memory.released(len(payload))
            self._frames += len(payload) // LARGE_BUFFER_BYTES
        if self._queued is None:
            self._queued = deque()
        self._queued.append((payload, isBinary))
        self._serve_next()
        if self._queued and self._is_full(MAX_QUEUED_MESSAGES):
            self._full = True
            self._pause()

    def _is_full(self, messages: int) -> bool:
        """Whether this many messages, or too many bytes, are queued."""
        waiting = self._queued or ()
        return len(waiting) >= messages or sum([len(payload) for payload, _ in waiting]) > MAX_QUEUED_BYTES

    def onPing(self, payload: bytes) -> None:  # noqa: N802
        """Answer with a pong; while the peer does not read, only the last ping (RFC 6455 section 5.5.3)."""
        if self._send_queue.is_drained:
            super().onPing(payload)
        else:
            self._pending_pong = payload

    def onPong(self, payload: bytes) -> None:  # noqa: N802
        """The peer has read what was sent before a ping."""
        if self._receipts is not None:
            self._receipts.receive_pong(payload)

    def _drained(self) -> None:
        owed, self._pending_pong = self._pending_pong, None
        if owed is not None:
            super().onPing(owed)
        self._serve_next()

    def _serve_next(self) -> None:
        """Serve the next queued message, if the last one is served and the peer reads its replies."""
        if not self._queued or self._serving or not self._send_queue.is_drained:
            return
        self._serving = True
        payload, is_binary = self._queued.popleft()
        if self._full and not self._is_full(MAX_QUEUED_MESSAGES // 2):
            self._full = False
            self._read_on()
        if self._protocol_name is None:
            self._choose_protocol(payload)
        # Messages received before the socket was closed are still served.
        if self._protocol_name == "didcomm":
            origin = MessageOrigin(self.client, self)
            general_path = partial(self._serve_general_path, payload, origin)
            if not self._context.acknowledgement_fast_path(payload, origin, self._finish, general_path):
                general_path(None)
        elif self._decentrl is not None:
            self._serve(self._decentrl.handle_message(payload, is_binary))
        else:
            self._finish(None)

    def _serve_general_path(self, payload: bytes, origin: MessageOrigin, opened: UnpackedMessage | None) -> None:
        self._serve(self._context.receive(payload, origin, opened))

    def _serve(self, work: Awaitable[RequestReply | None]) -> None:
        served = Deferred.fromCoroutine(self._wait_for(work))
        served.addErrback(lambda failure: _log.failure("serving a socket failed", redact_failure(failure)))

    async def _wait_for(self, work: Awaitable[RequestReply | None]) -> None:
        reply = None
        try:
            reply = await work
        except ShutdownInProgress:
            self.close(1001, "going away")
        finally:
            self._finish(reply)

    def _finish(self, reply: RequestReply | None) -> None:
        """Send the reply to a message, if there is one, and go on to the next."""
        try:
            if reply is not None:
                self._answer(reply)
        finally:
            self._serving = False
            if self._queued:
                self._serve_next()
            else:
                self._queued = None  # an empty deque takes more than half a KiB

    def _choose_protocol(self, payload: bytes) -> None:
        """By the first message of a socket that may be of either protocol."""
        self._protocol_name = "didcomm" if is_didcomm_envelope(payload) else "decentrl"
        if self._protocol_name == "didcomm":
            self._stop_decentrl()

    def _answer(self, reply: RequestReply) -> None:
        """Send a reply; the first unreadable message is answered, and the third ends the socket."""
        if reply.fault is not None and is_unreadable(reply.fault):
            self._undecryptable += 1
            if self._undecryptable == 1 and reply.body:
                self._send_queue.put(reply.body)
            elif self._undecryptable >= MAX_UNDECRYPTABLE:
                self.close(1008, "too many undecryptable messages")
        elif reply.body:
            self._send_queue.put(reply.body)

    def _stop_decentrl(self) -> None:
        decentrl, self._decentrl = self._decentrl, None
        if decentrl is not None:
            decentrl.stop()

    def send(self, frame: bytes) -> bool:
        """Queue one text frame; False when the socket cannot take it now."""
        return self.state == self.STATE_OPEN and self._send_queue.offer(frame)

    def send_with_receipt(self, frame: bytes, on_receipt: Callable[[], None]) -> bool:
        """As :meth:`send`; calls back when the peer has answered the ping behind the frame."""
        if self._receipts is None:
            self._receipts = ReceiptTracker()
        receipts = self._receipts
        if receipts.is_full or not self.send(receipts.add(frame)):
            return False
        receipts.expect(on_receipt)
        return True

    def close(self, code: int, reason: str) -> None:
        """Begin the closing handshake; a peer that does not answer is dropped after two seconds."""
        if self.state == self.STATE_OPEN:
            self._queued = None
            # sendClose takes only the codes of applications.
            self.sendCloseFrame(code, reason.encode(), isReply=False)

    def ping(self) -> None:
        """Send a ping; drop the connection if nothing was received since the last one."""
        if self.state != self.STATE_OPEN:  # closing has its own timeout
            return
        if self._pinged and not self._heard_since_ping:
            self.onAutoPingTimeout()
            return
        self._pinged, self._heard_since_ping = True, False
        write_immediately(self.transport, PING_FRAME if self._receipts is None else self._receipts.make_keepalive())

    def _write_frame(self, payload: bytes) -> None:
        if self.state != self.STATE_OPEN:  # nothing may come after a close frame
            return
        # Autobahn's sendMessage takes three times as long, and refuses messages longer than those it may read.
        self._messages_out += 1
        self._bytes_out += len(payload)
        if len(payload) >= LARGE_BUFFER_BYTES:
            self._context.memory.released(len(payload))
        frame = build_text_header(len(payload)) + payload
        if self._receipts is not None:
            frame += self._receipts.follow_frame(payload)
        write_immediately(self.transport, frame)

    def onClose(self, wasClean: bool, code: int | None, reason: str | None) -> None:  # noqa: N803
        """
        The connection is closed; also called when the handshake failed.

        Messages received before are still served: a sender of forwards may send and close.
        """
        self._context.memory.released(self.unserved[1] + self.unsent[1])
        self._context.scheduler.discard(self)
        self._unparsed = b""
        self._send_queue.stopProducing()
        self._receipts = None  # what would be called may refer to the socket
        for name in _PARTIAL_MESSAGE_ATTRIBUTES:
            vars(self).pop(name, None)
        if self._opened:
            self._opened = False
            self._keepalive.remove(self)
            ours = self.localCloseCode if self.closedByMe else None
            by: Literal["us", "peer"] = "us" if ours is not None else "peer"
            protocol = self._protocol_name or "decentrl"
            received, sent = (self._messages_in, self._bytes_in), (self._messages_out, self._bytes_out)
            self._context.recorder.record_connection_closed(self.name, protocol, ours or code, by, received, sent)
            self._stop_decentrl()
        self._context.connections.closed(self)


def _count_unsent_bytes(transport: Any) -> int:
    """Bytes in Twisted's buffers; 0 where that is not known, as under TLS."""
    if not isinstance(transport, Connection):
        return 0
    return len(transport.dataBuffer) - transport.offset + transport._tempDataLen


class _UnbatchedTimer:
    """
    Replaces Autobahn's batched timer, which puts calls for the same time on one timer of the reactor.

    After a step of the clock, pending timers have other times (:mod:`mediatord.runtime.reactor_clock`), and a call
    would be put on one that fires much earlier or later.
    """

    def __init__(self, reactor: Any) -> None:
        self._reactor = reactor

    def call_later(self, delay: float, call: Callable[..., None], *args: Any, **options: Any) -> IDelayedCall:
        """Call `call` after `delay` seconds."""
        timer: IDelayedCall = self._reactor.callLater(delay, call, *args, **options)
        return timer


class MediatorSocketFactory(WebSocketServerFactory):
    """
    Makes sockets for upgraded requests.

    Before the first, :meth:`limit` has to be called.
    """

    log: Any = NullLogger()

    def __init__(self, context: HTTPContext) -> None:
        reactor: Any = context.clock
        super().__init__(url=None, server="mediatord", reactor=reactor)
        # Autobahn's timers use this reactor.
        txaio.config.loop = reactor  # type: ignore[attr-defined]  # made at run time
        # Autobahn has no public way to replace it.
        self._batched_timer = _UnbatchedTimer(reactor)
        self.setProtocolOptions(
            # Fail with a close code, not by closing the connection.
            failByDrop=False,
            openHandshakeTimeout=10,
            closeHandshakeTimeout=2,
            # A timer for each socket would take more than everything else; see KeepaliveScheduler.
            autoPingInterval=0,
            tcpNoDelay=True,
            # JSON is checked to be UTF-8 when it is parsed.
            utf8validateIncoming=False,
        )
        own = {"__slots__": (), "_context": context, "_keepalive": KeepaliveScheduler(reactor, PING_INTERVAL)}
        self._make: type[MediatorSocket] = type("Socket", (MediatorSocket,), {**build_class_defaults(self), **own})

    def limit(self, max_message: int, max_send_queue: int) -> None:
        """
        Change the limits, also of open sockets.

        :param max_message: bytes of a message, and of a frame.
        :param max_send_queue: bytes of pushes queued for one socket.
        """
        self._make._max_send_queue = max_send_queue
        for socket in self._make._keepalive:
            socket._send_queue.limit(max_send_queue)
        self.setProtocolOptions(maxFramePayloadSize=max_message, maxMessagePayloadSize=max_message)
        # Sockets read these from their class.
        self._make.maxFramePayloadSize = self._make.maxMessagePayloadSize = max_message

    def unsent(self) -> tuple[int, int]:
        """Sum of :attr:`MediatorSocket.unsent` over all open sockets."""
        return _sum_usage([socket.unsent for socket in self._make._keepalive])

    def unserved(self) -> tuple[int, int]:
        """Sum of :attr:`MediatorSocket.unserved` over all open sockets."""
        return _sum_usage([socket.unserved for socket in self._make._keepalive])

    def buildProtocol(self, addr: object) -> MediatorSocket:
        """Make a socket."""
        return self._make()


def _sum_usage(held: Sequence[tuple[int, int]]) -> tuple[int, int]:
    return sum(entries for entries, _ in held), sum(size for _, size in held)
