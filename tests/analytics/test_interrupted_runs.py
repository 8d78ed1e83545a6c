"""Runs in processes of their own that signals stop, wherever they are by then."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import analytics
from analytics.errors import EXIT_OK
from analytics.job import Span
from analytics.nightly import NightlyRequest, make_default_steps, run_nightly
from analytics.reading.files import FileSystem
from analytics.sample import generate_logs
from analytics.sample.ground_truth import SampleSpec
from analytics.settings import Settings
from analytics.writing.warehouse import Warehouse
from tests.analytics.processes import family, still_there

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROOT = Path(analytics.__file__).parents[1]
DAY = date(2026, 11, 16)

# As `python -m analytics`, but that a busy machine may take its time for an end in order, before it is forced.
PATIENT = """
from analytics.cli import main
from analytics.errors import StopHandler
cancel_on_signal = StopHandler.cancel_on_signal
StopHandler.cancel_on_signal = lambda stop, halt, kill: cancel_on_signal(stop, halt, kill, timeout_s=120.0)
main()
"""


@dataclass(frozen=True, slots=True)
class Night:
    """Logs of a day, and a place for results."""

    folder: Path

    @property
    def out(self) -> Path:
        return self.folder / "out"

    def started(self, **environ: str) -> subprocess.Popen[str]:
        """The process, in a group of its own."""
        places = ["--logs", "logs", "--out", "out", "--textfile", "night.prom", "--scratch", "scratch"]
        return subprocess.Popen(
            [sys.executable, "-c", PATIENT, "nightly", *places, "--day", str(DAY), "--memory", "512m"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": str(ROOT), **environ},
            start_new_session=True,
        )

    def stopped(self, after: str, number: signal.Signals, group: bool) -> tuple[int, list[str]]:
        """
        Run, and send a signal as soon as a line has a word in it.

        :param group: send it to all processes of the group.
        :return: status and all lines of standard error. All processes have ended.
        """
        process = self.started()
        assert process.stderr
        lines: list[str] = []
        for line in process.stderr:
            lines.append(line)
            if after in line:
                break
        started = list(family(process.pid))
        (os.killpg if group else os.kill)(process.pid, number)
        lines += process.stderr
        status = process.wait()
        assert still_there(started) == []
        return status, lines

    def manifests(self) -> list[dict[str, Any]]:
        """Of all runs, in order."""
        return [json.loads(path.read_text()) for path in sorted(self.out.glob("runs/*.json"))]

    def debris(self) -> list[str]:
        """What a run is to take away with it."""
        left = [path.name for path in self.out.iterdir() if path.name.startswith("_")]
        return left + [path.name for path in (self.folder / "scratch").iterdir()]


@pytest.fixture
def night(tmp_path: Path) -> Night:
    generate_logs(
        tmp_path / "logs", SampleSpec(first_day=DAY, days=1, nodes=("a",), messages_per_day=40, incidents=False)
    )
    return Night(tmp_path)


def test_sigterm_while_spark_starts(night: Night) -> None:
    """One line and the status of a process that was stopped."""
    status, lines = night.stopped("starting Spark on Java ", signal.SIGTERM, group=False)
    assert (status, lines[1:]) == (143, ["mediatord-analytics: stopped by SIGTERM\n"])
    assert list(night.out.iterdir()) == []


# Says that it is a Java; then who it is, and never anything again.
HANGING_JAVA = """\
#!/bin/sh
case "$*" in
*-version) echo '    java.home = {home}'; echo 'version "17.0.1"' ;;
--list-modules) echo jdk.incubator.vector ;;
*) echo $$ > {home}/pid; exec sleep inf ;;
esac
"""


def test_sigint_while_java_hangs_at_its_start(night: Night) -> None:
    """It ends at once, with all that was started for it."""
    home = night.folder / "java"
    (home / "bin").mkdir(parents=True)
    program = home / "bin/java"
    program.write_text(HANGING_JAVA.format(home=home))
    program.chmod(0o755)
    os.mkfifo(home / "pid")
    process = night.started(MEDIATORD_JAVA=str(program))
    hanging = int((home / "pid").read_text())
    process.send_signal(signal.SIGINT)
    _, err = process.communicate()
    assert (process.returncode, err.splitlines()[1:]) == (130, ["mediatord-analytics: stopped by SIGINT"])
    assert (still_there([hanging]), night.debris()) == ([], [])


def test_sigterm_during_ingest(night: Night, spark: SparkSession) -> None:
    """Nothing but a manifest that says so is left, and nothing is in the way of the next run."""
    status, lines = night.stopped("discover", signal.SIGTERM, group=True)
    assert (status, lines[-1]) == (143, "mediatord-analytics: stopped by SIGTERM\n")
    # On a busy machine it may have come further by then.
    assert all(line.startswith("[") and "] publish" not in line for line in lines[1:-1])
    assert [(one["exit_status"], one["error"]) for one in night.manifests()] == [(143, "stopped by SIGTERM")]
    assert ([path.name for path in night.out.iterdir()], night.debris()) == (["runs"], [])

    files, span = FileSystem(spark), Span(DAY, DAY)
    keys, scratch = str(night.folder / "keys"), str(night.folder)
    request = NightlyRequest([str(night.folder / "logs")], str(night.out), span, Settings(), scratch, keys)

    def report(files: FileSystem, warehouse: Warehouse, out: str, day: date, *_: object) -> str:
        files.write(f"{out}/report/{day}/index.html", b"")
        return ""

    # What becomes of the events is not the question.
    steps = replace(make_default_steps(), jobs=(), report=report)
    assert run_nightly(spark, files, request, lambda _: None, steps).exit_status == EXIT_OK
    assert DAY in Warehouse(spark, files, str(night.out)).days("events")


@pytest.mark.parametrize(
    ("after", "number", "group"),
    [
        ("discover", signal.SIGINT, False),
        ("ingest", signal.SIGTERM, True),
        ("traffic", signal.SIGINT, True),
        ("reconciliation", signal.SIGTERM, False),
        ("verdict", signal.SIGTERM, True),
        ("report", signal.SIGINT, False),
        ("publish", signal.SIGTERM, True),
    ],
)
def test_stopped_at_any_moment(night: Night, after: str, number: signal.Signals, group: bool) -> None:
    """All is published or nothing; it is told in one line, by the status and by the manifest."""
    status, lines = night.stopped(f"] {after}", number, group)
    assert (status, lines[-1]) == (128 + number, f"mediatord-analytics: stopped by {number.name}\n")
    assert all(line.startswith(("starting Spark on Java ", "[")) for line in lines[:-1])
    assert night.debris() == []
    published = any("] publish" in line for line in lines)
    assert {path.name for path in night.out.iterdir()} >= ({"report", "tables"} if published else set())
    assert (night.out / "tables").exists() == (night.out / "report").exists() == published
    manifest = night.manifests()[-1]
    said = (manifest["exit_status"], manifest.get("error"))
    assert said == ((EXIT_OK, None) if published else (status, f"stopped by {number.name}"))
