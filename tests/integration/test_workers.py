"""Several processes behind one address: the daemon with `workers` above 1, as wallets and operators see it."""

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
from tests.certificate_authority import CertificateAuthority
from tests.integration.cluster import fresh_storage
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
from tests.integration.test_lifecycle import DaemonTestCase, ask, made, port_of, refused, running
from tests.notify_socket import NotifySocket

__all__ = ["made"]

reactor: Any = _reactor

# What is waited for is looked for so often.
LOOK_SECONDS = 0.05
# Sockets that are opened at most until every worker has one; all on one side are a chance of one in a billion.
ENOUGH_SOCKETS = 32
BEFORE_THE_KILL, BEFORE_THE_END = 100, 600


def metrics(text: bytes) -> dict[str, float]:
    """The sum of each metric over its labels."""
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
    return sums


def metrics_at(port: int) -> dict[str, float]:
    """Those of a daemon; none where its workers do not answer each other in time."""
    status, _, text = ask(port, "GET", "/metrics")
    return metrics(text) if status == 200 else {}


def workers_of(pid: int) -> set[int]:
    """Pids of the processes below a process."""
    return {int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text("ascii").split()}


def is_there(pid: int) -> bool:
    """
    Whether a process runs.

    One that has ended may wait for somebody to ask for its status; its first thread does so before the others end.
    """
    try:
        threads = len(os.listdir(f"/proc/{pid}/task"))
        return threads > 1 or Path(f"/proc/{pid}/stat").read_text("ascii").rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def listeners(port: int) -> int:
    """How many sockets listen on a port of the loopback."""
    lines = Path("/proc/net/tcp").read_text("ascii").splitlines()
    return sum(1 for line in lines if line.split()[1].endswith(f":{port:04X}") and line.split()[3] == "0A")


def await_gone(*pids: int) -> None:
    """
    Wait until none of these processes runs.

    :raise AssertionError: one still does.
    """
    deadline = time.monotonic() + STOP_SECONDS
    while left := [pid for pid in pids if is_there(pid)]:
        assert time.monotonic() < deadline, f"still there: {left}"
        time.sleep(LOOK_SECONDS)


def await_workers(daemon: Daemon, count: int) -> None:
    """
    Wait until so many workers serve.

    :raise AssertionError: they do not.
    """
    await_metrics(daemon.port, mediator_workers_answered=count)


def await_metrics(port: int, **expected: float) -> dict[str, float]:
    """
    Wait until metrics have these values; the metrics of a worker that is late are missing.

    :return: all metrics.
    :raise AssertionError: they have not.
    """
    deadline = time.monotonic() + PATIENCE_SECONDS
    while (found := metrics_at(port)) | expected != found:
        assert time.monotonic() < deadline, {name: found.get(name) for name in expected}
        time.sleep(LOOK_SECONDS)
    return found


def opened(daemon: Daemon) -> dict[str, int]:
    """How many connections were opened at each node, as its event log says."""
    counts: dict[str, int] = {}
    for path in daemon.log_directory.glob("*/events*.jsonl"):
        lines = path.read_text("utf-8").splitlines()
        counts[path.parent.name] = counts.get(path.parent.name, 0) + sum('"conn.open"' in line for line in lines)
    return counts


def did_at(daemon: Daemon) -> bytes | None:
    """What whichever worker it is serves as its DID; None where that has just ended."""
    with contextlib.suppress(OSError, HTTPException):
        return ask(daemon.port, "GET", "/did")[2]
    return None


def pid_of(daemon: Daemon, node: str) -> int:
    """Of the worker that has this name now, as the supervisor says."""
    lines = [line for line in daemon.output().splitlines() if f"worker {node} is process " in line]
    return int(lines[-1].rpartition(" ")[2])


