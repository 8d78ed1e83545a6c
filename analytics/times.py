"""Times of log lines, in days and microseconds."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from typing import TYPE_CHECKING

from pyspark.sql import functions as F

from analytics.job import Span

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

SECOND = 1_000_000
DAY = 86_400 * SECOND


def micros(day: date) -> int:
    """The beginning of a day."""
    return int(datetime(day.year, day.month, day.day, tzinfo=UTC).timestamp()) * SECOND


def day_of(at: Column) -> Column:
    """The day of a time."""
    return F.to_date(F.timestamp_micros(at))


def happened(events: DataFrame) -> Column:
    """When a line was written; the beginning of its day if its time is of another one."""
    return F.unix_micros(F.when(F.to_date("ts") == F.col("dt"), F.col("ts")).otherwise(F.col("dt").cast("timestamp")))


def with_tail(events: DataFrame, span: Span, before: timedelta) -> DataFrame:
    """Lines of the span, and those of so much time before it; of that day no more is read than needs be."""
    midnight = datetime(span.first.year, span.first.month, span.first.day, tzinfo=UTC)
    earlier = (F.col("dt") == F.lit(span.widened(before=1).first)) & (F.col("ts") >= F.lit(midnight - before))
    return events.where(F.col("dt") >= F.lit(span.first)).unionByName(events.where(earlier))
