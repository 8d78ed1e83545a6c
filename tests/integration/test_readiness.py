"""`/ready` reports ready, stops doing so on failures, and recovers."""

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

# Interval of polling.
POLL_SECONDS = 0.2
# Longer than any change of the verdict takes.
PATIENCE_SECONDS = 120.0
# Milliseconds without success after which the daemon must not be ready.
MAX_AGE_MS = 10_000

# Events between two segments, unless the daemon was restarted.
_ROTATION_EVENTS = ["counters", "log.close", "log.open"]

STAGES = ("store", "listener", "socket", "forward", "push", "acknowledgement")
ONE_OF_EACH = {
    "did_per_minute": 1,
    "ip_per_minute": 1,
    "account_per_minute": 1,
    "max_connections_per_ip": 1,
}


class ReadinessClient:
    """Client with a persistent connection, as new ones may be refused."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self._connection = HTTPConnection("127.0.0.1", daemon.port, timeout=PATIENCE_SECONDS)
        self.get("/did")

    @property
    def port(self) -> int:
        """Local port of the connection."""
        return int(self._connection.sock.getsockname()[1])

    def get(self, path: str) -> HTTPResponse:
        """GET a path."""
        return send_request_on(self._connection, "GET", path)

    def metrics(self) -> dict[str, float]:
        """All metrics by name and labels; empty if a worker does not answer in time."""
        response = self.get("/metrics")
        samples = _samples(response.body.decode()) if response.status == 200 else []
        return {name: float(value) for name, value in samples}

    def await_verdict(self, status: int, *details: str) -> dict[str, Any]:
        """
        Poll until `/ready` has this status, and one of these details if given; return the body.

        :raise AssertionError: it does not in time, or was ready with an outdated success.
        """
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            response = self.get("/ready")
            if response.status == 200:
                assert response.json["age_ms"] < MAX_AGE_MS, response.json
            if response.status == status and (not details or response.json.get("detail") in details):
                return response.json
            assert time.monotonic() < deadline, f"not {status} {details}: {response.json}\n{self._daemon.output()}"
            time.sleep(POLL_SECONDS)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


class ReadyTestCase(TestCase):
    def start_daemon(self, settings: Mapping[str, Any] | None = None, *, listen: tuple[str, ...] = ()) -> Daemon:
        """A running daemon with additional listeners."""
        daemon = prepare_daemon(settings)
        self.addCleanup(daemon.clean)
        configuration = daemon.configuration()
        configuration["listen"] += listen
        daemon.config.write_text(yaml.safe_dump(configuration), "utf-8")
        daemon.start()
        return daemon

    def open_client(self, daemon: Daemon) -> ReadinessClient:
        """A client of the daemon."""
        client = ReadinessClient(daemon)
        self.addCleanup(client.close)
        return client


class HealthyDaemonTests(ReadyTestCase):
    """Healthy daemons with various settings; their probes are visible nowhere else."""

    def make_directory(self) -> Path:
        """A temporary directory."""
        directory = Path(tempfile.mkdtemp(prefix="mediatord-ready-"))
        self.addCleanup(shutil.rmtree, directory)
        return directory

    def events(self, daemon: Daemon) -> list[str]:
        """Names of all events in the log of the stopped daemon, without hourly rotations."""
        worker_directories = sorted(path for path in daemon.log_directory.iterdir() if path.is_dir())
        segments_by_directory = [
            sorted(read_segments(directory).items()) for directory in (daemon.log_directory, *worker_directories)
        ]
        names = [
            json.loads(line)["event"] for segments in segments_by_directory for _, lines in segments for line in lines
        ]
        for start in reversed(range(len(names) - len(_ROTATION_EVENTS))):
            end = start + len(_ROTATION_EVENTS)
            if names[start:end] == _ROTATION_EVENTS and names[end] != "proc.start":
                del names[start:end]
        return names

    def test_probes_every_listener_invisibly(self) -> None:
        """
        TCP, IPv6, TLS with any certificate, a UNIX socket and a proxied one, at limits that one message would
        exhaust: probes are not counted, charged or logged, and use one account, also after a restart.
        """
        directory = self.make_directory()
        certificate = CertificateAuthority(directory).issue("elsewhere.example", ["192.0.2.1"])
        listen = (
            f"ssl:0:interface=127.0.0.1:privateKey={certificate}:certKey={certificate}",
            f"unix:{directory / 's'}:mode=600",
            "tcp6:0:interface=\\:\\:1",
            "haproxy:tcp:0:interface=127.0.0.1",
        )
        daemon = self.start_daemon({"limits": ONE_OF_EACH, "readiness": {"interval": 0.1}}, listen=listen)
        client = self.open_client(daemon)
        for _ in range(3):
            client.await_verdict(200)
        self._await_cycles(client, 3)
        values: dict[str, float] = {}
        deadline = time.monotonic() + PATIENCE_SECONDS
        while values.get("mediator_ready") != 1:  # a cycle may have been late
            assert time.monotonic() < deadline, values.get("mediator_ready")
            page = client.get("/metrics").body.decode()
            values = {name: float(value) for name, value in _samples(page)}
        for name in ("forwarded", "stored", "delivered", "expired", "evicted"):
            self.assertEqual(values[f"mediator_messages_{name}_total"], 0, name)
        self.assertEqual(values["mediator_active_connections"], 0)
        told = ("mediator_requests_total{", "mediator_rejected_total{", "mediator_message_queue_size{")
        # The message of a probe in progress is in the sum of all queues, as in the ledger.
        sum_of_queues = 'mediator_message_queue_size{did="other"}'
        recorded = [
            line for line in page.splitlines() if line.startswith(told) and not line.startswith(sum_of_queues)
        ]
        self.assertEqual(recorded, [])
        # Stop it between two cycles: one in progress would leave its message.
        written = daemon.configuration()
        written["readiness"]["interval"] = 3.0
        daemon.config.write_text(yaml.safe_dump(written), "utf-8")
        daemon.restart()
        client.close()
        self.open_client(daemon).await_verdict(200)
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

    def _await_cycles(self, client: ReadinessClient, count: int) -> None:
        name = "mediator_ready_cycle_duration_seconds_count"
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not (values := client.metrics()) or values[name] < count:
            assert time.monotonic() < deadline, values.get(name)
            client.await_verdict(200)

    def _await_all_metrics(self, client: ReadinessClient, workers: int) -> dict[str, float]:
        """Metrics of so many workers; one that is late is not in them."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not (values := client.metrics()) or values["mediator_workers_answered"] != workers:
            assert time.monotonic() < deadline, values.get("mediator_workers_answered")
            client.await_verdict(200)
        return values

    def test_ready_with_restrictive_settings(self) -> None:
        """Access lists, registered senders only, other forms of pushes and payloads."""
        allowed = {"registration": "allow-list", "allow": ["did:web:a.example"], "require_registered_sender": True}
        for didcomm in (
            {**allowed, "rewrap": True},
            {"live_push": "raw", "rewrap": True, "live_default_on": True},
            {"live_push": "raw", "legacy_draft03": True},
            {"delivery_form": "base64", "delivery_limit": 1, "max_recipients": 1, "failover": "account-did"},
        ):
            daemon = self.start_daemon({"didcomm": didcomm, "storage": {"backend": "memory"}})
            self.open_client(daemon).await_verdict(200)
            daemon.stop()

    def test_every_worker_is_probed_invisibly(self) -> None:
        """Each by whichever worker accepts the connection."""
        daemon = self.start_daemon({"workers": 2, "readiness": {"interval": 0.01}, "limits": ONE_OF_EACH})
        client = self.open_client(daemon)
        client.await_verdict(200)
        self._await_cycles(client, 20)
        values = self._await_all_metrics(client, 2)
        counted = ("messages_forwarded", "messages_stored", "messages_delivered")
        self.assertEqual([values[f"mediator_{name}_total"] for name in counted], [0, 0, 0])
        self.assertEqual(values["mediator_active_connections"], 0)
        self.assertGreater(values['mediator_cluster_pushes_total{outcome="pushed"}'], 0)
        daemon.stop()
        told = {"log.open", "proc.start", "proc.stop", "ledger", "counters", "log.close"}
        self.assertEqual(set(self.events(daemon)), told)

    def test_ready_after_kill_with_leftover_probe(self) -> None:
        """The daemon was killed at any time."""
        daemon = self.start_daemon({"readiness": {"interval": 0.001}})
        for _ in range(3):
            self.open_client(daemon).await_verdict(200)
            daemon.kill()
            daemon.start()
        self.open_client(daemon).await_verdict(200)

    def test_stop_does_not_wait_for_probe(self) -> None:
        """While probes are blocked by the store."""
        daemon = self.start_daemon()
        client = self.open_client(daemon)
        client.await_verdict(200)
        with _hold_database_lock(daemon):
            client.await_verdict(503, "store")
            daemon.stop()
        self.assertNotIn("stopping readiness failed", daemon.output())


