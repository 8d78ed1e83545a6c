"""Rows of the table `events` and of other tables, for tests of jobs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, date, datetime, timedelta
from itertools import count
from typing import TYPE_CHECKING, Any

from analytics.job import Job, Span
from analytics.schema import TABLES, make_events_struct
from analytics.settings import Settings

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

DAY = date(2026, 11, 16)
_SEQ = count(1)


def at(day: int, hour: float = 0, minute: float = 0, second: float = 0) -> datetime:
    """A time by days after :data:`DAY`."""
    return datetime(DAY.year, DAY.month, DAY.day, tzinfo=UTC) + timedelta(
        days=day, hours=hour, minutes=minute, seconds=second
    )


def day(n: int) -> date:
    """A day by its distance from :data:`DAY`."""
    return DAY + timedelta(n)


def event(ts: datetime, name: str, **fields: Any) -> dict[str, Any]:
    """A row of `events`. Defaults: node a, boot b, epoch 1, the next sequence number, the day of `ts`."""
    defaults = {"dt": ts.date(), "batch": ts.date(), "stem": "s", "v": 1, "seq": next(_SEQ), "node": "a", "boot": "b"}
    return {**defaults, "level": "info", "epoch": 1, "ts": ts, "event": name, **fields}


def events(spark: SparkSession, rows: Iterable[Mapping[str, Any]]) -> DataFrame:
    """The table `events`; absent columns are null."""
    return _frame(spark, make_events_struct(), rows)


def table(spark: SparkSession, name: str, rows: Iterable[Mapping[str, Any]] = ()) -> DataFrame:
    """A table of :data:`TABLES`; absent columns are null."""
    return _frame(spark, TABLES[name].struct(), rows)


def _frame(spark: SparkSession, struct: StructType, rows: Iterable[Mapping[str, Any]]) -> DataFrame:
    found = [tuple(row.get(name) for name in struct.names) for row in rows]
    frame = spark.createDataFrame(found, struct)
    # Otherwise each action unpickles all rows again.
    return frame.coalesce(1).localCheckpoint() if found else frame


def run_job(job: Job, tables: Mapping[str, DataFrame], span: Span) -> dict[str, list[dict[str, Any]]]:
    """Run a job: rows of each table sorted by its key. Asserts that columns and types are those declared."""
    frames = job.transform(tables, Settings(), span)
    assert set(frames) == set(job.writes)
    rows = {}
    for name, frame in frames.items():
        declared = TABLES[name]
        assert dict(frame.dtypes) == {column.name: column.type for column in declared.columns}, name
        key = declared.key or tuple(frame.columns)
        found = [row.asDict() for row in frame.select(*declared.struct().names).collect()]
        rows[name] = sorted(found, key=lambda row: tuple(str(row[column]) for column in key))
        assert len({tuple(row[column] for column in key) for row in rows[name]}) == len(found), f"{name}: key"
        assert all(row["dt"] in span for row in found), (name, sorted({str(row["dt"]) for row in found}))
    return rows


def explain_job(job: Job, tables: Mapping[str, DataFrame], span: Span) -> str:
    """The physical plans of all tables that a job computes."""
    frames = job.transform(tables, Settings(), span)
    return "\n".join(frame._jdf.queryExecution().executedPlan().toString() for frame in frames.values())
