"""A daemon whose MongoDB server is missing, or refuses it (UC-021 "failures")."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from twisted.internet import reactor as _reactor  # noqa: TID251  the daemon is a child process, its sockets are real
from twisted.internet.task import deferLater
from twisted.internet.threads import deferToThread
from twisted.trial.unittest import SynchronousTestCase

from mediatord.protocol.didcomm.jwe import ENCRYPTED_MEDIA_TYPE
from mediatord.wallet.didcomm_client import PICKUP
from tests.http.in_memory_site import HTTPResponse
from tests.integration.cluster import DaemonCluster
from tests.integration.message_load import PATIENCE_SECONDS, prepare_forwards
from tests.integration.raw_decentrl_client import JSON, DaemonClient, RawDecentrlClient
from tests.integration.single_mongod import SingleMongodTestCase, make_mongo_daemon, send_request
from tests.replica_set import Credentials, ReplicaSet

reactor: Any = _reactor

# Time from when the server accepts writes; five seconds on an idle machine.
RECOVERY_SECONDS = 60.0
# Interval of polling.
POLL_SECONDS = 0.05
CONCURRENT_REQUESTS = 8
# Log lines about a server that is slow, as on a busy machine.
SLOW_SERVER_LINES = ("no connection to a primary", "no reply", "deadline exceeded")


class OutageTests(SingleMongodTestCase):
    """One server that is stopped and started."""

    async def setUp(self) -> None:  # type: ignore[override]  # trial waits for it
        """A daemon with an account, forwards for it, and an identity."""
        await super().setUp()
        self.bodies = [forward.body for forward in prepare_forwards(self.bob, "outage", CONCURRENT_REQUESTS)]
        self.alice = await deferToThread(lambda: RawDecentrlClient(DaemonClient(self.daemon), "alice"))
        await deferToThread(self.alice.register)

    async def send_concurrently(self, *other_requests: tuple[str, str, bytes | None, str]) -> list[HTTPResponse]:
        """Send all forwards and other requests at the same time; return the responses."""
        requests = [("POST", "/didcomm", body, ENCRYPTED_MEDIA_TYPE) for body in self.bodies]

        def send_all() -> list[HTTPResponse]:
            with ThreadPoolExecutor(len(requests) + len(other_requests)) as pool:
                return list(
                    pool.map(lambda request: send_request(self.daemon, *request), [*requests, *other_requests])
                )

        return await deferToThread(send_all)

    async def assert_unavailable(self) -> None:
        """Everything that needs the store is refused for now, and health names the store (issue: faults)."""
        other_requests = [
            ("POST", "/", self.alice.command({"type": "QUERY_EVENTS"}), JSON),
            ("POST", "/didcomm", self.bob.pack(f"{PICKUP}/status-request", {})[1], ENCRYPTED_MEDIA_TYPE),
            ("GET", f"/public/{self.alice.did}", None, ""),
            ("GET", "/health", None, ""),
        ]
        for _ in range(2):
            for response in (responses := await self.send_concurrently(*other_requests)):
                self.assertEqual(response.status, 503, response.body)
                self.assertGreater(int(response.headers["retry-after"]), 0)
            self.assertIn("store", responses[-1].body.decode())

    async def assert_recovered(self) -> None:
        """Without a restart, and without anything that was refused."""
        await deferToThread(self.servers.primary)
        start = reactor.seconds()
        await deferToThread(self.daemon.await_health)
        self.assertLess(reactor.seconds() - start, RECOVERY_SECONDS)
        # It may be healthy a moment before the last write is undone.
        while (await self.bob.status()).message_count:
            self.assertLess(reactor.seconds() - start, RECOVERY_SECONDS)
            await deferLater(reactor, POLL_SECONDS)
        self.assertEqual(
            [response.status for response in await self.send_concurrently()], [202] * CONCURRENT_REQUESTS
        )
        self.assertEqual((await self.bob.status()).message_count, CONCURRENT_REQUESTS)

    async def test_starts_without_server(self) -> None:
        """The daemon starts and keeps connecting."""
        await deferToThread(self.daemon.stop)
        await deferToThread(self.servers.stop, 0)
        await deferToThread(self.daemon.start, 503)
        await self.assert_unavailable()
        await deferToThread(self.servers.start, 0)
        await self.assert_recovered()
        await deferToThread(self.daemon.stop)

    async def test_recovers_from_killed_server(self) -> None:
        """The server restarts later; its version is accepted."""
        await deferToThread(self.servers.kill, 0)
        await self.assert_unavailable()
        await deferToThread(self.servers.start, 0)
        await self.assert_recovered()
        self.assertNotIn("is untested with", self.daemon.output())

    @pytest.mark.exhaustive
    async def test_undoes_writes_of_frozen_server(self) -> None:
        """Writes that the server carries out after the deadline are undone."""
        self.servers.freeze(0)
        await self.assert_unavailable()
        self.servers.thaw(0)
        await self.assert_recovered()


class RefusalTests(SynchronousTestCase):
    """Errors that end the daemon, and errors that do not."""

    def run_with_uri(self, uri: str) -> subprocess.CompletedProcess[str]:
        """Run a daemon that is expected to end."""
        daemon = make_mongo_daemon(uri)
        self.addCleanup(daemon.clean)
        return subprocess.run(
            [sys.executable, "-m", "mediatord", "run", "--config", str(daemon.config)],
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
            check=False,
        )

    def test_unsupported_uri_ends_the_daemon(self) -> None:
        """One line without secrets (issue: at start)."""
        result = self.run_with_uri("mongodb://u:s3cret@127.0.0.1:1/?authSource=admin")
        self.assertEqual(result.returncode, 1, result.stderr)
        (line,) = result.stderr.strip().splitlines()
        self.assertRegex(line, r"^mediatord: storage\.mongodb\.uri: ")
        self.assertNotIn("s3cret", result.stdout + result.stderr)

    @pytest.mark.exhaustive
    def test_read_write_role_is_sufficient(self) -> None:
        """`readWrite` on the database, to start and to take over from a killed node."""
        with ReplicaSet(auth=Credentials("root", "r00t")) as servers:
            roles = [{"role": "readWrite", "db": "mediatord"}]
            servers.client["mediatord"].command("createUser", "m", pwd="s3cret", roles=roles)
            cluster = DaemonCluster(
                servers.uri("mediatord", credentials="m:s3cret", authSource="mediatord"), ("a", "b")
            )
            self.addCleanup(cluster.clean)
            cluster.start()
            cluster.nodes[1].kill()
            cluster.nodes[1].start()
            cluster.stop()
            for node in cluster.nodes:
                errors = [line for line in node.output().splitlines() if "#error" in line]
                self.assertEqual(
                    [
                        line
                        for line in errors
                        if not any(slow_server_lines in line for slow_server_lines in SLOW_SERVER_LINES)
                    ],
                    [],
                )
