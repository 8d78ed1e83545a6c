"""Nightly runs in processes that signals stop at any moment."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import pytest

import analytics
from analytics.database import Database
from analytics.engine import AnalysisSession
from analytics.errors import EXIT_OK
from analytics.files import FileSystem
from analytics.job import Span
from analytics.jobs import JOBS
from analytics.nightly import NightlyRequest, make_default_steps, run_nightly
from analytics.sample import generate_logs
from analytics.sample.ground_truth import SampleSpec
from analytics.settings import Settings
from analytics.writing.warehouse import Warehouse
from tests.analytics.processes import list_process_tree, wait_for_exit

ROOT = Path(analytics.__file__).parents[1]
DAY = date(2026, 11, 16)

# `python -m analytics` with a longer timeout for a clean stop, for busy machines.
PROGRAM = """
from analytics.cli import main
from analytics.errors import StopHandler
cancel_on_signal = StopHandler.cancel_on_signal
StopHandler.cancel_on_signal = lambda stop, halt, kill: cancel_on_signal(stop, halt, kill, timeout_s=120.0)
main()
"""


@dataclass(frozen=True, slots=True)
class RunFixture:
    """Logs of a day, and a directory for results."""

    folder: Path

    @property
    def out(self) -> Path:
        return self.folder / "out"

    def start(self, engine: str = "spark", **environ: str) -> subprocess.Popen[str]:
        """Start the run in a process group of its own."""
        paths = ["--logs", "logs", "--out", "out", "--textfile", "night.prom", "--scratch", "scratch"]
        return subprocess.Popen(
            [sys.executable, "-c", PROGRAM, "nightly", *paths, "--day", str(DAY), "--engine", engine],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": str(ROOT), **environ},
            start_new_session=True,
        )

    def run_and_stop(
        self, marker: str, number: signal.Signals, group: bool, engine: str = "spark"
    ) -> tuple[int, list[str]]:
        """
        Run, and send a signal as soon as a line of standard error contains a text.

        :param group: send the signal to the whole process group.
        :return: exit status and all lines of standard error, after all processes have ended.
        """
        process = self.start(engine)
        assert process.stderr
        lines: list[str] = []
        for line in process.stderr:
            lines.append(line)
            if marker in line:
                break
        start = list(list_process_tree(process.pid))
        (os.killpg if group else os.kill)(process.pid, number)
        lines += process.stderr
        status = process.wait()
        assert wait_for_exit(start) == []
        return status, lines

    def load_manifests(self) -> list[dict[str, Any]]:
        """The manifests of all runs, in order."""
        return [json.loads(path.read_text()) for path in sorted(self.out.glob("runs/*.json"))]

    def list_leftovers(self) -> list[str]:
        """Staged and temporary files, which a run must delete."""
        staged = [path.name for path in self.out.iterdir() if path.name.startswith("_")]
        return staged + [path.name for path in (self.folder / "scratch").iterdir()]


@pytest.fixture
def fixture(tmp_path: Path) -> RunFixture:
    generate_logs(
        tmp_path / "logs", SampleSpec(first_day=DAY, days=1, nodes=("a",), messages_per_day=40, incidents=False)
    )
    return RunFixture(tmp_path)


def test_sigterm_during_spark_start(fixture: RunFixture) -> None:
    """One line, and the exit status of a stopped process."""
    status, lines = fixture.run_and_stop("starting Spark on Java ", signal.SIGTERM, group=False)
    assert (status, lines[1:]) == (143, ["mediatord-analytics: stopped by SIGTERM\n"])
    assert list(fixture.out.iterdir()) == []


# Reports a valid Java; as Spark's JVM, it writes its process id and hangs.
HANGING_JAVA = """\
#!/bin/sh
case "$*" in
*-version) echo '    java.home = {home}'; echo 'version "17.0.1"' ;;
--list-modules) echo jdk.incubator.vector ;;
*) echo $$ > {home}/pid; exec sleep inf ;;
esac
"""


def test_sigint_while_java_hangs_at_start(fixture: RunFixture) -> None:
    """The run ends at once, with all its processes."""
    home = fixture.folder / "java"
    (home / "bin").mkdir(parents=True)
    program = home / "bin/java"
    program.write_text(HANGING_JAVA.format(home=home))
    program.chmod(0o755)
    os.mkfifo(home / "pid")
    process = fixture.start(MEDIATORD_JAVA=str(program))
    hanging = int((home / "pid").read_text())
    process.send_signal(signal.SIGINT)
    _, err = process.communicate()
    assert (process.returncode, err.splitlines()[1:]) == (130, ["mediatord-analytics: stopped by SIGINT"])
    assert (wait_for_exit([hanging]), fixture.list_leftovers()) == ([], [])


def test_sigterm_during_ingest(fixture: RunFixture, session: AnalysisSession) -> None:
    """Only a manifest remains, and the next run succeeds."""
    status, lines = fixture.run_and_stop("discover", signal.SIGTERM, group=True)
    assert (status, lines[-1]) == (143, "mediatord-analytics: stopped by SIGTERM\n")
    # On a busy machine the run may have advanced further.
    assert all(line.startswith("[") and "] publish" not in line for line in lines[1:-1])
    assert [(manifest["exit_status"], manifest["error"]) for manifest in fixture.load_manifests()] == [
        (143, "stopped by SIGTERM")
    ]
    assert ([path.name for path in fixture.out.iterdir()], fixture.list_leftovers()) == (["runs"], [])

    keys, span = str(fixture.folder / "keys"), Span(DAY, DAY)
    request = NightlyRequest([str(fixture.folder / "logs")], str(fixture.out), span, Settings(), keys)

    def report(files: FileSystem, database: Database, out: str, day: date, *_: object) -> str:
        files.write(f"{out}/report/{day}/index.html", b"")
        return ""

    # Jobs are not needed for this test.
    steps = replace(make_default_steps(), jobs=(), report=report)
    assert run_nightly(session, request, lambda _: None, steps).exit_status == EXIT_OK
    assert DAY in Warehouse(session.database, session.files, str(fixture.out)).days("events")


@pytest.mark.parametrize(
    ("marker", "number", "group"),
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
def test_stop_at_any_moment_is_atomic(fixture: RunFixture, marker: str, number: signal.Signals, group: bool) -> None:
    """All is published or nothing; standard error, exit status and manifest report the signal."""
    status, lines = fixture.run_and_stop(f"] {marker}", number, group)
    assert (status, lines[-1]) == (128 + number, f"mediatord-analytics: stopped by {number.name}\n")
    assert all(line.startswith(("starting Spark on Java ", "[")) for line in lines[:-1])
    assert fixture.list_leftovers() == []
    published = any("] publish" in line for line in lines)
    assert {path.name for path in fixture.out.iterdir()} >= ({"report", "tables"} if published else set())
    assert (fixture.out / "tables").exists() == (fixture.out / "report").exists() == published
    manifest = fixture.load_manifests()[-1]
    outcome = (manifest["exit_status"], manifest.get("error"))
    assert outcome == ((EXIT_OK, None) if published else (status, f"stopped by {number.name}"))


# Every step of a run; each of Spark's scans is within a job.
STEPS = ("discover", "ingest", *(job.name for job in JOBS), "verdict", "report", "publish")


def read_results(out: Path) -> dict[str, bytes]:
    """Contents of all published files."""
    return {
        str(path.relative_to(out)): path.read_bytes()
        for name in ("tables", "report")
        for path in (out / name).rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize(
    ("engine", "steps"), [("duckdb", STEPS), ("spark", ("ingest", "ledger", "sessions", "report", "publish"))]
)
def test_run_after_kill_in_any_step_gives_same_files(fixture: RunFixture, engine: str, steps: Sequence[str]) -> None:
    """SIGKILL of all processes; nothing is published, or everything once the next run has begun."""
    process = fixture.start(engine)
    process.communicate()
    assert process.returncode == EXIT_OK
    undisturbed = read_results(fixture.out)
    assert undisturbed
    for step in steps:
        shutil.rmtree(fixture.out)
        fixture.run_and_stop(f"] {step} ", signal.SIGKILL, group=True, engine=engine)
        process = fixture.start(engine)
        process.communicate()
        assert process.returncode == EXIT_OK
        assert read_results(fixture.out) == undisturbed, step
        assert fixture.list_leftovers() == []
