"""J6: who ran into rate limits, and in which bursts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pyspark.sql import Window
from pyspark.sql import functions as F

from analytics.job import Job, Span
from analytics.privacy import unless_few
from analytics.ranking import top
from analytics.settings import Settings

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_MICROSECONDS = 1_000_000


def daily(events: DataFrame, each: DataFrame, k: int) -> DataFrame:
    """
    `limits_daily`, over the hits of all nodes together.

    :param each: :func:`parties`.
    :param k: parties that it takes to say how many there were.
    """
    hits = each.groupBy("dt", "limit").agg(
        F.sum("hits").alias("hits"),
        F.count("who").alias("who_n"),
        F.sum("bursts").alias("bursts"),
        F.max("longest_burst_s").alias("longest_burst_s"),
    )
    every = hits.join(F.broadcast(_shares(events, each)), ["dt", "limit"], "left")
    known = F.col("who_n")
    return every.withColumns(
        {"share": unless_few(known, k, F.coalesce("share", F.lit(0.0))), "who_n": unless_few(known, k)}
    )


def largest(each: DataFrame, count: int) -> DataFrame:
    """
    `limits_top`: the `count` parties of each day that hit one limit most.

    :param each: :func:`parties`.
    """
    known = each.where(F.col("who").isNotNull()).drop("longest_burst_s")
    return top(known, count, F.desc("hits"), F.asc("who"), F.asc("limit"))


def parties(events: DataFrame, gap_s: int) -> DataFrame:
    """
    Hits, bursts and the longest burst in seconds, of each party at each limit on each day.

    Hits of unknown parties count as those of one, whose `who` is null.
    """
    party = ("dt", "limit", "who")
    in_order = Window.partitionBy(*party).orderBy("at")
    hits = events.where(F.col("event") == "limit.hit").select(
        "dt", F.coalesce("limit", F.lit("")).alias("limit"), "who", F.unix_micros("ts").alias("at")
    )
    gap = F.col("at") - F.lag("at").over(in_order)
    begins = F.when(gap <= gap_s * _MICROSECONDS, 0).otherwise(1)
    numbered = hits.withColumn("begins", begins).withColumn("burst", F.sum("begins").over(in_order))
    bursts = numbered.groupBy(*party, "burst").agg(
        F.count("*").alias("hits"), (F.max("at") - F.min("at")).alias("lasted")
    )
    return bursts.groupBy(*party).agg(
        F.sum("hits").alias("hits"),
        F.count("*").alias("bursts"),
        F.round(F.max("lasted") / _MICROSECONDS, 3).alias("longest_burst_s"),
    )


def _shares(events: DataFrame, each: DataFrame) -> DataFrame:
    """`dt`, `limit`, and the share of the senders of accepted messages that hit it."""
    accepted = events.where((F.col("event") == "msg.accept") & F.col("sender").isNotNull())
    senders = accepted.select("dt", F.col("sender").alias("who")).distinct()
    limited = each.groupBy("dt", "who").agg(F.collect_set("limit").alias("limits"))
    # Each sender counts once for each limit that it hit, and once, under no limit, among all of them.
    limits = F.array_append(F.coalesce("limits", F.array().cast("array<string>")), F.lit(None))
    counted = (
        senders.join(limited, ["dt", "who"], "left")
        .select("dt", F.explode(limits).alias("limit"))
        .groupBy("dt", "limit")
        .agg(F.count("*").alias("n"))
    )
    everybody = F.max(F.when(F.col("limit").isNull(), F.col("n"))).over(Window.partitionBy("dt"))
    return counted.withColumn("share", F.col("n") / everybody).where(F.col("limit").isNotNull()).drop("n")


def _transform(frames: Mapping[str, DataFrame], settings: Settings, span: Span) -> Mapping[str, DataFrame]:
    events = frames["events"]
    each = parties(events, settings.burst_gap_s).persist()
    return {"limits_daily": daily(events, each, settings.k_anonymity), "limits_top": largest(each, settings.top)}


JOB = Job("limits", ("events",), ("limits_daily", "limits_top"), _transform)