class NodesTests(ClusterTestCase):
    """Nodes of a cluster, each with its own probe account."""

    def test_every_node_is_ready(self) -> None:
        """Over its own listener; earlier tests may have probed these nodes already."""
        accounts = self.cluster.servers.client[self.cluster.database]["accounts"]
        numbers = []
        for _ in range(2):
            for node in self.cluster.nodes:
                client = ReadinessClient(node)
                self.addCleanup(client.close)
                client.await_verdict(200)
            numbers.append(accounts.count_documents({}))
        self.assertGreaterEqual(numbers[0], len(self.cluster.nodes))
        self.assertEqual(numbers[1], numbers[0])


class StoreTests(ReadyTestCase):
    def test_not_ready_while_database_is_locked(self) -> None:
        """Another process holds the write lock."""
        daemon = self.start_daemon()
        client = self.open_client(daemon)
        client.await_verdict(200)
        with _hold_database_lock(daemon):
            client.await_verdict(503, "store")
        self.assertGreaterEqual(client.await_verdict(200)["cycle_ms"], 0)

    def test_not_ready_while_table_is_missing(self) -> None:
        """Messages cannot be stored although `/health` is fine."""
        daemon = self.start_daemon()
        client = self.open_client(daemon)
        client.await_verdict(200)
        database = daemon.directory / "mediator.sqlite3"
        with closing(sqlite3.connect(database, timeout=PATIENCE_SECONDS, isolation_level=None)) as connection:
            connection.execute("PRAGMA legacy_alter_table = ON")
            connection.execute("ALTER TABLE message RENAME TO missing")
            client.await_verdict(503, "store")
            self.assertEqual(client.get("/health").status, 200)
            connection.execute("ALTER TABLE missing RENAME TO message")
        client.await_verdict(200)

    @pytest.mark.exhaustive
    def test_not_ready_while_mongodb_is_frozen_or_down(self) -> None:
        """Ready again afterwards."""
        mongod_binary()
        servers = ReplicaSet()
        self.addCleanup(servers.close)
        servers.open()
        daemon = make_mongo_daemon(servers.uri("mediatord"))
        self.addCleanup(daemon.clean)
        daemon.start()
        client = self.open_client(daemon)
        client.await_verdict(200)
        servers.freeze(0)
        try:
            client.await_verdict(503, "store")
        finally:
            servers.thaw(0)
        client.await_verdict(200)
        servers.kill(0)
        client.await_verdict(503, "store")
        servers.start(0)
        client.await_verdict(200)


