"""A daemon whose MongoDB server is not there, or does not let it in (UC-021 "failures")."""

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

# From when the server takes writes again; five on a machine that has nothing else to do.
RECOVERY_SECONDS = 60.0
# It is looked at so often.
LOOK_SECONDS = 0.05
AT_ONCE = 8
# What a daemon says of a server that takes its time, as on a machine with other things to do.
LATE = ("no connection to a primary", "no reply", "deadline exceeded")


class OutageTests(SingleMongodTestCase):
    """One server, which comes and goes."""

    async def setUp(self) -> None:  # type: ignore[override]  # trial waits for it
        """A daemon with an account, letters for it, and an identity."""
        await super().setUp()
        self.message_count = [letter.body for letter in prepare_forwards(self.bob, "outage", AT_ONCE)]
        self.alice = await deferToThread(lambda: RawDecentrlClient(DaemonClient(self.daemon), "alice"))
        await deferToThread(self.alice.register)

    async def answers(self, *others: tuple[str, str, bytes | None, str]) -> list[HTTPResponse]:
        """To all letters, and to other requests, which are handed in at the same time."""
        requests = [("POST", "/didcomm", body, ENCRYPTED_MEDIA_TYPE) for body in self.message_count]

        def at_once() -> list[HTTPResponse]:
            with ThreadPoolExecutor(len(requests) + len(others)) as pool:
                return list(pool.map(lambda request: send_request(self.daemon, *request), [*requests, *others]))

        return await deferToThread(at_once)

    async def assert_unavailable(self) -> None:
        """
        Everything that needs the store is refused for now, and the daemon says that the store is why (issue:
        faults).
        """
        others = [
            ("POST", "/", self.alice.command({"type": "QUERY_EVENTS"}), JSON),
            ("POST", "/didcomm", self.bob.pack(f"{PICKUP}/status-request", {})[1], ENCRYPTED_MEDIA_TYPE),
            ("GET", f"/public/{self.alice.did}", None, ""),
            ("GET", "/health", None, ""),
        ]
        for _ in range(2):
            for answered in (answers := await self.answers(*others)):
                self.assertEqual(answered.status, 503, answered.body)
                self.assertGreater(int(answered.headers["retry-after"]), 0)
            self.assertIn("store", answers[-1].body.decode())

    async def assert_recovered(self) -> None:
        """Without a restart, and with nothing of what was refused."""
        await deferToThread(self.servers.primary)
        began = reactor.seconds()
        await deferToThread(self.daemon.await_health)
        self.assertLess(reactor.seconds() - began, RECOVERY_SECONDS)
        # It may be well a moment before the last of that is undone.
        while (await self.bob.status()).message_count:
            self.assertLess(reactor.seconds() - began, RECOVERY_SECONDS)
            await deferLater(reactor, LOOK_SECONDS)
        self.assertEqual([answered.status for answered in await self.answers()], [202] * AT_ONCE)
        self.assertEqual((await self.bob.status()).message_count, AT_ONCE)

    async def test_no_server_at_start(self) -> None:
        """The daemon comes up all the same, and keeps trying."""
        await deferToThread(self.daemon.stop)
        await deferToThread(self.servers.stop, 0)
        await deferToThread(self.daemon.start, 503)
        await self.assert_unavailable()
        await deferToThread(self.servers.start, 0)
        await self.assert_recovered()
        await deferToThread(self.daemon.stop)

    async def test_the_server_is_killed(self) -> None:
        """And comes back later. Its version is nothing that is complained of."""
        await deferToThread(self.servers.kill, 0)
        await self.assert_unavailable()
        await deferToThread(self.servers.start, 0)
        await self.assert_recovered()
        self.assertNotIn("versions this was tested with", self.daemon.output())

    @pytest.mark.exhaustive
    async def test_the_server_says_nothing(self) -> None:
        """What was asked of it meanwhile it does late, when nobody waits for it any more; it is undone."""
        self.servers.freeze(0)
        await self.assert_unavailable()
        self.servers.thaw(0)
        await self.assert_recovered()


class RefusalTests(SynchronousTestCase):
    """What ends the daemon, and what does not."""

    def run_with(self, uri: str, command: str = "run") -> subprocess.CompletedProcess[str]:
        """A daemon that is expected to end by itself."""
        daemon = make_mongo_daemon(uri)
        self.addCleanup(daemon.clean)
        return subprocess.run(
            [sys.executable, "-m", "mediatord", command, "--config", str(daemon.config)],
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
            check=False,
        )

    def test_a_uri_that_would_not_be_honoured_ends_it(self) -> None:
        """With one line that has no secret in it, whether it is to run or to be checked (issue: at start)."""
        # What is said of a file when it is checked begins with its place.
        for command, beginning in (("run", r"mediatord: "), ("check-config", r"\S+/mediator\.yaml:\d+: ")):
            for uri in (
                "mongodb://u:s3cret@127.0.0.1:1/?authSource=admin",
                "mongodb://127.0.0.1:1/m?tlsInsecure=true",
            ):
                ran = self.run_with(uri, command)
                self.assertEqual(ran.returncode, 1, ran.stderr)
                (line,) = ran.stderr.strip().splitlines()
                self.assertRegex(line, rf"^{beginning}storage\.mongodb\.uri: ")
                self.assertNotIn("s3cret", ran.stdout + ran.stderr)

    def test_a_wrong_password_does_not(self) -> None:
        """It can be put right at the server. The log says what is wrong, and nothing secret."""
        with ReplicaSet(auth=Credentials("root", "r00t")) as servers:
            daemon = make_mongo_daemon(servers.uri("mediatord", credentials="root:s3cret"))
            self.addCleanup(daemon.clean)
            daemon.start(503)
            daemon.await_output("rejects the credentials")
            self.assertNotIn("s3cret", daemon.output())
            servers.client["admin"].command("updateUser", "root", pwd="s3cret")
            daemon.await_health()
            daemon.stop()

    @pytest.mark.exhaustive
    def test_a_user_of_the_database_is_enough(self) -> None:
        """With `readWrite` on it and nothing else: to begin, and to take over from a node that was killed."""
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
                self.assertEqual([line for line in errors if not any(late in line for late in LATE)], [])

    def test_a_server_that_is_no_member_of_a_replica_set(self) -> None:
        """Nothing could be stored there as it must; the log says so."""
        with ReplicaSet() as servers:
            daemon = make_mongo_daemon(servers.uri("mediatord", replicaSet="another"))
            self.addCleanup(daemon.clean)
            daemon.start(503)
