"""The supervisor, with fake worker processes."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import tempfile
from pathlib import Path
from typing import Any

from twisted.internet.error import ProcessDone, ProcessExitedAlready, ProcessTerminated
from twisted.internet.testing import MemoryReactorClock
from twisted.logger import LogEvent, globalLogPublisher
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase

from mediatord.app.core_services import CoreServices
from mediatord.app.supervision import derive_worker_config
from mediatord.config.file import ConfigError
from mediatord.config.settings import Config
from mediatord.errors import StartupError
from mediatord.identity.key_file import create_keys, parse_keys, retire_keys, rotate_keys
from mediatord.identity.mediator_identity import MediatorIdentity
from mediatord.observability.systemd import STATUS_SERVING, STATUS_WAITING_FOR_STORE
from mediatord.probe.identities_and_recognition import ProbeCredentials
from mediatord.service import makeService
from mediatord.store.interfaces.messages import QueueLimits
from mediatord.store.sqlite.memory_store import MemoryStore
from mediatord.wallet.temporary_daemon import find_free_port
from mediatord.workers.control_channel import encode_control_message
from mediatord.workers.supervised_worker import COMMAND_FD, FIRST_SOCKET_FD, REPORT_FD, SPEC_FD, WorkerSpec
from mediatord.workers.supervisor import QUERY_TIMEOUT

BEAT, HUNG, STARTING = 5.0, 6, 6


class FakeProcess:
    """Spawned process that the test controls."""

    def __init__(
        self, protocol: Any, pid: int, arguments: list[str], env: dict[str, str], fds: dict[int, Any]
    ) -> None:
        self.protocol = protocol
        self.pid = pid
        self.arguments = arguments
        self.env = env
        self.fds = fds
        self.pipes = {number for number, kind in fds.items() if kind in ("r", "w")}
        self.written: dict[int, bytes] = {COMMAND_FD: b"", SPEC_FD: b""}
        self.signals: list[str] = []
        self.numbers: list[int] = []
        self.over = False
        protocol.makeConnection(self)

    def writeToChild(self, number: int, data: bytes) -> None:  # noqa: N802
        assert number in self.pipes
        self.written[number] += data

    def closeChildFD(self, number: int) -> None:  # noqa: N802
        self.pipes.remove(number)

    def signalProcess(self, name: str) -> None:  # noqa: N802
        if self.over:
            raise ProcessExitedAlready
        self.signals.append(name)

    @property
    def spec(self) -> WorkerSpec:
        """The worker spec that it received."""
        assert SPEC_FD not in self.pipes, "it would wait for more"
        return WorkerSpec.from_bytes(self.written[SPEC_FD])

    def orders(self) -> list[tuple[str, Any]]:
        """Orders received since the last call."""
        lines, self.written[COMMAND_FD] = self.written[COMMAND_FD], b""
        return [(word, content) for word, content in map(json.loads, lines.splitlines())]

    def questions(self) -> list[tuple[str, Any]]:
        """Questions received since the last call; there must be nothing else."""
        found = []
        for word, content in self.orders():
            assert word == "ask", word
            number, question, about = content
            self.numbers.append(number)
            found.append((question, about))
        return found

    def answer(self, value: Any = None) -> None:
        """Answer the oldest unanswered question, if there is one."""
        self.questions()
        if self.numbers:
            self.send("answer", [self.numbers.pop(0), value])

    def send(self, word: str, content: Any = None) -> None:
        """Send a message, in two pieces."""
        line = encode_control_message(word, content)
        self.protocol.childDataReceived(REPORT_FD, line[:3])
        self.protocol.childDataReceived(REPORT_FD, line[3:])

    def end(self, status: int | None = None, killed_by: int | None = None) -> None:
        """End the process."""
        self.over = True
        self.pipes.clear()
        reason: Exception = ProcessTerminated(status, killed_by) if status or killed_by else ProcessDone(None)
        self.protocol.processEnded(Failure(reason))


class FakePort:
    """A UNIX port."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self.fileno = self._socket.fileno

    def stopReading(self) -> None:  # noqa: N802
        """Ignore."""

    def connectionLost(self, reason: object) -> None:
        self._socket.close()


class SpawningReactor(MemoryReactorClock):
    """Running reactor that records spawned processes."""

    def __init__(self) -> None:
        super().__init__()
        self.spawned: list[FakeProcess] = []
        self.no_more = False

    def listenUNIX(self, address: Any, factory: Any, *arguments: Any, **more: Any) -> Any:  # noqa: N802
        return FakePort()

    def callWhenRunning(self, callable: Any, *arguments: Any, **more: Any) -> None:  # noqa: N802
        callable(*arguments, **more)

    def spawnProcess(self, protocol: Any, executable: str, args: Any, env: Any, childFDs: Any) -> None:  # noqa: N802, N803
        if self.no_more:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        self.spawned.append(FakeProcess(protocol, 1000 + len(self.spawned), args, env, childFDs))


class SupervisorTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.directory = Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.directory)
        self.notify = self.directory / "notify"
        self.manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.addCleanup(self.manager.close)
        self.manager.bind(str(self.notify))
        self.manager.setblocking(False)
        for name, value in {
            "NOTIFY_SOCKET": str(self.notify),
            "WATCHDOG_USEC": "20000000",
            "WATCHDOG_PID": str(os.getpid()),
            "LISTEN_FDS": "1",
            "MEDIATORD_LOG__LEVEL": "info",
        }.items():
            self.addCleanup(os.environ.pop, name)
            os.environ[name] = value
        self.patch(tempfile, "tempdir", str(self.directory))
        self.reactor: Any = SpawningReactor()
        self.given_up: list[str] = []
        self.lines: list[str] = []
        note: Any = self.record
        globalLogPublisher.addObserver(note)
        self.addCleanup(globalLogPublisher.removeObserver, note)

    def record(self, event: LogEvent) -> None:
        """Record events that are warnings for operators."""
        if (
            event.get("log_level")
            and event["log_level"].name in ("warn", "error")
            and "mediatord" in event["log_namespace"]
        ):
            self.lines.append(event["log_format"].format(**event))

    def config(self, workers: int = 3, **more: Any) -> Config:
        """Write a configuration and keys into the test's directory."""
        if not (self.directory / "keys.jwks").exists():
            create_keys(self.directory / "keys.jwks")
        plain = {"listen": ["tcp:0:interface=127.0.0.1"], "node": "n", "workers": workers, "control_socket": None}
        plain |= more
        return Config.model_validate(plain).resolved(self.directory)

    def start(self, workers: int = 3, **more: Any) -> list[FakeProcess]:
        """Start a daemon; return its workers."""
        self.service: Any = makeService(self.config(workers, **more), self.reactor, self.given_up.append)
        self.service.privilegedStartService()
        self.assertEqual(self.reactor.spawned, [])
        self.service.startService()
        return list(self.reactor.spawned)

    def stop(self) -> None:
        """Stop the daemon; all workers obey."""
        stopped = self.service.stopService()
        for process in self.live_processes():
            process.end()
        self.successResultOf(stopped)
        self.assertEqual(self.reactor.getDelayedCalls(), [])

    def live_processes(self) -> list[FakeProcess]:
        """Processes that have not ended."""
        return [process for process in self.reactor.spawned if not process.over]

    def names(self) -> list[str]:
        """Names of the live processes."""
        return [process.arguments[-1] for process in self.live_processes()]

    def systemd_notifications(self) -> list[str]:
        """Notifications since the last call."""
        found = []
        while True:
            try:
                found.append(self.manager.recv(100).decode())
            except BlockingIOError:
                return found

    def heartbeat(self, times: int, *answering: FakeProcess) -> None:
        """Let heartbeats pass, which these processes answer."""
        for _ in range(times):
            self.reactor.advance(BEAT)
            for process in answering:
                self.assertIn(("ping", None), process.orders())
                process.send("pong")

    def start_ready(self, **more: Any) -> list[FakeProcess]:
        """Start three workers that serve."""
        processes = self.start(**more)
        for process in processes:
            process.send("status", STATUS_SERVING)
            process.send("ready")
        self.systemd_notifications()
        return processes

    def test_starts_one_process_per_worker(self) -> None:
        """Each has its name, its sockets, and a configuration as of a single daemon."""
        processes = self.start(listen=["tcp:0:interface=127.0.0.1", f"unix:{self.directory}/s"])
        self.assertEqual(self.names(), ["n-1", "n-2", "n-3"])
        for number, process in enumerate(processes, 1):
            config = Config.model_validate_json(process.spec.settings)
            self.assertEqual((config.node, config.workers), (f"n-{number}", 1))
            self.assertEqual(config.log.directory, self.directory / "log" / f"n-{number}")
            self.assertEqual(process.spec.sockets, [FIRST_SOCKET_FD, FIRST_SOCKET_FD + 1])
            self.assertEqual(set(process.fds), {0, 1, 2, REPORT_FD, SPEC_FD, FIRST_SOCKET_FD, FIRST_SOCKET_FD + 1})
        tcp, unix = zip(
            *((item.fds[FIRST_SOCKET_FD], item.fds[FIRST_SOCKET_FD + 1]) for item in processes), strict=True
        )
        self.assertEqual((len(set(tcp)), len(set(unix))), (3, 1))
        places = [process.spec for process in processes]
        self.assertEqual(
            (len({element.node_socket for element in places}), len({member.secret for member in places})), (3, 1)
        )
        self.assertEqual(Path(places[0].node_socket).parent.stat().st_mode & 0o777, 0o700)
        self.stop()
        self.assertFalse(Path(places[0].node_socket).parent.exists())

    def test_no_secrets_in_arguments_or_environment(self) -> None:
        """Secrets, settings and process-specific values are on neither command line nor environment."""
        uri = "mongodb://user:hunter2@db.example/mediatord"
        processes = self.start(storage={"backend": "sqlite", "mongodb": {"uri": uri}})
        process = processes[0]
        self.assertIn("hunter2", process.spec.settings)
        seen = json.dumps([process.arguments, process.env])
        secrets = "hunter2", process.spec.secret.hex(), process.spec.seed.hex()
        for unseen in (*secrets, "NOTIFY_", "WATCHDOG_", "LISTEN_", "MEDIATORD_"):
            self.assertNotIn(unseen, seen)
        for secret in secrets:
            self.assertNotIn(secret, repr(process.spec))
        self.stop()

    def test_cluster_secret(self) -> None:
        """The same after a restart, and different for another name or other keys."""

        def secret() -> bytes:
            self.reactor = SpawningReactor()
            found = self.start(2)[-1].spec.secret
            self.stop()
            return found

        first = secret()
        self.assertEqual((first, len(first)), (secret(), 32))
        (self.directory / "keys.jwks").unlink()
        second = secret()
        self.assertNotEqual(first, second)

    def test_ready_when_all_are(self) -> None:
        """READY is sent once, when all workers are ready."""
        processes = self.start()
        for process in processes:
            self.assertEqual(self.systemd_notifications(), [])
            process.send("ready")
        self.assertEqual(self.systemd_notifications(), ["READY=1", "WATCHDOG=1"])
        processes[0].end(killed_by=9)
        self.reactor.advance(0)
        self.live_processes()[-1].send("ready")
        self.assertEqual(self.systemd_notifications(), [])
        self.stop()
        self.assertEqual(self.systemd_notifications(), ["STOPPING=1"])

    def test_ready_with_replacement(self) -> None:
        """A worker that ends before all are ready counts when its replacement is."""
        processes = self.start(2)
        processes[0].send("ready")
        processes[0].end(killed_by=9)
        processes[1].send("ready")
        self.assertEqual(self.systemd_notifications(), [])
        self.reactor.advance(0)
        self.live_processes()[-1].send("ready")
        self.assertEqual(self.systemd_notifications()[0], "READY=1")
        self.stop()

    def test_status_is_of_worst_worker(self) -> None:
        """The status is that of the worst worker, whenever it changes."""
        processes = self.start(2)
        processes[0].send("status", STATUS_SERVING)
        self.assertEqual(self.systemd_notifications(), [f"STATUS={STATUS_WAITING_FOR_STORE}"])
        processes[1].send("status", STATUS_WAITING_FOR_STORE)
        self.assertEqual(self.systemd_notifications(), [])
        processes[1].send("status", STATUS_SERVING)
        self.assertEqual(self.systemd_notifications(), [f"STATUS={STATUS_SERVING}"])
        processes[0].send("status", "cluster: not joined")
        processes[0].end(killed_by=9)
        self.reactor.advance(0)
        self.live_processes()[-1].send("status", STATUS_SERVING)
        self.assertEqual(self.systemd_notifications(), ["STATUS=cluster: not joined", f"STATUS={STATUS_SERVING}"])
        self.stop()

    def test_ready_without_store(self) -> None:
        """Workers that never served count as failed starts, whatever systemd was notified of."""
        processes = self.start(2)
        for process in processes:
            process.send("status", STATUS_WAITING_FOR_STORE)
            process.send("ready")
        self.assertEqual(
            self.systemd_notifications(), [f"STATUS={STATUS_WAITING_FOR_STORE}", "READY=1", "WATCHDOG=1"]
        )
        for process in processes:
            process.send("start error", "no room")
            process.end(1)
        self.assertEqual(self.given_up, ["no room"])
        self.stop()

    def test_replaces_ended_worker(self) -> None:
        """At once the first time, with a log line."""
        processes = self.start_ready()
        processes[1].end(killed_by=11)
        self.assertEqual(self.names(), ["n-1", "n-3"])
        self.reactor.advance(0)
        self.assertEqual(self.names(), ["n-1", "n-3", "n-2"])
        self.assertEqual(self.lines, ["worker n-2 (process 1001) was killed by SIGSEGV"])
        self.assertEqual(self.live_processes()[-1].fds, processes[1].fds)
        self.stop()

    def test_restart_backoff(self) -> None:
        """Restarts are delayed up to half a minute; after a stable period they are immediate again."""
        processes = self.start_ready()
        processes[0].end(1)
        for pause in (0, 1, 2, 4, 8, 16, 30, 30):
            if pause:
                self.reactor.advance(pause - 0.01)
                self.assertEqual(self.names(), ["n-2", "n-3"])
                self.reactor.advance(0.01)
            else:
                self.reactor.advance(0)
            self.assertEqual(self.names(), ["n-2", "n-3", "n-1"])
            for process in self.live_processes():
                process.send("pong")
            self.live_processes()[-1].end(3)
        self.assertEqual(self.lines[-1], "worker n-1 (process 1010) ended with status 3")
        self.reactor.advance(30)
        self.live_processes()[-1].send("ready")
        for _ in range(12):
            self.heartbeat(1, *self.live_processes())
        self.live_processes()[-1].end(3)
        self.reactor.advance(0)
        self.assertEqual(self.names(), ["n-2", "n-3", "n-1"])
        self.stop()

    def test_connections_go_to_other_workers(self) -> None:
        """While a restart is delayed, the worker gets no connections."""
        processes = self.start_ready()
        listening = processes[0].fds[FIRST_SOCKET_FD]
        self.assertTrue(is_listening(listening))
        processes[0].end(1)
        self.assertTrue(is_listening(listening))
        self.reactor.advance(0)
        self.live_processes()[-1].end(1)
        self.assertFalse(is_listening(listening))
        self.reactor.advance(1)
        self.assertTrue(is_listening(listening))
        self.stop()

    def test_address_taken_while_unbound(self) -> None:
        """While no worker listens, another process may bind; the worker waits for its address."""
        port = find_free_port()
        processes = self.start(2, listen=[f"tcp:{port}:interface=127.0.0.1"])
        for process in processes:
            process.end(1)
        self.reactor.advance(0)
        for process in self.live_processes():
            process.end(1)
        with socket.create_server(("127.0.0.1", port)):
            self.reactor.advance(1)
            self.assertEqual(self.names(), [])
        self.assertEqual(self.lines[-1], "cannot start worker n-2: Address already in use")
        self.reactor.advance(2)
        self.assertEqual(self.names(), ["n-1", "n-2"])
        self.stop()

    def test_all_fail_to_start(self) -> None:
        """If all workers fail to start, the first reason is reported, once."""
        processes = self.start(2)
        for process in processes:
            process.send("start error", f"reason of {process.arguments[-1]}")
            process.end(1)
        self.assertEqual(self.given_up, ["reason of n-2"])
        self.stop()
        self.assertEqual(self.names(), [])

    def test_some_fail_to_start(self) -> None:
        """The start is retried with a delay, and the reason is logged."""
        processes = self.start(2)
        processes[1].send("ready")
        processes[0].send("start error", "no room")
        processes[0].end(1)
        self.assertEqual(self.lines, ["worker n-1 (process 1000) ended with status 1: no room"])
        self.reactor.advance(0.99)
        self.assertEqual(self.names(), ["n-2"])
        self.reactor.advance(0.01)
        self.assertEqual(self.names(), ["n-2", "n-1"])
        self.assertEqual(self.given_up, [])
        self.stop()

    def test_all_fail_after_serving(self) -> None:
        """If workers have served before, the start is retried."""
        for process in self.start_ready():
            process.end(killed_by=9)
        self.reactor.advance(0)
        for process in self.live_processes():
            process.send("start error", "no room")
            process.end(1)
        self.assertEqual(self.given_up, [])
        self.reactor.advance(1)
        self.assertEqual(self.names(), ["n-1", "n-2", "n-3"])
        self.stop()

    def test_spawn_failure(self) -> None:
        """A process that cannot be spawned is retried."""
        processes = self.start_ready()
        self.reactor.no_more = True
        processes[0].end(killed_by=9)
        self.reactor.advance(0)
        self.assertEqual(self.lines[-1], "cannot start worker n-1: Resource temporarily unavailable")
        self.reactor.no_more = False
        self.reactor.advance(1)
        self.assertEqual(self.names(), ["n-2", "n-3", "n-1"])
        self.stop()

    def test_unresponsive_worker(self) -> None:
        """
        A worker without a heartbeat for half a minute is killed and replaced; meanwhile the systemd watchdog is not
        notified.
        """
        processes = self.start_ready()
        self.heartbeat(1, *processes)
        self.heartbeat(HUNG, *processes[1:])
        self.assertEqual(processes[0].signals, [])
        self.assertEqual(self.systemd_notifications(), ["WATCHDOG=1"])
        self.heartbeat(1, *processes[1:])
        self.assertEqual([process.signals for process in processes], [["KILL"], [], []])
        self.assertEqual(self.lines, ["killing worker n-1 (process 1000): it does not respond"])
        processes[0].end(killed_by=9)
        self.reactor.advance(0)
        replacement = self.live_processes()[-1]
        replacement.send("ready")
        self.heartbeat(2, replacement, *processes[1:])
        self.assertEqual(self.systemd_notifications(), ["WATCHDOG=1"])
        self.stop()

    def test_start_may_take_longer(self) -> None:
        """A new worker has twice the time."""
        processes = self.start(2)
        processes[0].send("pong")
        self.heartbeat(STARTING + HUNG, processes[0])
        self.assertEqual(processes[1].signals, [])
        self.heartbeat(1, processes[0])
        self.assertEqual(processes[1].signals, ["KILL"])
        self.stop()

    def test_suspended_supervisor(self) -> None:
        """Workers are not blamed for a suspended supervisor."""
        processes = self.start_ready()
        self.heartbeat(1, *processes)
        self.reactor.advance(600)
        self.assertEqual([process.signals for process in processes], [[], [], []])
        self.stop()

    def test_stop(self) -> None:
        """All workers are stopped at once, no connections are accepted, and the last one ends the stop."""
        processes = self.start_ready()
        listening = [process.fds[FIRST_SOCKET_FD] for process in processes]
        stopped = self.service.stopService()
        self.assertEqual([process.signals for process in processes], [["TERM"]] * 3)
        for descriptor in listening:
            self.assertRaises(OSError, os.fstat, descriptor)
        processes[0].end(killed_by=15)
        processes[1].end(3)
        self.assertNoResult(stopped)
        processes[2].end()
        self.successResultOf(stopped)
        self.assertEqual(self.lines, ["worker n-2 (process 1001) ended with status 3"])
        self.assertEqual(len(self.reactor.spawned), 3)
        self.assertEqual(self.reactor.getDelayedCalls(), [])

    def test_stop_timeout(self) -> None:
        """Workers are killed after `drain_timeout`; their own timeout is shorter."""
        processes = self.start(2, drain_timeout="6s")
        self.assertEqual(Config.model_validate_json(processes[0].spec.settings).drain_timeout, 5)
        stopped = self.service.stopService()
        processes[0].end()
        self.reactor.advance(5.9)
        self.assertEqual(processes[1].signals, ["TERM"])
        self.reactor.advance(0.1)
        self.assertEqual(processes[1].signals, ["TERM", "KILL"])
        processes[1].end(killed_by=9)
        self.successResultOf(stopped)

    def test_stop_cancels_restart(self) -> None:
        """A delayed restart is cancelled."""
        processes = self.start_ready()
        processes[0].end(killed_by=9)
        self.stop()
        self.reactor.advance(100)
        self.assertEqual(len(self.reactor.spawned), 3)

    def test_rotate(self) -> None:
        """Every worker is told to close its segment."""
        processes = self.start_ready()
        self.service.rotate()
        self.assertEqual([process.orders() for process in processes], [[("rotate", None)]] * 3)
        self.stop()

    def test_reload(self) -> None:
        """Every worker gets its settings with the applicable changes, and so do replacements."""
        processes = self.start_ready()
        other = self.config(log={"level": "warn"}, queue={"ttl": 60.0})
        self.service.reload(lambda: other)
        for number, process in enumerate(processes, 1):
            ((word, (settings, outcome, keys)),) = process.questions()
            self.assertEqual((word, outcome), ("reload", "restart_needed"))
            self.assertEqual(keys.encode(), process.spec.keys)
            read = Config.model_validate_json(settings)
            self.assertEqual((read.node, read.log.level, read.queue.ttl), (f"n-{number}", "warn", Config().queue.ttl))
            self.assertEqual(
                settings,
                Config.model_validate_json(process.spec.settings)
                .model_copy(update={"log": read.log})
                .model_dump_json(),
            )
        processes[1].end(killed_by=9)
        self.reactor.advance(0)
        replaced = Config.model_validate_json(self.reactor.spawned[-1].spec.settings)
        self.assertEqual((replaced.node, replaced.log.level), ("n-2", "warn"))
        self.assertEqual(self.lines[0], "configuration reloaded; restart to apply queue.ttl")
        self.stop()

    def did_of(self, keys: str) -> tuple[str, bool]:
        """The DID that a worker announces with these keys, and whether it accepts prepared ones."""
        identity = MediatorIdentity(parse_keys(keys.encode(), "it"), self.config().public_url)
        return identity.did, bool(identity.prepared_dids)

    def test_key_rotation(self) -> None:
        """All workers accept the new DID before one announces it; replacements join at the current step."""
        processes = self.start_ready()
        self.systemd_notifications()
        old, _ = self.did_of(processes[0].spec.keys.decode())
        rotated = rotate_keys(self.directory / "keys.jwks", lambda keys: None)
        new = MediatorIdentity(rotated, self.config().public_url).did
        self.service.reload(self.config)
        for process in processes:
            ((word, (_, outcome, keys)),) = process.questions()
            self.assertEqual((word, outcome, self.did_of(keys)), ("reload", "ok", (old, True)))
        reloading, _ = self.systemd_notifications()[0].splitlines()
        self.assertEqual(reloading, "RELOADING=1")
        processes[0].answer()
        processes[1].end(killed_by=9)
        self.reactor.advance(0)
        replacement = self.reactor.spawned[-1]
        self.assertEqual(self.did_of(replacement.spec.keys.decode()), (old, True))
        self.assertEqual(processes[0].orders(), [])
        processes[2].answer()
        now = [processes[0], processes[2], replacement]
        for process in now:
            ((word, keys),) = process.questions()
            self.assertEqual((word, self.did_of(keys)), ("keys", (new, False)))
        self.assertNotIn("READY=1", self.systemd_notifications())
        for process in now:
            process.answer()
        self.assertEqual(self.systemd_notifications(), ["READY=1"])
        processes[0].end(killed_by=9)
        self.reactor.advance(0)
        self.assertEqual(self.did_of(self.reactor.spawned[-1].spec.keys.decode()), (new, False))
        self.stop()

    def test_retired_keys(self) -> None:
        """A replacement and the other workers recognise each other's probes."""
        processes = self.start_ready()
        for change in (rotate_keys, lambda path, check: retire_keys(path, "prekey", check)):
            change(self.directory / "keys.jwks", lambda keys: None)
            self.service.reload(self.config)
            for _ in range(2):
                for process in processes:
                    process.answer()
        processes[0].end(killed_by=9)
        self.reactor.advance(0)
        replacement = self.reactor.spawned[-1]
        self.assertNotIn(b'"prekey"', replacement.spec.keys)
        one, other = (self.probe_credentials_of(process) for process in (processes[1], replacement))
        self.assertEqual(one.token, other.token)
        self.assertTrue(one.identities.is_probe_did(other.identities.identity("m-1").did))
        self.stop()

    def probe_credentials_of(self, process: Any) -> ProbeCredentials:
        """The probe credentials of a worker."""
        config = Config.model_validate_json(process.spec.settings)
        clock = MemoryReactorClock()
        store = MemoryStore(clock, QueueLimits())
        return CoreServices(clock, config, worker=process.spec, store=store).probe_credentials

    def test_reload_during_start(self) -> None:
        """READY is not sent."""
        processes = self.start()
        self.service.reload(self.config)
        for process in processes:
            process.answer()
        self.assertEqual([state for state in self.systemd_notifications() if not state.startswith("STATUS=")], [])
        self.stop()

    def test_refused_reload(self) -> None:
        """Workers continue unchanged, and begin a segment."""
        processes = self.start_ready()

        def invalid() -> Config:
            raise ConfigError(["mediator.yaml: wrong"])

        self.service.reload(invalid)
        for process in processes:
            ((word, (settings, outcome, _)),) = process.questions()
            self.assertEqual((word, settings, outcome), ("reload", process.spec.settings, "refused"))
        self.stop()

    def test_metrics(self) -> None:
        """A scrape gets the reports of all workers that answer in time."""
        processes = self.start_ready()
        processes[1].send("ask", [7, "all metrics", None])
        for process in processes[:2]:
            self.assertEqual(process.questions(), [("metrics", None)])
            process.answer("# TYPE a_total counter\na_total 2.0\n")
        self.assertEqual(processes[1].orders(), [])
        self.reactor.advance(1)
        self.assertEqual(processes[0].orders(), [])
        ((word, (number, page)),) = processes[1].orders()
        self.assertEqual((word, number), ("answer", 7))
        self.assertIn("\na_total 4.0\n", page)
        self.assertIn("\nmediator_workers_answered 2.0\n", page)
        self.stop()

    def scrape(self, process: FakeProcess, number: int = 7) -> None:
        """Have a worker request the metrics of all."""
        process.send("ask", [number, "all metrics", None])

    def result_of(self, process: FakeProcess) -> tuple[float, ...]:
        """The counter, and how many were asked and have answered, as the worker was told."""
        ((_, (_, page)),) = process.orders()
        return tuple(
            float(re.findall(rf"^{name} (.*)$", page, re.M)[0])
            for name in ("a_total", "mediator_workers", "mediator_workers_answered")
        )

    def test_scrape_ends_with_last_report(self) -> None:
        """The page is sent with the last report."""
        processes = self.start_ready()
        self.scrape(processes[0])
        for process in processes:
            process.answer("# TYPE a_total counter\na_total 1.0\n")
        self.assertEqual(self.result_of(processes[0]), (3, 3, 3))
        self.stop()

    def test_scrape_timeout(self) -> None:
        """A silent worker is left out after a second, and its late report ignored."""
        processes = self.start_ready()
        self.scrape(processes[0])
        for process in processes[:2]:
            process.answer("# TYPE a_total counter\na_total 1.0\n")
        self.reactor.advance(QUERY_TIMEOUT - 0.01)
        self.assertEqual(processes[0].orders(), [])
        self.reactor.advance(0.01)
        self.assertEqual(self.result_of(processes[0]), (2, 3, 2))
        processes[2].answer("# TYPE a_total counter\na_total 1.0\n")
        self.assertEqual(processes[0].orders(), [])
        self.stop()

    def test_worker_ends_during_scrape(self) -> None:
        """Its report is not awaited; its last counters still count."""
        processes = self.start_ready()
        self.scrape(processes[0])
        for process in processes:
            process.answer("# TYPE a_total counter\na_total 1.0\n")
        self.assertEqual(self.result_of(processes[0]), (3, 3, 3))
        self.scrape(processes[0])
        for process in processes[:2]:
            process.answer("# TYPE a_total counter\na_total 2.0\n")
        processes[2].end(1)
        self.assertEqual(self.result_of(processes[0]), (5, 3, 2))
        self.stop()

    def test_scraped_worker_ends(self) -> None:
        """The result is dropped."""
        processes = self.start_ready()
        self.scrape(processes[0])
        processes[0].end(1)
        for process in processes[1:]:
            process.answer("# TYPE a_total counter\na_total 1.0\n")
        self.assertEqual([process.written[COMMAND_FD] for process in processes[1:]], [b"", b""])
        self.stop()

    def test_starting_worker_is_not_asked(self) -> None:
        """A starting worker is not asked for a report."""
        processes = self.start()
        for process in processes[:2]:
            process.send("ready")
        self.scrape(processes[0])
        self.assertEqual(processes[2].orders(), [])
        for process in processes[:2]:
            process.answer("# TYPE a_total counter\na_total 1.0\n")
        self.assertEqual(self.result_of(processes[0]), (2, 2, 2))
        self.stop()

    def test_invalid_report(self) -> None:
        """An internal error is logged; the scraped worker is told that there is no page."""
        processes = self.start_ready()
        self.scrape(processes[0])
        for process in processes:
            process.answer("mediator_workers{ 1\n")
        self.assertEqual(processes[0].orders(), [("answer", [7])])
        self.assertEqual(len(self.flushLoggedErrors(ValueError)), 1)
        self.stop()

    def test_stop_during_scrape(self) -> None:
        """No timer remains."""
        processes = self.start_ready()
        self.scrape(processes[0])
        self.stop()

    def test_concurrent_reloads(self) -> None:
        """The second begins when all workers have answered the first, or have ended."""
        processes = self.start_ready()
        for level in ("warn", "error"):
            other = self.config(log={"level": level})
            self.service.reload(lambda other=other: other)
        self.assertEqual([len(process.questions()) for process in processes], [1, 1, 1])
        for process in processes[:2]:
            process.answer()
        self.assertEqual(processes[0].questions(), [])
        processes[2].end(killed_by=9)
        ((_, (settings, _, _)),) = processes[0].questions()
        self.assertEqual(Config.model_validate_json(settings).log.level, "error")
        self.stop()

    def test_failed_reload(self) -> None:
        """A worker that cannot apply the settings is replaced by one that starts with them."""
        processes = self.start_ready()
        other = self.config(log={"level": "warn"})
        self.service.reload(lambda: other)
        for process in processes:
            process.questions()
        processes[0].send("answer", [processes[0].numbers.pop()])
        for process in processes[1:]:
            process.answer()
        self.assertEqual([process.signals for process in processes], [["TERM"], [], []])
        self.assertEqual(self.systemd_notifications()[-1], "READY=1")
        processes[0].end()
        self.reactor.advance(0)
        settings = Config.model_validate_json(self.reactor.spawned[-1].spec.settings)
        self.assertEqual((settings.node, settings.log.level), ("n-1", "warn"))
        self.stop()

    def test_reload_without_workers(self) -> None:
        """It is done at once."""
        processes = self.start_ready()
        self.systemd_notifications()
        for process in processes:
            process.end(killed_by=9)
        self.service.reload(self.config)
        self.assertEqual(self.systemd_notifications()[-1], "READY=1")
        self.stop()

    def test_worker_statuses(self) -> None:
        """
        The supervisor adds its own observations to the status page, and its name, but not the log lines of workers.
        """
        token = self.directory / "token"
        token.touch(0o600)
        token.write_text("x" * 32)
        processes = self.start_ready(admin={"listen": "tcp:0:interface=127.0.0.1", "token_file": "token"})
        self.assertEqual([len(process.spec.sockets) for process in processes], [2, 2, 2])
        processes[0].send("log", ["warn", "mediatord.x", "mine"])
        processes[0].end(1)
        processes[1].send("ask", [7, "all states", None])
        for process in processes[1:]:
            self.assertEqual(process.questions(), [("state", None)])
            process.answer({"pid": process.pid, "problems": []})
        ((word, (number, (worker_count, statuses))),) = processes[1].orders()
        self.assertEqual((word, number, worker_count), ("answer", 7, 2))
        *workers, supervisor = statuses
        self.assertEqual([element["pid"] for element in workers], [1001, 1002])
        self.assertEqual(supervisor["node"], "n")
        ((text, count),) = [(item["text"], item["count"]) for item in supervisor["problems"]]
        self.assertEqual((text, count), ("worker n-1 (process 1000) ended with status 1", 1))
        self.stop()

    def test_worker_log(self) -> None:
        """Log lines of a worker have its name and level."""
        processes = self.start_ready()
        processes[2].send("log", ["warn", "mediatord.x", "disk {full}"])
        self.assertEqual(self.lines, ["n-3: disk {full}"])
        self.stop()

    def test_stale_sockets(self) -> None:
        """Socket files of a killed worker do not block its replacement."""
        processes = self.start_ready()
        path = Path(processes[0].spec.node_socket)
        path.touch()
        path.with_name("1.sock.lock").symlink_to("1000")
        processes[0].end(killed_by=9)
        self.reactor.advance(0)
        self.assertEqual(self.live_processes()[-1].spec.node_socket, str(path))
        self.assertEqual(list(path.parent.glob("*.sock*")), [])
        self.stop()

    def test_common_failures_are_found_first(self) -> None:
        """Bad keys, databases and addresses are found before workers start."""
        accepted = socket.create_server(("127.0.0.1", 0))
        self.addCleanup(accepted.close)
        endpoint = f"tcp:{accepted.getsockname()[1]}:interface=127.0.0.1"
        free = f"tcp:{find_free_port()}:interface=127.0.0.1"
        troubles = (
            ({"listen": [endpoint]}, f"cannot listen on {endpoint}: Address already in use"),
            ({"storage": {"sqlite": {"path": "nowhere/db"}}, "listen": [free]}, "cannot use the database"),
            ({"identity": {"keys": "nowhere.jwks"}}, "nowhere.jwks: No such file"),
        )
        for settings, reason in troubles:
            with self.assertRaises(StartupError) as caught:
                self.start(2, **settings)
            self.assertIn(reason, str(caught.exception))
            self.assertEqual((self.reactor.spawned, list(self.directory.glob("mediatord-*"))), ([], []))
            self.stop()
        self.start(2, listen=[free])
        self.stop()


