"""J5: what was refused or failed, for which reason, and who met it most."""

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

_HISTORY_DAYS = 400
_KEY = ("proto", "mtype", "status", "code")


def groups(events: DataFrame) -> DataFrame:
    """
    Answered requests by day, reason and, of refused ones, sender: `dt`, `refused`, the reason, `sender`, `n`.

    A request is refused if it has a code, or a status of 400 or above.
    """
    refused = F.col("code").isNotNull() | (F.coalesce("status", F.lit(0)) >= 400)
    requests = events.where(F.col("event") == "req.done").select(
        "dt",
        refused.alias("refused"),
        F.coalesce("status", F.lit(0)).alias("status"),
        *(F.coalesce(name, F.lit("")).alias(name) for name in ("proto", "mtype", "code")),
        # What is fine collapses to a few rows at once.
        F.when(refused, F.col("sender")).alias("sender"),
    )
    return requests.groupBy("dt", "refused", *_KEY, "sender").agg(F.count("*").alias("n"))


def by_code(each: DataFrame, history: DataFrame, k: int) -> DataFrame:
    """
    `errors_daily`.

    :param each: :func:`groups`.
    :param history: `errors_daily` of the days before the span; a code that is in it is not new.
    :param k: senders that it takes to say how many there were.
    """
    reasons = each.groupBy("dt", "refused", *_KEY).agg(F.sum("n").alias("n"), F.count("sender").alias("senders"))
    all_of_day = F.sum("n").over(Window.partitionBy("dt"))
    refused = reasons.withColumn("share", F.col("n") / all_of_day).where("refused").drop("refused")
    seen = refused.select("dt", "code").unionByName(history.select("dt", "code"))
    first = seen.groupBy("code").agg(F.min("dt").alias("first"))
    return (
        refused.join(F.broadcast(first), "code")
        .withColumns({"is_new": F.col("dt") == F.col("first"), "senders": unless_few(F.col("senders"), k)})
        .drop("first")
    )


def senders(each: DataFrame, count: int) -> DataFrame:
    """
    `error_senders`: the `count` senders of each day with most refusals.

    :param each: :func:`groups`.
    """
    known = each.where(F.col("refused") & F.col("sender").isNotNull())
    by_reason = known.groupBy("dt", "sender", "code").agg(F.sum("n").alias("n"))
    totals = by_reason.groupBy("dt", "sender").agg(
        F.max(F.struct("n", "code"))["code"].alias("worst"),
        F.count("*").alias("codes"),
        F.sum("n").alias("n"),
    )
    return top(totals, count, F.desc("n"), F.asc("sender"))


def _transform(frames: Mapping[str, DataFrame], settings: Settings, span: Span) -> Mapping[str, DataFrame]:
    each = groups(frames["events"]).persist()
    return {
        "errors_daily": by_code(each, frames["errors_daily"], settings.k_anonymity),
        "error_senders": senders(each, settings.top),
    }


JOB = Job(
    "errors", ("events",), ("errors_daily", "error_senders"), _transform, recalls={"errors_daily": _HISTORY_DAYS}
)
