"""Each node compared with the median of all nodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark.sql import Window
from pyspark.sql import functions as F

from analytics.job import Job, Span
from analytics.jobs.traffic_and_latency import ALL_VALUES
from analytics.settings import Settings

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


@dataclass(frozen=True, slots=True)
class NodeMetric:
    """
    A compared figure.

    :param floor: lower values count as this, because ratios of very small values mean nothing.
    :param counted: a missing value counts as 0.
    """

    name: str
    floor: float
    counted: bool = False


NODE_METRICS = (
    NodeMetric("requests", 100, counted=True),
    NodeMetric("messages_accepted", 100, counted=True),
    NodeMetric("bytes_accepted", 100_000, counted=True),
    NodeMetric("messages_acked", 100, counted=True),
    NodeMetric("sockets_opened", 100, counted=True),
    NodeMetric("error_share", 0.01),
    NodeMetric("failed_share", 0.001),
    NodeMetric("request_p95_ms", 5),
    NodeMetric("push_live_p95_ms", 50),
    NodeMetric("request_mean_ms", 1),
    NodeMetric("crypto_mean_ms", 1),
    NodeMetric("queue_depth_max", 100),
    NodeMetric("sockets_max", 20),
    NodeMetric("rss_max_bytes", 50_000_000),
    NodeMetric("lag_max_ms", 50),
)


def compare_nodes(values: DataFrame, factor: float) -> DataFrame:
    """
    `node_compare`.

    :param values: `dt`, `node`, and a double for each of :data:`NODE_METRICS`; null if unknown.
    :param factor: a node is flagged outside 1/factor to factor.
    """
    fleet = Window.partitionBy("dt", "metric")
    floors = F.create_map(*(F.lit(each) for metric in NODE_METRICS for each in (metric.name, float(metric.floor))))
    long = values.unpivot(["dt", "node"], [metric.name for metric in NODE_METRICS], "metric", "value")
    known = long.where(F.col("value").isNotNull()).withColumn("median", F.median("value").over(fleet))
    floor = floors[F.col("metric")]
    ratio = F.greatest("value", floor) / F.greatest("median", floor)
    rounded = {name: F.round(name, 6) for name in ("value", "median", "ratio")}
    return known.withColumn("ratio", ratio).withColumns(
        {**rounded, "flagged": ~F.col("ratio").between(1 / factor, factor)}
    )


def measure_nodes(frames: Mapping[str, DataFrame]) -> DataFrame:
    """
    :data:`NODE_METRICS` of every node that logged traffic, a gauge or a request. A node that only removed messages is
        an operator and is omitted.
    """
    sources = (
        _measure_traffic(frames["traffic_daily"]),
        _measure_requests(frames["events"]),
        _measure_latencies(frames["latency_daily"]),
        _measure_gauges(frames["queue_hourly"]),
        _measure_sockets(frames["sockets_daily"]),
    )
    wide = sources[0]
    for source in sources[1:]:
        wide = wide.join(source, ["dt", "node"], "full")
    return wide.fillna(0.0, [metric.name for metric in NODE_METRICS if metric.counted])


def _measure_traffic(daily: DataFrame) -> DataFrame:
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


def _measure_requests(events: DataFrame) -> DataFrame:
    """Shares of refused and of failed requests, 0 to 1, and mean times in milliseconds."""
    failed = F.coalesce("status", F.lit(0)) >= 500
    refused = F.col("code").isNotNull() | (F.coalesce("status", F.lit(0)) >= 400)
    return (
        events.where(F.col("event") == "req.done")
        .groupBy("dt", F.coalesce("node", F.lit("")).alias("node"))
        .agg(
            F.mean(refused.cast("int")).alias("error_share"),
            F.mean(failed.cast("int")).alias("failed_share"),
            _compute_mean_ms("dur_ms").alias("request_mean_ms"),
            _compute_mean_ms("crypto_ms").alias("crypto_mean_ms"),
        )
    )


def _compute_mean_ms(column: str) -> Column:
    """Mean over whole microseconds: sums of integers do not depend on order."""
    return F.mean(F.round(F.col(column) * 1000).cast("bigint")) / 1000


def _measure_latencies(daily: DataFrame) -> DataFrame:
    """Live pushes only: the time before a pickup does not depend on the node."""

    def p95(metric: str, path: str) -> Column:
        condition = (F.col("metric") == metric) & (F.col("path") == path)
        return F.max(F.when(condition, F.col("p95_ms")))

    return (
        daily.where(F.col("node") != ALL_VALUES)
        .groupBy("dt", "node")
        .agg(p95("request", ALL_VALUES).alias("request_p95_ms"), p95("push", "live").alias("push_live_p95_ms"))
    )


def _measure_gauges(hourly: DataFrame) -> DataFrame:
    return hourly.groupBy("dt", "node").agg(
        F.max("depth_max").cast("double").alias("queue_depth_max"),
        F.max("conns_max").cast("double").alias("sockets_max"),
        F.max("rss_max").cast("double").alias("rss_max_bytes"),
        F.max("lag_ms_max").alias("lag_max_ms"),
    )


def _measure_sockets(daily: DataFrame) -> DataFrame:
    return daily.select("dt", "node", F.col("opened").cast("double").alias("sockets_opened"))


def _make_comparison(frames: Mapping[str, DataFrame], settings: Settings, span: Span) -> Mapping[str, DataFrame]:
    return {"node_compare": compare_nodes(measure_nodes(frames), settings.node_factor)}


NODES_JOB = Job(
    "nodes",
    ("events", "traffic_daily", "latency_daily", "queue_hourly", "sockets_daily"),
    ("node_compare",),
    _make_comparison,
)
