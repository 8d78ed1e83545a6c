"""Start, signals, stop, and a store in trouble: the daemon as operators and service managers see it (contract 2)."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
import yaml
from twisted.internet import reactor as _reactor  # noqa: TID251  the daemon is a child process, its sockets are real
from twisted.internet.threads import deferToThread
from twisted.trial.unittest import TestCase

from mediatord import __version__
from mediatord.bench.raw_clients import WebSocketClient
from mediatord.cli.init import write_initial_files
from mediatord.protocol.didcomm.jwe import ENCRYPTED_MEDIA_TYPE
from mediatord.wallet.didcomm_client import PICKUP, PROBLEM_REPORT, DIDCommWallet, MediatorProblem
from mediatord.wallet.didcomm_identity import WalletIdentity
from mediatord.wallet.didcomm_socket import DIDCommSocket, connect_didcomm_socket
from mediatord.wallet.temporary_daemon import find_free_port
from tests.integration.daemon import STOP_SECONDS, Daemon, merge_settings
from tests.integration.message_load import (
    PATIENCE_SECONDS,
    ROOMY,
    LoadSenders,
    PreparedForward,
    drain_queue,
    enrol_wallet,
    prepare_daemon,
    prepare_forwards,
    prepare_sized_forward,
    read_marker,
)
from tests.integration.small_filesystem import mount_small_filesystem
from tests.integration.sqlite_lock import lock_database
from tests.notify_socket import NotifySocket

reactor: Any = _reactor

# As a person starts it, and as systemd/mediatord.service does.
WAYS = {
    "run": [sys.executable, "-m", "mediatord", "run", "--config"],
    "twistd": [str(Path(sys.executable).with_name("twistd")), "-n", "--pidfile=", "mediatord", "--config"],
}
ENOUGH_TO_STOP_IN = 1000
DISK_BYTES = 1 << 20


def environment(**more: str) -> dict[str, str]:
    """Ours without the settings of a daemon that somebody may be running, and without its service manager."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("MEDIATORD_", "NOTIFY_"))}
    return {**ours, **more}


def ask(port: int, method: str, path: str, body: bytes | None = None) -> tuple[int, str | None, bytes]:
    """One HTTP request on a connection of its own: status, Retry-After and body."""
    connection = HTTPConnection("127.0.0.1", port, timeout=PATIENCE_SECONDS)
    with contextlib.closing(connection):
        return ask_on(connection, method, path, body)


def ask_on(
    connection: HTTPConnection, method: str, path: str, body: bytes | None = None
) -> tuple[int, str | None, bytes]:
    """The same on a connection that stays open."""
    connection.request(method, path, body, {"Content-Type": ENCRYPTED_MEDIA_TYPE} if body else {})
    response = connection.getresponse()
    return response.status, response.getheader("Retry-After"), response.read()


class DaemonTestCase(TestCase):
    """With daemons that end when the test does."""

    def a_daemon(self, settings: dict[str, Any] | None = None) -> Daemon:
        """A running one."""
        daemon = prepare_daemon(settings)
        daemon.__enter__()
        # What a test leaves running is killed: an orderly stop is a subject of its own.
        self.addCleanup(daemon.__exit__, AssertionError, None, None)
        return daemon

    async def a_socket(self, wallet: DIDCommWallet) -> DIDCommSocket:
        """An open one, that is closed again."""
        opened = await connect_didcomm_socket(reactor, wallet)
        self.addCleanup(opened.close)
        return opened

    def a_connection(self, daemon: Daemon) -> HTTPConnection:
        """One that is open, and stays so."""
        connection = HTTPConnection("127.0.0.1", daemon.port, timeout=PATIENCE_SECONDS)
        connection.connect()
        self.addCleanup(connection.close)
        return connection

    async def problem_of(self, request: Awaitable[object]) -> MediatorProblem:
        """The refusal of a request that has to be refused."""
        with self.assertRaises(MediatorProblem) as caught:
            await request
        problem: MediatorProblem = caught.exception
        return problem

    async def stop(self, daemon: Daemon) -> None:
        """Have it end with status 0 in time, and without complaints."""
        await deferToThread(daemon.stop)
        self.assertNotIn("Traceback", daemon.output())


