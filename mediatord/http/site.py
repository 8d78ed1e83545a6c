"""The HTTP site: Twisted's, with backpressure, early limits on size and rate, and no access log."""

from __future__ import annotations

from functools import cached_property
from io import BytesIO
from typing import Any, cast

from twisted.internet.interfaces import IProtocol
from twisted.internet.protocol import connectionDone
from twisted.python.failure import Failure
from twisted.web.http import HTTPChannel, _IdentityTransferDecoder
from twisted.web.server import Request, Site

from mediatord.decentrl.context import build_error_reply
from mediatord.errors import PayloadTooLarge, RateLimitExceeded
from mediatord.http.fast_path import FastHTTPChannel, serialize_response
from mediatord.http.flow_control import LARGE_BUFFER_BYTES, ConnectionResponseBudget, ResponseBudget
from mediatord.http.resources import HTTPContext, RootResource, get_addresses, get_probe_token
from mediatord.http.responses import (
    CORS_HEADERS,
    JSON_CONTENT_TYPE,
    RATE_LIMIT_RESPONSES,
    build_error,
    select_protocol,
)
from mediatord.observability.event_recorder import ProtocolName
from mediatord.protocol import encoding
from mediatord.protocol.didcomm.message import PLAINTEXT_MEDIA_TYPE, PROBLEM_REPORT
from mediatord.protocol.error_codes import DIDCOMM_ERROR_CODES

# After a 413 the client may send for so long, or so much, before the connection is aborted.
_DISCARD_SECONDS = 5.0
_DISCARD_BYTES = 16_777_216
# Bytes and requests in a quantum of the scheduler; a head is not longer.
_CHUNK_BYTES = 16_384
_REQUESTS_PER_QUANTUM = 2
# Seconds for a request to arrive.
REQUEST_RECEIVE_TIMEOUT = 60.0


