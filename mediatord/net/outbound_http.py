"""
HTTP client for untrusted URLs: did:web documents, replies and messages to wallets' endpoints (reference 3.3, 4.7,
8.5), and push services.

A host name is resolved once, every resulting address is checked by the :class:`AddressGuard` against SSRF, and the
connection goes to one of these addresses; the spelling of the host is irrelevant. Only public unicast addresses are
permitted, without those reserved for guests of a cloud, plus networks that the operator allows. TLS still verifies
the name. No cookies or proxies, and persistent connections only where asked for; every response is bounded in size
and time.
"""

from __future__ import annotations

import math
import re
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from types import MappingProxyType
from typing import Any, cast

import hyperlink
from twisted.internet.defer import CancelledError, Deferred, DeferredSemaphore, succeed
from twisted.internet.defer import TimeoutError as DeferredTimeoutError
from twisted.internet.endpoints import TCP4ClientEndpoint, TCP6ClientEndpoint, wrapClientTLS
from twisted.internet.error import ConnectError
from twisted.internet.interfaces import (
    IAddress,
    IConsumer,
    IDelayedCall,
    IHostResolution,
    IProtocol,
    IProtocolFactory,
    IResolutionReceiver,
    IStreamClientEndpoint,
)
from twisted.internet.protocol import Protocol, connectionDone
from twisted.internet.ssl import optionsForClientTLS
from twisted.protocols.policies import ProtocolWrapper, WrappingFactory
from twisted.python.failure import Failure
from twisted.web.client import (
    URI,
    Agent,
    BrowserLikePolicyForHTTPS,
    HTTPConnectionPool,
    RequestTransmissionFailed,
    ResponseDone,
    ResponseNeverReceived,
)
from twisted.web.http import PotentialDataLoss, stringToDatetime
from twisted.web.http_headers import Headers
from twisted.web.iweb import IAgentEndpointFactory, IBodyProducer, IResponse
from zope.interface import implementer

IPAddress = IPv4Address | IPv6Address
IPNetwork = IPv4Network | IPv6Network

# Explicit list, because `ipaddress.is_global` differs between Python releases.
_BLOCKED_IPV4 = tuple(
    IPv4Network(network)
    for network in (
        "0.0.0.0/8",  # this host
        "10.0.0.0/8",
        "100.64.0.0/10",  # carrier-grade NAT
        "127.0.0.0/8",
        "168.63.129.16/32",  # a cloud's metadata service, at a public address
        "169.254.0.0/16",  # link-local, with the other metadata services
        "172.16.0.0/12",
        "192.0.0.0/24",
        "192.0.2.0/24",
        "192.31.196.0/24",
        "192.52.193.0/24",
        "192.88.99.0/24",  # 6to4 relays
        "192.168.0.0/16",
        "192.175.48.0/24",
        "198.18.0.0/15",  # benchmarks
        "198.51.100.0/24",
        "203.0.113.0/24",
        "224.0.0.0/4",  # multicast
        "240.0.0.0/4",  # reserved, and broadcast
    )
)
_GLOBAL_UNICAST_IPV6 = IPv6Network("2000::/3")
_BLOCKED_IPV6 = tuple(
    IPv6Network(network)
    for network in (
        "2001::/23",  # Teredo, ORCHID and other protocol assignments
        "2001:db8::/32",
        "2620:4f:8000::/48",
        "3fff::/20",
    )
)
_SIX_TO_FOUR_PREFIX = IPv6Network("2002::/16")
_NAT64_PREFIX = IPv6Network("64:ff9b::/96")
# Interface identifiers of ISATAP (RFC 5214 6.1), which embed an IPv4 address under any prefix.
_ISATAP_IDENTIFIERS = frozenset((0x0000_5EFE, 0x0200_5EFE))
_32_BITS = 0xFFFF_FFFF