class WorkersTests(DaemonTestCase):
    def a_crew(self, settings: dict[str, Any] | None = None) -> Daemon:
        """A daemon of two workers that serve."""
        # The logs are counted, which a child process must not compress meanwhile.
        ours = {"workers": 2, "node": "n", "log": {"rotate": {"compress": False}}}
        daemon = self.a_daemon(merge_settings(ours, settings or {}))
        await_workers(daemon, 2)
        return daemon

    async def live_on_each(self, daemon: Daemon, *wallets: DIDCommWallet) -> dict[str, DIDCommSocket]:
        """A live socket for each wallet, every one on another worker, by the name of its node."""
        found: dict[str, DIDCommSocket] = {}
        for _ in range(ENOUGH_SOCKETS):
            before = opened(daemon)
            fresh = await self.a_socket(wallets[len(found)])
            await fresh.live()
            (node,) = [node for node, count in opened(daemon).items() if count > before.get(node, 0)]
            if node in found:
                await fresh.close()
            else:
                found[node] = fresh
            if len(found) == len(wallets):
                return found
        raise AssertionError(f"all on one worker: {opened(daemon)}")

    async def test_live_messages_between_workers(self) -> None:
        """Two wallets on different workers converse as if there were one process, and the metrics tell the whole."""
        daemon = self.a_crew()
        alice, bob = await enrol_wallet(daemon, reactor), await enrol_wallet(daemon, reactor)
        sockets = await self.live_on_each(daemon, alice, bob)
        hers, his = sockets.values()
        for turn in range(3):
            for sender, letter, recipient in (
                (hers, prepare_forwards(bob, f"to bob {turn}", 1)[0], his),
                (his, prepare_forwards(alice, f"to alice {turn}", 1)[0], hers),
            ):
                sender.send_frame(letter.body)
                delivered = await recipient.pushed.get().addTimeout(PATIENCE_SECONDS, reactor)
                self.assertEqual(read_marker(recipient.wallet, delivered), letter.marker)
                await recipient.acknowledge([delivered])
        for _ in range(4):  # whichever worker is asked
            await_metrics(
                daemon.port,
                mediator_messages_forwarded_total=6,
                mediator_messages_delivered_total=6,
                mediator_active_connections=2,
                mediator_storage_up=1,
                mediator_build_info=1,
            )
        await self.stop(daemon)
        self.assertEqual([await hers.closed(), await his.closed()], [1001, 1001])

    async def test_live_messages_on_mongodb(self) -> None:
        """The same where workers share a MongoDB database."""
        daemon = self.a_crew({"storage": fresh_storage(self)})
        alice, bob = await enrol_wallet(daemon, reactor), await enrol_wallet(daemon, reactor)
        hers, his = (await self.live_on_each(daemon, alice, bob)).values()
        for sender, recipient in ((hers, his), (his, hers)):
            (letter,) = prepare_forwards(recipient.wallet, "pushed", 1)
            sender.send_frame(letter.body)
            delivered = await recipient.pushed.get().addTimeout(PATIENCE_SECONDS, reactor)
            self.assertEqual(read_marker(recipient.wallet, delivered), letter.marker)
            await recipient.acknowledge([delivered])
        await self.stop(daemon)

    def test_the_database_is_in_use(self) -> None:
        """By a daemon with workers or without, whose sockets need not be in sight: one line, and no harm is done."""
        for daemon, numbers in ((self.a_crew(), (1, 2)), (self.a_daemon(), (1,))):
            other = prepare_daemon()
            self.addCleanup(other.clean)
            database = daemon.directory / "mediator.sqlite3"
            settings = merge_settings(other.configuration(), {"storage": {"sqlite": {"path": str(database)}}})
            other.config.write_text(yaml.safe_dump(settings), "utf-8")
            for number in numbers:
                status, lines = refused("run", several(other.config, workers=number))
                line = f"mediatord: cannot use the database {database}: another daemon does"
                self.assertEqual((status, lines), (1, [line]))
            self.assertFalse(other.log_directory.exists(), other.log_directory)
            daemon.await_health()
            daemon.stop()

    def test_beside_another_daemon(self) -> None:
        """On one MongoDB database: one line that says whose it is, since there is no secret to be set right."""
        storage = fresh_storage(self)
        self.a_crew({"storage": storage})
        other = prepare_daemon({"storage": storage})
        self.addCleanup(other.clean)
        status, lines = refused("run", several(other.config, node="q"))
        line = "mediatord: workers: others than the workers of this daemon work on this database: n-1, n-2"
        self.assertEqual((status, lines), (1, [line]))

    def test_other_keys(self) -> None:
        """Should the file have changed, who replaces a worker is all the same who the others are."""
        daemon = self.a_crew()
        did = ask(daemon.port, "GET", "/did")[2]
        keys = daemon.directory / "keys.jwks"
        keys.unlink()
        create_keys(keys)
        os.kill(pid_of(daemon, "n-1"), signal.SIGKILL)
        daemon.await_output("was killed by SIGKILL")
        await_workers(daemon, 2)
        self.assertEqual({did_at(daemon) for _ in range(ENOUGH_SOCKETS)} - {None}, {did})

    async def test_a_worker_is_killed(self) -> None:
        """
        Its sockets are cut and come back, its replacement serves, nothing that was accepted is lost or there twice,
        and no counter falls.
        """
        daemon = self.a_crew(ROOMY)
        alice, bob = await enrol_wallet(daemon, reactor), await enrol_wallet(daemon, reactor)
        stock = prepare_forwards(bob, "load", BEFORE_THE_END)
        sockets = await self.live_on_each(daemon, alice, bob)
        (stays, hers), (falls, his) = sockets.items()
        victim = pid_of(daemon, falls)
        senders = LoadSenders(daemon.port, stock)
        senders.start()
        await deferToThread(senders.wait_for_answers, BEFORE_THE_KILL)
        before = await deferToThread(await_metrics, daemon.port, mediator_workers_answered=2)
        os.kill(victim, signal.SIGKILL)
        self.assertEqual(await his.closed().addTimeout(PATIENCE_SECONDS, reactor), 1006)
        await deferToThread(senders.join)
        await deferToThread(await_workers, daemon, 2)
        self.assertNotEqual(pid_of(daemon, falls), victim)
        self.assertEqual(len(workers_of(daemon.pid)), 2)
        self.assertIsNone(hers.close_code)
        after = await deferToThread(await_metrics, daemon.port, mediator_workers_answered=2)
        fallen = [name for name in before if name.endswith("_total") and after[name] < before[name]]
        self.assertEqual(fallen, [])
        found = await drain_queue(bob)
        accepted = set(senders.markers(202))
        self.assertGreaterEqual(len(accepted), BEFORE_THE_KILL)
        self.assertEqual(accepted - set(found), set())
        self.assertEqual(set(found) - accepted - set(senders.markers(None)), set())
        self.assertEqual([marker for marker, ids in found.items() if len(ids) != 1], [])
        self.assertIn("was killed by SIGKILL", daemon.output())
        again = await self.live_on_each(daemon, alice, bob)
        self.assertEqual(set(again), {stays, falls})
        await self.stop(daemon)

    async def test_the_supervisor_is_killed(self) -> None:
        """No process outlives it, and the next daemon finds nothing in its way."""
        daemon = self.a_crew()
        pids = workers_of(daemon.pid)
        wallet = await enrol_wallet(daemon, reactor)
        idle = await self.a_socket(wallet)
        (letter,) = prepare_forwards(wallet, "kept", 1)
        self.assertEqual(ask(daemon.port, "POST", "/didcomm", letter.body)[0], 202)
        (directory,) = self.socket_directories(daemon)
        await deferToThread(daemon.kill)
        await deferToThread(await_gone, *pids)
        self.assertEqual(await idle.closed().addTimeout(PATIENCE_SECONDS, reactor), 1006)
        self.assertEqual(listeners(daemon.port), 0)
        self.assertFalse(directory.exists())
        daemon.start()
        await deferToThread(await_workers, daemon, 2)
        self.assertEqual(list(await drain_queue(wallet)), [letter.marker])
        await self.stop(daemon)

    def socket_directories(self, daemon: Daemon) -> set[Path]:
        """Where its workers have their node-to-node sockets."""
        lines = Path("/proc/net/unix").read_text("ascii").splitlines()
        paths = {Path(line.split()[-1]) for line in lines if "mediatord-workers-" in line}
        mine = {f"worker n-{number}" for number in (1, 2)}
        assert all(name in daemon.output() for name in mine)
        return {path.parent for path in paths if path.name == "1.sock" and is_of(path, workers_of(daemon.pid))}

    async def test_listeners_and_signals(self) -> None:
        """TCP, TLS and a UNIX socket, all served by all; SIGHUP rotates every log; SIGTERM ends all in order."""
        directory = Path(tempfile.mkdtemp(prefix="mediatord-workers-test-"))
        self.addCleanup(shutil.rmtree, directory)
        certificate = CertificateAuthority(directory).issue("localhost", ["127.0.0.1"])
        path, tls = directory / "s", find_free_port()
        keys = f"privateKey={certificate}:certKey={certificate}"
        daemon = prepare_daemon()
        self.addCleanup(daemon.clean)
        plain = f"tcp:{daemon.port}:interface=127.0.0.1"
        several(daemon.config, listen=[plain, f"ssl:{tls}:interface=127.0.0.1:{keys}", f"unix:{path}:mode=600"])
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
            await deferLater(reactor, LOOK_SECONDS, lambda: None)
        pids = workers_of(daemon.pid)
        (sockets,) = self.socket_directories(daemon)
        idle = await self.a_socket(await enrol_wallet(daemon, reactor))
        await self.stop(daemon)
        self.assertEqual(await idle.closed(), 1001)
        self.assertEqual((len(pids), [pid for pid in pids if is_there(pid)]), (2, []))
        self.assertEqual((listeners(daemon.port), path.exists(), sockets.exists()), (0, False, False))
        self.assertNotIn("ended with status", daemon.output())
        for node in ("n-1", "n-2"):
            segment = max((daemon.log_directory / node).glob("events*.jsonl"))
            events = [json.loads(line)["event"] for line in segment.read_text("utf-8").splitlines()]
            self.assertEqual((events[0], events[-1]), ("log.open", "log.close"))
            self.assertIn("proc.stop", events)


