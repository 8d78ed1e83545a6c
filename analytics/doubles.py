"""
Events that are there twice: a segment under two names, a line written twice.

Every start of a node numbers its lines, so (node, boot, seq) says which line it is. To know all of them is a shuffle
of all events; so 64 numbers at a time are marked in the bits of one, and only blocks with more events than marks are
looked at more closely.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

_BLOCK = ("batch", "node", "boot", "block")


def block() -> Column:
    """Which 64 numbers a `seq` is of."""
    from pyspark.sql import functions as F

    return F.shiftright("seq", 6)


def mark() -> Column:
    """Aggregate: the bits of every `seq` of a block."""
    from pyspark.sql import functions as F

    one = F.lit(1).cast("bigint")
    return F.bit_or(F.call_function("shiftleft", one, F.col("seq").bitwiseAND(63).cast("int")))


def marks(events: DataFrame) -> DataFrame:
    """Of each `batch`, `stem`, `node`, `boot` and `block`: how many, which, and what its log.close says."""
    from pyspark.sql import functions as F

    close = F.col("event") == "log.close"
    return events.groupBy("batch", "stem", "node", "boot", block().alias("block")).agg(
        F.count(F.lit(1)).alias("n"),
        mark().alias("mask"),
        F.min("seq").alias("seq_first"),
        F.max("seq").alias("seq_last"),
        F.max(F.when(close, F.col("lines"))).alias("lines_said"),
        F.max(close).alias("closed"),
    )


def doubled(marks: DataFrame) -> DataFrame:
    """Blocks, `batch`, `node`, `boot` and `block`, that have a number more than once."""
    from pyspark.sql import functions as F

    blocks = marks.groupBy(*_BLOCK).agg(F.sum("n").alias("n"), F.bit_or("mask").alias("mask"))
    return blocks.where(F.col("n") > F.bit_count("mask")).select(*_BLOCK)


def told_apart(events: DataFrame, blocks: DataFrame) -> DataFrame:
    """The events of these blocks, with `again`: whether another one, of a lower stem or earlier, has the number."""
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    content = [name for name in events.columns if name not in ("batch", "stem", "ts")]
    order = Window.partitionBy("batch", "node", "boot", "seq").orderBy("stem", "ts", F.xxhash64(*content))
    rows = _keyed(events).join(F.broadcast(blocks), list(_BLOCK), "semi").drop("block")
    return rows.withColumn("again", F.row_number().over(order) > 1)


def untouched(events: DataFrame, blocks: DataFrame) -> DataFrame:
    """All other events."""
    from pyspark.sql import functions as F

    return _keyed(events).join(F.broadcast(blocks), list(_BLOCK), "anti").drop("block")


def _keyed(events: DataFrame) -> DataFrame:
    return events.withColumn("block", block())
