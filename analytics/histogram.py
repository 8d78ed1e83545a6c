"""
Percentiles from histograms with logarithmic buckets.

Bucket b holds 1.02**b to 1.02**(b + 1) ms. Counts of any nodes, paths and hours add up to those of all of them, so
percentiles of any span come from the stored counts, and are the same whenever they are made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log
from typing import TYPE_CHECKING

from pyspark.sql import Window
from pyspark.sql import functions as F

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

BASE = 1.02
LEAST_MS = 0.001


def bucket(ms: Column) -> Column:
    """The bucket, an int, of a duration in milliseconds; null of null."""
    # Spark's greatest() would make a duration of null.
    least = F.when(ms < LEAST_MS, F.lit(LEAST_MS)).otherwise(ms)
    return F.floor(F.log(least.cast("double")) / F.lit(log(BASE))).cast("int")


def percentiles(
    hist: DataFrame, by: Sequence[str], shares: Mapping[str, float], maximum: str | None = None
) -> DataFrame:
    """
    Percentiles of each group, by nearest rank.

    :param hist: columns `by`, `bucket` (int) and `n` (count); several rows of one bucket add up.
    :param shares: name of a column to the share of values at or below, 0 to 1.
    :param maximum: name of a column for the upper end of the highest bucket.
    :return: `by`, `n`, a double in milliseconds for each share, the geometric middle of its bucket and so at most
        1 % wrong, and the maximum; a group without values has no row.
    """
    counts = hist.groupBy(*by, "bucket").agg(F.sum("n").alias("n")).where("n > 0")
    group = Window.partitionBy(*by)
    upwards = group.orderBy("bucket").rowsBetween(Window.unboundedPreceding, Window.currentRow)
    ranked = counts.withColumn("_upto", F.sum("n").over(upwards)).withColumn("_all", F.sum("n").over(group))
    wanted = [
        _milliseconds(F.min(F.when(F.col("_upto") >= _rank(share), F.col("bucket"))) + 0.5).alias(name)
        for name, share in shares.items()
    ]
    if maximum:
        wanted.append(_milliseconds(F.max("bucket") + 1).alias(maximum))
    return ranked.groupBy(*by).agg(F.sum("n").alias("n"), *wanted)


def _rank(share: float) -> Column:
    """The least number of values that is this share of all; rounded as 0.07 * 100 is a little over 7 in binary."""
    return F.ceil(F.round(F.col("_all") * F.lit(share), 6))


def _milliseconds(exponent: Column) -> Column:
    return F.round(F.pow(F.lit(BASE), exponent), 6)
