"""
J9, first part: what each recipient did.

Carried on from day to day is since when a recipient is known and when it last acknowledged. So its latest row is its
whole history; one not seen for :data:`KEPT_DAYS` days begins anew, whether days are analysed one by one or at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pyspark.sql import Window
from pyspark.sql import functions as F

from analytics.job import Job, Span
from analytics.settings import Settings

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

KEPT_DAYS = 35
"""How far back rows of recipients are looked at; prune keeps as many by default."""

TAG = ("rcpt", "epoch")


def daily(events: DataFrame, history: DataFrame, span: Span) -> DataFrame:
    """
    `recipients_daily`, of those that a message was accepted for, or that acknowledged one.

    :param history: the same of :data:`KEPT_DAYS` days before the span.
    """
    days = (
        events.where(F.col("event").isin("msg.accept", "msg.ack") & F.col("rcpt").isNotNull())
        .withColumn("epoch", F.coalesce("epoch", F.lit(0)))
        .groupBy("dt", *TAG)
        .agg(
            F.count(F.when(F.col("event") == "msg.accept", 1)).alias("accepted"),
            F.count(F.when(F.col("event") == "msg.ack", 1)).alias("acked"),
            F.min("ts").alias("first_at"),
            F.max("ts").alias("last_at"),
        )
        .withColumns({"since": F.col("dt"), "acked_on": F.when(F.col("acked") > 0, F.col("dt"))})
    )
    in_order = Window.partitionBy(*TAG).orderBy("dt")
    every = days.unionByName(latest(history), allowMissingColumns=True)
    goes_on = F.date_diff("dt", F.lag("dt").over(in_order)) <= KEPT_DAYS
    lives = every.withColumn("anew", F.when(goes_on, 0).otherwise(1)).withColumn("life", F.sum("anew").over(in_order))
    so_far = Window.partitionBy(*TAG, "life").orderBy("dt")
    known = lives.withColumns({"since": F.min("since").over(so_far), "acked_on": F.max("acked_on").over(so_far)})
    return known.where(F.col("dt").between(span.first, span.last)).drop("anew", "life")


def latest(history: DataFrame) -> DataFrame:
    """Of each recipient and epoch the last day, with `since` and `acked_on`: as much of the past as matters."""
    last = F.max(F.struct("dt", "since", "acked_on"))
    return history.groupBy(*TAG).agg(last.alias("last")).select(*TAG, "last.*")


def _transform(frames: Mapping[str, DataFrame], settings: Settings, span: Span) -> Mapping[str, DataFrame]:
    return {"recipients_daily": daily(frames["events"], frames["recipients_daily"], span)}


JOB = Job("recipients", ("events",), ("recipients_daily",), _transform, recalls={"recipients_daily": KEPT_DAYS})
