"""The supervisor: its workers are imitated, everything else is real."""

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


class Process:
    """What the reactor spawns; it says and does what the test wants."""

    def __init__(
        self, protocol: Any, pid: int, arguments: list[str], env: dict[str, str], fds: dict[int, Any]
    ) -> None:
        self.protocol = protocol
        self.pid = pid
        self.arguments = arguments
        self.env = env
        self.fds = fds
        self.pipes = {number for number, kind in fds.items() if kind in ("r", "w")}
        self.told: dict[int, bytes] = {COMMAND_FD: b"", SPEC_FD: b""}
        self.signals: list[str] = []
        self.numbers: list[int] = []
        self.over = False
        protocol.makeConnection(self)

    def writeToChild(self, number: int, data: bytes) -> None:  # noqa: N802
        assert number in self.pipes
        self.told[number] += data

    def closeChildFD(self, number: int) -> None:  # noqa: N802
        self.pipes.remove(number)

    def signalProcess(self, name: str) -> None:  # noqa: N802
        if self.over:
            raise ProcessExitedAlready
        self.signals.append(name)

    @property
    def brief(self) -> WorkerSpec:
        """What it was told at the beginning."""
        assert SPEC_FD not in self.pipes, "it would wait for more"
        return WorkerSpec.from_bytes(self.told[SPEC_FD])

    def orders(self) -> list[tuple[str, Any]]:
        """What it was told since the last call."""
        lines, self.told[COMMAND_FD] = self.told[COMMAND_FD], b""
        return [(word, content) for word, content in map(json.loads, lines.splitlines())]

    def questions(self) -> list[tuple[str, Any]]:
        """What it was asked since the last call, and nothing else."""
        found = []
        for word, content in self.orders():
            assert word == "ask", word
            number, question, about = content
            self.numbers.append(number)
            found.append((question, about))
        return found

    def answer(self, value: Any = None) -> None:
        """Answer the oldest question that is not answered, if there is one."""
        self.questions()
        if self.numbers:
            self.say("answer", [self.numbers.pop(0), value])

    def say(self, word: str, content: Any = None) -> None:
        """Say something, in two pieces."""
        line = encode_control_message(word, content)
        self.protocol.childDataReceived(REPORT_FD, line[:3])
        self.protocol.childDataReceived(REPORT_FD, line[3:])

    def end(self, status: int | None = None, killed_by: int | None = None) -> None:
        """Be no more."""
        self.over = True
        self.pipes.clear()
        reason: Exception = ProcessTerminated(status, killed_by) if status or killed_by else ProcessDone(None)
        self.protocol.processEnded(Failure(reason))