class ListenerFailureTests(ReadyTestCase):
    """Failures of listeners and deliveries, while store and `/health` are fine."""

    def test_not_ready_if_listener_is_shut_down(self) -> None:
        """One of two listening sockets; open connections are still served."""
        daemon = self.start_daemon(listen=("tcp:0:interface=127.0.0.1",))
        client = self.open_client(daemon)
        client.await_verdict(200)
        with duplicate_listening_socket(daemon.pid, listening_ports(daemon.pid) - {daemon.port}) as listener:
            listener.shutdown(socket.SHUT_RDWR)
        client.await_verdict(503, "listener")
        self.assertEqual(client.get("/health").status, 200)

    def test_not_ready_without_file_descriptors(self) -> None:
        """New connections fail; then they succeed again."""
        daemon = self.start_daemon()
        client = self.open_client(daemon)
        client.await_verdict(200)
        _, hard = resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE)
        before = resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (3, hard))
        client.await_verdict(503, "listener", "socket")
        self.assertEqual(client.get("/health").status, 200)
        resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, before)
        client.await_verdict(200)

    @pytest.mark.exhaustive
    def test_not_ready_while_a_worker_hangs(self) -> None:
        """The kernel gives it connections; the other worker notices."""
        daemon = self.start_daemon({"workers": 2})
        client = self.open_client(daemon)
        client.await_verdict(200)
        children = Path(f"/proc/{daemon.pid}/task/{daemon.pid}/children").read_text("ascii")
        pids = {int(pid) for pid in children.split()}
        (other,) = pids - {find_owner(client.port, daemon.port, pids)}
        os.kill(other, signal.SIGSTOP)
        try:
            # Any detail: it may have been suspended while it held the database.
            client.await_verdict(503, *STAGES)
        finally:
            os.kill(other, signal.SIGCONT)
        client.await_verdict(200)


def _samples(page: str) -> list[tuple[str, str]]:
    lines = [line for line in page.splitlines() if not line.startswith("#")]
    return [(name, value) for name, _, value in (line.rpartition(" ") for line in lines)]


@contextlib.contextmanager
def _hold_database_lock(daemon: Daemon) -> Iterator[None]:
    """Another process writes to the database."""
    database = daemon.directory / "mediator.sqlite3"
    with closing(sqlite3.connect(database, timeout=PATIENCE_SECONDS, isolation_level=None)) as connection:
        connection.execute("BEGIN EXCLUSIVE")
        yield
        connection.execute("ROLLBACK")
