"""Scans give the same rows with both engines, and run only if there are such lines."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from glob import glob
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import pytest

from analytics.database import Database
from analytics.engine import DuckDBEngine, SparkEngine
from analytics.files import FileSystem
from analytics.job import Job, JobRun, Span
from analytics.jobs.log_quality import QUALITY_JOB
from analytics.jobs.message_ledger import LEDGER_JOB
from analytics.jobs.node_comparison import NODES_JOB
from analytics.jobs.reconciliation import RECONCILIATION_JOB, STORES_JOB
from analytics.jobs.refusals import ERRORS_JOB, LIMITS_JOB, REPLAY_JOB
from analytics.jobs.senders_and_recipients import RECIPIENTS_JOB, TALKERS_JOB
from analytics.jobs.sessions import SESSIONS_JOB
from analytics.jobs.time_series import SERIES_JOB
from analytics.jobs.traffic_and_latency import COST_JOB, LATENCY_JOB, QUEUES_JOB, TRAFFIC_JOB
from analytics.jobs.wakeups import WAKEUPS_JOB
from analytics.settings import Settings
from analytics.writing.warehouse import ALL_TABLES
from tests.analytics.job_tables import at, day, event, make_rows, open_tables
from tests.analytics.jobs import (
    test_counter_reconciliation,
    test_errors,
    test_latency,
    test_log_quality,
    test_message_ledger,
    test_node_comparison,
    test_queues,
    test_rate_limits,
    test_recipients,
    test_replays,
    test_request_cost,
    test_senders_and_recipients,
    test_sessions,
    test_store_reconciliation,
    test_time_series,
    test_traffic,
    test_wakeups,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Rows = Iterable[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Case:
    """Jobs that share a run, and what they read; `large` are tables other than `events` that scans read."""

    jobs: tuple[Job, ...]
    span: Span
    events: Rows
    tables: Mapping[str, Rows] = field(default_factory=dict)
    settings: Settings = field(default_factory=Settings)
    large: tuple[str, ...] = ()


CASES = {
    "traffic, refusals, nodes, push": Case(
        (TRAFFIC_JOB, LATENCY_JOB, QUEUES_JOB, COST_JOB, ERRORS_JOB, LIMITS_JOB, REPLAY_JOB, NODES_JOB, WAKEUPS_JOB),
        Span(day(0), day(1)),
        [
            *test_traffic.make_log(),
            *test_latency.make_log(),
            *test_queues.make_gauges(),
            *test_request_cost.make_log(),
            *test_errors.make_log(),
            *test_rate_limits.make_log(),
            *test_replays.make_log(),
            *test_node_comparison.make_events(),
            *test_wakeups.make_random_lines(4, 2),
            event("push.wake", at(-1, 23), did="d", service="fcm", outcome="sent", dur_ms=0.5),
        ],
        {
            **test_node_comparison.make_tables(),
            "open": test_queues.make_open_messages(),
            "ledger_daily": test_queues.make_ledger_days(0, 1),
        },
        Settings(k_anonymity=1),
    ),
    "senders, recipients, series": Case(
        (TALKERS_JOB, RECIPIENTS_JOB, SERIES_JOB),
        Span(day(0), day(1)),
        [
            *test_senders_and_recipients.make_messages(Random(5)),
            *test_recipients.LOG,
            *test_time_series.EVENTS,
            event("msg.ack", at(1, 3), rcpt="r0", epoch=None, size=1),
        ],
        {"recipients_daily": test_recipients.HISTORY, **test_time_series.TABLES},
        Settings(top=7),
    ),
    "quality, reconciliation": Case(
        (QUALITY_JOB, RECONCILIATION_JOB, STORES_JOB),
        Span(day(0), day(2)),
        [
            *test_log_quality.make_every_finding()[0],
            *test_counter_reconciliation.mix_lines(test_counter_reconciliation.simulate_three_days()),
            *({**line, "seq": 1 + n} for n, line in enumerate(test_store_reconciliation.make_three_stores())),
        ],
        test_log_quality.make_every_finding()[1],
    ),
    "messages": Case(
        (LEDGER_JOB,),
        Span(day(1), day(3)),
        [*test_message_ledger.make_unusual_histories()[0], *test_message_ledger.ExpectedLedger(5, 200).lines],
        test_message_ledger.make_unusual_histories()[1],
        large=("open",),
    ),
    "sockets": Case(
        (SESSIONS_JOB,),
        Span(day(1), day(2)),
        [*test_sessions.make_restarts()[0], *test_sessions.make_socket_events(9, 3)],
        {"concurrency_10m": test_sessions.make_restarts()[1]},
    ),
    "no lines": Case(
        (TRAFFIC_JOB, LATENCY_JOB, QUEUES_JOB, COST_JOB, WAKEUPS_JOB, TALKERS_JOB, RECIPIENTS_JOB, SERIES_JOB),
        Span(day(0), day(0)),
        (),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_engines_give_equal_rows(name: str, spark: SparkSession) -> None:
    case = CASES[name]
    with open_tables(case.events, case.tables) as database:
        by_duckdb = _run(case, JobRun(database, DuckDBEngine(database), case.settings, case.span))
    with open_tables(case.events, case.tables) as database, tempfile.TemporaryDirectory() as directory:
        engine = _make_spark_engine(spark, database, directory, ("events", *case.large))
        by_spark = _run(case, JobRun(database, engine, case.settings, case.span))
    for table, rows in by_duckdb.items():
        assert by_spark[table] == rows, table
    assert all(by_duckdb.values()) == bool(case.events)


def _run(case: Case, run: JobRun) -> dict[str, list[dict[str, Any]]]:
    return {table: rows for job in case.jobs for table, rows in make_rows(job, run).items()}


def _make_spark_engine(
    spark: SparkSession,
    database: Database,
    directory: str,
    tables: Iterable[str],
    report_plan: Callable[[str], None] | None = None,
) -> SparkEngine:
    files = FileSystem(spark)
    engine = SparkEngine(spark, files, database, f"{directory}/scans", f"{directory}/copies", report_plan)
    for table in tables:
        engine.read(ALL_TABLES[table], _write_parquet(database, table, directory))
    return engine


def _write_parquet(database: Database, table: str, directory: str, name: str = "") -> list[str]:
    path = Path(directory, name or table)
    path.mkdir(parents=True)
    database.execute(f"COPY (FROM \"{table}\") TO '{path}' (FORMAT parquet, PARTITION_BY (dt))")
    return sorted(glob(f"{path}/dt=*/*.parquet"))


def test_spark_reads_files_of_several_directories(spark: SparkSession) -> None:
    """As those that are published and those that the run has staged."""
    with open_tables([event("gauge", at(0, 1))], {}) as database, tempfile.TemporaryDirectory() as directory:
        engine = _make_spark_engine(spark, database, directory, [])
        paths = [
            path
            for name in ("published", "staged")
            for path in _write_parquet(database, "events", directory, f"{name}/events")
        ]
        engine.read(ALL_TABLES["events"], paths)
        engine.scan("lines", "SELECT dt, count(*) AS n FROM events GROUP BY dt")
        assert database.rows("FROM lines") == [{"dt": day(0), "n": 2}]


def test_small_tables_are_sent_to_all_tasks(spark: SparkSession) -> None:
    """Otherwise Spark sorts the messages by party to join them, and one task gets all of a large one."""
    plans: list[str] = []
    with open_tables(test_recipients.LOG, {}) as database, tempfile.TemporaryDirectory() as directory:
        engine = _make_spark_engine(spark, database, directory, ["events"], plans.append)
        make_rows(TALKERS_JOB, JobRun(database, engine, Settings(), Span(day(0), day(0))))
    (plan,) = (plan for plan in plans if plan.startswith("partner_counts\n"))
    assert "BroadcastHashJoin" in plan
    assert "SortMergeJoin" not in plan


def test_tables_of_a_second_run_replace_views_of_the_first(tmp_path: Path) -> None:
    """Spark's results are views. The second run may have no such lines, and make an empty table instead."""
    with Database(str(tmp_path)) as database:
        database.define_view("limited_parties", "SELECT 1 AS hits")
        database.insert("limited_parties", "hits BIGINT", ())
        assert database.rows("FROM limited_parties") == []
        database.define_view("limited_parties", "SELECT 2 AS hits")
        database.define("limited_parties", "SELECT 3 AS hits")
        assert database.rows("FROM limited_parties") == [{"hits": 3}]