class BackpressureHTTPChannel(HTTPChannel):
    """
    Serves no further request of a client that does not read its responses.

    Twisted's own channel pauses reading from the network only, between two requests: responses to many small
    pipelined requests would pile up.
    """

    _began = 0.0
    _closing = False
    # Received data for later quanta.
    _ahead = b""
    _suspended = False
    # The client has closed its sending side.
    _half_closed = False
    _quantum = _REQUESTS_PER_QUANTUM

    def connectionMade(self) -> None:
        """Called when a connection is made."""
        self.response_budget = ConnectionResponseBudget(cast(Any, self).site.unread)
        super().connectionMade()

    def dataReceived(self, data: bytes) -> None:
        """Called with data; a request that takes a minute to arrive is aborted."""
        if self._closing:  # the transport reads on; the data would never be parsed
            return
        if self._suspended:
            self._ahead += data
            return
        now = cast(Any, self).site.clock.seconds()
        if data or self._ahead:
            self._began = self._began or now
        if self._began and now - self._began > REQUEST_RECEIVE_TIMEOUT:
            cast(Any, self.transport).abortConnection()
        else:
            self._read(self._ahead + data if self._ahead else data)

    def _read(self, data: bytes) -> None:
        """Parse a chunk, which may be a whole head; the rest in a later quantum."""
        if self._closing:
            return
        self._ahead = data[_CHUNK_BYTES:]
        super().dataReceived(data[:_CHUNK_BYTES])
        if cast(Any, self)._closing:
            return
        if self._ahead and not self._suspended and isinstance(self._transferDecoder, _IdentityTransferDecoder):
            # A body, which is cheap to read.
            data, self._ahead = self._ahead, b""
            super().dataReceived(data)
        if self._ahead:
            self._suspend()

    def setLineMode(self, extra: bytes = b"") -> None:  # noqa: N802  Twisted's name
        """Called after a request, with the data behind it, which comes before the data for later quanta."""
        self.line_mode = 1
        if self._busyReceiving:
            super().dataReceived(extra)
        elif extra:
            self._began = cast(Any, self).site.clock.seconds()
            self._read(extra + self._ahead)

    def _suspend(self) -> None:
        self._suspended = self.paused = True
        self._networkProducer.pauseProducing()
        cast(Any, self).site.scheduler.add(self)

    def run_quantum(self) -> None:
        """Serve some requests, or parse more of one."""
        self._suspended = False
        if self._closing or self._waitingForTransport:
            return
        self.paused = False
        self._quantum = _REQUESTS_PER_QUANTUM
        if not self._handlingRequest:
            self._networkProducer.resumeProducing()
        self.dataReceived(b"")
        self._close_if_done()

    def readConnectionLost(self) -> None:  # noqa: N802  Twisted's name
        """Called when the client closes its sending side and waits for responses."""
        self._half_closed = True
        self._close_if_done()

    def _close_if_done(self) -> None:
        """Close a half-closed connection once all its requests are answered."""
        if not self._half_closed or self._closing or self.transport is None:
            return
        if not (self._handlingRequest or self._busyReceiving or self._suspended or self._waitingForTransport):
            self.loseConnection()

    def headerReceived(self, line: bytes) -> bool:  # noqa: N802  Twisted's name
        """Called with a header. A number that Python cannot parse is a bad request."""
        try:
            is_fine: bool = super().headerReceived(line)
            return is_fine
        except ValueError:
            self._respondToBadRequestAndDisconnect()
            return False

    def allContentReceived(self) -> None:
        """Called with a complete request."""
        self._began = 0.0
        self._quantum -= 1
        super().allContentReceived()

    def _respondToBadRequestAndDisconnect(self) -> None:  # noqa: N802  Twisted's name
        """Respond to invalid HTTP with a body and CORS headers, unlike Twisted."""
        cast(Any, self.transport).write(_BAD_REQUEST_RESPONSE)
        self.loseConnection()

    def response_written(self, rate_limit_key: str, size: int) -> None:
        """
        Called when a response is written.

        :param size: bytes, counted until the client reads them.
        """
        if self._waitingForTransport:
            self.response_budget.add(rate_limit_key, size)

    def requestDone(self, request: Any) -> None:  # noqa: N802  Twisted's name
        """Called when a response is complete."""
        if self._waitingForTransport:
            self.paused = True
            self._networkProducer.pauseProducing()
        enough = self._quantum <= 0 and (self._buffer or self._dataBuffer or self._ahead) and self.persistent
        if enough and not self._waitingForTransport:
            self._suspend()
        super().requestDone(request)
        if self._suspended:
            self._networkProducer.pauseProducing()
        self._close_if_done()

    def resumeProducing(self) -> None:
        """Called when the transport's buffer is empty."""
        self.response_budget.clear()
        super().resumeProducing()
        if self._suspended:
            self._networkProducer.pauseProducing()
        elif self.paused and not self._waitingForTransport:
            self.paused = False
            self.dataReceived(b"")
        self._close_if_done()

    def take_unparsed_bytes(self) -> bytes:
        """Take the data behind the current request, for the protocol that takes over the connection."""
        behind, self._dataBuffer = b"".join(self._dataBuffer), []
        ahead, self._ahead = self._ahead, b""
        return behind + cast(bytes, self.clearLineBuffer()) + ahead

    def loseConnection(self) -> None:
        """Close after the response; the client has some time to read it."""
        self._closing = True
        self.setTimeout(cast(Any, self).site.timeOut)
        # TLS must read the close notification of the client.
        self._networkProducer.resumeProducing()
        super().loseConnection()

    def timeoutConnection(self) -> None:  # noqa: N802  Twisted's name
        """Abort when the client is idle or does not read; Twisted would wait."""
        cast(Any, self.transport).abortConnection()

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        """Called when the connection is closed."""
        self.response_budget.clear()
        super().connectionLost(reason)
        # The channel and its request are a reference cycle.
        site = cast(Any, self).site
        site.scheduler.discard(self)
        site.memory.released(sum(map(len, (*self._dataBuffer, self._ahead))))
        self._dataBuffer, self._ahead = [], b""
        self.clearLineBuffer()


