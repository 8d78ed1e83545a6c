"""The console script: what it prints, where, and with which exit status (contract section 2)."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import click
import pytest

from deb.tree import ROOT
from mediatord import __version__
from mediatord.cli import init
from mediatord.cli.commands import _COMMANDS, cli, main
from mediatord.config.file import load_config
from mediatord.identity.invitation import build_invitation_url, build_short_invitation_url
from mediatord.observability.systemd import get_watchdog_interval, notify_systemd


def subcommands(group: click.Group) -> Iterator[tuple[str, click.Command]]:
    """All commands of a group by name, those that are not shown included."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        yield name, command


COMMANDS = tuple(name for name, command in subcommands(cli) if not command.hidden)

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


def test_catalogue() -> None:
    """What is listed without importing anything is what the commands say."""
    for name, command in subcommands(cli):
        assert command.name == name
        assert _COMMANDS[name][1] == ("" if command.hidden else command.get_short_help_str(10_000))


@pytest.mark.system
@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["completion", "bash"], ["queue", "--help"]])
def test_what_is_not_needed_is_not_imported(arguments: Sequence[str]) -> None:
    """Help and completion are there at once: neither the daemon nor what draws tables is loaded for them."""
    heavy = ("twisted", "pydantic", "rich", "pyspark", "pymongo", "cryptography", "prometheus_client", "analytics")
    script = (
        "import sys; from mediatord.cli import main\n"
        "try: main(sys.argv[1:])\n"
        f"finally: print([name for name in {heavy} if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "[]\n")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(shell: str, capsys: Capture) -> None:
    """The script asks the program by its variable; it is the same wherever it is printed."""
    assert call("completion", shell) == 0
    shown = capsys.readouterr().out
    assert f"_MEDIATORD_COMPLETE={shell}_complete" in shown
    assert "mediatord" in shown


def list_leaf_commands(group: click.Group, prefix: str = "") -> Iterator[tuple[str, click.Command]]:
    """Commands that are no groups, by the words that call them."""
    for name, command in subcommands(group):
        if isinstance(command, click.Group):
            yield from list_leaf_commands(command, f"{prefix}{name} ")
        else:
            yield f"{prefix}{name}", command


# They print a script, a narrative or a log.
COMMANDS_WITHOUT_DATA = {"completion", "demo", "run", "worker"}


def test_commands_that_print_data_have_json() -> None:
    without = {
        name
        for name, command in list_leaf_commands(cli)
        if not any("--json" in parameter.opts for parameter in command.params)
    }
    assert without == COMMANDS_WITHOUT_DATA


@pytest.mark.system
def test_completion_by_bash(tmp_path: Path) -> None:
    """In a real shell the installed script knows commands, those of groups, and options."""
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("there is no bash")
    completion = ROOT / "etc/completion/bash/mediatord"
    (tmp_path / "mediatord").write_text(f'#!/bin/sh\nexec {sys.executable} -m mediatord "$@"\n')
    (tmp_path / "mediatord").chmod(0o755)
    for words, found in (("che", ["check-config"]), ("queue p", ["purge"]), ("queue list --t", ["--top"])):
        typed = ["mediatord", *words.split()]
        script = (
            f". {completion}; COMP_WORDS=({shlex.join(typed)}); COMP_CWORD={len(typed) - 1}; "
            "_mediatord_completion mediatord; printf '%s\\n' \"${COMPREPLY[@]}\""
        )
        environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
        done = subprocess.run([bash, "-c", script], env=environment, capture_output=True, text=True, check=True)
        assert done.stdout.split() == found


def test_version(capsys: Capture) -> None:
    """--version names the version."""
    assert call("--version") == 0
    assert capsys.readouterr().out == f"mediatord {__version__}\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ["fly"],
        ["did", "--config"],
        ["did", "--confg", "x"],
        ["status", "--url", "ftp://x"],
        ["init", "--public-url", "nowhere"],
    ],
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
    config = load_config(directory / "mediator.yaml", {})
    assert config.public_url == "https://m.example"
    assert config.listen == ("tcp:8080:interface=127.0.0.1",)
    assert "\ndid:peer:2.E" in shown
    assert "\ndid:web:m.example\n" in shown
    assert f"     mediatord run --config {directory}/mediator.yaml\n" in shown
    assert "to http://127.0.0.1:8080, including WebSockets; or" in shown
    assert [str(network) for network in config.trusted_proxies] == ["127.0.0.0/8", "::1/128"]
    assert (directory / "mediator.yaml").stat().st_mode & 0o777 == 0o640