class AddressGuard:
    """Checks resolved addresses; names are never checked."""

    def __init__(self, allowed: Iterable[IPNetwork] = ()) -> None:
        """:param allowed: non-public networks that are permitted."""
        self._allowed = tuple(allowed)

    def permits(self, text: str) -> bool:
        """
        Whether a connection to an address is permitted. An embedded IPv4 address (mapped, 6to4, NAT64) is checked in
        place of the IPv6 address; of ISATAP addresses both.

        :param text: as returned by a resolver; text that is not an address is refused.
        """
        try:
            address = ip_address(text)
        except ValueError:
            return False
        inner = _extract_ipv4(address) if isinstance(address, IPv6Address) else None
        return self.allows(text) or _is_public(inner or address)

    def allows(self, text: str) -> bool:
        """Whether an address, or the IPv4 address embedded in it, is in a network that was allowed explicitly."""
        try:
            address = ip_address(text)
        except ValueError:
            return False
        inner = _extract_ipv4(address) if isinstance(address, IPv6Address) else None
        return any(address in network or (inner is not None and inner in network) for network in self._allowed)


def _extract_ipv4(address: IPv6Address) -> IPv4Address | None:
    if address.ipv4_mapped is not None:
        return address.ipv4_mapped
    if address in _NAT64_PREFIX:
        return IPv4Address(int(address) & _32_BITS)
    if address in _SIX_TO_FOUR_PREFIX:
        return address.sixtofour
    return None


def _is_public(address: IPAddress) -> bool:
    if isinstance(address, IPv4Address):
        return not any(address in network for network in _BLOCKED_IPV4)
    if int(address) >> 32 & _32_BITS in _ISATAP_IDENTIFIERS and not _is_public(IPv4Address(int(address) & _32_BITS)):
        return False
    return address in _GLOBAL_UNICAST_IPV6 and not any(address in network for network in _BLOCKED_IPV6)


# Allowance for status line, headers and chunk sizes in addition to the body.
_MAX_HEADER_BYTES = 65_536
_MAX_CONNECT_ATTEMPTS = 4
_CONNECT_SECONDS = 2.0
# Time until a closing connection is aborted; a TLS peer could otherwise keep it open forever.
_CLOSE_SECONDS = 2.0

_MAX_HOST_LENGTH = 253
# Hosts that the platform's resolver accepts, including addresses in any notation.
_HOST_NAME = re.compile(r"[A-Za-z0-9_-]{1,63}(?:\.[A-Za-z0-9_-]{1,63})*\.?|[0-9A-Fa-f:]+(?:[0-9.]+)?")


class OutboundError(Exception):
    """
    A request without a usable response.

    :param reason: a constant word; nothing received from outside.
    """

    def __init__(self, reason: str = "") -> None:
        super().__init__(reason)
        self.reason = reason


class OutboundAddressError(OutboundError):
    """The address is blocked or invalid; a retry is pointless."""


class OutboundRequestError(OutboundError):
    """The host was unreachable, or its response unusable."""


# Reasons of requests that were not sent for want of connections or name lookups here; the host is not at fault.
LOCAL_LIMIT_REASONS = frozenset(("ConnectionsBusy", "ResolverBusy"))


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """
    Bounds of connections that are kept between requests.

    :param per_host: connections to one host and port.
    :param total: connections to all hosts. Requests beyond either number wait, within their time-out.
    :param idle: seconds after which a connection without requests is closed.
    :param wait: seconds that a request waits so at most; None for its time-out.
    """

    per_host: int = 64
    total: int = 256
    idle: float = 60.0
    wait: float | None = None


_HostKey = tuple[str, str, int | None]


class _HostConnections:
    """
    Kept connections to one host and port.

    :ivar key: scheme, host and port.
    :ivar slots: one for each request that may be in progress.
    :ivar requests: number of requests in progress or waiting.
    :ivar connections: number of open connections.
    """

    def __init__(self, reactor: Any, key: _HostKey, limits: ConnectionLimits) -> None:
        self.key = key
        self.slots = DeferredSemaphore(limits.per_host)
        self.pool = HTTPConnectionPool(reactor, persistent=True)
        self.pool.maxPersistentPerHost = limits.per_host
        self.pool.cachedConnectionTimeout = limits.idle  # type: ignore[assignment]  # any number of seconds
        self.pool.retryAutomatically = False
        self.requests = 0
        self.connections = 0


