"""
TLS and the PROXY protocol around the factory of a listener.

Twisted's own factories for them wrap whatever the factory inside returns, also the None by which it refuses a
connection: such a connection would stay open for good, beyond every limit and time-out.
"""

from __future__ import annotations

from typing import Any, cast

from twisted.internet.interfaces import (
    IAddress,
    IDelayedCall,
    IHalfCloseableProtocol,
    IProtocolFactory,
    IReactorTime,
    ISSLTransport,
)
from twisted.internet.protocol import connectionDone
from twisted.protocols.haproxy._wrapper import HAProxyProtocolWrapper, HAProxyWrappingFactory
from twisted.protocols.policies import WrappingFactory
from twisted.protocols.tls import BufferingTLSTransport, TLSMemoryBIOFactory
from twisted.python.failure import Failure
from zope.interface import implementer, noLongerProvides

# Seconds from the connection to the end of its TLS handshake, however steadily the client sends.
HANDSHAKE_SECONDS = 10.0


class _RefusalMixin(WrappingFactory[Any]):
    """Refuses what the factory inside refuses, before anything is made for the connection."""

    def buildProtocol(self, addr: IAddress | None) -> Any:
        """None where the factory inside returns None: the port closes the connection at once."""
        protocol = self.wrappedFactory.buildProtocol(addr)
        return None if protocol is None else self.protocol(self, protocol)


@implementer(IHalfCloseableProtocol)
class ProxyConnection(HAProxyProtocolWrapper):
    """
    A connection whose first line is about its client.

    It does not claim to be the TLS that may be below it: Autobahn would ask it for what only TLS itself can tell.
    """

    def makeConnection(self, transport: Any) -> None:  # noqa: N802  Twisted's name
        """Begin to wait for the first line."""
        super().makeConnection(transport)
        if ISSLTransport.providedBy(self):
            noLongerProvides(self, ISSLTransport)

    def readConnectionLost(self) -> None:  # noqa: N802  Twisted's name
        """The client sends nothing more."""
        if IHalfCloseableProtocol.providedBy(self.wrappedProtocol):
            cast(Any, self.wrappedProtocol).readConnectionLost()
        else:
            cast(Any, self.transport).abortConnection()

    def writeConnectionLost(self) -> None:  # noqa: N802  Twisted's name
        """The client has been told that nothing more will come."""


class ProxyFactory(_RefusalMixin, HAProxyWrappingFactory):
    """The PROXY protocol: the first line of each connection is about its client."""

    protocol: type[Any] = ProxyConnection


class TLSConnection(BufferingTLSTransport):
    """A server's side of TLS, which aborts a connection whose handshake takes too long."""

    _handshake_timer: IDelayedCall | None = None

    def makeConnection(self, transport: Any) -> None:  # noqa: N802  Twisted's name
        """Begin the handshake."""
        self._handshake_timer = cast(Any, self.factory).clock.callLater(HANDSHAKE_SECONDS, self._check_handshake)
        super().makeConnection(transport)

    def _check_handshake(self) -> None:
        self._handshake_timer = None
        # There is no public way to see whether it is done.
        if not self._handshakeDone:
            self.abortConnection()

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        """The client is gone."""
        timer, self._handshake_timer = self._handshake_timer, None
        if timer is not None:
            timer.cancel()
        super().connectionLost(reason)


class TLSFactory(_RefusalMixin, TLSMemoryBIOFactory):
    """
    TLS for the connections of another factory.

    :param contexts: gives each connection its certificate.
    """

    protocol = TLSConnection

    def __init__(self, contexts: Any, factory: IProtocolFactory, clock: IReactorTime) -> None:
        super().__init__(contexts, False, factory, clock)
        self.clock = clock
