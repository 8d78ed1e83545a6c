"""Nightly runs with a simple ingest and simple jobs: what is read, computed, published and kept."""

from __future__ import annotations

import json
import os
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest

from analytics.database import Database, Row
from analytics.engine import AnalysisSession
from analytics.errors import EXIT_FAILED, EXIT_INTEGRITY, EXIT_NO_INPUT, EXIT_OK, AnalyticsError
from analytics.files import FileSystem, LocalFileSystem
from analytics.job import Job, JobRun, Span
from analytics.nightly import BACKFILL_COMMAND, NightlyOutcome, NightlyRequest, NightlySteps, run_nightly
from analytics.reading.segments import Discovery, Segment
from analytics.run_plan import load_read_segments
from analytics.sample import generate_logs
from analytics.sample.ground_truth import SampleSpec
from analytics.schema import TABLES, Table, make_events_table
from analytics.settings import Settings
from analytics.writing.retention import prune_expired
from analytics.writing.runs import LOCK_PREFIX, RunInfo, _get_process_identity, describe_changes
from analytics.writing.warehouse import Warehouse
from mediatord.observability.segments import MARKER_FILE, create_marker_directory, load_read_marker
from tests.analytics.job_tables import fill_table

FIRST = date(2026, 11, 16)
SETTINGS = Settings()


def day(number: int) -> date:
    """A day by its distance from the first."""
    return FIRST + timedelta(number)


# In these tests a segment is a file `<batch>.<name>`, and each line is the day of an event.


def discover(files: FileSystem, log_dirs: Sequence[str]) -> Discovery:
    segments = []
    for folder in log_dirs:
        for file in files.list(folder):
            name = file.path.rpartition("/")[2]
            if name == MARKER_FILE:
                continue
            batch = date.fromisoformat(name.partition(".")[0])
            segments.append(
                Segment(
                    stem=name,
                    path=file.path,
                    size=file.size,
                    modified=file.modified,
                    packed="plain",
                    active=False,
                    node="a",
                    batch=batch,
                )
            )
    return Discovery(segments=segments, findings=Counter(), warnings=[])


def ingest(session: AnalysisSession, segments: Sequence[Segment], staging: str) -> list[Row]:
    inputs: list[Row] = []
    for segment in segments:
        lines = session.files.read(segment.path).decode().split()
        inputs.append(
            {"dt": segment.batch, "stem": segment.stem, "path": segment.path, "state": "closed", "packed": "plain"}
        )
        inputs[-1] |= {"bytes": segment.size, "lines": len(lines), "remarks": ""}
        inputs[-1] |= {"modified": segment.modified.replace(tzinfo=None)}
        inputs[-1] |= dict.fromkeys(("corrupt", "unfinished", "doubled"), 0)
        inputs[-1] |= dict.fromkeys(("seq_first", "seq_last", "lines_said"))
        events = [
            {"dt": date.fromisoformat(line), "stem": segment.stem, "seq": seq, "event": "msg.accept"}
            for seq, line in enumerate(lines)
        ]
        for at in {row["dt"] for row in events}:
            rows = [row for row in events if row["dt"] == at]
            write_parquet(
                session.database,
                make_events_table(),
                rows,
                Path(staging, "events", f"dt={at}", f"batch={segment.batch}", f"{segment.stem}.parquet"),
            )
    return inputs


