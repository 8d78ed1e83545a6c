"""From the daemon to its own listeners, over real connections."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Any

from OpenSSL import SSL
from twisted.internet.defer import Deferred
from twisted.internet.endpoints import (
    TCP4ClientEndpoint,
    TCP6ClientEndpoint,
    UNIXClientEndpoint,
    wrapClientTLS,
)
from twisted.internet.interfaces import (
    IOpenSSLClientConnectionCreator,
    IProtocol,
    IStreamClientEndpoint,
)
from twisted.internet.ssl import CertificateOptions
from twisted.protocols.policies import ProtocolWrapper, WrappingFactory
from zope.interface import implementer

# Of a client that is unknown, Twisted takes no line.
_OF_OURSELVES = b"PROXY TCP4 127.0.0.1 127.0.0.1 1 1\r\n"
_LOOPBACK: dict[type[IPv4Address | IPv6Address], str] = {IPv4Address: "127.0.0.1", IPv6Address: "::1"}


@dataclass(frozen=True, slots=True)
class Place:
    """
    Where a process listens.

    :param address: as its port says: Twisted's address, or the path of a UNIX socket.
    :param tls: whether TLS is spoken there.
    :param proxied: whether the first line is that of a proxy, about its client.
    """

    address: Any
    tls: bool = False
    proxied: bool = False


def way_to(reactor: Any, place: Place, name: str) -> IStreamClientEndpoint:
    """
    The way to one's own listener.

    :param name: that clients expect in its certificate, which is not looked at.
    """
    way = _way_to(reactor, place.address)
    if place.tls:
        way = wrapClientTLS(_Unverified(name), way)
    return _AsProxy(way) if place.proxied else way


def _way_to(reactor: Any, address: Any) -> IStreamClientEndpoint:
    host = getattr(address, "host", None)
    if host is None:
        path = getattr(address, "name", address)
        way: IStreamClientEndpoint = UNIXClientEndpoint(reactor, path.decode() if isinstance(path, bytes) else path)
        return way
    ip = ip_address(host)
    if ip.is_unspecified:
        host = _LOOPBACK[type(ip)]
    return (TCP6ClientEndpoint if ip.version == 6 else TCP4ClientEndpoint)(reactor, host, address.port)


@implementer(IOpenSSLClientConnectionCreator)
class _Unverified:
    """TLS with whoever is there: what it says is sealed by the mediator's keys, whoever carries it."""

    def __init__(self, name: str) -> None:
        self._name = name.encode("idna")
        self._context = CertificateOptions().getContext()

    def clientConnectionForTLS(self, tlsProtocol: Any) -> SSL.Connection:  # noqa: N802, N803  Twisted's names
        """Called for each connection."""
        connection = SSL.Connection(self._context, None)
        connection.set_tlsext_host_name(self._name)
        return connection


class _Announcing(ProtocolWrapper):
    """Says first what a proxy says that checks on its own behalf."""

    def makeConnection(self, transport: Any) -> None:  # noqa: N802  Twisted's name
        transport.write(_OF_OURSELVES)
        super().makeConnection(transport)


class _AnnouncingFactory(WrappingFactory):
    protocol = _Announcing
    noisy = False


@implementer(IStreamClientEndpoint)
class _AsProxy:
    """A way to a listener that takes connections of proxies only."""

    def __init__(self, way: IStreamClientEndpoint) -> None:
        self._way = way

    def connect(self, protocolFactory: Any) -> Deferred[IProtocol]:  # noqa: N803  Twisted's name
        """Go it."""
        connecting: Deferred[Any] = self._way.connect(_AnnouncingFactory(protocolFactory))
        return connecting.addCallback(lambda announcing: announcing.wrappedProtocol)


@implementer(IStreamClientEndpoint)
class Line:
    """
    A way that is gone for one connection, which can be cut.

    :param connected: told when there is one.
    """

    def __init__(self, way: IStreamClientEndpoint, connected: Callable[[], None] = lambda: None) -> None:
        self._way = way
        self._connected = connected
        self._protocol: Any = None

    def connect(self, protocolFactory: Any) -> Deferred[IProtocol]:  # noqa: N803  Twisted's name
        """Go it."""
        protocolFactory.noisy = False  # every few seconds
        connecting: Deferred[IProtocol] = self._way.connect(protocolFactory)
        return connecting.addCallback(self._keep)

    def cut(self) -> None:
        """End the connection at once, if there is one."""
        if self._protocol is not None and self._protocol.transport is not None:
            self._protocol.transport.abortConnection()

    def _keep(self, protocol: IProtocol) -> IProtocol:
        self._protocol = protocol
        self._connected()
        return protocol