@implementer(IAgentEndpointFactory)
class _GuardedEndpointFactory:
    """
    Makes endpoints whose connections are aborted once a response has more than an allowance of bytes.

    :param secure: whether http is permitted to explicitly allowed networks only.
    :param host: keeps the connections; None to close them after one request.
    :param protocols: offered by ALPN.
    :ivar connected: whether an endpoint was connected to.
    """

    def __init__(
        self,
        client: OutboundHTTPClient,
        allowance: float,
        *,
        secure: bool = False,
        host: _HostConnections | None = None,
        protocols: Sequence[bytes] = (),
    ) -> None:
        self.client = client
        self.allowance = allowance
        self.secure = secure
        self.host = host
        self.protocols = protocols
        self.connected = False

    def endpointForURI(self, uri: URI) -> IStreamClientEndpoint:  # noqa: N802  the interface's name
        return _GuardedEndpoint(self, uri)

    def permits(self, scheme: bytes, address: str) -> bool:
        """Whether a connection is permitted to an address."""
        guard = self.client.guard
        return guard.allows(address) if self.secure and scheme != b"https" else guard.permits(address)


@implementer(IStreamClientEndpoint)
class _GuardedEndpoint:
    """Endpoint that resolves its host once, checks all addresses, and connects to one of them."""

    def __init__(self, factory: _GuardedEndpointFactory, uri: URI) -> None:
        self._factory = factory
        self._client = factory.client
        self._uri = uri

    def connect(self, protocolFactory: IProtocolFactory) -> Deferred[IProtocol]:  # noqa: N803  the interface's name
        return Deferred.fromCoroutine(self._connect(protocolFactory))

    async def _connect(self, factory: IProtocolFactory) -> IProtocol:
        self._factory.connected = True
        addresses = await self._resolve()
        if not all(self._factory.permits(self._uri.scheme, address.host) for address in addresses):
            raise OutboundAddressError("AddressOffLimits")
        metered = _MeteredConnectionFactory(factory, self._client, self._factory.allowance, self._factory.host)
        failure: Exception = OutboundRequestError("NameUnknown")
        for address in addresses[:_MAX_CONNECT_ATTEMPTS]:
            try:
                connection = await self._endpoint_at(address).connect(metered)
            except ConnectError as error:
                failure = error
            else:
                # The Agent expects its own protocol, not the wrapper.
                return cast(_MeteredConnection, connection).wrappedProtocol
        try:
            raise failure
        finally:
            del failure  # breaks a reference cycle through the traceback

    async def _resolve(self) -> list[Any]:
        """IPv4Address and IPv6Address values of twisted.internet.address."""
        name = self._uri.host.decode("ascii")
        if len(name) > _MAX_HOST_LENGTH or not _HOST_NAME.fullmatch(name):
            raise OutboundAddressError("NotAHost")
        if self._client.resolve is not None:
            return await self._client.resolve(name)
        found = _ResolutionReceiver()
        self._client.reactor.nameResolver.resolveHostName(found, name, portNumber=self._uri.port)
        return await found.complete

    def _endpoint_at(self, address: Any) -> IStreamClientEndpoint:
        kind = TCP6ClientEndpoint if ":" in address.host else TCP4ClientEndpoint
        endpoint = kind(self._client.reactor, address.host, self._uri.port, timeout=_CONNECT_SECONDS)
        if self._uri.scheme != b"https":
            return endpoint
        if not self._factory.protocols:
            return wrapClientTLS(self._client.tls.creatorForNetloc(self._uri.host, self._uri.port), endpoint)
        host = self._uri.host.decode("ascii")
        options = optionsForClientTLS(host, self._client.trust_root, acceptableProtocols=self._factory.protocols)
        return wrapClientTLS(options, endpoint)


@implementer(IResolutionReceiver)
class _ResolutionReceiver:
    def __init__(self) -> None:
        self.complete: Deferred[list[Any]] = Deferred()
        self._addresses: list[Any] = []

    def resolutionBegan(self, resolutionInProgress: IHostResolution) -> None:  # noqa: N802, N803
        """Unused; the platform's resolution cannot be cancelled."""

    def addressResolved(self, address: IAddress) -> None:  # noqa: N802
        self._addresses.append(address)

    def resolutionComplete(self) -> None:  # noqa: N802
        self.complete.callback(self._addresses)


