"""J7: repeated and untimely requests, with wrong clocks told from attacks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pyspark.sql import functions as F

from analytics.job import Job, Span
from analytics.privacy import unless_few
from analytics.settings import Settings

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

_MINUTE = 60_000
_DAY = 24 * 60 * _MINUTE


def daily(events: DataFrame, k: int) -> DataFrame:
    """
    `replay_daily`, over all nodes together.

    :param k: senders that it takes to say how many there were.
    """
    dropped = events.where(F.col("event") == "replay.drop").select(
        "dt",
        F.coalesce("code", F.lit("")).alias("code"),
        clock_class(F.col("age_ms")).alias("age_class"),
        "sender",
        "node",
    )
    by_sender = dropped.groupBy("dt", "code", "age_class", "sender").agg(
        F.count("*").alias("n"), F.count_distinct("node").alias("nodes")
    )
    known = F.col("sender").isNotNull()
    return by_sender.groupBy("dt", "code", "age_class").agg(
        F.sum("n").alias("n"),
        unless_few(F.count("sender"), k).alias("senders"),
        unless_few(F.count(F.when(known & (F.col("nodes") > 1), 1)), k).alias("on_nodes"),
    )


def clock_class(age_ms: Column) -> Column:
    """
    Class of the age that a request has by its own clock, in milliseconds; negative: it comes from the future.

    The window is 5 minutes either way: just beyond it clocks are wrong, far beyond it something old is sent again.
    """
    off = F.abs(age_ms)
    return (
        F.when(age_ms.isNull(), "")
        .when(off <= 5 * _MINUTE, "fresh")
        .when(off <= 10 * _MINUTE, "skew")
        .when(age_ms < 0, "future")
        .when(age_ms <= _DAY, "old")
        .otherwise("ancient")
    )


def _transform(frames: Mapping[str, DataFrame], settings: Settings, span: Span) -> Mapping[str, DataFrame]:
    return {"replay_daily": daily(frames["events"], settings.k_anonymity)}


JOB = Job("replay", ("events",), ("replay_daily",), _transform)
