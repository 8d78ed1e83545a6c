"""
TCP proxy between processes whose connections can be cut.

::

    network = PartitionProxy(reactor)
    port = network.route_to(server_port)
    with network.cut(server_port, of=[pid], silently=True):
        ...  # that process gets nothing from the server any more, nor the server from it
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, cast

from twisted.internet.defer import Deferred, DeferredList, maybeDeferred
from twisted.protocols.portforward import Proxy, ProxyClient, ProxyClientFactory, ProxyFactory, ProxyServer
from twisted.python.failure import Failure

from mediatord.wallet.temporary_daemon import find_free_port

_TCP = Path("/proc/net/tcp")
_NO_REASON = Failure(ConnectionError())


class _ProxyHalf(Proxy):
    """One direction of a proxied connection. While silent it holds back data and the end of the connection."""

    silent = False

    def __init__(self) -> None:
        self._held_back: list[bytes] = []
        self._lost: Failure | None = None

    def dataReceived(self, data: bytes) -> None:
        if self.silent:
            self._held_back.append(data)
        else:
            super().dataReceived(data)

    def connectionLost(self, reason: Failure = _NO_REASON) -> None:
        if self.silent:
            self._lost = reason
        else:
            super().connectionLost(reason)

    def resume_delivery(self) -> None:
        """Deliver what was held back."""
        self.silent = False
        held_back, self._held_back = self._held_back, []
        if self.peer is not None:
            for data in held_back:
                super().dataReceived(data)
        if self._lost is not None:
            super().connectionLost(self._lost)


class _ServerHalf(_ProxyHalf, ProxyClient):
    """Connection to the server."""

    def connectionMade(self) -> None:
        self.silent = getattr(self.peer, "silent", False)
        super().connectionMade()


class _ServerHalfFactory(ProxyClientFactory):
    protocol = _ServerHalf
    noisy = False


class _ClientHalf(_ProxyHalf, ProxyServer):
    """Connection from the client."""

    clientProtocolFactory = _ServerHalfFactory  # noqa: N815  Twisted's name
    factory: _ProxyPort
    _is_connecting = False

    def connectionMade(self) -> None:
        self.reactor = self.factory.network.reactor
        self.factory.halves.append(self)
        self.factory.network.admit(self)

    def connect(self) -> None:
        """Connect to the server."""
        self._is_connecting = True
        ProxyServer.connectionMade(self)

    def connectionLost(self, reason: Failure = _NO_REASON) -> None:
        self.factory.halves.remove(self)
        super().connectionLost(reason)

    def abort(self) -> None:
        """Close both halves."""
        for half in (self, self.peer):
            if half is not None:
                cast(Any, half.transport).abortConnection()

    def silence(self) -> None:
        """Hold back data in both directions."""
        if not self._is_connecting:
            self.transport.pauseProducing()
        for half in (self, self.peer):
            if isinstance(half, _ProxyHalf):
                half.silent = True

    def resume(self) -> None:
        """Undo :meth:`silence`; the server may not have been connected to yet."""
        if not self._is_connecting:
            self.silent = False
            self.connect()
            return
        for half in (self.peer, self):
            if isinstance(half, _ProxyHalf):
                half.resume_delivery()


class _ProxyPort(ProxyFactory):
    """
    Port of the proxy that stands for a server port.

    :param proxy_port: the proxy's own port.
    """

    protocol = _ClientHalf
    noisy = False

    def __init__(self, network: PartitionProxy, port: int, proxy_port: int) -> None:
        super().__init__("127.0.0.1", port)
        self.network = network
        self.proxy_port = proxy_port
        self.halves: list[_ClientHalf] = []


class _Partition:
    """
    One cut.

    :param ports: server ports.
    :param pids: client processes; None for all.
    """

    def __init__(self, ports: Collection[int], pids: Collection[int] | None, silently: bool) -> None:
        self._ports = ports
        self._pids = pids
        self._silently = silently
        self._silenced: list[_ClientHalf] = []

    def apply_to(self, half: _ClientHalf) -> bool:
        """Cut this connection if the partition covers it; return whether it did."""
        if half.factory.port not in self._ports or not self._is_of(half.transport.getPeer()):
            return False
        if self._silently:
            self._silenced.append(half)
            half.silence()
        else:
            half.abort()
        return True

    def end(self) -> None:
        """Resume the silenced connections."""
        for half in self._silenced:
            half.resume()

    def _is_of(self, peer: Any) -> bool:
        return self._pids is None or peer.port in process_ports(self._pids)


class PartitionProxy:
    """All proxied ports."""

    def __init__(self, reactor: Any) -> None:
        self.reactor = reactor
        self._routes: dict[int, _ProxyPort] = {}
        self._listening: dict[int, Any] = {}
        self._cuts: list[_Partition] = []

    def route_to(self, port: int) -> int:
        """Proxy port that leads to this loopback port."""
        self._routes[port] = _ProxyPort(self, port, find_free_port())
        self.open_route(port)
        return self._routes[port].proxy_port

    async def close_route(self, port: int) -> None:
        """Refuse new connections to a server, as its host does while it is down."""
        await maybeDeferred(self._listening[port].stopListening)

    def open_route(self, port: int) -> None:
        """Undo :meth:`close_route`."""
        route = self._routes[port]
        self._listening[port] = self.reactor.listenTCP(route.proxy_port, route, interface="127.0.0.1")

    @contextlib.contextmanager
    def cut(self, *ports: int, of: Collection[int] | None = None, silently: bool = False) -> Iterator[None]:
        """
        Nothing passes within this context; what was silenced is delivered afterwards.

        :param ports: server ports.
        :param of: processes whose connections are cut; all unless given.
        :param silently: keep connections open and accept new ones, without delivering anything.
        """
        cut = _Partition(ports, of, silently)
        self._cuts.append(cut)
        for half in self._halves():
            cut.apply_to(half)
        try:
            yield
        finally:
            self._cuts.remove(cut)
            cut.end()

    def admit(self, half: _ClientHalf) -> None:
        """Called for each new connection."""
        if not any(cut.apply_to(half) for cut in self._cuts):
            half.connect()

    def close(self) -> Deferred[Any]:
        """Stop listening and close all connections; fires when done."""
        for half in self._halves():
            half.abort()
        return DeferredList([maybeDeferred(listening.stopListening) for listening in self._listening.values()])

    def _halves(self) -> list[_ClientHalf]:
        return [half for route in self._routes.values() for half in route.halves]


def process_ports(pids: Collection[int]) -> set[int]:
    """Local ports of the TCP connections of these processes."""
    inodes = {inode for pid in pids for inode in _process_sockets(pid)}
    fields = [line.split() for line in _TCP.read_text(encoding="ascii").splitlines()[1:]]
    return {int(one[1].partition(":")[2], 16) for one in fields if one[9] in inodes}


def _process_sockets(pid: int) -> Iterator[str]:
    directory = f"/proc/{pid}/fd"
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for name in os.listdir(directory):
            with contextlib.suppress(FileNotFoundError):
                kind, _, number = os.readlink(f"{directory}/{name}").partition(":")
                if kind == "socket":
                    yield number.strip("[]")
