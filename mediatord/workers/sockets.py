"""The listening sockets of all workers, bound once and kept open by the supervisor."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any, Protocol

from twisted.internet.abstract import isIPv6Address
from twisted.internet.endpoints import serverFromString
from twisted.internet.error import ConnectionDone
from twisted.internet.protocol import Factory
from twisted.python.failure import Failure

from mediatord.service import StartupError, listening_on, with_backlog


class _Shared(Protocol):
    """The sockets of one endpoint."""

    family: socket.AddressFamily

    def descriptor(self, number: int) -> int:
        """The socket of a worker, counted from 0."""

    def rest(self, number: int) -> None:
        """Nobody serves this one for a while."""

    def wake(self, number: int) -> None:
        """Somebody does again."""

    def close(self) -> None:
        """Let go of all."""


class Sharing:
    """
    A listening socket for every endpoint and worker.

    Each worker has TCP sockets of its own, between which the kernel spreads connections. As long as they are open
    here as well, what is in the backlog of a worker that died waits for the next one. A UNIX socket is one for all.

    :param endpoints: as in the configuration.
    :raise StartupError: an endpoint cannot be shared, or its certificate not be read.
    """

    def __init__(self, reactor: Any, endpoints: Sequence[str], count: int) -> None:
        self._binders = []
        for text in endpoints:
            if text.startswith("systemd:"):
                raise StartupError(f"cannot listen on {text}: workers cannot share what systemd hands over")
            binder = _Binder(reactor, count)
            with listening_on(text):
                self._binders.append((text, binder, serverFromString(binder, with_backlog(text))))
        self._shared: list[_Shared] = []

    def bind(self) -> None:
        """
        Bind and listen; what comes waits until a worker takes it.

        :raise StartupError: an address is taken or not ours.
        """
        try:
            for text, binder, endpoint in self._binders:
                with listening_on(text):
                    outcome: list[Any] = []
                    endpoint.listen(Factory()).addErrback(outcome.append)
                    for failure in outcome:
                        failure.raiseException()
                self._shared.append(binder.shared)
        except BaseException:
            self.close()
            raise

    def sockets(self, number: int) -> list[tuple[int, socket.AddressFamily]]:
        """Descriptors for a worker, counted from 0, in the order of the endpoints."""
        return [(shared.descriptor(number), shared.family) for shared in self._shared]

    def rest(self, number: int) -> None:
        """
        Let the others have the connections of a worker that is not there and not about to be.

        What waits in its backlog is refused.
        """
        for shared in self._shared:
            shared.rest(number)

    def wake(self, number: int) -> None:
        """The worker is about to be there again."""
        for shared in self._shared:
            shared.wake(number)

    def close(self) -> None:
        """Close them here; a worker's own copies are its business."""
        for shared in self._shared:
            shared.close()
        self._shared.clear()


class _Binder:
    """Stands in for the reactor where an endpoint begins to listen, and keeps the sockets that it makes."""

    def __init__(self, reactor: Any, count: int) -> None:
        self._reactor = reactor
        self._count = count
        self.shared: _Shared

    def listenTCP(self, port: int, factory: Any, backlog: int = 50, interface: str = "") -> None:  # noqa: N802
        self.shared = _Each(port, backlog, interface, self._count)

    def listenSSL(  # noqa: N802
        self,
        port: int,
        factory: Any,
        contextFactory: Any,  # noqa: N803
        backlog: int = 50,
        interface: str = "",
    ) -> None:
        self.listenTCP(port, factory, backlog, interface)

    def listenUNIX(self, address: str, factory: Any, *arguments: Any, **more: Any) -> None:  # noqa: N802
        self.shared = _One(self._reactor.listenUNIX(address, factory, *arguments, **more))


class _Each:
    """One TCP socket for each worker on the same address."""

    def __init__(self, port: int, backlog: int, interface: str, count: int) -> None:
        self.family = socket.AF_INET6 if isIPv6Address(interface) else socket.AF_INET
        self._backlog = backlog
        self._sockets: list[socket.socket] = []
        # Holds the address, and listens to nobody. Without SO_REUSEPORT, or a second supervisor could join in on the
        # address of the first unnoticed.
        self._holder = self._fresh()
        try:
            self._holder.bind(_address(self.family, interface, port))
            self._sockets += [self._bound() for _ in range(count)]
            for bound in self._sockets:
                bound.listen(backlog)
        except BaseException:
            self.close()
            raise

    def _bound(self) -> socket.socket:
        fresh = self._fresh()
        try:
            fresh.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            fresh.bind(self._holder.getsockname())
        except BaseException:
            fresh.close()
            raise
        return fresh

    def _fresh(self) -> socket.socket:
        fresh = socket.socket(self.family, socket.SOCK_STREAM)
        # A worker that is too late for a connection must not wait for the next.
        fresh.setblocking(False)
        fresh.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        return fresh

    def descriptor(self, number: int) -> int:
        return self._sockets[number].fileno()

    def rest(self, number: int) -> None:
        """It stays bound: to bind it again might not be allowed any more."""
        self._sockets[number].shutdown(socket.SHUT_RD)

    def wake(self, number: int) -> None:
        self._sockets[number].listen(self._backlog)

    def close(self) -> None:
        for bound in (*self._sockets, self._holder):
            bound.close()


class _One:
    """One UNIX socket for all workers; a port of Twisted's that takes no connections."""

    family = socket.AF_UNIX

    def __init__(self, port: Any) -> None:
        self._port = port
        port.stopReading()

    def descriptor(self, number: int) -> int:
        return int(self._port.fileno())

    def rest(self, number: int) -> None:
        """The others take all."""

    def wake(self, number: int) -> None:
        """As before."""

    def close(self) -> None:
        # Not stopListening, which leaves the name there if the reactor never runs.
        self._port.connectionLost(Failure(ConnectionDone()))


def _address(family: socket.AddressFamily, interface: str, port: int) -> Any:
    if family != socket.AF_INET6:
        return interface, port
    return socket.getaddrinfo(interface, port, family, socket.SOCK_STREAM, 0, socket.AI_NUMERICHOST)[0][4]