def write_parquet(database: Database, table: Table, rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    fill_table(database, replace(table, name="written"), rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    partitions = ", ".join(column.name for column in table.columns if column.name in ("dt", "batch"))
    database.execute(f"COPY (SELECT * EXCLUDE ({partitions}) FROM written) TO '{path}'")


def compute_boots(run: JobRun) -> dict[str, str]:
    run.scan("event_counts", f"SELECT dt, count(*) AS n FROM events WHERE dt >= {run.first} GROUP BY dt")
    zeros = ", ".join(f"0 AS {name}" for name in ("seq_first", "seq_last", "missing", "doubled", "stepped_back"))
    return {
        "boots_daily": f"SELECT *, 'a' AS node, 'b' AS boot, {zeros}, NULL AS last_at, NULL AS stopped"
        " FROM event_counts"
    }


def compute_ledger(run: JobRun) -> dict[str, Sequence[Row]]:
    """Nothing is ever delivered: the number of open messages grows."""
    before = run.rows(f"SELECT open FROM ledger_daily WHERE dt = {run.first} - 1")
    accepted = {row["dt"]: row["n"] for row in run.rows("SELECT dt, n FROM boots_daily")}
    open_count, rows = before[0]["open"] if before else 0, []
    for at in run.span.days:
        rows.append({column.name: 0 for column in TABLES["ledger_daily"].columns} | {"dt": at, "books": None})
        rows[-1] |= {"opening": open_count, "accepted": accepted.get(at, 0)}
        open_count += accepted.get(at, 0)
        rows[-1]["open"] = open_count
    return {"ledger_daily": rows}


BOOTS = Job("boots", reads=("events",), writes=("boots_daily",), make_tables=compute_boots)
LEDGER = Job(
    "ledger",
    reads=("boots_daily",),
    writes=("ledger_daily",),
    make_tables=compute_ledger,
    history_days={"ledger_daily": 1},
)


def write_report(
    files: FileSystem, database: Database, out: str, at: date, settings: Settings, facts: RunInfo
) -> str:
    path = f"{out}/report/{at}/index.html"
    files.write(path, str(facts.span).encode())
    return path


def write_textfile(database: Database, at: date, path: str, facts: RunInfo) -> None:
    Path(path).write_text(str(at))


STEPS = NightlySteps(
    discover, ingest, (BOOTS, LEDGER), lambda request: lambda table, rows: rows, write_report, write_textfile
)


class NightlyFixture:
    """Directories of logs and results."""

    def __init__(self, session: AnalysisSession, folder: Path) -> None:
        self.session = session
        self.logs = folder / "logs"
        self.out = folder / "out"
        self.progress: list[str] = []
        self.logs.mkdir()

    def write_segment(self, batch: int, name: str, *events: int) -> Path:
        """Write a segment; its events are given by their days."""
        path = self.logs / f"{day(batch)}.{name}"
        path.write_text("\n".join(str(day(number)) for number in events))
        return path

    def run(
        self,
        first: int,
        last: int | None = None,
        out: Path | None = None,
        steps: NightlySteps = STEPS,
        **options: Any,
    ) -> NightlyOutcome:
        """Run the analysis for these days."""
        span = Span(day(first), day(first if last is None else last))
        request = NightlyRequest([str(self.logs)], str(out or self.out), span, SETTINGS, "", **options)
        return run_nightly(self.session, request, self.progress.append, steps)

    def ledger(self, out: Path | None = None) -> dict[int, tuple[int, int, int]]:
        """Opening, accepted and open messages by day."""
        rows = self.open_warehouse(out).rows("ledger_daily", Span(day(-5), day(20)))
        return {(row["dt"] - FIRST).days: (row["opening"], row["accepted"], row["open"]) for row in rows}

    def open_warehouse(self, out: Path | None = None) -> Warehouse:
        """The published results."""
        return Warehouse(self.session.database, self.session.files, str(out or self.out))

    def manifest(self, outcome: NightlyOutcome) -> dict[str, Any]:
        manifest: dict[str, Any] = json.loads((self.out / "runs" / f"{outcome.run_id}.json").read_text())
        return manifest

    def content(self) -> dict[str, str]:
        """Digests of all published files."""
        paths = [path for name in ("tables", "report") for path in (self.out / name).rglob("*") if path.is_file()]
        return {str(path): blake2b(path.read_bytes()).hexdigest() for path in paths}

    def rows(self) -> dict[str, list[str]]:
        """Sorted digests of the files of each partition; file names are random."""
        found: dict[str, list[str]] = {}
        for path, digest in sorted(self.content().items()):
            found.setdefault(str(Path(path).parent), []).append(digest)
        return {folder: sorted(digests) for folder, digests in found.items()}


@pytest.fixture
def nightly(session: AnalysisSession, tmp_path: Path) -> NightlyFixture:
    return NightlyFixture(session, tmp_path)


def test_consecutive_runs_with_late_input_equal_back_fill(nightly: NightlyFixture, tmp_path: Path) -> None:
    """
    Even with a late segment, and one deleted after it was read. A repeated run reads nothing and produces the same
    bytes. Segments read are named to the daemon.
    """
    create_marker_directory(nightly.logs)
    nightly.write_segment(0, "x", 0, 0, 1)
    nightly.write_segment(1, "x", 1)
    assert nightly.run(0).exit_status == EXIT_OK
    assert load_read_marker(nightly.logs) == frozenset([f"{day(0)}.x"])
    assert nightly.ledger() == {0: (0, 2, 2)}
    second = nightly.run(1, textfile=str(tmp_path / "m.prom"))
    assert nightly.ledger() == {0: (0, 2, 2), 1: (2, 2, 4)}
    assert [entry["stem"] for entry in nightly.manifest(second)["inputs"]] == [f"{day(1)}.x"]
    assert (tmp_path / "m.prom").read_text() == str(day(1))

    before = nightly.rows()
    repeated = nightly.run(1)
    assert nightly.manifest(repeated)["inputs"] == []
    reports = str(nightly.out / "report")
    assert {k: v for k, v in nightly.rows().items() if not k.startswith(reports)} == {
        k: v for k, v in before.items() if not k.startswith(reports)
    }

    deleted_path = nightly.logs / f"{day(1)}.x"
    saved_path = deleted_path.rename(tmp_path / deleted_path.name)
    nightly.write_segment(1, "late", 1, 1, 2)
    nightly.write_segment(2, "x", 2)
    with_late_segment = nightly.run(2, textfile=str(tmp_path / "m.prom"))
    assert nightly.ledger() == {0: (0, 2, 2), 1: (2, 4, 6), 2: (6, 2, 8)}
    manifest = nightly.manifest(with_late_segment)
    assert (manifest["span"], manifest["kept"], manifest["final_through"]) == (
        [str(day(1)), str(day(2))],
        {str(day(1)): 1},
        str(FIRST),
    )
    # The report of the day before was regenerated with its tables.
    assert (nightly.out / "report" / str(day(1)) / "index.html").read_text() == str(Span(day(1), day(2)))

    assert load_read_marker(nightly.logs) == frozenset([f"{day(0)}.x", f"{day(1)}.late", f"{day(2)}.x"])
    saved_path.rename(deleted_path)
    assert nightly.run(0, 2, out=tmp_path / "at once").exit_status == EXIT_OK
    assert nightly.ledger(tmp_path / "at once") == nightly.ledger()

    # An old day again, with more input: outdated results are named, and the metrics file stays.
    nightly.write_segment(0, "very late", 0)
    assert nightly.run(0, textfile=str(tmp_path / "m.prom")).warnings == (
        [f"results after {FIRST} are outdated; run {BACKFILL_COMMAND} --from {day(1)} --to {day(2)}"]
    )
    assert (tmp_path / "m.prom").read_text() == str(day(2))


def test_failed_run_changes_nothing_published(nightly: NightlyFixture) -> None:
    """Whether the last job, the check of its output, or the report fails."""
    nightly.write_segment(0, "x", 0)
    nightly.run(0)
    before = nightly.content()
    nightly.write_segment(0, "late", 0)

    def fail_ledger(run: JobRun) -> dict[str, str]:
        others = ", ".join(f'0 AS "{column.name}"' for column in TABLES["ledger_daily"].columns[1:-1])
        return {"ledger_daily": f"SELECT {run.first} AS dt, {others}, error('no balance')::DATE AS books"}

    with pytest.raises(AnalyticsError, match="job ledger: .*no balance"):
        nightly.run(0, steps=replace(STEPS, jobs=(BOOTS, replace(LEDGER, make_tables=fail_ledger))))

    def fail_report(*_: object) -> str:
        raise OSError("no ink")

    with pytest.raises(AnalyticsError, match="report: no ink"):
        nightly.run(0, steps=replace(STEPS, report=fail_report))
    assert nightly.content() == before
    assert sorted(path.name for path in nightly.out.iterdir()) == ["report", "runs", "tables"]
    manifest = [json.loads(path.read_text()) for path in sorted((nightly.out / "runs").iterdir())]
    assert sorted((entry["exit_status"], entry.get("error", "")[:6]) for entry in manifest) == [
        (EXIT_OK, ""),
        (EXIT_FAILED, "job le"),
        (EXIT_FAILED, "report"),
    ]


class StoppedProcess(BaseException):
    """As by a signal."""


class StoppingFileSystem(LocalFileSystem):
    """Stops the process at the first move of a directory."""

    def move(self, source: str, target: str) -> None:
        raise StoppedProcess


def test_next_run_completes_interrupted_publication(nightly: NightlyFixture) -> None:
    nightly.write_segment(0, "x", 0)
    session = nightly.session
    nightly.session = replace(session, files=StoppingFileSystem())
    with pytest.raises(StoppedProcess):
        nightly.run(0)
    assert not (nightly.out / "tables").exists()
    nightly.session = session
    outcome = nightly.run(1)
    assert outcome.exit_status == EXIT_NO_INPUT
    assert "completed an interrupted publication" in nightly.progress
    assert nightly.ledger() == {0: (0, 1, 1)}
    assert sorted(path.name for path in nightly.out.iterdir()) == ["report", "runs", "tables"]


def test_exit_status_without_input(nightly: NightlyFixture) -> None:
    """Nothing is written. With `allow_empty` the run succeeds; a gap between days is valid input."""
    nightly.write_segment(0, "x", 0)
    outcome = nightly.run(3)
    assert (outcome.exit_status, outcome.report_path) == (EXIT_NO_INPUT, "")
    assert list(outcome.warnings) == [f"no log segments for {day(3)} in {nightly.logs}"]
    assert nightly.run(3, allow_empty=True).exit_status == EXIT_OK
    assert list(nightly.out.iterdir()) == []
    nightly.write_segment(2, "x", 2)
    nightly.run(0, 2)
    assert nightly.ledger() == {0: (0, 1, 1), 1: (1, 0, 1), 2: (1, 1, 2)}


def test_exit_status_with_late_input_only(nightly: NightlyFixture, tmp_path: Path) -> None:
    """Earlier days are computed again; the exit status is that of a day without input."""
    for number in (0, 1):
        nightly.write_segment(number, "x", number)
    nightly.run(0, 1)
    nightly.write_segment(0, "late", 0)
    outcome = nightly.run(2, textfile=str(tmp_path / "m.prom"))
    assert (outcome.exit_status, list(outcome.warnings)) == (
        EXIT_NO_INPUT,
        [f"no log segments for {day(2)} in {nightly.logs}"],
    )
    assert nightly.ledger() == {0: (0, 2, 2), 1: (2, 1, 3)}
    manifest = nightly.manifest(outcome)
    assert (manifest["asked"], manifest["span"], manifest["exit_status"]) == (
        [str(day(0)), str(day(1))],
        [str(day(0)), str(day(1))],
        EXIT_NO_INPUT,
    )
    assert (tmp_path / "m.prom").read_text() == str(day(1))
    repeated = nightly.run(2)
    assert (repeated.exit_status, repeated.report_path) == (EXIT_NO_INPUT, "")


def test_segments_of_pruned_events_are_no_new_input(nightly: NightlyFixture) -> None:
    """They cause no warning, and prune deletes them."""
    for number in (0, 60):
        path = nightly.write_segment(number, "x", number)
        assert nightly.run(number).exit_status == EXIT_OK
    files, out = nightly.session.files, str(nightly.out)
    prune_expired(nightly.open_warehouse(), files, out, SETTINGS, ())
    assert [path.name for path in (nightly.out / "tables" / "events").iterdir()] == [f"dt={day(60)}"]
    assert nightly.run(60).warnings == []
    segments = discover(files, [str(nightly.logs)]).segments
    warehouse = nightly.open_warehouse()
    known = load_read_segments(warehouse, {write_segment.batch for write_segment in segments})
    assert prune_expired(warehouse, files, out, SETTINGS, (), segments, known) == 1
    assert list(nightly.logs.iterdir()) == [path]


def test_insufficient_space_fails_before_writing(nightly: NightlyFixture) -> None:
    nightly.write_segment(0, "x", 0)
    with pytest.raises(AnalyticsError, match="MiB free, about .* MiB needed"):
        nightly.run(0, keep_free=1 << 60)
    assert list(nightly.out.iterdir()) == []


def test_publishes_integrity_errors(nightly: NightlyFixture) -> None:
    """The results are published, and the errors named by day and kind."""
    nightly.write_segment(0, "x", 0)

    def compute_unbalanced_ledger(run: JobRun) -> dict[str, Sequence[Row]]:
        errors = {"difference": -2, "vanished": 3, "overdue": 1}
        return {"ledger_daily": [row | errors for row in compute_ledger(run)["ledger_daily"]]}

    jobs = (BOOTS, replace(LEDGER, make_tables=compute_unbalanced_ledger))
    outcome = nightly.run(0, steps=replace(STEPS, jobs=jobs))
    assert outcome.exit_status == EXIT_INTEGRITY
    assert outcome.integrity_errors == [
        f"{FIRST}: messages that became overdue without a logged ending: 3",
        f"{FIRST}: the message ledger has a difference of 2",
    ]
    assert nightly.ledger() == {0: (0, 1, 1)}


def test_describes_changed_settings(nightly: NightlyFixture) -> None:
    """Otherwise incomparable days could be compared."""
    before = {"settings": {**SETTINGS.model_dump(), "top": 7}, "code_version": "0.0.1", "schema_version": 1}
    changes = describe_changes(before, SETTINGS)
    assert "top changed from 7 to 20" in changes
    assert any(line.startswith("code_version changed from 0.0.1 to ") for line in changes)
    assert len(changes) == 2


def make_lock_content(**other: Any) -> bytes:
    process = {"host": socket.gethostname(), "pid": os.getpid(), "since": datetime.now(UTC).isoformat()}
    return json.dumps({**process, "life": _get_process_identity(os.getpid()), **other}).encode()


@pytest.mark.parametrize(
    ("other", "is_held"),
    [
        ({}, True),
        ({"life": "an earlier process of this id"}, False),
        ({"pid": 2**22 + 1}, False),
        ({"host": "elsewhere"}, True),
        ({"host": "elsewhere", "since": "2026-11-19T00:00:00+00:00"}, False),
    ],
)
def test_lock_admits_one_run(nightly: NightlyFixture, other: dict[str, Any], is_held: bool) -> None:
    """A lock is held while its process runs; a lock of another host, for a day."""
    path = f"{nightly.out}/{LOCK_PREFIX}other.json"
    nightly.session.files.write(path, make_lock_content(**other))
    if is_held:
        with pytest.raises(
            AnalyticsError, match=r"another run holds the lock: process \d+ on .* delete .*other.json"
        ):
            nightly.run(0)
        assert Path(path).exists()
    else:
        assert nightly.run(0).exit_status == EXIT_NO_INPUT
        assert not Path(path).exists()
    assert not list(nightly.out.glob("runs"))


def read_results(out: Path) -> dict[str, bytes]:
    """Contents of all files of tables and reports."""
    return {
        str(path): path.read_bytes()
        for name in ("tables", "report")
        for path in sorted((out / name).rglob("*"))
        if path.is_file()
    }


def test_consecutive_runs_equal_back_fill_with_all_jobs(session: AnalysisSession, tmp_path: Path) -> None:
    """With generated logs and the real steps; keys are unique. A repeated run produces identical files."""
    generate_logs(
        tmp_path / "logs", SampleSpec(first_day=FIRST, days=2, nodes=("a", "b"), messages_per_day=40, incidents=False)
    )
    found: dict[str, dict[str, list[Row]]] = {}
    for out, spans in {
        "nights": [Span(day(0), day(0)), Span(day(1), day(1))],
        "at once": [Span(day(0), day(1))],
    }.items():
        for span in spans:
            request = NightlyRequest(
                [str(tmp_path / "logs")], str(tmp_path / out), span, SETTINGS, str(tmp_path / "keys")
            )
            outcome = run_nightly(session, request, lambda line: None)
            assert (outcome.exit_status, outcome.warnings) == (EXIT_OK, [])
        warehouse, both = Warehouse(session.database, session.files, str(tmp_path / out)), Span(day(-5), day(5))
        found[out] = {name: warehouse.rows(name, both) for name in TABLES}
    before = read_results(tmp_path / out)
    assert run_nightly(session, request, lambda line: None).exit_status == EXIT_OK
    assert read_results(tmp_path / out) == before
    different = [name for name in TABLES if found["nights"][name] != found["at once"][name]]
    assert different == []
    assert len(found["nights"]["ledger_daily"]) == 2
    for name, table in TABLES.items():
        keys = [tuple(row[column] for column in table.key) for row in found["nights"][name]]
        assert not table.key or len(set(keys)) == len(keys), name