class _MeteredConnection(ProtocolWrapper):
    """
    A connection that is aborted if a response is too long, or if it does not close in time.

    :ivar host: what keeps it; None if it is closed after one request.
    """

    factory: _MeteredConnectionFactory

    def __init__(self, factory: _MeteredConnectionFactory, wrapped: IProtocol) -> None:
        super().__init__(factory, wrapped)
        self.host = factory.host
        self._left = factory.allowance
        self._abort_timer: IDelayedCall | None = None
        self._is_lost = False

    @property
    def is_closing(self) -> bool:
        """Whether its end has begun."""
        return self._abort_timer is not None

    def connectionMade(self) -> None:
        self.factory.client.opened(self)

    def writeSequence(self, data: Iterable[bytes]) -> None:
        """Called with the head of each request, whose response may be as long as the one before."""
        self._left = self.factory.allowance
        super().writeSequence(data)

    def dataReceived(self, data: bytes) -> None:
        self._left -= len(data)
        if self._left < 0:
            self.abortConnection()
        else:
            super().dataReceived(data)

    def loseConnection(self) -> None:
        if self._is_lost:
            return
        super().loseConnection()
        if self._abort_timer is None:
            self._abort_timer = self.factory.client.reactor.callLater(_CLOSE_SECONDS, self.abortConnection)

    def abortConnection(self) -> None:  # noqa: N802  the transport's name
        if self._is_lost:
            return
        cast(Any, self.transport).abortConnection()  # both TCP and TLS have it, ITransport does not

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        self._is_lost = True
        if self._abort_timer is not None and self._abort_timer.active():
            self._abort_timer.cancel()
        super().connectionLost(reason)
        self.factory.client.closed(self)


class _MeteredConnectionFactory(WrappingFactory[_MeteredConnection]):
    protocol = _MeteredConnection
    noisy = False

    def __init__(
        self, wrapped: IProtocolFactory, client: OutboundHTTPClient, allowance: float, host: _HostConnections | None
    ) -> None:
        super().__init__(wrapped)
        self.client = client
        self.allowance = allowance
        self.host = host


class _BodyReader(Protocol):
    """
    Reads a body.

    :ivar finished: fires with its first `limit` bytes, and whether that is all of it; does not wait for the rest.
    """

    def __init__(self, limit: int) -> None:
        self.finished: Deferred[tuple[bytes, bool]] = Deferred(lambda _: self._hang_up())
        self._limit = limit
        self._body = bytearray()

    def dataReceived(self, data: bytes) -> None:
        if self.finished.called:
            return
        self._body += data[: self._limit + 1 - len(self._body)]
        if len(self._body) > self._limit:
            self.finished.callback((bytes(self._body[: self._limit]), False))
            self._hang_up()

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        if self.finished.called:
            return
        # Without Content-Length, the end of the connection ends the body.
        if reason.check(ResponseDone, PotentialDataLoss):
            self.finished.callback((bytes(self._body), True))
        else:
            self.finished.errback(reason)

    def _hang_up(self) -> None:
        if self.transport is not None:
            self.transport.loseConnection()


_MAX_URL_LENGTH = 8192
_MAX_REDIRECTS = 3
_MAX_RESPONSE_BYTES = 65_536
_TEMPORARY_REDIRECT = 307
_MAX_PORT = 65_535
# Bound of Retry-After, in seconds.
_MAX_RETRY_AFTER = 86_400.0
_DELTA_SECONDS = re.compile(rb"[0-9]{1,10}")
_NO_HEADERS: Mapping[bytes, bytes] = MappingProxyType({})
# Rejects ambiguous authorities: user information (even empty), IPv4 in brackets, empty labels, unusual ports.
_AUTHORITY = re.compile(r"(?:\[[0-9A-Fa-f]*:[0-9A-Fa-f:.]*\]|[^\[\]:@\\.]+(?:\.[^\[\]:@\\.]+)*\.?)(?::[0-9]{1,5})?")
_AUTHORITY_END = re.compile(r"[/?#]")


@dataclass(frozen=True, slots=True)
class OutboundResponse:
    """
    A response.

    :param content_type: header value; empty if absent.
    :param body: of a POST, the first 64 KiB at most.
    :param retry_after: seconds that the server asks to wait, a day at most; None if it does not.
    """

    status: int
    content_type: bytes
    body: bytes = field(repr=False)
    retry_after: float | None = None


_Exchange = Coroutine[Deferred[Any], Any, tuple[OutboundResponse, bytes | None]]


