"""The units of systemd for the daemon: commands, fences, reload, and sockets that systemd hands over."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from mediatord.cli import init
from mediatord.cli.init import write_initial_files
from mediatord.config.file import load_config
from mediatord.tap import Options
from mediatord.wallet.temporary_daemon import find_free_port
from tests.analytics.test_units import read_unit
from tests.packaging.health_checks import await_health

UNITS = Path(__file__).parents[2] / "systemd"
PROGRAMS = Path(sys.executable).parent
PREFIX = "/opt/mediatord/bin/"
# In tenths: 2.0 is what systemd-analyze says of a service with hardly a way out.
EXPOSURE = "20"
needs_analyze = pytest.mark.skipif(
    not shutil.which("systemd-analyze"), reason="no systemd-analyze: apt-get install systemd"
)
needs_activate = pytest.mark.skipif(
    not shutil.which("systemd-socket-activate"), reason="no systemd-socket-activate: apt-get install systemd"
)


def test_the_commands_of_the_service() -> None:
    """The plugin takes the options that it is started with."""
    service = read_unit("mediatord.service")
    program, *arguments = service["ExecStart"][0].split()
    assert program == f"{PREFIX}twistd"
    assert arguments[:3] == ["-n", "--pidfile=", "mediatord"]
    assert Options.optParameters[0][0] == arguments[3].removeprefix("--")
    assert service["ExecStartPre"] == [f"-{PREFIX}mediatord check-config --config {arguments[4]}"]
    assert service["ExecReload"] == ["/bin/sh -c 'kill -HUP ${MAINPID}'"]


def test_how_it_ends_and_begins_again() -> None:
    """Long enough to stop in order, and to replace a worker that hangs; not again with a wrong configuration."""
    service = read_unit("mediatord.service")
    assert service["Type"] == ["notify"]
    assert int(service["WatchdogSec"][0]) >= 90
    assert int(service["TimeoutStopSec"][0]) >= 20
    assert (service["Restart"], service["RestartPreventExitStatus"]) == (["on-failure"], ["2"])
    # To systemd that is the status of the daemon alone: what runs before it would be begun again and again.
    assert all(command.startswith("-") for command in service["ExecStartPre"])


def test_who_may_read_what() -> None:
    """The analysis reads logs by the daemon's group, and not its database; the daemon reads reports by the same."""
    daemon, night = read_unit("mediatord.service"), read_unit("mediatord-analytics.service")
    assert night["Group"] == daemon["Group"] == ["mediatord"]
    assert night["User"] != daemon["User"]
    assert daemon["StateDirectoryMode"] == ["0700"]
    assert daemon["LogsDirectoryMode"] == night["StateDirectoryMode"] == ["0750"]
    assert daemon["UMask"] == night["UMask"] == ["0027"]


