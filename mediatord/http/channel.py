"""
HTTP connections: Twisted's channel with backpressure, and a fast path for plain POSTs of messages and commands.

twisted.web spends more on a request than everything else together. Nearly all requests are plain: one of two exact
request lines, headers only from a short list and each once, and a length in digits, which no two parsers could
understand in two ways. Those are parsed here, all others by twisted.web; from there on there is no difference.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable
from functools import cached_property, lru_cache, partial
from io import BytesIO
from typing import Any, NamedTuple, cast

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IDelayedCall, IHalfCloseableProtocol
from twisted.internet.protocol import connectionDone
from twisted.logger import Logger
from twisted.python.failure import Failure
from twisted.web.http import HTTPChannel, _IdentityTransferDecoder
from twisted.web.server import NOT_DONE_YET, Request
from zope.interface import implementer

from mediatord.didcomm.messages import ACCEPTED, MessageOrigin
from mediatord.errors import PayloadTooLarge, RateLimitExceeded, ShutdownInProgress
from mediatord.http.client_address import get_host
from mediatord.http.flow_control import SMALL_RESPONSE_BYTES
from mediatord.http.responses import (
    ACCEPTED_RESPONSE,
    BAD_REQUEST_BYTES,
    CORS_HEADERS,
    FAULT_RESPONSES,
    RATE_LIMIT_RESPONSES,
    REASON_PHRASES,
    SERVER_NAME,
    TIMEOUT_RESPONSES,
    TOO_LARGE_BYTES,
    UNREAD_LIMIT_RESPONSES,
    HTTPResponse,
    ProtocolReply,
    build_refusal,
    build_response,
    is_envelope_type,
    select_protocol,
    serialize_accepted,
    serialize_response,
)
from mediatord.observability.event_recorder import ProtocolName
from mediatord.protocol.probe_markers import PROBE_HEADER
from mediatord.runtime.failure_logging import redact_failure
from mediatord.runtime.memory_reclaimer import LARGE_BUFFER_BYTES
from mediatord.runtime.socket_writes import write_immediately

# Bytes in a quantum of the scheduler; a head that Twisted parses is not longer.
_CHUNK_BYTES = 16_384
# Plain requests in a quantum, and as how many of them a request parsed by Twisted counts.
_QUANTUM = 8
_PARSED_REQUEST_COST = 4
# After a 413 the client may send for so long, or so much, before the connection is aborted.
_DISCARD_SECONDS = 5.0
_DISCARD_BYTES = 16_777_216
# Seconds for a request to arrive.
REQUEST_RECEIVE_TIMEOUT = 60.0

_log = Logger()


class BackpressureHTTPChannel(HTTPChannel):
    """
    Serves no further request of a client that does not read its responses.

    Twisted's own channel pauses reading from the network only, between two requests: responses to many small
    pipelined requests would pile up.
    """

    site: Any
    _began = 0.0
    _closing = False
    # Received data for later quanta.
    _ahead = b""
    _suspended = False
    # The client has closed its sending side.
    _half_closed = False
    _quantum = _QUANTUM
    _idle_since = 0.0
    _timer: IDelayedCall | None = None
    # Rate limit keys and sizes of responses in the full transport.
    _unread: tuple[tuple[str, int], ...] = ()

    def setTimeout(self, period: float | None) -> float | None:  # noqa: N802  Twisted's name
        """As Twisted's, with a timer that is not moved by each request."""
        before = self.timeOut
        self.timeOut = period  # type: ignore[assignment]  # of a number, not only an integer
        self._idle_since = now = self.site.clock.seconds()
        if period is not None and self._timer is None:
            self._timer = self.site.clock.callLater(period, self._check_timeout)
        elif period is not None and self._timer.getTime() > now + period:  # type: ignore[union-attr]
            self._timer.reset(period)  # type: ignore[union-attr]
        return before

    def _check_timeout(self) -> None:
        """Handle the timeout if it has come; else check again later."""
        now = self.site.clock.seconds()
        period = self.timeOut or self.site.timeOut
        self._idle_since = min(self._idle_since, now)  # later than now when the clock was set back
        left = self._idle_since + period - now
        self._timer = self.site.clock.callLater(max(left, 0.001) if left > 0 else period, self._check_timeout)
        if left <= 0 and self.timeOut:
            self.timeoutConnection()

    def dataReceived(self, data: bytes) -> None:
        """Called with data; a request that takes a minute to arrive is aborted."""
        if self._closing:  # the transport reads on; the data would never be parsed
            return
        if self._suspended:
            self._ahead += data
            return
        if not (self._handlingRequest or self._waitingForTransport):
            self._idle_since = now = self.site.clock.seconds()
            if data or self._ahead:
                self._began = min(self._began or now, now)
            if self._began and now - self._began > REQUEST_RECEIVE_TIMEOUT:
                self.transport.abortConnection()  # type: ignore[union-attr]
                return
        self._read(self._ahead + data if self._ahead else data)

    def _read(self, data: bytes) -> None:
        """Parse a chunk, which may be a whole head; the rest in a later quantum."""
        self._ahead = data[_CHUNK_BYTES:]
        try:
            super().dataReceived(data[:_CHUNK_BYTES])
        except ValueError:  # a number that Python does not parse
            self._respondToBadRequestAndDisconnect()
        if self._closing or getattr(self.transport, "disconnecting", False):
            return
        if self._ahead and not self._suspended and isinstance(self._transferDecoder, _IdentityTransferDecoder):
            # A body, which is cheap to read.
            data, self._ahead = self._ahead, b""
            super().dataReceived(data)
        if self._ahead:
            self._suspend()

    def _suspend(self) -> None:
        self._suspended = self.paused = True
        self._networkProducer.pauseProducing()
        self.site.scheduler.add(self)

    def run_quantum(self) -> None:
        """Serve some requests, or parse more of one."""
        self._suspended = False
        if self._closing or self._waitingForTransport:
            return
        self.paused = False
        self._quantum = _QUANTUM
        if not self._handlingRequest:
            self._networkProducer.resumeProducing()
        self.dataReceived(b"")
        self._close_if_done()

    def readConnectionLost(self) -> None:  # noqa: N802  Twisted's name
        """Called when the client closes its sending side and waits for responses."""
        self._half_closed = True
        self._close_if_done()

    def writeConnectionLost(self) -> None:  # noqa: N802  Twisted's name
        """Does nothing."""

    def _close_if_done(self) -> None:
        """Close a half-closed connection once all its requests are answered."""
        if not self._half_closed or self._closing or self.transport is None:
            return
        if not (self._handlingRequest or self._busyReceiving or self._suspended or self._waitingForTransport):
            self.loseConnection()

    def _respondToBadRequestAndDisconnect(self) -> None:  # noqa: N802  Twisted's name
        """Respond to invalid HTTP with a body and CORS headers, unlike Twisted."""
        self.transport.write(BAD_REQUEST_BYTES)  # type: ignore[union-attr]
        self.loseConnection()

    def count_unread(self, rate_limit_key: str, size: int) -> None:
        """Count a response just written, of `size` bytes, until the client reads it."""
        if self._waitingForTransport:
            self._unread = (*self._unread, (rate_limit_key, size))
            self.site.unread.add(rate_limit_key, size)

    def _clear_unread(self) -> None:
        """Count all responses out: the client has read them, or closed the connection."""
        unread, self._unread = self._unread, ()
        for rate_limit_key, size in unread:
            self.site.unread.remove(rate_limit_key, size)

    def requestDone(self, request: Any = None) -> None:  # noqa: N802  Twisted's name
        """Called when a response is complete. :param request: None if Twisted did not parse it."""
        if request is not None:
            del self.requests[0]
        if not self.persistent:
            self.loseConnection()
            return
        self._handlingRequest, self.line_mode, self._began = False, 1, 0.0
        self._quantum -= 1 if request is None else _PARSED_REQUEST_COST
        data, self._dataBuffer = b"".join(self._dataBuffer), []
        if self._waitingForTransport:
            self.paused = True
            self._networkProducer.pauseProducing()
        elif self._quantum <= 0 and (self._buffer or data or self._ahead):
            self._suspend()
        elif not self._suspended:
            self._networkProducer.resumeProducing()
        self.setTimeout(self.site.timeOut)
        self._read_behind(data)
        self._close_if_done()

    def _read_behind(self, data: bytes) -> None:
        """Continue with what was received behind a request."""
        if self._busyReceiving:  # Twisted's loop, in which this is called, continues with it
            self._buffer += data
        elif data and not self._closing:
            self._began = self._idle_since
            self._read(data + self._ahead)

    def pauseProducing(self) -> None:
        """Called when the transport's buffer is full."""
        super().pauseProducing()
        if not self._handlingRequest:
            self.paused = True

    def resumeProducing(self) -> None:
        """Called when the transport's buffer is empty."""
        self._clear_unread()
        super().resumeProducing()
        if self._suspended:
            self._networkProducer.pauseProducing()
        elif self.paused and not self._waitingForTransport:
            self.paused = False
            self.dataReceived(b"")
        self._close_if_done()

    def loseConnection(self) -> None:
        """Close after the response; the client has some time to read it."""
        self._closing = True
        self.setTimeout(self.site.timeOut)
        # TLS must read the close notification of the client.
        self._networkProducer.resumeProducing()
        super().loseConnection()

    def timeoutConnection(self) -> None:  # noqa: N802  Twisted's name
        """Abort when the client is idle or does not read; Twisted would wait."""
        self.transport.abortConnection()  # type: ignore[union-attr]

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        """Called when the connection is closed."""
        self._clear_unread()
        super().connectionLost(reason)
        self.site.memory.released(len(self.take_unparsed_bytes()))

    def take_unparsed_bytes(self) -> bytes:
        """Take all received data; the connection is closed, or another protocol takes it over."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.site.scheduler.discard(self)
        behind, self._dataBuffer = b"".join(self._dataBuffer), []
        ahead, self._ahead = self._ahead, b""
        rest: bytes = behind + self.clearLineBuffer() + ahead
        return rest


MAX_HEAD_BYTES = 8192

_DIDCOMM_REQUEST_LINE, _ROOT_REQUEST_LINE = b"POST /didcomm HTTP/1.1", b"POST / HTTP/1.1"
_PROBE_TOKEN_HEADER = PROBE_HEADER.encode("ascii")
_KNOWN_HEADERS = frozenset(
    (
        *(b"host", b"content-type", b"connection", b"x-forwarded-for", _PROBE_TOKEN_HEADER),
        # Without an effect on a POST: those that HTTP libraries and browsers add by themselves, and those of proxies.
        *(b"user-agent", b"accept", b"accept-encoding", b"accept-language", b"cache-control", b"pragma", b"priority"),
        *(b"origin", b"referer", b"dnt", b"sec-gpc", b"sec-ch-ua", b"sec-ch-ua-mobile", b"sec-ch-ua-platform"),
        *(b"sec-fetch-dest", b"sec-fetch-mode", b"sec-fetch-site", b"sec-fetch-storage-access"),
        *(b"x-real-ip", b"x-forwarded-proto", b"x-forwarded-host", b"x-forwarded-port"),
    )
)
_CONTENT_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*([0-9]{1,9})[ \t]*(?=\r\n|\Z)", re.IGNORECASE)
# Longer heads are not cached, so that they hold little memory.
_MAX_CACHED_HEAD = 512


class PlainRequestHead(NamedTuple):
    """
    The head of a plain request without its length.

    :param protocol: of the body.
    :param token: secret of the daemon's own requests.
    """

    protocol: ProtocolName
    content_type: bytes
    forwarded_for: str | None
    token: bytes | None


def parse_plain_head(head: bytes) -> tuple[PlainRequestHead, int] | None:
    """
    A plain head and its length, or None for any other. Heads differ mostly in the length; the rest is cached.

    :param head: up to the empty line, without it.
    """
    length = _CONTENT_LENGTH.search(head)
    if length is None:
        return None
    rest = head[: length.start()] + head[length.end() :]
    found = _parse_cached_head(rest) if len(rest) <= _MAX_CACHED_HEAD else _parse_head(rest)
    return None if found is None else (found, int(length[1]))


def _parse_head(head: bytes) -> PlainRequestHead | None:
    request_line, *lines = head.split(b"\r\n")
    if request_line not in (_DIDCOMM_REQUEST_LINE, _ROOT_REQUEST_LINE):
        return None
    # A bare CR, LF or NUL is where parsers begin to differ.
    if head.count(b"\n") != len(lines) or head.count(b"\r") != len(lines) or b"\0" in head or not head.isascii():
        return None
    headers: dict[bytes, bytes] = {}
    for line in lines:
        name, colon, value = line.partition(b":")
        name = name.lower()
        if not colon or name not in _KNOWN_HEADERS or name in headers:
            return None
        headers[name] = value.strip(b" \t")
    if b"host" not in headers or headers.get(b"connection", b"").lower() not in (b"", b"keep-alive"):
        return None
    content_type = headers.get(b"content-type", b"")
    forwarded_for = headers.get(b"x-forwarded-for")
    return PlainRequestHead(
        "didcomm" if request_line == _DIDCOMM_REQUEST_LINE else select_protocol(content_type),
        content_type,
        None if forwarded_for is None else forwarded_for.decode("ascii"),
        headers.get(_PROBE_TOKEN_HEADER),
    )


_parse_cached_head = lru_cache(1024)(_parse_head)

# A request that is being served: its protocol, rate limit key, and Twisted's object if Twisted has parsed it.
RequestExchange = tuple[ProtocolName, str, Any]


@implementer(IHalfCloseableProtocol)
class MediatorHTTPChannel(BackpressureHTTPChannel):
    """
    A connection of a :class:`~mediatord.http.site.MediatorSite`: reads plain requests itself, and serves messages and
    commands, whoever has read them.

    :ivar address: of the TCP peer.
    """

    address: Any = None
    _exchange: RequestExchange | None = None
    # The beginning of a plain request, and the number of bytes that it will have.
    _partial: bytes | bytearray = b""
    _partial_length = 0
    _peer_rate_limit_key: str | None = None

    @property
    def held(self) -> int:
        """Bytes of requests that are not complete, or not begun."""
        return sum(map(len, (self._partial, self._buffer, self._ahead, *self._dataBuffer)))

    def find_rate_limit_key(self, forwarded_for: str | None, token: bytes | None) -> str:
        """The rate limit key of a request with these headers."""
        if forwarded_for is None and token is None and self._peer_rate_limit_key is not None:
            return self._peer_rate_limit_key
        host = get_host(self.transport.getPeer())  # type: ignore[union-attr]
        rate_limit_key: str = self.site.context.client_addresses.rate_limit_key(host, forwarded_for, token)
        if forwarded_for is None and token is None:
            self._peer_rate_limit_key = rate_limit_key
        return rate_limit_key

    def _read(self, data: bytes) -> None:
        """Serve a plain request, or keep a part of one; let Twisted parse any other."""
        is_begun = bool(self._partial)
        if is_begun or self._buffer or self.requests or self._handlingRequest or self.paused:
            data = self._complete(data)
        end = data.find(b"\r\n\r\n", 0, MAX_HEAD_BYTES)
        parsed = parse_plain_head(data[:end]) if end > 0 else None
        if parsed is None or parsed[1] > self.site.max_body and not is_begun:
            if data:
                super()._read(data)
            return
        (protocol, content_type, forwarded_for, token), length = parsed
        begin, end = end + 4, end + 4 + length
        self._ahead = b""
        if len(data) != end:
            self.site.reading.add(self)
        if len(data) < end:
            self._partial, self._partial_length = bytearray(data), end
            return
        if len(data) > end:
            self._dataBuffer.append(data[end:])
        self._handlingRequest, self.line_mode, self._began = True, 0, 0.0
        self._HTTPChannel__first_line = 1  # Twisted forgets an empty line before this request
        rate_limit_key = self._peer_rate_limit_key
        if rate_limit_key is None or forwarded_for is not None or token is not None:
            rate_limit_key = self.find_rate_limit_key(forwarded_for, token)
        self.serve(protocol, rate_limit_key, data[begin:end], content_type)

    def _complete(self, data: bytes) -> bytes:
        """Join data with what was received before; empty if nothing new can be served yet."""
        if self._partial:
            self._partial += data
            if len(self._partial) < self._partial_length:
                return b""
            data, self._partial = bytes(self._partial), b""
            return data
        # A head that is too long for a plain one stays with Twisted, which gives up where a line does not end.
        is_long = len(self._buffer) >= MAX_HEAD_BYTES and self._buffer.find(b"\r\n\r\n", 0, MAX_HEAD_BYTES) < 0
        if is_long or self.requests or self._handlingRequest or self.paused:
            super()._read(data)
            self.site.reading.add(self)
            return b""
        return cast(bytes, self.clearLineBuffer()) + data

    def serve(
        self, protocol: ProtocolName, rate_limit_key: str, body: bytes, content_type: bytes, request: Any = None
    ) -> None:
        """Process a posted message or command. :param request: if Twisted has parsed it."""
        if request is None and len(body) >= LARGE_BUFFER_BYTES:
            self.site.memory.released(len(body))
        exchange = self._begin_exchange(protocol, rate_limit_key, request)
        general_path = partial(self._serve_general_path, exchange, body, content_type)
        if protocol == "decentrl" or not self.site.context.forward_fast_path(
            body, rate_limit_key, partial(self._finish, exchange), general_path
        ):
            general_path()

    def _serve_general_path(self, exchange: RequestExchange, body: bytes, content_type: bytes) -> None:
        protocol, rate_limit_key, request = exchange
        context = self.site.context
        if request is None and not context.admits(rate_limit_key):
            self.reject_rate_limited(protocol, rate_limit_key)
        elif protocol == "didcomm":
            origin = MessageOrigin(rate_limit_key, None, not is_envelope_type(content_type), content_type)
            Deferred.fromCoroutine(self._answer(exchange, context.receive(body, origin, None)))
        else:
            Deferred.fromCoroutine(self._answer(exchange, context.command(body, rate_limit_key)))

    def respond_later(
        self, protocol: ProtocolName, rate_limit_key: str, request: Any, work: Awaitable[ProtocolReply]
    ) -> None:
        """Respond with the result of `work`, unless it takes too long; then it continues without effect."""
        Deferred.fromCoroutine(self._answer(self._begin_exchange(protocol, rate_limit_key, request), work))

    def reject_rate_limited(self, protocol: ProtocolName, rate_limit_key: str) -> None:
        """Refuse a request over the limit of its address, and serve nothing more on this connection."""
        self._exchange = None
        self.site.context.recorder.record_early_rejection(protocol, rate_limit_key, 0, RateLimitExceeded())
        if self._timer is not None:  # the connection is still open
            response = serialize_response(RATE_LIMIT_RESPONSES[protocol], int(self.site.clock.seconds()))
            self.transport.write(response)  # type: ignore[union-attr]
            self.loseConnection()

    def _begin_exchange(self, protocol: ProtocolName, rate_limit_key: str, request: Any) -> RequestExchange:
        """Begin the time of a request, or of its answer."""
        self._exchange = exchange = (protocol, rate_limit_key, request)
        deadline = self.timeOut = self.site.context.deadline
        self._idle_since = now = self.site.clock.seconds()
        if self._timer is not None and self._timer.getTime() > now + deadline:
            self._timer.reset(deadline)
        return exchange

    async def _answer(self, exchange: RequestExchange, work: Awaitable[ProtocolReply]) -> None:
        try:
            answer = await work
        except ShutdownInProgress as error:
            answer = build_refusal(exchange[0], error)
        except Exception:
            _log.failure("answering a request failed", redact_failure())
            answer = FAULT_RESPONSES[exchange[0]]
        self._finish(exchange, answer)

    def _finish(self, exchange: RequestExchange, answer: ProtocolReply) -> None:
        """Respond to a request, unless it was given up or already answered."""
        if exchange is not self._exchange:
            return
        self._exchange = None
        protocol, rate_limit_key, request = exchange
        if not isinstance(answer, HTTPResponse):
            answer = ACCEPTED_RESPONSE if answer is ACCEPTED else build_response(answer)
        if request is not None:
            request.respond(answer, UNREAD_LIMIT_RESPONSES[protocol])
            return
        size = len(answer.body)
        if size > SMALL_RESPONSE_BYTES and not self.site.unread.has_room(rate_limit_key, size):
            answer = UNREAD_LIMIT_RESPONSES[protocol]
        self._idle_since, self.timeOut = self.site.clock.seconds(), self.site.timeOut
        now = int(self._idle_since)
        raw = serialize_accepted(now) if answer is ACCEPTED_RESPONSE else serialize_response(answer, now)
        write_immediately(self.transport, raw)
        if self._dataBuffer or self._waitingForTransport or self._suspended or self._half_closed:
            self.count_unread(rate_limit_key, len(answer.body))
            self.requestDone()
        else:
            self._handlingRequest, self.line_mode = False, 1

    def timeoutConnection(self) -> None:  # noqa: N802  Twisted's name
        """Respond to a request that takes too long; else as above."""
        if self._exchange is None:
            super().timeoutConnection()
        else:
            self._finish(self._exchange, TIMEOUT_RESPONSES[self._exchange[0]])

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        """The connection is closed; a request in progress is completed."""
        self._exchange = None
        super().connectionLost(reason)

    def take_unparsed_bytes(self) -> bytes:
        """Also count the connection out."""
        self.site.closed(self)
        partial_request, self._partial = bytes(self._partial), b""
        return partial_request + super().take_unparsed_bytes()


class MediatorRequest(Request):
    """
    A request that Twisted parses, rejected with 413 as soon as its body is known to be too long.

    That response is sent at once and the rest of the body is discarded for a while: closing while the client is
    sending would make its kernel discard the response.
    """

    channel: Any
    _received = 0
    _refused = False

    def gotLength(self, length: int | None) -> None:
        """Called after the headers."""
        self.content = BytesIO()
        if length is not None and length > self.channel.site.max_body:
            self._refuse()

    def handleContentChunk(self, data: bytes) -> None:
        """Called with a part of the body, chunked or not."""
        self._received += len(data)
        if self._refused:
            if self._received > _DISCARD_BYTES:
                self.channel.transport.abortConnection()
        elif self._received > self.channel.site.max_body:
            self._refuse()
        else:
            super().handleContentChunk(data)

    def requestReceived(self, command: bytes, path: bytes, version: bytes) -> None:
        """Called with a complete request."""
        channel, site = self.channel, self.channel.site
        if self._received >= LARGE_BUFFER_BYTES:
            site.memory.released(self._received)
        self._received = 0
        if self._refused:
            channel.loseConnection()
        elif site.context.admits(self.rate_limit_key):
            super().requestReceived(command, path, version)
        else:
            channel.reject_rate_limited("didcomm" if path == b"/didcomm" else "decentrl", self.rate_limit_key)

    def connectionLost(self, reason: Failure) -> None:
        """Called when the connection is closed, perhaps within the body."""
        if self._received >= LARGE_BUFFER_BYTES:
            self.channel.site.memory.released(self._received)
        super().connectionLost(reason)

    @cached_property
    def rate_limit_key(self) -> str:
        """The rate limit key; available after the headers."""
        headers = self.requestHeaders
        forwarded_for = headers.getRawHeaders(b"x-forwarded-for")
        rate_limit_key: str = self.channel.find_rate_limit_key(
            b",".join(forwarded_for).decode("latin-1") if forwarded_for else None,
            headers.getRawHeaders(_PROBE_TOKEN_HEADER, [None])[0],
        )
        return rate_limit_key

    def respond(self, answer: HTTPResponse, unread: HTTPResponse | None = None) -> int:
        """
        Send a complete response and finish; NOT_DONE_YET.

        :param unread: sent instead if the client has too many unread responses; without it `answer` is sent anyway.
        """
        channel = self.channel
        size = 0 if self.method == b"HEAD" else len(answer.body)
        budget = channel.site.unread
        if size > SMALL_RESPONSE_BYTES and unread is not None and not budget.has_room(self.rate_limit_key, size):
            answer, size = unread, len(unread.body)
        self.setResponseCode(answer.status, REASON_PHRASES.get(answer.status))
        headers = [*(CORS_HEADERS if answer.shared else ()), (b"Server", SERVER_NAME), *answer.headers]
        if answer.content_type:
            headers.append((b"Content-Type", answer.content_type))
        else:
            self.defaultContentType = None
        if answer.status != 204:  # RFC 9110 section 8.6
            headers.append((b"Content-Length", b"%d" % len(answer.body)))
        for name, value in headers:
            self.responseHeaders.setRawHeaders(name, [value])
        if size:
            self.write(answer.body)
            channel.count_unread(self.rate_limit_key, size)
        self.finish()
        return NOT_DONE_YET

    def _refuse(self) -> None:
        self._refused = True
        self.content = BytesIO()
        # The channel must not send 100 Continue.
        self.requestHeaders.removeHeader(b"Expect")
        path = self.channel._path.partition(b"?")[0]
        is_didcomm = path == b"/didcomm" or path.startswith(b"/didcomm/")
        protocol = "didcomm" if is_didcomm else select_protocol(self.getHeader(b"content-type") or b"")
        site, transport = self.channel.site, self.channel.transport
        site.context.recorder.record_early_rejection(protocol, self.rate_limit_key, 0, PayloadTooLarge())
        transport.write(TOO_LARGE_BYTES[protocol])
        getattr(transport, "loseWriteConnection", transport.loseConnection)()
        timer = site.clock.callLater(_DISCARD_SECONDS, transport.abortConnection)
        self.notifyFinish().addErrback(lambda _: timer.cancel() if timer.active() else None)
