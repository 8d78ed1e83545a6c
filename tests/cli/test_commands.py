"""The console script: output and exit statuses (contract section 2)."""

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
from mediatord.identity.invitation import (
    build_invitation_url,
    build_short_invitation_url,
    make_v1_invitation,
    render_qr_terminal,
)
from mediatord.identity.key_file import load_keys
from mediatord.identity.mediator_identity import MediatorIdentity
from mediatord.observability.systemd import get_watchdog_interval, notify_systemd


def list_subcommands(group: click.Group) -> Iterator[tuple[str, click.Command]]:
    """All commands of a group by name, hidden ones included."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        yield name, command


COMMANDS = tuple(name for name, command in list_subcommands(cli) if not command.hidden)

Capture = pytest.CaptureFixture[str]


def call(*arguments: str) -> int:
    """Run the script in this process; return its exit status."""
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
def config_path(tmp_path: Path, capsys: Capture) -> Path:
    """A configuration written by init."""
    assert call("init", "--dir", str(tmp_path / "m")) == 0
    capsys.readouterr()
    return tmp_path / "m" / "mediator.yaml"


def test_help_lists_subcommands(capsys: Capture) -> None:
    assert call("--help") == 0
    output = capsys.readouterr().out
    assert all(f"  {name} " in output for name in COMMANDS)


@pytest.mark.parametrize("command", [name for name in COMMANDS if name != "bench"])
def test_every_subcommand_has_help(command: str, capsys: Capture) -> None:
    """bench is a separate program."""
    assert call(command, "--help") == 0
    assert capsys.readouterr().out.startswith(f"Usage: mediatord {command} ")


def test_catalogue_agrees_with_commands() -> None:
    """The list that is shown without importing commands."""
    for name, command in list_subcommands(cli):
        assert command.name == name
        assert _COMMANDS[name][1] == ("" if command.hidden else command.get_short_help_str(10_000))


@pytest.mark.system
@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["completion", "bash"], ["queue", "--help"]])
def test_help_and_completion_import_little(arguments: Sequence[str]) -> None:
    """Neither the daemon nor the table renderer."""
    heavy = ("twisted", "pydantic", "rich", "pyspark", "pymongo", "cryptography", "prometheus_client", "analytics")
    script = (
        "import sys; from mediatord.cli import main\n"
        "try: main(sys.argv[1:])\n"
        f"finally: print([name for name in {heavy} if name in sys.modules], file=sys.stderr)"
    )
    completed = subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=False
    )
    assert (completed.returncode, completed.stderr) == (0, "[]\n")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts(shell: str, capsys: Capture) -> None:
    """Each calls the program by its variable."""
    assert call("completion", shell) == 0
    output = capsys.readouterr().out
    assert f"_MEDIATORD_COMPLETE={shell}_complete" in output
    assert "mediatord" in output


def list_leaf_commands(group: click.Group, prefix: str = "") -> Iterator[tuple[str, click.Command]]:
    """Commands that are not groups, as words of a command line."""
    for name, command in list_subcommands(group):
        if isinstance(command, click.Group):
            yield from list_leaf_commands(command, f"{prefix}{name} ")
        else:
            yield f"{prefix}{name}", command


# These print a script, a description or a log.
COMMANDS_WITHOUT_DATA = {"completion", "demo", "push-sender", "run", "worker"}


def test_commands_that_print_data_have_json() -> None:
    without = {
        name
        for name, command in list_leaf_commands(cli)
        if not any("--json" in parameter.opts for parameter in command.params)
    }
    assert without == COMMANDS_WITHOUT_DATA


@pytest.mark.system
def test_completion_in_bash(tmp_path: Path) -> None:
    """A real shell completes commands, subcommands and options."""
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
        completed = subprocess.run([bash, "-c", script], env=environment, capture_output=True, text=True, check=True)
        assert completed.stdout.split() == found


def test_version(capsys: Capture) -> None:
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
def test_usage_error_is_one_line(arguments: Sequence[str], capsys: Capture) -> None:
    """Exit status 2."""
    assert call(*arguments) == 2
    assert one_line(capsys)


def test_init_writes_configuration_and_keys(tmp_path: Path, capsys: Capture) -> None:
    """And prints the DIDs and the next commands."""
    directory = tmp_path / "a" / "b"
    assert call("init", "--dir", str(directory), "--public-url", "https://m.example") == 0
    output = capsys.readouterr().out
    assert {path.name for path in directory.iterdir()} == {"mediator.yaml", "keys.jwks", "log.key"}
    assert all(path.stat().st_mode & 0o077 == 0 for path in (directory / "keys.jwks", directory / "log.key"))
    config = load_config(directory / "mediator.yaml", {})
    assert config.public_url == "https://m.example"
    assert config.listen == ("tcp:8080:interface=127.0.0.1",)
    assert "\ndid:peer:2.E" in output
    assert "\ndid:web:m.example\n" in output
    assert f"     mediatord run --config {directory}/mediator.yaml\n" in output
    assert "to http://127.0.0.1:8080, including WebSockets; or" in output
    assert [str(network) for network in config.trusted_proxies] == ["127.0.0.0/8", "::1/128"]
    assert (directory / "mediator.yaml").stat().st_mode & 0o777 == 0o640


def test_init_prints_json(tmp_path: Path, capsys: Capture) -> None:
    assert call("init", "--dir", str(tmp_path / "m"), "--json") == 0
    found = json.loads(capsys.readouterr().out)
    config = found["config"]
    assert config == str(tmp_path / "m" / "mediator.yaml")
    assert found["did"].startswith("did:peer:2.E")
    assert found["next"][0]["commands"] == [f"mediatord check-config --config {config}"]
    assert found["next"][1]["commands"] == [f"mediatord run --config {config}"]


@pytest.mark.system
def test_tls_steps_of_init_work(tmp_path: Path, capsys: Capture) -> None:
    """The commands that init prints for TLS on this machine yield a valid configuration."""
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


def test_init_for_system_daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    """State and logs are in the system's directories."""
    monkeypatch.setattr(init, "SYSTEM", tmp_path / "etc")
    monkeypatch.setattr(init, "USER", "nobody-of-this-name")
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(init, "_UNIT_PLACES", (tmp_path / "units",))
    (tmp_path / "share/mediatord/systemd").mkdir(parents=True)
    (tmp_path / "share/mediatord/systemd/mediatord.service").touch()
    assert call("init", "--dir", str(tmp_path / "etc"), "--public-url", "https://m.example") == 0
    output = capsys.readouterr().out
    config = load_config(tmp_path / "etc" / "mediator.yaml", {})
    assert config.storage.sqlite.path == Path("/var/lib/mediatord/mediator.sqlite3")
    assert config.log.directory == Path("/var/log/mediatord")
    assert config.log_key_path == Path("/var/lib/mediatord/log.key")
    assert config.control_socket == Path("/var/lib/mediatord/control.sock")
    assert config.identity.keys == tmp_path / "etc" / "keys.jwks"
    assert "     useradd --system --home-dir /var/lib/mediatord " in output
    assert f"     cp {tmp_path}/share/mediatord/systemd/mediatord.* {tmp_path}/units/\n" in output
    assert "     systemctl enable --now mediatord.service\n" in output
    # The daemon can neither open port 443 nor read certbot's files.
    assert "to http://127.0.0.1:8080, including WebSockets\n" in output
    assert "ssl:443" not in output


