"""J9, second part: which recipients are new, which have gone quiet, which come back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pyspark.sql import Window
from pyspark.sql import functions as F

from analytics.job import Job, Span
from analytics.jobs.recipients import KEPT_DAYS, TAG, latest
from analytics.privacy import unless_few
from analytics.settings import Settings

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

_WEEKS = 5


def dormant(recipients: DataFrame, waiting: DataFrame, quiet_days: int, span: Span) -> DataFrame:
    """
    `dormant_daily`: a row for each day of the span.

    A recipient is told from its tag alone, whatever the epoch: tags that are no pseudonyms outlive a key.

    :param recipients: `recipients_daily` of the span and of :data:`KEPT_DAYS` days before it.
    :param waiting: `open`.
    :param quiet_days: days without an acknowledgement, and known for as long, that make a recipient dormant.
    """
    known = _known(recipients, waiting, span)
    limit = F.date_sub("dt", quiet_days)
    quiet = (
        F.col("waiting").isNotNull()
        & (F.least("since", "oldest") <= limit)
        & (F.col("acked_on").isNull() | (F.col("acked_on") <= limit))
    )
    counts = known.groupBy("dt").agg(
        F.count(F.when(quiet, 1)).alias("dormant"),
        F.sum(F.when(quiet, F.col("waiting"))).alias("waiting"),
        F.sum(F.when(quiet, F.col("bytes"))).alias("bytes"),
        F.count(F.when(F.col("acked_on") == F.col("dt"), 1)).alias("active"),
        F.count(F.when(F.col("seen") & (F.col("since") == F.col("dt")), 1)).alias("fresh"),
    )
    every_day = F.sequence(F.lit(span.first), F.lit(span.last))
    grid = recipients.sparkSession.range(1).select(F.explode(every_day).alias("dt"))
    return grid.join(counts, "dt", "left").fillna(0)


def _known(recipients: DataFrame, waiting: DataFrame, span: Span) -> DataFrame:
    """
    What is known at the end of each day of each recipient seen on it, or with open messages.

    :return: `dt`, `rcpt`, `since`, `acked_on`, `seen`; and of its open messages `waiting`, `bytes` and `oldest`, the
        day that the oldest was accepted on.
    """
    past = latest(recipients.where(F.col("dt") < F.lit(span.first)))
    rows = recipients.where(F.col("dt") >= F.lit(span.first)).unionByName(past, allowMissingColumns=True)
    queues = (
        waiting.where(F.col("rcpt").isNotNull())
        .groupBy("dt", "rcpt")
        .agg(
            F.count("*").alias("waiting"),
            F.coalesce(F.sum("size"), F.lit(0)).alias("bytes"),
            F.min(F.to_date("accepted_at")).alias("oldest"),
        )
    )
    seen = rows.groupBy("dt", "rcpt").agg(F.min("since").alias("since"), F.max("acked_on").alias("acked_on"))
    both = seen.withColumn("seen", F.lit(True)).join(queues, ["dt", "rcpt"], "full")
    of_late = Window.partitionBy("rcpt").orderBy(F.unix_date("dt")).rangeBetween(-KEPT_DAYS, Window.currentRow)
    return both.withColumns({"since": F.min("since").over(of_late), "acked_on": F.max("acked_on").over(of_late)})


def retention(recipients: DataFrame, k: int, span: Span) -> DataFrame:
    """
    `retention_weekly`, as of each day of the span: the week that the day is in, and its four weeks' cohorts before.

    :param recipients: `recipients_daily` of the span and of :data:`KEPT_DAYS` days before it.
    :param k: recipients that it takes to say how many there were.
    """
    rows = recipients.withColumn("cohort", _monday(F.col("since")))
    members = (
        rows.where(F.col("since") == F.col("dt")).groupBy("epoch", "cohort", "dt").agg(F.count("*").alias("members"))
    )
    last = F.date_add("cohort", 7 * _WEEKS - 1)
    sizes = _until(members, last, span).groupBy("dt", "epoch", "cohort").agg(F.sum("members").alias("members"))
    this_week = (
        rows.where(F.col("acked_on") == F.col("dt"))
        .groupBy(*TAG, "cohort", _monday(F.col("dt")).alias("monday"))
        .agg(F.min("dt").alias("dt"))
        .groupBy("epoch", "cohort", "monday", "dt")
        .agg(F.count("*").alias("active"))
    )
    active = (
        _until(this_week, F.date_add("monday", 6), span)
        .groupBy("dt", "epoch", "cohort")
        .agg(F.sum("active").alias("active"))
    )
    weeks = (F.date_diff(_monday(F.col("dt")), "cohort") / 7).cast("int")
    both = sizes.join(active, ["dt", "epoch", "cohort"], "left").fillna(0, "active")
    returned = unless_few(F.col("members"), k, unless_few(F.col("active"), k))
    return both.withColumns({"week": weeks, "active": returned, "members": unless_few(F.col("members"), k)})


def _until(counts: DataFrame, last: Column, span: Span) -> DataFrame:
    """Each row of a `dt` once for every day of the span from that to `last`."""
    first = F.greatest(F.col("dt"), F.lit(span.first))
    end = F.least(last, F.lit(span.last))
    return counts.where(first <= end).withColumn("dt", F.explode(F.sequence(first, end)))


def _monday(day: Column) -> Column:
    return F.trunc(day, "week")


def _transform(frames: Mapping[str, DataFrame], settings: Settings, span: Span) -> Mapping[str, DataFrame]:
    recipients = frames["recipients_daily"]
    return {
        "dormant_daily": dormant(recipients, frames["open"], settings.dormant_days, span),
        "retention_weekly": retention(recipients, settings.k_anonymity, span),
    }


JOB = Job(
    "retention",
    ("open",),
    ("dormant_daily", "retention_weekly"),
    _transform,
    recalls={"recipients_daily": KEPT_DAYS},
)
