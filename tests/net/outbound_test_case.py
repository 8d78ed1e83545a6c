"""Reactor with in-memory names and peers, for tests of outgoing requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from twisted.internet.address import IPv4Address, IPv6Address
from twisted.internet.defer import Deferred
from twisted.internet.error import ConnectionAborted, ConnectionRefusedError
from twisted.internet.interfaces import IAddress, IHostnameResolver, IHostResolution, IResolutionReceiver
from twisted.internet.protocol import Protocol
from twisted.internet.testing import MemoryReactorClock, StringTransport
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase
from zope.interface import implementer
from zope.interface.verify import verifyObject

from mediatord.net.outbound_http import OutboundHTTPClient, OutboundResponse

PUBLIC = "93.184.216.34"
OTHER_PUBLIC = "2606:4700:4700::1111"
OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"


def redirect(status: int, location: bytes) -> bytes:
    """A redirect response."""
    return b"HTTP/1.1 %d Elsewhere\r\nLocation: %s\r\nContent-Length: 0\r\n\r\n" % (status, location)


@implementer(IHostnameResolver)
class FakeResolver:
    """Resolver of known names that records queries; a name whose addresses are None is never answered."""

    def __init__(self, known: Mapping[str, Sequence[str] | None]) -> None:
        self.known = known
        self.asked: list[str] = []

    def resolveHostName(  # noqa: N802  the interface's names
        self,
        resolutionReceiver: IResolutionReceiver,  # noqa: N803
        hostName: str,  # noqa: N803
        portNumber: int = 0,  # noqa: N803
        addressTypes: Sequence[type[IAddress]] | None = None,  # noqa: N803
        transportSemantics: str = "TCP",  # noqa: N803
    ) -> IHostResolution:
        self.asked.append(hostName)
        addresses = self.known.get(hostName, [])
        if addresses is not None:
            for address in addresses:
                kind = IPv6Address if ":" in address else IPv4Address
                resolutionReceiver.addressResolved(kind("TCP", address, portNumber))
            resolutionReceiver.resolutionComplete()
        return None  # type: ignore[return-value]  # nobody cancels these resolutions


class FakeTransport(StringTransport):
    """Transport of a connection whose peer never closes."""

    protocol: Protocol

    def abortConnection(self) -> None:  # noqa: N802  the transport's name
        if not self.disconnected:
            super().abortConnection()
            self.protocol.connectionLost(Failure(ConnectionAborted()))


class OutboundTestCase(SynchronousTestCase):
    """:class:`Outbound` on a reactor that connects only where a test plays the peer."""

    def setUp(self) -> None:
        self.names = FakeResolver(
            {
                "a.example": [PUBLIC],
                "b.example": [OTHER_PUBLIC, PUBLIC],
                "mixed.example": [PUBLIC, "10.0.0.1"],
                "private.example": ["192.168.0.1"],
                "mapped.example": ["::ffff:127.0.0.1"],
                "slow.example": None,
            }
        )
        verifyObject(IHostnameResolver, self.names)
        self.reactor: Any = MemoryReactorClock()
        self.reactor.nameResolver = self.names
        self.outbound = OutboundHTTPClient(self.reactor)

    def get(self, url: str) -> Deferred[OutboundResponse]:
        """Send a GET with a time-out of 5 seconds and a limit of 1000 bytes."""
        return Deferred.fromCoroutine(self.outbound.get(url, limit=1000, timeout=5))

    def post(self, url: str = "http://a.example/inbox") -> Deferred[OutboundResponse]:
        """Send a POST with a time-out of 10 seconds."""
        return Deferred.fromCoroutine(self.outbound.post(url, b"sealed", b"application/x-test", timeout=10))

    def accept(self) -> FakeTransport:
        """Let the last connection attempt succeed."""
        wire = FakeTransport()
        wire.protocol = self.reactor.tcpClients[-1][2].buildProtocol(None)
        wire.protocol.makeConnection(wire)
        return wire

    def refuse(self) -> None:
        """Let the last connection attempt fail."""
        factory = self.reactor.tcpClients[-1][2]
        factory.clientConnectionFailed(self.reactor.connectors[-1], Failure(ConnectionRefusedError()))

    def respond(self, response: bytes) -> FakeTransport:
        """Let the last connection attempt succeed, and the peer respond."""
        wire = self.accept()
        wire.protocol.dataReceived(response)
        return wire

    def attempts(self) -> list[tuple[str, int]]:
        """Addresses and ports of the connection attempts."""
        return [client[:2] for client in self.reactor.tcpClients]
