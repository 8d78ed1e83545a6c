"""Connections over the limit of an address at listeners that speak TLS, which a real daemon has to close."""

from __future__ import annotations

import shutil
import socket
import ssl
import tempfile
import unittest
from contextlib import ExitStack
from pathlib import Path

from mediatord.wallet.temporary_daemon import find_free_port
from tests.certificate_authority import CertificateAuthority
from tests.integration.message_load import PATIENCE_SECONDS, prepare_daemon

ALLOWED, OF_OPERATORS, TOO_MANY = 4, 64, 6
# Not the address that the daemon is asked from whether it is there.
SOURCE = ("127.0.0.2", 0)


class TLSLimitTests(unittest.TestCase):
    def setUp(self) -> None:
        self.directory = Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.directory)
        certificate = CertificateAuthority(self.directory).issue("localhost", ["127.0.0.1"]).absolute()
        self.keys = f"interface=127.0.0.1:privateKey={certificate}:certKey={certificate}"
        self.context = ssl.create_default_context(cafile=self.directory / "Test-Authority.pem")

    def test_closed_at_once(self) -> None:
        """Whether or not they begin a handshake; those within the limit are served, and nothing fails in the log."""
        clients, operators = find_free_port(), find_free_port()
        daemon = prepare_daemon(
            {
                "admin": {"listen": f"ssl:{operators}:{self.keys}", "token_file": "token"},
                "limits": {"max_connections_per_ip": ALLOWED // 4},
            }
        )
        token = daemon.directory / "token"
        token.touch(0o600)
        token.write_text("0123456789abcdef" * 2)
        text = daemon.config.read_text("utf-8")
        text = text.replace("listen:\n", f"listen:\n- ssl:{clients}:{self.keys}\n", 1)
        daemon.config.write_text(text, "utf-8")
        with daemon:
            for port, limit in ((clients, ALLOWED), (operators, OF_OPERATORS)):
                self.assert_limited(port, limit)
            self.assertNotIn("Traceback", daemon.output())

    def assert_limited(self, port: int, limit: int) -> None:
        """More connections than there may be; none of those that are served has said anything by then."""
        with ExitStack() as stack:
            lines = [
                stack.enter_context(socket.create_connection(("127.0.0.1", port), PATIENCE_SECONDS, SOURCE))
                for _ in range(limit + TOO_MANY)
            ]
            for line in lines[limit:]:
                self.assertEqual(self.heard(line), b"")
            for line in lines[:limit]:
                self.assertTrue(self.asked(line).startswith(b"HTTP/1.1 "))

    def heard(self, line: socket.socket) -> bytes:
        """What comes before the connection is closed; time-outs are failures."""
        try:
            return line.recv(1)
        except ConnectionResetError:
            return b""

    def asked(self, line: socket.socket) -> bytes:
        """The answer to a request over TLS."""
        with self.context.wrap_socket(line, server_hostname="127.0.0.1") as wrapped:
            wrapped.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            return wrapped.recv(1 << 16)
