"""The status page of a running daemon, single or with workers."""

from __future__ import annotations

import json
import os
import shutil
import signal
import ssl
import tempfile
import time
from base64 import b64encode
from contextlib import closing
from http.client import HTTPConnection, HTTPSConnection
from pathlib import Path
from typing import Any

from twisted.internet import reactor as _reactor  # noqa: TID251  the daemon is a child process, its sockets are real
from twisted.internet.threads import deferToThread

from mediatord.wallet.temporary_daemon import find_free_port
from tests.certificate_authority import CertificateAuthority
from tests.integration.daemon import Daemon
from tests.integration.message_load import PATIENCE_SECONDS, enrol_wallet, prepare_daemon, prepare_forwards
from tests.integration.test_lifecycle import DaemonTestCase
from tests.integration.test_workers import await_workers, pid_of

reactor: Any = _reactor

TOKEN = "0123456789abcdef" * 2
POLL_SECONDS = 0.05


def get_page(connection: HTTPConnection, path: str, token: str = TOKEN) -> tuple[int, bytes]:
    """Status and body of one request; closes the connection."""
    with closing(connection):
        return request_page(connection, path, token)


def request_page(connection: HTTPConnection, path: str, token: str = TOKEN) -> tuple[int, bytes]:
    """Status and body, on a connection that stays open."""
    connection.request("GET", path, headers={"Authorization": "Basic " + b64encode(f"x:{token}".encode()).decode()})
    response = connection.getresponse()
    return response.status, response.read()


class AdminTests(DaemonTestCase):
    def prepare_admin_daemon(self, listen: str, **settings: Any) -> Daemon:
        """A daemon with the status page, not running."""
        daemon = prepare_daemon(
            {"admin": {"listen": listen, "token_file": "token", "reports": "reports"}, **settings}
        )
        self.addCleanup(daemon.clean)
        self.token = daemon.directory / "token"
        self.token.touch(0o600)
        self.token.write_text(TOKEN)
        return daemon

    def await_status(self, port: int, predicate: Any) -> dict[str, Any]:
        """
        Wait until the status of one worker, that of the connection, satisfies a predicate.

        :raise AssertionError: it does not in time.
        """
        deadline = time.monotonic() + PATIENCE_SECONDS
        with closing(HTTPConnection("127.0.0.1", port, timeout=PATIENCE_SECONDS)) as connection:
            while True:
                code, body = request_page(connection, "/admin/status.json")
                self.assertEqual(code, 200)
                status: dict[str, Any] = json.loads(body)
                if predicate(status):
                    return status
                assert time.monotonic() < deadline, status
                time.sleep(POLL_SECONDS)

    async def test_serves_status_and_reports_over_tls(self) -> None:
        """On SQLite: queued messages, refusals and a report; SIGHUP applies a new token."""
        port = find_free_port()
        directory = Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, directory)
        certificate = CertificateAuthority(directory).issue("localhost", ["127.0.0.1"]).absolute()
        keys = f"privateKey={certificate}:certKey={certificate}"
        daemon = self.prepare_admin_daemon(f"ssl:{port}:interface=127.0.0.1:{keys}")
        report_directory = daemon.directory / "reports" / "2026-01-01"
        report_directory.mkdir(parents=True)
        (report_directory / "index.html").write_text("<p>report</p>")
        daemon.start()
        context = ssl.create_default_context(cafile=directory / "Test-Authority.pem")

        def get(path: str, token: str = TOKEN) -> tuple[int, bytes]:
            return get_page(
                HTTPSConnection("127.0.0.1", port, context=context, timeout=PATIENCE_SECONDS), path, token
            )

        bob = await enrol_wallet(daemon, reactor)
        for forward in prepare_forwards(bob, "hello", 2):
            connection = HTTPConnection("127.0.0.1", daemon.port, timeout=PATIENCE_SECONDS)
            connection.request(
                "POST", "/didcomm", forward.body, {"Content-Type": "application/didcomm-encrypted+json"}
            )
            self.assertEqual(connection.getresponse().status, 202)
            connection.close()
        code, body = await deferToThread(get, "/admin/status.json")
        self.assertEqual(code, 200)
        status = json.loads(body)
        self.assertEqual((status["store"]["backend"], status["store"]["answers"]), ("sqlite", True))
        self.assertEqual(status["traffic"]["accepted"]["total"], 2)
        self.assertEqual((status["ledger"]["didcomm"]["accepted"], status["ledger"]["didcomm"]["waiting"]), (2, 2))
        self.assertEqual(status["waiting"]["messages"], 2)
        self.assertGreaterEqual(status["store"]["at"], status["at"])
        self.assertEqual([entry["messages"] for entry in status["waiting"]["by_age"]], [2, 0, 0, 0, 0, 0])
        self.assertEqual([entry["messages"] for entry in status["waiting"]["largest"]], [2])
        self.assertEqual(get("/admin/report/2026-01-01/index.html"), (200, b"<p>report</p>"))
        self.assertEqual(get("/admin", "wrong")[0], 401)
        self.token.write_text(TOKEN[::-1])
        os.kill(daemon.pid, signal.SIGHUP)
        daemon.await_output("configuration reloaded")
        self.assertEqual((get("/admin")[0], get("/admin", TOKEN[::-1])[0]), (401, 200))

    async def test_every_worker_serves_the_status_of_all(self) -> None:
        """The status includes what the supervisor has seen."""
        port = find_free_port()
        daemon = self.prepare_admin_daemon(f"tcp:{port}:interface=127.0.0.1", workers=2, node="n")
        daemon.start()
        await deferToThread(await_workers, daemon, 2)
        bob = await enrol_wallet(daemon, reactor)
        for number in range(8):
            for forward in prepare_forwards(bob, f"hello {number}", 1):
                connection = HTTPConnection("127.0.0.1", daemon.port, timeout=PATIENCE_SECONDS)
                headers = {"Content-Type": "application/didcomm-encrypted+json"}
                connection.request("POST", "/didcomm", forward.body, headers)
                self.assertEqual(connection.getresponse().status, 202)
                connection.close()
            connection = HTTPConnection("127.0.0.1", daemon.port, timeout=PATIENCE_SECONDS)
            connection.request("POST", "/didcomm", b"{}")
            self.assertEqual(connection.getresponse().status, 400)
            connection.close()
        status = await deferToThread(
            self.await_status, port, lambda one: one["traffic"]["accepted"]["last_hour"] == 8
        )
        for _ in range(6):
            # A worker that answers late is missing, or counts as it did before.
            status = await deferToThread(
                self.await_status, port, lambda one: one["ok"] and one["traffic"]["accepted"]["total"] == 8
            )
            self.assertEqual(status["node"], "n")
            nodes = [one["node"] for one in status["processes"]["answered"]]
            self.assertEqual((status["processes"]["asked"], nodes), (2, ["n-1", "n-2"]))
            self.assertEqual([one["count"] for one in status["refusals"]], [8])
        os.kill(pid_of(daemon, "n-2"), signal.SIGKILL)
        status = await deferToThread(
            self.await_status,
            port,
            lambda one: one["ok"] and any("was killed by SIGKILL" in warning["text"] for warning in one["warnings"]),
        )
        self.assertEqual(status["traffic"]["accepted"]["total"], 8)
