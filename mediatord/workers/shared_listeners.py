"""
The listening sockets of all workers, bound once and kept open by the supervisor.

Listening on sockets that were bound by the supervisor.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from twisted.internet.abstract import isIPv6Address
from twisted.internet.defer import Deferred, succeed
from twisted.internet.endpoints import serverFromString
from twisted.internet.error import ConnectionDone
from twisted.internet.interfaces import IDelayedCall, IListeningPort, IReadDescriptor
from twisted.internet.protocol import Factory
from twisted.logger import Logger
from twisted.python.failure import Failure
from zope.interface import implementer

from mediatord.errors import StartupError
from mediatord.net.listeners import add_backlog, translate_listen_errors
from mediatord.workers.worker_process import InheritedSocket


class _EndpointSockets(Protocol):
    """The sockets of one endpoint."""

    family: socket.AddressFamily

    def descriptor(self, number: int) -> int:
        """The socket of a worker, counted from 0."""

    def suspend(self, number: int) -> None:
        """Nobody serves this one for a while."""

    def resume(self, number: int) -> None:
        """Somebody does again."""

    def close(self) -> None:
        """Let go of all."""


class UnboundSocket(_EndpointSockets, Protocol):
    """A socket of its own kind, which is bound with those of the endpoints."""

    def bind(self) -> None:
        """:raise StartupError: it cannot be bound."""


class SharedListeners:
    """
    A listening socket for every endpoint and worker.

    Each worker has TCP sockets of its own, between which the kernel spreads connections. As long as they are open
    here as well, what is in the backlog of a worker that died waits for the next one. A UNIX socket is one for all.

    :param endpoints: as in the configuration.
    :param control: the listener of the control socket, behind those of the endpoints; None without one.
    :raise StartupError: an endpoint cannot be shared, or its certificate not be read.
    """

    def __init__(
        self, reactor: Any, endpoints: Sequence[str], count: int, control: UnboundSocket | None = None
    ) -> None:
        self._control = control
        self._binders = []
        for text in endpoints:
            if text.startswith("systemd:"):
                raise StartupError(f"cannot listen on {text}: workers cannot share what systemd hands over")
            binder = _SocketBinder(reactor, count)
            with translate_listen_errors(text):
                self._binders.append((text, binder, serverFromString(binder, add_backlog(text))))
        self._shared: list[_EndpointSockets] = []

    def bind(self) -> None:
        """
        Bind and listen; what comes waits until a worker takes it.

        :raise StartupError: an address is taken or not ours.
        """
        try:
            for text, binder, endpoint in self._binders:
                with translate_listen_errors(text):
                    outcome: list[Any] = []
                    endpoint.listen(Factory()).addErrback(outcome.append)
                    for failure in outcome:
                        failure.raiseException()
                self._shared.append(binder.shared)
            if self._control is not None:
                self._control.bind()
                self._shared.append(self._control)
        except BaseException:
            self.close()
            raise

    def sockets(self, number: int) -> list[tuple[int, socket.AddressFamily]]:
        """Descriptors for a worker, counted from 0, in the order of the endpoints."""
        return [(shared.descriptor(number), shared.family) for shared in self._shared]

    def suspend(self, number: int) -> None:
        """
        Let the others have the connections of a worker that is not there and not about to be.

        What waits in its backlog is refused.
        """
        for shared in self._shared:
            shared.suspend(number)

    def resume(self, number: int) -> None:
        """The worker is about to be there again."""
        for shared in self._shared:
            shared.resume(number)

    def close(self) -> None:
        """Close them here; a worker's own copies are its business."""
        for shared in self._shared:
            shared.close()
        self._shared.clear()


class _SocketBinder:
    """Stands in for the reactor where an endpoint begins to listen, and keeps the sockets that it makes."""

    def __init__(self, reactor: Any, count: int) -> None:
        self._reactor = reactor
        self._count = count
        self.shared: _EndpointSockets

    def listenTCP(self, port: int, factory: Any, backlog: int = 50, interface: str = "") -> None:  # noqa: N802
        self.shared = _TCPSockets(port, backlog, interface, self._count)

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
        self.shared = _UNIXSocket(self._reactor.listenUNIX(address, factory, *arguments, **more))


class _TCPSockets:
    """One TCP socket for each worker on the same address."""

    def __init__(self, port: int, backlog: int, interface: str, count: int) -> None:
        self.family = socket.AF_INET6 if isIPv6Address(interface) else socket.AF_INET
        self._backlog = backlog
        self._sockets: list[socket.socket] = []
        # Holds the address, and listens to nobody. Without SO_REUSEPORT, or a second supervisor could join in on the
        # address of the first unnoticed.
        self._holder = self._fresh()
        try:
            self._holder.bind(_socket_address(self.family, interface, port))
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

    def suspend(self, number: int) -> None:
        """It stays bound: to bind it again might not be allowed any more."""
        self._sockets[number].shutdown(socket.SHUT_RD)

    def resume(self, number: int) -> None:
        self._sockets[number].listen(self._backlog)

    def close(self) -> None:
        for bound in (*self._sockets, self._holder):
            bound.close()