def test_init_sets_owners_for_system_daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    """The daemon's user owns the keys and can read the configuration, which root owns."""
    if os.geteuid() != 0:
        pytest.skip("only root can give files away")
    system = tmp_path / "mediatord"
    monkeypatch.setattr(init, "SYSTEM", system)
    monkeypatch.setattr(init, "system_owner", lambda: (12345, 12346))
    assert call("init", "--dir", str(system)) == 0
    found = {path.name: (path.stat().st_uid, path.stat().st_gid) for path in (system, *system.iterdir())}
    assert found == {"mediatord": (0, 12346), "keys.jwks": (12345, 12346), "mediator.yaml": (0, 12346)}
    assert "useradd" not in capsys.readouterr().out


def test_init_listens_on_port_of_local_public_url(tmp_path: Path) -> None:
    assert call("init", "--dir", str(tmp_path), "--public-url", "http://127.0.0.1:9123") == 0
    assert load_config(tmp_path / "mediator.yaml", {}).listen == ("tcp:9123:interface=127.0.0.1",)


@pytest.mark.parametrize("name", ["mediator.yaml", "keys.jwks", "log.key"])
def test_init_refuses_to_overwrite(name: str, tmp_path: Path, capsys: Capture) -> None:
    """It names an existing file, and writes none."""
    (tmp_path / name).write_text("mine")
    assert call("init", "--dir", str(tmp_path)) == 1
    assert one_line(capsys) == f"{tmp_path}/{name} already exists and will not be overwritten"
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(name, "mine")]


