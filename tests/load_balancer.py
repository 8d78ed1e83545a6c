"""TCP load balancer: distributes connections over the nodes in turn."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from typing import Any, cast

from twisted.protocols.portforward import ProxyClientFactory, ProxyFactory, ProxyServer


class _UpstreamConnection(ProxyClientFactory):
    """Connection to a node; on failure the next node is tried."""

    noisy = False

    def clientConnectionFailed(self, connector: Any, reason: Any) -> None:
        self.server.try_next()


class _ClientConnection(ProxyServer):
    clientProtocolFactory = _UpstreamConnection  # noqa: N815  Twisted's name
    factory: LoadBalancer

    def connectionMade(self) -> None:
        self.reactor = self.factory.reactor
        self._attempts = len(self.factory.ports)
        self.factory.connections.append(self)
        self.try_next()

    def connectionLost(self, reason: Any = None) -> None:
        self.factory.connections.remove(self)
        super().connectionLost(reason)

    def try_next(self) -> None:
        """Connect to the next node, unless all have been tried."""
        if not self._attempts:
            self.transport.loseConnection()
            return
        self._attempts -= 1
        self.target = self.factory.port = next(self.factory.port_cycle)
        super().connectionMade()


class LoadBalancer(ProxyFactory):
    """
    Load balancer in front of nodes.

    :param ports: ports of the nodes, on the loopback interface.
    :ivar connections: open connections.
    """

    protocol = _ClientConnection
    noisy = False

    def __init__(self, reactor: Any, ports: Sequence[int]) -> None:
        super().__init__("127.0.0.1", ports[0])
        self.reactor = reactor
        self.ports = ports
        self.port_cycle = cycle(ports)
        self.connections: list[_ClientConnection] = []

    def node_of(self, port: int) -> int | None:
        """Port of the node that a connection from this port was passed to."""
        targets = (link.target for link in self.connections if cast(Any, link.transport.getPeer()).port == port)
        return next(targets, None)
