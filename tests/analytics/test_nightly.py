"""A run in full, with an ingest and jobs of a few lines: what is read, computed, published, and left alone."""

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
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql import Window
from pyspark.sql import functions as F

from analytics.errors import EXIT_FAILED, EXIT_INTEGRITY, EXIT_NO_INPUT, EXIT_OK, AnalyticsError
from analytics.job import Job, Span
from analytics.nightly import BACKFILL_COMMAND, NightlyOutcome, NightlyRequest, NightlySteps, run_nightly
from analytics.reading.files import FileSystem
from analytics.reading.segments import Discovery, Segment
from analytics.run_plan import load_read_segments
from analytics.sample import generate_logs
from analytics.sample.ground_truth import SampleSpec
from analytics.schema import TABLES, make_events_struct
from analytics.settings import Settings
from analytics.writing.retention import prune_expired
from analytics.writing.runs import LOCK_PREFIX, RunInfo, _get_process_identity, describe_changes
from analytics.writing.warehouse import Warehouse
from mediatord.observability.segments import MARKER_FILE, create_marker_directory, load_read_marker

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row, SparkSession

Frames = Mapping[str, "DataFrame"]

FIRST = date(2026, 11, 16)
SETTINGS = Settings()


def day(number: int) -> date:
    """So many days after the first one."""
    return FIRST + timedelta(number)


# A segment of this mediator is a file `<batch>.<name>`; each line is the day of an event.


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


def ingest(spark: SparkSession, files: FileSystem, segments: Sequence[Segment], staging: str) -> None:
    events, inputs = [], []
    for segment in segments:
        lines = files.read(segment.path).decode().split()
        inputs.append({"dt": segment.batch, "stem": segment.stem, "path": segment.path, "state": "closed"})
        inputs[-1] |= {"bytes": segment.size, "modified": segment.modified, "lines": len(lines)}
        inputs[-1] |= dict.fromkeys(("corrupt", "unfinished", "doubled"), 0) | {"packed": "plain", "remarks": ""}
        for seq, line in enumerate(lines):
            at = date.fromisoformat(line)
            events.append({"dt": at, "batch": segment.batch, "stem": segment.stem, "seq": seq, "event": "msg.accept"})
    for name, rows, struct, partitions in (
        ("events", events, make_events_struct(), ["dt", "batch"]),
        ("inputs", inputs, TABLES["inputs"].struct(), ["dt"]),
    ):
        tuples = [tuple(row.get(column) for column in struct.names) for row in rows]
        frame = spark.createDataFrame(tuples, struct).coalesce(1)
        frame.write.partitionBy(*partitions).parquet(f"{staging}/{name}")


def boots(tables: Frames, settings: Settings, span: Span) -> dict[str, DataFrame]:
    counted = tables["events"].groupBy("dt").agg(F.count("*").alias("n"))
    empty = {name: F.lit(0) for name in ("seq_first", "seq_last", "missing", "doubled", "stepped_back")}
    empty |= {name: F.lit(None) for name in ("last_at", "stopped")}
    return {"boots_daily": counted.withColumns({"node": F.lit("a"), "boot": F.lit("b"), **empty})}


def ledger(tables: Frames, settings: Settings, span: Span) -> dict[str, DataFrame]:
    """Nothing is ever delivered: what is open grows from day to day."""
    before = tables["ledger_daily"].where(F.col("dt") == F.lit(span.first - timedelta(1))).select("open")
    days = F.explode(F.sequence(F.lit(span.first), F.lit(span.last)))
    each = before.sparkSession.range(1).select(days.alias("dt")).join(before, how="left")
    accepted = tables["boots_daily"].select("dt", F.col("n").alias("accepted"))
    so_far = Window.orderBy("dt")
    frame = each.join(accepted, "dt", "left").fillna(0, ["open", "accepted"])
    frame = frame.withColumn("open", F.col("open") + F.sum("accepted").over(so_far))
    frame = frame.withColumn("opening", F.col("open") - F.col("accepted"))
    types = {field.name: field.dataType for field in TABLES["ledger_daily"].struct().fields}
    rest = {name: F.lit(0).cast(kind) for name, kind in types.items() if name not in frame.columns}
    return {
        "ledger_daily": frame.withColumns(
            {k: F.lit(None).cast(types[k]) if k == "books" else v for k, v in rest.items()}
        )
    }