def test_the_package_configures_what_init_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first configuration of the Debian package has the daemon write where that of `init` does."""
    _, path = write_initial_files(tmp_path / "new", "http://127.0.0.1:8080")
    script = (UNITS.parent / "deb/postinst").read_text("utf-8")
    command = script[script.index("    sed -i") : script.index("    chown root:mediatord")]
    subprocess.run(["sh", "-e", "-c", command], env={"PATH": "/usr/bin:/bin", "new": str(path.parent)}, check=True)
    monkeypatch.setattr(init, "SYSTEM", tmp_path / "etc")
    _, expected = write_initial_files(tmp_path / "etc", "http://127.0.0.1:8080")
    assert path.read_text("utf-8") == expected.read_text("utf-8")
    assert load_config(path).control_socket == Path("/var/lib/mediatord/control.sock")


@needs_analyze
@pytest.mark.parametrize("name", ["mediatord.service", "mediatord-analytics.service"])
def test_it_is_fenced_in(name: str) -> None:
    """`systemd-analyze security` rates it 2.0 or better."""
    command = [
        "systemd-analyze",
        "security",
        "--offline=yes",
        "--no-pager",
        f"--threshold={EXPOSURE}",
        str(UNITS / name),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    sys.stdout.write("".join(line for line in done.stdout.splitlines(True) if "exposure" in line))


@needs_analyze
def test_the_threshold_is_one(tmp_path: Path) -> None:
    """A service without its fences is over it."""
    bare = tmp_path / "mediatord.service"
    bare.write_text("[Service]\nExecStart=/bin/true\n")
    command = ["systemd-analyze", "security", "--offline=yes", f"--threshold={EXPOSURE}", str(bare)]
    assert subprocess.run(command, capture_output=True, check=False).returncode != 0


@needs_analyze
def test_systemd_takes_the_units(tmp_path: Path) -> None:
    """Every key and value of all of them together; programs that are not installed here stand for another."""
    for path in UNITS.iterdir():
        text = path.read_text("utf-8")
        for program in ("twistd", "mediatord-analytics", "mediatord"):
            text = text.replace(f"{PREFIX}{program} ", "/bin/true ")
        assert PREFIX not in "".join(line for line in text.splitlines() if not line.startswith("#"))
        (tmp_path / path.name).write_text(text, "utf-8")
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", *sorted(tmp_path.iterdir())],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def settings_of_the_socket() -> list[str]:
    """What mediatord.socket says that `listen` has to be."""
    text = (UNITS / "mediatord.socket").read_text("utf-8")
    line = next(line for line in text.splitlines() if line.startswith("#   listen:"))
    return list(yaml.safe_load(line.lstrip("# "))["listen"])


def test_the_socket_and_what_it_says_of_listen() -> None:
    """An endpoint for each address, in the order of the unit and of its kind."""
    addresses = read_unit("mediatord.socket")["ListenStream"]
    kinds = ["INET6" if address.startswith("[") else "INET" for address in addresses]
    assert settings_of_the_socket() == [f"systemd:domain={kind}:index={n}" for n, kind in enumerate(kinds)]


def configured(directory: Path, listen: list[str]) -> Path:
    """A configuration that listens there."""
    _, path = write_initial_files(directory, "http://127.0.0.1:8080")
    settings: dict[str, Any] = yaml.safe_load(path.read_text("utf-8"))
    path.write_text(yaml.safe_dump({**settings, "listen": listen}), "utf-8")
    return path


@needs_activate
def test_activation_by_sockets(tmp_path: Path) -> None:
    """What systemd listens on is served, all addresses of the unit; the first connection starts the daemon."""
    path = configured(tmp_path / "mine", settings_of_the_socket())
    ports = [find_free_port(), find_free_port()]
    hosts = [f"127.0.0.1:{ports[0]}", f"[::1]:{ports[1]}"]
    listening = [option for host in hosts for option in ("-l", host)]
    # As systemd names sockets after their unit, and Twisted wants names for all.
    named = f"--fdname={':'.join('mediatord.socket' for _ in hosts)}"
    daemon = [str(PROGRAMS / "twistd"), "-n", "--pidfile=", "mediatord", "--config", str(path)]
    output = tmp_path / "output"
    with output.open("wb") as written:
        # The program that is started has the process id of the one that waited, as LISTEN_PID has to say.
        process = subprocess.Popen(
            ["systemd-socket-activate", *listening, named, *daemon], cwd=tmp_path, stdout=written, stderr=written
        )
    try:
        for host in hosts:
            await_health(f"http://{host}/health", process)
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, output.read_text("utf-8")


def test_without_sockets(tmp_path: Path) -> None:
    """Who starts the service without its socket is told in a line."""
    path = configured(tmp_path / "mine", ["systemd:domain=INET:index=0"])
    daemon = [str(PROGRAMS / "twistd"), "-n", "--pidfile=", "mediatord", "--config", str(path)]
    done = subprocess.run(daemon, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "mediatord: cannot listen on systemd:domain=INET:index=0: systemd passed no such" in done.stderr


def test_a_restart_refuses_nobody(tmp_path: Path) -> None:
    """Who connects while there is no daemon is served by the next one."""
    path = configured(tmp_path / "mine", ["systemd:domain=INET:index=0"])
    with socket.create_server(("127.0.0.1", 0)) as ours:
        url = f"http://127.0.0.1:{ours.getsockname()[1]}/health"
        for _ in range(2):
            with (
                socket.create_connection(ours.getsockname(), timeout=120) as early,
                (tmp_path / "output").open("ab") as output,
            ):
                early.sendall(b"GET /did HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
                process = activated(path, ours, output)
                try:
                    assert early.recv(12) == b"HTTP/1.1 200", (tmp_path / "output").read_text("utf-8")
                    await_health(url, process)
                finally:
                    process.send_signal(signal.SIGTERM)
                    assert process.wait(60) == 0, (tmp_path / "output").read_text("utf-8")


# What systemd does before it starts a service that has sockets, third descriptor first.
ACTIVATE = """\
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.set_inheritable(3, True)
os.environ.update(LISTEN_FDS="1", LISTEN_PID=str(os.getpid()), LISTEN_FDNAMES="mediatord.socket")
os.execv(sys.argv[2], sys.argv[2:])
"""


def activated(config: Path, ours: socket.socket, output: Any) -> subprocess.Popen[bytes]:
    """A daemon that was handed a socket."""
    daemon = [str(PROGRAMS / "twistd"), "-n", "--pidfile=", "mediatord", "--config", str(config)]
    return subprocess.Popen(
        [sys.executable, "-c", ACTIVATE, str(ours.fileno()), *daemon],
        pass_fds=[ours.fileno()],
        cwd=config.parent,
        env={**os.environ},
        stdout=output,
        stderr=output,
    )
