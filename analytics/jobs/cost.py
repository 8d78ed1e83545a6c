"""J13: what requests cost, by what they ask for and how large they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pyspark.sql import Window
from pyspark.sql import functions as F

from analytics.classes import size_class
from analytics.histogram import bucket, percentiles
from analytics.job import Job, Span
from analytics.settings import Settings

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

_KEY = ("dt", "proto", "mtype", "size_class")
_TOTALS = ("n", "dur_us", "crypto_us")


def daily(events: DataFrame) -> DataFrame:
    """`cost_daily`. Times are added up as whole microseconds: a sum of integers is the same in any order."""
    hist = (
        events.where(F.col("event") == "req.done")
        .groupBy(
            "dt",
            *(F.coalesce(name, F.lit("")).alias(name) for name in ("proto", "mtype")),
            size_class(F.col("size")).alias("size_class"),
            bucket(F.col("dur_ms")).alias("bucket"),
        )
        .agg(
            F.count("*").alias("n"),
            _microseconds("dur_ms").alias("dur_us"),
            _microseconds("crypto_ms").alias("crypto_us"),
        )
    )
    group = Window.partitionBy(*_KEY)
    totals = {f"all_{name}": F.sum(name).over(group) for name in _TOTALS}
    # Requests of unknown duration have no place among the percentiles, unless there are no others.
    summed = hist.withColumns({**totals, "highest": F.max("bucket").over(group)})
    summed = summed.where(F.col("bucket").isNotNull() | F.col("highest").isNull())
    return percentiles(summed, (*_KEY, *totals), {"dur_p50_ms": 0.5, "dur_p95_ms": 0.95}).select(
        *_KEY,
        F.col("all_n").alias("n"),
        (F.col("all_dur_us") / 1000).alias("dur_ms"),
        (F.col("all_crypto_us") / 1000).alias("crypto_ms"),
        "dur_p50_ms",
        "dur_p95_ms",
    )


def _microseconds(column: str) -> Column:
    return F.sum(F.round(F.col(column) * 1000).cast("bigint"))


def _transform(frames: Mapping[str, DataFrame], settings: Settings, span: Span) -> Mapping[str, DataFrame]:
    return {"cost_daily": daily(frames["events"])}


JOB = Job("cost", ("events",), ("cost_daily",), _transform)