class SizeLimitedRequest(Request):
    """
    A request that is rejected with 413 as soon as its body is known to be too long.

    The response is sent at once and the rest of the body is discarded for a while: closing while the client is
    sending would make its kernel discard the response.
    """

    _received = 0
    _refused = False

    def gotLength(self, length: int | None) -> None:
        """Called after the headers."""
        self.content = BytesIO()
        if length is not None and length > self._site.max_body:
            self._refuse()

    def handleContentChunk(self, data: bytes) -> None:
        """Called with a part of the body, chunked or not."""
        self._received += len(data)
        if self._refused:
            if self._received > _DISCARD_BYTES:
                self._transport.abortConnection()
        elif self._received > self._site.max_body:
            self._refuse()
        else:
            super().handleContentChunk(data)

    def requestReceived(self, command: bytes, path: bytes, version: bytes) -> None:
        """Called with a complete request."""
        self._release()
        if self._refused:
            self.channel.loseConnection()
        elif self._site.front.admits(self.rate_limit_key):
            super().requestReceived(command, path, version)
        else:
            self._reject_rate_limited(path)

    def _reject_rate_limited(self, path: bytes) -> None:
        """Respond 429 and close the connection."""
        half: ProtocolName = "didcomm" if path == b"/didcomm" else "decentrl"
        self._site.front.record_early_rejection(half, self.rate_limit_key, RateLimitExceeded())
        self._transport.write(serialize_response(RATE_LIMIT_RESPONSES[half], int(self._site.clock.seconds())))
        self.channel.loseConnection()

    def connectionLost(self, reason: Failure) -> None:
        """Called when the connection is closed, perhaps within the body."""
        self._release()
        super().connectionLost(reason)

    def _release(self) -> None:
        if self._received >= LARGE_BUFFER_BYTES:
            self._site.memory.released(self._received)
        self._received = 0

    def has_room(self, size: int) -> bool:
        """Whether a response of this size is within the budget of unread responses."""
        response_budget: ConnectionResponseBudget = cast(Any, self.channel).response_budget
        return response_budget.has_room(self.rate_limit_key, size)

    def response_written(self, size: int) -> None:
        """Count a written response."""
        cast(Any, self.channel).response_written(self.rate_limit_key, size)

    @cached_property
    def rate_limit_key(self) -> str:
        """The rate limit key; available after the headers."""
        return self._site.front.peers.rate_limit_key(*get_addresses(self), get_probe_token(self))

    @property
    def _site(self) -> MediatorSite:
        site: MediatorSite = cast(Any, self.channel).site
        return site

    @property
    def _transport(self) -> Any:
        return self.channel.transport

    def _refuse(self) -> None:
        self._refused = True
        self.content = BytesIO()
        # The channel must not send 100 Continue.
        self.requestHeaders.removeHeader(b"Expect")
        half = self._half()
        self._site.front.record_early_rejection(half, self.rate_limit_key, PayloadTooLarge())
        transport = self._transport
        transport.write(_TOO_LARGE_RESPONSES[half])
        getattr(transport, "loseWriteConnection", transport.loseConnection)()
        timer = self._site.clock.callLater(_DISCARD_SECONDS, transport.abortConnection)
        self.notifyFinish().addErrback(lambda _: timer.cancel() if timer.active() else None)

    def _half(self) -> ProtocolName:
        """The protocol by path or Content-Type, before the request is complete."""
        path: bytes = cast(Any, self.channel)._path.partition(b"?")[0]
        if path == b"/didcomm" or path.startswith(b"/didcomm/"):
            return "didcomm"
        return select_protocol(self.getHeader(b"content-type") or b"")


def _build_too_large_report() -> bytes:
    wire = DIDCOMM_ERROR_CODES[PayloadTooLarge]
    report = {"type": PROBLEM_REPORT, "body": {"code": wire.code, "comment": wire.comment}}
    return encoding.dumps({"id": "too-large", "typ": PLAINTEXT_MEDIA_TYPE, **report})


def _build_final_response(status: int, reason: str, content_type: str, body: bytes) -> bytes:
    """A complete response after which the connection is closed."""
    headers = [
        ("Content-Type", content_type),
        ("Content-Length", str(len(body))),
        ("Connection", "close"),
        *CORS_HEADERS,
    ]
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers)
    return f"HTTP/1.1 {status} {reason}\r\n{lines}\r\n".encode("ascii") + body