def test_check_config_accepts_valid_configuration(config_path: Path, capsys: Capture) -> None:
    assert call("check-config", "--config", str(config_path)) == 0
    assert capsys.readouterr().out == f"{config_path}: ok\n"


@pytest.mark.parametrize("command", ["run", "did", "invitation"])
def test_commands_stop_at_invalid_configuration(command: str, tmp_path: Path, capsys: Capture) -> None:
    """With the first problem and the number of others."""
    path = tmp_path / "m.yaml"
    path.write_text("queue: {ttl: x}\nworkers: 0\n")
    assert call(command, "--config", str(path)) == 2
    line = one_line(capsys)
    assert line.startswith(f"{path}:1: queue.ttl: expected a duration")
    assert line.endswith("(and 1 more; run `mediatord check-config` to list all)")


@pytest.mark.parametrize("command", ["run", "did", "invitation"])
def test_missing_keys_are_an_error(command: str, config_path: Path, capsys: Capture) -> None:
    """The line names the file."""
    (config_path.parent / "keys.jwks").unlink()
    assert call(command, "--config", str(config_path)) == 1
    line = f"cannot read {config_path.parent}/keys.jwks: No such file or directory; restore it from a backup, "
    assert one_line(capsys) == line + "or create the keys of a new mediator with `mediatord init`"


def test_did_prints_dids(config_path: Path, capsys: Capture) -> None:
    """The did:peer:2, then the did:web, always the same."""
    assert call("did", "--config", str(config_path)) == 0
    peer, web = capsys.readouterr().out.splitlines()
    assert peer.startswith("did:peer:2.Ez6LS")
    assert web == "did:web:127.0.0.1%3A8080"
    assert call("did", "--config", str(config_path)) == 0
    assert capsys.readouterr().out.splitlines() == [peer, web]