class _UNIXSocket:
    """One UNIX socket for all workers; a port of Twisted's that takes no connections."""

    family = socket.AF_UNIX

    def __init__(self, port: Any) -> None:
        self._port = port
        port.stopReading()

    def descriptor(self, number: int) -> int:
        return int(self._port.fileno())

    def suspend(self, number: int) -> None:
        """The others take all."""

    def resume(self, number: int) -> None:
        """As before."""

    def close(self) -> None:
        # Not stopListening, which leaves the name there if the reactor never runs.
        self._port.connectionLost(Failure(ConnectionDone()))


def _socket_address(family: socket.AddressFamily, interface: str, port: int) -> Any:
    if family != socket.AF_INET6:
        return interface, port
    return socket.getaddrinfo(interface, port, family, socket.SOCK_STREAM, 0, socket.AI_NUMERICHOST)[0][4]


_log = Logger()

# Accepted in one go, so that other workers have some, and seconds of rest when there are no more descriptors.
_ACCEPT_BATCH = 4
_ACCEPT_RETRY_DELAY = 1.0


class InheritedSocketReactor:
    """
    Stands in for the reactor where an endpoint begins to listen: whatever it asks for, it gets what was inherited.

    :param inherited: closed by adopting it; the socket goes on under a descriptor of its own.
    """

    def __init__(self, reactor: Any, inherited: InheritedSocket) -> None:
        self._reactor = reactor
        self._inherited = inherited

    def listenTCP(self, port: int, factory: Any, backlog: int = 50, interface: str = "") -> Any:  # noqa: N802
        """For `tcp:` endpoints, and `ssl:` ones, whose TLS is in the factory."""
        try:
            return self._reactor.adoptStreamPort(self._inherited.descriptor, self._inherited.family, factory)
        finally:
            os.close(self._inherited.descriptor)

    def callLater(self, delay: float, call: Callable[..., Any], *args: Any) -> IDelayedCall:  # noqa: N802
        """For the timers of connections."""
        timer: IDelayedCall = self._reactor.callLater(delay, call, *args)
        return timer

    def listenUNIX(self, address: str, factory: Any, *arguments: Any, **more: Any) -> Any:  # noqa: N802
        """For `unix:` endpoints."""
        inherited_socket = socket.socket(fileno=self._inherited.descriptor)
        port = SharedUNIXPort(self._reactor, inherited_socket, factory)
        port.startListening()
        return port


@implementer(IListeningPort, IReadDescriptor)
class SharedUNIXPort:
    """
    A UNIX socket that others listen on as well.

    The one that Twisted adopts would open it to everybody, and take away its name when this process is done with it.

    :param listening: must not block.
    """

    def __init__(self, reactor: Any, listening: socket.socket, factory: Any) -> None:
        self._reactor = reactor
        self._socket = listening
        self._factory = factory
        self._is_paused = False

    def startListening(self) -> None:  # noqa: N802  Twisted's name
        """Take connections."""
        self._factory.doStart()
        self._reactor.addReader(self)

    def stopReading(self) -> None:  # noqa: N802  Twisted's name
        """Take no connections for now; others may."""
        self._is_paused = True
        self._reactor.removeReader(self)

    def startReading(self) -> None:  # noqa: N802  Twisted's name
        """Take them again."""
        self._is_paused = False
        self._resume_reading()

    def stopListening(self) -> Deferred[None]:  # noqa: N802  Twisted's name
        """Take no more; fires at once."""
        if self._socket.fileno() >= 0:
            self._reactor.removeReader(self)
            self._socket.close()
            self._factory.doStop()
        return succeed(None)

    def getHost(self) -> Any:  # noqa: N802  Twisted's name
        """Its address."""
        return self._socket.getsockname()

    def fileno(self) -> int:
        """For the reactor; -1 once it is closed."""
        return self._socket.fileno()

    def logPrefix(self) -> str:
        """For the reactor."""
        return "UNIX port"

    def connectionLost(self, reason: Any) -> None:
        """Called by the reactor when it ends."""
        self.stopListening()

    def doRead(self) -> None:  # noqa: N802  Twisted's name
        """Called when somebody may be there, unless another process was faster."""
        for _ in range(_ACCEPT_BATCH):
            try:
                connection, _address = self._socket.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                _log.warn("could not accept a connection: {reason}", reason=error.strerror)
                self._reactor.removeReader(self)
                self._reactor.callLater(_ACCEPT_RETRY_DELAY, self._resume_reading)
                return
            with connection:
                connection.setblocking(False)
                self._reactor.adoptStreamConnection(connection.fileno(), connection.family, self._factory)

    def _resume_reading(self) -> None:
        if self._socket.fileno() >= 0 and not self._is_paused:
            self._reactor.addReader(self)
