"""Listening on sockets that were bound by the supervisor."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any

from twisted.internet.defer import Deferred, succeed
from twisted.internet.interfaces import IDelayedCall, IListeningPort, IReadDescriptor
from twisted.logger import Logger
from zope.interface import implementer

from mediatord.workers.brief import Inherited

_log = Logger()

# Accepted in one go, so that other workers have some, and seconds of rest when there are no more descriptors.
_AT_ONCE = 4
_REST = 1.0


class Adopting:
    """
    Stands in for the reactor where an endpoint begins to listen: whatever it asks for, it gets what was inherited.

    :param inherited: closed by adopting it; the socket goes on under a descriptor of its own.
    """

    def __init__(self, reactor: Any, inherited: Inherited) -> None:
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
        adopted = socket.socket(fileno=self._inherited.descriptor)
        port = SharedPort(self._reactor, adopted, factory)
        port.startListening()
        return port


@implementer(IListeningPort, IReadDescriptor)
class SharedPort:
    """
    A UNIX socket that others listen on as well.

    The one that Twisted adopts would open it to everybody, and take away its name when this process is done with it.

    :param listening: must not block.
    """

    def __init__(self, reactor: Any, listening: socket.socket, factory: Any) -> None:
        self._reactor = reactor
        self._socket = listening
        self._factory = factory
        self._held = False

    def startListening(self) -> None:  # noqa: N802  Twisted's name
        """Take connections."""
        self._factory.doStart()
        self._reactor.addReader(self)

    def stopReading(self) -> None:  # noqa: N802  Twisted's name
        """Take no connections for now; others may."""
        self._held = True
        self._reactor.removeReader(self)

    def startReading(self) -> None:  # noqa: N802  Twisted's name
        """Take them again."""
        self._held = False
        self._go_on()

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
        for _ in range(_AT_ONCE):
            try:
                connection, _address = self._socket.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                _log.warn("could not accept a connection: {reason}", reason=error.strerror)
                self._reactor.removeReader(self)
                self._reactor.callLater(_REST, self._go_on)
                return
            with connection:
                connection.setblocking(False)
                self._reactor.adoptStreamConnection(connection.fileno(), connection.family, self._factory)

    def _go_on(self) -> None:
        if self._socket.fileno() >= 0 and not self._held:
            self._reactor.addReader(self)