class OutboundHTTPClient:
    """Client for untrusted URLs."""

    def __init__(
        self,
        reactor: Any,
        *,
        allow_private: Iterable[IPNetwork] = (),
        trust_root: Any = None,
        keep: ConnectionLimits | None = None,
        resolve: Callable[[str], Deferred[list[Any]]] | None = None,
    ) -> None:
        """
        :param reactor: an IReactorTCP, IReactorTime and IReactorPluggableNameResolver.
        :param allow_private: non-public networks that may be connected to.
        :param trust_root: an IOpenSSLTrustRoot; None for the platform's.
        :param keep: bounds of the connections that are kept between requests; None to close each after its request.
        :param resolve: as :meth:`mediatord.net.name_lookups.NameLookups.resolve`; None for the reactor's resolver.
        """
        self.reactor = reactor
        self.guard = AddressGuard(allow_private)
        self.trust_root = trust_root
        self.resolve = resolve
        self.tls = BrowserLikePolicyForHTTPS() if trust_root is None else BrowserLikePolicyForHTTPS(trust_root)
        self._exchanges: set[Deferred[Any]] = set()
        self._open: set[_MeteredConnection] = set()
        self._closed: list[Deferred[None]] = []
        self._keep = keep
        self._slots = DeferredSemaphore(1 if keep is None else keep.total)
        # The least recently used first.
        self._hosts: dict[_HostKey, _HostConnections] = {}
        self._is_closed = False

    @property
    def connection_count(self) -> int:
        """Number of open connections."""
        return len(self._open)

    async def get(self, url: str, *, limit: int, timeout: float) -> OutboundResponse:
        """
        GET over https; redirects are not followed.

        :param limit: maximum size of the body in bytes.
        :param timeout: seconds for the whole exchange, including name resolution.
        :raise OutboundAddressError: not an https URL, or a blocked address; nothing was sent.
        :raise OutboundRequestError: anything else.
        """
        target = _parse_target(url, ("https",))
        try:
            target = target.to_uri()
        except ValueError:  # a host that is no valid DNS name
            raise OutboundAddressError("NotAnAddress") from None
        headers = Headers({b"Accept": [b"application/did+json, application/did+ld+json, application/json"]})
        endpoints = _GuardedEndpointFactory(self, limit + _MAX_HEADER_BYTES)
        response, _ = await self._exchange(self._send_request(b"GET", target, headers, limit, endpoints), timeout)
        return response

    async def post(
        self,
        url: str,
        body: bytes,
        content_type: bytes,
        *,
        timeout: float,
        headers: Mapping[bytes, bytes] = _NO_HEADERS,
        redirects: bool = True,
        secure: bool = False,
    ) -> OutboundResponse:
        """
        POST over http or https. Follows up to 3 redirects (307), each checked again, never from https to http.

        :param timeout: seconds for the whole exchange, including redirects.
        :param headers: headers beside Content-Type.
        :param redirects: False to return a redirect like any other response.
        :param secure: whether http is permitted to the networks of `allow_private` only.
        :raise OutboundAddressError: not an http(s) URL, or a blocked address, also after a redirect.
        :raise OutboundRequestError: anything else.
        """
        deadline = self.reactor.seconds() + timeout
        fields = Headers({name: [value] for name, value in {b"Content-Type": content_type, **headers}.items()})
        target = _parse_target(url, ("http", "https"))
        for _ in range(1 + _MAX_REDIRECTS):
            request = self._send_post(target, fields, body, secure, deadline)
            response, location = await self._exchange(request, deadline - self.reactor.seconds())
            if not redirects or response.status != _TEMPORARY_REDIRECT or location is None:
                return response
            target = _resolve_redirect(target, location)
        raise OutboundRequestError("TooManyRedirects")

    def make_endpoint(self, url: str, protocols: Sequence[bytes]) -> IStreamClientEndpoint:
        """
        An endpoint for a lasting connection to the host of an https URL, checked like that of any request at each
        attempt. Its failures are :class:`OutboundError` and ConnectError.

        :param protocols: offered by ALPN; the connection may be made without any of them.
        :raise OutboundAddressError: not an https URL.
        """
        uri = URI.fromBytes(_parse_target(url, ("https",)).to_text().encode("ascii"))
        return _GuardedEndpointFactory(self, math.inf, protocols=protocols).endpointForURI(uri)

    def opened(self, connection: _MeteredConnection) -> None:
        """Called by a connection when it is established."""
        self._open.add(connection)
        if connection.host is not None:
            connection.host.connections += 1
            self._close_surplus()

    def closed(self, connection: _MeteredConnection) -> None:
        """Called by a connection when it is lost."""
        self._open.discard(connection)
        if connection.host is not None:
            connection.host.connections -= 1
            self._forget_unused(connection.host)
        if not self._open:
            waiting, self._closed = self._closed, []
            for done in waiting:
                done.callback(None)

    def close(self) -> Deferred[None]:
        """Abort requests in progress; fires when all connections are closed. None are kept, and none follow."""
        self._is_closed = True
        for exchange in list(self._exchanges):
            exchange.cancel()
        done: Deferred[None] = Deferred()
        if not self._open:
            done.callback(None)
            return done
        self._closed.append(done)
        for connection in list(self._open):
            connection.abortConnection()
        return done

    async def _exchange(self, request: _Exchange, timeout: float) -> tuple[OutboundResponse, bytes | None]:
        exchange = Deferred.fromCoroutine(request)
        self._exchanges.add(exchange)
        try:
            return await exchange.addTimeout(max(0.0, timeout), self.reactor)
        except OutboundError:
            raise
        except Exception as error:  # an untrusted server can provoke any exception of three libraries
            raise OutboundRequestError(type(error).__name__) from None
        finally:
            self._exchanges.discard(exchange)

    async def _send_post(
        self, target: hyperlink.URL, headers: Headers, body: bytes, secure: bool, deadline: float
    ) -> tuple[OutboundResponse, bytes | None]:
        allowance = _MAX_RESPONSE_BYTES + _MAX_HEADER_BYTES
        if self._keep is None:
            endpoints = _GuardedEndpointFactory(self, allowance, secure=secure)
            return await self._send_request(b"POST", target, headers, _MAX_RESPONSE_BYTES, endpoints, body)
        host = self._find_host(target, self._keep)
        host.requests += 1
        try:
            async with self._hold_slots(host, self._keep.wait):
                for _ in range(1 + self._keep.per_host):
                    if self._is_closed:
                        raise OutboundRequestError("Closed")
                    endpoints = _GuardedEndpointFactory(self, allowance, secure=secure, host=host)
                    try:
                        return await self._send_request(
                            b"POST", target, headers, _MAX_RESPONSE_BYTES, endpoints, body
                        )
                    except (RequestTransmissionFailed, ResponseNeverReceived) as error:
                        # A server may close a kept connection while a request is on its way.
                        if endpoints.connected or _is_cancelled(error) or self.reactor.seconds() >= deadline:
                            raise
                raise OutboundRequestError("ConnectionLost")
        finally:
            host.requests -= 1
            self._forget_unused(host)

    @asynccontextmanager
    async def _hold_slots(self, host: _HostConnections, wait: float | None) -> AsyncIterator[None]:
        """
        Within this context, a request may use one of the connections to a host, and one of all.

        :raise OutboundRequestError: none of them was free in time.
        """
        until = None if wait is None else self.reactor.seconds() + wait
        async with AsyncExitStack() as held:
            for slots in (host.slots, self._slots):
                acquiring = slots.acquire()
                if until is not None:
                    acquiring.addTimeout(max(0.0, until - self.reactor.seconds()), self.reactor)
                try:
                    await acquiring
                except DeferredTimeoutError:
                    raise OutboundRequestError("ConnectionsBusy") from None
                held.callback(slots.release)
            yield

    def _find_host(self, target: hyperlink.URL, limits: ConnectionLimits) -> _HostConnections:
        key = target.scheme, target.host, target.port
        host = self._hosts.pop(key, None) or _HostConnections(self.reactor, key, limits)
        self._hosts[key] = host
        return host

    def _forget_unused(self, host: _HostConnections) -> None:
        if not host.requests and not host.connections and self._hosts.pop(host.key, None) is not None:
            host.pool.closeCachedConnections()  # stops the timers of those that were lost

    def _close_surplus(self) -> None:
        """Close idle connections, of the least recently used hosts first, while there are too many."""
        if self._keep is None or len(self._open) <= self._keep.total:
            return
        for host in list(self._hosts.values()):
            if sum(not connection.is_closing for connection in self._open) <= self._keep.total:
                return
            host.pool.closeCachedConnections()

    async def _send_request(
        self,
        method: bytes,
        target: hyperlink.URL,
        headers: Headers,
        limit: int,
        endpoints: _GuardedEndpointFactory,
        body: bytes | None = None,
    ) -> tuple[OutboundResponse, bytes | None]:
        agent = Agent.usingEndpointFactory(self.reactor, endpoints, endpoints.host and endpoints.host.pool)
        # The Agent neither requests nor decodes compression: a server must not choose how much memory a body takes.
        producer = None if body is None else _BytesProducer(body)
        response = await agent.request(method, target.to_text().encode("ascii"), headers, producer)
        reader = _BodyReader(limit)
        response.deliverBody(reader)
        received, whole = await reader.finished
        if not whole and method == b"GET":
            raise OutboundRequestError("TooLong")
        answer = OutboundResponse(
            response.code,
            _get_header(response, b"Content-Type") or b"",
            received,
            _parse_retry_after(_get_header(response, b"Retry-After"), self.reactor.seconds()),
        )
        return answer, _get_header(response, b"Location")