BOOTS = Job("boots", reads=("events",), writes=("boots_daily",), transform=boots)
LEDGER = Job(
    "ledger", reads=("boots_daily",), writes=("ledger_daily",), transform=ledger, history_days={"ledger_daily": 1}
)


def report(files: FileSystem, warehouse: Warehouse, out: str, at: date, settings: Settings, facts: RunInfo) -> str:
    path = f"{out}/report/{at}/index.html"
    files.write(path, str(facts.span).encode())
    return path


def textfile(warehouse: Warehouse, at: date, path: str, facts: RunInfo) -> None:
    Path(path).write_text(str(at))


STEPS = NightlySteps(discover, ingest, (BOOTS, LEDGER), lambda request: lambda table, frame: frame, report, textfile)


class NightlyFixture:
    """Logs and results in one place."""

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        self.spark = spark
        self.files = FileSystem(spark)
        self.logs = folder / "logs"
        self.out = folder / "out"
        self.scratch = folder
        self.told: list[str] = []
        self.logs.mkdir()

    def segment(self, batch: int, name: str, *events: int) -> Path:
        """Write one; its events are given by their days."""
        path = self.logs / f"{day(batch)}.{name}"
        path.write_text("\n".join(str(day(number)) for number in events))
        return path

    def run(
        self, first: int, last: int | None = None, out: Path | None = None, steps: NightlySteps = STEPS, **rest: Any
    ) -> NightlyOutcome:
        """A run of these days."""
        span = Span(day(first), day(first if last is None else last))
        request = NightlyRequest(
            [str(self.logs)], str(out or self.out), span, SETTINGS, str(self.scratch), "", **rest
        )
        return run_nightly(self.spark, self.files, request, self.told.append, steps)

    def ledger(self, out: Path | None = None) -> dict[int, tuple[int, int, int]]:
        """Opening, accepted and open by day."""
        rows = Warehouse(self.spark, self.files, str(out or self.out)).read("ledger_daily", Span(day(-5), day(20)))
        return {(row.dt - FIRST).days: (row.opening, row.accepted, row.open) for row in rows.collect()}

    def manifest(self, outcome: NightlyOutcome) -> dict[str, Any]:
        said: dict[str, Any] = json.loads((self.out / "runs" / f"{outcome.run_id}.json").read_text())
        return said

    def content(self) -> dict[str, str]:
        """Digest of everything published."""
        paths = [path for name in ("tables", "report") for path in (self.out / name).rglob("*") if path.is_file()]
        return {str(path): blake2b(path.read_bytes()).hexdigest() for path in paths}

    def rows(self) -> dict[str, list[str]]:
        """Digests of the files of each partition; their names are random."""
        found: dict[str, list[str]] = {}
        for path, digest in sorted(self.content().items()):
            found.setdefault(str(Path(path).parent), []).append(digest)
        return {folder: sorted(digests) for folder, digests in found.items()}


@pytest.fixture
def world(spark: SparkSession, tmp_path: Path) -> NightlyFixture:
    return NightlyFixture(spark, tmp_path)


