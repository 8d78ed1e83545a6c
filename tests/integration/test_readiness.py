"""A daemon says that it is ready, stops saying so when what it says is not so any more, and says it again."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import signal
import socket
import sqlite3
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from unittest import TestCase

import pytest
import yaml

from tests.certificate_authority import CertificateAuthority
from tests.http.in_memory_site import HTTPResponse
from tests.integration.cluster_test_case import ClusterTestCase
from tests.integration.daemon import Daemon
from tests.integration.message_load import prepare_daemon
from tests.integration.process_sockets import duplicate_listening_socket, find_owner, listening_ports
from tests.integration.raw_decentrl_client import send_request_on
from tests.integration.single_mongod import make_mongo_daemon
from tests.mongod_process import mongod_binary
from tests.observability.counter_oracle import read_lines, read_segments
from tests.replica_set import ReplicaSet

# Between questions.
LOOK_SECONDS = 0.2
# A daemon that does not come to say something for so long never will.
PATIENCE_SECONDS = 120.0
# What the daemon's own figures say: after so many milliseconds without success nobody is told that it is ready.
TOO_OLD = 10_000

# Between two segments of the log, unless the daemon was started anew.
_OF_NEW_SEGMENT = ["counters", "log.close", "log.open"]

STAGES = ("store", "listener", "socket", "forward", "push", "acknowledgement")
ONE_OF_EACH = {
    "did_per_minute": 1,
    "ip_per_minute": 1,
    "account_per_minute": 1,
    "max_connections_per_ip": 1,
}


class ReadinessClient:
    """Asks on a connection that stays open, as it may be that nobody gets another."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self._connection = HTTPConnection("127.0.0.1", daemon.port, timeout=PATIENCE_SECONDS)
        self.get("/did")

    @property
    def port(self) -> int:
        """Of this end of it."""
        return int(self._connection.sock.getsockname()[1])

    def get(self, path: str) -> HTTPResponse:
        """What is at a path."""
        return send_request_on(self._connection, "GET", path)

    def metrics(self) -> dict[str, float]:
        """All, by name and labels; none where workers do not answer each other in time."""
        answered = self.get("/metrics")
        samples = _samples(answered.body.decode()) if answered.status == 200 else []
        return {name: float(value) for name, value in samples}

    def until(self, status: int, *details: str) -> dict[str, Any]:
        """
        Ask until `/ready` has this status, and one of these details if any are named; what it says then.

        :raise AssertionError: it does not, or said that it is ready while the last success was too old to count.
        """
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            answered = self.get("/ready")
            if answered.status == 200:
                assert answered.json["age_ms"] < TOO_OLD, answered.json
            if answered.status == status and (not details or answered.json.get("detail") in details):
                return answered.json
            assert time.monotonic() < deadline, f"not {status} {details}: {answered.json}\n{self._daemon.output()}"
            time.sleep(LOOK_SECONDS)

    def close(self) -> None:
        """Ask no more."""
        self._connection.close()


class ReadyTestCase(TestCase):
    def daemon(self, settings: Mapping[str, Any] | None = None, *, listen: tuple[str, ...] = ()) -> Daemon:
        """One that runs; it listens at one more address for each of these."""
        daemon = prepare_daemon(settings)
        self.addCleanup(daemon.clean)
        written = daemon.configuration()
        written["listen"] += listen
        daemon.config.write_text(yaml.safe_dump(written), "utf-8")
        daemon.start()
        return daemon

    def asking(self, daemon: Daemon) -> ReadinessClient:
        """Somebody who asks it."""
        asking = ReadinessClient(daemon)
        self.addCleanup(asking.close)
        return asking