def test_init_as_json(tmp_path: Path, capsys: Capture) -> None:
    """Programs get the same in one document."""
    assert call("init", "--dir", str(tmp_path / "m"), "--json") == 0
    found = json.loads(capsys.readouterr().out)
    config = found["config"]
    assert config == str(tmp_path / "m" / "mediator.yaml")
    assert found["did"].startswith("did:peer:2.E")
    assert found["next"][0]["commands"] == [f"mediatord check-config --config {config}"]
    assert found["next"][1]["commands"] == [f"mediatord run --config {config}"]


@pytest.mark.system
def test_the_steps_of_init_work(tmp_path: Path, capsys: Capture) -> None:
    """What init tells to type for TLS on this machine gives a configuration that is right."""
    assert call("init", "--dir", str(tmp_path / "m"), "--public-url", "https://localhost:8443", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    (make,), (line,), (check,), (_,), (status, demo) = (one["commands"] for one in found["next"])
    assert status == f"mediatord status --url https://localhost:8443 --ca {tmp_path}/m/tls.pem"
    assert demo == f"mediatord demo --url https://localhost:8443 --ca {tmp_path}/m/tls.pem"
    subprocess.run(shlex.split(make), check=True, capture_output=True)
    path = Path(found["config"])
    path.write_text(path.read_text("utf-8").replace("listen: ['tcp:8080:interface=127.0.0.1']", line), "utf-8")
    assert "ssl:8443" in load_config(path).listen[0]
    assert call(*shlex.split(check)[1:]) == 0
    assert capsys.readouterr().out == f"{path}: ok\n"


def test_init_for_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    """In the directory of the system's daemon, state and logs are where those of daemons are."""
    monkeypatch.setattr(init, "SYSTEM", tmp_path / "etc")
    monkeypatch.setattr(init, "USER", "nobody-of-this-name")
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(init, "_UNIT_PLACES", (tmp_path / "units",))
    (tmp_path / "share/mediatord/systemd").mkdir(parents=True)
    (tmp_path / "share/mediatord/systemd/mediatord.service").touch()
    assert call("init", "--dir", str(tmp_path / "etc"), "--public-url", "https://m.example") == 0
    shown = capsys.readouterr().out
    config = load_config(tmp_path / "etc" / "mediator.yaml", {})
    assert config.storage.sqlite.path == Path("/var/lib/mediatord/mediator.sqlite3")
    assert config.log.directory == Path("/var/log/mediatord")
    assert config.log_key_path == Path("/var/lib/mediatord/log.key")
    assert config.control_socket == Path("/var/lib/mediatord/control.sock")
    assert config.identity.keys == tmp_path / "etc" / "keys.jwks"
    assert "     useradd --system --home-dir /var/lib/mediatord " in shown
    assert f"     cp {tmp_path}/share/mediatord/systemd/mediatord.* {tmp_path}/units/\n" in shown
    assert "     systemctl enable --now mediatord.service\n" in shown
    # It can neither open port 443 nor read certbot's files.
    assert "to http://127.0.0.1:8080, including WebSockets\n" in shown
    assert "ssl:443" not in shown


def test_init_gives_the_system_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    """The daemon's user has the keys and may read the configuration, which stays root's, and get to both."""
    if os.geteuid() != 0:
        pytest.skip("only root can give files away")
    system = tmp_path / "mediatord"
    monkeypatch.setattr(init, "SYSTEM", system)
    monkeypatch.setattr(init, "system_owner", lambda: (12345, 12346))
    assert call("init", "--dir", str(system)) == 0
    found = {path.name: (path.stat().st_uid, path.stat().st_gid) for path in (system, *system.iterdir())}
    assert found == {"mediatord": (0, 12346), "keys.jwks": (12345, 12346), "mediator.yaml": (0, 12346)}
    assert "useradd" not in capsys.readouterr().out


def test_init_on_another_port(tmp_path: Path) -> None:
    """Who gives a public URL on this machine means to listen there."""
    assert call("init", "--dir", str(tmp_path), "--public-url", "http://127.0.0.1:9123") == 0
    assert load_config(tmp_path / "mediator.yaml", {}).listen == ("tcp:9123:interface=127.0.0.1",)


@pytest.mark.parametrize("name", ["mediator.yaml", "keys.jwks", "log.key"])
def test_init_overwrites_nothing(name: str, tmp_path: Path, capsys: Capture) -> None:
    """If one of its files is there, init names it and writes none."""
    (tmp_path / name).write_text("mine")
    assert call("init", "--dir", str(tmp_path)) == 1
    assert one_line(capsys) == f"{tmp_path}/{name} already exists and is not overwritten"
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(name, "mine")]


