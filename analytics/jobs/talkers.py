"""J8: who sends and receives most, and how unevenly messages are spread."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce

from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F

from analytics.job import Job, Span
from analytics.privacy import unless_few
from analytics.ranking import top
from analytics.settings import Settings

# Each side of a message, and who is at the other end.
PARTNERS = {"sender": "rcpt", "rcpt": "sender"}


def members(events: DataFrame) -> DataFrame:
    """Accepted messages of each sender and each recipient: `dt`, `side` (sender or rcpt), `member`, `n`, `bytes`."""
    return (
        _ends(events)
        .groupBy("dt", "side", "member")
        .agg(F.count("*").alias("n"), F.coalesce(F.sum("size"), F.lit(0)).alias("bytes"))
    )


def largest(events: DataFrame, each: DataFrame, count: int) -> DataFrame:
    """
    The `count` members of each side and day with most messages: as :func:`members`, with `rank` and `partners`.

    :param each: :func:`members`.
    """
    order = (F.desc("n"), F.desc("bytes"), F.asc("member"))
    first = reduce(DataFrame.union, (top(each.where(F.col("side") == side), count, *order) for side in PARTNERS))
    key = ["dt", "side", "member"]
    # Partners of these few only: the pairs of everybody would be nearly as many as the messages.
    partners = _ends(events).join(F.broadcast(first.select(*key)), key)
    return first.join(partners.groupBy(*key).agg(F.count_distinct("partner").alias("partners")), key)


def _of(side: str, tops: DataFrame) -> DataFrame:
    """`top_senders` or `top_recipients`."""
    return tops.where(F.col("side") == side).drop("side").withColumnRenamed("member", side)


def concentration(each: DataFrame, k: int) -> DataFrame:
    """
    `concentration_daily`, exact: from how many members have how many messages, which is a small table.

    Messages without a known sender are in no figure of the senders.

    :param each: :func:`members`.
    :param k: members that it takes to say how messages are spread over them.
    """
    spread = each.groupBy("dt", "side", F.col("n").alias("each")).agg(F.count("*").alias("members"))
    figures = _unevenness(spread)
    few = {name: unless_few(F.col("members"), k, F.col(name)) for name in ("top_share", "gini")}
    return figures.withColumns(few)


def _unevenness(spread: DataFrame) -> DataFrame:
    """
    Gini coefficient, and share of the largest 1 % of members, rounded up to whole ones.

    :param spread: `members` with `each` messages, by `dt` and `side`.
    """
    group = Window.partitionBy("dt", "side")
    upwards = group.orderBy("each").rowsBetween(Window.unboundedPreceding, Window.currentRow)
    messages = F.col("members") * F.col("each")
    summed = spread.withColumns(
        {
            "messages": messages,
            "upto": F.sum(messages).over(upwards),
            "members_upto": F.sum("members").over(upwards),
            "all_members": F.sum("members").over(group),
        }
    )
    above = F.col("all_members") - F.col("members_upto")
    largest_of_all = F.ceil(F.col("all_members") / 100)
    taken = F.greatest(F.lit(0), F.least(F.col("members"), largest_of_all - above))
    # Twice the area under the Lorenz curve, times members and messages.
    area = F.col("members") * (2 * F.col("upto") - F.col("messages"))
    totals = summed.groupBy("dt", "side").agg(
        F.sum("members").alias("members"),
        F.sum("messages").alias("n"),
        F.sum(taken * F.col("each")).alias("taken"),
        F.sum(area).alias("area"),
    )
    return totals.select(
        "dt",
        "side",
        "members",
        "n",
        (F.col("taken") / F.col("n")).alias("top_share"),
        (1 - F.col("area") / (F.col("members") * F.col("n"))).alias("gini"),
    )


def _ends(events: DataFrame) -> DataFrame:
    """Each accepted message once for its sender and once for its recipient: the `member`, and the `partner`."""
    ends = (
        F.struct(F.lit(side).alias("side"), F.col(side).alias("member"), F.col(partner).alias("partner"))
        for side, partner in PARTNERS.items()
    )
    accepted = events.where(F.col("event") == "msg.accept").select(
        "dt", "size", F.explode(F.array(*ends)).alias("end")
    )
    return accepted.select("dt", "size", "end.*").where(F.col("member").isNotNull())


def _transform(frames: Mapping[str, DataFrame], settings: Settings, span: Span) -> Mapping[str, DataFrame]:
    events = frames["events"]
    each = members(events).persist()
    tops = largest(events, each, settings.top).persist()
    return {
        "top_senders": _of("sender", tops),
        "top_recipients": _of("rcpt", tops),
        "concentration_daily": concentration(each, settings.k_anonymity),
    }


JOB = Job("talkers", ("events",), ("top_senders", "top_recipients", "concentration_daily"), _transform)
