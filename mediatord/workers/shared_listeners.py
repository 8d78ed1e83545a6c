"""Listening sockets of all workers: bound once by the supervisor, inherited by each worker."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from typing import Any

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


class SharedListeners:
    """
    The listening sockets for every endpoint and worker.

    Each worker has its own TCP sockets, between which the kernel balances connections. They stay open in the
    supervisor too, so that the backlog of a crashed worker waits for its replacement. A UNIX socket is shared by all;
    while a worker is down, the others accept its connections.

    :param endpoints: as in the configuration.
    :param control: the :class:`~mediatord.control.server.ControlListener`, whose socket comes after those of the
        endpoints; left out if it cannot be bound.
    :raise StartupError: an endpoint cannot be shared, or its certificate not be read.
    """

    def __init__(self, reactor: Any, endpoints: Sequence[str], count: int, control: Any = None) -> None:
        self._control = control
        self._binders = []
        for text in endpoints:
            if text.startswith("systemd:"):
                raise StartupError(
                    f"cannot listen on {text}: workers cannot share sockets passed by systemd; set workers: 1"
                )
            binder = _SocketBinder(reactor, count)
            with translate_listen_errors(text):
                self._binders.append((text, binder, serverFromString(binder, add_backlog(text))))
        self._shared: list[Any] = []

    def bind(self) -> None:
        """
        Bind and listen; connections wait until a worker accepts them.

        :raise StartupError: an address is in use, or not an address of this host.
        """
        try:
            for text, binder, endpoint in self._binders:
                with translate_listen_errors(text):
                    outcome: list[Any] = []
                    endpoint.listen(Factory()).addErrback(outcome.append)
                    for failure in outcome:
                        failure.raiseException()
                self._shared.append(binder.shared)
            if self._control is not None and self._control.bind():
                self._shared.append(self._control)
        except BaseException:
            self.close()
            raise

    def descriptors(self, number: int) -> list[int]:
        """The sockets for a worker, numbered from 0, in the order of the endpoints."""
        return [shared.descriptor(number) for shared in self._shared]

    def suspend(self, number: int) -> None:
        """Direct connections to the other workers while one is down for a while; its backlog is refused."""
        for shared in self._shared:
            if isinstance(shared, _TCPSockets):
                shared.suspend(number)

    def resume(self, number: int) -> None:
        """Direct connections to a worker again that is about to start."""
        for shared in self._shared:
            if isinstance(shared, _TCPSockets):
                shared.resume(number)

    def close(self) -> None:
        """Close them in this process."""
        for shared in self._shared:
            shared.close()
        self._shared.clear()


class _SocketBinder:
    """Given to an endpoint in place of the reactor, to keep the sockets that it creates."""

    def __init__(self, reactor: Any, count: int) -> None:
        self._reactor = reactor
        self._count = count
        self.shared: _TCPSockets | _UNIXSocket

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
    """One TCP socket per worker on the same address."""

    def __init__(self, port: int, backlog: int, interface: str, count: int) -> None:
        self.family = socket.AF_INET6 if isIPv6Address(interface) else socket.AF_INET
        self._backlog = backlog
        self._sockets: list[socket.socket] = []
        # Reserves the address without listening. It has no SO_REUSEPORT, with which a second supervisor could bind
        # the same address unnoticed.
        self._holder = self._new_socket()
        try:
            self._holder.bind(_socket_address(self.family, interface, port))
            self._sockets += [self._bind_shared() for _ in range(count)]
            for bound in self._sockets:
                bound.listen(backlog)
        except BaseException:
            self.close()
            raise

    def _bind_shared(self) -> socket.socket:
        shared = self._new_socket()
        try:
            shared.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            shared.bind(self._holder.getsockname())
        except BaseException:
            shared.close()
            raise
        return shared

    def _new_socket(self) -> socket.socket:
        new = socket.socket(self.family, socket.SOCK_STREAM)
        # accept() must not block if another worker has taken the connection.
        new.setblocking(False)
        new.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        return new

    def descriptor(self, number: int) -> int:
        return self._sockets[number].fileno()

    def suspend(self, number: int) -> None:
        """Stop listening; it stays bound, as binding again may need privileges."""
        self._sockets[number].shutdown(socket.SHUT_RD)

    def resume(self, number: int) -> None:
        self._sockets[number].listen(self._backlog)

    def close(self) -> None:
        for bound in (*self._sockets, self._holder):
            bound.close()


class _UNIXSocket:
    """One UNIX socket for all workers: a Twisted port that accepts no connections itself."""

    def __init__(self, port: Any) -> None:
        self._port = port
        port.stopReading()

    def descriptor(self, number: int) -> int:
        return int(self._port.fileno())

    def close(self) -> None:
        # stopListening would leave the file if the reactor never runs.
        self._port.connectionLost(Failure(ConnectionDone()))


def _socket_address(family: socket.AddressFamily, interface: str, port: int) -> Any:
    if family != socket.AF_INET6:
        return interface, port
    return socket.getaddrinfo(interface, port, family, socket.SOCK_STREAM, 0, socket.AI_NUMERICHOST)[0][4]


_log = Logger()

# Connections per call, so that other workers get some; seconds to pause when descriptors have run out.
_ACCEPT_BATCH = 4
_ACCEPT_RETRY_DELAY = 1.0


class InheritedSocketReactor:
    """
    Given to an endpoint in place of the reactor: it listens on an inherited socket, whatever the endpoint asks for.

    :param descriptor: of that socket; it is closed, and the adopted socket has a new one.
    """

    def __init__(self, reactor: Any, descriptor: int) -> None:
        self._reactor = reactor
        self._descriptor = descriptor

    def listenTCP(self, port: int, factory: Any, backlog: int = 50, interface: str = "") -> Any:  # noqa: N802
        """For `tcp:` endpoints, and `ssl:` ones, whose TLS is in the factory."""
        with socket.socket(fileno=self._descriptor) as inherited:
            return self._reactor.adoptStreamPort(inherited.fileno(), inherited.family, factory)

    def callLater(self, delay: float, call: Callable[..., Any], *args: Any) -> IDelayedCall:  # noqa: N802
        """For the timers of connections."""
        timer: IDelayedCall = self._reactor.callLater(delay, call, *args)
        return timer

    def listenUNIX(self, address: str, factory: Any, *arguments: Any, **more: Any) -> Any:  # noqa: N802
        """For `unix:` endpoints."""
        port = SharedUNIXPort(self._reactor, socket.socket(fileno=self._descriptor), factory)
        port.startListening()
        return port


@implementer(IListeningPort, IReadDescriptor)
class SharedUNIXPort:
    """
    Listening port on a UNIX socket that several processes share.

    Twisted's own port would change the mode of the file, and remove it when one of the processes stops.

    :param listening: non-blocking.
    """

    def __init__(self, reactor: Any, listening: socket.socket, factory: Any) -> None:
        self._reactor = reactor
        self._socket = listening
        self._factory = factory
        self._is_paused = False

    def startListening(self) -> None:  # noqa: N802  Twisted's name
        """Accept connections."""
        self._factory.doStart()
        self._reactor.addReader(self)

    def stopReading(self) -> None:  # noqa: N802  Twisted's name
        """Accept no connections for now."""
        self._is_paused = True
        self._reactor.removeReader(self)

    def startReading(self) -> None:  # noqa: N802  Twisted's name
        """Accept connections again."""
        self._is_paused = False
        self._resume_reading()

    def stopListening(self) -> Deferred[None]:  # noqa: N802  Twisted's name
        """Close the socket in this process; fires at once."""
        if self._socket.fileno() >= 0:
            self._reactor.removeReader(self)
            self._socket.close()
            self._factory.doStop()
        return succeed(None)

    def getHost(self) -> Any:  # noqa: N802  Twisted's name
        """The address."""
        return self._socket.getsockname()

    def fileno(self) -> int:
        """For the reactor; -1 once it is closed."""
        return self._socket.fileno()

    def logPrefix(self) -> str:
        """For the reactor."""
        return "UNIX port"

    def connectionLost(self, reason: Any) -> None:
        """Called by the reactor when it stops."""
        self.stopListening()

    def doRead(self) -> None:  # noqa: N802  Twisted's name
        """Accept a few connections, unless other processes were faster."""
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