def test_check_config(made: Path, capsys: Capture) -> None:
    """A good configuration is said to be one."""
    assert call("check-config", "--config", str(made)) == 0
    assert capsys.readouterr().out == f"{made}: ok\n"


@pytest.mark.parametrize("command", ["run", "did", "invitation"])
def test_bad_configuration(command: str, tmp_path: Path, capsys: Capture) -> None:
    """Every other command stops at a bad configuration with its first problem and the number of the others."""
    path = tmp_path / "m.yaml"
    path.write_text("queue: {ttl: x}\nworkers: 0\n")
    assert call(command, "--config", str(path)) == 2
    line = one_line(capsys)
    assert line.startswith(f"{path}:1: queue.ttl: expected a duration")
    assert line.endswith("(and 1 more; run mediatord check-config to list all)")


@pytest.mark.parametrize("command", ["run", "did", "invitation"])
def test_missing_keys(command: str, made: Path, capsys: Capture) -> None:
    """Without keys nothing starts, and the line says which file is missing."""
    (made.parent / "keys.jwks").unlink()
    assert call(command, "--config", str(made)) == 1
    assert one_line(capsys) == f"cannot read {made.parent}/keys.jwks: No such file or directory"


def test_did(made: Path, capsys: Capture) -> None:
    """did prints the did:peer:2, then the did:web, the same every time."""
    assert call("did", "--config", str(made)) == 0
    peer, web = capsys.readouterr().out.splitlines()
    assert peer.startswith("did:peer:2.Ez6LS")
    assert web == "did:web:127.0.0.1%3A8080"
    assert call("did", "--config", str(made)) == 0
    assert capsys.readouterr().out.splitlines() == [peer, web]


def test_did_and_invitation_as_json(made: Path, capsys: Capture) -> None:
    """Programs get one document of each."""
    assert call("did", "--config", str(made), "--json") == 0
    dids = json.loads(capsys.readouterr().out)
    assert dids["web_did"] == "did:web:127.0.0.1%3A8080"
    assert call("invitation", "--config", str(made), "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found == {
        "short_url": build_short_invitation_url("http://127.0.0.1:8080"),
        "url": build_invitation_url("http://127.0.0.1:8080", dids["did"]),
        "did": dids["did"],
    }


