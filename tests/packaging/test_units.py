"""The systemd units of the daemon: commands, sandbox, reload and socket activation."""

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
# In tenths: 2.0 is rated as "OK" by systemd-analyze.
EXPOSURE = "20"
needs_analyze = pytest.mark.skipif(
    not shutil.which("systemd-analyze"), reason="no systemd-analyze: apt-get install systemd"
)
needs_activate = pytest.mark.skipif(
    not shutil.which("systemd-socket-activate"), reason="no systemd-socket-activate: apt-get install systemd"
)


def test_service_commands_are_valid() -> None:
    """ExecStart runs the plugin with its options; ExecStartPre checks the same configuration."""
    service = read_unit("mediatord.service")
    program, *arguments = service["ExecStart"][0].split()
    assert program == f"{PREFIX}twistd"
    assert arguments[:3] == ["-n", "--pidfile=", "mediatord"]
    assert Options.optParameters[0][0] == arguments[3].removeprefix("--")
    assert service["ExecStartPre"] == [f"-{PREFIX}mediatord check-config --config {arguments[4]}"]
    assert service["ExecReload"] == ["/bin/sh -c 'kill -HUP ${MAINPID}'"]


def test_stop_and_restart_settings() -> None:
    """Time-outs allow an orderly stop and replacing a hung worker; an invalid configuration is not retried."""
    service = read_unit("mediatord.service")
    assert service["Type"] == ["notify"]
    assert int(service["WatchdogSec"][0]) >= 90
    assert int(service["TimeoutStopSec"][0]) >= 20
    assert (service["Restart"], service["RestartPreventExitStatus"]) == (["on-failure"], ["2"])
    # The exit status counts for ExecStart only: a failing ExecStartPre would be restarted again and again.
    assert all(command.startswith("-") for command in service["ExecStartPre"])


def test_groups_give_required_access_only() -> None:
    """The analysis reads logs and not the database; the daemon reads reports, both through the daemon's group."""
    daemon, analytics = read_unit("mediatord.service"), read_unit("mediatord-analytics.service")
    assert analytics["Group"] == daemon["Group"] == ["mediatord"]
    assert analytics["User"] != daemon["User"]
    assert daemon["StateDirectoryMode"] == ["0700"]
    assert daemon["LogsDirectoryMode"] == analytics["StateDirectoryMode"] == ["0750"]
    assert daemon["UMask"] == analytics["UMask"] == ["0027"]


def test_package_and_init_configure_same_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Debian package's first configuration has the paths of `init`."""
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
def test_exposure_is_within_threshold(name: str) -> None:
    """`systemd-analyze security` rates each unit 2.0 or better."""
    command = [
        "systemd-analyze",
        "security",
        "--offline=yes",
        "--no-pager",
        f"--threshold={EXPOSURE}",
        str(UNITS / name),
    ]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout
    sys.stdout.write("".join(line for line in result.stdout.splitlines(True) if "exposure" in line))


@needs_analyze
def test_unsandboxed_service_exceeds_threshold(tmp_path: Path) -> None:
    """systemd-analyze rejects a service without a sandbox."""
    bare = tmp_path / "mediatord.service"
    bare.write_text("[Service]\nExecStart=/bin/true\n")
    command = ["systemd-analyze", "security", "--offline=yes", f"--threshold={EXPOSURE}", str(bare)]
    assert subprocess.run(command, capture_output=True, check=False).returncode != 0


@needs_analyze
def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    """systemd accepts all keys and values of all units; /bin/true stands in for missing programs."""
    for path in UNITS.iterdir():
        text = path.read_text("utf-8")
        for program in ("twistd", "mediatord-analytics", "mediatord"):
            text = text.replace(f"{PREFIX}{program} ", "/bin/true ")
        assert PREFIX not in "".join(line for line in text.splitlines() if not line.startswith("#"))
        (tmp_path / path.name).write_text(text, "utf-8")
    result = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", *sorted(tmp_path.iterdir())],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (result.returncode, result.stderr) == (0, "")


def read_documented_listen() -> list[str]:
    """The value of `listen` in the comment of mediatord.socket."""
    text = (UNITS / "mediatord.socket").read_text("utf-8")
    line = next(line for line in text.splitlines() if line.startswith("#   listen:"))
    return list(yaml.safe_load(line.lstrip("# "))["listen"])