def _is_cancelled(error: RequestTransmissionFailed | ResponseNeverReceived) -> bool:
    reasons: Sequence[Failure] = error.reasons
    return any(reason.check(CancelledError) for reason in reasons)


def _parse_retry_after(value: bytes | None, now: float) -> float | None:
    """Seconds of a Retry-After header (RFC 9110 10.2.3), which is a number of seconds or a date."""
    if value is None:
        return None
    value = value.strip()
    if _DELTA_SECONDS.fullmatch(value):
        return min(float(value), _MAX_RETRY_AFTER)
    try:
        date = stringToDatetime(value)
    except (ValueError, KeyError, IndexError, TypeError):
        return None
    return None if date is None else min(max(0.0, date - now), _MAX_RETRY_AFTER)


def get_origin(url: str) -> str:
    """
    Scheme, host and port of an http(s) URL in ASCII (RFC 6454 6.2), the port only if it is not that of the scheme.

    :raise OutboundAddressError: not such a URL.
    """
    target = _parse_target(url, ("http", "https"))
    host = target.host.lower()
    host = f"[{host}]" if ":" in host else host
    default = 443 if target.scheme == "https" else 80
    return f"{target.scheme}://{host}" + ("" if target.port == default else f":{target.port}")


@implementer(IBodyProducer)
class _BytesProducer:
    def __init__(self, body: bytes) -> None:
        self._body = body
        self.length = len(body)

    def startProducing(self, consumer: IConsumer) -> Deferred[None]:  # noqa: N802  the interface's name
        consumer.write(self._body)
        return succeed(None)

    def stopProducing(self) -> None:
        """Nothing to do: everything was written at once."""

    def pauseProducing(self) -> None:
        """As :meth:`stopProducing`."""

    def resumeProducing(self) -> None:
        """As :meth:`stopProducing`."""


