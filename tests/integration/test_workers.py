"""A daemon with several workers behind one address, as wallets and operators see it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import ssl
import tempfile
import time
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

import yaml
from prometheus_client.parser import text_string_to_metric_families
from twisted.internet import reactor as _reactor  # noqa: TID251  the daemon is a child process, its sockets are real
from twisted.internet.task import deferLater
from twisted.internet.threads import deferToThread

from mediatord.identity.key_file import create_keys
from mediatord.wallet.didcomm_client import DIDCommWallet
from mediatord.wallet.didcomm_socket import DIDCommSocket
from mediatord.wallet.temporary_daemon import find_free_port
from mediatord.workers.sibling_channel import PUSH_TIMEOUT
from tests.certificate_authority import CertificateAuthority
from tests.integration.cluster import make_mongo_storage
from tests.integration.daemon import STOP_SECONDS, Daemon, merge_settings
from tests.integration.message_load import (
    PATIENCE_SECONDS,
    ROOMY,
    LoadSenders,
    drain_queue,
    enrol_wallet,
    prepare_daemon,
    prepare_forwards,
    read_marker,
)
from tests.integration.sqlite_lock import lock_database
from tests.integration.test_lifecycle import (
    DaemonTestCase,
    config_file,
    port_of,
    run_failing,
    send_request,
    start_process,
)
from tests.notify_socket import NotifySocket

__all__ = ["config_file"]

reactor: Any = _reactor

# Interval of polling.
POLL_SECONDS = 0.05
# Sockets to open until every worker has one; all on one worker has a probability of one in a billion.
MAX_SOCKETS = 32
BEFORE_THE_KILL, BEFORE_THE_END = 100, 600


def metrics(text: bytes) -> dict[str, float]:
    """Each metric summed over its labels."""
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
    return sums


def metrics_at(port: int) -> dict[str, float]:
    """Metrics of a daemon; empty if its workers do not answer in time."""
    status, _, text = send_request(port, "GET", "/metrics")
    return metrics(text) if status == 200 else {}


def workers_of(pid: int) -> set[int]:
    """Child processes of a process."""
    return {int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text("ascii").split()}


def is_running(pid: int) -> bool:
    """Whether a process runs. A zombie counts as ended, once its other threads have ended too."""
    try:
        threads = len(os.listdir(f"/proc/{pid}/task"))
        return threads > 1 or Path(f"/proc/{pid}/stat").read_text("ascii").rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def suspend(pid: int) -> None:
    """Suspend a process; return when all of its threads have stopped. Blocks."""
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while any(
        path.read_text("ascii").rpartition(")")[2].split()[0] != "T"
        for path in Path(f"/proc/{pid}/task").glob("*/stat")
    ):
        assert time.monotonic() < deadline, "it does not stop"
        time.sleep(POLL_SECONDS)


def await_no_unacknowledged_pushes(daemon: Daemon) -> None:
    """Wait until no worker remembers a push that is not acknowledged; blocks."""
    wanted = {'mediator_buffer_entries{buffer="live_pushes"} 0.0', "mediator_workers_answered 2.0"}
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not wanted <= set(send_request(daemon.port, "GET", "/metrics")[2].decode().splitlines()):
        assert time.monotonic() < deadline, "a push is still remembered"
        time.sleep(POLL_SECONDS)


def count_listeners(port: int) -> int:
    """Number of sockets that listen on a port."""
    lines = Path("/proc/net/tcp").read_text("ascii").splitlines()
    return sum(1 for line in lines if line.split()[1].endswith(f":{port:04X}") and line.split()[3] == "0A")


def wait_until_ended(*pids: int) -> None:
    """
    Wait until none of these processes runs.

    :raise AssertionError: one still does.
    """
    deadline = time.monotonic() + STOP_SECONDS
    while running := [pid for pid in pids if is_running(pid)]:
        assert time.monotonic() < deadline, f"still there: {running}"
        time.sleep(POLL_SECONDS)


def await_workers(daemon: Daemon, count: int) -> None:
    """
    Wait until `count` workers serve.

    :raise AssertionError: they do not in time.
    """
    await_metrics(daemon.port, mediator_workers_answered=count)


def await_metrics(port: int, **expected: float) -> dict[str, float]:
    """
    Wait until metrics have these values; the metrics of a worker that is late are missing.

    :return: all metrics.
    :raise AssertionError: they have not.
    """
    deadline = time.monotonic() + PATIENCE_SECONDS
    while (values := metrics_at(port)) | expected != values:
        assert time.monotonic() < deadline, {name: values.get(name) for name in expected}
        time.sleep(POLL_SECONDS)
    return values


def count_connections(daemon: Daemon) -> dict[str, int]:
    """Connections opened at each node, from its event log."""
    counts: dict[str, int] = {}
    for path in daemon.log_directory.glob("*/events*.jsonl"):
        lines = path.read_text("utf-8").splitlines()
        counts[path.parent.name] = counts.get(path.parent.name, 0) + sum('"conn.open"' in line for line in lines)
    return counts


def try_read_did(daemon: Daemon) -> bytes | None:
    """The DID served by any worker; None if that has just ended."""
    with contextlib.suppress(OSError, HTTPException):
        return send_request(daemon.port, "GET", "/did")[2]
    return None


def pid_of(daemon: Daemon, node: str) -> int:
    """Process id of the current worker of this name, from the supervisor's output."""
    lines = [line for line in daemon.output().splitlines() if f"started worker {node}, process " in line]
    return int(lines[-1].rpartition(" ")[2])


