"""Others are served, and signals obeyed, while connections send as much as fits into the buffers."""

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
# On the short path, and on the general one.
COMMAND = request(b"/", b"", b"")
OPTIONS = b"OPTIONS / HTTP/1.1\r\nHost: a\r\n\r\n"


class FloodTests(SynchronousTestCase):
    def test_in_turn(self) -> None:
        """A health check is answered before a tenth of a flood of requests or of pings is, and SIGTERM is obeyed."""
        with Daemon(PLENTY) as daemon, ExitStack() as stack:
            for first, piece in ((b"", COMMAND), (b"", OPTIONS), (UPGRADE, PING)):
                answer = len(PONG) if first else answer_to(daemon, piece)
                lines = [stack.enter_context(connect(daemon)) for _ in range(FLOODERS)]
                for line in lines if first else ():
                    line.sendall(first)
                    self.assertEqual(status_of(line), 101)
                number = 65_536 // len(piece)
                with connect(daemon) as other:
                    os.kill(daemon.pid, signal.SIGSTOP)
                    for line in lines:
                        line.sendall(piece * number)
                    other.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
                    with stopped_by_data(daemon, other):
                        answered = sum(map(unread, lines)) // answer
                    self.assertEqual(status_of(other), 200)
                self.assertLess(answered, FLOODERS * number // 10)
            daemon.stop()


@contextmanager
def stopped_by_data(daemon: Daemon, line: socket.socket) -> Iterator[None]:
    """A daemon that was stopped goes on until it sends something on this line: Linux stops it that very moment."""
    flags = fcntl.fcntl(line, fcntl.F_GETFL)
    fcntl.fcntl(line, fcntl.F_SETOWN, daemon.pid)
    fcntl.fcntl(line, fcntl.F_SETSIG, signal.SIGSTOP)
    fcntl.fcntl(line, fcntl.F_SETFL, flags | os.O_ASYNC)
    os.kill(daemon.pid, signal.SIGCONT)
    try:
        assert line.recv(1, socket.MSG_PEEK), "closed without an answer"
        yield
    finally:
        fcntl.fcntl(line, fcntl.F_SETFL, flags)
        os.kill(daemon.pid, signal.SIGCONT)


def answer_to(daemon: Daemon, sent: bytes) -> int:
    """How long the answer to a request is."""
    with connect(daemon) as line:
        line.sendall(sent)
        return len(line.recv(65_536))


def unread(line: socket.socket) -> int:
    """Bytes that have come and were not read."""
    (size,) = struct.unpack("i", fcntl.ioctl(line, termios.FIONREAD, b"\0\0\0\0"))
    return int(size)
