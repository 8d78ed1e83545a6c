"""
Starts of the daemon that were killed.

What is killed leaves no proc.stop, and the last lines it would have written are lost, though what they tell of may be
durable.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import functions as F

from analytics.times import SECOND, happened

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

# How far from the last line of a start its last acceptances may be.
_MOMENT = 10 * SECOND
# Every start writes some of these, and they are few.
_MARKS = ("log.open", "log.close", "counters", "proc.start", "proc.stop")


def near_crash(messages: DataFrame, events: DataFrame) -> DataFrame:
    """
    Messages that were accepted in the last moment of a start of any node that was killed.

    :param messages: msg, and since: when it was accepted, microseconds.
    :param events: of all days in which to look for starts.
    :return: msg, each once.
    """
    ends = _crashes(events).withColumn("block", F.explode(F.sequence(*(_block("at") + n for n in (-1, 1)))))
    found = messages.withColumn("block", _block("since")).join(F.broadcast(ends), "block")
    return found.where(F.abs(F.col("since") - F.col("at")) <= _MOMENT).select("msg").distinct()


def _block(time: str) -> Column:
    return F.floor(F.col(time) / _MOMENT)


def _crashes(events: DataFrame) -> DataFrame:
    """`at`: the last line, microseconds, of each start without proc.stop that another one of the node followed."""
    start = ("node", "boot")
    marks = events.where(F.col("event").isin(*_MARKS)).select(*start, "event", happened(events).alias("began"))
    starts = marks.groupBy(*start).agg(
        F.min("began").alias("began"), F.max(F.col("event") == "proc.stop").alias("stopped")
    )
    # One look at the starts, rather than a join with themselves.
    nodes = starts.groupBy("node").agg(
        F.max("began").alias("latest"), F.collect_list(F.struct("boot", "began", "stopped")).alias("starts")
    )
    each = nodes.select("node", "latest", F.inline("starts"))
    killed = each.where(~F.col("stopped") & (F.col("began") < F.col("latest"))).select(*start)
    lines = events.select(*start, happened(events).alias("at"))
    return lines.join(F.broadcast(killed), list(start)).groupBy(*start).agg(F.max("at").alias("at")).select("at")
