"""Other clients are served, and signals handled, while connections fill their buffers."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import struct
import termios
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from twisted.trial.unittest import SynchronousTestCase

from tests.integration.daemon import PLENTY, Daemon
from tests.integration.test_memory import UPGRADE, connect, request, status_of

FLOODERS = 32
PING = b"\x89\x80\0\0\0\0"
PONG = b"\x8a\0"
# On the fast path, and on the general path.
COMMAND = request(b"/", b"", b"")
OPTIONS = b"OPTIONS / HTTP/1.1\r\nHost: a\r\n\r\n"


class FloodTests(SynchronousTestCase):
    def test_serves_others_during_flood(self) -> None:
        """A health check is answered before a tenth of the flooding requests or pings; SIGTERM is obeyed."""
        with Daemon(PLENTY) as daemon, ExitStack() as stack:
            for handshake, request in ((b"", COMMAND), (b"", OPTIONS), (UPGRADE, PING)):
                response_size = len(PONG) if handshake else measure_response(daemon, request)
                flooding = [stack.enter_context(connect(daemon)) for _ in range(FLOODERS)]
                for connection in flooding if handshake else ():
                    connection.sendall(handshake)
                    self.assertEqual(status_of(connection), 101)
                number = 65_536 // len(request)
                with connect(daemon) as client:
                    os.kill(daemon.pid, signal.SIGSTOP)
                    for connection in flooding:
                        connection.sendall(request * number)
                    client.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
                    with suspend_on_response(daemon, client):
                        responses = sum(map(unread_bytes, flooding)) // response_size
                    self.assertEqual(status_of(client), 200)
                self.assertLess(responses, FLOODERS * number // 10)
            daemon.stop()


@contextmanager
def suspend_on_response(daemon: Daemon, connection: socket.socket) -> Iterator[None]:
    """Resume a suspended daemon until it writes to this connection, at which moment Linux suspends it again."""
    flags = fcntl.fcntl(connection, fcntl.F_GETFL)
    fcntl.fcntl(connection, fcntl.F_SETOWN, daemon.pid)
    fcntl.fcntl(connection, fcntl.F_SETSIG, signal.SIGSTOP)
    fcntl.fcntl(connection, fcntl.F_SETFL, flags | os.O_ASYNC)
    os.kill(daemon.pid, signal.SIGCONT)
    try:
        assert connection.recv(1, socket.MSG_PEEK), "closed without an answer"
        yield
    finally:
        fcntl.fcntl(connection, fcntl.F_SETFL, flags)
        os.kill(daemon.pid, signal.SIGCONT)


def measure_response(daemon: Daemon, request_bytes: bytes) -> int:
    """Size of the response to a request."""
    with connect(daemon) as connection:
        connection.sendall(request_bytes)
        return len(connection.recv(65_536))


def unread_bytes(connection: socket.socket) -> int:
    """Number of bytes received and not read."""
    (size,) = struct.unpack("i", fcntl.ioctl(connection, termios.FIONREAD, b"\0\0\0\0"))
    return int(size)
