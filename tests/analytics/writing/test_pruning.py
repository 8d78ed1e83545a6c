"""Which results and logs prune deletes, and which it keeps."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from analytics.engine import AnalysisSession
from analytics.errors import AnalyticsError
from analytics.job import Job
from analytics.reading.segments import ReadSegment, Segment
from analytics.settings import Settings
from analytics.writing.retention import ExpiredItem, prune_expired
from analytics.writing.warehouse import Warehouse

LAST = date(2026, 11, 20)
SETTINGS = Settings(look_back_days=2, keep_events_days=10, keep_tables_days=20, keep_logs_days=5)
MODIFIED = datetime(2026, 11, 21, tzinfo=UTC)
MODIFIED_MS = int(MODIFIED.timestamp()) * 1000


def days_ago(days: int) -> date:
    return LAST - timedelta(days)


def make_job(**history_days: int) -> Job:
    return Job("job", (), (), lambda run: {}, history_days)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Results of forty days."""
    for number in range(40):
        for name in ("events", "open", "recipients_daily", "ledger_daily", "series_daily"):
            folder = tmp_path / "tables" / name / f"dt={days_ago(number)}"
            folder.mkdir(parents=True)
            (folder / "part.parquet").write_text("rows")
        (tmp_path / "report" / str(days_ago(number))).mkdir(parents=True)
        manifest = tmp_path / "runs" / f"{days_ago(number - 1):%Y%m%d}T010000Z-123abc.json"
        manifest.parent.mkdir(exist_ok=True)
        manifest.write_text("{}")
    return tmp_path


def run_prune(session: AnalysisSession, out: Path, settings: Settings = SETTINGS, *jobs: Job, **rest: Any) -> int:
    warehouse = Warehouse(session.database, session.files, str(out))
    return prune_expired(warehouse, session.files, str(out), settings, jobs, **rest)


def count_kept_days(out: Path, table: str) -> int:
    """How many of the last days a table still has; asserts that it has no earlier ones."""
    days = sorted(path.name for path in (out / "tables" / table).iterdir())
    assert days == [f"dt={days_ago(number)}" for number in reversed(range(len(days)))]
    return len(days)


def test_deletes_old_days(session: AnalysisSession, out: Path) -> None:
    """Counted from the oldest day that may be computed again; tables with identifiers expire sooner."""
    expired: list[ExpiredItem] = []
    assert run_prune(session, out, dry_run=True, report_item=expired.append) == len(expired) > 0
    assert {f"events of {days_ago(number)}" for number in range(13, 40)} <= {item.what for item in expired}
    assert count_kept_days(out, "events") == 40
    assert run_prune(session, out) == len(expired)
    assert {name: count_kept_days(out, name) for name in ("events", "open", "recipients_daily", "ledger_daily")} == {
        "events": 13,
        "open": 13,
        "recipients_daily": 13,
        "ledger_daily": 23,
    }
    assert len(list((out / "report").iterdir())) == 23
    # A manifest is dated by its run, one day later.
    assert len(list((out / "runs").iterdir())) == 24
    assert run_prune(session, out) == 0


def test_keeps_history_of_jobs(session: AnalysisSession, out: Path) -> None:
    """Figures for the whole history; identifiers no longer than the ledger needs, but at least so long."""
    settings = SETTINGS.model_copy(update={"keep_events_days": 1, "keep_tables_days": 1})
    run_prune(
        session, out, settings, make_job(series_daily=30, open=7, recipients_daily=35), make_job(series_daily=3)
    )
    found = {
        name: count_kept_days(out, name)
        for name in ("events", "open", "recipients_daily", "ledger_daily", "series_daily")
    }
    assert found == {"events": 4, "open": 10, "recipients_daily": 10, "ledger_daily": 4, "series_daily": 33}


def test_deletes_loaded_segments(session: AnalysisSession, out: Path, tmp_path: Path) -> None:
    """Only those given, old enough, completely read and unchanged; with all their files."""

    def create_file(name: str) -> str:
        path = tmp_path / "logs" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("x")
        return str(path)

    def segment(name: str, days: int = 9, size: int = 1, **rest: Any) -> Segment:
        return Segment(
            name, create_file(name), size, MODIFIED, "plain", rest.pop("active", False), "a", days_ago(days), **rest
        )

    def read(state: str, **rest: bool) -> ReadSegment:
        return ReadSegment(days_ago(9), 1, MODIFIED_MS, "plain", state, 1, **rest)

    deleted = {"old": "closed", "killed": "crashed", "without a byte": "empty"}
    uncertain = {
        "not readable": "unread",
        "was gone": "vanished",
        "half an archive": "partial",
        "still grew": "active",
    }
    known = {name: read(state) for name, state in {**deleted, **uncertain}.items()}
    segments = [segment(name) for name in known]
    known |= {name: read("crashed") for name in ("young", "changed", "growing", "differs")}
    known |= {"had more": read("crashed", shrunk=True), "events deleted": read("closed", deleted=True)}
    segments += [
        segment("young", 7),
        segment("never read"),
        segment("changed", size=2),
        segment("growing", active=True),
        segment("differs", conflict=True, others=(create_file("differs.gz"),)),
        segment("had more"),
        segment("events deleted", others=(create_file("copy"),)),
    ]
    run_prune(session, out, segments=segments, known=known)
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == sorted(
        [*uncertain, "young", "never read", "changed", "growing", "differs", "differs.gz", "had more"]
    )


def test_refuses_during_a_run(session: AnalysisSession, out: Path) -> None:
    """It would delete the input of the run."""
    from analytics.writing.runs import hold_run_lock

    with hold_run_lock(session.files, str(out), "run"), pytest.raises(AnalyticsError, match="another run"):
        run_prune(session, out)
    assert count_kept_days(out, "events") == 40


def test_deletes_nothing_without_results(session: AnalysisSession, tmp_path: Path) -> None:
    assert run_prune(session, tmp_path) == 0
