"""J11: each node against the fleet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark.sql import Window
from pyspark.sql import functions as F

from analytics.job import Job, Span
from analytics.jobs.latency import ALL
from analytics.settings import Settings

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


@dataclass(frozen=True, slots=True)
class Metric:
    """
    What is compared.

    :param floor: values below count as this: between two that are hardly anything no ratio means anything.
    :param counted: a node without it has none of it, rather than an unknown amount.
    """

    name: str
    floor: float
    counted: bool = False


METRICS = (
    Metric("requests", 100, counted=True),
    Metric("messages_accepted", 100, counted=True),
    Metric("bytes_accepted", 100_000, counted=True),
    Metric("messages_acked", 100, counted=True),
    Metric("sockets_opened", 100, counted=True),
    Metric("error_share", 0.01),
    Metric("failed_share", 0.001),
    Metric("request_p95_ms", 5),
    Metric("push_live_p95_ms", 50),
    Metric("request_mean_ms", 1),
    Metric("crypto_mean_ms", 1),
    Metric("queue_depth_max", 100),
    Metric("sockets_max", 20),
    Metric("rss_max_bytes", 50_000_000),
    Metric("lag_max_ms", 50),
)


def compare(values: DataFrame, factor: float) -> DataFrame:
    """
    `node_compare`.

    :param values: `dt`, `node`, and a column for each of :data:`METRICS`, double; null where it is not known.
    :param factor: a node is flagged outside 1/factor to factor.
    """
    fleet = Window.partitionBy("dt", "metric")
    floors = F.create_map(*(F.lit(each) for metric in METRICS for each in (metric.name, float(metric.floor))))
    long = values.unpivot(["dt", "node"], [metric.name for metric in METRICS], "metric", "value")
    known = long.where(F.col("value").isNotNull()).withColumn("median", F.median("value").over(fleet))
    floor = floors[F.col("metric")]
    ratio = F.greatest("value", floor) / F.greatest("median", floor)
    rounded = {name: F.round(name, 6) for name in ("value", "median", "ratio")}
    return known.withColumn("ratio", ratio).withColumns(
        {**rounded, "flagged": ~F.col("ratio").between(1 / factor, factor)}
    )


def measured(frames: Mapping[str, DataFrame]) -> DataFrame:
    """
    Every node that wrote a line of traffic, a gauge or a request on a day, and its :data:`METRICS`. Who has only
    removed messages is an operator, and no node.
    """
    sources = (
        _traffic(frames["traffic_daily"]),
        _requests(frames["events"]),
        _latencies(frames["latency_daily"]),
        _gauges(frames["queue_hourly"]),
        _sockets(frames["sockets_daily"]),
    )
    wide = sources[0]
    for source in sources[1:]:
        wide = wide.join(source, ["dt", "node"], "full")
    return wide.fillna(0.0, [metric.name for metric in METRICS if metric.counted])


def _traffic(daily: DataFrame) -> DataFrame:
    def total(event: str, column: str) -> Column:
        return F.sum(F.when(F.col("event") == event, F.col(column))).cast("double")

    return (
        daily.where(F.col("event") != "msg.remove")
        .groupBy("dt", "node")
        .agg(
            total("req.done", "n").alias("requests"),
            total("msg.accept", "n").alias("messages_accepted"),
            total("msg.accept", "bytes").alias("bytes_accepted"),
            total("msg.ack", "n").alias("messages_acked"),
        )
    )


def _requests(events: DataFrame) -> DataFrame:
    """Shares of refused and of failed requests, 0 to 1, and mean times, milliseconds."""
    failed = F.coalesce("status", F.lit(0)) >= 500
    refused = F.col("code").isNotNull() | (F.coalesce("status", F.lit(0)) >= 400)
    return (
        events.where(F.col("event") == "req.done")
        .groupBy("dt", F.coalesce("node", F.lit("")).alias("node"))
        .agg(
            F.mean(refused.cast("int")).alias("error_share"),
            F.mean(failed.cast("int")).alias("failed_share"),
            _mean_ms("dur_ms").alias("request_mean_ms"),
            _mean_ms("crypto_ms").alias("crypto_mean_ms"),
        )
    )


def _mean_ms(column: str) -> Column:
    """Over whole microseconds: a sum of integers is the same in any order."""
    return F.mean(F.round(F.col(column) * 1000).cast("bigint")) / 1000


def _latencies(daily: DataFrame) -> DataFrame:
    """Of pushes only live ones: how long a message had waited for its pickup is no matter of the node."""

    def p95(metric: str, path: str) -> Column:
        wanted = (F.col("metric") == metric) & (F.col("path") == path)
        return F.max(F.when(wanted, F.col("p95_ms")))

    return (
        daily.where(F.col("node") != ALL)
        .groupBy("dt", "node")
        .agg(p95("request", ALL).alias("request_p95_ms"), p95("push", "live").alias("push_live_p95_ms"))
    )


def _gauges(hourly: DataFrame) -> DataFrame:
    return hourly.groupBy("dt", "node").agg(
        F.max("depth_max").cast("double").alias("queue_depth_max"),
        F.max("conns_max").cast("double").alias("sockets_max"),
        F.max("rss_max").cast("double").alias("rss_max_bytes"),
        F.max("lag_ms_max").alias("lag_max_ms"),
    )


def _sockets(daily: DataFrame) -> DataFrame:
    return daily.select("dt", "node", F.col("opened").cast("double").alias("sockets_opened"))


def _transform(frames: Mapping[str, DataFrame], settings: Settings, span: Span) -> Mapping[str, DataFrame]:
    return {"node_compare": compare(measured(frames), settings.node_factor)}


JOB = Job(
    "nodes",
    ("events", "traffic_daily", "latency_daily", "queue_hourly", "sockets_daily"),
    ("node_compare",),
    _transform,
)
