"""
HTTP client for untrusted URLs: did:web documents, and replies and messages to wallets' endpoints (reference 3.3, 4.7,
8.5).

A host name is resolved once, every resulting address is checked by the :class:`AddressGuard` against SSRF, and the
connection goes to one of these addresses; the spelling of the host is irrelevant. Only public unicast addresses are
permitted, without those reserved for guests of a cloud, plus networks that the operator allows. TLS still verifies
the name. No cookies, proxies or persistent connections; every response is bounded in size and time.
"""

from __future__ import annotations

import math
import re
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import Any, cast

import hyperlink
from twisted.internet.defer import Deferred, succeed
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
from twisted.web.client import URI, Agent, BrowserLikePolicyForHTTPS, ResponseDone
from twisted.web.http import PotentialDataLoss
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
        return self._allows(address) or (inner is not None and self._allows(inner)) or _is_public(inner or address)

    def _allows(self, address: IPAddress) -> bool:
        return any(address in network for network in self._allowed)


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


@implementer(IAgentEndpointFactory)
class _GuardedEndpointFactory:
    """Makes endpoints whose connections are aborted once they have received more than an allowance of bytes."""

    def __init__(self, client: OutboundHTTPClient, allowance: int) -> None:
        self._client = client
        self._allowance = allowance

    def endpointForURI(self, uri: URI) -> IStreamClientEndpoint:  # noqa: N802  the interface's name
        return _GuardedEndpoint(self._client, uri, self._allowance)


@implementer(IStreamClientEndpoint)
class _GuardedEndpoint:
    """Endpoint that resolves its host once, checks all addresses, and connects to one of them."""

    def __init__(
        self, client: OutboundHTTPClient, uri: URI, allowance: float, protocols: Sequence[bytes] = ()
    ) -> None:
        self._client = client
        self._uri = uri
        self._allowance = allowance
        self._protocols = protocols

    def connect(self, protocolFactory: IProtocolFactory) -> Deferred[IProtocol]:  # noqa: N803  the interface's name
        return Deferred.fromCoroutine(self._connect(protocolFactory))

    async def _connect(self, factory: IProtocolFactory) -> IProtocol:
        addresses = await self._resolve()
        if not all(self._client.guard.permits(address.host) for address in addresses):
            raise OutboundAddressError("AddressOffLimits")
        metered = _MeteredConnectionFactory(factory, self._client, self._allowance)
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
        found = _ResolutionReceiver()
        self._client.reactor.nameResolver.resolveHostName(found, name, portNumber=self._uri.port)
        return await found.complete

    def _endpoint_at(self, address: Any) -> IStreamClientEndpoint:
        kind = TCP6ClientEndpoint if ":" in address.host else TCP4ClientEndpoint
        endpoint = kind(self._client.reactor, address.host, self._uri.port, timeout=_CONNECT_SECONDS)
        if self._uri.scheme != b"https":
            return endpoint
        if not self._protocols:
            return wrapClientTLS(self._client.tls.creatorForNetloc(self._uri.host, self._uri.port), endpoint)
        host = self._uri.host.decode("ascii")
        options = optionsForClientTLS(host, self._client.trust_root, acceptableProtocols=self._protocols)
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
    """A connection that is aborted if it receives too much, or does not close in time."""

    factory: _MeteredConnectionFactory

    def __init__(self, factory: _MeteredConnectionFactory, wrapped: IProtocol) -> None:
        super().__init__(factory, wrapped)
        self._left = factory.allowance
        self._abort_timer: IDelayedCall | None = None

    def connectionMade(self) -> None:
        self.factory.client.opened(self)

    def dataReceived(self, data: bytes) -> None:
        self._left -= len(data)
        if self._left < 0:
            self.abortConnection()
        else:
            super().dataReceived(data)

    def loseConnection(self) -> None:
        super().loseConnection()
        if self._abort_timer is None:
            self._abort_timer = self.factory.client.reactor.callLater(_CLOSE_SECONDS, self.abortConnection)

    def abortConnection(self) -> None:  # noqa: N802  the transport's name
        cast(Any, self.transport).abortConnection()  # both TCP and TLS have it, ITransport does not

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        if self._abort_timer is not None and self._abort_timer.active():
            self._abort_timer.cancel()
        super().connectionLost(reason)
        self.factory.client.closed(self)


