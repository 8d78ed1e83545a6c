"""
HTTP/2 client for one origin over TLS, of which Twisted has none. Requests share a connection; those that the server
has certainly not processed are sent again, others never.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import cast

import hyperlink
from hpack import NeverIndexedHeaderTuple
from twisted.internet.defer import Deferred
from twisted.internet.error import ConnectingCancelledError
from twisted.internet.protocol import Factory
from twisted.python.failure import Failure

from mediatord.net.http2_connection import HTTP2Connection, HTTP2Request, HTTP2Response
from mediatord.net.outbound_http import OutboundError, OutboundHTTPClient, OutboundRequestError

# Normally one: others have received a GOAWAY, and wait for their last responses.
_MAX_CONNECTIONS = 4
_MAX_WAITING = 1000
# Until the server has sent its settings.
_CONNECT_SECONDS = 5.0
# How often a request is put on a stream, if the server refuses each time to process it.
_MAX_ATTEMPTS = 3


class HTTP2Client:
    """
    Client of one origin. Connects when it is first used, and again after the connection was lost.

    :param outbound: resolves and checks the address at each attempt to connect.
    :param url: an https URL; its path is ignored.
    :param max_waiting: requests that wait for a stream, above which further ones fail.
    :raise OutboundAddressError: not an https URL.
    """

    def __init__(self, outbound: OutboundHTTPClient, url: str, *, max_waiting: int = _MAX_WAITING) -> None:
        self._endpoint = outbound.make_endpoint(url, [b"h2"])
        self._authority = hyperlink.URL.from_text(url).authority()
        self._clock = outbound.reactor
        self._max_waiting = max_waiting
        self._waiting: deque[HTTP2Request] = deque()
        self._current: HTTP2Connection | None = None
        self._connections: set[HTTP2Connection] = set()
        self._opening: Deferred[HTTP2Connection] | None = None
        self._closed: Deferred[None] | None = None

    async def post(
        self, path: str, headers: Sequence[tuple[str, str]], body: bytes, *, timeout: float
    ) -> HTTP2Response:
        """
        POST; a response of more than 16 KiB is an error.

        :param headers: lower case names; nothing from outside, as not every invalid value is found.
        :param timeout: seconds for everything, including connecting and waiting for a stream.
        :raise OutboundAddressError: the address is blocked; nothing was sent.
        :raise OutboundRequestError: anything else. The server may have processed the request, unless it was refused
            three times (`Refused`), or nothing was sent.
        """
        if self._closed is not None:
            raise OutboundRequestError("Closed")
        if len(self._waiting) >= self._max_waiting:
            raise OutboundRequestError("QueueFull")
        fields: list[tuple[str, str]] = [
            (":method", "POST"),
            (":scheme", "https"),
            (":authority", self._authority),
            # Differs each time, and may be a secret: not for the compression context.
            cast(tuple[str, str], NeverIndexedHeaderTuple(":path", path)),
            *headers,
            ("content-length", str(len(body))),
        ]
        done: Deferred[HTTP2Response] = Deferred(lambda _: self._abandon(request))
        request = HTTP2Request(fields, body, done)
        done.addTimeout(timeout, self._clock)
        self._waiting.append(request)
        self.capacity_changed()
        try:
            return await done
        except OutboundError:
            raise
        except Exception as error:  # time-out, cancellation
            raise OutboundRequestError(type(error).__name__) from None

    async def close(self) -> None:
        """Abort requests and connections; returns when these are closed."""
        if self._closed is None:
            self._closed = Deferred()
            self._fail_waiting(OutboundRequestError("Closed"))
            if self._opening is not None:
                self._opening.cancel()
            for connection in list(self._connections):
                connection.abort("Closed")
        if self._connections:
            done: Deferred[None] = Deferred()
            self._closed.chainDeferred(done)
            await done

    # IConnectionOwner

    def connection_made(self, connection: HTTP2Connection) -> None:
        """As the interface says."""
        self._connections.add(connection)

    def connection_draining(self, connection: HTTP2Connection, unprocessed: Sequence[HTTP2Request]) -> None:
        """As the interface says."""
        self._remove_current(connection)
        for request in reversed(unprocessed):
            self._repeat(request)
        self.capacity_changed()

    def request_refused(self, request: HTTP2Request) -> None:
        """As the interface says."""
        self._repeat(request)

    def connection_closed(self, connection: HTTP2Connection) -> None:
        """As the interface says."""
        self._remove_current(connection)
        self._connections.discard(connection)
        if self._closed is None:
            self.capacity_changed()
        elif not self._connections and not self._closed.called:
            self._closed.callback(None)

    def capacity_changed(self) -> None:
        """Put waiting requests on streams, as far as possible; connect if there is no connection."""
        while self._waiting and self._current is not None and self._current.can_send():
            self._current.send(self._waiting.popleft())
        if (
            self._waiting
            and self._current is None
            and self._opening is None
            and len(self._connections) < _MAX_CONNECTIONS
        ):
            self._opening = Deferred.fromCoroutine(self._connect()).addTimeout(_CONNECT_SECONDS, self._clock)
            self._opening.addCallbacks(self._connected, self._not_connected)

    async def _connect(self) -> HTTP2Connection:
        factory = Factory.forProtocol(lambda: HTTP2Connection(self, self._clock))
        factory.noisy = False
        connection = cast(HTTP2Connection, await self._endpoint.connect(factory))
        await connection.ready
        return connection

    def _connected(self, connection: HTTP2Connection) -> None:
        self._opening = None
        self._current = connection
        self.capacity_changed()

    def _not_connected(self, failure: Failure) -> None:
        self._opening = None
        error = failure.value
        if not isinstance(error, OutboundError):
            # A connection that was being made at the time-out is cancelled.
            timed_out = failure.check(ConnectingCancelledError)
            error = OutboundRequestError("TimeoutError" if timed_out else type(error).__name__)
        self._fail_waiting(error)

    def _fail_waiting(self, error: OutboundError) -> None:
        waiting, self._waiting = self._waiting, deque()
        for request in waiting:
            request.done.errback(error)

    def _repeat(self, request: HTTP2Request) -> None:
        if self._closed is not None or request.attempts >= _MAX_ATTEMPTS:
            request.done.errback(OutboundRequestError("Refused"))
        else:
            self._waiting.appendleft(request)

    def _abandon(self, request: HTTP2Request) -> None:
        if request.connection is not None:
            request.connection.abandon(request)
        elif request in self._waiting:
            self._waiting.remove(request)

    def _remove_current(self, connection: HTTP2Connection) -> None:
        if self._current is connection:
            self._current = None
