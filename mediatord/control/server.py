"""
Server side of the control socket: HTTP/1.1 with JSON over a UNIX socket, for the daemon's own user and root.

`POST /v1/OPERATION` with an object of arguments is answered with `{"result": ...}`, or with `{"error": "one line"}`
and status 400 (not carried out) or 503 (store or daemon not available).
"""

from __future__ import annotations

import errno
import json
import os
import socket
import stat
import struct
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any, cast

from twisted.application.service import Service
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure
from twisted.web.http import HTTPChannel
from twisted.web.resource import Resource
from twisted.web.server import Request, Site

from mediatord.control.client import make_socket_address
from mediatord.control.queue_and_account_operations import ControlError
from mediatord.errors import MediatorError, ShutdownInProgress, StartupError, StoreUnavailable
from mediatord.runtime.failure_logging import redact_failure
from mediatord.workers.shared_listeners import SharedUNIXPort

_log = Logger()

_BACKLOG = 16
_MAX_CONNECTIONS = 16
_MAX_BODY_BYTES = 262_144
# Seconds from an answer to the end of the next request.
_IDLE_TIMEOUT = 60
_CREDENTIALS = struct.Struct("3i")

OperationRunner = Callable[[str, Mapping[str, Any]], Awaitable[Any]]


class ControlListener:
    """
    The listening socket, mode 0600. The file of a daemon that no longer runs is replaced.

    :param path: of the socket.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._socket: socket.socket | None = None
        self._stat: os.stat_result | None = None

    def bind(self) -> bool:
        """
        Listen, and return whether that was possible. Where no socket can be made, the reason is logged.

        :raise StartupError: another daemon listens there, or the path is in use otherwise.
        """
        try:
            self._remove_stale()
            self._bind()
        except OSError as error:
            reason = error.strerror or str(error)
            if error.errno == errno.EADDRINUSE:
                raise StartupError(f"control_socket: cannot listen on {self._path}: {reason}") from None
            _log.error(
                "control_socket: cannot listen on {path}: {reason}; commands cannot connect to this daemon",
                path=self._path,
                reason=reason,
            )
            return False
        return True

    def _bind(self) -> None:
        bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            # The file is made with the mode of the socket. A umask would hold for all threads, and not where the
            # directory has a default ACL.
            os.fchmod(bound.fileno(), 0o600)
            with make_socket_address(self._path) as address:
                bound.bind(address)
            bound.setblocking(False)
            bound.listen(_BACKLOG)
        except BaseException:
            bound.close()
            raise
        self._socket, self._stat = bound, os.lstat(self._path)

    def _remove_stale(self) -> None:
        try:
            mode = os.lstat(self._path).st_mode
        except FileNotFoundError:
            return
        if not stat.S_ISSOCK(mode):
            raise StartupError(f"control_socket: {self._path} exists and is not a socket")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe, make_socket_address(self._path) as address:
            probe.setblocking(False)
            result = probe.connect_ex(address)
        if result in (0, errno.EAGAIN):
            raise StartupError(f"control_socket: another daemon listens on {self._path}")
        if result == errno.ECONNREFUSED:
            self._path.unlink(missing_ok=True)
        elif result != errno.ENOENT:
            raise OSError(result, os.strerror(result))

    def duplicate(self) -> socket.socket | None:
        """Another descriptor of the socket; None if it is not bound."""
        return None if self._socket is None else self._socket.dup()

    def descriptor(self, number: int) -> int:
        """The one socket for all workers."""
        assert self._socket is not None
        return self._socket.fileno()

    def close(self) -> None:
        """Close the socket and remove its file, if that is possible, unless another daemon has replaced it."""
        if self._socket is None or self._stat is None:
            return
        self._socket.close()
        self._socket = None
        # The next start replaces a file that is left, in a directory that has become read-only for example.
        with suppress(OSError):
            if os.path.samestat(os.lstat(self._path), self._stat):
                self._path.unlink()


class ControlSocket(Service):
    """
    Serves the control socket while the daemon runs.

    :param listener: bound when the service starts, and closed when it stops. Where it cannot be bound, the service
        does nothing.
    :param inherited: descriptor of a socket that the supervisor has bound, instead.
    """

    name = "control socket"

    def __init__(
        self,
        reactor: Any,
        run: OperationRunner,
        listener: ControlListener | None = None,
        inherited: int | None = None,
    ) -> None:
        self._reactor = reactor
        self._listener = listener
        self._inherited = inherited
        self._site = ControlSite(reactor, run)
        self._port: SharedUNIXPort | None = None

    def privilegedStartService(self) -> None:
        """
        Bind, if that is possible.

        :raise StartupError: as :meth:`ControlListener.bind`.
        """
        super().privilegedStartService()
        if self._listener is not None:
            self._listener.bind()

    def startService(self) -> None:
        """Accept connections."""
        super().startService()
        bound = self._listener.duplicate() if self._listener is not None else socket.socket(fileno=self._inherited)
        if bound is not None:
            self._port = SharedUNIXPort(self._reactor, bound, self._site)
            self._port.startListening()

    def stopService(self) -> None:
        """Close the socket and all connections."""
        super().stopService()
        if self._port is not None:
            self._port.stopListening()
        if self._listener is not None:
            self._listener.close()
        self._site.close()


class _ControlRequest(Request):
    """A request with a bounded body, whose path names the operation."""

    content: BytesIO
    _received = 0

    def gotLength(self, length: int | None) -> None:
        """Called once the headers are there."""
        self.content = BytesIO()

    def handleContentChunk(self, data: bytes) -> None:
        """Called with every piece of the body."""
        self._received += len(data)
        if self._received > _MAX_BODY_BYTES:
            cast(Any, self.channel).transport.abortConnection()
            return
        super().handleContentChunk(data)

    def render(self, resrc: object) -> None:
        """Run the operation, whatever the resource. A client that does not read its answers is disconnected."""
        channel = cast(Any, self.channel)
        if channel.is_answer_unread:
            channel.transport.abortConnection()
        elif self.method != b"POST" or not self.path.startswith(b"/v1/"):
            self._respond(400, {"error": "expected POST /v1/OPERATION"})
        else:
            gone: list[Failure] = []
            self.notifyFinish().addErrback(gone.append)

            async def answer() -> None:
                status, body = await self._answer()
                if not gone:
                    self._respond(status, body)

            Deferred.fromCoroutine(answer())

    async def _answer(self) -> tuple[int, dict[str, Any]]:
        try:
            arguments = json.loads(self.content.read() or b"{}")
            if not isinstance(arguments, dict):
                return 400, {"error": "expected a JSON object"}
            operation = self.path.removeprefix(b"/v1/").decode("ascii", "replace")
            return 200, {"result": await cast(ControlSite, self.site).run_operation(operation, arguments)}
        except ControlError as error:
            return 400, {"error": str(error)}
        except (ValueError, RecursionError):
            return 400, {"error": "expected JSON"}
        except ShutdownInProgress:
            return 503, {"error": "the daemon is shutting down"}
        except StoreUnavailable:
            return 503, {"error": "the store is unavailable"}
        except MediatorError as error:
            return 400, {"error": str(error) or type(error).__name__}
        except Exception:
            _log.failure("an operation of the control socket failed", redact_failure())
            return 500, {"error": "internal error; see the daemon's log"}

    def _respond(self, status: int, body: dict[str, Any]) -> None:
        encoded = json.dumps(body, separators=(",", ":")).encode()
        self.setResponseCode(status)
        self.setHeader(b"Server", b"mediatord")
        self.setHeader(b"Content-Type", b"application/json")
        self.setHeader(b"Content-Length", b"%d" % len(encoded))
        self.write(encoded)
        self.finish()


class _ControlChannel(HTTPChannel):
    """:ivar is_answer_unread: whether the client has left so much of its answers unread that the buffers are full."""

    is_answer_unread = False
    _is_counted = False

    def connectionMade(self) -> None:
        """Refuse other users than the daemon's own and root, and more connections than allowed."""
        site = cast(Any, self).site
        if not site.admits(cast(Any, self.transport).getHandle()):
            cast(Any, self.transport).abortConnection()
            return
        self._is_counted = True
        site.connections.add(self)
        super().connectionMade()

    def dataReceived(self, data: bytes) -> None:
        """Called with what comes."""
        if self._is_counted:
            super().dataReceived(data)

    def resetTimeout(self) -> None:  # noqa: N802  Twisted's name
        """Called with every piece that comes, which gives no more time: the timeout is that of a whole request."""

    def pauseProducing(self) -> None:
        """The buffers are full."""
        self.is_answer_unread = True
        super().pauseProducing()

    def resumeProducing(self) -> None:
        """The client has read what was in the buffers."""
        self.is_answer_unread = False
        super().resumeProducing()

    def connectionLost(self, reason: Failure) -> None:  # type: ignore[override]  # it always has one
        """The client is gone."""
        cast(Any, self).site.connections.discard(self)
        if self._is_counted:
            super().connectionLost(reason)


