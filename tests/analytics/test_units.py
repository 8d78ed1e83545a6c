"""What is shipped for operators: the units of systemd and the file of settings."""

from __future__ import annotations

import shutil
import signal
import subprocess
from pathlib import Path

import click
import pytest
import yaml

from analytics.cli import cli
from analytics.errors import EXIT_USAGE, STOP_TIMEOUT_S, AnalyticsError
from analytics.settings import Settings, load_settings, render_default_settings

ROOT = Path(__file__).parents[2]
UNITS = ROOT / "systemd"
PROGRAM = "/opt/mediatord/bin/mediatord-analytics"


def unit(name: str) -> dict[str, list[str]]:
    """Values by key, in order."""
    text = (UNITS / name).read_text("utf-8").replace("\\\n", " ")
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line and line[0] not in "#[":
            key, _, value = line.partition("=")
            found.setdefault(key, []).append(value.strip())
    return found


def test_the_commands_of_the_service() -> None:
    """They have the options that are there."""
    service = unit("mediatord-analytics.service")
    for line in service["ExecStartPre"] + service["ExecStart"]:
        if line.startswith("+"):
            continue  # of root, and not of ours
        program, name, *arguments = line.lstrip("-").split()
        assert program == PROGRAM
        command = cli.commands[name]
        context = click.Context(command, parent=click.Context(cli, **cli.context_settings))
        command.make_parser(context).parse_args(list(arguments))
    assert [line.split()[1] for line in service["ExecStart"]] == ["nightly"]


def test_the_service_is_fenced_in() -> None:
    """As the daemon is, but that Java may compile; and there is no way out but loopback."""
    service, daemon = unit("mediatord-analytics.service"), unit("mediatord.service")
    assert service["MemoryDenyWriteExecute"] == ["no"]
    assert (service["IPAddressDeny"], service["IPAddressAllow"]) == (["any"], ["localhost"])
    fences = {
        key for key in daemon if key.startswith(("Protect", "Private", "Restrict", "NoNew", "Lock", "SystemCall"))
    }
    for key in fences - {"RestartPreventExitStatus"}:
        assert service[key] == daemon[key], key
    assert {"MemoryMax", "Nice", "TasksMax"} <= service.keys()


def test_stopping_the_service() -> None:
    """The signal goes to the program and not to Java, which it needs to clean up; in time before all are killed."""
    service = unit("mediatord-analytics.service")
    assert (service["KillMode"], service["SuccessExitStatus"]) == (["mixed"], [str(128 + signal.SIGTERM)])
    assert int(service["TimeoutStopSec"][0]) > 4 * STOP_TIMEOUT_S


def test_the_timer() -> None:
    """After midnight UTC, spread, and made up for."""
    timer = unit("mediatord-analytics.timer")
    assert timer["OnCalendar"][0].endswith(" UTC")
    assert timer["Persistent"] == ["true"] and timer["RandomizedDelaySec"]


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="no systemd-analyze: apt-get install systemd")
def test_systemd_takes_the_units(tmp_path: Path) -> None:
    """Every key and value; the program, which is not installed here, stands for another."""
    for name in ("mediatord-analytics.service", "mediatord-analytics.timer"):
        text = (UNITS / name).read_text("utf-8")
        (tmp_path / name).write_text(text.replace(PROGRAM, "/bin/true"), "utf-8")
    done = subprocess.run(
        ["systemd-analyze", "verify", "--recursive-errors=no", *sorted(tmp_path.iterdir())],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_file_of_settings() -> None:
    """It is as `mediatord-analytics settings` prints it, and sets the defaults."""
    path = ROOT / "etc/analytics.yaml"
    assert path.read_text("utf-8") == render_default_settings()
    assert load_settings(path) == load_settings(None) == Settings()
    assert yaml.safe_load(path.read_text("utf-8")).keys() == Settings.model_fields.keys()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("top: 0\nnope: 1\nanomaly_z: x\n", "top: .*equal to 1; anomaly_z: .*number.*; nope: unknown key$"),
        ("- 1\n", "expected a mapping"),
        ("[1, 2", "not YAML"),
        ("top: '\x00'", "not YAML"),
        (None, "No such file"),
    ],
)
def test_files_of_settings_that_cannot_be_used(tmp_path: Path, text: str | None, told: str) -> None:
    """One line names every key that is wrong."""
    path = tmp_path / "analytics.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(AnalyticsError, match=told) as caught:
        load_settings(path)
    assert caught.value.exit_status == EXIT_USAGE
    assert "\n" not in str(caught.value)


def test_a_file_of_settings_may_be_empty(tmp_path: Path) -> None:
    """And sets nothing then."""
    path = tmp_path / "analytics.yaml"
    path.write_text("# nothing\n")
    assert load_settings(path) == Settings()
    path.write_text("top: 7\n")
    assert load_settings(path) == Settings(top=7)