def test_did_and_invitation_print_json(config_path: Path, capsys: Capture) -> None:
    assert call("did", "--config", str(config_path), "--json") == 0
    dids = json.loads(capsys.readouterr().out)
    assert dids["web_did"] == "did:web:127.0.0.1%3A8080"
    assert call("invitation", "--config", str(config_path), "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found.pop("v1")["short_url"] == "http://127.0.0.1:8080/invitation/v1"
    assert found == {
        "short_url": build_short_invitation_url("http://127.0.0.1:8080"),
        "url": build_invitation_url("http://127.0.0.1:8080", dids["did"]),
        "did": dids["did"],
    }


def test_invitation_prints_urls_and_qr_code(config_path: Path, capsys: Capture) -> None:
    assert call("did", "--config", str(config_path)) == 0
    did = capsys.readouterr().out.splitlines()[0]
    assert call("invitation", "--config", str(config_path)) == 0
    v2, v1 = capsys.readouterr().out.split("\n\nDIDComm v1\n\n")
    short_url, blank, *code, second_blank, url = v2.splitlines()
    assert short_url == build_short_invitation_url("http://127.0.0.1:8080")
    assert url == build_invitation_url("http://127.0.0.1:8080", did)
    assert (blank, second_blank) == ("", "")
    assert 10 < len(code) <= 25
    identity = MediatorIdentity(load_keys(config_path.parent / "keys.jwks"), "http://127.0.0.1:8080")
    expected = make_v1_invitation("http://127.0.0.1:8080", identity.root_secret, "mediatord")
    short_url, *code, blank, url, _, _, _, connection_url = v1.splitlines()
    assert (short_url, url, connection_url) == (expected.short_url, expected.url, expected.connection_url)
    assert "\n".join(code) + "\n" == "\n" + render_qr_terminal(short_url)


def test_invitation_without_v1(config_path: Path, capsys: Capture) -> None:
    configured = config_path.read_text()
    section = configured.index("\ndidcomm_v1:")
    config_path.write_text(configured[:section] + configured[section:].replace("enabled: true", "enabled: false", 1))
    assert call("invitation", "--config", str(config_path)) == 0
    text = capsys.readouterr().out
    assert "DIDComm v1" not in text and "invitation/v1" not in text
    assert call("invitation", "--config", str(config_path), "--json") == 0
    assert json.loads(capsys.readouterr().out).keys() == {"short_url", "url", "did"}


@contextmanager
def serve_pages(pages: dict[str, tuple[int, str]]) -> Iterator[str]:
    """Serve pages on loopback: path -> (status, body). Yields the URL."""

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


def test_status_shows_health_and_figures(capsys: Capture) -> None:
    with serve_pages({"/health": (200, '{"status":"ok"}'), "/metrics": (200, METRICS)}) as url:
        assert call("status", "--url", url + "/", "--over", "0") == 0
    rows = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert rows["status"] == "ok"
    assert rows["version"] == "9.9"
    assert rows["storage"] == "up"
    assert rows["connections"] == "3"
    assert rows["waiting"] == "6 messages, 4 in the longest queue"
    assert (rows["forwarded"], rows["expired"]) == ("12", "0")
    assert "workers" not in rows


def test_status_counts_responding_workers(capsys: Capture) -> None:
    figures = METRICS + "mediator_workers 4.0\nmediator_workers_answered 3.0\n"
    with serve_pages({"/health": (200, '{"status":"ok"}'), "/metrics": (200, figures)}) as url:
        assert call("status", "--url", url, "--over", "0") == 0
    rows = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert rows["workers"] == "3 of 4 respond"


@pytest.mark.system
@pytest.mark.parametrize(
    ("arguments", "what"), [(["worker", "x"], "starts workers"), (["push-sender"], "starts push senders")]
)
def test_commands_of_child_processes_are_internal(arguments: list[str], what: str, capsys: Capture) -> None:
    """One line says so, and the help does not list them."""
    completed = subprocess.run(
        [sys.executable, "-m", "mediatord", *arguments], capture_output=True, text=True, check=False
    )
    assert (completed.returncode, completed.stdout) == (1, "")
    assert completed.stderr == f"mediatord: only the daemon {what}; use `mediatord run`\n"
    call("--help")
    assert arguments[0] not in capsys.readouterr().out


def test_status_of_unhealthy_daemon(capsys: Capture) -> None:
    """With the reason, and exit status 1."""
    pages = {"/health": (503, '{"status":"error","detail":"store"}'), "/metrics": (403, "")}
    with serve_pages(pages) as url:
        assert call("status", "--url", url) == 1
    output = capsys.readouterr().out
    assert "error: store" in output
    assert "HTTP 403" in output


def test_status_rejects_other_servers(capsys: Capture) -> None:
    with serve_pages({"/health": (200, "[]")}) as url:
        assert call("status", "--url", url) == 1
    assert one_line(capsys) == f"{url}/health: not a mediatord response (HTTP 200)"


def test_status_without_daemon(capsys: Capture) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        assert call("status", "--url", url) == 1
    assert one_line(capsys) == f"{url}/health: Connection refused"


@pytest.mark.system
def test_runs_as_module() -> None:
    completed = subprocess.run(
        [sys.executable, "-m", "mediatord", "fly"], capture_output=True, text=True, check=False
    )
    assert (completed.returncode, completed.stdout, completed.stderr) == (
        2,
        "",
        "mediatord: No such command 'fly'; see mediatord --help\n",
    )


@pytest.mark.parametrize("abstract", [False, True])
def test_notifies_systemd(abstract: bool, tmp_path: Path) -> None:
    """Over a path or an abstract socket."""
    name = f"@mediatord-{tmp_path.name}-{id(tmp_path)}" if abstract else str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind("\0" + name[1:] if abstract else name)
        assert notify_systemd("READY=1", {"NOTIFY_SOCKET": name})
        receiver.setblocking(False)
        assert receiver.recv(100) == b"READY=1"


def test_notify_without_systemd(tmp_path: Path) -> None:
    """Nothing happens without systemd, or when it has gone."""
    assert not notify_systemd("READY=1", {})
    assert not notify_systemd("READY=1", {"NOTIFY_SOCKET": str(tmp_path / "gone")})


def test_watchdog_interval() -> None:
    """Half of the requested one, if the request is for this process."""
    assert get_watchdog_interval({"WATCHDOG_USEC": "30000000"}) == 15.0
    assert get_watchdog_interval({}) is None
    assert get_watchdog_interval({"WATCHDOG_USEC": "x"}) is None
    assert get_watchdog_interval({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1"}) is None


def test_escapes_control_characters_in_errors(tmp_path: Path, capsys: Capture) -> None:
    assert call("did", "--config", str(tmp_path / "\x1b[2J\x9b\u202e.yaml")) != 0
    assert "\\x1b[2J\\x9b\\u202e.yaml" in one_line(capsys)


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