class StopTests(DaemonTestCase):
    """SIGTERM."""

    async def test_stop_under_load(self) -> None:
        """
        Whoever had asked before SIGTERM is answered, with 202 only if it is stored; sockets are closed with 1001, and
        the status is 0 (reference 3.2, 11 row 33).
        """
        daemon = self.a_daemon(ROOMY)
        bob = await enrol_wallet(daemon, reactor)
        live, idle = await self.a_socket(bob), await self.a_socket(bob)
        await live.live()
        senders = LoadSenders(daemon.port, prepare_forwards(bob, "load", ENOUGH_TO_STOP_IN))
        senders.start()
        await deferToThread(senders.wait_for_answers, 100)
        # What waits to be accepted when the daemon stops listening gets no answer.
        await deferToThread(senders.wait_for_connections)
        asked_to_stop = time.monotonic()
        await self.stop(daemon)
        await deferToThread(senders.join)
        self.assertEqual([await live.closed(), await idle.closed()], [1001, 1001])
        self.assert_answered(senders, asked_to_stop)
        daemon.start()
        found = await drain_queue(bob)
        accepted = set(senders.markers(202))
        self.assertEqual(accepted - set(found), set())
        self.assertEqual(set(found) - accepted - set(senders.markers(None)), set())
        self.assertEqual([marker for marker, ids in found.items() if len(ids) != 1], [])

    def assert_answered(self, senders: LoadSenders, asked_to_stop: float) -> None:
        self.assertEqual(set(senders.markers(202, 503, None)), {post.marker for post in senders.posts})
        unanswered = [post for post in senders.posts if post.sent < asked_to_stop and post.status is None]
        self.assertEqual(unanswered, [])
        refused = [post for post in senders.posts if post.status == 503]
        self.assertEqual([post for post in refused if not (post.retry_after or "").isdigit()], [])

    async def test_stop_waits_for_a_commit(self) -> None:
        """What was begun before SIGTERM is finished, answered 202 and stored, however long the disk takes."""
        daemon = self.a_daemon()
        bob = await enrol_wallet(daemon, reactor)
        kept, slow = self.a_connection(daemon), self.a_connection(daemon)
        (letter,) = prepare_forwards(bob, "slow", 1)
        with lock_database(daemon.directory / "mediator.sqlite3"):
            slow.request("POST", "/didcomm", letter.body, {"Content-Type": ENCRYPTED_MEDIA_TYPE})
            self.assertEqual(ask_on(kept, "GET", "/did")[0], 200)  # by now the letter has been read as well
            os.kill(daemon.pid, signal.SIGTERM)
            self.assertEqual(ask_on(kept, "GET", "/did")[0], 200)  # by now stopping has begun
        self.assertEqual((await deferToThread(slow.getresponse)).status, 202)
        await self.stop(daemon)
        daemon.start()
        self.assertEqual(list(await drain_queue(bob)), [letter.marker])

    async def test_stop_with_the_deaf(self) -> None:
        """
        Neither a socket that does not answer the close frame, nor half a request, nor a second SIGTERM changes the
        orderly end; meanwhile old connections get 503 and new ones none (reference 11 row 33).
        """
        daemon = self.a_daemon()
        bob = await enrol_wallet(daemon, reactor)
        hearing = await self.a_socket(bob)
        deaf = WebSocketClient(f"ws://127.0.0.1:{daemon.port}/didcomm")
        self.addCleanup(deaf.close)
        slow = socket.create_connection(("127.0.0.1", daemon.port))
        self.addCleanup(slow.close)
        slow.sendall(b"POST /didcomm HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        kept = self.a_connection(daemon)
        self.assertEqual(ask_on(kept, "GET", "/health")[0], 200)
        (letter,) = prepare_forwards(bob, "late", 1)
        os.kill(daemon.pid, signal.SIGTERM)
        self.assertEqual(await hearing.closed(), 1001)
        # The deaf one is given some time, and that is when this happens.
        status, retry_after, _ = ask_on(kept, "POST", "/didcomm", letter.body)
        self.assertEqual((status, str(retry_after).isdigit()), (503, True))
        status, _, body = ask_on(kept, "GET", "/health")
        self.assertEqual((status, json.loads(body)), (503, {"status": "error", "detail": "stopping"}))
        self.assertRaises(ConnectionRefusedError, socket.create_connection, ("127.0.0.1", daemon.port))
        await self.stop(daemon)  # which sends the second one


class RestartTests(DaemonTestCase):
    """What is there again when the daemon is."""

    async def test_stop_and_start(self) -> None:
        """After an orderly stop everything is as before (reference 12)."""
        await self.check_memory(Daemon.stop)

    async def test_crash_and_start(self) -> None:
        """After kill -9 just the same (reference 12)."""
        await self.check_memory(Daemon.kill)

    async def check_memory(self, end: Callable[[Daemon], None]) -> None:
        daemon = self.a_daemon()
        bob = await enrol_wallet(daemon, reactor)
        other = WalletIdentity.generate().did
        self.assertEqual(await bob.register(other), ["success"])
        queued, pushed, done = prepare_forwards(bob, "letter", 3)
        self.assertEqual(ask(daemon.port, "POST", "/didcomm", queued.body)[0], 202)
        lost_push = await self.pushes(daemon, bob, pushed, done)
        _, request = bob.pack(f"{PICKUP}/status-request")
        self.assertEqual((await bob.post(request)).status, 200)
        await deferToThread(end, daemon)
        daemon.start()
        self.assertEqual(set(await bob.registered()), {bob.did, other})
        self.assertEqual((await bob.status()).message_count, 2)
        found = await drain_queue(bob)
        self.assertEqual(list(found), [queued.marker, pushed.marker])
        self.assertEqual(found[pushed.marker], [lost_push])
        refusal = bob.from_mediator((await bob.post(request)).body).message
        self.assertEqual(refusal.type.uri, PROBLEM_REPORT)
        self.assertEqual((refusal.body or {})["code"], "e.p.crypto.message.dejavu")

    async def pushes(self, daemon: Daemon, bob: DIDCommWallet, pushed: PreparedForward, done: PreparedForward) -> str:
        """Have two letters pushed and the second one acknowledged; the id of the first."""
        opened = await self.a_socket(bob)
        await opened.live()
        delivered = []
        for letter in (pushed, done):
            self.assertEqual(ask(daemon.port, "POST", "/didcomm", letter.body)[0], 202)
            delivered.append(await opened.pushed.get())
        self.assertEqual([read_marker(bob, one) for one in delivered], [pushed.marker, done.marker])
        await opened.acknowledge([delivered[1]])
        return delivered[0].id

    async def test_memory_backend(self) -> None:
        """storage.backend: memory serves as well, writes no database, and has forgotten all after a restart."""
        daemon = self.a_daemon({"storage": {"backend": "memory"}})
        bob = await enrol_wallet(daemon, reactor)
        (letter,) = prepare_forwards(bob, "letter", 1)
        self.assertEqual(ask(daemon.port, "POST", "/didcomm", letter.body)[0], 202)
        self.assertEqual(list(await drain_queue(bob)), [letter.marker])
        self.assertFalse((daemon.directory / "mediator.sqlite3").exists())
        await deferToThread(daemon.restart)
        refusal = await self.problem_of(bob.status())
        self.assertEqual(refusal.code, "e.p.req.not_enroll")


class StarvedTests(DaemonTestCase):
    """A disk that takes no more."""

    async def test_writes_fail(self) -> None:
        """
        While nothing can be written, forwards and requests get 503 and /health says so; then it goes on without a
        restart, and has what it accepted and nothing else (reference 11 row 17).
        """
        daemon = self.a_daemon()
        bob = await enrol_wallet(daemon, reactor)
        before, meanwhile, after = prepare_forwards(bob, "letter", 3)
        self.assertEqual(ask(daemon.port, "POST", "/didcomm", before.body)[0], 202)
        # For the daemon, every write to a file fails with EFBIG.
        _, hard = resource.prlimit(daemon.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(daemon.pid, resource.RLIMIT_FSIZE, (0, hard))
        for _ in range(3):
            self.assert_unavailable(daemon, meanwhile)
        refusal = await self.problem_of(bob.status())
        self.assertEqual((refusal.status, refusal.code), (503, "e.p.me.res.storage"))
        status, retry_after, body = ask(daemon.port, "GET", "/health")
        self.assertEqual((status, str(retry_after).isdigit()), (503, True))
        self.assertEqual(json.loads(body), {"status": "error", "detail": "store unavailable"})
        resource.prlimit(daemon.pid, resource.RLIMIT_FSIZE, (hard, hard))
        self.assertEqual(ask(daemon.port, "GET", "/health")[0], 200)
        self.assertEqual(ask(daemon.port, "POST", "/didcomm", after.body)[0], 202)
        self.assertEqual(list(await drain_queue(bob)), [before.marker, after.marker])
        await self.stop(daemon)

    def assert_unavailable(self, daemon: Daemon, letter: PreparedForward) -> None:
        status, retry_after, body = ask(daemon.port, "POST", "/didcomm", letter.body)
        self.assertEqual((status, str(retry_after).isdigit()), (503, True))
        self.assertEqual(json.loads(body)["body"]["code"], "e.p.me.res.storage")

    async def test_disk_full(self) -> None:
        """When a real disk with database and log is full, forwards get 503, until there is room again."""
        disk = mount_small_filesystem(self, DISK_BYTES)
        storage = {"sqlite": {"path": str(disk / "mediator.sqlite3")}}
        daemon = self.a_daemon({"storage": storage, "log": {"directory": str(disk / "log")}})
        bob = await enrol_wallet(daemon, reactor)
        before, after = prepare_forwards(bob, "letter", 2)
        # More than fits into the room that the database has taken already.
        large = prepare_sized_forward(bob, "large", DISK_BYTES // 4)
        self.assertEqual(ask(daemon.port, "POST", "/didcomm", before.body)[0], 202)
        filler = disk / "filler"
        with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(512))
        for _ in range(3):
            self.assert_unavailable(daemon, large)
        filler.unlink()
        self.assertEqual(ask(daemon.port, "POST", "/didcomm", after.body)[0], 202)
        self.assertEqual(ask(daemon.port, "GET", "/health")[0], 200)
        self.assertEqual(list(await drain_queue(bob)), [before.marker, after.marker])
        await self.stop(daemon)


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """A configuration for a free port, as `mediatord init` writes it."""
    _, path = write_initial_files(tmp_path / "m", f"http://127.0.0.1:{find_free_port()}")
    return path


def refused(way: str, config: Path) -> tuple[int, list[str]]:
    """Status and lines on standard error of a daemon that cannot start."""
    done = subprocess.run(
        [*WAYS[way], str(config)],
        cwd=config.parent,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert "Traceback" not in done.stdout + done.stderr
    # Nobody is invited to what does not run.
    assert "invitation" not in done.stdout
    return done.returncode, done.stderr.splitlines()


def port_of(config: Path) -> int:
    """Where the daemon of a fresh configuration listens."""
    (line,) = [line for line in config.read_text("utf-8").splitlines() if line.startswith("public_url: ")]
    return int(line.rpartition(":")[2])


@pytest.mark.parametrize("way", WAYS)
def test_port_taken(way: str, made: Path) -> None:
    """Where somebody else listens, the daemon says so in one line and fails (contract 2)."""
    port = port_of(made)
    with socket.create_server(("127.0.0.1", port)):
        status, lines = refused(way, made)
    assert status == 1
    assert lines == [f"mediatord: cannot listen on tcp:{port}:interface=127.0.0.1: Address already in use"]


@pytest.mark.parametrize("way", WAYS)
def test_unreadable_configuration(way: str, made: Path) -> None:
    """What is no YAML costs one line with its place, and status 2 (contract 4)."""
    made.write_text("queue:\n  ttl: [1h\nworkers: 1\n")
    status, (line,) = refused(way, made)
    assert status == 2
    assert line.startswith(f"mediatord: {made}:3: ")


@pytest.mark.parametrize("way", WAYS)
def test_impossible_configuration(way: str, made: Path) -> None:
    """
    An unknown key and a wrong type are found by line and key, with status 2 (contract 4); `run` keeps to one line
    and says where the others are listed.
    """
    made.write_text("queue:\n  tll: 1h\nworkers: many\n")
    first, second = f"mediatord: {made}:2: queue.tll: unknown key", f"mediatord: {made}:3: workers: expected "
    status, lines = refused(way, made)
    assert status == 2
    assert lines[0].startswith(first)
    if way == "run":
        assert lines[0].endswith("(and 1 more; run mediatord check-config to list all)")
        assert len(lines) == 1
    else:
        assert len(lines) == 2
        assert lines[1].startswith(second)


@pytest.mark.parametrize("way", WAYS)
def test_open_keys(way: str, made: Path) -> None:
    """Keys that others may read are not used; the line says what to type."""
    keys = made.parent / "keys.jwks"
    keys.chmod(0o644)
    line = f"mediatord: {keys} is accessible to other users (mode 0644); run: chmod 600 {keys}"
    assert refused(way, made) == (1, [line])


def nowhere(path: Path) -> None:
    """No directory for the database."""
    config = path.parent / "mediator.yaml"
    config.write_text(config.read_text("utf-8").replace("path: mediator.sqlite3", "path: nowhere/mediator.sqlite3"))


def no_database(path: Path) -> None:
    """A file of something else."""
    path.write_bytes(b"To be or not to be. " * 1000)


def newer_database(path: Path) -> None:
    """Ours, as of a version yet to come."""
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE message (id TEXT)")
        connection.execute(f"PRAGMA application_id = {int.from_bytes(b'mdrd')}")
        connection.execute("PRAGMA user_version = 1000")


def foreign_database(path: Path) -> None:
    """Of another program."""
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE invoice (id TEXT)")


NO_DATABASE = (
    "file is not a database; restore a backup, or recover data as docs/how-to/back-up-and-restore.md describes"
)
TROUBLES = {
    "No such file or directory": nowhere,
    NO_DATABASE: no_database,
    "its schema version is 1000, at most 1 is supported; upgrade mediatord": newer_database,
    "the file is a database of another program": foreign_database,
}


@pytest.mark.parametrize(("way", "reason"), [*(("run", reason) for reason in TROUBLES), ("twistd", NO_DATABASE)])
def test_unusable_database(way: str, reason: str, made: Path) -> None:
    """A database that cannot be used is named in one line with the reason, and is not touched."""
    path = made.parent / "mediator.sqlite3"
    TROUBLES[reason](path)
    content = path.read_bytes() if path.exists() else None
    status, (line,) = refused(way, made)
    assert status == 1
    assert line.startswith(f"mediatord: cannot use the database {made.parent}/")
    assert line.endswith(f"mediator.sqlite3: {reason}")
    assert (path.read_bytes() if path.exists() else None) == content


@pytest.mark.parametrize("workers", [1, 2])
def test_banner_comes_when_it_listens(workers: int, made: Path) -> None:
    """Whoever reads in a pipe where the daemon is finds it there, with DIDs, invitation and what to try."""
    made.write_text(made.read_text("utf-8").replace("workers: 1", f"workers: {workers}"), "utf-8")
    port = port_of(made)
    process = subprocess.Popen(
        [*WAYS["run"], str(made)], cwd=made.parent, env=environment(), stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        lines: list[str] = []
        while not lines or "mediatord status" not in lines[-1]:
            lines.append(process.stdout.readline())
            assert lines[-1], "it has ended"
        assert ask(port, "GET", "/health")[0] == 200
        process.send_signal(signal.SIGTERM)
        lines += process.communicate()[0].splitlines()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    url = f"http://127.0.0.1:{port}"
    assert sum(line.startswith(f"mediatord {__version__} for {url}, on tcp:{port}:") for line in lines) == 1
    assert sum(line.startswith("DID         did:peer:2.") for line in lines) == 1
    assert sum(line.startswith(f"invitation  {url}/oob?_oobid=") for line in lines) == 1
    assert process.returncode == 0


@pytest.mark.parametrize("program", ["twist", "twistd"])
def test_plugin_is_listed(program: str, tmp_path: Path) -> None:
    """Twisted's own commands know the daemon (contract 2)."""
    command = [str(Path(sys.executable).with_name(program)), "--help"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False
    )
    assert done.returncode == 0
    assert [line.split()[0] for line in done.stdout.splitlines() if "DIDComm" in line] == ["mediatord"]


@contextlib.contextmanager
def running(way: str, config: Path, **variables: str) -> Iterator[subprocess.Popen[bytes]]:
    """A daemon that was started this way and is not left behind."""
    with (config.parent / "output").open("ab") as output:
        process = subprocess.Popen(
            [*WAYS[way], str(config)], cwd=config.parent, env=environment(**variables), stdout=output, stderr=output
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


@pytest.mark.parametrize("way", WAYS)
def test_service_manager_is_told(way: str, made: Path, tmp_path: Path) -> None:
    """
    READY=1 means that requests are served, or a reload is done; STOPPING=1 comes with the orderly stop (systemd's
    Type=notify and notify-reload).
    """
    with NotifySocket(tmp_path, PATIENCE_SECONDS) as manager:
        with running(way, made, NOTIFY_SOCKET=manager.address) as process:
            assert manager.next() == "READY=1"
            assert manager.statuses[-1] == "serving"
            assert ask(port_of(made), "GET", "/health")[0] == 200
            process.send_signal(signal.SIGHUP)
            assert manager.next().startswith("RELOADING=1\nMONOTONIC_USEC=")
            assert manager.next() == "READY=1"
            process.terminate()
            assert manager.next() == "STOPPING=1"
            assert process.wait(STOP_SECONDS) == 0
        assert manager.silent()


@pytest.mark.exhaustive
@pytest.mark.parametrize("workers", [1, 2])
def test_service_manager_when_the_store_is_away(workers: int, made: Path, tmp_path: Path) -> None:
    """The daemon is up all the same, which is to be said before systemd ends it: it answers 503 and keeps trying."""
    storage = {"backend": "mongodb", "mongodb": {"uri": "mongodb://127.0.0.1:1/mediatord"}}
    settings = merge_settings(yaml.safe_load(made.read_text("utf-8")), {"storage": storage, "workers": workers})
    made.write_text(yaml.safe_dump(settings), encoding="utf-8")
    with NotifySocket(tmp_path, PATIENCE_SECONDS) as manager:
        with running("twistd", made, NOTIFY_SOCKET=manager.address) as process:
            assert manager.next() == "READY=1"
            assert manager.statuses == ["waiting for the store"]
            assert ask(port_of(made), "GET", "/health")[0] == 503
            process.terminate()
            assert manager.next() == "STOPPING=1"
            assert process.wait(STOP_SECONDS) == 0
        assert manager.silent()


def test_impatient_operator(made: Path, tmp_path: Path) -> None:
    """However often the daemon is told to stop while it stops, it does so in order, with status 0 (contract 2)."""
    with NotifySocket(tmp_path, PATIENCE_SECONDS) as manager:
        with running("run", made, NOTIFY_SOCKET=manager.address) as process:
            assert manager.next() == "READY=1"
            process.terminate()
            assert manager.next() == "STOPPING=1"
            while process.poll() is None:
                process.terminate()
            assert process.returncode == 0


def test_signals_rotate_the_log() -> None:
    """SIGUSR1 and SIGHUP close a segment with events and begin another; the daemon goes on (analytics 4.2)."""
    with prepare_daemon({"log": {"rotate": {"compress": False}}}) as daemon:
        pid = daemon.pid
        segments: set[Path] = set()
        for number in (signal.SIGUSR1, signal.SIGHUP):
            assert ask(daemon.port, "POST", "/didcomm", b"{}")[0] == 400
            os.kill(pid, number)
            # It takes signals before requests.
            assert ask(daemon.port, "GET", "/health")[0] == 200
            # One, or two when the hour strikes as well.
            closed = set(daemon.log_directory.glob("events-*.jsonl")) - segments
            segments |= closed
            assert closed
            assert all((events(one)[0], events(one)[-1]) == ("log.open", "log.close") for one in closed)
        assert events(daemon.log_directory / "events.jsonl")[0] == "log.open"
        assert daemon.pid == pid


def events(segment: Path) -> list[str]:
    """The names of the events in a segment."""
    return [json.loads(line)["event"] for line in segment.read_text("utf-8").splitlines()]
