"""
Column expressions that jobs share: times, classes of age and size, ranks, percentiles.

Percentiles come from histograms with logarithmic buckets: bucket b holds 1.02**b to 1.02**(b + 1) ms. Counts of
nodes, paths and hours add up, so percentiles of any period come from stored counts and are the same on every run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from functools import reduce
from math import log
from typing import TYPE_CHECKING

from pyspark.sql import Window
from pyspark.sql import functions as F

from analytics.job import Span

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

SECOND_MICROS = 1_000_000
DAY_MICROS = 86_400 * SECOND_MICROS


def day_to_micros(day: date) -> int:
    """Microseconds at the start of a day."""
    return int(datetime(day.year, day.month, day.day, tzinfo=UTC).timestamp()) * SECOND_MICROS


def micros_to_day(at: Column) -> Column:
    """Day of a time in microseconds."""
    return F.to_date(F.timestamp_micros(at))


def get_event_micros(events: DataFrame) -> Column:
    """Time of a line in microseconds; the start of `dt` if its time is on another day."""
    return F.unix_micros(F.when(F.to_date("ts") == F.col("dt"), F.col("ts")).otherwise(F.col("dt").cast("timestamp")))


def include_time_before(events: DataFrame, span: Span, before: timedelta) -> DataFrame:
    """Lines of the span and of a period before it, reading as little of the previous day as possible."""
    midnight = datetime(span.first.year, span.first.month, span.first.day, tzinfo=UTC)
    earlier = (F.col("dt") == F.lit(span.widen(before=1).first)) & (F.col("ts") >= F.lit(midnight - before))
    return events.where(F.col("dt") >= F.lit(span.first)).unionByName(events.where(earlier))


_MINUTE_MS = 60_000
_HOUR_MS = 60 * _MINUTE_MS
_DAY_MS = 24 * _HOUR_MS
_KIB = 1024

# Upper bounds, exclusive; the last class has none.
AGE_CLASSES = {
    "0 <1s": 1000,
    "1 <10s": 10_000,
    "2 <1m": _MINUTE_MS,
    "3 <10m": 10 * _MINUTE_MS,
    "4 <1h": _HOUR_MS,
    "5 <6h": 6 * _HOUR_MS,
    "6 <1d": _DAY_MS,
    "7 <3d": 3 * _DAY_MS,
    "8 3d+": None,
}
SIZE_CLASSES = {
    "0 <1K": _KIB,
    "1 <4K": 4 * _KIB,
    "2 <16K": 16 * _KIB,
    "3 <64K": 64 * _KIB,
    "4 <256K": 256 * _KIB,
    "5 <1M": _KIB * _KIB,
    "6 1M+": None,
}
PUSHES_CLASSES = {"0": 1, "1": 2, "2-4": 5, "5+": None}


def classify_age(ms: Column) -> Column:
    """Key of :data:`AGE_CLASSES` for an age in milliseconds; negative ages count as 0."""
    return _classify(ms, AGE_CLASSES)


def classify_size(size: Column) -> Column:
    """Key of :data:`SIZE_CLASSES` for a size in bytes; K is 1024 bytes, M its square."""
    return _classify(size, SIZE_CLASSES)


def classify_pushes(pushes: Column) -> Column:
    """Key of :data:`PUSHES_CLASSES` for a number of pushes."""
    return _classify(pushes, PUSHES_CLASSES)


def _classify(value: Column, bounds: dict[str, int | None]) -> Column:
    first = F.when(value.isNull(), "")
    return reduce(
        lambda cases, item: cases.otherwise(item[0]) if item[1] is None else cases.when(value < item[1], item[0]),
        bounds.items(),
        first,
    )


def select_top_per_day(frame: DataFrame, count: int, *order: Column) -> DataFrame:
    """
    Select the first `count` rows of each `dt` and add their `rank`, an int from 1.

    Spark cuts each partition to that many rows before it gathers a day, so millions of candidates do not end up in
    one task.

    :param order: must be total within a day, so that ties are always broken the same way.
    """
    day = Window.partitionBy("dt").orderBy(*order)
    return frame.withColumn("rank", F.row_number().over(day)).where(F.col("rank") <= count)


BUCKET_BASE = 1.02
MIN_DURATION_MS = 0.001


def make_bucket_column(ms: Column) -> Column:
    """Bucket of a duration in milliseconds, an int; null of null."""
    # Spark's greatest() ignores nulls.
    least = F.when(ms < MIN_DURATION_MS, F.lit(MIN_DURATION_MS)).otherwise(ms)
    return F.floor(F.log(least.cast("double")) / F.lit(log(BUCKET_BASE))).cast("int")


def compute_percentiles(
    hist: DataFrame, by: Sequence[str], shares: Mapping[str, float], maximum: str | None = None
) -> DataFrame:
    """
    Percentiles of each group, by nearest rank.

    :param hist: columns `by`, `bucket` (int) and `n` (count); rows of equal buckets are summed.
    :param shares: column name to the share of values at or below, 0 to 1.
    :param maximum: name of a column for the upper end of the highest bucket.
    :return: `by`, `n`, a double in milliseconds for each share, the geometric middle of its bucket and so at most 1 %
        off, and the maximum; no row for a group without values.
    """
    counts = hist.groupBy(*by, "bucket").agg(F.sum("n").alias("n")).where("n > 0")
    group = Window.partitionBy(*by)
    upwards = group.orderBy("bucket").rowsBetween(Window.unboundedPreceding, Window.currentRow)
    ranked = counts.withColumn("_upto", F.sum("n").over(upwards)).withColumn("_all", F.sum("n").over(group))
    columns = [
        _convert_bucket_to_ms(F.min(F.when(F.col("_upto") >= _get_nearest_rank(share), F.col("bucket"))) + 0.5).alias(
            name
        )
        for name, share in shares.items()
    ]
    if maximum:
        columns.append(_convert_bucket_to_ms(F.max("bucket") + 1).alias(maximum))
    return ranked.groupBy(*by).agg(F.sum("n").alias("n"), *columns)


def _get_nearest_rank(share: float) -> Column:
    """Smallest number of values that is this share of all; rounded, because 0.07 * 100 exceeds 7 in binary."""
    return F.ceil(F.round(F.col("_all") * F.lit(share), 6))


def _convert_bucket_to_ms(exponent: Column) -> Column:
    return F.round(F.pow(F.lit(BUCKET_BASE), exponent), 6)