class WorkersTests(DaemonTestCase):
    def start_workers(self, settings: dict[str, Any] | None = None) -> Daemon:
        """A daemon of two workers that serve."""
        # Event logs are read, so they must not be compressed meanwhile.
        defaults = {"workers": 2, "node": "n", "log": {"rotate": {"compress": False}}}
        daemon = self.start_daemon(merge_settings(defaults, settings or {}))
        await_workers(daemon, 2)
        return daemon

    async def open_socket_at_each_worker(self, daemon: Daemon, *wallets: DIDCommWallet) -> dict[str, DIDCommSocket]:
        """A live socket for each wallet, on different workers, by node name."""
        sockets: dict[str, DIDCommSocket] = {}
        for _ in range(MAX_SOCKETS):
            counts_before = count_connections(daemon)
            socket = await self.open_socket(wallets[len(sockets)])
            await socket.live()
            (node,) = [
                node for node, count in count_connections(daemon).items() if count > counts_before.get(node, 0)
            ]
            if node in sockets:
                await socket.close()
            else:
                sockets[node] = socket
            if len(sockets) == len(wallets):
                return sockets
        raise AssertionError(f"all on one worker: {count_connections(daemon)}")

    async def test_pushes_between_workers(self) -> None:
        """Wallets on different workers exchange messages, and the metrics cover all workers."""
        daemon = self.start_workers()
        alice, bob = await enrol_wallet(daemon, reactor), await enrol_wallet(daemon, reactor)
        sockets = await self.open_socket_at_each_worker(daemon, alice, bob)
        alice_socket, bob_socket = sockets.values()
        for number in range(3):
            for sender, forward, recipient in (
                (alice_socket, prepare_forwards(bob, f"to bob {number}", 1)[0], bob_socket),
                (bob_socket, prepare_forwards(alice, f"to alice {number}", 1)[0], alice_socket),
            ):
                sender.send_frame(forward.body)
                delivered = await recipient.pushed.get().addTimeout(PATIENCE_SECONDS, reactor)
                self.assertEqual(read_marker(recipient.wallet, delivered), forward.marker)
                await recipient.acknowledge([delivered])
        for _ in range(4):  # any worker may answer
            await_metrics(
                daemon.port,
                mediator_messages_forwarded_total=6,
                mediator_messages_delivered_total=6,
                mediator_active_connections=2,
                mediator_storage_up=1,
                mediator_build_info=1,
            )
        (directory,) = self.socket_directories(daemon)
        modes = {path.stat().st_mode & 0o777 for path in (directory, *directory.glob("*.sock"))}
        self.assertEqual(modes, {0o700, 0o600})
        await self.stop(daemon)
        self.assertEqual([await alice_socket.closed(), await bob_socket.closed()], [1001, 1001])

    async def test_acknowledgement_at_another_worker(self) -> None:
        """It is recorded once, and the worker that has pushed the message forgets it."""
        daemon = self.start_workers()
        alice, bob = await enrol_wallet(daemon, reactor), await enrol_wallet(daemon, reactor)
        sockets = await self.open_socket_at_each_worker(daemon, alice, bob)
        (there, alice_socket), (_, bob_socket) = sockets.items()
        for _ in range(MAX_SOCKETS):
            before = count_connections(daemon)
            beside = await self.open_socket(bob)
            await beside.live(False)
            if count_connections(daemon).get(there, 0) > before.get(there, 0):
                break
        (forward,) = prepare_forwards(bob, "m", 1)
        alice_socket.send_frame(forward.body)
        delivered = await bob_socket.pushed.get().addTimeout(PATIENCE_SECONDS, reactor)
        await beside.acknowledge([delivered])
        # The other worker is told after the answer, and must not learn first that the socket is closed.
        await deferToThread(await_no_unacknowledged_pushes, daemon)
        await bob_socket.close()
        self.assertEqual(await drain_queue(bob), {})
        await self.stop(daemon)
        lines = [
            (path.parent.name, json.loads(line))
            for path in daemon.log_directory.glob("*/events*.jsonl")
            for line in path.read_text("utf-8").splitlines()
        ]
        self.assertEqual([node for node, line in lines if line["event"] == "msg.ack"], [there])
        self.assertEqual([line["ok"] for _, line in lines if line["event"] == "msg.push"], [True])

    async def test_pushes_between_workers_on_mongodb(self) -> None:
        """Workers share a MongoDB database."""
        daemon = self.start_workers({"storage": make_mongo_storage(self)})
        alice, bob = await enrol_wallet(daemon, reactor), await enrol_wallet(daemon, reactor)
        alice_socket, bob_socket = (await self.open_socket_at_each_worker(daemon, alice, bob)).values()
        for sender, recipient in ((alice_socket, bob_socket), (bob_socket, alice_socket)):
            (forward,) = prepare_forwards(recipient.wallet, "pushed", 1)
            sender.send_frame(forward.body)
            delivered = await recipient.pushed.get().addTimeout(PATIENCE_SECONDS, reactor)
            self.assertEqual(read_marker(recipient.wallet, delivered), forward.marker)
            await recipient.acknowledge([delivered])
        await self.stop(daemon)

    def test_refuses_database_in_use(self) -> None:
        """By a daemon with or without workers, even if its sockets are not visible: one line, and no harm is done."""
        for daemon, numbers in ((self.start_workers(), (1, 2)), (self.start_daemon(), (1,))):
            second_daemon = prepare_daemon()
            self.addCleanup(second_daemon.clean)
            database = daemon.directory / "mediator.sqlite3"
            settings = merge_settings(second_daemon.configuration(), {"storage": {"sqlite": {"path": str(database)}}})
            second_daemon.config.write_text(yaml.safe_dump(settings), "utf-8")
            for number in numbers:
                status, lines = run_failing("run", with_two_workers(second_daemon.config, workers=number))
                line = f"mediatord: cannot use the database {database}: another daemon uses it"
                self.assertEqual((status, lines), (1, [line]))
            self.assertFalse(second_daemon.log_directory.exists(), second_daemon.log_directory)
            daemon.await_health()
            daemon.stop()

    def test_names_the_daemon_that_uses_the_database(self) -> None:
        """On one MongoDB database: the line names it, as no cluster secret could be corrected."""
        storage = make_mongo_storage(self)
        self.start_workers({"storage": storage})
        second_daemon = prepare_daemon({"storage": storage})
        self.addCleanup(second_daemon.clean)
        status, lines = run_failing("run", with_two_workers(second_daemon.config, node="q"))
        line = "mediatord: workers: processes other than the workers of this daemon use this database: n-1, n-2"
        self.assertEqual((status, lines), (1, [line]))

    def test_replacement_worker_keeps_keys(self) -> None:
        """Even if the key file has changed."""
        daemon = self.start_workers()
        did = send_request(daemon.port, "GET", "/did")[2]
        keys = daemon.directory / "keys.jwks"
        keys.unlink()
        create_keys(keys)
        os.kill(pid_of(daemon, "n-1"), signal.SIGKILL)
        daemon.await_output("was killed by SIGKILL")
        await_workers(daemon, 2)
        self.assertEqual({try_read_did(daemon) for _ in range(MAX_SOCKETS)} - {None}, {did})

    async def test_killed_worker_loses_nothing(self) -> None:
        """
        Its sockets close and reconnect, its replacement serves, no accepted message is lost or duplicated, and no
        counter decreases.
        """
        daemon = self.start_workers(ROOMY)
        alice, bob = await enrol_wallet(daemon, reactor), await enrol_wallet(daemon, reactor)
        forwards = prepare_forwards(bob, "load", BEFORE_THE_END)
        sockets = await self.open_socket_at_each_worker(daemon, alice, bob)
        (staying_socket, alice_socket), (closing_socket, bob_socket) = sockets.items()
        victim = pid_of(daemon, closing_socket)
        senders = LoadSenders(daemon.port, forwards)
        senders.start()
        await deferToThread(senders.wait_for_answers, BEFORE_THE_KILL)
        before = await deferToThread(await_metrics, daemon.port, mediator_workers_answered=2)
        os.kill(victim, signal.SIGKILL)
        self.assertEqual(await bob_socket.closed().addTimeout(PATIENCE_SECONDS, reactor), 1006)
        await deferToThread(senders.join)
        await deferToThread(await_workers, daemon, 2)
        self.assertNotEqual(pid_of(daemon, closing_socket), victim)
        self.assertEqual(len(workers_of(daemon.pid)), 2)
        self.assertIsNone(alice_socket.close_code)
        after = await deferToThread(await_metrics, daemon.port, mediator_workers_answered=2)
        decreased = [name for name in before if name.endswith("_total") and after[name] < before[name]]
        self.assertEqual(decreased, [])
        drained = await drain_queue(bob)
        accepted = set(senders.markers(202))
        self.assertGreaterEqual(len(accepted), BEFORE_THE_KILL)
        self.assertEqual(accepted - set(drained), set())
        self.assertEqual(set(drained) - accepted - set(senders.markers(None)), set())
        self.assertEqual([marker for marker, ids in drained.items() if len(ids) != 1], [])
        self.assertIn("was killed by SIGKILL", daemon.output())
        socket_again = await self.open_socket_at_each_worker(daemon, alice, bob)
        self.assertEqual(set(socket_again), {staying_socket, closing_socket})
        await self.stop(daemon)

    async def test_stopped_worker_stalls_nobody(self) -> None:
        """The other worker accepts messages for its sockets, which get each of them once when it goes on."""
        daemon = self.start_workers()
        alice, bob = await enrol_wallet(daemon, reactor), await enrol_wallet(daemon, reactor)
        sockets = await self.open_socket_at_each_worker(daemon, alice, bob)
        (_, alice_socket), (stopping, bob_socket) = sockets.items()
        forwards = prepare_forwards(bob, "for later", 3)
        victim = pid_of(daemon, stopping)
        try:
            # Not while it holds the lock of the database, for which the other one would wait in vain.
            with lock_database(daemon.directory / "mediator.sqlite3"):
                await deferToThread(suspend, victim)
            for forward in forwards:
                alice_socket.send_frame(forward.body)
                await alice_socket.live()
            await deferLater(reactor, PUSH_TIMEOUT + 1.0)
        finally:
            os.kill(victim, signal.SIGCONT)
        markers = []
        for _ in forwards:
            delivered = await bob_socket.pushed.get().addTimeout(PATIENCE_SECONDS, reactor)
            markers.append(read_marker(bob, delivered))
            await bob_socket.acknowledge([delivered])
        self.assertEqual(sorted(markers), [forward.marker for forward in forwards])
        self.assertEqual(await drain_queue(bob), {})
        self.assertEqual(bob_socket.pushed.pending, [])
        await self.stop(daemon)

    async def test_killed_supervisor_leaves_no_process(self) -> None:
        """The next daemon starts without obstacles."""
        daemon = self.start_workers()
        pids = workers_of(daemon.pid)
        wallet = await enrol_wallet(daemon, reactor)
        idle = await self.open_socket(wallet)
        (forward,) = prepare_forwards(wallet, "kept", 1)
        self.assertEqual(send_request(daemon.port, "POST", "/didcomm", forward.body)[0], 202)
        (directory,) = self.socket_directories(daemon)
        await deferToThread(daemon.kill)
        await deferToThread(wait_until_ended, *pids)
        self.assertEqual(await idle.closed().addTimeout(PATIENCE_SECONDS, reactor), 1006)
        self.assertEqual(count_listeners(daemon.port), 0)
        self.assertFalse(directory.exists())
        daemon.start()
        await deferToThread(await_workers, daemon, 2)
        self.assertEqual(list(await drain_queue(wallet)), [forward.marker])
        await self.stop(daemon)

    def socket_directories(self, daemon: Daemon) -> set[Path]:
        """Directories of the workers' node-to-node sockets."""
        lines = Path("/proc/net/unix").read_text("ascii").splitlines()
        paths = {Path(line.split()[-1]) for line in lines if "mediatord-workers-" in line}
        mine = {f"worker n-{number}" for number in (1, 2)}
        assert all(name in daemon.output() for name in mine)
        return {path.parent for path in paths if path.name == "1.sock" and is_bound_by(path, workers_of(daemon.pid))}

    async def test_all_workers_serve_listeners_and_obey_signals(self) -> None:
        """TCP, TLS and a UNIX socket; SIGHUP rotates every log; SIGTERM ends all in order."""
        directory = Path(tempfile.mkdtemp(prefix="mediatord-workers-test-"))
        self.addCleanup(shutil.rmtree, directory)
        certificate = CertificateAuthority(directory).issue("localhost", ["127.0.0.1"])
        path, tls = directory / "s", find_free_port()
        keys = f"privateKey={certificate}:certKey={certificate}"
        daemon = prepare_daemon()
        self.addCleanup(daemon.clean)
        plain = f"tcp:{daemon.port}:interface=127.0.0.1"
        with_two_workers(
            daemon.config, listen=[plain, f"ssl:{tls}:interface=127.0.0.1:{keys}", f"unix:{path}:mode=600"]
        )
        daemon.start()
        await deferToThread(await_workers, daemon, 2)
        context = ssl.create_default_context(cafile=directory / "Test-Authority.pem")
        for _ in range(8):
            with (
                socket.create_connection(("127.0.0.1", tls)) as raw,
                context.wrap_socket(raw, server_hostname="127.0.0.1") as secure,
            ):
                self.assertEqual(health_over(secure), 200)
            with socket.socket(socket.AF_UNIX) as local:
                local.connect(str(path))
                self.assertEqual(health_over(local), 200)
        self.assertEqual(path.stat().st_mode & 0o777, 0o600)
        os.kill(daemon.pid, signal.SIGHUP)
        while not all(list((daemon.log_directory / node).glob("events-*.gz")) for node in ("n-1", "n-2")):
            await deferLater(reactor, POLL_SECONDS, lambda: None)
        pids = workers_of(daemon.pid)
        (sockets,) = self.socket_directories(daemon)
        idle = await self.open_socket(await enrol_wallet(daemon, reactor))
        await self.stop(daemon)
        self.assertEqual(await idle.closed(), 1001)
        self.assertEqual((len(pids), [pid for pid in pids if is_running(pid)]), (2, []))
        self.assertEqual((count_listeners(daemon.port), path.exists(), sockets.exists()), (0, False, False))
        self.assertNotIn("ended with status", daemon.output())
        for node in ("n-1", "n-2"):
            segment = max((daemon.log_directory / node).glob("events*.jsonl"))
            events = [json.loads(line)["event"] for line in segment.read_text("utf-8").splitlines()]
            self.assertEqual((events[0], events[-1]), ("log.open", "log.close"))
            self.assertIn("proc.stop", events)


