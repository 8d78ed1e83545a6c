"""
The largest senders and recipients, the distribution of messages over them, recipient activity, retention.

The first day and the last acknowledgement of a recipient are carried from day to day, so its latest row is its whole
history. A recipient not seen for :data:`RECIPIENT_HISTORY_DAYS` days starts over, whether days are analysed one by
one or together.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from typing import TYPE_CHECKING

from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F

from analytics.job import Job, Span
from analytics.jobs.column_functions import select_top_per_day
from analytics.privacy import suppress_small_group
from analytics.settings import Settings

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

# Side of a message to the column of the other side.
PARTNER_COLUMNS = {"sender": "rcpt", "rcpt": "sender"}


def count_member_messages(events: DataFrame) -> DataFrame:
    """Accepted messages by sender and by recipient: `dt`, `side` (sender or rcpt), `member`, `n`, `bytes`."""
    return (
        _split_sender_and_recipient(events)
        .groupBy("dt", "side", "member")
        .agg(F.count("*").alias("n"), F.coalesce(F.sum("size"), F.lit(0)).alias("bytes"))
    )


def rank_members(events: DataFrame, each: DataFrame, count: int) -> DataFrame:
    """
    The `count` members of each side and day with most messages, with `rank` and `partners`.

    :param each: result of :func:`count_member_messages`.
    """
    order = (F.desc("n"), F.desc("bytes"), F.asc("member"))
    first = reduce(
        DataFrame.union,
        (select_top_per_day(each.where(F.col("side") == side), count, *order) for side in PARTNER_COLUMNS),
    )
    key = ["dt", "side", "member"]
    # Only of the selected members: the pairs of all are nearly as many as the messages.
    partners = _split_sender_and_recipient(events).join(F.broadcast(first.select(*key)), key)
    return first.join(partners.groupBy(*key).agg(F.count_distinct("partner").alias("partners")), key)


def _select_side(side: str, tops: DataFrame) -> DataFrame:
    """`top_senders` or `top_recipients`."""
    return tops.where(F.col("side") == side).drop("side").withColumnRenamed("member", side)


def measure_concentration(each: DataFrame, k: int) -> DataFrame:
    """
    `concentration_daily`, exact, from the number of members by number of messages, which is a small table.

    Messages of unknown senders are excluded on the side of the senders.

    :param each: result of :func:`count_member_messages`.
    :param k: minimum of members for their distribution to be shown.
    """
    spread = each.groupBy("dt", "side", F.col("n").alias("each")).agg(F.count("*").alias("members"))
    figures = _compute_gini(spread)
    few = {name: suppress_small_group(F.col("members"), k, F.col(name)) for name in ("top_share", "gini")}
    return figures.withColumns(few)


def _compute_gini(spread: DataFrame) -> DataFrame:
    """
    Gini coefficient, and share of the largest 1 % of members, rounded up.

    :param spread: number of `members` with `each` messages, by `dt` and `side`.
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
    top_members = F.greatest(F.lit(0), F.least(F.col("members"), largest_of_all - above))
    # Twice the area under the Lorenz curve, times members and messages.
    area = F.col("members") * (2 * F.col("upto") - F.col("messages"))
    totals = summed.groupBy("dt", "side").agg(
        F.sum("members").alias("members"),
        F.sum("messages").alias("n"),
        F.sum(top_members * F.col("each")).alias("taken"),
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


def _split_sender_and_recipient(events: DataFrame) -> DataFrame:
    """Emit each accepted message for its sender and for its recipient: the `member`, and the `partner`."""
    ends = (
        F.struct(F.lit(side).alias("side"), F.col(side).alias("member"), F.col(partner).alias("partner"))
        for side, partner in PARTNER_COLUMNS.items()
    )
    accepted = events.where(F.col("event") == "msg.accept").select(
        "dt", "size", F.explode(F.array(*ends)).alias("end")
    )
    return accepted.select("dt", "size", "end.*").where(F.col("member").isNotNull())


def _make_rankings(frames: Mapping[str, DataFrame], settings: Settings, span: Span) -> Mapping[str, DataFrame]:
    events = frames["events"]
    each = count_member_messages(events).persist()
    tops = rank_members(events, each, settings.top).persist()
    return {
        "top_senders": _select_side("sender", tops),
        "top_recipients": _select_side("rcpt", tops),
        "concentration_daily": measure_concentration(each, settings.k_anonymity),
    }


TALKERS_JOB = Job("talkers", ("events",), ("top_senders", "top_recipients", "concentration_daily"), _make_rankings)


RECIPIENT_HISTORY_DAYS = 35
"""Days of history of recipients; prune keeps as many by default."""

RECIPIENT_KEY = ("rcpt", "epoch")


def make_recipients_daily(events: DataFrame, history: DataFrame, span: Span) -> DataFrame:
    """
    `recipients_daily`, of recipients of accepted messages and those that acknowledged.

    :param history: the same, of :data:`RECIPIENT_HISTORY_DAYS` days before the span.
    """
    days = (
        events.where(F.col("event").isin("msg.accept", "msg.ack") & F.col("rcpt").isNotNull())
        .withColumn("epoch", F.coalesce("epoch", F.lit(0)))
        .groupBy("dt", *RECIPIENT_KEY)
        .agg(
            F.count(F.when(F.col("event") == "msg.accept", 1)).alias("accepted"),
            F.count(F.when(F.col("event") == "msg.ack", 1)).alias("acked"),
            F.min("ts").alias("first_at"),
            F.max("ts").alias("last_at"),
        )
        .withColumns({"since": F.col("dt"), "acked_on": F.when(F.col("acked") > 0, F.col("dt"))})
    )
    in_order = Window.partitionBy(*RECIPIENT_KEY).orderBy("dt")
    every = days.unionByName(select_latest_rows(history), allowMissingColumns=True)
    goes_on = F.date_diff("dt", F.lag("dt").over(in_order)) <= RECIPIENT_HISTORY_DAYS
    activity_periods = every.withColumn("anew", F.when(goes_on, 0).otherwise(1)).withColumn(
        "life", F.sum("anew").over(in_order)
    )
    so_far = Window.partitionBy(*RECIPIENT_KEY, "life").orderBy("dt")
    known = activity_periods.withColumns(
        {"since": F.min("since").over(so_far), "acked_on": F.max("acked_on").over(so_far)}
    )
    return known.where(F.col("dt").between(span.first, span.last)).drop("anew", "life")


def select_latest_rows(history: DataFrame) -> DataFrame:
    """Last day of each recipient and epoch, with `since` and `acked_on`: the state that matters."""
    last = F.max(F.struct("dt", "since", "acked_on"))
    return history.groupBy(*RECIPIENT_KEY).agg(last.alias("last")).select(*RECIPIENT_KEY, "last.*")


def _make_recipients(frames: Mapping[str, DataFrame], settings: Settings, span: Span) -> Mapping[str, DataFrame]:
    return {"recipients_daily": make_recipients_daily(frames["events"], frames["recipients_daily"], span)}


RECIPIENTS_JOB = Job(
    "recipients",
    ("events",),
    ("recipients_daily",),
    _make_recipients,
    history_days={"recipients_daily": RECIPIENT_HISTORY_DAYS},
)


_COHORT_WEEKS = 5


def count_dormant_recipients(recipients: DataFrame, waiting: DataFrame, quiet_days: int, span: Span) -> DataFrame:
    """
    `dormant_daily`: a row for each day of the span.

    Key epochs are ignored: identifiers that are no pseudonyms are the same in all of them.

    :param recipients: `recipients_daily` of the span and of :data:`RECIPIENT_HISTORY_DAYS` days before it.
    :param waiting: `open`.
    :param quiet_days: days without an acknowledgement, and known for as long, that make a recipient dormant.
    """
    known = _summarize_recipients(recipients, waiting, span)
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


def _summarize_recipients(recipients: DataFrame, waiting: DataFrame, span: Span) -> DataFrame:
    """
    The state of each recipient at the end of each day on which it was seen or has open messages.

    :return: `dt`, `rcpt`, `since`, `acked_on`, `seen`; and of its open messages `waiting`, `bytes` and `oldest`, the
        day that the oldest was accepted on.
    """
    past = select_latest_rows(recipients.where(F.col("dt") < F.lit(span.first)))
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
    of_late = (
        Window.partitionBy("rcpt").orderBy(F.unix_date("dt")).rangeBetween(-RECIPIENT_HISTORY_DAYS, Window.currentRow)
    )
    return both.withColumns({"since": F.min("since").over(of_late), "acked_on": F.max("acked_on").over(of_late)})


def compute_retention(recipients: DataFrame, k: int, span: Span) -> DataFrame:
    """
    `retention_weekly`, as of each day of the span: the week that the day is in, and its four weeks' cohorts before.

    :param recipients: `recipients_daily` of the span and of :data:`RECIPIENT_HISTORY_DAYS` days before it.
    :param k: minimum of recipients for their number to be shown.
    """
    rows = recipients.withColumn("cohort", _get_monday(F.col("since")))
    members = (
        rows.where(F.col("since") == F.col("dt")).groupBy("epoch", "cohort", "dt").agg(F.count("*").alias("members"))
    )
    last = F.date_add("cohort", 7 * _COHORT_WEEKS - 1)
    sizes = _repeat_until(members, last, span).groupBy("dt", "epoch", "cohort").agg(F.sum("members").alias("members"))
    this_week = (
        rows.where(F.col("acked_on") == F.col("dt"))
        .groupBy(*RECIPIENT_KEY, "cohort", _get_monday(F.col("dt")).alias("monday"))
        .agg(F.min("dt").alias("dt"))
        .groupBy("epoch", "cohort", "monday", "dt")
        .agg(F.count("*").alias("active"))
    )
    active = (
        _repeat_until(this_week, F.date_add("monday", 6), span)
        .groupBy("dt", "epoch", "cohort")
        .agg(F.sum("active").alias("active"))
    )
    weeks = (F.date_diff(_get_monday(F.col("dt")), "cohort") / 7).cast("int")
    both = sizes.join(active, ["dt", "epoch", "cohort"], "left").fillna(0, "active")
    returned = suppress_small_group(F.col("members"), k, suppress_small_group(F.col("active"), k))
    return both.withColumns({"week": weeks, "active": returned, "members": suppress_small_group(F.col("members"), k)})


def _repeat_until(counts: DataFrame, last: Column, span: Span) -> DataFrame:
    """Each row of a `dt` once for every day of the span from that to `last`."""
    first = F.greatest(F.col("dt"), F.lit(span.first))
    end = F.least(last, F.lit(span.last))
    return counts.where(first <= end).withColumn("dt", F.explode(F.sequence(first, end)))


def _get_monday(day: Column) -> Column:
    return F.trunc(day, "week")


def _make_retention(frames: Mapping[str, DataFrame], settings: Settings, span: Span) -> Mapping[str, DataFrame]:
    recipients = frames["recipients_daily"]
    return {
        "dormant_daily": count_dormant_recipients(recipients, frames["open"], settings.dormant_days, span),
        "retention_weekly": compute_retention(recipients, settings.k_anonymity, span),
    }


RETENTION_JOB = Job(
    "retention",
    ("open",),
    ("dormant_daily", "retention_weekly"),
    _make_retention,
    history_days={"recipients_daily": RECIPIENT_HISTORY_DAYS},
)
