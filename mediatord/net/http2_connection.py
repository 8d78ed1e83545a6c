"""One HTTP/2 connection of a client (RFC 9113): streams, flow control, GOAWAY, and whether the peer is alive."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import (
    DataReceived,
    Event,
    RemoteSettingsChanged,
    ResponseReceived,
    StreamEnded,
    StreamReset,
)
from h2.exceptions import H2Error
from h2.settings import SettingCodes, Settings
from OpenSSL import SSL
from twisted.internet import protocol
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IDelayedCall, IPushProducer
from twisted.internet.protocol import connectionDone
from twisted.python.failure import Failure
from zope.interface import implementer

from mediatord.net.outbound_http import OutboundRequestError

# Concurrent streams, even if the server permits more.
_MAX_STREAMS = 200
# Streams in the life of a connection: h2 remembers each that was closed.
_MAX_STREAMS_EVER = 50_000
_MAX_HEADER_BYTES = 16_384
_MAX_BODY_BYTES = 16_384
# Acknowledgements held back while the server does not read.
_MAX_HELD_BYTES = 65_536
_PING_INTERVAL = 60.0
_PING_TIMEOUT = 10.0
_IDLE_SECONDS = 1800.0

_FRAME_HEAD_BYTES = 9
_GOAWAY_TYPE = 7
_MIN_GOAWAY_BYTES = 8
_MAX_FRAME_BYTES = 16_384
_MAX_STREAM_ID = 2**31 - 1


class HTTP2Response(NamedTuple):
    """:param headers: lower case names; of a repeated one the last."""

    status: int
    headers: dict[str, str]
    body: bytes


class HTTP2Request:
    """
    A request that waits, or is on a stream.

    :ivar done: fires with the response.
    :ivar attempts: how often it was put on a stream.
    """

    __slots__ = ("attempts", "body", "connection", "done", "headers", "stream_id")

    def __init__(self, headers: Sequence[tuple[str, str]], body: bytes, done: Deferred[HTTP2Response]) -> None:
        self.headers = headers
        self.body = body
        self.done = done
        self.attempts = 0
        self.connection: HTTP2Connection | None = None
        self.stream_id = 0


class IConnectionOwner(Protocol):
    """What is told about a connection."""

    def connection_made(self, connection: HTTP2Connection) -> None:
        """It exists, but is not ready."""

    def connection_draining(self, connection: HTTP2Connection, unprocessed: Sequence[HTTP2Request]) -> None:
        """It takes no more requests; the server has not processed some of those that it took."""

    def request_refused(self, request: HTTP2Request) -> None:
        """The server has not processed a request, and may if it is sent again."""

    def capacity_changed(self) -> None:
        """It may take requests again."""

    def connection_closed(self, connection: HTTP2Connection) -> None:
        """It is gone; its requests have failed."""


class _Stream:
    __slots__ = ("body", "headers", "request", "status", "unsent")

    def __init__(self, request: HTTP2Request) -> None:
        self.request = request
        self.unsent = request.body
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = bytearray()


class GoAwayExtractor:
    """
    Separates GOAWAY frames from the bytes of a connection.

    For h2, a GOAWAY is the end of the connection (python-hyper/h2 #1181), while the server still answers the streams
    that it has accepted. Thus h2 is not shown any.
    """

    def __init__(self) -> None:
        self._head = bytearray()
        self._left = 0
        self._payload = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes | int]:
        """
        Yield bytes of other frames, and of each GOAWAY the last stream that the server may have processed.

        :raise ValueError: a frame of invalid size.
        """
        other = bytearray()
        view = memoryview(data)
        while view:
            if len(self._head) < _FRAME_HEAD_BYTES:
                view = self._read_head(view, other)
                if len(self._head) < _FRAME_HEAD_BYTES:
                    break
            chunk = view[: self._left]
            view = view[len(chunk) :]
            self._left -= len(chunk)
            is_goaway = self._head[3] == _GOAWAY_TYPE
            (self._payload if is_goaway else other).extend(chunk)
            if self._left:
                break
            self._head.clear()
            if is_goaway:
                yield bytes(other)
                other.clear()
                yield int.from_bytes(self._payload[:4]) & _MAX_STREAM_ID
        yield bytes(other)

    def _read_head(self, view: memoryview, other: bytearray) -> memoryview:
        missing = _FRAME_HEAD_BYTES - len(self._head)
        self._head += view[:missing]
        if len(self._head) == _FRAME_HEAD_BYTES:
            self._left = int.from_bytes(self._head[:3])
            self._payload.clear()
            # h2 would receive all of a frame first.
            if self._left > _MAX_FRAME_BYTES:
                raise ValueError("frame too large")
            if self._head[3] != _GOAWAY_TYPE:
                other += self._head
            elif self._left < _MIN_GOAWAY_BYTES:
                raise ValueError("GOAWAY frame too small")
        return view[missing:]


@implementer(IPushProducer)
class HTTP2Connection(protocol.Protocol):
    """
    A connection.

    :param clock: an IReactorTime.
    :ivar ready: fires when the server has sent its settings, before which nothing is sent; fails if it never does.
    """

    transport: Any

    def __init__(self, owner: IConnectionOwner, clock: Any) -> None:
        self.ready: Deferred[None] = Deferred(lambda _: self.abort("TimeoutError"))
        self._owner = owner
        self._clock = clock
        self._h2 = H2Connection(H2Configuration(client_side=True, header_encoding=None))
        self._h2.local_settings = Settings(
            client=True,
            initial_values={SettingCodes.ENABLE_PUSH: 0, SettingCodes.MAX_HEADER_LIST_SIZE: _MAX_HEADER_BYTES},
        )
        self._h2.decoder.max_header_list_size = _MAX_HEADER_BYTES
        self._goaways = GoAwayExtractor()
        self._streams: dict[int, _Stream] = {}
        self._blocked: dict[int, _Stream] = {}
        self._opened = 0
        self._draining = self._lost = self._paused = False
        self._held = bytearray()
        self._failure = ""
        self._used = 0.0
        self._tick_timer: IDelayedCall | None = None
        self._ping_timer: IDelayedCall | None = None
        self._handlers: dict[type[Event], Any] = {
            RemoteSettingsChanged: self._on_settings,
            ResponseReceived: self._on_response,
            DataReceived: self._on_data,
            StreamEnded: self._on_end,
            StreamReset: self._on_reset,
        }

    def can_send(self) -> bool:
        """Whether it takes a request now."""
        if not self.ready.called or self._draining or self._lost or self._paused:
            return False
        return len(self._streams) < min(_MAX_STREAMS, self._h2.remote_settings.max_concurrent_streams)

    def send(self, request: HTTP2Request) -> None:
        """Send a request; :meth:`can_send` permits it."""
        # Streams of a client are odd.
        self._opened += 1
        stream_id = 2 * self._opened - 1
        request.attempts += 1
        request.connection, request.stream_id = self, stream_id
        stream = self._streams[stream_id] = _Stream(request)
        try:
            self._h2.send_headers(stream_id, request.headers, end_stream=not request.body)
            self._blocked[stream_id] = stream
            self._send_bodies()
        except H2Error:  # such as for an invalid header
            self.abort("ProtocolError")
            return
        self._flush()
        if self._opened >= _MAX_STREAMS_EVER:
            self._drain([])

    def abandon(self, request: HTTP2Request) -> None:
        """Reset the stream of a request that nobody waits for; find out whether the peer is alive."""
        self._reset(request.stream_id)
        self._ping()
        self._flush()
        self._release()

    def abort(self, reason: str) -> None:
        """Close at once; requests fail."""
        if self._lost:
            return
        self._failure = self._failure or reason
        self._draining = True
        self._fail_streams()
        if self.transport is not None:
            self.transport.abortConnection()

    # Protocol

    def connectionMade(self) -> None:
        self._owner.connection_made(self)
        self._used = self._clock.seconds()
        self._tick_timer = self._clock.callLater(_PING_INTERVAL, self._tick)
        self._h2.initiate_connection()
        self._flush()

    def dataReceived(self, data: bytes) -> None:
        if self._failure:
            return
        if self.transport.negotiatedProtocol != b"h2":
            self.abort("NotHTTP2")
            return
        self._stop_timer(self._ping_timer)
        self._ping_timer = None
        try:
            for part in self._goaways.feed(data):
                if isinstance(part, int):
                    self._on_goaway(part)
                else:
                    self._handle(part)
            self._send_bodies()
        except Exception:  # a server can provoke any exception of three libraries
            self._flush()
            self.abort("ProtocolError")
            return
        self._flush()
        self._release()

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        self._lost = self._draining = True
        self._failure = self._failure or _name_loss(reason)
        self._stop_timer(self._tick_timer)
        self._stop_timer(self._ping_timer)
        if not self.ready.called:
            self.ready.errback(OutboundRequestError(self._failure))
        self._fail_streams()
        self._owner.connection_closed(self)

    # IPushProducer, by which the transport says when the server does not read

    def pauseProducing(self) -> None:  # noqa: N802  the interface's name
        self._paused = True

    def resumeProducing(self) -> None:  # noqa: N802
        self._paused = False
        self._send_bodies()
        self._flush()
        self._owner.capacity_changed()

    def stopProducing(self) -> None:  # noqa: N802
        """The connection is lost: that is told elsewhere."""

    # Events of h2

    def _handle(self, data: bytes) -> None:
        for event in self._h2.receive_data(data):
            handler = self._handlers.get(type(event))
            if handler is not None and not self._failure:
                handler(event)

    def _on_settings(self, event: RemoteSettingsChanged) -> None:
        if not self.ready.called:
            # Not earlier: TLS pauses its producer during the handshake.
            self.transport.registerProducer(self, True)
            self.ready.callback(None)

    def _on_response(self, event: ResponseReceived) -> None:
        stream = self._streams.get(event.stream_id)
        if stream is None:
            return
        headers = {bytes(name): bytes(value) for name, value in event.headers}
        stream.status = int(headers.get(b":status", b"0"))
        stream.headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in headers.items()}

    def _on_data(self, event: DataReceived) -> None:
        self._h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        stream = self._streams.get(event.stream_id)
        if stream is None:
            return
        stream.body += event.data
        if len(stream.body) > _MAX_BODY_BYTES:
            self._reset(event.stream_id)
            stream.request.done.errback(OutboundRequestError("TooLong"))

    def _on_end(self, event: StreamEnded) -> None:
        stream = self._streams.get(event.stream_id)
        if stream is None:
            return
        if stream.unsent:  # the server did not want to see all of it
            self._reset(event.stream_id)
        self._forget(event.stream_id)
        stream.request.done.callback(HTTP2Response(stream.status, stream.headers, bytes(stream.body)))

    def _on_reset(self, event: StreamReset) -> None:
        stream = self._forget(event.stream_id)
        if stream is None:
            return
        if event.remote_reset and event.error_code == ErrorCodes.REFUSED_STREAM:
            self._owner.request_refused(stream.request)
        else:
            stream.request.done.errback(OutboundRequestError("StreamReset"))

    def _on_goaway(self, last_stream_id: int) -> None:
        unprocessed = [stream_id for stream_id in self._streams if stream_id > last_stream_id]
        streams = [self._forget(stream_id) for stream_id in unprocessed]
        self._drain([stream.request for stream in streams if stream is not None])

    # Streams

    def _drain(self, unprocessed: Sequence[HTTP2Request]) -> None:
        self._draining = True
        self._owner.connection_draining(self, unprocessed)

    def _forget(self, stream_id: int) -> _Stream | None:
        self._used = self._clock.seconds()
        self._blocked.pop(stream_id, None)
        stream = self._streams.pop(stream_id, None)
        if stream is not None:
            stream.request.connection = None
        return stream

    def _reset(self, stream_id: int) -> None:
        if self._forget(stream_id) is not None and not self._lost:
            try:
                self._h2.reset_stream(stream_id, ErrorCodes.CANCEL)
            except H2Error:
                pass  # it was closed meanwhile

    def _fail_streams(self) -> None:
        for stream_id in list(self._streams):
            stream = self._forget(stream_id)
            if stream is not None:
                stream.request.done.errback(OutboundRequestError(self._failure))

    def _send_bodies(self) -> None:
        for stream_id, stream in list(self._blocked.items()):
            if self._paused:
                return
            if stream_id in self._blocked:
                self._send_body(stream_id, stream)

    def _send_body(self, stream_id: int, stream: _Stream) -> None:
        while stream.unsent:
            window = self._h2.local_flow_control_window(stream_id)
            size = min(len(stream.unsent), window, self._h2.max_outbound_frame_size)
            if size <= 0:
                return
            chunk, stream.unsent = stream.unsent[:size], stream.unsent[size:]
            self._h2.send_data(stream_id, chunk, end_stream=not stream.unsent)
        del self._blocked[stream_id]

    def _flush(self) -> None:
        data = self._h2.data_to_send()
        if self._lost or self.transport is None:
            return
        if self._paused:
            self._held += data
            if len(self._held) > _MAX_HELD_BYTES:
                self.abort("Congested")
            return
        data = bytes(self._held) + data
        self._held.clear()
        if data:
            self.transport.write(data)

    def _release(self) -> None:
        """Tell that there may be capacity; close if nothing is left to wait for."""
        if self._lost or self._failure:
            return
        if self._draining and not self._streams:
            self.transport.unregisterProducer()  # for which closing would wait
            self.transport.loseConnection()
        else:
            self._owner.capacity_changed()

    # Whether the peer is alive

    def _tick(self) -> None:
        self._tick_timer = self._clock.callLater(_PING_INTERVAL, self._tick)
        if not self._streams and self._clock.seconds() - self._used >= _IDLE_SECONDS:
            self._h2.close_connection()
            self._flush()
            self._drain([])
            self._release()
        else:
            self._ping()
            self._flush()

    def _ping(self) -> None:
        if self._ping_timer is None and not self._lost and not self._failure:
            self._h2.ping(bytes(8))
            self._ping_timer = self._clock.callLater(_PING_TIMEOUT, self._on_silence)

    def _on_silence(self) -> None:
        self._ping_timer = None
        self.abort("PingTimeout")

    @staticmethod
    def _stop_timer(timer: IDelayedCall | None) -> None:
        if timer is not None and timer.active():
            timer.cancel()


def _name_loss(reason: Failure) -> str:
    """A word for why a connection was lost."""
    return "TLSError" if reason.check(SSL.Error) else type(reason.value).__name__