def _get_header(response: IResponse, name: bytes) -> bytes | None:
    values = response.headers.getRawHeaders(name)
    return values[0] if values else None


def _parse_target(url: str, schemes: tuple[str, ...]) -> hyperlink.URL:
    """
    The URL in ASCII, without its fragment.

    :raise OutboundAddressError: another scheme, user information, or not a URL.
    """
    scheme, separator, rest = url.partition("://")
    if len(url) > _MAX_URL_LENGTH or not url.isprintable() or " " in url:
        raise OutboundAddressError("NotAnAddress")
    if not _AUTHORITY.fullmatch(_AUTHORITY_END.split(rest, maxsplit=1)[0]):
        raise OutboundAddressError("NotAnAddress")
    try:
        target = hyperlink.URL.from_text(scheme.lower() + separator + rest)
        # For ASCII, to_uri() would reject IPv6 addresses and names with underscores.
        target = (target if url.isascii() else target.to_uri()).replace(fragment="")
    except ValueError:
        raise OutboundAddressError("NotAnAddress") from None
    if target.scheme not in schemes or target.userinfo or not target.host or not 0 < (target.port or 0) <= _MAX_PORT:
        raise OutboundAddressError("NotAnAddress")
    return target


def _resolve_redirect(target: hyperlink.URL, location: bytes) -> hyperlink.URL:
    try:
        url = target.click(location.decode("ascii")).to_text()
    except (ValueError, NotImplementedError):  # the latter for `http:` without a slash
        raise OutboundRequestError("BadRedirect") from None
    return _parse_target(url, ("https",) if target.scheme == "https" else ("http", "https"))