def test_no_scan_for_refusals_limits_replays_and_push_without_such_lines() -> None:
    """If the day before had no push either; a day before that was not analysed may have had some."""
    served = [event("req.done", at(0, 1), sender="s", status=200), event("msg.accept", at(0, 1), sender="s")]
    jobs = (TRAFFIC_JOB, ERRORS_JOB, LIMITS_JOB, REPLAY_JOB, WAKEUPS_JOB)
    assert _list_scans(jobs, served, {"ledger_daily": [{"dt": day(-1)}]}) == {"traffic_counts", "request_counts"}
    assert _list_scans((WAKEUPS_JOB,), served, {}) == {"traffic_counts", "push_requests"}
    pushed: dict[str, Rows] = {
        "ledger_daily": [{"dt": day(-1)}],
        "push_daily": [{"dt": day(-1), "event": "push.wake", "n": 1}],
    }
    assert _list_scans((WAKEUPS_JOB,), served, pushed) == {"traffic_counts", "push_requests"}
    woken = [*served, event("push.wake", at(0, 2), did="d", outcome="sent")]
    assert _list_scans((WAKEUPS_JOB,), woken, {}) == {"traffic_counts", "push_requests", "contacts"}


def _list_scans(jobs: Iterable[Job], events: Rows, tables: Mapping[str, Rows]) -> set[str]:
    with open_tables(events, tables) as database:
        run = JobRun(database, DuckDBEngine(database), Settings(), Span(day(0), day(0)))
        for job in jobs:
            make_rows(job, run)
        return run.scans