def test_nights_late_input_and_back_fill(world: NightlyFixture, tmp_path: Path) -> None:
    """
    Night after night, with a late segment and one whose file is gone by then, makes the same as all at once.

    A second run of the last night reads nothing and makes the same bytes. What was read is named to the daemon.
    """
    create_marker_directory(world.logs)
    world.segment(0, "x", 0, 0, 1)
    world.segment(1, "x", 1)
    assert world.run(0).exit_status == EXIT_OK
    assert load_read_marker(world.logs) == frozenset([f"{day(0)}.x"])
    assert world.ledger() == {0: (0, 2, 2)}
    second = world.run(1, textfile=str(tmp_path / "m.prom"))
    assert world.ledger() == {0: (0, 2, 2), 1: (2, 2, 4)}
    assert [one["stem"] for one in world.manifest(second)["inputs"]] == [f"{day(1)}.x"]
    assert (tmp_path / "m.prom").read_text() == str(day(1))

    before = world.rows()
    again = world.run(1)
    assert world.manifest(again)["inputs"] == []
    reports = str(world.out / "report")
    assert {k: v for k, v in world.rows().items() if not k.startswith(reports)} == {
        k: v for k, v in before.items() if not k.startswith(reports)
    }

    gone = world.logs / f"{day(1)}.x"
    aside = gone.rename(tmp_path / gone.name)
    world.segment(1, "late", 1, 1, 2)
    world.segment(2, "x", 2)
    late = world.run(2, textfile=str(tmp_path / "m.prom"))
    assert world.ledger() == {0: (0, 2, 2), 1: (2, 4, 6), 2: (6, 2, 8)}
    said = world.manifest(late)
    assert (said["span"], said["kept"], said["final_through"]) == (
        [str(day(1)), str(day(2))],
        {str(day(1)): 1},
        str(FIRST),
    )
    # The report of the day before was made again with its tables.
    assert (world.out / "report" / str(day(1)) / "index.html").read_text() == str(Span(day(1), day(2)))

    assert load_read_marker(world.logs) == frozenset([f"{day(0)}.x", f"{day(1)}.late", f"{day(2)}.x"])
    aside.rename(gone)
    assert world.run(0, 2, out=tmp_path / "at once").exit_status == EXIT_OK
    assert world.ledger(tmp_path / "at once") == world.ledger()

    # An old day once more, with more input: what is based on it is told, and the figures for alerts stay.
    world.segment(0, "very late", 0)
    assert world.run(0, textfile=str(tmp_path / "m.prom")).warnings == (
        [f"results after {FIRST} are outdated; run {BACKFILL_COMMAND} --from {day(1)} --to {day(2)}"]
    )
    assert (tmp_path / "m.prom").read_text() == str(day(2))


def test_a_failed_run_changes_nothing(world: NightlyFixture) -> None:
    """The last job fails, a job makes what it should not, the report fails: what is published stays, bit for bit."""
    world.segment(0, "x", 0)
    world.run(0)
    before = world.content()
    world.segment(0, "late", 0)

    def failing(tables: Frames, settings: Settings, span: Span) -> dict[str, DataFrame]:
        frame = ledger(tables, settings, span)["ledger_daily"]
        return {"ledger_daily": frame.withColumn("open", F.assert_true(F.lit(False)).cast("bigint"))}

    with pytest.raises(AnalyticsError, match="job ledger: .*'false' is not true"):
        world.run(0, steps=replace(STEPS, jobs=(BOOTS, replace(LEDGER, transform=failing))))

    def broken_report(*_: object) -> str:
        raise OSError("no ink")

    with pytest.raises(AnalyticsError, match="report: no ink"):
        world.run(0, steps=replace(STEPS, report=broken_report))
    assert world.content() == before
    assert sorted(path.name for path in world.out.iterdir()) == ["report", "runs", "tables"]
    said = [json.loads(path.read_text()) for path in sorted((world.out / "runs").iterdir())]
    assert sorted((one["exit_status"], one.get("error", "")[:6]) for one in said) == [
        (EXIT_OK, ""),
        (EXIT_FAILED, "job le"),
        (EXIT_FAILED, "report"),
    ]


class Stopped(BaseException):
    """As by a signal."""


class StoppedFiles(FileSystem):
    """Files of a process that is stopped when it moves the first directory."""

    def move(self, source: str, target: str) -> None:
        raise Stopped


