"""The largest of each day."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import Window
from pyspark.sql import functions as F

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


def top(frame: DataFrame, count: int, *order: Column) -> DataFrame:
    """
    The first `count` rows of each `dt`, with their place as `rank`, an int from 1.

    Spark cuts each partition down to that many rows before it brings a day together, so millions of candidates do not
    meet in one task.

    :param order: ends in something that no two rows of a day share, so that ties are broken the same way each time.
    """
    day = Window.partitionBy("dt").orderBy(*order)
    return frame.withColumn("rank", F.row_number().over(day)).where(F.col("rank") <= count)
