"""J4: how queues grow, and which of them are about to lose messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pyspark.sql import functions as F

from analytics.job import Job, Span
from analytics.ranking import top
from analytics.settings import Settings

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

_DAY_S = 86_400


def hourly(events: DataFrame) -> DataFrame:
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


def risk(waiting: DataFrame, books: DataFrame, capacity: int, count: int, span: Span) -> DataFrame:
    """
    `queue_risk`: the `count` most urgent queues of each day.

    What a queue grew by is the difference of two days' open messages: by the ledger that is accepted less ended,
    with every message counted once, however often it was handed over or acknowledged. Without books of the day
    before nobody knows what waited then: there is no slope, and at risk is only what expires.

    :param waiting: `open`, of the span and the day before it.
    :param books: `ledger_daily` of the same days.
    :param capacity: messages that a queue holds.
    """
    after_books = books.where(F.col("books") <= F.col("dt")).select(
        F.date_add("dt", 1).alias("dt"), F.lit(True).alias("has_slope")
    )
    queues = _queues(waiting).where((F.col("waiting") > 0) & F.col("dt").between(span.first, span.last))
    grown = queues.join(F.broadcast(after_books), "dt", "left").withColumn(
        "per_day", F.when(F.col("has_slope"), F.col("waiting") - F.coalesce("before", F.lit(0)))
    )
    # The greatest of 0 and null is 0.
    judged = grown.withColumn(
        "at_risk", F.col("expiring") + F.greatest(F.lit(0), F.col("waiting") + F.col("per_day") - capacity)
    ).withColumns({"days_to_cap": _days_to_cap(capacity), "per_day": F.col("per_day").cast("double")})
    order = (F.desc("at_risk"), F.desc("waiting"), F.desc("bytes"), F.asc("rcpt"))
    return top(judged, count, *order).drop("before", "expiring", "has_slope")


def _queues(waiting: DataFrame) -> DataFrame:
    """`waiting`, `bytes`, what expires, and `before` (waiting on the day before) of each queue and day."""
    midnight = F.unix_seconds(F.date_add("dt", 1).cast("timestamp"))
    left_s = F.unix_seconds("accepted_at") + F.col("ttl_s") - midnight
    today = waiting.where(F.col("rcpt").isNotNull()).select(
        "dt", "rcpt", "size", left_s.alias("left_s"), F.lit(1).alias("here")
    )
    # Each message stands for itself on its day, and once more for what was there before on the next.
    next_day = today.select(F.date_add("dt", 1).alias("dt"), "rcpt", F.lit(0).alias("here"))
    both = (
        today.unionByName(next_day, allowMissingColumns=True)
        .groupBy("dt", "rcpt")
        .agg(
            F.sum("here").alias("waiting"),
            F.sum(1 - F.col("here")).alias("before"),
            F.coalesce(F.sum("size"), F.lit(0)).alias("bytes"),
            F.count(F.when(F.col("left_s") < _DAY_S, 1)).alias("expiring"),
            F.min(F.when(F.col("left_s") < 0, 0).otherwise(F.col("left_s"))).alias("least_s"),
        )
    )
    return both.withColumn("days_to_ttl", F.round(F.col("least_s") / _DAY_S, 3)).drop("least_s")


def _days_to_cap(capacity: int) -> Column:
    room = F.greatest(F.lit(0), F.lit(capacity) - F.col("waiting"))
    return F.when(F.col("per_day") > 0, F.round(room / F.col("per_day"), 3))


def _transform(frames: Mapping[str, DataFrame], settings: Settings, span: Span) -> Mapping[str, DataFrame]:
    return {
        "queue_hourly": hourly(frames["events"]),
        "queue_risk": risk(frames["open"], frames["ledger_daily"], settings.queue_max_messages, settings.top, span),
    }


JOB = Job("queues", ("events",), ("queue_hourly", "queue_risk"), _transform, recalls={"open": 1, "ledger_daily": 1})
