"""Others are served, and signals obeyed, while connections send as much as fits into the buffers."""

from __future__ import annotations

import fcntl
import socket
import struct
import termios
from contextlib import ExitStack

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
                for line in lines:
                    line.sendall(piece * number)
                with connect(daemon) as other:
                    other.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
                    self.assertEqual(status_of(other), 200)
                answered = sum(map(unread, lines)) // answer
                self.assertLess(answered, FLOODERS * number // 10)
            daemon.stop()


def answer_to(daemon: Daemon, sent: bytes) -> int:
    """How long the answer to a request is."""
    with connect(daemon) as line:
        line.sendall(sent)
        return len(line.recv(65_536))


def unread(line: socket.socket) -> int:
    """Bytes that have come and were not read."""
    (size,) = struct.unpack("i", fcntl.ioctl(line, termios.FIONREAD, b"\0\0\0\0"))
    return int(size)