def is_of(path: Path, pids: set[int]) -> bool:
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


def several(config: Path, **more: Any) -> Path:
    """The same configuration with two workers."""
    settings = merge_settings(yaml.safe_load(config.read_text("utf-8")), {"workers": 2, "node": "n", **more})
    config.write_text(yaml.safe_dump(settings), "utf-8")
    return config


def test_port_taken(made: Path) -> None:
    """One line, from one process, before there are others."""
    port = port_of(made)
    with socket.create_server(("127.0.0.1", port)):
        status, lines = refused("run", several(made))
    assert status == 1
    assert lines == [f"mediatord: cannot listen on tcp:{port}:interface=127.0.0.1: Address already in use"]


def test_no_worker_can_start(made: Path) -> None:
    """What every worker stumbles over is said once."""
    status, lines = refused("twistd", several(made, log={"directory": "mediator.yaml"}))
    assert status == 1
    (line,) = lines
    assert line.startswith(f"mediatord: {made}/") and line.endswith(": Not a directory")


def test_memory_cannot_be_shared(made: Path) -> None:
    """Bad configurations cost a line and status 2, as ever."""
    status, (line,) = refused("run", several(made, storage={"backend": "memory"}))
    assert status == 2
    assert line.endswith("workers: expected 1 with storage.backend memory, which processes cannot share")


