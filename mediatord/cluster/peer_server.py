"""
The node-to-node listener: authenticates requests, dispatches them, and authenticates the responses.

It is a Twisted HTTP site with limits on everything that an unauthenticated client can send. A client that does not
authenticate soon is disconnected, and learns nothing but 401.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from io import BytesIO
from ipaddress import IPv6Address, ip_address, ip_network
from typing import Any, cast

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.interfaces import IAddress, IDelayedCall, IReactorTime
from twisted.internet.protocol import connectionDone
from twisted.logger import Logger
from twisted.python.failure import Failure
from twisted.web.http import HTTPChannel
from twisted.web.resource import Resource
from twisted.web.server import NOT_DONE_YET, Request, Site

from mediatord.clock import request_scope
from mediatord.cluster.peer_protocol import (
    MAX_BODY_BYTES,
    MessageAuthenticationError,
    MessageAuthenticator,
    extract_authentication_headers,
)
from mediatord.errors import StoreUnavailable
from mediatord.log_redaction_and_throttle import LogThrottle, redact_failure

# Authenticated connections; further ones count as unauthenticated.
MAX_AUTHENTICATED = 256
# Other connections, in all and per address.
MAX_UNAUTHENTICATED = 128
MAX_UNAUTHENTICATED_PER_ADDRESS = 64

_IPV6_PREFIX_LENGTH = 64


class ConnectionSlots:
    """
    Limits connections: when all slots are taken, a new one evicts the oldest unauthenticated one that is idle.

    So idle connections cannot keep a node out, since a node sends its request at once.
    """

    def __init__(self) -> None:
        self._authenticated: set[PeerChannel] = set()
        self._unauthenticated: dict[PeerChannel, str] = {}

    def __len__(self) -> int:
        return len(self._authenticated) + len(self._unauthenticated)

    def __iter__(self) -> Iterator[PeerChannel]:
        return iter((*self._authenticated, *self._unauthenticated))

    def reserve(self, client_address: str) -> bool:
        """Whether there is a slot for a new connection from an address, if need be by evicting another."""
        same_address = [
            connection
            for connection, other in self._unauthenticated.items()
            if client_address and other == client_address
        ]
        if len(same_address) >= MAX_UNAUTHENTICATED_PER_ADDRESS:
            return self._evict_idle(same_address)
        return len(self._unauthenticated) < MAX_UNAUTHENTICATED or self._evict_idle(list(self._unauthenticated))

    def add(self, connection: PeerChannel, client_address: str) -> None:
        """Add an unauthenticated connection."""
        self._unauthenticated[connection] = client_address

    def mark_authenticated(self, connection: PeerChannel) -> None:
        """Count a connection as authenticated, if there is a slot."""
        if connection in self._unauthenticated and len(self._authenticated) < MAX_AUTHENTICATED:
            del self._unauthenticated[connection]
            self._authenticated.add(connection)

    def remove(self, connection: PeerChannel) -> None:
        """Free the slot of a connection."""
        self._authenticated.discard(connection)
        self._unauthenticated.pop(connection, None)

    def _evict_idle(self, oldest_first: list[PeerChannel]) -> bool:
        connection = next((one for one in oldest_first if one.is_idle), None)
        if connection is None:
            return False
        self.remove(connection)
        connection.end()
        return True


def normalize_address(host: str) -> str:
    """The address that a client is limited by: with IPv6 its /64 network."""
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if not isinstance(address, IPv6Address):
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ip_network((int(address), _IPV6_PREFIX_LENGTH), strict=False))


_log = Logger()

# Concurrent requests; further ones get 503 and are retried by the sender.
MAX_CONCURRENT_REQUESTS = 64

_OK, _BAD, _UNAUTHORIZED, _NOT_FOUND, _GONE, _BUSY = 200, 400, 401, 404, 410, 503

PeerOperation = Callable[[bytes], Awaitable[bytes]]


@dataclass(frozen=True, slots=True)
class PeerResponse:
    """
    Response to a request on the node-to-node listener.

    :param authenticated: whether a node made the request.
    """

    status: int
    body: bytes = b"{}"
    headers: Mapping[str, str] = field(default_factory=dict)
    authenticated: bool = True


class PeerServer:
    """
    Verifies requests, runs their operations, and authenticates the responses.

    :param boot: of this node.
    :param operations: by path; each raises ValueError for a malformed body.
    :param refused: called for each unauthenticated request, with the reason of :class:`MessageAuthenticationError`.
    """

    def __init__(
        self,
        clock: IReactorTime,
        boot: str,
        authenticator: MessageAuthenticator,
        operations: Mapping[str, PeerOperation],
        refused: Callable[[str], None],
    ) -> None:
        self._clock = clock
        self._boot = boot
        self._authenticator = authenticator
        self._operations = operations
        self._refused = refused
        self._warning = LogThrottle(clock)
        self._in_flight = 0

    async def serve(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str],
        body: bytes,
        authenticated: Callable[[], None] = lambda: None,
    ) -> PeerResponse:
        """
        The response to a request: 401 and unauthenticated unless a node made it.

        :param authenticated: called as soon as the request is verified.
        """
        try:
            request_id = self._authenticator.verify_request(headers, method, path, body)
        except MessageAuthenticationError as refusal:
            return self._refuse(refusal.reason)
        except Exception:
            _log.failure("verifying a request failed", redact_failure())
            return self._refuse("malformed")
        authenticated()
        if request_id.receiver == self._boot:
            status, answer = await self._run_operation(method, path, body)
        else:
            status, answer = _GONE, b"{}"
        return PeerResponse(
            status, answer, self._authenticator.authenticate_response(request_id, self._boot, status, answer)
        )

    async def _run_operation(self, method: str, path: str, body: bytes) -> tuple[int, bytes]:
        operation = self._operations.get(path)
        if operation is None or method != "POST":
            return _NOT_FOUND, b"{}"
        if self._in_flight >= MAX_CONCURRENT_REQUESTS:
            return _BUSY, b"{}"
        self._in_flight += 1
        try:
            with request_scope(self._clock):
                return _OK, await operation(body)
        except ValueError:
            return _BAD, b"{}"
        except StoreUnavailable:
            return _BUSY, b"{}"
        finally:
            self._in_flight -= 1

    def _refuse(self, reason: str) -> PeerResponse:
        self._refused(reason)
        count = self._warning.count_occurrence()
        if count:
            _log.warn(
                "refused {count} requests to cluster.listen, the last one because of its {reason}: from an unknown "
                "client, or a node with another secret or a wrong clock",
                count=count,
                reason=reason,
            )
        return PeerResponse(_UNAUTHORIZED, authenticated=False)


# Bytes of the request line and all headers.
MAX_HEADER_BYTES = 4096
MAX_HEADER_COUNT = 32
# Seconds until a connection has to be authenticated, and until a request has to be complete.
RECEIVE_TIMEOUT = 10.0
# Seconds; more than a node keeps an idle connection.
IDLE_TIMEOUT = 60.0

ServeFunction = Callable[[str, str, dict[str, str], bytes, Callable[[], None]], Awaitable[PeerResponse]]


class PeerChannel(HTTPChannel):
    """A connection to the node-to-node listener."""

    MAX_LENGTH = MAX_HEADER_BYTES
    totalHeadersSize = MAX_HEADER_BYTES
    maxHeaders = MAX_HEADER_COUNT

    _deadline: IDelayedCall | None = None

    def connectionMade(self) -> None:
        super().connectionMade()
        self._start_deadline()

    def _start_deadline(self) -> None:
        self.cancel_deadline()
        self._deadline = self._site.clock.callLater(RECEIVE_TIMEOUT, self._deadline_passed)

    def authenticated(self) -> None:
        """Record that a request on it was verified."""
        self.cancel_deadline()
        self._site.slots.mark_authenticated(self)

    def cancel_deadline(self) -> None:
        """Let it take its time: a request is complete, or none will come."""
        if self._deadline is not None and self._deadline.active():
            self._deadline.cancel()
        self._deadline = None

    @property
    def is_idle(self) -> bool:
        """Whether no request awaits its response."""
        return not self._handlingRequest

    def end(self) -> None:
        """Abort the connection."""
        if self.transport is not None:
            cast(Any, self.transport).abortConnection()

    def dataReceived(self, data: bytes) -> None:
        if self._deadline is None and not self._handlingRequest:
            self._start_deadline()
        super().dataReceived(data)

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        self.cancel_deadline()
        self._site.slots.remove(self)
        super().connectionLost(reason)

    def _deadline_passed(self) -> None:
        self._deadline = None
        self.end()

    @property
    def _site(self) -> PeerSite:
        site: PeerSite = cast(Any, self).site
        return site


class PeerRequest(Request):
    """A request whose body is limited to :data:`MAX_BODY_BYTES`."""

    _received = 0

    def gotLength(self, length: int | None) -> None:
        self.content = BytesIO()
        if length is not None and length > MAX_BODY_BYTES:
            self._refuse()

    def handleContentChunk(self, data: bytes) -> None:
        self._received += len(data)
        if self._received > MAX_BODY_BYTES:
            self._refuse()
        else:
            super().handleContentChunk(data)

    def _refuse(self) -> None:
        cast(Any, self.channel).transport.abortConnection()


class PeerSite(Site):
    """
    HTTP site of the node-to-node listener.

    :param serve: as :meth:`PeerServer.serve`.
    :ivar slots: the open connections.
    """

    protocol = PeerChannel  # type: ignore[assignment]  # instead of a proxy that could speak HTTP/2
    requestFactory = PeerRequest
    noisy = False

    def __init__(self, clock: IReactorTime, serve: ServeFunction) -> None:
        super().__init__(_PeerResource(serve), reactor=clock, timeout=IDLE_TIMEOUT, parsePOSTFormSubmission=False)
        self.clock = clock
        self.serve = serve
        self.slots = ConnectionSlots()

    def buildProtocol(self, addr: IAddress | None) -> Any:
        """A connection, or None if there are too many."""
        client_address = normalize_address(getattr(addr, "host", "") or "")
        if not self.slots.reserve(client_address):
            return None
        channel: Any = super().buildProtocol(cast(Any, addr))
        self.slots.add(channel, client_address)
        return channel

    def stopFactory(self) -> None:
        """Abort the connections that are still open."""
        super().stopFactory()
        for channel in self.slots:
            channel.end()

    def log(self, request: object) -> None:
        """Log nothing: there is a request for every few messages."""


class _PeerResource(Resource):
    isLeaf = True

    def __init__(self, serve: ServeFunction) -> None:
        super().__init__()
        self._serve = serve

    def render(self, request: Any) -> int:
        """Serve every method and path; :class:`PeerServer` decides on the status."""
        answered = Deferred.fromCoroutine(self._answer(request))
        request.notifyFinish().addErrback(lambda _: answered.cancel())
        answered.addCallback(lambda answer: _write_response(request, answer))
        answered.addErrback(lambda failure: failure.trap(CancelledError))
        answered.addErrback(lambda failure: _abort_request(request, failure))
        return NOT_DONE_YET

    async def _answer(self, request: Any) -> PeerResponse:
        method, path = request.method.decode("latin-1"), request.uri.decode("latin-1")
        body = request.content.read()
        return await self._serve(
            method, path, extract_authentication_headers(request.requestHeaders), body, request.channel.authenticated
        )


def _write_response(request: Any, answer: PeerResponse) -> None:
    request.setResponseCode(answer.status)
    request.responseHeaders.removeHeader("Server")
    for name, value in answer.headers.items():
        request.setHeader(name, value)
    request.setHeader("Content-Type", "application/json")
    request.setHeader("Content-Length", str(len(answer.body)))
    if not answer.authenticated:
        request.channel.persistent = False
        request.setHeader("Connection", "close")
    request.write(answer.body)
    request.finish()


def _abort_request(request: Any, failure: Failure) -> None:
    _log.failure("serving a request of another node failed", redact_failure(failure))
    request.channel.transport.abortConnection()
