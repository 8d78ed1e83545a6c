"""
Starts of the daemon that were killed.

What is killed leaves no proc.stop, and the last lines it would have written are lost, though what they tell of may be
durable.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import functions as F

from analytics.times import SECOND

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

# Longer than messages wait, as they tell of a crash only when they end.
REMEMBERED_DAYS = 40
# How far from the last line of a start its last acceptances may be.
_MOMENT = 10 * SECOND


def near_crash(messages: DataFrame, boots: DataFrame) -> DataFrame:
    """
    Messages that were accepted in the last moment of a start of any node that was killed.

    :param messages: msg; since: when it was accepted, microseconds; dt: the day it ended on.
    :param boots: `boots_daily` of all days in which to look. Only what was known by the end of `dt` counts.
    :return: msg, each once.
    """
    ends = _crashes(boots).withColumn("block", F.explode(F.sequence(*(_block("at") + n for n in (-1, 1)))))
    found = messages.withColumn("block", _block("since")).join(F.broadcast(ends), "block")
    near = (F.abs(F.col("since") - F.col("at")) <= _MOMENT) & (F.col("known_on") <= F.col("dt"))
    return found.where(near).select("msg").distinct()


def _block(time: str) -> Column:
    return F.floor(F.col(time) / _MOMENT)


def _crashes(boots: DataFrame) -> DataFrame:
    """
    Starts without proc.stop that another one of the node followed.

    :return: at: the last line, microseconds; known_on: the day on which the next one began.
    """
    starts = boots.groupBy("node", "boot").agg(
        F.unix_micros(F.max("last_at")).alias("at"), F.max("stopped").alias("stopped"), F.min("dt").alias("began_on")
    )
    # One look at the starts, rather than a join with themselves.
    in_order = F.sort_array(F.collect_list(F.struct("at", "stopped", "began_on"))).alias("starts")
    nodes = starts.where(F.col("at").isNotNull()).groupBy("node").agg(in_order)
    each = F.transform("starts", lambda start, place: F.struct(
        start.at.alias("at"),
        start.stopped.alias("stopped"),
        F.get("starts", place + 1).began_on.alias("known_on"),
    ))  # fmt: skip
    killed = ~F.col("stopped") & F.col("known_on").isNotNull()
    return nodes.select(F.inline(each)).where(killed).select("at", "known_on")