def is_bound_by(path: Path, pids: set[int]) -> bool:
    """Whether a UNIX socket was bound by one of these processes."""
    lines = Path("/proc/net/unix").read_text("ascii").splitlines()
    inodes = {f"socket:[{line.split()[6]}]" for line in lines if line.endswith(str(path))}
    for pid in pids:
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if os.readlink(descriptor) in inodes:
                    return True
    return False


def health_over(connection: socket.socket) -> int:
    """Status of `GET /health` on a connection."""
    connection.settimeout(PATIENCE_SECONDS)
    http = HTTPConnection("localhost")
    http.sock = connection
    http.request("GET", "/health")
    return http.getresponse().status


def with_two_workers(config: Path, **more: Any) -> Path:
    """The configuration with two workers."""
    settings = merge_settings(yaml.safe_load(config.read_text("utf-8")), {"workers": 2, "node": "n", **more})
    config.write_text(yaml.safe_dump(settings), "utf-8")
    return config


def test_port_in_use_is_reported_once(config_file: Path) -> None:
    """One line, from one process, before there are others."""
    port = port_of(config_file)
    with socket.create_server(("127.0.0.1", port)):
        status, lines = run_failing("run", with_two_workers(config_file))
    assert status == 1
    assert lines == [f"mediatord: cannot listen on tcp:{port}:interface=127.0.0.1: Address already in use"]


