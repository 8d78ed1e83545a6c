"""How late, day by day, a daemon is known to have run for a while."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import functions as F

from analytics.times import SECOND

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_WHILE = 3600 * SECOND


def last_lines(boots: DataFrame, events: DataFrame) -> DataFrame:
    """
    The last line of each day of any start that had run for an hour by then.

    :param boots: `boots_daily`.
    :param events: with the proc.start of these starts. One without it ran from the beginning of its first day on.
    :return: dt; last: microseconds. Days without such a line are missing.
    """
    name = ["node", "boot"]
    told = events.where(F.col("event") == "proc.start").groupBy(*name).agg(F.min("ts").alias("began"))
    firsts = boots.groupBy(*name).agg(F.min("dt").cast("timestamp").alias("midnight")).join(told, name, "left")
    last, since = F.unix_micros("last_at"), F.unix_micros(F.coalesce("began", "midnight"))
    return boots.join(firsts, name).where(last - since >= _WHILE).groupBy("dt").agg(F.max(last).alias("last"))
