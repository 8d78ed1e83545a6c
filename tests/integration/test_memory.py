"""Memory of a daemon after refused requests and closed connections, measured from outside."""

from __future__ import annotations

import socket
import time
from contextlib import ExitStack, closing
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from tests.integration.daemon import Daemon

MIB = 1_048_576
# Permitted growth, in addition to the documented buffers.
SLACK = 64 * MIB
# Ten seconds are required on an idle machine.
RETURN_SECONDS = 120.0
LARGE = b"z" * 1_000_000
DEEP = b"[" * 1000 + b"]" * 1000
# Bodies of about a megabyte.
REFUSED = {
    "no JSON": LARGE,
    "members": b"{" + b",".join(b'"%05d":[]' % number for number in range(90_000)) + b"}",
    "objects": b'{"a":[' + b",".join([b'{"":[]}'] * 120_000) + b"]}",
    "nested": b"[" + b",".join([DEEP] * 500) + b"]",
    "not for us": b'{"protected":"%b","recipients":[{}],"iv":"","ciphertext":"","tag":""}' % LARGE,
}
UPGRADE = (
    b"GET /ws HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)


class MemoryTests(SynchronousTestCase):
    daemon: Daemon

    def setUp(self) -> None:
        self.daemon = Daemon()
        self.addCleanup(self.daemon.clean)
        self.daemon.start()
        self.before = self.resident()

    def resident(self) -> int:
        """Resident memory of the daemon in bytes."""
        fields = Path(f"/proc/{self.daemon.pid}/statm").read_text("ascii").split()
        return int(fields[1]) * 4096

    def assert_memory_returned(self) -> None:
        """Memory returns to about its former size."""
        deadline = time.monotonic() + RETURN_SECONDS
        while self.resident() > self.before + SLACK // 4 and time.monotonic() < deadline:
            time.sleep(0.1)
        self.assertLess(self.resident(), self.before + SLACK // 4)

    def test_refused_bodies_are_freed(self) -> None:
        """Several times as many bytes as may be buffered."""
        with closing(connect(self.daemon)) as connection:
            for path, kind in ((b"/didcomm", b"application/didcomm-encrypted+json"), (b"/", b"application/json")):
                for name, body in REFUSED.items():
                    for _ in range(20):
                        connection.sendall(request(path, kind, body))
                        self.assertIn(status_of(connection), (400, 401), name)
                    self.assertLess(self.resident(), self.before + SLACK + MIB, name)
        self.assert_memory_returned()

    def test_unfinished_input_is_bounded_and_freed(self) -> None:
        """Unfinished requests and frames stay within documented buffers, which are freed with their connections."""
        frame = b"\x01\xfe\x03\xe8\0\0\0\0" + b"z" * 1000
        fragments = frame + (b"\x00" + frame[1:]) * 990
        whole = b"\x81\xff" + len(LARGE).to_bytes(8, "big") + b"\0\0\0\0" + LARGE
        for first, data in ((b"", request(b"/didcomm", b"", LARGE)), (UPGRADE, whole), (UPGRADE, fragments)):
            with ExitStack() as stack:
                lines = [stack.enter_context(connect(self.daemon)) for _ in range(64)]
                for line in lines:
                    if first:
                        line.sendall(first)
                        self.assertEqual(status_of(line), 101)
                    line.sendall(data[:-1])
                self.assertLess(self.resident(), self.before + 64 * (MIB + 65_536) + SLACK)
            self.assert_memory_returned()


def connect(daemon: Daemon) -> socket.socket:
    """A TCP connection."""
    return socket.create_connection(("127.0.0.1", daemon.port), timeout=60)


def request(path: bytes, kind: bytes, body: bytes) -> bytes:
    """A POST request."""
    return b"POST %b HTTP/1.1\r\nHost: a\r\nContent-Type: %b\r\nContent-Length: %d\r\n\r\n%b" % (
        path,
        kind,
        len(body),
        body,
    )


def status_of(connection: socket.socket) -> int:
    """Status of one response, which is read completely."""
    received = b""
    while b"\r\n\r\n" not in received:
        received += connection.recv(65_536)
    head, _, rest = received.partition(b"\r\n\r\n")
    length = next((int(one[15:]) for one in head.lower().split(b"\r\n") if one.startswith(b"content-length:")), 0)
    while len(rest) < length:
        rest += connection.recv(65_536)
    return int(head.split()[1])