def test_common_start_failure_is_reported_once(config_file: Path) -> None:
    """The same error of every worker."""
    status, lines = run_failing("twistd", with_two_workers(config_file, log={"directory": "mediator.yaml"}))
    assert status == 1
    (line,) = lines
    assert line.startswith(f"mediatord: {config_file}/") and line.endswith(": Not a directory")


def test_supervisor_notifies_service_manager(config_file: Path, tmp_path: Path) -> None:
    """READY=1 once all serve, STOPPING=1 once, by the supervisor."""
    with NotifySocket(tmp_path, PATIENCE_SECONDS) as manager:
        with start_process("twistd", with_two_workers(config_file), NOTIFY_SOCKET=manager.address) as process:
            assert manager.next_state() == "READY=1"
            assert manager.statuses[-1] == "serving"
            await_metrics(port_of(config_file), mediator_workers=2, mediator_workers_answered=2)
            process.terminate()
            assert manager.next_state() == "STOPPING=1"
            assert process.wait(STOP_SECONDS) == 0
        assert manager.is_empty()


def test_interrupt_of_process_group_ends_all_in_order(config_file: Path) -> None:
    """Workers wait for the supervisor."""
    with start_process("run", with_two_workers(config_file)) as process:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while len(workers_of(process.pid)) < 2:
            assert time.monotonic() < deadline
            time.sleep(POLL_SECONDS)
        pids = workers_of(process.pid)
        while any(os.getpgid(pid) != pid for pid in pids):
            assert time.monotonic() < deadline
            time.sleep(POLL_SECONDS)
        assert all(os.getpgid(pid) != os.getpgid(process.pid) for pid in pids)
        process.send_signal(signal.SIGINT)
        assert process.wait(STOP_SECONDS) == 0
        assert not [pid for pid in pids if is_running(pid)]
