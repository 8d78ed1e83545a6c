"""Connections beyond the limit of an address at TLS listeners of a real daemon."""

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

ALLOWED, ADMIN_ALLOWED, EXCESS = 4, 64, 6
# Another address than that of health checks.
SOURCE = ("127.0.0.2", 0)


class TLSLimitTests(unittest.TestCase):
    def setUp(self) -> None:
        self.directory = Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.directory)
        certificate = CertificateAuthority(self.directory).issue("localhost", ["127.0.0.1"]).absolute()
        self.keys = f"interface=127.0.0.1:privateKey={certificate}:certKey={certificate}"
        self.context = ssl.create_default_context(cafile=self.directory / "Test-Authority.pem")

    def test_closes_excess_connections_at_once(self) -> None:
        """With or without a handshake; those within the limit are served, and no failure is logged."""
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
            for port, limit in ((clients, ALLOWED), (operators, ADMIN_ALLOWED)):
                self.assert_limited(port, limit)
            self.assertNotIn("Traceback", daemon.output())

    def assert_limited(self, port: int, limit: int) -> None:
        """Open more connections than permitted, of which none sends data."""
        with ExitStack() as stack:
            connections = [
                stack.enter_context(socket.create_connection(("127.0.0.1", port), PATIENCE_SECONDS, SOURCE))
                for _ in range(limit + EXCESS)
            ]
            for connection in connections[limit:]:
                self.assertEqual(self.read_until_close(connection), b"")
            for connection in connections[:limit]:
                self.assertTrue(self.request_over_tls(connection).startswith(b"HTTP/1.1 "))

    def read_until_close(self, connection: socket.socket) -> bytes:
        """Data before the connection closes; a time-out is a failure."""
        try:
            return connection.recv(1)
        except ConnectionResetError:
            return b""

    def request_over_tls(self, connection: socket.socket) -> bytes:
        """Response to a request over TLS."""
        with self.context.wrap_socket(connection, server_hostname="127.0.0.1") as wrapped:
            wrapped.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            return wrapped.recv(1 << 16)
