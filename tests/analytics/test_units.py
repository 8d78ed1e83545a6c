"""Files shipped for operators: systemd units and settings of the analysis."""

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


def read_unit(name: str) -> dict[str, list[str]]:
    """Values of a unit file by key, in order."""
    text = (UNITS / name).read_text("utf-8").replace("\\\n", " ")
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line and line[0] not in "#[":
            key, _, value = line.partition("=")
            found.setdefault(key, []).append(value.strip())
    return found


def test_service_commands_have_valid_options() -> None:
    service = read_unit("mediatord-analytics.service")
    for line in service["ExecStartPre"] + service["ExecStart"]:
        if line.startswith("+"):
            continue  # a command of root, not of the analysis
        program, name, *arguments = line.lstrip("-").split()
        assert program == PROGRAM
        command = cli.commands[name]
        context = click.Context(command, parent=click.Context(cli, **cli.context_settings))
        command.make_parser(context).parse_args(list(arguments))
    assert [line.split()[1] for line in service["ExecStart"]] == ["nightly"]


def test_service_is_sandboxed() -> None:
    """Like the daemon, except that Java may compile; no network except loopback."""
    service, daemon = read_unit("mediatord-analytics.service"), read_unit("mediatord.service")
    assert service["MemoryDenyWriteExecute"] == ["no"]
    assert (service["IPAddressDeny"], service["IPAddressAllow"]) == (["any"], ["localhost"])
    sandbox_keys = {
        key for key in daemon if key.startswith(("Protect", "Private", "Restrict", "NoNew", "Lock", "SystemCall"))
    }
    for key in sandbox_keys - {"RestartPreventExitStatus"}:
        assert service[key] == daemon[key], key
    assert {"MemoryMax", "Nice", "TasksMax"} <= service.keys()


def test_service_stops_cleanly() -> None:
    """The signal goes to the program and not to Java, which it needs for clean-up; the timeout suffices."""
    service = read_unit("mediatord-analytics.service")
    assert (service["KillMode"], service["SuccessExitStatus"]) == (["mixed"], [str(128 + signal.SIGTERM)])
    assert int(service["TimeoutStopSec"][0]) > 4 * STOP_TIMEOUT_S


def test_timer_runs_after_midnight_utc() -> None:
    """With a random delay, and later if missed."""
    timer = read_unit("mediatord-analytics.timer")
    assert timer["OnCalendar"][0].endswith(" UTC")
    assert timer["Persistent"] == ["true"] and timer["RandomizedDelaySec"]


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="no systemd-analyze: apt-get install systemd")
def test_systemd_verifies_units(tmp_path: Path) -> None:
    """With another program, since this one is not installed."""
    for name in ("mediatord-analytics.service", "mediatord-analytics.timer"):
        text = (UNITS / name).read_text("utf-8")
        (tmp_path / name).write_text(text.replace(PROGRAM, "/bin/true"), "utf-8")
    completed = subprocess.run(
        ["systemd-analyze", "verify", "--recursive-errors=no", *sorted(tmp_path.iterdir())],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (completed.returncode, completed.stderr) == (0, "")


def test_settings_file_has_defaults() -> None:
    """It equals the output of `mediatord-analytics settings`."""
    path = ROOT / "etc/analytics.yaml"
    assert path.read_text("utf-8") == render_default_settings()
    assert load_settings(path) == load_settings(None) == Settings()
    assert yaml.safe_load(path.read_text("utf-8")).keys() == Settings.model_fields.keys()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("top: 0\nnope: 1\nanomaly_z: x\n", "top: .*equal to 1; anomaly_z: .*number.*; nope: unknown key$"),
        ("- 1\n", "expected a mapping"),
        ("[1, 2", "invalid YAML"),
        ("top: '\x00'", "invalid YAML"),
        (None, "No such file"),
    ],
)
def test_rejects_invalid_settings_file(tmp_path: Path, text: str | None, message: str) -> None:
    """One line names every invalid key."""
    path = tmp_path / "analytics.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(AnalyticsError, match=message) as caught:
        load_settings(path)
    assert caught.value.exit_status == EXIT_USAGE
    assert "\n" not in str(caught.value)


def test_empty_settings_file_has_defaults(tmp_path: Path) -> None:
    path = tmp_path / "analytics.yaml"
    path.write_text("# nothing\n")
    assert load_settings(path) == Settings()
    path.write_text("top: 7\n")
    assert load_settings(path) == Settings(top=7)
