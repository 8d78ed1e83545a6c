"""J2: how long pushes, acknowledgements and requests took."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pyspark.sql import functions as F

from analytics.histogram import bucket, percentiles
from analytics.job import Job, Span
from analytics.settings import Settings

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

SHARES = {"p50_ms": 0.5, "p90_ms": 0.9, "p95_ms": 0.95, "p99_ms": 0.99}
ALL = "*"


def latency(tables: Mapping[str, DataFrame], settings: Settings, span: Span) -> dict[str, DataFrame]:
    """`latency_hist` and `latency_daily`."""
    hist = histogram(tables["events"]).persist()
    return {"latency_hist": hist, "latency_daily": by_day(hist)}


def histogram(events: DataFrame) -> DataFrame:
    """`latency_hist`; a push counts if it went out, a request whatever its answer."""
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
            bucket(ms).alias("bucket"),
        )
        .agg(F.count(F.lit(1)).alias("n"))
    )


def by_day(hist: DataFrame) -> DataFrame:
    """`latency_daily`: of each node and path, and of all nodes, all paths and both."""
    slim = hist.groupBy("dt", "node", "metric", "path", "bucket").agg(F.sum("n").alias("n"))
    rolled = slim.withColumn("node", F.explode(F.array(F.col("node"), F.lit(ALL)))).withColumn(
        "path", F.explode(F.array(F.col("path"), F.lit(ALL)))
    )
    return percentiles(rolled, ("dt", "node", "metric", "path"), SHARES, "max_ms")


JOB = Job("latency", reads=("events",), makes=("latency_hist", "latency_daily"), transform=latency)
