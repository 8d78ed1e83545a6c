"""
TCP connections between processes that lead through here, so that they can be cut.

::

    network = Network(reactor)
    port = network.way_to(server_port)
    with network.cut(server_port, of=[pid], silently=True):
        ...  # that process hears nothing of the server any more, nor the server of it
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
    """One half of a connection through here. What a silent one is told waits, the end of it as well."""

    silent = False

    def __init__(self) -> None:
        self._held: list[bytes] = []
        self._lost: Failure | None = None

    def dataReceived(self, data: bytes) -> None:
        if self.silent:
            self._held.append(data)
        else:
            super().dataReceived(data)

    def connectionLost(self, reason: Failure = _NO_REASON) -> None:
        if self.silent:
            self._lost = reason
        else:
            super().connectionLost(reason)

    def speak(self) -> None:
        """Be silent no more."""
        self.silent = False
        held, self._held = self._held, []
        if self.peer is not None:
            for data in held:
                super().dataReceived(data)
        if self._lost is not None:
            super().connectionLost(self._lost)


class _ServerHalf(_ProxyHalf, ProxyClient):
    """Towards the server."""

    def connectionMade(self) -> None:
        self.silent = getattr(self.peer, "silent", False)
        super().connectionMade()


class _ServerHalfFactory(ProxyClientFactory):
    protocol = _ServerHalf
    noisy = False


class _ClientHalf(_ProxyHalf, ProxyServer):
    """From whoever connected."""

    clientProtocolFactory = _ServerHalfFactory  # noqa: N815  Twisted's name
    factory: _ProxyPort
    _begun = False

    def connectionMade(self) -> None:
        self.reactor = self.factory.network.reactor
        self.factory.halves.append(self)
        self.factory.network.admit(self)

    def connect(self) -> None:
        """Go on to the server."""
        self._begun = True
        ProxyServer.connectionMade(self)

    def connectionLost(self, reason: Failure = _NO_REASON) -> None:
        self.factory.halves.remove(self)
        super().connectionLost(reason)

    def sever(self) -> None:
        """End both halves."""
        for half in (self, self.peer):
            if half is not None:
                cast(Any, half.transport).abortConnection()

    def hush(self) -> None:
        """Let neither hear of the other."""
        if not self._begun:
            self.transport.pauseProducing()
        for half in (self, self.peer):
            if isinstance(half, _ProxyHalf):
                half.silent = True

    def resume(self) -> None:
        """Undo :meth:`hush`; the server may not have heard of it at all yet."""
        if not self._begun:
            self.silent = False
            self.connect()
            return
        for half in (self.peer, self):
            if isinstance(half, _ProxyHalf):
                half.speak()


class _ProxyPort(ProxyFactory):
    """
    A port here that stands for one of a server.

    :param entrance: the one here.
    """

    protocol = _ClientHalf
    noisy = False

    def __init__(self, network: PartitionProxy, port: int, entrance: int) -> None:
        super().__init__("127.0.0.1", port)
        self.network = network
        self.entrance = entrance
        self.halves: list[_ClientHalf] = []


class _Partition:
    """
    What is cut.

    :param ports: of servers.
    :param pids: of those who connect to them; None for everybody.
    """

    def __init__(self, ports: Collection[int], pids: Collection[int] | None, silently: bool) -> None:
        self._ports = ports
        self._pids = pids
        self._silently = silently
        self._hushed: list[_ClientHalf] = []

    def strike(self, half: _ClientHalf) -> bool:
        """Whether a connection is among them, and is cut now."""
        if half.factory.port not in self._ports or not self._is_of(half.transport.getPeer()):
            return False
        if self._silently:
            self._hushed.append(half)
            half.hush()
        else:
            half.sever()
        return True

    def heal(self) -> None:
        """Let those that were silenced go on."""
        for half in self._hushed:
            half.resume()

    def _is_of(self, peer: Any) -> bool:
        return self._pids is None or peer.port in process_ports(self._pids)


class PartitionProxy:
    """All ways through here."""

    def __init__(self, reactor: Any) -> None:
        self.reactor = reactor
        self._ways: dict[int, _ProxyPort] = {}
        self._listening: dict[int, Any] = {}
        self._cuts: list[_Partition] = []

    def way_to(self, port: int) -> int:
        """The port that leads to this one of the loopback interface."""
        self._ways[port] = _ProxyPort(self, port, find_free_port())
        self.open_way(port)
        return self._ways[port].entrance

    async def close_way(self, port: int) -> None:
        """Refuse new connections to a server, as its own system does when it is not there."""
        await maybeDeferred(self._listening[port].stopListening)

    def open_way(self, port: int) -> None:
        """Undo :meth:`close_way`."""
        way = self._ways[port]
        self._listening[port] = self.reactor.listenTCP(way.entrance, way, interface="127.0.0.1")

    @contextlib.contextmanager
    def cut(self, *ports: int, of: Collection[int] | None = None, silently: bool = False) -> Iterator[None]:
        """
        Inside, nothing gets through; afterwards what was silenced goes on, late.

        :param ports: those that ways lead to.
        :param of: processes whose connections are cut; everybody's unless given.
        :param silently: nobody is told: what is sent gets no answer, and connections are taken that lead nowhere.
        """
        cut = _Partition(ports, of, silently)
        self._cuts.append(cut)
        for half in self._halves():
            cut.strike(half)
        try:
            yield
        finally:
            self._cuts.remove(cut)
            cut.heal()

    def admit(self, half: _ClientHalf) -> None:
        """Somebody connects."""
        if not any(cut.strike(half) for cut in self._cuts):
            half.connect()

    def close(self) -> Deferred[Any]:
        """Fires when nothing leads through here any more."""
        for half in self._halves():
            half.sever()
        return DeferredList([maybeDeferred(listening.stopListening) for listening in self._listening.values()])

    def _halves(self) -> list[_ClientHalf]:
        return [half for way in self._ways.values() for half in way.halves]


def process_ports(pids: Collection[int]) -> set[int]:
    """Those that TCP connections of these processes come from."""
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
