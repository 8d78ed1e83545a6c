"""
HTTP fast path: serves plain POSTs of messages and commands, which are nearly all traffic, without twisted.web.

twisted.web spends more on a request than everything else together. A plain request has one of two exact request
lines, headers only from a short list and each once, and a length in digits: nothing that two parsers could understand
in two ways. On any other request, the connection is passed to twisted.web for good.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IDelayedCall, IHalfCloseableProtocol, IPushProducer
from twisted.internet.protocol import Protocol, connectionDone
from twisted.logger import Logger
from twisted.python.failure import Failure
from twisted.web.http import RESPONSES, datetimeToString
from zope.interface import implementer

from mediatord.didcomm.messages import ACCEPTED, DIDCommReply
from mediatord.errors import RateLimitExceeded
from mediatord.http.flow_control import LARGE_BUFFER_BYTES, ConnectionResponseBudget, write_immediately
from mediatord.http.responses import (
    ACCEPTED_RESPONSE,
    CORS_HEADERS,
    EXPOSE_RETRY_AFTER_HEADER,
    FAULT_RESPONSES,
    RATE_LIMIT_RESPONSES,
    REASON_PHRASES,
    SERVER_NAME,
    TIMEOUT_RESPONSES,
    UNREAD_LIMIT_RESPONSES,
    HTTPResponse,
    build_didcomm_response,
    respond_to_command,
    respond_to_message,
    select_protocol,
)
from mediatord.log_redaction_and_throttle import redact_failure
from mediatord.observability.event_recorder import ProtocolName
from mediatord.protocol.probe_markers import PROBE_HEADER

MAX_HEAD_BYTES = 8192

_DIDCOMM_REQUEST_LINE, _ROOT_REQUEST_LINE = b"POST /didcomm HTTP/1.1", b"POST / HTTP/1.1"
# Headers that are parsed.
_PROBE_TOKEN_HEADER = PROBE_HEADER.encode("ascii")
_PARSED_HEADERS = (
    b"host",
    b"content-type",
    b"content-length",
    b"connection",
    b"x-forwarded-for",
    _PROBE_TOKEN_HEADER,
)
# Headers without an effect on a POST: those that HTTP libraries and browsers add by themselves, and those of proxies.
_IGNORED_HEADERS = (
    *(b"user-agent", b"accept", b"accept-encoding", b"accept-language", b"cache-control", b"pragma", b"priority"),
    *(b"origin", b"referer", b"dnt", b"sec-gpc", b"sec-ch-ua", b"sec-ch-ua-mobile", b"sec-ch-ua-platform"),
    *(b"sec-fetch-dest", b"sec-fetch-mode", b"sec-fetch-site", b"sec-fetch-storage-access"),
    *(b"x-real-ip", b"x-forwarded-proto", b"x-forwarded-host", b"x-forwarded-port"),
)
_KNOWN_HEADERS = frozenset((*_PARSED_HEADERS, *_IGNORED_HEADERS))
_KEEP_ALIVE_VALUES = (b"", b"keep-alive")
_MAX_LENGTH_DIGITS = 9

# Longer heads are not cached, so that idle connections hold little memory.
_MAX_CACHED_HEAD = 512
_CONTENT_LENGTH_PATTERN = re.compile(rb"\r\ncontent-length:[ \t]*([0-9]+)[ \t]*(?=\r\n|$)", re.IGNORECASE)


class FastRequestHead(NamedTuple):
    """
    The parsed head of a plain request.

    :param half: protocol of the body.
    :param token: secret of the daemon's own requests.
    """

    half: ProtocolName
    length: int
    content_type: bytes
    forwarded_for: str | None
    token: bytes | None


class FastHeadParser:
    """
    Parses the heads of one connection. Usually they differ only in the length, and then only that is parsed.

    :param read: parses a head that differs in more.
    """

    __slots__ = ("_after", "_before", "_like", "_read")

    def __init__(self, read: Callable[[bytes], FastRequestHead | None] | None = None) -> None:
        self._read = read or parse_fast_head
        self._like: FastRequestHead | None = None
        self._before = self._after = b""

    def read(self, head: bytes) -> FastRequestHead | None:
        """As :func:`parse_fast_head`."""
        like = self._like
        if like is not None and head.startswith(self._before) and head.endswith(self._after):
            digits = head[len(self._before) : len(head) - len(self._after)]
            if digits.isdigit() and len(digits) <= _MAX_LENGTH_DIGITS:
                return FastRequestHead(like.half, int(digits), like.content_type, like.forwarded_for, like.token)
        found = self._read(head)
        self._keep(head, found)
        return found

    def _keep(self, head: bytes, found: FastRequestHead | None) -> None:
        place = _CONTENT_LENGTH_PATTERN.search(head) if found is not None and len(head) <= _MAX_CACHED_HEAD else None
        if place is None:
            self._like = None
        else:
            self._like, self._before, self._after = found, head[: place.start(1)], head[place.end(1) :]


def parse_fast_head(head: bytes) -> FastRequestHead | None:
    """
    A plain head, or None for any other.

    :param head: up to the empty line, without it.
    """
    request_line, *lines = head.split(b"\r\n")
    if request_line not in (_DIDCOMM_REQUEST_LINE, _ROOT_REQUEST_LINE):
        return None
    # A bare CR, LF or NUL is where parsers begin to differ.
    if head.count(b"\n") != len(lines) or head.count(b"\r") != len(lines) or b"\0" in head or not head.isascii():
        return None
    headers = _parse_fast_headers(lines)
    if headers is None or b"host" not in headers or headers.get(b"connection", b"").lower() not in _KEEP_ALIVE_VALUES:
        return None
    length = headers.get(b"content-length", b"")
    if not length.isdigit() or len(length) > _MAX_LENGTH_DIGITS:
        return None
    content_type = headers.get(b"content-type", b"")
    half: ProtocolName = "didcomm" if request_line == _DIDCOMM_REQUEST_LINE else select_protocol(content_type)
    forwarded = headers.get(b"x-forwarded-for")
    claimed = None if forwarded is None else forwarded.decode("ascii")
    return FastRequestHead(half, int(length), content_type, claimed, headers.get(_PROBE_TOKEN_HEADER))


def _parse_fast_headers(lines: list[bytes]) -> dict[bytes, bytes] | None:
    """Values by lower-case name; None if there is a name that is not known, or one twice."""
    headers: dict[bytes, bytes] = {}
    for line in lines:
        name, colon, value = line.partition(b":")
        name = name.lower()
        if not colon or name not in _KNOWN_HEADERS or name in headers:
            return None
        headers[name] = value.strip(b" \t")
    return headers


_log = Logger()

# What may be read ahead of the request that is being served.
_MAX_READ_AHEAD = 65_536
# Requests that are served in a quantum of the scheduler.
_REQUESTS_PER_QUANTUM = 8
_COMMON_HEADER_LINES = b"".join(
    b"%b: %b\r\n" % (name.encode("ascii"), value.encode("ascii"))
    for name, value in [("Server", SERVER_NAME.decode()), *CORS_HEADERS]
)
_EXPOSE_HEADER_LINE = b"%b: %b\r\n" % (
    EXPOSE_RETRY_AFTER_HEADER[0].encode("ascii"),
    EXPOSE_RETRY_AFTER_HEADER[1].encode("ascii"),
)


@implementer(IPushProducer, IHalfCloseableProtocol)
class FastHTTPChannel(Protocol):
    """
    A connection that is served here as long as all its requests are plain.

    :param site: the :class:`~mediatord.http.site.MediatorSite`, whose standard channel serves other requests.
    """

    transport: Any

    def __init__(self, site: Any, address: object) -> None:
        self._site = site
        self._front = site.front
        self._address = address
        self._host = getattr(address, "host", "") or ""
        self._standard_channel: Any = None
        self._buffer = bytearray()
        self._head: FastRequestHead | None = None
        self._half: ProtocolName = "didcomm"
        self._rate_limit_key = ""
        self._response_budget = ConnectionResponseBudget(site.unread)
        self._body_at = 0
        self._serving = 0
        self._served = 0
        self._advancing = False
        self._congested = False
        self._reading = True
        # No further request is served before the next quantum, or at all.
        self._suspended = False
        # The client has closed its side of the connection.
        self._half_closed = False
        self._is_closing = False
        self._idle_since = self._request_started = 0.0
        self._timer: IDelayedCall | None = None
        self._head_parser = FastHeadParser()
        # Of a request without headers that change it.
        self._default_rate_limit_key = ""

    @property
    def _busy(self) -> bool:
        return self._serving != self._served

    def connectionMade(self) -> None:
        """A client is there."""
        self.transport.registerProducer(self, True)
        self._idle_since = self._front.clock.seconds()
        self._timer = self._front.clock.callLater(self._site.timeOut, self._check_timeout)
        self._default_rate_limit_key = self._front.peers.rate_limit_key(self._host, None)

    def dataReceived(self, data: bytes) -> None:
        """Serve complete requests, and keep a part of one."""
        if self._standard_channel is not None:
            self._standard_channel.dataReceived(data)
            return
        is_idle = not (self._buffer or self._serving != self._served or self._congested or self._suspended)
        if self._is_closing or is_idle and self._serve_whole_request(data):
            return
        self._buffer += data
        if self._busy or self._congested or self._suspended:
            if len(self._buffer) > _MAX_READ_AHEAD:
                self._pause()
        else:
            self._idle_since = self._front.clock.seconds()
            self._request_started = min(
                self._request_started, self._idle_since
            )  # later than now when the clock was set back
            if self._head is not None and self._idle_since - self._request_started > self._site.timeOut:
                self.transport.abortConnection()
            else:
                self._advance()
        if self._buffer:
            self._site.reading.add(self)

    @property
    def held(self) -> int:
        """Bytes of requests that are not complete, or not begun."""
        return len(self._buffer)

    def _serve_whole_request(self, data: bytes) -> bool:
        """Serve data that is exactly one request, as it nearly always is, without the buffer."""
        end = data.find(b"\r\n\r\n", 0, MAX_HEAD_BYTES)
        head = self._head_parser.read(data[:end]) if end > 0 else None
        if head is None or len(data) != end + 4 + head.length or head.length > self._site.max_body:
            return False
        self._serve(head, data[end + 4 :])
        return True

    def _advance(self) -> None:
        """
        Serve complete requests one after the other until one has to be awaited; after some of them, continue in later
        reactor iterations.
        """
        if self._advancing or self._suspended:
            return
        self._advancing = True
        quantum = _REQUESTS_PER_QUANTUM
        while self._buffer and not self._busy and not self._congested and self._standard_channel is None:
            if not quantum:
                self._suspend()
                break
            quantum -= 1
            if self._head is None and not self._begin():
                self._switch_to_standard_channel()
                break
            head, body = self._head, self._take_body()
            if head is None or body is None:
                break
            self._head = None
            self._serve(head, body)
        self._advancing = False

    def _suspend(self) -> None:
        """Queue up for a quantum."""
        self._suspended = True
        self._pause()
        self._site.scheduler.add(self)

    def run_quantum(self) -> None:
        """Serve some of the requests in the buffer."""
        self._suspended = False
        self._advance()
        self._resume_reading()
        self._close_if_done()

    def _begin(self) -> bool:
        """Parse the head of the next request; False if it is not plain."""
        end = self._buffer.find(b"\r\n\r\n", 0, MAX_HEAD_BYTES)
        head = self._head_parser.read(bytes(self._buffer[:end])) if end > 0 else None
        if head is None or head.length > self._site.max_body:
            return False
        self._head, self._body_at = head, end + 4
        self._request_started = self._idle_since
        return True

    def _take_body(self) -> bytes | None:
        assert self._head is not None
        end = self._body_at + self._head.length
        if len(self._buffer) < end:
            return None
        body = bytes(self._buffer[self._body_at : end])
        del self._buffer[:end]
        return body

    def _serve(self, head: FastRequestHead, body: bytes) -> None:
        front = self._front
        if head.length >= LARGE_BUFFER_BYTES:
            self._site.memory.released(head.length)
        self._half = head.half
        self._serving += 1
        self._idle_since = now = front.clock.seconds()
        if self._timer is not None and self._timer.getTime() > now + front.deadline:
            self._timer.reset(front.deadline)
        plain = head.forwarded_for is None and head.token is None
        rate_limit_key = (
            self._default_rate_limit_key
            if plain
            else front.peers.rate_limit_key(self._host, head.forwarded_for, head.token)
        )
        self._rate_limit_key = rate_limit_key
        number = self._serving
        if head.half == "decentrl":
            if not front.admits(rate_limit_key):
                self._reject_rate_limited(number)
                return
            self._begin_answer(number, head.half, respond_to_command(front.command(body, rate_limit_key)))
            return
        general_path = partial(self._serve_general_path, number, head, body, rate_limit_key)
        if not front.forward_fast_path(body, rate_limit_key, partial(self._finish, number), general_path):
            general_path()

    def _serve_general_path(self, number: int, head: FastRequestHead, body: bytes, rate_limit_key: str) -> None:
        if not self._front.admits(rate_limit_key):
            self._reject_rate_limited(number)
            return
        self._begin_answer(
            number, head.half, respond_to_message(self._front.receive, body, rate_limit_key, head.content_type)
        )

    def _reject_rate_limited(self, number: int) -> None:
        """Refuse a request over the limit of its address, and serve nothing more on this connection."""
        self._front.record_early_rejection(self._half, self._rate_limit_key, RateLimitExceeded())
        self._suspended = True
        self._buffer = bytearray()
        self._finish(number, RATE_LIMIT_RESPONSES[self._half])
        self._close()

    def _begin_answer(self, number: int, half: ProtocolName, work: Awaitable[HTTPResponse]) -> None:
        Deferred.fromCoroutine(self._answer(number, half, work))

    async def _answer(self, number: int, half: ProtocolName, work: Awaitable[HTTPResponse]) -> None:
        try:
            answer = await work
        except Exception:
            _log.failure("answering a request failed", redact_failure())
            answer = FAULT_RESPONSES[half]
        self._finish(number, answer)

    def _finish(self, number: int, answer: HTTPResponse | DIDCommReply) -> None:
        """Write the response to the request of this number, unless it was given up or already answered."""
        if number != self._serving or number == self._served or self._timer is None:
            return
        self._served = number
        self._idle_since = self._front.clock.seconds()
        if isinstance(answer, DIDCommReply):
            answer = ACCEPTED_RESPONSE if answer is ACCEPTED else build_didcomm_response(answer)
        if answer.body and not self._response_budget.has_room(self._rate_limit_key, len(answer.body)):
            answer = UNREAD_LIMIT_RESPONSES[self._half]
        now = int(self._idle_since)
        write_immediately(
            self.transport,
            _serialize_accepted(now) if answer is ACCEPTED_RESPONSE else serialize_response(answer, now),
        )
        if self._congested:
            self._response_budget.add(self._rate_limit_key, len(answer.body))
        if self._buffer:
            self._advance()
        if not self._reading:
            self._resume_reading()
        if self._half_closed:
            self._close_if_done()

    def _pause(self) -> None:
        if self._reading:
            self._reading = False
            self.transport.pauseProducing()

    def _resume_reading(self) -> None:
        """Resume reading, unless requests in the buffer have to be served first."""
        waits = self._busy and len(self._buffer) > _MAX_READ_AHEAD
        if not (self._reading or self._congested or self._suspended or self._half_closed or waits):
            self._reading = True
            self.transport.resumeProducing()

    def _check_timeout(self) -> None:
        """Handle the timeout of a request or of an idle connection, if it has come; else check again later."""
        now = self._front.clock.seconds()
        patience = self._front.deadline if self._busy else self._site.timeOut
        self._idle_since = min(self._idle_since, now)  # as above
        left = self._idle_since + patience - now
        self._timer = self._front.clock.callLater(max(left, 0.001) if left > 0 else patience, self._check_timeout)
        if left > 0:
            return
        if self._busy:
            self._finish(self._serving, TIMEOUT_RESPONSES[self._half])
        else:
            self.transport.abortConnection()

    def _switch_to_standard_channel(self) -> None:
        """Let twisted.web have the connection, and all that was read of it."""
        self._resume_reading()
        self._cancel_timeout()
        self._site.reading.discard(self)
        self.transport.unregisterProducer()
        data, self._buffer = bytes(self._buffer), bytearray()
        self._standard_channel = self._site.build_standard_channel(self._address)
        self._standard_channel.makeConnection(self.transport)
        self._standard_channel.dataReceived(data)
        if self._half_closed:
            self._standard_channel.readConnectionLost()

    def _close_if_done(self) -> None:
        """Close a connection on which no request will come, once all that came are answered."""
        if not self._half_closed or self._is_closing or self._standard_channel is not None:
            return
        if not (self._busy or self._suspended or self._congested or self._advancing):
            self._close()

    def _close(self) -> None:
        """Close the connection once everything is written; ignore further data."""
        self._is_closing = True
        self.transport.unregisterProducer()  # or TLS would wait for us to write more
        if not self._reading:
            self._reading = True
            self.transport.resumeProducing()  # or TLS would never see that the client closes as well
        self.transport.loseConnection()

    def _cancel_timeout(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def pauseProducing(self) -> None:
        """The client does not read its responses: stop serving it."""
        self._congested = True

    def resumeProducing(self) -> None:
        """The client has read all responses: continue serving it."""
        self._congested = False
        self._response_budget.clear()
        self._idle_since = self._front.clock.seconds()
        self._advance()
        # The buffer may hold a part of a request, of which the rest has to be read.
        self._resume_reading()
        self._close_if_done()

    def stopProducing(self) -> None:
        """Does nothing; :meth:`connectionLost` is called as well."""

    def readConnectionLost(self) -> None:  # noqa: N802  Twisted's name
        """The client has closed its side, and waits for its responses."""
        self._half_closed = True
        if self._standard_channel is not None:
            self._standard_channel.readConnectionLost()
        else:
            self._close_if_done()

    def writeConnectionLost(self) -> None:  # noqa: N802  Twisted's name
        """Does nothing."""

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        """The connection is closed; a request in progress is completed."""
        self._cancel_timeout()
        self._response_budget.clear()
        self._site.closed(self._address)
        self._site.memory.released(len(self._buffer))
        self._buffer = bytearray()
        self._site.reading.discard(self)
        self._site.scheduler.discard(self)
        if self._standard_channel is not None:
            self._standard_channel.connectionLost(reason)


def serialize_response(answer: HTTPResponse, now: int) -> bytes:
    """The bytes of a response on a connection that stays open."""
    lines = [
        b"HTTP/1.1 %d %b\r\nDate: %b\r\n" % (answer.status, _get_reason_phrase(answer.status), _format_date(now)),
        _COMMON_HEADER_LINES,
    ]
    if answer.content_type:
        lines.append(b"Content-Type: %b\r\n" % answer.content_type)
    for name, value in answer.headers:
        lines.append(b"%b: %b\r\n" % (name, value))
        if name == b"Retry-After":
            lines.append(_EXPOSE_HEADER_LINE)
    lines.append(b"Content-Length: %d\r\n\r\n" % len(answer.body))
    lines.append(answer.body)
    return b"".join(lines)


def _get_reason_phrase(status: int) -> bytes:
    return REASON_PHRASES.get(status) or RESPONSES.get(status, b"Unknown Status")


@lru_cache(1)
def _serialize_accepted(second: int) -> bytes:
    return serialize_response(ACCEPTED_RESPONSE, second)


@lru_cache(1)
def _format_date(second: int) -> bytes:
    date: bytes = datetimeToString(second)
    return date