def test_socket_comment_matches_its_addresses() -> None:
    """An endpoint for each address, in the unit's order and of the same type."""
    addresses = read_unit("mediatord.socket")["ListenStream"]
    kinds = ["INET6" if address.startswith("[") else "INET" for address in addresses]
    assert read_documented_listen() == [f"systemd:domain={kind}:index={n}" for n, kind in enumerate(kinds)]


def write_configuration(directory: Path, listen: list[str]) -> Path:
    """Write a configuration with these listeners."""
    _, path = write_initial_files(directory, "http://127.0.0.1:8080")
    settings: dict[str, Any] = yaml.safe_load(path.read_text("utf-8"))
    path.write_text(yaml.safe_dump({**settings, "listen": listen}), "utf-8")
    return path


@needs_activate
def test_serves_activated_sockets(tmp_path: Path) -> None:
    """The daemon serves all addresses of the unit; the first connection starts it."""
    path = write_configuration(tmp_path / "mine", read_documented_listen())
    ports = [find_free_port(), find_free_port()]
    hosts = [f"127.0.0.1:{ports[0]}", f"[::1]:{ports[1]}"]
    listening = [option for host in hosts for option in ("-l", host)]
    # systemd names sockets after their unit, and Twisted requires a name for each.
    named = f"--fdname={':'.join('mediatord.socket' for _ in hosts)}"
    daemon = [str(PROGRAMS / "twistd"), "-n", "--pidfile=", "mediatord", "--config", str(path)]
    output = tmp_path / "output"
    with output.open("wb") as written:
        # The program keeps the process id of the waiting process, as LISTEN_PID requires.
        process = subprocess.Popen(
            ["systemd-socket-activate", *listening, named, *daemon], cwd=tmp_path, stdout=written, stderr=written
        )
    try:
        for host in hosts:
            await_health(f"http://{host}/health", process)
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, output.read_text("utf-8")


def test_missing_sockets_are_reported_in_one_line(tmp_path: Path) -> None:
    """A service started without its socket unit names the socket that it lacks."""
    path = write_configuration(tmp_path / "mine", ["systemd:domain=INET:index=0"])
    daemon = [str(PROGRAMS / "twistd"), "-n", "--pidfile=", "mediatord", "--config", str(path)]
    result = subprocess.run(daemon, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "mediatord: cannot listen on systemd:domain=INET:index=0: systemd passed no such" in result.stderr


def test_restart_refuses_no_connection(tmp_path: Path) -> None:
    """Clients that connect without a daemon are served by the next one."""
    path = write_configuration(tmp_path / "mine", ["systemd:domain=INET:index=0"])
    with socket.create_server(("127.0.0.1", 0)) as listening_socket:
        url = f"http://127.0.0.1:{listening_socket.getsockname()[1]}/health"
        for _ in range(2):
            with (
                socket.create_connection(listening_socket.getsockname(), timeout=120) as early,
                (tmp_path / "output").open("ab") as output,
            ):
                early.sendall(b"GET /did HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
                process = start_activated(path, listening_socket, output)
                try:
                    assert early.recv(12) == b"HTTP/1.1 200", (tmp_path / "output").read_text("utf-8")
                    await_health(url, process)
                finally:
                    process.send_signal(signal.SIGTERM)
                    assert process.wait(60) == 0, (tmp_path / "output").read_text("utf-8")


# Does what systemd does before it starts a socket-activated service; descriptors begin at 3.
ACTIVATE = """\
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.set_inheritable(3, True)
os.environ.update(LISTEN_FDS="1", LISTEN_PID=str(os.getpid()), LISTEN_FDNAMES="mediatord.socket")
os.execv(sys.argv[2], sys.argv[2:])
"""


def start_activated(config: Path, listening_socket: socket.socket, output: Any) -> subprocess.Popen[bytes]:
    """Start a daemon that inherits a socket."""
    daemon = [str(PROGRAMS / "twistd"), "-n", "--pidfile=", "mediatord", "--config", str(config)]
    return subprocess.Popen(
        [sys.executable, "-c", ACTIVATE, str(listening_socket.fileno()), *daemon],
        pass_fds=[listening_socket.fileno()],
        cwd=config.parent,
        env={**os.environ},
        stdout=output,
        stderr=output,
    )
