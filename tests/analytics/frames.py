"""Small tables for tests of jobs: a test gives the columns that matter, all others are null."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, date, datetime, timedelta
from typing import TYPE_CHECKING, Any

from analytics.job import Job, Span
from analytics.schema import TABLES, make_events_struct
from analytics.settings import Settings

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

DAY = date(2026, 11, 16)
"""A Monday."""


def day(number: int) -> date:
    """A day by its distance from :data:`DAY`."""
    return DAY + timedelta(number)


def at(number: int = 0, hour: int = 0, minute: int = 0, second: float = 0) -> datetime:
    """A time on a :func:`day`."""
    return datetime.combine(day(number), datetime.min.time(), UTC) + timedelta(
        hours=hour, minutes=minute, seconds=second
    )


def event(name: str, ts: datetime | None = None, **fields: Any) -> dict[str, Any]:
    """A row of `events`, on the day of its time; the default time is the beginning of :data:`DAY`."""
    ts = ts or at()
    return {"dt": ts.date(), "ts": ts, "event": name, "node": "a", "epoch": 1, **fields}


def events(spark: SparkSession, *rows: Mapping[str, Any]) -> DataFrame:
    """The table `events`."""
    return _frame(spark, make_events_struct(), rows)


def table(spark: SparkSession, name: str, *rows: Mapping[str, Any]) -> DataFrame:
    """A declared table; the default day of its rows is :data:`DAY`."""
    return _frame(spark, TABLES[name].struct(), rows)


def run_job(
    job: Job, span: Span, settings: Settings | None = None, **frames: DataFrame
) -> dict[str, list[dict[str, Any]]]:
    """Run a job: rows of each table in the order of its key. Asserts that columns and types are those declared."""
    return {name: rows(name, frame) for name, frame in job.transform(frames, settings or Settings(), span).items()}


def rows(name: str, frame: DataFrame) -> list[dict[str, Any]]:
    """Rows of a table in the order of its key."""
    struct = TABLES[name].struct()
    found = {field.name: field.dataType.simpleString() for field in frame.schema.fields}
    declared = {field.name: field.dataType.simpleString() for field in struct.fields}
    assert {
        column: "bigint" if declared.get(column) == "bigint" and kind == "int" else kind
        for column, kind in found.items()
    } == declared
    return [row.asDict() for row in frame.select(struct.names).orderBy(*TABLES[name].key).collect()]


def select_columns(rows: list[dict[str, Any]], *columns: str) -> list[tuple[Any, ...]]:
    """Selected columns of rows, as tuples."""
    return [tuple(row[column] for column in columns) for row in rows]


def _frame(spark: SparkSession, struct: StructType, rows: tuple[Mapping[str, Any], ...]) -> DataFrame:
    unknown = {name for row in rows for name in row} - set(struct.names)
    assert not unknown, unknown
    return spark.createDataFrame(
        [tuple({"dt": DAY, **row}.get(name) for name in struct.names) for row in rows], struct
    )
