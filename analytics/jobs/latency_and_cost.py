"""Durations of pushes, acknowledgements and requests; processing time of requests by type and size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pyspark.sql import Window
from pyspark.sql import functions as F

from analytics.job import Job, Span
from analytics.jobs.column_functions import classify_size, compute_percentiles, make_bucket_column
from analytics.settings import Settings

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

LATENCY_QUANTILES = {"p50_ms": 0.5, "p90_ms": 0.9, "p95_ms": 0.95, "p99_ms": 0.99}
ALL_VALUES = "*"


def make_latency(tables: Mapping[str, DataFrame], settings: Settings, span: Span) -> dict[str, DataFrame]:
    """`latency_hist` and `latency_daily`."""
    hist = make_latency_histogram(tables["events"]).persist()
    return {"latency_hist": hist, "latency_daily": compute_latency_percentiles(hist)}


def make_latency_histogram(events: DataFrame) -> DataFrame:
    """`latency_hist`, of successful pushes, acknowledgements, and requests of any status."""
    event, pushed = F.col("event"), F.col("event") == "msg.push"
    metric = F.when(pushed, "push").when(event == "msg.ack", "ack").otherwise("request")
    request = metric == "request"
    ms = F.when(request, F.col("dur_ms")).otherwise(F.col("latency_ms"))
    return (
        events.where(event.isin("msg.push", "msg.ack", "req.done") & (~pushed | F.coalesce("ok", F.lit(True))))
        .where(ms.isNotNull())
        .groupBy(
            "dt",
            F.hour("ts").alias("hour"),
            F.coalesce("node", F.lit("")).alias("node"),
            metric.alias("metric"),
            F.coalesce(F.when(request, F.col("proto")).otherwise(F.col("path")), F.lit("")).alias("path"),
            make_bucket_column(ms).alias("bucket"),
        )
        .agg(F.count(F.lit(1)).alias("n"))
    )


def compute_latency_percentiles(hist: DataFrame) -> DataFrame:
    """`latency_daily`: of each node and path, of all nodes, of all paths, and of both."""
    slim = hist.groupBy("dt", "node", "metric", "path", "bucket").agg(F.sum("n").alias("n"))
    rolled = slim.withColumn("node", F.explode(F.array(F.col("node"), F.lit(ALL_VALUES)))).withColumn(
        "path", F.explode(F.array(F.col("path"), F.lit(ALL_VALUES)))
    )
    return compute_percentiles(rolled, ("dt", "node", "metric", "path"), LATENCY_QUANTILES, "max_ms")


LATENCY_JOB = Job("latency", reads=("events",), writes=("latency_hist", "latency_daily"), transform=make_latency)


_COST_KEY = ("dt", "proto", "mtype", "size_class")
_COST_TOTALS = ("n", "dur_us", "crypto_us")


def sum_request_cost(events: DataFrame) -> DataFrame:
    """`cost_daily`. Times are summed as whole microseconds: sums of integers do not depend on order."""
    hist = (
        events.where(F.col("event") == "req.done")
        .groupBy(
            "dt",
            *(F.coalesce(name, F.lit("")).alias(name) for name in ("proto", "mtype")),
            classify_size(F.col("size")).alias("size_class"),
            make_bucket_column(F.col("dur_ms")).alias("bucket"),
        )
        .agg(
            F.count("*").alias("n"),
            _sum_microseconds("dur_ms").alias("dur_us"),
            _sum_microseconds("crypto_ms").alias("crypto_us"),
        )
    )
    group = Window.partitionBy(*_COST_KEY)
    totals = {f"all_{name}": F.sum(name).over(group) for name in _COST_TOTALS}
    # Requests of unknown duration are excluded from percentiles, unless a group has no others.
    summed = hist.withColumns({**totals, "highest": F.max("bucket").over(group)})
    summed = summed.where(F.col("bucket").isNotNull() | F.col("highest").isNull())
    return compute_percentiles(summed, (*_COST_KEY, *totals), {"dur_p50_ms": 0.5, "dur_p95_ms": 0.95}).select(
        *_COST_KEY,
        F.col("all_n").alias("n"),
        (F.col("all_dur_us") / 1000).alias("dur_ms"),
        (F.col("all_crypto_us") / 1000).alias("crypto_ms"),
        "dur_p50_ms",
        "dur_p95_ms",
    )


def _sum_microseconds(column: str) -> Column:
    return F.sum(F.round(F.col(column) * 1000).cast("bigint"))


def _make_cost(frames: Mapping[str, DataFrame], settings: Settings, span: Span) -> Mapping[str, DataFrame]:
    return {"cost_daily": sum_request_cost(frames["events"])}


COST_JOB = Job("cost", ("events",), ("cost_daily",), _make_cost)