class _MeteredConnectionFactory(WrappingFactory[_MeteredConnection]):
    protocol = _MeteredConnection
    noisy = False

    def __init__(self, wrapped: IProtocolFactory, client: OutboundHTTPClient, allowance: float) -> None:
        super().__init__(wrapped)
        self.client = client
        self.allowance = allowance


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
# Rejects ambiguous authorities: user information (even empty), IPv4 in brackets, empty labels, unusual ports.
_AUTHORITY = re.compile(r"(?:\[[0-9A-Fa-f]*:[0-9A-Fa-f:.]*\]|[^\[\]:@\\.]+(?:\.[^\[\]:@\\.]+)*\.?)(?::[0-9]{1,5})?")
_AUTHORITY_END = re.compile(r"[/?#]")


@dataclass(frozen=True, slots=True)
class OutboundResponse:
    """
    A response.

    :param content_type: header value; empty if absent.
    :param body: of a POST, the first 64 KiB at most.
    """

    status: int
    content_type: bytes
    body: bytes = field(repr=False)


_Exchange = Coroutine[Deferred[Any], Any, tuple[OutboundResponse, bytes | None]]


class OutboundHTTPClient:
    """Client for untrusted URLs."""

    def __init__(self, reactor: Any, *, allow_private: Iterable[IPNetwork] = (), trust_root: Any = None) -> None:
        """
        :param reactor: an IReactorTCP, IReactorTime and IReactorPluggableNameResolver.
        :param allow_private: non-public networks that may be connected to.
        :param trust_root: an IOpenSSLTrustRoot; None for the platform's.
        """
        self.reactor = reactor
        self.guard = AddressGuard(allow_private)
        self.trust_root = trust_root
        self.tls = BrowserLikePolicyForHTTPS() if trust_root is None else BrowserLikePolicyForHTTPS(trust_root)
        self._open: set[_MeteredConnection] = set()
        self._closed: list[Deferred[None]] = []

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
        response, _ = await self._exchange(self._send_request(b"GET", target, headers, limit), timeout)
        return response

    async def post(self, url: str, body: bytes, content_type: bytes, *, timeout: float) -> OutboundResponse:
        """
        POST over http or https. Follows up to 3 redirects (307), each checked again, never from https to http.

        :param timeout: seconds for the whole exchange, including redirects.
        :raise OutboundAddressError: not an http(s) URL, or a blocked address, also after a redirect.
        :raise OutboundRequestError: anything else.
        """
        deadline = self.reactor.seconds() + timeout
        headers = Headers({b"Content-Type": [content_type]})
        target = _parse_target(url, ("http", "https"))
        for _ in range(1 + _MAX_REDIRECTS):
            request = self._send_request(b"POST", target, headers, _MAX_RESPONSE_BYTES, body)
            response, location = await self._exchange(request, deadline - self.reactor.seconds())
            if response.status != _TEMPORARY_REDIRECT or location is None:
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
        return _GuardedEndpoint(self, uri, math.inf, protocols)

    def opened(self, connection: _MeteredConnection) -> None:
        """Called by a connection when it is established."""
        self._open.add(connection)

    def closed(self, connection: _MeteredConnection) -> None:
        """Called by a connection when it is lost."""
        self._open.discard(connection)
        if not self._open:
            waiting, self._closed = self._closed, []
            for done in waiting:
                done.callback(None)

    def close(self) -> Deferred[None]:
        """Abort requests in progress; fires when all connections are closed."""
        done: Deferred[None] = Deferred()
        if not self._open:
            done.callback(None)
            return done
        self._closed.append(done)
        for connection in list(self._open):
            connection.abortConnection()
        return done

    async def _exchange(self, request: _Exchange, timeout: float) -> tuple[OutboundResponse, bytes | None]:
        try:
            return await Deferred.fromCoroutine(request).addTimeout(max(0.0, timeout), self.reactor)
        except OutboundError:
            raise
        except Exception as error:  # an untrusted server can provoke any exception of three libraries
            raise OutboundRequestError(type(error).__name__) from None

    async def _send_request(
        self, method: bytes, target: hyperlink.URL, headers: Headers, limit: int, body: bytes | None = None
    ) -> tuple[OutboundResponse, bytes | None]:
        endpoints = _GuardedEndpointFactory(self, limit + _MAX_HEADER_BYTES)
        agent = Agent.usingEndpointFactory(self.reactor, endpoints)
        # The Agent neither requests nor decodes compression: a server must not choose how much memory a body takes.
        producer = None if body is None else _BytesProducer(body)
        response = await agent.request(method, target.to_text().encode("ascii"), headers, producer)
        reader = _BodyReader(limit)
        response.deliverBody(reader)
        received, whole = await reader.finished
        if not whole and method == b"GET":
            raise OutboundRequestError("TooLong")
        answer = OutboundResponse(response.code, _get_header(response, b"Content-Type") or b"", received)
        return answer, _get_header(response, b"Location")


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