def test_invitation(made: Path, capsys: Capture) -> None:
    """invitation prints the short URL, its QR code and the long URL."""
    assert call("did", "--config", str(made)) == 0
    did = capsys.readouterr().out.splitlines()[0]
    assert call("invitation", "--config", str(made)) == 0
    short_url, blank, *code, second_blank, url = capsys.readouterr().out.splitlines()
    assert short_url == build_short_invitation_url("http://127.0.0.1:8080")
    assert url == build_invitation_url("http://127.0.0.1:8080", did)
    assert (blank, second_blank) == ("", "")
    assert 10 < len(code) <= 25


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
        assert call("status", "--url", url + "/", "--over", "0") == 0
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
        assert call("status", "--url", url, "--over", "0") == 0
    rows = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert rows["workers"] == "3 of 4 respond"


@pytest.mark.system
def test_worker_is_for_the_supervisor(capsys: Capture) -> None:
    """Who types it is told so in a line, and it is not in the help."""
    done = subprocess.run(
        [sys.executable, "-m", "mediatord", "worker", "x"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "mediatord: workers are started by mediatord run; do not run this command\n"
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
    assert one_line(capsys) == f"{url}/health: not a mediatord response (HTTP 200)"


def test_status_of_nobody(capsys: Capture) -> None:
    """Where nobody listens the line says so."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        assert call("status", "--url", url) == 1
    assert one_line(capsys) == f"{url}/health: Connection refused"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("did", "more"), "Got unexpected extra argument (more); see mediatord did --help"),
        (("queue", "lst"), "No such command 'lst'. Did you mean 'list'?"),
        (("queue", "show"), "Missing argument 'DID'; see mediatord queue show --help"),
        (("queue", "list", "--top", "ten"), "Invalid value for '--top': 'ten' is not a valid integer."),
        (("status", "--over", "soon"), "Invalid value for '--over': 'soon' is not a valid number."),
        (("bench", "--json", "/nope/it"), "Invalid value for '--json': directory /nope does not exist"),
        (("bench", "--target", "it"), "Invalid value for '--target': expected an http:// or https:// URL"),
    ],
)
def test_errors_of_syntax(arguments: tuple[str, ...], expected: str, capsys: Capture) -> None:
    """They say what is wrong, and where to read on unless they suggest something."""
    assert call(*arguments) == 2
    assert one_line(capsys) == expected


@pytest.mark.system
def test_as_a_module() -> None:
    """`python -m mediatord` is the same script."""
    done = subprocess.run([sys.executable, "-m", "mediatord", "fly"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (
        2,
        "",
        "mediatord: No such command 'fly'; see mediatord --help\n",
    )


@pytest.mark.parametrize("abstract", [False, True])
def test_notify(abstract: bool, tmp_path: Path) -> None:
    """States reach the socket that systemd names, in the file system or abstract."""
    name = f"@mediatord-{tmp_path.name}-{id(tmp_path)}" if abstract else str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind("\0" + name[1:] if abstract else name)
        assert notify_systemd("READY=1", {"NOTIFY_SOCKET": name})
        receiver.setblocking(False)
        assert receiver.recv(100) == b"READY=1"


def test_notify_nobody(tmp_path: Path) -> None:
    """Without systemd, or when it is gone, nothing happens."""
    assert not notify_systemd("READY=1", {})
    assert not notify_systemd("READY=1", {"NOTIFY_SOCKET": str(tmp_path / "gone")})


def test_watchdog() -> None:
    """The watchdog is fed twice as often as it asks, if it asks this process."""
    assert get_watchdog_interval({"WATCHDOG_USEC": "30000000"}) == 15.0
    assert get_watchdog_interval({}) is None
    assert get_watchdog_interval({"WATCHDOG_USEC": "x"}) is None
    assert get_watchdog_interval({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1"}) is None


def test_nothing_is_done_to_the_terminal(tmp_path: Path, capsys: Capture) -> None:
    """What a complaint repeats is shown, not obeyed."""
    assert call("did", "--config", str(tmp_path / "\x1b[2J\x9b\u202e.yaml")) != 0
    assert "\\x1b[2J\\x9b\\u202e.yaml" in one_line(capsys)