class HealthyDaemonTests(ReadyTestCase):
    """A daemon that is well, whatever its settings are; and nobody sees what it does for that."""

    def directory(self) -> Path:
        """A fresh one."""
        directory = Path(tempfile.mkdtemp(prefix="mediatord-ready-"))
        self.addCleanup(shutil.rmtree, directory)
        return directory

    def events(self, daemon: Daemon) -> list[str]:
        """The names of all events in its log, which has been closed, as if there had been no full hour meanwhile."""
        of_workers = sorted(path for path in daemon.log_directory.iterdir() if path.is_dir())
        found = [sorted(read_segments(one).items()) for one in (daemon.log_directory, *of_workers)]
        names = [json.loads(line)["event"] for segments in found for _, lines in segments for line in lines]
        for place in reversed(range(len(names) - len(_OF_NEW_SEGMENT))):
            after = place + len(_OF_NEW_SEGMENT)
            if names[place:after] == _OF_NEW_SEGMENT and names[after] != "proc.start":
                del names[place:after]
        return names

    def test_every_listener_and_nobody_sees_it(self) -> None:
        """
        TCP, IPv6, TLS of whatever certificate, a UNIX socket and a proxy's, at limits that one message would use up:
        nothing of it is counted, charged or in the log, and the account is one, also after a restart.
        """
        directory = self.directory()
        certificate = CertificateAuthority(directory).issue("elsewhere.example", ["192.0.2.1"])
        listen = (
            f"ssl:0:interface=127.0.0.1:privateKey={certificate}:certKey={certificate}",
            f"unix:{directory / 's'}:mode=600",
            "tcp6:0:interface=\\:\\:1",
            "haproxy:tcp:0:interface=127.0.0.1",
        )
        daemon = self.daemon({"limits": ONE_OF_EACH, "readiness": {"interval": 0.1}}, listen=listen)
        asking = self.asking(daemon)
        for _ in range(3):
            asking.until(200)
        self._await_cycles(asking, 3)
        page = asking.get("/metrics").body.decode()
        values = {name: float(value) for name, value in _samples(page)}
        self.assertEqual(values["mediator_ready"], 1)
        for name in ("forwarded", "stored", "delivered", "expired", "evicted"):
            self.assertEqual(values[f"mediator_messages_{name}_total"], 0, name)
        self.assertEqual(values["mediator_active_connections"], 0)
        told = ("mediator_requests_total{", "mediator_rejected_total{", "mediator_message_queue_size{")
        self.assertEqual([line for line in page.splitlines() if line.startswith(told)], [])
        # It is to end between two cycles: one that is under way would leave its message.
        written = daemon.configuration()
        written["readiness"]["interval"] = 3.0
        daemon.config.write_text(yaml.safe_dump(written), "utf-8")
        daemon.restart()
        asking.close()
        self.asking(daemon).until(200)
        daemon.stop()
        both = ["ledger", "ledger"]
        self.assertEqual(
            self.events(daemon),
            ["log.open", "proc.start", *both, "proc.stop", *both, "counters", "log.close"] * 2,
        )
        books = [line for line in read_lines(daemon.log_directory) if line["event"] == "ledger"]
        for entry in ("accepted", "acknowledged"):
            itself = sum(line.get(f"own_{entry}", 0) for line in books)
            found = {line[f"all_{entry}"] for line in books if line["proto"] == "didcomm"}
            self.assertEqual(max(found), itself)
            self.assertGreaterEqual(itself, 4)
        self.assertEqual({line["difference"] for line in books}, {0})
        with closing(sqlite3.connect(daemon.directory / "mediator.sqlite3")) as connection:
            self.assertEqual(connection.execute("SELECT count(*) FROM account").fetchone(), (1,))
            self.assertEqual(connection.execute("SELECT count(*) FROM message").fetchone(), (0,))
        self.assertEqual([said for said in ("_Factory", "HTTP11") if said in daemon.output()], [])

    def _await_cycles(self, asking: ReadinessClient, count: int) -> None:
        name = "mediator_ready_cycle_duration_seconds_count"
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not (values := asking.metrics()) or values[name] < count:
            assert time.monotonic() < deadline, values.get(name)
            asking.until(200)

    def _await_all_metrics(self, asking: ReadinessClient, workers: int) -> dict[str, float]:
        """Metrics of so many workers; one that is late is not in them."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not (values := asking.metrics()) or values["mediator_workers_answered"] != workers:
            assert time.monotonic() < deadline, values.get("mediator_workers_answered")
            asking.until(200)
        return values

    def test_settings_that_change_what_is_delivered(self) -> None:
        """A list of who may have an account, registered senders only, other forms of pushes and payloads."""
        allowed = {"registration": "allow-list", "allow": ["did:web:a.example"], "require_registered_sender": True}
        for didcomm in (
            {**allowed, "rewrap": True},
            {"live_push": "raw", "rewrap": True, "live_default_on": True},
            {"live_push": "raw", "legacy_draft03": True},
            {"delivery_form": "base64", "delivery_limit": 1, "max_recipients": 1, "failover": "account-did"},
        ):
            daemon = self.daemon({"didcomm": didcomm, "storage": {"backend": "memory"}})
            self.asking(daemon).until(200)
            daemon.stop()

    def test_several_workers(self) -> None:
        """Each of them by whichever takes the connection, and still nobody sees it."""
        daemon = self.daemon({"workers": 2, "readiness": {"interval": 0.01}, "limits": ONE_OF_EACH})
        asking = self.asking(daemon)
        asking.until(200)
        self._await_cycles(asking, 20)
        values = self._await_all_metrics(asking, 2)
        counted = ("messages_forwarded", "messages_stored", "messages_delivered")
        self.assertEqual([values[f"mediator_{name}_total"] for name in counted], [0, 0, 0])
        self.assertEqual(values["mediator_active_connections"], 0)
        self.assertGreater(values['mediator_cluster_pushes_total{outcome="pushed"}'], 0)
        daemon.stop()
        told = {"log.open", "proc.start", "proc.stop", "ledger", "counters", "log.close"}
        self.assertEqual(set(self.events(daemon)), told)

    def test_a_message_that_is_left(self) -> None:
        """Killed at any time, the daemon that comes next is ready."""
        daemon = self.daemon({"readiness": {"interval": 0.001}})
        for _ in range(3):
            self.asking(daemon).until(200)
            daemon.kill()
            daemon.start()
        self.asking(daemon).until(200)

    def test_stopping_does_not_wait_for_it(self) -> None:
        """While cycles are held up by the store, the daemon stops in order."""
        daemon = self.daemon()
        asking = self.asking(daemon)
        asking.until(200)
        with _locked(daemon):
            asking.until(503, "store")
            daemon.stop()
        self.assertNotIn("readiness did not stop", daemon.output())


class NodesTests(ClusterTestCase):
    """Nodes of a cluster, each of which has an account of its own."""

    def test_each_of_them(self) -> None:
        """Is ready by its own listener; tests before this one may have asked these nodes already."""
        accounts = self.cluster.servers.client[self.cluster.database]["accounts"]
        numbers = []
        for _ in range(2):
            for node in self.cluster.nodes:
                asking = ReadinessClient(node)
                self.addCleanup(asking.close)
                asking.until(200)
            numbers.append(accounts.count_documents({}))
        self.assertGreaterEqual(numbers[0], len(self.cluster.nodes))
        self.assertEqual(numbers[1], numbers[0])


class StoreTests(ReadyTestCase):
    def test_a_locked_file(self) -> None:
        """Nothing can be kept while somebody else holds the file."""
        daemon = self.daemon()
        asking = self.asking(daemon)
        asking.until(200)
        with _locked(daemon):
            asking.until(503, "store")
        self.assertGreaterEqual(asking.until(200)["cycle_ms"], 0)

    def test_a_table_is_gone(self) -> None:
        """Messages cannot be kept, though the store answers and keeps other things: `/health` sees nothing of it."""
        daemon = self.daemon()
        asking = self.asking(daemon)
        asking.until(200)
        database = daemon.directory / "mediator.sqlite3"
        with closing(sqlite3.connect(database, timeout=PATIENCE_SECONDS, isolation_level=None)) as connection:
            connection.execute("PRAGMA legacy_alter_table = ON")
            connection.execute("ALTER TABLE message RENAME TO missing")
            asking.until(503, "store")
            self.assertEqual(asking.get("/health").status, 200)
            connection.execute("ALTER TABLE missing RENAME TO message")
        asking.until(200)

    @pytest.mark.exhaustive
    def test_a_frozen_server(self) -> None:
        """MongoDB keeps its connections and says nothing, and then goes on; or is not there, and comes back."""
        mongod_binary()
        servers = ReplicaSet()
        self.addCleanup(servers.close)
        servers.open()
        daemon = make_mongo_daemon(servers.uri("mediatord"))
        self.addCleanup(daemon.clean)
        daemon.start()
        asking = self.asking(daemon)
        asking.until(200)
        servers.freeze(0)
        try:
            asking.until(503, "store")
        finally:
            servers.thaw(0)
        asking.until(200)
        servers.kill(0)
        asking.until(503, "store")
        servers.start(0)
        asking.until(200)


class ListenerFailureTests(ReadyTestCase):
    """The way of a message into the daemon and to its recipient; the store is well, and so is `/health`."""

    def test_a_deaf_listener(self) -> None:
        """One of two listening sockets is shut down under the daemon: connections that are open are served on."""
        daemon = self.daemon(listen=("tcp:0:interface=127.0.0.1",))
        asking = self.asking(daemon)
        asking.until(200)
        with duplicate_listening_socket(daemon.pid, listening_ports(daemon.pid) - {daemon.port}) as listener:
            listener.shutdown(socket.SHUT_RDWR)
        asking.until(503, "listener")
        self.assertEqual(asking.get("/health").status, 200)

    def test_no_more_descriptors(self) -> None:
        """Nobody gets a connection any more; then they do again."""
        daemon = self.daemon()
        asking = self.asking(daemon)
        asking.until(200)
        _, hard = resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE)
        before = resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (3, hard))
        asking.until(503, "listener", "socket")
        self.assertEqual(asking.get("/health").status, 200)
        resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, before)
        asking.until(200)

    @pytest.mark.exhaustive
    def test_a_worker_that_hangs(self) -> None:
        """The kernel takes connections for one of two, which does nothing: the other one sees it. Then it goes on."""
        daemon = self.daemon({"workers": 2})
        asking = self.asking(daemon)
        asking.until(200)
        children = Path(f"/proc/{daemon.pid}/task/{daemon.pid}/children").read_text("ascii")
        pids = {int(pid) for pid in children.split()}
        (other,) = pids - {find_owner(asking.port, daemon.port, pids)}
        os.kill(other, signal.SIGSTOP)
        try:
            # Whatever it was to do for the message; or it was stopped while it held the database.
            asking.until(503, *STAGES)
        finally:
            os.kill(other, signal.SIGCONT)
        asking.until(200)


def _samples(page: str) -> list[tuple[str, str]]:
    lines = [line for line in page.splitlines() if not line.startswith("#")]
    return [(name, value) for name, _, value in (line.rpartition(" ") for line in lines)]


@contextlib.contextmanager
def _locked(daemon: Daemon) -> Iterator[None]:
    """Somebody else writes to its file all the time."""
    database = daemon.directory / "mediator.sqlite3"
    with closing(sqlite3.connect(database, timeout=PATIENCE_SECONDS, isolation_level=None)) as connection:
        connection.execute("BEGIN EXCLUSIVE")
        yield
        connection.execute("ROLLBACK")