def get_peer_credentials(connection: socket.socket) -> tuple[int, int]:
    """Process and user that have connected."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return pid, uid


class ControlSite(Site):
    """A site without an access log for a few local clients."""

    protocol = _ControlChannel  # type: ignore[assignment]  # instead of a proxy that could speak HTTP/2
    requestFactory = _ControlRequest
    noisy = False

    def __init__(self, clock: IReactorTime, run: OperationRunner) -> None:
        root = Resource()
        root.isLeaf = True
        super().__init__(root, reactor=clock, timeout=_IDLE_TIMEOUT, parsePOSTFormSubmission=False)
        self.run_operation = run
        self.connections: set[_ControlChannel] = set()

    def startFactory(self) -> None:
        """Twisted's own would write an access log."""

    def stopFactory(self) -> None:
        """There is no access log to close."""

    def log(self, request: object) -> None:
        """There is no access log."""

    def admits(self, connection: socket.socket) -> bool:
        """Whether the peer may use the socket."""
        pid, uid = get_peer_credentials(connection)
        if uid not in (0, os.geteuid()):
            _log.warn("control socket: refused a connection from user {uid}, process {pid}", uid=uid, pid=pid)
            return False
        return len(self.connections) < _MAX_CONNECTIONS

    def close(self) -> None:
        """Abort all connections."""
        for connection in list(self.connections):
            cast(Any, connection.transport).abortConnection()