def _build_too_large_response(content_type: str, body: bytes) -> bytes:
    return _build_final_response(DIDCOMM_ERROR_CODES[PayloadTooLarge].status, "Content Too Large", content_type, body)


_BAD_REQUEST_RESPONSE = _build_final_response(
    400, "Bad Request", JSON_CONTENT_TYPE.decode("ascii"), build_error(400, "BAD_REQUEST").body
)
_TOO_LARGE_RESPONSES: dict[ProtocolName, bytes] = {
    "didcomm": _build_too_large_response(PLAINTEXT_MEDIA_TYPE, _build_too_large_report()),
    "decentrl": _build_too_large_response(
        JSON_CONTENT_TYPE.decode("ascii"), build_error_reply(PayloadTooLarge()).body
    ),
}


class MediatorSite(Site):
    """
    A site without forms and access log, which cost more than the rest of a request.

    :param max_body: bytes.
    :param max_per_host: connections of one address, without WebSockets, which have their own limit.
    :param max_per_trusted_network: the same for an address in a peer network.
    """

    protocol = BackpressureHTTPChannel  # type: ignore[assignment]  # instead of a proxy that could speak HTTP/2
    requestFactory = SizeLimitedRequest
    noisy = False

    def __init__(
        self, front: HTTPContext, max_body: int, max_per_host: int, max_per_trusted_network: int = 0
    ) -> None:
        super().__init__(RootResource(front), reactor=front.clock, parsePOSTFormSubmission=False)
        self._max_per_host = max_per_host
        self._max_per_trusted_network = max(max_per_host, max_per_trusted_network)
        self._per_host: dict[str, int] = {}
        self.front = front
        self.clock = front.clock
        self.scheduler = front.scheduler
        self.max_body = max_body
        self.reading: set[FastHTTPChannel] = set()
        self.memory = front.memory
        self.unread = ResponseBudget(released=self.memory.released)

    def limit(self, max_body: int, max_per_host: int, max_per_trusted_network: int = 0) -> None:
        """Change the limits; open connections are not affected."""
        self.max_body = max_body
        self._max_per_host = max_per_host
        self._max_per_trusted_network = max(max_per_host, max_per_trusted_network)

    def read_ahead(self) -> tuple[int, int]:
        """Number of fast-path connections with incomplete or pending requests, and the bytes of those."""
        self.reading = {channel for channel in self.reading if channel.held}
        return len(self.reading), sum(channel.held for channel in self.reading)

    def buildProtocol(self, addr: object) -> Any:
        """Build a :class:`~mediatord.http.fast_path.FastHTTPChannel`, if the address may have another connection."""
        host = self._rate_limit_key(addr)
        open_ones = self._per_host.get(host, 0)
        if host and open_ones >= self._max_per_host and open_ones >= self._get_connection_limit(addr):
            return None
        self._per_host[host] = open_ones + 1
        return FastHTTPChannel(self, addr)

    def upgraded(self, connected: str) -> None:
        """Count out a connection that became a WebSocket."""
        self._release_connection("" if self.front.peers.trusts(connected) else self.front.peers.host(connected))

    def closed(self, address: object) -> None:
        """Count out a closed connection."""
        self._release_connection(self._rate_limit_key(address))

    def _rate_limit_key(self, address: object) -> str:
        """The key of a connection; empty for trusted proxies and UNIX sockets, which have no limit."""
        host = getattr(address, "host", "") or ""
        return "" if self.front.peers.trusts(host) else self.front.peers.host(host)

    def _get_connection_limit(self, address: object) -> int:
        host = self.front.peers.client(getattr(address, "host", "") or "", None)
        return self._max_per_trusted_network if self.front.peers.find_peer_network(host) else self._max_per_host

    def _release_connection(self, host: str) -> None:
        left = self._per_host.get(host, 0) - 1
        if left > 0:
            self._per_host[host] = left
        else:
            self._per_host.pop(host, None)

    def build_standard_channel(self, address: object) -> IProtocol | None:
        """Build a channel of twisted.web."""
        channel: IProtocol | None = super().buildProtocol(cast(Any, address))
        return channel

    def log(self, request: object) -> None:
        """Log nothing: requests are in the event log."""
