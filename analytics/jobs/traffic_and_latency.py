"""Traffic by hour, growth of queues and those about to lose messages, durations, and processing time of requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pyspark.sql import Window
from pyspark.sql import functions as F

from analytics.job import Job, Span
from analytics.jobs.column_functions import (
    classify_size,
    compute_percentiles,
    make_bucket_column,
    select_top_per_day,
)
from analytics.settings import Settings

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

_TRAFFIC_KEY = ("node", "proto", "event")


def make_traffic(tables: Mapping[str, DataFrame], settings: Settings, span: Span) -> dict[str, DataFrame]:
    """`traffic_hourly` and `traffic_daily`."""
    hourly = count_traffic_by_hour(tables["events"]).persist()
    return {"traffic_hourly": hourly, "traffic_daily": sum_traffic_by_day(hourly)}


def count_traffic_by_hour(events: DataFrame) -> DataFrame:
    """Number of requests and of each message event, and bytes where there is a size."""
    return (
        events.where((F.col("event") == "req.done") | F.col("event").startswith("msg."))
        .groupBy(
            "dt",
            F.hour("ts").alias("hour"),
            F.coalesce("node", F.lit("")).alias("node"),
            F.coalesce("proto", F.lit("")).alias("proto"),
            "event",
        )
        .agg(F.count(F.lit(1)).alias("n"), F.coalesce(F.sum("size"), F.lit(0)).alias("bytes"))
    )


def sum_traffic_by_day(hourly: DataFrame) -> DataFrame:
    """Sum the hours of `traffic_hourly`."""
    return hourly.groupBy("dt", *_TRAFFIC_KEY).agg(F.sum("n").alias("n"), F.sum("bytes").alias("bytes"))


TRAFFIC_JOB = Job("traffic", reads=("events",), writes=("traffic_hourly", "traffic_daily"), transform=make_traffic)


_DAY_SECONDS = 86_400


def summarize_queues_by_hour(events: DataFrame) -> DataFrame:
    """`queue_hourly`, from the gauges of each hour and node."""
    gauges = events.where(F.col("event") == "gauge")
    return gauges.groupBy("dt", F.hour("ts").alias("hour"), "node").agg(
        F.max("depth").alias("depth_max"),
        F.round(F.mean("depth"), 3).alias("depth_mean"),
        F.max("bytes").alias("bytes_max"),
        F.max("rcpts").alias("rcpts_max"),
        F.max("oldest_ms").alias("oldest_ms_max"),
        F.max("conns").alias("conns_max"),
        F.max("rss").alias("rss_max"),
        F.max("fds").alias("fds_max"),
        F.max("lag_ms").alias("lag_ms_max"),
    )


def rank_queues_at_risk(waiting: DataFrame, ledger: DataFrame, capacity: int, count: int, span: Span) -> DataFrame:
    """
    `queue_risk`: the `count` queues of each day at greatest risk.

    The growth of a queue is the difference of open messages between two days, which counts every message once.
    Without a ledger of the day before it is unknown, and only expiring messages are at risk.

    :param waiting: `open`, of the span and the day before it.
    :param ledger: `ledger_daily` of the same days.
    :param capacity: maximum of messages in a queue.
    """
    after_books = ledger.where(F.col("books") <= F.col("dt")).select(
        F.date_add("dt", 1).alias("dt"), F.lit(True).alias("has_slope")
    )
    queues = _summarize_queues(waiting).where((F.col("waiting") > 0) & F.col("dt").between(span.first, span.last))
    grown = queues.join(F.broadcast(after_books), "dt", "left").withColumn(
        "per_day", F.when(F.col("has_slope"), F.col("waiting") - F.coalesce("before", F.lit(0)))
    )
    # The greatest of 0 and null is 0.
    queues_at_risk = grown.withColumn(
        "at_risk", F.col("expiring") + F.greatest(F.lit(0), F.col("waiting") + F.col("per_day") - capacity)
    ).withColumns({"days_to_cap": _compute_days_to_cap(capacity), "per_day": F.col("per_day").cast("double")})
    order = (F.desc("at_risk"), F.desc("waiting"), F.desc("bytes"), F.asc("rcpt"))
    return select_top_per_day(queues_at_risk, count, *order).drop("before", "expiring", "has_slope")


def _summarize_queues(waiting: DataFrame) -> DataFrame:
    """By queue and day: `waiting`, `bytes`, `expiring`, and `before` (waiting on the day before)."""
    midnight = F.unix_seconds(F.date_add("dt", 1).cast("timestamp"))
    left_s = F.unix_seconds("accepted_at") + F.col("ttl_s") - midnight
    today = waiting.where(F.col("rcpt").isNotNull()).select(
        "dt", "rcpt", "size", left_s.alias("left_s"), F.lit(1).alias("here")
    )
    # Each message counts on its day, and as `before` on the next.
    next_day = today.select(F.date_add("dt", 1).alias("dt"), "rcpt", F.lit(0).alias("here"))
    both = (
        today.unionByName(next_day, allowMissingColumns=True)
        .groupBy("dt", "rcpt")
        .agg(
            F.sum("here").alias("waiting"),
            F.sum(1 - F.col("here")).alias("before"),
            F.coalesce(F.sum("size"), F.lit(0)).alias("bytes"),
            F.count(F.when(F.col("left_s") < _DAY_SECONDS, 1)).alias("expiring"),
            F.min(F.when(F.col("left_s") < 0, 0).otherwise(F.col("left_s"))).alias("least_s"),
        )
    )
    return both.withColumn("days_to_ttl", F.round(F.col("least_s") / _DAY_SECONDS, 3)).drop("least_s")


def _compute_days_to_cap(capacity: int) -> Column:
    room = F.greatest(F.lit(0), F.lit(capacity) - F.col("waiting"))
    return F.when(F.col("per_day") > 0, F.round(room / F.col("per_day"), 3))


def _make_queues(frames: Mapping[str, DataFrame], settings: Settings, span: Span) -> Mapping[str, DataFrame]:
    return {
        "queue_hourly": summarize_queues_by_hour(frames["events"]),
        "queue_risk": rank_queues_at_risk(
            frames["open"], frames["ledger_daily"], settings.queue_max_messages, settings.top, span
        ),
    }


QUEUES_JOB = Job(
    "queues", ("events",), ("queue_hourly", "queue_risk"), _make_queues, history_days={"open": 1, "ledger_daily": 1}
)


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
