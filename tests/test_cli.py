"""The console script: what it prints, where, and with which exit status (contract section 2)."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from mediatord import __version__
from mediatord.cli import main
from mediatord.config import load
from mediatord.invitation import invitation_url
from mediatord.notify import notify, watchdog_interval

COMMANDS = ("init", "run", "check-config", "did", "invitation", "demo", "status", "log-keys", "whois", "bench")

Capture = pytest.CaptureFixture[str]


def call(*arguments: str) -> int:
    """Run the script in this process; its exit status."""
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert isinstance(caught.value.code, int)
    return caught.value.code


def one_line(capture: Capture) -> str:
    """The only line on standard error, without the name of the program."""
    captured = capture.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("mediatord: ")
    assert captured.err.count("\n") == 1
    return captured.err.removeprefix("mediatord: ").strip()


@pytest.fixture
def made(tmp_path: Path, capsys: Capture) -> Path:
    """A configuration that init has made."""
    assert call("init", "--dir", str(tmp_path / "m")) == 0
    capsys.readouterr()
    return tmp_path / "m" / "mediator.yaml"


def test_help(capsys: Capture) -> None:
    """--help lists the subcommands."""
    assert call("--help") == 0
    shown = capsys.readouterr().out
    assert all(f"  {name} " in shown for name in COMMANDS)


@pytest.mark.parametrize("command", [name for name in COMMANDS if name != "bench"])
def test_help_of_each(command: str, capsys: Capture) -> None:
    """Every subcommand explains itself; bench is a program of its own."""
    assert call(command, "--help") == 0
    assert capsys.readouterr().out.startswith(f"Usage: mediatord {command} ")


def test_version(capsys: Capture) -> None:
    """--version names the version."""
    assert call("--version") == 0
    assert capsys.readouterr().out == f"mediatord {__version__}\n"


@pytest.mark.parametrize(
    "arguments",
    [["fly"], ["did"], ["did", "--confg", "x"], ["status", "--url", "ftp://x"], ["init", "--public-url", "nowhere"]],
)
def test_wrong_usage(arguments: Sequence[str], capsys: Capture) -> None:
    """Wrong usage is one line and status 2."""
    assert call(*arguments) == 2
    assert one_line(capsys)


def test_init(tmp_path: Path, capsys: Capture) -> None:
    """init writes a configuration, keys and the key of the log, and prints the DIDs and the next command."""
    directory = tmp_path / "a" / "b"
    assert call("init", "--dir", str(directory), "--public-url", "https://m.example") == 0
    shown = capsys.readouterr().out
    assert {path.name for path in directory.iterdir()} == {"mediator.yaml", "keys.jwks", "log.key"}
    assert all(path.stat().st_mode & 0o077 == 0 for path in (directory / "keys.jwks", directory / "log.key"))
    config = load(directory / "mediator.yaml", {})
    assert config.public_url == "https://m.example"
    assert config.listen == ("tcp:8080:interface=127.0.0.1",)
    assert "\ndid:peer:2.E" in shown
    assert "\ndid:web:m.example\n" in shown
    assert f"next: mediatord run --config {directory}/mediator.yaml\n" in shown


def test_init_on_another_port(tmp_path: Path) -> None:
    """Who gives a public URL on this machine means to listen there."""
    assert call("init", "--dir", str(tmp_path), "--public-url", "http://127.0.0.1:9123") == 0
    assert load(tmp_path / "mediator.yaml", {}).listen == ("tcp:9123:interface=127.0.0.1",)


@pytest.mark.parametrize("name", ["mediator.yaml", "keys.jwks", "log.key"])
def test_init_overwrites_nothing(name: str, tmp_path: Path, capsys: Capture) -> None:
    """If one of its files is there, init names it and writes none."""
    (tmp_path / name).write_text("mine")
    assert call("init", "--dir", str(tmp_path)) == 1
    assert one_line(capsys) == f"{tmp_path}/{name} is there already and is not overwritten"
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(name, "mine")]


def test_check_config(made: Path, capsys: Capture) -> None:
    """A good configuration is said to be one."""
    assert call("check-config", "--config", str(made)) == 0
    assert capsys.readouterr().out == f"{made}: ok\n"


def test_check_config_lists_all(tmp_path: Path, capsys: Capture) -> None:
    """A bad one costs one line per problem, which an editor can jump to, and status 2."""
    path = tmp_path / "m.yaml"
    path.write_text("queue: {ttl: x}\nworkers: 0\n")
    assert call("check-config", "--config", str(path)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert [line.split(": ")[:2] for line in captured.err.splitlines()] == [
        [f"{path}:1", "queue.ttl"],
        [f"{path}:2", "workers"],
    ]


def test_check_config_looks_at_the_keys(made: Path, capsys: Capture) -> None:
    """Keys that the daemon would refuse are found as well."""
    (made.parent / "keys.jwks").chmod(0o644)
    assert call("check-config", "--config", str(made)) == 1
    assert one_line(capsys).endswith(f"type: chmod 600 {made.parent}/keys.jwks")


@pytest.mark.parametrize("command", ["run", "did", "invitation"])
def test_bad_configuration(command: str, tmp_path: Path, capsys: Capture) -> None:
    """Every other command stops at a bad configuration with its first problem and the number of the others."""
    path = tmp_path / "m.yaml"
    path.write_text("queue: {ttl: x}\nworkers: 0\n")
    assert call(command, "--config", str(path)) == 2
    line = one_line(capsys)
    assert line.startswith(f"{path}:1: queue.ttl: expected a duration")
    assert line.endswith("(and 1 more; mediatord check-config lists all)")


@pytest.mark.parametrize("command", ["run", "did", "invitation"])
def test_missing_keys(command: str, made: Path, capsys: Capture) -> None:
    """Without keys nothing starts, and the line says which file is missing."""
    (made.parent / "keys.jwks").unlink()
    assert call(command, "--config", str(made)) == 1
    assert one_line(capsys) == f"{made.parent}/keys.jwks cannot be read: No such file or directory"


def test_did(made: Path, capsys: Capture) -> None:
    """did prints the did:peer:2, then the did:web, the same every time."""
    assert call("did", "--config", str(made)) == 0
    peer, web = capsys.readouterr().out.splitlines()
    assert peer.startswith("did:peer:2.Ez6LS")
    assert web == "did:web:127.0.0.1%3A8080"
    assert call("did", "--config", str(made)) == 0
    assert capsys.readouterr().out.splitlines() == [peer, web]


def test_invitation(made: Path, capsys: Capture) -> None:
    """invitation prints the URL and its QR code."""
    assert call("did", "--config", str(made)) == 0
    did = capsys.readouterr().out.splitlines()[0]
    assert call("invitation", "--config", str(made)) == 0
    url, blank, *code = capsys.readouterr().out.splitlines()
    assert url == invitation_url("http://127.0.0.1:8080", did)
    assert blank == ""
    assert len(code) > 20


@contextmanager
def answering(pages: dict[str, tuple[int, str]]) -> Iterator[str]:
    """A web server on loopback with these pages: path -> (status, body); its URL."""

    class Pages(BaseHTTPRequestHandler):
        def do_GET(self) -> None:  # noqa: N802  the standard library's name
            status, body = pages.get(self.path, (404, ""))
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Pages)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


METRICS = """\
# TYPE mediator_messages_forwarded_total counter
mediator_messages_forwarded_total 12.0
# TYPE mediator_active_connections gauge
mediator_active_connections 3.0
# TYPE mediator_storage_up gauge
mediator_storage_up 1.0
# TYPE mediator_message_queue_size gauge
mediator_message_queue_size{did="did:web:a"} 4.0
mediator_message_queue_size{did="other"} 2.0
# TYPE mediator_build_info gauge
mediator_build_info{version="9.9"} 1.0
"""


def test_status(capsys: Capture) -> None:
    """status shows health and the figures of a running daemon."""
    with answering({"/health": (200, '{"status":"ok"}'), "/metrics": (200, METRICS)}) as url:
        assert call("status", "--url", url + "/") == 0
    rows = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert rows["status"] == "ok"
    assert rows["version"] == "9.9"
    assert rows["storage"] == "up"
    assert rows["connections"] == "3"
    assert rows["waiting"] == "6 messages, 4 in the longest queue"
    assert (rows["forwarded"], rows["expired"]) == ("12", "0")
    assert "workers" not in rows


def test_status_of_workers(capsys: Capture) -> None:
    """Where there are several processes, status says how many of them answer."""
    figures = METRICS + "mediator_workers 4.0\nmediator_workers_answered 3.0\n"
    with answering({"/health": (200, '{"status":"ok"}'), "/metrics": (200, figures)}) as url:
        assert call("status", "--url", url) == 0
    rows = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert rows["workers"] == "3 of 4 answer"


def test_worker_is_for_the_supervisor(capsys: Capture) -> None:
    """Who types it is told so in a line, and it is not in the help."""
    done = subprocess.run(
        [sys.executable, "-m", "mediatord", "worker", "x"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "mediatord: a worker is begun by its supervisor, which is what mediatord run starts\n"
    call("--help")
    assert "worker" not in capsys.readouterr().out


def test_status_unhealthy(capsys: Capture) -> None:
    """A daemon that is not well is shown with the reason it gives, and the exit status is 1."""
    pages = {"/health": (503, '{"status":"error","detail":"store"}'), "/metrics": (403, "")}
    with answering(pages) as url:
        assert call("status", "--url", url) == 1
    shown = capsys.readouterr().out
    assert "error: store" in shown
    assert "HTTP 403" in shown


def test_status_of_something_else(capsys: Capture) -> None:
    """What does not answer as a mediator is none."""
    with answering({"/health": (200, "[]")}) as url:
        assert call("status", "--url", url) == 1
    assert one_line(capsys) == f"{url}/health: expected the answer of a mediator, got HTTP 200"


def test_status_of_nobody(capsys: Capture) -> None:
    """Where nobody listens the line says so."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        assert call("status", "--url", url) == 1
    assert one_line(capsys) == f"{url}/health: Connection refused"