def test_service_manager_is_told(made: Path, tmp_path: Path) -> None:
    """READY=1 once all serve, STOPPING=1 once, by the one process that systemd knows."""
    with NotifySocket(tmp_path, PATIENCE_SECONDS) as manager:
        with running("twistd", several(made), NOTIFY_SOCKET=manager.address) as process:
            assert manager.next() == "READY=1"
            assert manager.statuses[-1] == "serving"
            await_metrics(port_of(made), mediator_workers=2, mediator_workers_answered=2)
            process.terminate()
            assert manager.next() == "STOPPING=1"
            assert process.wait(STOP_SECONDS) == 0
        assert manager.silent()


def test_interrupted_at_the_terminal(made: Path) -> None:
    """What goes to all processes of the terminal ends all in order: the workers wait to be told."""
    with running("run", several(made)) as process:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while len(workers_of(process.pid)) < 2:
            assert time.monotonic() < deadline
            time.sleep(LOOK_SECONDS)
        pids = workers_of(process.pid)
        while any(os.getpgid(pid) != pid for pid in pids):
            assert time.monotonic() < deadline
            time.sleep(LOOK_SECONDS)
        assert all(os.getpgid(pid) != os.getpgid(process.pid) for pid in pids)
        process.send_signal(signal.SIGINT)
        assert process.wait(STOP_SECONDS) == 0
        assert not [pid for pid in pids if is_there(pid)]
