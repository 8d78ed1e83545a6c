"""Client endpoints to the daemon's own listeners, with TLS and PROXY header where needed."""

from __future__ import annotations

import os
from collections.abc import Callable
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Any

from OpenSSL import SSL
from twisted.internet.defer import Deferred
from twisted.internet.endpoints import TCP4ClientEndpoint, TCP6ClientEndpoint, UNIXClientEndpoint, wrapClientTLS
from twisted.internet.interfaces import IOpenSSLClientConnectionCreator, IProtocol, IStreamClientEndpoint
from twisted.internet.ssl import CertificateOptions
from twisted.protocols.policies import ProtocolWrapper, WrappingFactory
from twisted.web.iweb import IAgentEndpointFactory
from zope.interface import implementer

# Twisted does not accept a PROXY header with an unknown client.
_PROXY_HEADER = b"PROXY TCP4 127.0.0.1 127.0.0.1 1 1\r\n"
_LOOPBACK_ADDRESSES: dict[type[IPv4Address | IPv6Address], str] = {IPv4Address: "127.0.0.1", IPv6Address: "::1"}


def make_listener_endpoint(
    reactor: Any, address: Any, name: str, *, tls: bool = False, proxied: bool = False
) -> IStreamClientEndpoint:
    """
    Client endpoint to one of the daemon's own listeners.

    :param address: address object of the Twisted port, or the path of a UNIX socket.
    :param name: server name for SNI; the certificate is not verified.
    :param tls: whether it uses TLS.
    :param proxied: whether connections start with a PROXY header.
    """
    endpoint = _make_plain_endpoint(reactor, address)
    if tls:
        endpoint = wrapClientTLS(_UnverifiedTLS(name), endpoint)
    return _ProxyHeaderEndpoint(endpoint) if proxied else endpoint


def _make_plain_endpoint(reactor: Any, address: Any) -> IStreamClientEndpoint:
    host = getattr(address, "host", None)
    if host is None:
        endpoint: IStreamClientEndpoint = UNIXClientEndpoint(reactor, os.fsdecode(getattr(address, "name", address)))
        return endpoint
    ip = ip_address(host)
    if ip.is_unspecified:
        host = _LOOPBACK_ADDRESSES[type(ip)]
    return (TCP6ClientEndpoint if ip.version == 6 else TCP4ClientEndpoint)(reactor, host, address.port)


@implementer(IOpenSSLClientConnectionCreator)
class _UnverifiedTLS:
    """TLS without verification: probe messages are encrypted for the mediator anyway."""

    def __init__(self, name: str) -> None:
        self._name = name.encode("idna")
        self._context = CertificateOptions().getContext()

    def clientConnectionForTLS(self, tlsProtocol: Any) -> SSL.Connection:  # noqa: N802, N803  Twisted's names
        """Called for each connection."""
        connection = SSL.Connection(self._context, None)
        connection.set_tlsext_host_name(self._name)
        return connection


class _ProxyHeaderProtocol(ProtocolWrapper):
    """Sends a PROXY header first, as a proxy's own health check does."""

    def makeConnection(self, transport: Any) -> None:  # noqa: N802  Twisted's name
        transport.write(_PROXY_HEADER)
        super().makeConnection(transport)


class _ProxyHeaderFactory(WrappingFactory):
    protocol = _ProxyHeaderProtocol
    noisy = False


@implementer(IStreamClientEndpoint)
class _ProxyHeaderEndpoint:
    """Endpoint of a listener that takes connections of proxies only."""

    def __init__(self, endpoint: IStreamClientEndpoint) -> None:
        self._endpoint = endpoint

    def connect(self, protocolFactory: Any) -> Deferred[IProtocol]:  # noqa: N803  Twisted's name
        """Connect, and send the PROXY header before anything else."""
        connecting: Deferred[Any] = self._endpoint.connect(_ProxyHeaderFactory(protocolFactory))
        return connecting.addCallback(lambda announcing: announcing.wrappedProtocol)


@implementer(IStreamClientEndpoint, IAgentEndpointFactory)
class AbortableConnector:
    """
    Endpoint that remembers its connection, so that it can be aborted; for an Agent, that of all URIs.

    :param connected: called when there is one.
    """

    def __init__(self, endpoint: IStreamClientEndpoint, connected: Callable[[], None] = lambda: None) -> None:
        self._endpoint = endpoint
        self._connected = connected
        self._protocol: Any = None

    def connect(self, protocolFactory: Any) -> Deferred[IProtocol]:  # noqa: N803  Twisted's name
        """Connect."""
        protocolFactory.noisy = False  # every few seconds
        connecting: Deferred[IProtocol] = self._endpoint.connect(protocolFactory)
        return connecting.addCallback(self._keep)

    def endpointForURI(self, uri: object) -> IStreamClientEndpoint:  # noqa: N802  Twisted's name
        """This endpoint, whatever the URI."""
        return self

    def abort(self) -> None:
        """End the connection at once, if there is one."""
        if self._protocol is not None and self._protocol.transport is not None:
            self._protocol.transport.abortConnection()

    def _keep(self, protocol: IProtocol) -> IProtocol:
        self._protocol = protocol
        self._connected()
        return protocol