def test_a_run_that_is_stopped_while_it_publishes(world: NightlyFixture) -> None:
    """The next one brings it to its end, and finds it there."""
    world.segment(0, "x", 0)
    world.files = StoppedFiles(world.spark)
    with pytest.raises(Stopped):
        world.run(0)
    assert not (world.out / "tables").exists()
    world.files = FileSystem(world.spark)
    outcome = world.run(1)
    assert outcome.exit_status == EXIT_NO_INPUT
    assert "completed an interrupted publication" in world.told
    assert world.ledger() == {0: (0, 1, 1)}
    assert sorted(path.name for path in world.out.iterdir()) == ["report", "runs", "tables"]


def test_no_input(world: NightlyFixture) -> None:
    """Nothing is written, and the exit status says so, unless that is fine; a gap between days is."""
    world.segment(0, "x", 0)
    outcome = world.run(3)
    assert (outcome.exit_status, outcome.report_path) == (EXIT_NO_INPUT, "")
    assert list(outcome.warnings) == [f"no log segments for {day(3)} in {world.logs}"]
    assert world.run(3, allow_empty=True).exit_status == EXIT_OK
    assert list(world.out.iterdir()) == []
    world.segment(2, "x", 2)
    world.run(0, 2)
    assert world.ledger() == {0: (0, 1, 1), 1: (1, 0, 1), 2: (1, 1, 2)}


def test_no_input_but_late_segments_of_the_days_before(world: NightlyFixture, tmp_path: Path) -> None:
    """Those days are made again, and the exit status is that of a day without input."""
    for number in (0, 1):
        world.segment(number, "x", number)
    world.run(0, 1)
    world.segment(0, "late", 0)
    outcome = world.run(2, textfile=str(tmp_path / "m.prom"))
    assert (outcome.exit_status, list(outcome.warnings)) == (
        EXIT_NO_INPUT,
        [f"no log segments for {day(2)} in {world.logs}"],
    )
    assert world.ledger() == {0: (0, 2, 2), 1: (2, 1, 3)}
    said = world.manifest(outcome)
    assert (said["asked"], said["span"], said["exit_status"]) == (
        [str(day(0)), str(day(1))],
        [str(day(0)), str(day(1))],
        EXIT_NO_INPUT,
    )
    assert (tmp_path / "m.prom").read_text() == str(day(1))
    again = world.run(2)
    assert (again.exit_status, again.report_path) == (EXIT_NO_INPUT, "")


def test_events_that_prune_deleted(world: NightlyFixture) -> None:
    """Their segments are no new input, whatever is warned of, and prune deletes them."""
    for number in (0, 60):
        path = world.segment(number, "x", number)
        assert world.run(number).exit_status == EXIT_OK
    files, out = world.files, str(world.out)
    prune_expired(Warehouse(world.spark, files, out), files, out, SETTINGS, ())
    assert [path.name for path in (world.out / "tables" / "events").iterdir()] == [f"dt={day(60)}"]
    assert world.run(60).warnings == []
    segments = discover(files, [str(world.logs)]).segments
    warehouse = Warehouse(world.spark, files, out)
    known = load_read_segments(warehouse, {segment.batch for segment in segments})
    assert prune_expired(warehouse, files, out, SETTINGS, (), segments, known) == 1
    assert list(world.logs.iterdir()) == [path]


def test_too_little_room(world: NightlyFixture) -> None:
    """It is told before anything is written."""
    world.segment(0, "x", 0)
    with pytest.raises(AnalyticsError, match="MiB free, about .* MiB needed"):
        world.run(0, keep_free=1 << 60)
    assert list(world.out.iterdir()) == []


def test_integrity_broken(world: NightlyFixture) -> None:
    """It is published, and said by day and kind."""
    world.segment(0, "x", 0)

    def broken(tables: Frames, settings: Settings, span: Span) -> dict[str, DataFrame]:
        frame = ledger(tables, settings, span)["ledger_daily"]
        return {
            "ledger_daily": frame.withColumns(
                {name: F.lit(n).cast("bigint") for name, n in {"difference": -2, "vanished": 3, "overdue": 1}.items()}
            )
        }

    outcome = world.run(0, steps=replace(STEPS, jobs=(BOOTS, replace(LEDGER, transform=broken))))
    assert outcome.exit_status == EXIT_INTEGRITY
    assert outcome.integrity_errors == [
        f"{FIRST}: messages that became overdue without a logged ending: 3",
        f"{FIRST}: the message ledger has a difference of 2",
    ]
    assert world.ledger() == {0: (0, 1, 1)}


