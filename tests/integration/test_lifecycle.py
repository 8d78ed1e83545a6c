"""Start, signals, stop and store failures, as operators and service managers see them (contract 2)."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
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
from mediatord.wallet.didcomm_client import PROBLEM_REPORT, DIDCommWallet, MediatorProblem
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
    read_marker,
)
from tests.integration.sqlite_lock import lock_database
from tests.notify_socket import NotifySocket

reactor: Any = _reactor

# Commands as typed by a person, and as in systemd/mediatord.service.
COMMANDS = {
    "run": [sys.executable, "-m", "mediatord", "run", "--config"],
    "twistd": [str(Path(sys.executable).with_name("twistd")), "-n", "--pidfile=", "mediatord", "--config"],
}
LOAD_DURING_STOP = 1000


def environment(**more: str) -> dict[str, str]:
    """The environment without settings of mediatord and without a service manager."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("MEDIATORD_", "NOTIFY_"))}
    return {**variables, **more}


def send_request(port: int, method: str, path: str, body: bytes | None = None) -> tuple[int, str | None, bytes]:
    """One HTTP request on a new connection: status, Retry-After and body."""
    connection = HTTPConnection("127.0.0.1", port, timeout=PATIENCE_SECONDS)
    with contextlib.closing(connection):
        return send_request_on(connection, method, path, body)


def send_request_on(
    connection: HTTPConnection, method: str, path: str, body: bytes | None = None
) -> tuple[int, str | None, bytes]:
    """The same on a persistent connection."""
    connection.request(method, path, body, {"Content-Type": ENCRYPTED_MEDIA_TYPE} if body else {})
    response = connection.getresponse()
    return response.status, response.getheader("Retry-After"), response.read()


class DaemonTestCase(TestCase):
    """Tests with daemons that end with the test."""

    def start_daemon(self, settings: dict[str, Any] | None = None) -> Daemon:
        """A running daemon."""
        daemon = prepare_daemon(settings)
        daemon.__enter__()
        # Killed at the end of the test: orderly stops have tests of their own.
        self.addCleanup(daemon.__exit__, AssertionError, None, None)
        return daemon

    async def open_socket(self, wallet: DIDCommWallet) -> DIDCommSocket:
        """An open socket, closed at the end of the test."""
        socket = await connect_didcomm_socket(reactor, wallet)
        self.addCleanup(socket.close)
        return socket

    def open_connection(self, daemon: Daemon) -> HTTPConnection:
        """A persistent connection."""
        connection = HTTPConnection("127.0.0.1", daemon.port, timeout=PATIENCE_SECONDS)
        connection.connect()
        self.addCleanup(connection.close)
        return connection

    async def problem_of(self, request: Awaitable[object]) -> MediatorProblem:
        """The problem report of a request that must be refused."""
        with self.assertRaises(MediatorProblem) as context:
            await request
        problem: MediatorProblem = context.exception
        return problem

    async def stop(self, daemon: Daemon) -> None:
        """Stop the daemon, which must end in time with status 0 and without a traceback."""
        await deferToThread(daemon.stop)
        self.assertNotIn("Traceback", daemon.output())


