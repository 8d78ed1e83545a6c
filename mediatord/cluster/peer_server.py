"""
Who may have a connection with the node-to-node listener: nodes, and a number of strangers beside them.

Answers what other nodes ask, once it is known that they are nodes.

The node-to-node listener: stock Twisted, with limits on all that a stranger could send there.

Whoever does not show a sealed request soon is cut off; nobody is told more than 401.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from io import BytesIO
from ipaddress import IPv6Address, ip_address, ip_network
from typing import Any, Protocol, cast

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.interfaces import IAddress, IDelayedCall, IReactorTime
from twisted.internet.protocol import connectionDone
from twisted.logger import Logger
from twisted.python.failure import Failure
from twisted.web.http import HTTPChannel
from twisted.web.resource import Resource
from twisted.web.server import NOT_DONE_YET, Request, Site

from mediatord.clock import request_scope
from mediatord.cluster.message_authenticator import (
    MessageAuthenticationError,
    MessageAuthenticator,
    extract_authentication_headers,
)
from mediatord.cluster.peer_protocol import MAX_BODY_BYTES
from mediatord.errors import StoreUnavailable
from mediatord.failure_logging import LogThrottle, redact_failure

# Connections that have shown to be nodes'. What is more counts as strangers.
MAX_AUTHENTICATED = 256
# Connections that have not, or not yet, and those of one address.
MAX_UNAUTHENTICATED = 128
MAX_UNAUTHENTICATED_PER_ADDRESS = 64

_IPV6_PREFIX_LENGTH = 64


class PeerConnection(Protocol):
    """One connection."""

    @property
    def is_idle(self) -> bool:
        """Whether no whole request of it is waiting for an answer."""

    def end(self) -> None:
        """Cut it off."""

    def __hash__(self) -> int: ...


class ConnectionSlots:
    """
    Keeps a place for whoever comes: where strangers have taken theirs, the oldest that says nothing gives up its own.

    So nobody who only holds connections open keeps a node out, which says at once what it has to say.
    """

    def __init__(self) -> None:
        self._authenticated: set[PeerConnection] = set()
        self._unauthenticated: dict[PeerConnection, str] = {}

    def __len__(self) -> int:
        return len(self._authenticated) + len(self._unauthenticated)

    def __iter__(self) -> Iterator[PeerConnection]:
        return iter((*self._authenticated, *self._unauthenticated))

    def reserve(self, client_address: str) -> bool:
        """Whether there is a place for one more stranger from there, if need be at the cost of another."""
        of_this = [
            connection
            for connection, other in self._unauthenticated.items()
            if client_address and other == client_address
        ]
        if len(of_this) >= MAX_UNAUTHENTICATED_PER_ADDRESS:
            return self._evict_idle(of_this)
        return len(self._unauthenticated) < MAX_UNAUTHENTICATED or self._evict_idle(list(self._unauthenticated))

    def enter(self, connection: PeerConnection, client_address: str) -> None:
        """A stranger is here."""
        self._unauthenticated[connection] = client_address

    def authenticated(self, connection: PeerConnection) -> None:
        """It has shown to be a node."""
        if connection in self._unauthenticated and len(self._authenticated) < MAX_AUTHENTICATED:
            del self._unauthenticated[connection]
            self._authenticated.add(connection)

    def leave(self, connection: PeerConnection) -> None:
        """It is gone."""
        self._authenticated.discard(connection)
        self._unauthenticated.pop(connection, None)

    def _evict_idle(self, oldest_first: list[PeerConnection]) -> bool:
        connection = next((one for one in oldest_first if one.is_idle), None)
        if connection is None:
            return False
        self.leave(connection)
        connection.end()
        return True


def normalize_address(host: str) -> str:
    """What counts as one address: with IPv6 it is what one customer has. The empty one is nobody's."""
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

# Requests that are served at the same time; what is more is sent again later.
MAX_CONCURRENT_REQUESTS = 64

_OK, _BAD, _UNAUTHORIZED, _NOT_FOUND, _GONE, _BUSY = 200, 400, 401, 404, 410, 503

PeerOperation = Callable[[bytes], Awaitable[bytes]]


@dataclass(frozen=True, slots=True)
class PeerResponse:
    """
    :param known: whether it was a node that asked.
    """

    status: int
    body: bytes = b"{}"
    headers: Mapping[str, str] = field(default_factory=dict)
    authenticated: bool = True


class PeerServer:
    """
    Opens requests, has them answered, and seals the answers.

    :param boot: ours.
    :param uses: what is done for each path; raises ValueError for a body that is none.
    :param refused: told of what no node has sent, in one of the words of :class:`MessageAuthenticationError`.
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
        The answer to a request: 401 without a seal when it is none of a node's, else sealed.

        :param known: called as soon as it has shown to be a node's.
        """
        try:
            request_id = self._authenticator.verify_request(headers, method, path, body)
        except MessageAuthenticationError as refusal:
            return self._refuse(refusal.reason)
        except Exception:
            _log.failure("opening a request failed", redact_failure())
            return self._refuse("malformed")
        authenticated()
        status, answer = (
            (_GONE, b"{}") if request_id.receiver != self._boot else await self._answer(method, path, body)
        )
        return PeerResponse(
            status, answer, self._authenticator.authenticate_response(request_id, self._boot, status, answer)
        )

    async def _answer(self, method: str, path: str, body: bytes) -> tuple[int, bytes]:
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
        """Of what no node has sent, which counts."""
        self._refused(reason)
        count = self._warning.count_occurrence()
        if count:
            _log.warn(
                "refused {count} requests to cluster.listen, the last one because of its {reason}: from a stranger, "
                "or a node with another secret or a clock that is wrong",
                count=count,
                reason=reason,
            )
        return PeerResponse(_UNAUTHORIZED, authenticated=False)