def test_settings_that_changed_are_said(world: NightlyFixture) -> None:
    """So that nobody compares what cannot be compared."""
    before = {"settings": {**SETTINGS.model_dump(), "top": 7}, "code_version": "0.0.1", "schema_version": 1}
    changes = describe_changes(before, SETTINGS)
    assert "top was 7, is 20" in changes
    assert any(line.startswith("code_version was 0.0.1, is ") for line in changes)
    assert len(changes) == 2


def holder(**other: Any) -> bytes:
    me = {"host": socket.gethostname(), "pid": os.getpid(), "since": datetime.now(UTC).isoformat()}
    return json.dumps({**me, "life": _get_process_identity(os.getpid()), **other}).encode()


@pytest.mark.parametrize(
    ("other", "held"),
    [
        ({}, True),
        ({"life": "an earlier process of this id"}, False),
        ({"pid": 2**22 + 1}, False),
        ({"host": "elsewhere"}, True),
        ({"host": "elsewhere", "since": "2026-11-19T00:00:00+00:00"}, False),
    ],
)
def test_one_run_at_a_time(world: NightlyFixture, other: dict[str, Any], held: bool) -> None:
    """A lock counts while its process lives; of one elsewhere a day is believed."""
    path = f"{world.out}/{LOCK_PREFIX}other.json"
    world.files.write(path, holder(**other))
    if held:
        with pytest.raises(
            AnalyticsError, match=r"another run holds the lock: process \d+ on .* delete .*other.json"
        ):
            world.run(0)
        assert Path(path).exists()
    else:
        assert world.run(0).exit_status == EXIT_NO_INPUT
        assert not Path(path).exists()
    assert not list(world.out.glob("runs"))


def published(out: Path) -> dict[str, bytes]:
    """The files of the reports."""
    return {str(path): path.read_bytes() for path in sorted((out / "report").rglob("*")) if path.is_file()}


@pytest.mark.exhaustive
def test_back_fill_and_nights_with_all_jobs(spark: SparkSession, tmp_path: Path) -> None:
    """
    Made logs, everything real: two nights one by one and both at once have the same rows, and each key once.

    A second run makes the same reports, byte by byte.
    """
    generate_logs(
        tmp_path / "logs", SampleSpec(first_day=FIRST, days=2, nodes=("a", "b"), messages_per_day=40, incidents=False)
    )
    files = FileSystem(spark)
    found: dict[str, dict[str, list[Row]]] = {}
    for out, spans in {
        "nights": [Span(day(0), day(0)), Span(day(1), day(1))],
        "at once": [Span(day(0), day(1))],
    }.items():
        for span in spans:
            request = NightlyRequest(
                [str(tmp_path / "logs")], str(tmp_path / out), span, SETTINGS, str(tmp_path), str(tmp_path / "keys")
            )
            outcome = run_nightly(spark, files, request, lambda line: None)
            assert (outcome.exit_status, outcome.warnings) == (EXIT_OK, [])
        warehouse, both = Warehouse(spark, files, str(tmp_path / out)), Span(day(-5), day(5))
        found[out] = {name: sorted(warehouse.read(name, both).collect(), key=repr) for name in TABLES}
    reports = published(tmp_path / out)
    assert run_nightly(spark, files, request, lambda line: None).exit_status == EXIT_OK
    assert published(tmp_path / out) == reports
    different = [name for name in TABLES if found["nights"][name] != found["at once"][name]]
    assert different == []
    assert len(found["nights"]["ledger_daily"]) == 2
    for name, table in TABLES.items():
        keys = [tuple(row[column] for column in table.key) for row in found["nights"][name]]
        assert not table.key or len(set(keys)) == len(keys), name