def test_as_a_module() -> None:
    """`python -m mediatord` is the same script."""
    done = subprocess.run([sys.executable, "-m", "mediatord", "fly"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "mediatord: No such command 'fly'.\n")


@pytest.mark.parametrize("abstract", [False, True])
def test_notify(abstract: bool, tmp_path: Path) -> None:
    """States reach the socket that systemd names, in the file system or abstract."""
    name = f"@mediatord-{tmp_path.name}-{id(tmp_path)}" if abstract else str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind("\0" + name[1:] if abstract else name)
        assert notify("READY=1", {"NOTIFY_SOCKET": name})
        receiver.setblocking(False)
        assert receiver.recv(100) == b"READY=1"


def test_notify_nobody(tmp_path: Path) -> None:
    """Without systemd, or when it is gone, nothing happens."""
    assert not notify("READY=1", {})
    assert not notify("READY=1", {"NOTIFY_SOCKET": str(tmp_path / "gone")})


def test_watchdog() -> None:
    """The watchdog is fed twice as often as it asks, if it asks this process."""
    assert watchdog_interval({"WATCHDOG_USEC": "30000000"}) == 15.0
    assert watchdog_interval({}) is None
    assert watchdog_interval({"WATCHDOG_USEC": "x"}) is None
    assert watchdog_interval({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1"}) is None