class WorkerSettingsTests(SynchronousTestCase):
    def test_long_names(self) -> None:
        """A worker's name is valid and unique."""
        for node in ("n" * 63, "n" * 59 + ".-_x"):
            names = {derive_worker_config(Config(node=node), number).node or "" for number in range(1, 13)}
            self.assertEqual(len(names), 12)
            for name in names:
                self.assertEqual(Config(node=name).node_name, name)

    def test_configuration_round_trip(self) -> None:
        """A worker reads every kind of setting unchanged."""
        config = Config.model_validate(
            {
                "trusted_proxies": ["10.0.0.0/8", "::1"],
                "queue": {"ttl": "90m"},
                "didcomm": {"endpoints": {"did:web:a.example": "https://a.example"}, "allow": ["did:web:b.example"]},
                "storage": {"mongodb": {"uri": "mongodb://a:b@c/d"}},
                "node": "n",
            }
        ).resolved(Path("/somewhere"))
        worker = derive_worker_config(config, 1)
        self.assertEqual(Config.model_validate_json(worker.model_dump_json()), worker)

    def test_drain_timeout(self) -> None:
        """A short timeout is divided too."""
        self.assertEqual(derive_worker_config(Config(drain_timeout=1), 1).drain_timeout, 0.5)

    def test_refused_settings(self) -> None:
        """Settings that exclude workers are refused."""
        for more in (
            {"storage": {"backend": "memory"}},
            {
                "cluster": {"listen": "tcp:7070:interface=10.0.0.5", "secret_file": "s"},
                "storage": {"backend": "mongodb"},
            },
        ):
            with self.assertRaisesRegex(ValueError, "workers\n.*expected 1, because"):
                Config.model_validate({"workers": 2, **more})


class WorkerSpecTests(SynchronousTestCase):
    def test_round_trip(self) -> None:
        """A spec is read as written, or refused."""
        brief = WorkerSpec("/tmp/a:b/1.sock", b"\x00\xff", b"\xfe", [5], b'{"keys": []}\n', '{"node":"n"}')
        self.assertEqual(WorkerSpec.from_bytes(brief.to_bytes()), brief)
        self.assertEqual(brief.address, r"unix:/tmp/a\:b/1.sock")
        self.assertRaises(ValueError, WorkerSpec.from_bytes, brief.to_bytes()[:-1])
        self.assertRaises(ValueError, WorkerSpec.from_bytes, b"")


def is_listening(descriptor: int) -> bool:
    """Whether a socket accepts connections."""
    with socket.socket(fileno=os.dup(descriptor)) as copy:
        return bool(copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