class Port:
    """A UNIX port."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self.fileno = self._socket.fileno

    def stopReading(self) -> None:  # noqa: N802
        """It never did."""

    def connectionLost(self, reason: object) -> None:
        self._socket.close()


class SpawningReactor(MemoryReactorClock):
    """A reactor that runs, and notes what it spawns."""

    def __init__(self) -> None:
        super().__init__()
        self.spawned: list[Process] = []
        self.no_more = False

    def listenUNIX(self, address: Any, factory: Any, *arguments: Any, **more: Any) -> Any:  # noqa: N802
        return Port()

    def callWhenRunning(self, callable: Any, *arguments: Any, **more: Any) -> None:  # noqa: N802
        callable(*arguments, **more)

    def spawnProcess(self, protocol: Any, executable: str, args: Any, env: Any, childFDs: Any) -> None:  # noqa: N802, N803
        if self.no_more:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        self.spawned.append(Process(protocol, 1000 + len(self.spawned), args, env, childFDs))


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
        note: Any = self.note
        globalLogPublisher.addObserver(note)
        self.addCleanup(globalLogPublisher.removeObserver, note)

    def note(self, event: LogEvent) -> None:
        """Keep what an operator would read as a warning."""
        if (
            event.get("log_level")
            and event["log_level"].name in ("warn", "error")
            and "mediatord" in event["log_namespace"]
        ):
            self.lines.append(event["log_format"].format(**event))

    def config(self, workers: int = 3, **more: Any) -> Config:
        """In the directory of the test, with keys."""
        if not (self.directory / "keys.jwks").exists():
            create_keys(self.directory / "keys.jwks")
        plain = {"listen": ["tcp:0:interface=127.0.0.1"], "node": "n", "workers": workers, "control_socket": None}
        plain |= more
        return Config.model_validate(plain).resolved(self.directory)

    def start(self, workers: int = 3, **more: Any) -> list[Process]:
        """Have a daemon; its workers."""
        self.service: Any = makeService(self.config(workers, **more), self.reactor, self.given_up.append)
        self.service.privilegedStartService()
        self.assertEqual(self.reactor.spawned, [])
        self.service.startService()
        return list(self.reactor.spawned)

    def stop(self) -> None:
        """Stop it; all workers do as they are told."""
        stopped = self.service.stopService()
        for process in self.alive():
            process.end()
        self.successResultOf(stopped)
        self.assertEqual(self.reactor.getDelayedCalls(), [])

    def alive(self) -> list[Process]:
        """Those that were not ended."""
        return [process for process in self.reactor.spawned if not process.over]

    def names(self) -> list[str]:
        """Of those that are alive."""
        return [process.arguments[-1] for process in self.alive()]

    def told_systemd(self) -> list[str]:
        """Since the last call."""
        found = []
        while True:
            try:
                found.append(self.manager.recv(100).decode())
            except BlockingIOError:
                return found

    def beat(self, times: int, *answering: Process) -> None:
        """Let so many heartbeats pass; these answer each."""
        for _ in range(times):
            self.reactor.advance(BEAT)
            for process in answering:
                self.assertIn(("ping", None), process.orders())
                process.say("pong")

    def all_ready(self, **more: Any) -> list[Process]:
        """Three workers that serve."""
        processes = self.start(**more)
        for process in processes:
            process.say("status", STATUS_SERVING)
            process.say("ready")
        self.told_systemd()
        return processes

    def test_one_process_for_each_place(self) -> None:
        """Each with its name, its sockets, and a configuration as of a daemon of its own."""
        processes = self.start(listen=["tcp:0:interface=127.0.0.1", f"unix:{self.directory}/s"])
        self.assertEqual(self.names(), ["n-1", "n-2", "n-3"])
        for number, process in enumerate(processes, 1):
            config = Config.model_validate_json(process.brief.settings)
            self.assertEqual((config.node, config.workers), (f"n-{number}", 1))
            self.assertEqual(config.log.directory, self.directory / "log" / f"n-{number}")
            self.assertEqual(process.brief.sockets, [FIRST_SOCKET_FD, FIRST_SOCKET_FD + 1])
            self.assertEqual(set(process.fds), {0, 1, 2, REPORT_FD, SPEC_FD, FIRST_SOCKET_FD, FIRST_SOCKET_FD + 1})
        tcp, unix = zip(*((one.fds[FIRST_SOCKET_FD], one.fds[FIRST_SOCKET_FD + 1]) for one in processes), strict=True)
        self.assertEqual((len(set(tcp)), len(set(unix))), (3, 1))
        places = [process.brief for process in processes]
        self.assertEqual((len({one.node_socket for one in places}), len({one.secret for one in places})), (3, 1))
        self.assertEqual(Path(places[0].node_socket).parent.stat().st_mode & 0o777, 0o700)
        self.stop()
        self.assertFalse(Path(places[0].node_socket).parent.exists())

    def test_nothing_that_others_may_read(self) -> None:
        """Neither secrets nor settings are on the command line or in the environment, nor what is for one process."""
        uri = "mongodb://user:hunter2@db.example/mediatord"
        processes = self.start(storage={"backend": "sqlite", "mongodb": {"uri": uri}})
        process = processes[0]
        self.assertIn("hunter2", process.brief.settings)
        seen = json.dumps([process.arguments, process.env])
        secrets = "hunter2", process.brief.secret.hex(), process.brief.seed.hex()
        for unseen in (*secrets, "NOTIFY_", "WATCHDOG_", "LISTEN_", "MEDIATORD_"):
            self.assertNotIn(unseen, seen)
        for secret in secrets:
            self.assertNotIn(secret, repr(process.brief))
        self.stop()

    def test_secret(self) -> None:
        """The same at the next start, and another with another name or other keys."""

        def secret() -> bytes:
            self.reactor = SpawningReactor()
            found = self.start(2)[-1].brief.secret
            self.stop()
            return found

        first = secret()
        self.assertEqual((first, len(first)), (secret(), 32))
        (self.directory / "keys.jwks").unlink()
        second = secret()
        self.assertNotEqual(first, second)

    def test_ready(self) -> None:
        """Once, when all are."""
        processes = self.start()
        for process in processes:
            self.assertEqual(self.told_systemd(), [])
            process.say("ready")
        self.assertEqual(self.told_systemd(), ["READY=1", "WATCHDOG=1"])
        processes[0].end(killed_by=9)
        self.reactor.advance(0)
        self.alive()[-1].say("ready")
        self.assertEqual(self.told_systemd(), [])
        self.stop()
        self.assertEqual(self.told_systemd(), ["STOPPING=1"])

    def test_ready_with_a_replacement(self) -> None:
        """One that ends before all are ready counts when its replacement is."""
        processes = self.start(2)
        processes[0].say("ready")
        processes[0].end(killed_by=9)
        processes[1].say("ready")
        self.assertEqual(self.told_systemd(), [])
        self.reactor.advance(0)
        self.alive()[-1].say("ready")
        self.assertEqual(self.told_systemd()[0], "READY=1")
        self.stop()

    def test_status(self) -> None:
        """That of who is worst off, each time it is another one."""
        processes = self.start(2)
        processes[0].say("status", STATUS_SERVING)
        self.assertEqual(self.told_systemd(), [f"STATUS={STATUS_WAITING_FOR_STORE}"])
        processes[1].say("status", STATUS_WAITING_FOR_STORE)
        self.assertEqual(self.told_systemd(), [])
        processes[1].say("status", STATUS_SERVING)
        self.assertEqual(self.told_systemd(), [f"STATUS={STATUS_SERVING}"])
        processes[0].say("status", "cluster: not joined")
        processes[0].end(killed_by=9)
        self.reactor.advance(0)
        self.alive()[-1].say("status", STATUS_SERVING)
        self.assertEqual(self.told_systemd(), ["STATUS=cluster: not joined", f"STATUS={STATUS_SERVING}"])
        self.stop()

    def test_up_without_a_store(self) -> None:
        """Workers that never served are given up like those that could not start, whatever systemd was told."""
        processes = self.start(2)
        for process in processes:
            process.say("status", STATUS_WAITING_FOR_STORE)
            process.say("ready")
        self.assertEqual(self.told_systemd(), [f"STATUS={STATUS_WAITING_FOR_STORE}", "READY=1", "WATCHDOG=1"])
        for process in processes:
            process.say("start error", "no room")
            process.end(1)
        self.assertEqual(self.given_up, ["no room"])
        self.stop()

    def test_replaced(self) -> None:
        """At once the first time; with a line that says what has happened."""
        processes = self.all_ready()
        processes[1].end(killed_by=11)
        self.assertEqual(self.names(), ["n-1", "n-3"])
        self.reactor.advance(0)
        self.assertEqual(self.names(), ["n-1", "n-3", "n-2"])
        self.assertEqual(self.lines, ["worker n-2 (process 1001) was killed by SIGSEGV"])
        self.assertEqual(self.alive()[-1].fds, processes[1].fds)
        self.stop()

    def test_growing_pauses(self) -> None:
        """The longer the more often, up to half a minute; and at once again after it was steady."""
        processes = self.all_ready()
        processes[0].end(1)
        for pause in (0, 1, 2, 4, 8, 16, 30, 30):
            if pause:
                self.reactor.advance(pause - 0.01)
                self.assertEqual(self.names(), ["n-2", "n-3"])
                self.reactor.advance(0.01)
            else:
                self.reactor.advance(0)
            self.assertEqual(self.names(), ["n-2", "n-3", "n-1"])
            for process in self.alive():
                process.say("pong")
            self.alive()[-1].end(3)
        self.assertEqual(self.lines[-1], "worker n-1 (process 1010) ended with status 3")
        self.reactor.advance(30)
        self.alive()[-1].say("ready")
        for _ in range(12):
            self.beat(1, *self.alive())
        self.alive()[-1].end(3)
        self.reactor.advance(0)
        self.assertEqual(self.names(), ["n-2", "n-3", "n-1"])
        self.stop()

    def test_connections_go_to_others(self) -> None:
        """While a worker is not replaced at once, nobody is kept waiting for it."""
        processes = self.all_ready()
        listening = processes[0].fds[FIRST_SOCKET_FD]
        self.assertTrue(is_listening(listening))
        processes[0].end(1)
        self.assertTrue(is_listening(listening))
        self.reactor.advance(0)
        self.alive()[-1].end(1)
        self.assertFalse(is_listening(listening))
        self.reactor.advance(1)
        self.assertTrue(is_listening(listening))
        self.stop()

    def test_address_lost(self) -> None:
        """While nobody listens, somebody else may; the worker waits for its address then."""
        port = find_free_port()
        processes = self.start(2, listen=[f"tcp:{port}:interface=127.0.0.1"])
        for process in processes:
            process.end(1)
        self.reactor.advance(0)
        for process in self.alive():
            process.end(1)
        with socket.create_server(("127.0.0.1", port)):
            self.reactor.advance(1)
            self.assertEqual(self.names(), [])
        self.assertEqual(self.lines[-1], "cannot start worker n-2: Address already in use")
        self.reactor.advance(2)
        self.assertEqual(self.names(), ["n-1", "n-2"])
        self.stop()

    def test_nobody_can_start(self) -> None:
        """When all say why they cannot, the first reason is given, once."""
        processes = self.start(2)
        for process in processes:
            process.say("start error", f"reason of {process.arguments[-1]}")
            process.end(1)
        self.assertEqual(self.given_up, ["reason of n-2"])
        self.stop()
        self.assertEqual(self.names(), [])

    def test_some_cannot_start(self) -> None:
        """Then it is tried again, not at once, and the reason is in the log."""
        processes = self.start(2)
        processes[1].say("ready")
        processes[0].say("start error", "no room")
        processes[0].end(1)
        self.assertEqual(self.lines, ["worker n-1 (process 1000) ended with status 1: no room"])
        self.reactor.advance(0.99)
        self.assertEqual(self.names(), ["n-2"])
        self.reactor.advance(0.01)
        self.assertEqual(self.names(), ["n-2", "n-1"])
        self.assertEqual(self.given_up, [])
        self.stop()

    def test_nobody_can_start_again(self) -> None:
        """Where there were workers that served, there may be some again."""
        for process in self.all_ready():
            process.end(killed_by=9)
        self.reactor.advance(0)
        for process in self.alive():
            process.say("start error", "no room")
            process.end(1)
        self.assertEqual(self.given_up, [])
        self.reactor.advance(1)
        self.assertEqual(self.names(), ["n-1", "n-2", "n-3"])
        self.stop()

    def test_no_more_processes(self) -> None:
        """A process that cannot be made is tried for again."""
        processes = self.all_ready()
        self.reactor.no_more = True
        processes[0].end(killed_by=9)
        self.reactor.advance(0)
        self.assertEqual(self.lines[-1], "cannot start worker n-1: Resource temporarily unavailable")
        self.reactor.no_more = False
        self.reactor.advance(1)
        self.assertEqual(self.names(), ["n-2", "n-3", "n-1"])
        self.stop()

    def test_hung(self) -> None:
        """Who does not answer for half a minute is killed and replaced; systemd is told nothing as long."""
        processes = self.all_ready()
        self.beat(1, *processes)
        self.beat(HUNG, *processes[1:])
        self.assertEqual(processes[0].signals, [])
        self.assertEqual(self.told_systemd(), ["WATCHDOG=1"])
        self.beat(1, *processes[1:])
        self.assertEqual([process.signals for process in processes], [["KILL"], [], []])
        self.assertEqual(self.lines, ["killing worker n-1 (process 1000): it does not respond"])
        processes[0].end(killed_by=9)
        self.reactor.advance(0)
        replacement = self.alive()[-1]
        replacement.say("ready")
        self.beat(2, replacement, *processes[1:])
        self.assertEqual(self.told_systemd(), ["WATCHDOG=1"])
        self.stop()

    def test_beginning_takes_time(self) -> None:
        """A new worker may take twice as long to answer."""
        processes = self.start(2)
        processes[0].say("pong")
        self.beat(STARTING + HUNG, processes[0])
        self.assertEqual(processes[1].signals, [])
        self.beat(1, processes[0])
        self.assertEqual(processes[1].signals, ["KILL"])
        self.stop()

    def test_the_supervisor_itself_was_asleep(self) -> None:
        """Nobody is blamed for that."""
        processes = self.all_ready()
        self.beat(1, *processes)
        self.reactor.advance(600)
        self.assertEqual([process.signals for process in processes], [[], [], []])
        self.stop()

    def test_stop(self) -> None:
        """All are told at the same time, no connections are taken any more, and it is over with the last of them."""
        processes = self.all_ready()
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

    def test_stop_takes_too_long(self) -> None:
        """Who is still there after `drain_timeout` is killed; workers take less, so as to be done by then."""
        processes = self.start(2, drain_timeout="6s")
        self.assertEqual(Config.model_validate_json(processes[0].brief.settings).drain_timeout, 5)
        stopped = self.service.stopService()
        processes[0].end()
        self.reactor.advance(5.9)
        self.assertEqual(processes[1].signals, ["TERM"])
        self.reactor.advance(0.1)
        self.assertEqual(processes[1].signals, ["TERM", "KILL"])
        processes[1].end(killed_by=9)
        self.successResultOf(stopped)

    def test_stop_while_one_is_to_be_replaced(self) -> None:
        """It is not, any more."""
        processes = self.all_ready()
        processes[0].end(killed_by=9)
        self.stop()
        self.reactor.advance(100)
        self.assertEqual(len(self.reactor.spawned), 3)

    def test_rotate(self) -> None:
        """Every worker is told to close its segment."""
        processes = self.all_ready()
        self.service.rotate()
        self.assertEqual([process.orders() for process in processes], [[("rotate", None)]] * 3)
        self.stop()

    def test_reload(self) -> None:
        """Every worker is given its own settings with what can be applied, and so is who replaces one of them."""
        processes = self.all_ready()
        other = self.config(log={"level": "warn"}, queue={"ttl": 60.0})
        self.service.reload(lambda: other)
        for number, process in enumerate(processes, 1):
            ((word, (settings, outcome, keys)),) = process.questions()
            self.assertEqual((word, outcome), ("reload", "restart_needed"))
            self.assertEqual(keys.encode(), process.brief.keys)
            read = Config.model_validate_json(settings)
            self.assertEqual((read.node, read.log.level, read.queue.ttl), (f"n-{number}", "warn", Config().queue.ttl))
            self.assertEqual(
                settings,
                Config.model_validate_json(process.brief.settings)
                .model_copy(update={"log": read.log})
                .model_dump_json(),
            )
        processes[1].end(killed_by=9)
        self.reactor.advance(0)
        replaced = Config.model_validate_json(self.reactor.spawned[-1].brief.settings)
        self.assertEqual((replaced.node, replaced.log.level), ("n-2", "warn"))
        self.assertEqual(self.lines[0], "configuration reloaded; restart to apply queue.ttl")
        self.stop()

    def served(self, keys: str) -> tuple[str, bool]:
        """The DID that a worker tells with these keys, and whether it accepts others that are to come."""
        identity = MediatorIdentity(parse_keys(keys.encode(), "it"), self.config().public_url)
        return identity.did, bool(identity.prepared_dids)

    def test_rotated_keys(self) -> None:
        """All accept the new DID before any tells it; who replaces one of them is where the others are."""
        processes = self.all_ready()
        self.told_systemd()
        old, _ = self.served(processes[0].brief.keys.decode())
        rotated = rotate_keys(self.directory / "keys.jwks", lambda keys: None)
        new = MediatorIdentity(rotated, self.config().public_url).did
        self.service.reload(self.config)
        for process in processes:
            ((word, (_, outcome, keys)),) = process.questions()
            self.assertEqual((word, outcome, self.served(keys)), ("reload", "ok", (old, True)))
        begun, _ = self.told_systemd()[0].splitlines()
        self.assertEqual(begun, "RELOADING=1")
        processes[0].answer()
        processes[1].end(killed_by=9)
        self.reactor.advance(0)
        replacement = self.reactor.spawned[-1]
        self.assertEqual(self.served(replacement.brief.keys.decode()), (old, True))
        self.assertEqual(processes[0].orders(), [])
        processes[2].answer()
        now = [processes[0], processes[2], replacement]
        for process in now:
            ((word, keys),) = process.questions()
            self.assertEqual((word, self.served(keys)), ("keys", (new, False)))
        self.assertNotIn("READY=1", self.told_systemd())
        for process in now:
            process.answer()
        self.assertEqual(self.told_systemd(), ["READY=1"])
        processes[0].end(killed_by=9)
        self.reactor.advance(0)
        self.assertEqual(self.served(self.reactor.spawned[-1].brief.keys.decode()), (new, False))
        self.stop()

    def test_retired_keys(self) -> None:
        """Who replaces a worker after that still knows what the others send to themselves, and they what it sends."""
        processes = self.all_ready()
        for change in (rotate_keys, lambda path, check: retire_keys(path, "prekey", check)):
            change(self.directory / "keys.jwks", lambda keys: None)
            self.service.reload(self.config)
            for _ in range(2):
                for process in processes:
                    process.answer()
        processes[0].end(killed_by=9)
        self.reactor.advance(0)
        replacement = self.reactor.spawned[-1]
        self.assertNotIn(b'"prekey"', replacement.brief.keys)
        one, other = (self.own_of(process) for process in (processes[1], replacement))
        self.assertEqual(one.token, other.token)
        self.assertTrue(one.identities.is_probe_did(other.identities.identity("m-1").did))
        self.stop()

    def own_of(self, process: Any) -> ProbeCredentials:
        """What a worker's requests to itself are known by."""
        config = Config.model_validate_json(process.brief.settings)
        clock = MemoryReactorClock()
        store = MemoryStore(clock, QueueLimits())
        return CoreServices(clock, config, worker=process.brief, store=store).probe_credentials

    def test_reload_before_all_are_up(self) -> None:
        """Nobody is told that they are."""
        processes = self.start()
        self.service.reload(self.config)
        for process in processes:
            process.answer()
        self.assertEqual([state for state in self.told_systemd() if not state.startswith("STATUS=")], [])
        self.stop()

    def test_refused_reload(self) -> None:
        """Workers go on as before, and begin a segment."""
        processes = self.all_ready()

        def wrong() -> Config:
            raise ConfigError(["mediator.yaml: wrong"])

        self.service.reload(wrong)
        for process in processes:
            ((word, (settings, outcome, _)),) = process.questions()
            self.assertEqual((word, settings, outcome), ("reload", process.brief.settings, "refused"))
        self.stop()

    def test_figures(self) -> None:
        """Who asks is given what all have reported, or those who answer in time."""
        processes = self.all_ready()
        processes[1].say("ask", [7, "all metrics", None])
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

    def scrape(self, process: Process, number: int = 7) -> None:
        """A worker asks for the metrics of all."""
        process.say("ask", [number, "all metrics", None])

    def outcome(self, process: Process) -> tuple[float, ...]:
        """The counter, and how many were asked and have answered, as a worker was told."""
        ((_, (_, page)),) = process.orders()
        return tuple(
            float(re.findall(rf"^{name} (.*)$", page, re.M)[0])
            for name in ("a_total", "mediator_workers", "mediator_workers_answered")
        )

    def test_all_answer(self) -> None:
        """The page is there with the last of them."""
        processes = self.all_ready()
        self.scrape(processes[0])
        for process in processes:
            process.answer("# TYPE a_total counter\na_total 1.0\n")
        self.assertEqual(self.outcome(processes[0]), (3, 3, 3))
        self.stop()

    def test_one_is_silent(self) -> None:
        """It is left out after a second, and what it says later changes nothing."""
        processes = self.all_ready()
        self.scrape(processes[0])
        for process in processes[:2]:
            process.answer("# TYPE a_total counter\na_total 1.0\n")
        self.reactor.advance(QUERY_TIMEOUT - 0.01)
        self.assertEqual(processes[0].orders(), [])
        self.reactor.advance(0.01)
        self.assertEqual(self.outcome(processes[0]), (2, 3, 2))
        processes[2].answer("# TYPE a_total counter\na_total 1.0\n")
        self.assertEqual(processes[0].orders(), [])
        self.stop()

    def test_one_ends_meanwhile(self) -> None:
        """Nobody waits for it; what it has counted before goes on counting."""
        processes = self.all_ready()
        self.scrape(processes[0])
        for process in processes:
            process.answer("# TYPE a_total counter\na_total 1.0\n")
        self.assertEqual(self.outcome(processes[0]), (3, 3, 3))
        self.scrape(processes[0])
        for process in processes[:2]:
            process.answer("# TYPE a_total counter\na_total 2.0\n")
        processes[2].end(1)
        self.assertEqual(self.outcome(processes[0]), (5, 3, 2))
        self.stop()

    def test_the_one_that_asks_ends(self) -> None:
        """Then nobody is there to be told."""
        processes = self.all_ready()
        self.scrape(processes[0])
        processes[0].end(1)
        for process in processes[1:]:
            process.answer("# TYPE a_total counter\na_total 1.0\n")
        self.assertEqual([process.told[COMMAND_FD] for process in processes[1:]], [b"", b""])
        self.stop()

    def test_one_that_has_not_begun(self) -> None:
        """It is not asked."""
        processes = self.start()
        for process in processes[:2]:
            process.say("ready")
        self.scrape(processes[0])
        self.assertEqual(processes[2].orders(), [])
        for process in processes[:2]:
            process.answer("# TYPE a_total counter\na_total 1.0\n")
        self.assertEqual(self.outcome(processes[0]), (2, 2, 2))
        self.stop()

    def test_a_report_that_is_none(self) -> None:
        """It is a fault of ours, which is logged; the one that asks is told that there is no page."""
        processes = self.all_ready()
        self.scrape(processes[0])
        for process in processes:
            process.answer("mediator_workers{ 1\n")
        self.assertEqual(processes[0].orders(), [("answer", [7])])
        self.assertEqual(len(self.flushLoggedErrors(ValueError)), 1)
        self.stop()

    def test_stop_while_asking(self) -> None:
        """No timer is left."""
        processes = self.all_ready()
        self.scrape(processes[0])
        self.stop()

    def test_two_reloads(self) -> None:
        """The second begins when all have answered the first, or have ended."""
        processes = self.all_ready()
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

    def test_reload_that_fails(self) -> None:
        """A worker that could not apply the settings is replaced by one that starts with them."""
        processes = self.all_ready()
        other = self.config(log={"level": "warn"})
        self.service.reload(lambda: other)
        for process in processes:
            process.questions()
        processes[0].say("answer", [processes[0].numbers.pop()])
        for process in processes[1:]:
            process.answer()
        self.assertEqual([process.signals for process in processes], [["TERM"], [], []])
        self.assertEqual(self.told_systemd()[-1], "READY=1")
        processes[0].end()
        self.reactor.advance(0)
        settings = Config.model_validate_json(self.reactor.spawned[-1].brief.settings)
        self.assertEqual((settings.node, settings.log.level), ("n-1", "warn"))
        self.stop()

    def test_reload_while_nobody_runs(self) -> None:
        """It is done at once."""
        processes = self.all_ready()
        self.told_systemd()
        for process in processes:
            process.end(killed_by=9)
        self.service.reload(self.config)
        self.assertEqual(self.told_systemd()[-1], "READY=1")
        self.stop()

    def test_states(self) -> None:
        """The supervisor adds what it has seen itself, but not the lines of workers, and its name for the page."""
        token = self.directory / "token"
        token.touch(0o600)
        token.write_text("x" * 32)
        processes = self.all_ready(admin={"listen": "tcp:0:interface=127.0.0.1", "token_file": "token"})
        self.assertEqual([len(process.brief.sockets) for process in processes], [2, 2, 2])
        processes[0].say("log", ["warn", "mediatord.x", "mine"])
        processes[0].end(1)
        processes[1].say("ask", [7, "all states", None])
        for process in processes[1:]:
            self.assertEqual(process.questions(), [("state", None)])
            process.answer({"pid": process.pid, "problems": []})
        ((word, (number, (asked, told))),) = processes[1].orders()
        self.assertEqual((word, number, asked), ("answer", 7, 2))
        *workers, supervisor = told
        self.assertEqual([one["pid"] for one in workers], [1001, 1002])
        self.assertEqual(supervisor["node"], "n")
        ((text, count),) = [(one["text"], one["count"]) for one in supervisor["problems"]]
        self.assertEqual((text, count), ("worker n-1 (process 1000) ended with status 1", 1))
        self.stop()

    def test_log(self) -> None:
        """What a worker has to say is written with its name and its level."""
        processes = self.all_ready()
        processes[2].say("log", ["warn", "mediatord.x", "disk {full}"])
        self.assertEqual(self.lines, ["n-3: disk {full}"])
        self.stop()

    def test_sockets_left_behind(self) -> None:
        """By a worker that was killed are not in the way of its replacement."""
        processes = self.all_ready()
        path = Path(processes[0].brief.node_socket)
        path.touch()
        path.with_name("1.sock.lock").symlink_to("1000")
        processes[0].end(killed_by=9)
        self.reactor.advance(0)
        self.assertEqual(self.alive()[-1].brief.node_socket, str(path))
        self.assertEqual(list(path.parent.glob("*.sock*")), [])
        self.stop()

    def test_what_all_would_fail_at(self) -> None:
        """Is found before there is any worker: keys, the database, an address."""
        taken = socket.create_server(("127.0.0.1", 0))
        self.addCleanup(taken.close)
        endpoint = f"tcp:{taken.getsockname()[1]}:interface=127.0.0.1"
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
        """A worker's name is a valid one, and no other worker's."""
        for node in ("n" * 63, "n" * 59 + ".-_x"):
            names = {derive_worker_config(Config(node=node), number).node or "" for number in range(1, 13)}
            self.assertEqual(len(names), 12)
            for name in names:
                self.assertEqual(Config(node=name).node_name, name)

    def test_nothing_is_lost(self) -> None:
        """A worker reads its configuration as it was meant, every kind of value included."""
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
        """A short one is shared as well."""
        self.assertEqual(derive_worker_config(Config(drain_timeout=1), 1).drain_timeout, 0.5)

    def test_refused_settings(self) -> None:
        """Where there would be two ways of having several nodes, or nothing to share."""
        for more in (
            {"storage": {"backend": "memory"}},
            {
                "cluster": {"listen": "tcp:7070:interface=10.0.0.5", "secret_file": "s"},
                "storage": {"backend": "mongodb"},
            },
        ):
            with self.assertRaisesRegex(ValueError, "workers\n.*expected 1 with"):
                Config.model_validate({"workers": 2, **more})


class BriefTests(SynchronousTestCase):
    def test_brief(self) -> None:
        """It is read as written, or not at all."""
        brief = WorkerSpec("/tmp/a:b/1.sock", b"\x00\xff", b"\xfe", [5], b'{"keys": []}\n', '{"node":"n"}')
        self.assertEqual(WorkerSpec.from_bytes(brief.to_bytes()), brief)
        self.assertEqual(brief.address, r"unix:/tmp/a\:b/1.sock")
        self.assertRaises(ValueError, WorkerSpec.from_bytes, brief.to_bytes()[:-1])
        self.assertRaises(ValueError, WorkerSpec.from_bytes, b"")


def is_listening(descriptor: int) -> bool:
    """Whether a socket takes connections."""
    with socket.socket(fileno=os.dup(descriptor)) as copy:
        return bool(copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