class StopTests(DaemonTestCase):
    """SIGTERM."""

    async def test_stop_answers_requests_sent_before(self) -> None:
        """
        Requests sent before SIGTERM are answered, with 202 only if stored; sockets are closed with 1001, and the
        status is 0 (reference 3.2, 11 row 33).
        """
        daemon = self.start_daemon(ROOMY)
        bob = await enrol_wallet(daemon, reactor)
        live, idle = await self.open_socket(bob), await self.open_socket(bob)
        await live.live()
        senders = LoadSenders(daemon.port, prepare_forwards(bob, "load", LOAD_DURING_STOP))
        senders.start()
        await deferToThread(senders.wait_for_answers, 100)
        # Connections not yet accepted when the daemon stops listening get no response.
        await deferToThread(senders.wait_for_connections)
        stop_time = time.monotonic()
        await self.stop(daemon)
        await deferToThread(senders.join)
        self.assertEqual([await live.closed(), await idle.closed()], [1001, 1001])
        self.assert_answered(senders, stop_time)
        daemon.start()
        drained = await drain_queue(bob)
        accepted = set(senders.markers(202))
        self.assertEqual(accepted - set(drained), set())
        self.assertEqual(set(drained) - accepted - set(senders.markers(None)), set())
        self.assertEqual([marker for marker, ids in drained.items() if len(ids) != 1], [])

    def assert_answered(self, senders: LoadSenders, stop_time: float) -> None:
        self.assertEqual(set(senders.markers(202, 503, None)), {post.marker for post in senders.posts})
        unanswered = [post for post in senders.posts if post.sent_at < stop_time and post.status is None]
        self.assertEqual(unanswered, [])
        run_failing = [post for post in senders.posts if post.status == 503]
        self.assertEqual([post for post in run_failing if not (post.retry_after or "").isdigit()], [])

    async def test_stop_waits_for_commit(self) -> None:
        """A request begun before SIGTERM is completed, answered 202 and stored, however slow the disk."""
        daemon = self.start_daemon()
        bob = await enrol_wallet(daemon, reactor)
        connection, slow_connection = self.open_connection(daemon), self.open_connection(daemon)
        (forward,) = prepare_forwards(bob, "slow", 1)
        with lock_database(daemon.directory / "mediator.sqlite3"):
            slow_connection.request("POST", "/didcomm", forward.body, {"Content-Type": ENCRYPTED_MEDIA_TYPE})
            self.assertEqual(
                send_request_on(connection, "GET", "/did")[0], 200
            )  # by now the forward has been read as well
            os.kill(daemon.pid, signal.SIGTERM)
            self.assertEqual(send_request_on(connection, "GET", "/did")[0], 200)  # by now the stop has begun
        self.assertEqual((await deferToThread(slow_connection.getresponse)).status, 202)
        await self.stop(daemon)
        daemon.start()
        self.assertEqual(list(await drain_queue(bob)), [forward.marker])

    async def test_stop_ends_despite_unresponsive_clients(self) -> None:
        """
        Neither a socket that ignores the close frame, nor half a request, nor a second SIGTERM prevents an orderly
        stop; meanwhile open connections get 503 and new ones are refused (reference 11 row 33).
        """
        daemon = self.start_daemon()
        bob = await enrol_wallet(daemon, reactor)
        responsive = await self.open_socket(bob)
        unresponsive = WebSocketClient(f"ws://127.0.0.1:{daemon.port}/didcomm")
        self.addCleanup(unresponsive.close)
        half_request = socket.create_connection(("127.0.0.1", daemon.port))
        self.addCleanup(half_request.close)
        half_request.sendall(b"POST /didcomm HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        posting, asking = self.open_connection(daemon), self.open_connection(daemon)
        for connection in (posting, asking):
            self.assertEqual(send_request_on(connection, "GET", "/health")[0], 200)
        (forward,) = prepare_forwards(bob, "late", 1)
        os.kill(daemon.pid, signal.SIGTERM)
        self.assertEqual(await responsive.closed(), 1001)
        # All at once: the daemon waits two seconds for the unresponsive socket.
        posting.request("POST", "/didcomm", forward.body, {"Content-Type": ENCRYPTED_MEDIA_TYPE})
        asking.request("GET", "/health")
        self.assertRaises(ConnectionRefusedError, socket.create_connection, ("127.0.0.1", daemon.port))
        refused = posting.getresponse()
        self.assertEqual((refused.status, str(refused.getheader("Retry-After")).isdigit()), (503, True))
        unhealthy = asking.getresponse()
        self.assertEqual(
            (unhealthy.status, json.loads(unhealthy.read())), (503, {"status": "error", "detail": "stopping"})
        )
        await self.stop(daemon)  # sends the second SIGTERM


class RestartTests(DaemonTestCase):
    """What persists over a restart."""

    async def test_state_persists_over_stop(self) -> None:
        """After an orderly stop (reference 12)."""
        await self.check_restart(Daemon.stop)

    async def test_state_persists_over_kill(self) -> None:
        """After SIGKILL (reference 12)."""
        await self.check_restart(Daemon.kill)

    async def check_restart(self, end: Callable[[Daemon], None]) -> None:
        daemon = self.start_daemon()
        bob = await enrol_wallet(daemon, reactor)
        other_did = WalletIdentity.generate().did
        self.assertEqual(await bob.register(other_did), ["success"])
        queued, pushed, acknowledged = prepare_forwards(bob, "letter", 3)
        self.assertEqual(send_request(daemon.port, "POST", "/didcomm", queued.body)[0], 202)
        lost_push = await self.push_and_acknowledge(daemon, bob, pushed, acknowledged)
        _, request = bob.pack("https://didcomm.org/coordinate-mediation/3.0/recipient-query", {})
        self.assertEqual((await bob.post(request)).status, 200)
        await deferToThread(end, daemon)
        daemon.start()
        self.assertEqual(set(await bob.registered()), {bob.did, other_did})
        self.assertEqual((await bob.status()).message_count, 2)
        drained = await drain_queue(bob)
        self.assertEqual(list(drained), [queued.marker, pushed.marker])
        self.assertEqual(drained[pushed.marker], [lost_push])
        refusal = bob.from_mediator((await bob.post(request)).body).message
        self.assertEqual(refusal.type.uri, PROBLEM_REPORT)
        self.assertEqual((refusal.body or {})["code"], "e.p.crypto.message.dejavu")

    async def push_and_acknowledge(
        self, daemon: Daemon, bob: DIDCommWallet, pushed: PreparedForward, acknowledged: PreparedForward
    ) -> str:
        """Push two messages and acknowledge the second; return the id of the first."""
        socket = await self.open_socket(bob)
        await socket.live()
        delivered = []
        for forward in (pushed, acknowledged):
            self.assertEqual(send_request(daemon.port, "POST", "/didcomm", forward.body)[0], 202)
            delivered.append(await socket.pushed.get())
        self.assertEqual([read_marker(bob, message) for message in delivered], [pushed.marker, acknowledged.marker])
        await socket.acknowledge([delivered[1]])
        return delivered[0].id

    async def test_memory_backend_loses_state_over_restart(self) -> None:
        """storage.backend: memory serves as well and writes no database."""
        daemon = self.start_daemon({"storage": {"backend": "memory"}})
        bob = await enrol_wallet(daemon, reactor)
        (forward,) = prepare_forwards(bob, "letter", 1)
        self.assertEqual(send_request(daemon.port, "POST", "/didcomm", forward.body)[0], 202)
        self.assertEqual(list(await drain_queue(bob)), [forward.marker])
        self.assertFalse((daemon.directory / "mediator.sqlite3").exists())
        await deferToThread(daemon.restart)
        refusal = await self.problem_of(bob.status())
        self.assertEqual(refusal.code, "e.p.req.not_enroll")


class FullDiskTests(DaemonTestCase):
    """Storage that cannot be written."""

    async def test_failing_writes_are_refused_with_503(self) -> None:
        """
        What has to be written gets 503 and /health reports it; the queue can be read. Then service resumes without a
        restart, with what was accepted and nothing else (reference 11 row 17).
        """
        daemon = self.start_daemon()
        bob = await enrol_wallet(daemon, reactor)
        accepted_before, refused_forward, accepted_after = prepare_forwards(bob, "letter", 3)
        self.assertEqual(send_request(daemon.port, "POST", "/didcomm", accepted_before.body)[0], 202)
        # Every write of the daemon to a file fails with EFBIG.
        _, hard = resource.prlimit(daemon.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(daemon.pid, resource.RLIMIT_FSIZE, (0, hard))
        for _ in range(3):
            self.assert_unavailable(daemon, refused_forward)
        refusal = await self.problem_of(bob.register(WalletIdentity.generate().did))
        self.assertEqual((refusal.status, refusal.code), (503, "e.p.me.res.storage"))
        self.assertEqual((await bob.status()).message_count, 1)
        status, retry_after, body = send_request(daemon.port, "GET", "/health")
        self.assertEqual((status, str(retry_after).isdigit()), (503, True))
        self.assertEqual(json.loads(body), {"status": "error", "detail": "store unavailable"})
        resource.prlimit(daemon.pid, resource.RLIMIT_FSIZE, (hard, hard))
        self.assertEqual(send_request(daemon.port, "GET", "/health")[0], 200)
        self.assertEqual(send_request(daemon.port, "POST", "/didcomm", accepted_after.body)[0], 202)
        self.assertEqual(list(await drain_queue(bob)), [accepted_before.marker, accepted_after.marker])
        await self.stop(daemon)

    def assert_unavailable(self, daemon: Daemon, forward: PreparedForward) -> None:
        status, retry_after, body = send_request(daemon.port, "POST", "/didcomm", forward.body)
        self.assertEqual((status, str(retry_after).isdigit()), (503, True))
        self.assertEqual(json.loads(body)["body"]["code"], "e.p.me.res.storage")


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    """A configuration for a free port, as `mediatord init` writes it."""
    _, path = write_initial_files(tmp_path / "m", f"http://127.0.0.1:{find_free_port()}")
    return path


def run_failing(command: str, config: Path) -> tuple[int, list[str]]:
    """Exit status and standard error lines of a daemon that cannot start."""
    result = subprocess.run(
        [*COMMANDS[command], str(config)],
        cwd=config.parent,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert "Traceback" not in result.stdout + result.stderr
    # No invitation is printed.
    assert "invitation" not in result.stdout
    return result.returncode, result.stderr.splitlines()


def port_of(config: Path) -> int:
    """Port of the daemon of a new configuration."""
    (line,) = [line for line in config.read_text("utf-8").splitlines() if line.startswith("public_url: ")]
    return int(line.rpartition(":")[2])


@pytest.mark.parametrize("command", COMMANDS)
def test_port_in_use_is_reported_in_one_line(command: str, config_file: Path) -> None:
    """Another process listens on the port (contract 2)."""
    port = port_of(config_file)
    with socket.create_server(("127.0.0.1", port)):
        status, lines = run_failing(command, config_file)
    assert status == 1
    assert lines == [f"mediatord: cannot listen on tcp:{port}:interface=127.0.0.1: Address already in use"]


@pytest.mark.parametrize("command", COMMANDS)
def test_invalid_settings_are_reported_by_line_and_key(command: str, config_file: Path) -> None:
    """
    An unknown key and a wrong type, with status 2 (contract 4); `run` prints one line that says where the others are
    listed.
    """
    config_file.write_text("queue:\n  tll: 1h\nworkers: many\n")
    first, second = (
        f"mediatord: {config_file}:2: queue.tll: unknown key",
        f"mediatord: {config_file}:3: workers: expected ",
    )
    status, lines = run_failing(command, config_file)
    assert status == 2
    assert lines[0].startswith(first)
    if command == "run":
        assert lines[0].endswith("(and 1 more; run `mediatord check-config` to list all)")
        assert len(lines) == 1
    else:
        assert len(lines) == 2
        assert lines[1].startswith(second)


def test_keys_readable_by_others_are_refused(config_file: Path) -> None:
    """The line says which command corrects it."""
    keys = config_file.parent / "keys.jwks"
    keys.chmod(0o644)
    line = f"mediatord: {keys} is accessible to other users (mode 0644); run: chmod 600 {keys}"
    assert run_failing("run", config_file) == (1, [line])


def test_unusable_database_is_reported_and_unchanged(config_file: Path) -> None:
    """One line with its path and the reason."""
    path = config_file.parent / "mediator.sqlite3"
    content = b"To be or not to be. " * 1000
    path.write_bytes(content)
    status, (line,) = run_failing("run", config_file)
    assert status == 1
    assert line == (
        f"mediatord: cannot use the database {path}: file is not a database; "
        "restore a backup, or recover data as docs/how-to/back-up-and-restore.md describes"
    )
    assert path.read_bytes() == content


@pytest.mark.parametrize("workers", [1, 2])
def test_banner_is_printed_once_it_listens(workers: int, config_file: Path) -> None:
    """With DIDs, invitation and commands to try, also into a pipe."""
    config_file.write_text(config_file.read_text("utf-8").replace("workers: 1", f"workers: {workers}"), "utf-8")
    port = port_of(config_file)
    process = subprocess.Popen(
        [*COMMANDS["run"], str(config_file)],
        cwd=config_file.parent,
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        lines: list[str] = []
        while not lines or "mediatord status" not in lines[-1]:
            lines.append(process.stdout.readline())
            assert lines[-1], "it has ended"
        assert send_request(port, "GET", "/health")[0] == 200
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
    assert lines.count(f"v1 wallets  {url}/invitation/v1\n") == 1
    assert process.returncode == 0


@pytest.mark.parametrize("program", ["twist", "twistd"])
def test_twist_and_twistd_list_the_plugin(program: str, tmp_path: Path) -> None:
    """Both programs know the daemon (contract 2)."""
    command = [str(Path(sys.executable).with_name(program)), "--help"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False
    )
    assert done.returncode == 0
    assert [line.split()[0] for line in done.stdout.splitlines() if "DIDComm" in line] == ["mediatord"]


@contextlib.contextmanager
def start_process(command: str, config: Path, **variables: str) -> Iterator[subprocess.Popen[bytes]]:
    """A daemon started by this command, killed at the end."""
    with (config.parent / "output").open("ab") as output:
        process = subprocess.Popen(
            [*COMMANDS[command], str(config)],
            cwd=config.parent,
            env=environment(**variables),
            stdout=output,
            stderr=output,
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


@pytest.mark.parametrize("command", COMMANDS)
def test_notifies_service_manager(command: str, config_file: Path, tmp_path: Path) -> None:
    """
    READY=1 once requests are served or a reload is done, STOPPING=1 with the orderly stop (systemd's Type=notify and
    notify-reload). The reload names the changed settings that it does not apply.
    """
    with NotifySocket(tmp_path, PATIENCE_SECONDS) as manager:
        with start_process(command, config_file, NOTIFY_SOCKET=manager.address) as process:
            assert manager.next_state() == "READY=1"
            assert manager.statuses[-1] == "serving"
            assert send_request(port_of(config_file), "GET", "/health")[0] == 200
            settings = yaml.safe_load(config_file.read_text("utf-8"))
            settings = merge_settings(settings, {"queue": {"ttl": "60s"}, "limits": {"ip_per_minute": 7}})
            config_file.write_text(yaml.safe_dump(settings), "utf-8")
            process.send_signal(signal.SIGHUP)
            assert manager.next_state().startswith("RELOADING=1\nMONOTONIC_USEC=")
            assert manager.next_state() == "READY=1"
            lines = (config_file.parent / "output").read_text("utf-8").splitlines()
            (reloaded,) = [line for line in lines if "configuration reloaded" in line]
            assert reloaded.endswith("configuration reloaded; restart to apply queue.ttl")
            process.terminate()
            assert manager.next_state() == "STOPPING=1"
            assert process.wait(STOP_SECONDS) == 0
        assert manager.is_empty()


@pytest.mark.exhaustive
@pytest.mark.parametrize("workers", [1, 2])
def test_is_ready_for_systemd_without_store(workers: int, config_file: Path, tmp_path: Path) -> None:
    """The daemon runs, answers 503 and keeps connecting; without READY=1 systemd would end it."""
    storage = {"backend": "mongodb", "mongodb": {"uri": "mongodb://127.0.0.1:1/mediatord"}}
    settings = merge_settings(
        yaml.safe_load(config_file.read_text("utf-8")), {"storage": storage, "workers": workers}
    )
    config_file.write_text(yaml.safe_dump(settings), encoding="utf-8")
    with NotifySocket(tmp_path, PATIENCE_SECONDS) as manager:
        with start_process("twistd", config_file, NOTIFY_SOCKET=manager.address) as process:
            assert manager.next_state() == "READY=1"
            assert manager.statuses == ["waiting for the store"]
            assert send_request(port_of(config_file), "GET", "/health")[0] == 503
            process.terminate()
            assert manager.next_state() == "STOPPING=1"
            assert process.wait(STOP_SECONDS) == 0
        assert manager.is_empty()


def test_repeated_stop_signals_do_not_disturb_stop(config_file: Path, tmp_path: Path) -> None:
    """It still ends in order with status 0 (contract 2)."""
    with NotifySocket(tmp_path, PATIENCE_SECONDS) as manager:
        with start_process("run", config_file, NOTIFY_SOCKET=manager.address) as process:
            assert manager.next_state() == "READY=1"
            process.terminate()
            assert manager.next_state() == "STOPPING=1"
            while process.poll() is None:
                process.terminate()
            assert process.returncode == 0
