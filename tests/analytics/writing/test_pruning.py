"""What prune deletes, and what it keeps whatever it is asked."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from analytics.errors import AnalyticsError
from analytics.job import Job
from analytics.reading.files import FileSystem
from analytics.reading.segments import ReadSegment, Segment
from analytics.settings import Settings
from analytics.writing.retention import ExpiredItem, prune_expired
from analytics.writing.warehouse import Warehouse

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LAST = date(2026, 11, 20)
SETTINGS = Settings(look_back_days=2, keep_events_days=10, keep_tables_days=20, keep_logs_days=5)
THEN = datetime(2026, 11, 21, tzinfo=UTC)
THEN_MS = int(THEN.timestamp()) * 1000


def ago(days: int) -> date:
    return LAST - timedelta(days)


def a_job(**recalls: int) -> Job:
    return Job("job", (), (), lambda frames, settings, span: {}, recalls)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Results of forty days."""
    for number in range(40):
        for name in ("events", "open", "recipients_daily", "ledger_daily", "series_daily"):
            folder = tmp_path / "tables" / name / f"dt={ago(number)}"
            folder.mkdir(parents=True)
            (folder / "part.parquet").write_text("rows")
        (tmp_path / "report" / str(ago(number))).mkdir(parents=True)
        manifest = tmp_path / "runs" / f"{ago(number - 1):%Y%m%d}T010000Z-123abc.json"
        manifest.parent.mkdir(exist_ok=True)
        manifest.write_text("{}")
    return tmp_path


def pruned(spark: SparkSession, out: Path, settings: Settings = SETTINGS, *jobs: Job, **rest: Any) -> int:
    files = FileSystem(spark)
    return prune_expired(Warehouse(spark, files, str(out)), files, str(out), settings, jobs, **rest)


def kept(out: Path, table: str) -> int:
    """How many of the last days a table still has; none before them."""
    days = sorted(path.name for path in (out / "tables" / table).iterdir())
    assert days == [f"dt={ago(number)}" for number in reversed(range(len(days)))]
    return len(days)


def test_old_days_are_deleted(spark: SparkSession, out: Path) -> None:
    """Counted from the oldest day that may be made again; identifiers go sooner than figures."""
    told: list[ExpiredItem] = []
    assert pruned(spark, out, dry_run=True, report_item=told.append) == len(told) > 0
    assert f"events of {ago(40)}" in {item.what for item in told} or told[0].what
    assert kept(out, "events") == 40
    assert pruned(spark, out) == len(told)
    assert {name: kept(out, name) for name in ("events", "open", "recipients_daily", "ledger_daily")} == {
        "events": 13,
        "open": 13,
        "recipients_daily": 13,
        "ledger_daily": 23,
    }
    assert len(list((out / "report").iterdir())) == 23
    # A manifest has the time of its run, the day after.
    assert len(list((out / "runs").iterdir())) == 24
    assert pruned(spark, out) == 0


def test_what_jobs_recall_stays(spark: SparkSession, out: Path) -> None:
    """Figures as far as they are recalled; identifiers no longer than the books need, but so long in any case."""
    settings = SETTINGS.model_copy(update={"keep_events_days": 1, "keep_tables_days": 1})
    pruned(spark, out, settings, a_job(series_daily=30, open=7, recipients_daily=35), a_job(series_daily=3))
    found = {name: kept(out, name) for name in ("events", "open", "recipients_daily", "ledger_daily", "series_daily")}
    assert found == {"events": 4, "open": 10, "recipients_daily": 10, "ledger_daily": 4, "series_daily": 33}


def test_segments_that_were_read(spark: SparkSession, out: Path, tmp_path: Path) -> None:
    """Only those given, old enough, read in full and as they are now; with all their files."""

    def put(name: str) -> str:
        path = tmp_path / "logs" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("x")
        return str(path)

    def segment(name: str, days: int = 9, size: int = 1, **rest: Any) -> Segment:
        return Segment(name, put(name), size, THEN, "plain", rest.pop("active", False), "a", ago(days), **rest)

    def read(state: str, **rest: bool) -> ReadSegment:
        return ReadSegment(ago(9), 1, THEN_MS, "plain", state, 1, **rest)

    deleted = {"old": "closed", "killed": "crashed", "without a byte": "empty"}
    unsure = {"not readable": "unread", "was gone": "vanished", "half an archive": "partial", "still grew": "active"}
    known = {name: read(state) for name, state in {**deleted, **unsure}.items()}
    segments = [segment(name) for name in known]
    known |= {name: read("crashed") for name in ("young", "changed", "growing", "differs")}
    known |= {"had more": read("crashed", shrunk=True), "events deleted": read("closed", deleted=True)}
    segments += [
        segment("young", 7),
        segment("never read"),
        segment("changed", size=2),
        segment("growing", active=True),
        segment("differs", conflict=True, others=(put("differs.gz"),)),
        segment("had more"),
        segment("events deleted", others=(put("copy"),)),
    ]
    pruned(spark, out, segments=segments, known=known)
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == sorted(
        [*unsure, "young", "never read", "changed", "growing", "differs", "differs.gz", "had more"]
    )


def test_not_while_a_run_is_going_on(spark: SparkSession, out: Path) -> None:
    """It would delete what the run reads."""
    from analytics.writing.runs import hold_run_lock

    with hold_run_lock(FileSystem(spark), str(out), "run"), pytest.raises(AnalyticsError, match="another run"):
        pruned(spark, out)
    assert kept(out, "events") == 40


def test_nothing_was_ever_computed(spark: SparkSession, tmp_path: Path) -> None:
    """Then nothing is old."""
    assert pruned(spark, tmp_path) == 0