# Bytes of a request line with all headers.
MAX_HEADER_BYTES = 4096
MAX_HEADER_COUNT = 32
# A stranger's connection lasts no longer, and no request may take longer to arrive.
RECEIVE_TIMEOUT = 10.0
# More than a node keeps an idle connection.
IDLE_TIMEOUT = 60.0

ServeFunction = Callable[[str, str, dict[str, str], bytes, Callable[[], None]], Awaitable[PeerResponse]]


class PeerChannel(HTTPChannel):
    """A connection of another node, or of a stranger until it has shown to be one."""

    MAX_LENGTH = MAX_HEADER_BYTES
    totalHeadersSize = MAX_HEADER_BYTES
    maxHeaders = MAX_HEADER_COUNT

    _deadline: IDelayedCall | None = None

    def connectionMade(self) -> None:
        """Somebody is there."""
        super().connectionMade()
        self.wait()

    def wait(self) -> None:
        """Whatever is to come has to be there soon."""
        self.cancel_deadline()
        self._deadline = self._site.clock.callLater(RECEIVE_TIMEOUT, self._deadline_passed)

    def authenticated(self) -> None:
        """It has shown to be a node's, once more."""
        self.cancel_deadline()
        self._site.places.authenticated(self)

    def cancel_deadline(self) -> None:
        """What was waited for has come, or nothing will."""
        if self._deadline is not None and self._deadline.active():
            self._deadline.cancel()
        self._deadline = None

    @property
    def is_idle(self) -> bool:
        """Whether no whole request is waiting for an answer."""
        return not self._handlingRequest

    def end(self) -> None:
        """Cut it off."""
        if self.transport is not None:
            cast(Any, self.transport).abortConnection()

    def dataReceived(self, data: bytes) -> None:
        """Called with what comes."""
        if self._deadline is None and self.is_idle:
            self.wait()
        super().dataReceived(data)

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        """They are gone."""
        self.cancel_deadline()
        self._site.places.leave(self)
        super().connectionLost(reason)

    def _deadline_passed(self) -> None:
        self._deadline = None
        self.end()

    @property
    def _site(self) -> PeerSite:
        site: PeerSite = cast(Any, self).site
        return site


class PeerRequest(Request):
    """A request whose body is never longer than any that a node makes."""

    _received = 0

    def gotLength(self, length: int | None) -> None:
        """Called once the headers are there."""
        self.content = BytesIO()
        if length is not None and length > MAX_BODY_BYTES:
            self._refuse()

    def handleContentChunk(self, data: bytes) -> None:
        """Called with every piece of the body."""
        self._received += len(data)
        if self._received > MAX_BODY_BYTES:
            self._refuse()
        else:
            super().handleContentChunk(data)

    def _refuse(self) -> None:
        cast(Any, self.channel).transport.abortConnection()


class PeerSite(Site):
    """
    What the node-to-node listener serves.

    :param serve: answers a request, given its method, path, headers that concern seals, body, and what is to be
        called as soon as it has shown to be a node's.
    :ivar places: the connections that are open.
    """

    protocol = PeerChannel  # type: ignore[assignment]  # instead of a proxy that could speak HTTP/2
    requestFactory = PeerRequest
    noisy = False

    def __init__(self, clock: IReactorTime, serve: ServeFunction) -> None:
        super().__init__(_PeerResource(serve), reactor=clock, timeout=IDLE_TIMEOUT, parsePOSTFormSubmission=False)
        self.clock = clock
        self.serve = serve
        self.places = ConnectionSlots()

    def buildProtocol(self, addr: IAddress | None) -> Any:
        """A connection, unless there are too many."""
        client_address = normalize_address(getattr(addr, "host", "") or "")
        if not self.places.reserve(client_address):
            return None
        channel: Any = super().buildProtocol(cast(Any, addr))
        self.places.enter(channel, client_address)
        return channel

    def stopFactory(self) -> None:
        """Nobody listens any more: end what is still open."""
        super().stopFactory()
        for channel in self.places:
            channel.end()

    def log(self, request: object) -> None:
        """Nothing: there is one for every few messages."""


class _PeerResource(Resource):
    isLeaf = True

    def __init__(self, serve: ServeFunction) -> None:
        super().__init__()
        self._serve = serve

    def render(self, request: Any) -> int:
        """Every method and path: what is served is said in the answer."""
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
    _log.failure("serving another node failed", redact_failure(failure))
    request.channel.transport.abortConnection()
