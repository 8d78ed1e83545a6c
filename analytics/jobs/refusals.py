"""Errors by code and sender, hits on rate limits, and replayed or untimely requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pyspark.sql import Window
from pyspark.sql import functions as F

from analytics.job import Job, Span
from analytics.jobs.column_functions import select_top_per_day
from analytics.privacy import suppress_small_group
from analytics.settings import Settings

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

_ERROR_HISTORY_DAYS = 400
_ERROR_KEY = ("proto", "mtype", "status", "code")


def group_requests(events: DataFrame) -> DataFrame:
    """
    Requests by day, reason and, if refused, sender: `dt`, `refused`, the reason, `sender`, `n`.

    A request is refused if it has a code, or a status of 400 or above.
    """
    refused = F.col("code").isNotNull() | (F.coalesce("status", F.lit(0)) >= 400)
    requests = events.where(F.col("event") == "req.done").select(
        "dt",
        refused.alias("refused"),
        F.coalesce("status", F.lit(0)).alias("status"),
        *(F.coalesce(name, F.lit("")).alias(name) for name in ("proto", "mtype", "code")),
        # Accepted requests collapse to a few rows at once.
        F.when(refused, F.col("sender")).alias("sender"),
    )
    return requests.groupBy("dt", "refused", *_ERROR_KEY, "sender").agg(F.count("*").alias("n"))


def count_errors_by_code(each: DataFrame, history: DataFrame, k: int) -> DataFrame:
    """
    `errors_daily`.

    :param each: result of :func:`group_requests`.
    :param history: `errors_daily` before the span; codes in it are not new.
    :param k: minimum of senders for their number to be shown.
    """
    reasons = each.groupBy("dt", "refused", *_ERROR_KEY).agg(
        F.sum("n").alias("n"), F.count("sender").alias("senders")
    )
    all_of_day = F.sum("n").over(Window.partitionBy("dt"))
    refused = reasons.withColumn("share", F.col("n") / all_of_day).where("refused").drop("refused")
    seen = refused.select("dt", "code").unionByName(history.select("dt", "code"))
    first = seen.groupBy("code").agg(F.min("dt").alias("first"))
    return (
        refused.join(F.broadcast(first), "code")
        .withColumns({"is_new": F.col("dt") == F.col("first"), "senders": suppress_small_group(F.col("senders"), k)})
        .drop("first")
    )


def rank_error_senders(each: DataFrame, count: int) -> DataFrame:
    """
    `error_senders`: the `count` senders of each day with most refusals.

    :param each: result of :func:`group_requests`.
    """
    known = each.where(F.col("refused") & F.col("sender").isNotNull())
    by_reason = known.groupBy("dt", "sender", "code").agg(F.sum("n").alias("n"))
    totals = by_reason.groupBy("dt", "sender").agg(
        F.max(F.struct("n", "code"))["code"].alias("worst"),
        F.count("*").alias("codes"),
        F.sum("n").alias("n"),
    )
    return select_top_per_day(totals, count, F.desc("n"), F.asc("sender"))


def _make_errors(frames: Mapping[str, DataFrame], settings: Settings, span: Span) -> Mapping[str, DataFrame]:
    each = group_requests(frames["events"]).persist()
    return {
        "errors_daily": count_errors_by_code(each, frames["errors_daily"], settings.k_anonymity),
        "error_senders": rank_error_senders(each, settings.top),
    }


ERRORS_JOB = Job(
    "errors",
    ("events",),
    ("errors_daily", "error_senders"),
    _make_errors,
    history_days={"errors_daily": _ERROR_HISTORY_DAYS},
)


_SECOND_MICROS = 1_000_000


def summarize_limits(events: DataFrame, each: DataFrame, k: int) -> DataFrame:
    """
    `limits_daily`, over all nodes.

    :param each: result of :func:`summarize_parties`.
    :param k: minimum of parties for their number to be shown.
    """
    hits = each.groupBy("dt", "limit").agg(
        F.sum("hits").alias("hits"),
        F.count("who").alias("who_n"),
        F.sum("bursts").alias("bursts"),
        F.max("longest_burst_s").alias("longest_burst_s"),
    )
    every = hits.join(F.broadcast(_compute_sender_shares(events, each)), ["dt", "limit"], "left")
    known = F.col("who_n")
    return every.withColumns(
        {
            "share": suppress_small_group(known, k, F.coalesce("share", F.lit(0.0))),
            "who_n": suppress_small_group(known, k),
        }
    )


def rank_limited_parties(each: DataFrame, count: int) -> DataFrame:
    """
    `limits_top`: the `count` parties of each day with most hits on one limit.

    :param each: result of :func:`summarize_parties`.
    """
    known = each.where(F.col("who").isNotNull()).drop("longest_burst_s")
    return select_top_per_day(known, count, F.desc("hits"), F.asc("who"), F.asc("limit"))


def summarize_parties(events: DataFrame, gap_s: int) -> DataFrame:
    """
    Hits, bursts and the longest burst in seconds, by party, limit and day.

    Unknown parties count as one, whose `who` is null.
    """
    party = ("dt", "limit", "who")
    in_order = Window.partitionBy(*party).orderBy("at")
    hits = events.where(F.col("event") == "limit.hit").select(
        "dt", F.coalesce("limit", F.lit("")).alias("limit"), "who", F.unix_micros("ts").alias("at")
    )
    gap = F.col("at") - F.lag("at").over(in_order)
    begins = F.when(gap <= gap_s * _SECOND_MICROS, 0).otherwise(1)
    numbered = hits.withColumn("begins", begins).withColumn("burst", F.sum("begins").over(in_order))
    bursts = numbered.groupBy(*party, "burst").agg(
        F.count("*").alias("hits"), (F.max("at") - F.min("at")).alias("lasted")
    )
    return bursts.groupBy(*party).agg(
        F.sum("hits").alias("hits"),
        F.count("*").alias("bursts"),
        F.round(F.max("lasted") / _SECOND_MICROS, 3).alias("longest_burst_s"),
    )


def _compute_sender_shares(events: DataFrame, each: DataFrame) -> DataFrame:
    """`dt`, `limit`, and the share of senders of accepted messages that hit it."""
    accepted = events.where((F.col("event") == "msg.accept") & F.col("sender").isNotNull())
    senders = accepted.select("dt", F.col("sender").alias("who")).distinct()
    limited = each.groupBy("dt", "who").agg(F.collect_set("limit").alias("limits"))
    # Count each sender once for each limit it hit, and once under no limit for the total.
    limits = F.array_append(F.coalesce("limits", F.array().cast("array<string>")), F.lit(None))
    counted = (
        senders.join(limited, ["dt", "who"], "left")
        .select("dt", F.explode(limits).alias("limit"))
        .groupBy("dt", "limit")
        .agg(F.count("*").alias("n"))
    )
    everybody = F.max(F.when(F.col("limit").isNull(), F.col("n"))).over(Window.partitionBy("dt"))
    return counted.withColumn("share", F.col("n") / everybody).where(F.col("limit").isNotNull()).drop("n")


def _make_limits(frames: Mapping[str, DataFrame], settings: Settings, span: Span) -> Mapping[str, DataFrame]:
    events = frames["events"]
    each = summarize_parties(events, settings.burst_gap_s).persist()
    return {
        "limits_daily": summarize_limits(events, each, settings.k_anonymity),
        "limits_top": rank_limited_parties(each, settings.top),
    }


LIMITS_JOB = Job("limits", ("events",), ("limits_daily", "limits_top"), _make_limits)


_MINUTE_MS = 60_000
_DAY_MS = 24 * 60 * _MINUTE_MS


def count_replays(events: DataFrame, k: int) -> DataFrame:
    """
    `replay_daily`, over all nodes.

    :param k: minimum of senders for their number to be shown.
    """
    dropped = events.where(F.col("event") == "replay.drop").select(
        "dt",
        F.coalesce("code", F.lit("")).alias("code"),
        classify_clock_age(F.col("age_ms")).alias("age_class"),
        "sender",
        "node",
    )
    by_sender = dropped.groupBy("dt", "code", "age_class", "sender").agg(
        F.count("*").alias("n"), F.count_distinct("node").alias("nodes")
    )
    known = F.col("sender").isNotNull()
    return by_sender.groupBy("dt", "code", "age_class").agg(
        F.sum("n").alias("n"),
        suppress_small_group(F.count("sender"), k).alias("senders"),
        suppress_small_group(F.count(F.when(known & (F.col("nodes") > 1), 1)), k).alias("on_nodes"),
    )


def classify_clock_age(age_ms: Column) -> Column:
    """
    Class of the age of a request by its timestamp, in milliseconds; negative in the future.

    The window is 5 minutes either way: ages just beyond it are clock skew, ages far beyond it are replays.
    """
    off = F.abs(age_ms)
    return (
        F.when(age_ms.isNull(), "")
        .when(off <= 5 * _MINUTE_MS, "fresh")
        .when(off <= 10 * _MINUTE_MS, "skew")
        .when(age_ms < 0, "future")
        .when(age_ms <= _DAY_MS, "old")
        .otherwise("ancient")
    )


def _make_replays(frames: Mapping[str, DataFrame], settings: Settings, span: Span) -> Mapping[str, DataFrame]:
    return {"replay_daily": count_replays(frames["events"], settings.k_anonymity)}


REPLAY_JOB = Job("replay", ("events",), ("replay_daily",), _make_replays)
