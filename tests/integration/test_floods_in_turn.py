"""Others are served, and signals obeyed, while connections send as much as fits into the buffers."""

from __future__ import annotations

from contextlib import ExitStack

from twisted.trial.unittest import SynchronousTestCase

from tests.integration.daemon import Daemon
from tests.integration.test_memory import UPGRADE, connect, request, status_of

FLOODERS = 32
PING = b"\x89\x80\0\0\0\0"


class FloodTests(SynchronousTestCase):
    def test_in_turn(self) -> None:
        """A health check is answered before a flood of requests or of pings is served, and so is SIGTERM."""
        empty = request(b"/didcomm", b"", b"")
        with Daemon() as daemon, ExitStack() as stack:
            for first, piece in ((b"", empty), (UPGRADE, PING)):
                lines = [stack.enter_context(connect(daemon)) for _ in range(FLOODERS)]
                for line in lines:
                    if first:
                        line.sendall(first)
                        self.assertEqual(status_of(line), 101)
                    line.sendall(piece * (65_536 // len(piece)))
                with connect(daemon) as other:
                    other.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
                    self.assertEqual(status_of(other), 200)
            daemon.stop()
