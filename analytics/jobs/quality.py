"""
J0, second half: how far the logs of a day can be relied on.

Every start of a node numbers its lines from 1, so what is missing is known to the line: the numbers between the
highest one of the days before and the highest one of the day that no event has. As clocks are set back, also at
midnight, an event of a later day may have one of them. Before the first day of a node there are no books: there, the
start that comes first may have begun with any number.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from typing import TYPE_CHECKING

from analytics.doubles import block, mark
from analytics.intake import REMARKS, STATES
from analytics.job import Job, Span
from analytics.parsing import CAUSES
from analytics.schema import known_events
from analytics.segments import STEM
from analytics.settings import Settings
from analytics.tables import TABLES
from mediatord.observability.event_schema import SCHEMA_VERSION

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

# Days after which a start that was silent is no longer remembered.
_HISTORY_DAYS = 40

_TOTALS = {
    "lines": "lines of the segments of the day",
    "events": "events of the day",
}
_OF_EVENTS = {
    "misdated": "events over a day away from the day of their segment; they count on that day",
    "unknown_event": "events unknown to this version; kept, but not counted elsewhere",
    "unknown_version": "events of another schema version, read as if of this one",
    "dropped": "lines that the daemon reports as not written; their numbers are missing too",
}
_OF_STARTS = {
    "seq_missing": "sequence numbers without a line: lost, or not collected yet",
    "doubled_left": "events with the number of another one, in segments of different days or runs",
    "stepped_back": "minutes that begin with a lower number than the one before ended with: the clock went back",
}
_OF_SEGMENTS = {
    "unfinished": "last lines of active segments that have no end yet",
    "doubled": "duplicate lines, left out",
    "lines_lost": "lines counted by log.close that are not in the segment",
}
KINDS: dict[str, str] = {
    **_TOTALS,
    **CAUSES,
    **_OF_SEGMENTS,
    **_OF_STARTS,
    **_OF_EVENTS,
    **{f"segments_{state}": meaning for state, meaning in STATES.items() if state != "closed"},
    **{f"segments_{remark}": meaning for remark, meaning in REMARKS.items()},
}
"""What `kind` in quality_daily says, each in a sentence. Kinds that were not met have no row, but for the totals."""

_BOOT = ("dt", "node", "boot")


def transform(tables: Mapping[str, DataFrame], settings: Settings, span: Span) -> Mapping[str, DataFrame]:
    """Quality of each day of the span."""
    marks = _marks(tables["events"]).persist()
    inputs = tables["inputs"]
    boots = _boots(marks, tables["boots_daily"], inputs).persist()
    kinds = [_event_kinds(marks), _boot_kinds(boots), _segment_kinds(inputs), _causes(tables["quarantine"])]
    rows = reduce(_union, kinds).groupBy("dt", "node", "kind").agg(_sum("n"))
    columns = TABLES["boots_daily"].struct().names
    return {"boots_daily": boots.select(*columns), "quality_daily": _shown(rows)}


def _marks(events: DataFrame) -> DataFrame:
    """A row for each 64 numbers of each minute: all that is wanted of the events, from one look at them."""
    from pyspark.sql import functions as F

    minute = F.date_trunc("minute", "ts").alias("minute")
    return events.groupBy(*_BOOT, minute, block().alias("block")).agg(
        F.count(F.lit(1)).alias("n"),
        mark().alias("mask"),
        F.min("seq").alias("seq_first"),
        F.max("seq").alias("seq_last"),
        F.max(F.when(F.col("dt") == F.to_date("ts"), F.col("ts"))).alias("last_at"),
        F.max(F.col("event") == "proc.stop").alias("stopped"),
        F.count_if(F.col("dt") != F.to_date("ts")).alias("misdated"),
        F.count_if(~F.col("event").isin(known_events())).alias("unknown_event"),
        F.count_if(F.col("v") != SCHEMA_VERSION).alias("unknown_version"),
        F.sum(F.when(F.col("event") == "log.drop", F.col("dropped"))).alias("dropped"),
    )


def _boots(marks: DataFrame, history: DataFrame, inputs: DataFrame) -> DataFrame:
    """`boots_daily`, and `distinct`: numbers that were seen."""
    from pyspark.sql import functions as F

    blocks = marks.groupBy(*_BOOT, "block").agg(F.bit_or("mask").alias("mask"), *_lines("minute"))
    days = blocks.groupBy(*_BOOT).agg(F.sum(F.bit_count("mask")).alias("distinct"), *_lines("begin"))
    days = _with_start(days, history)
    rows = days
    for part in (_found(blocks, days), _minutes(marks), _doubled(inputs)):
        rows = rows.join(part, list(_BOOT), "left")
    rows = rows.fillna(0, ["found", "doubled"])
    missing = F.greatest("seq_last", "start") - F.col("start") - F.col("found")
    # Across midnight by the numbers of all days before, as their minutes may not be at hand.
    over_midnight = F.when(F.col("low") < F.col("start"), 1).otherwise(0)
    return rows.withColumns({"missing": missing, "stepped_back": F.col("back") + over_midnight})


def _lines(begin: str) -> list[Column]:
    """Aggregates: how many lines, their first and last number, and the times of those."""
    from pyspark.sql import functions as F

    latest = (F.max(name).alias(name) for name in ("seq_last", "last_at", "stopped"))
    return [_sum("n"), F.min("seq_first").alias("seq_first"), F.min(begin).alias("begin"), *latest]


def _with_start(days: DataFrame, history: DataFrame) -> DataFrame:
    """With `start`: the highest number before those of the day."""
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    before = history.groupBy("node", "boot").agg(F.max("seq_last").alias("seq_before"))
    nodes = history.select("node", F.lit(True).alias("has_books")).distinct()
    earlier = Window.partitionBy("node", "boot").orderBy("dt").rowsBetween(Window.unboundedPreceding, -1)
    # In order of time; starts of the same minute by their numbers.
    order = Window.partitionBy("node").orderBy("dt", "begin", "seq_first", "boot")
    known = F.greatest(F.max("seq_last").over(earlier), F.col("seq_before"))
    is_first = F.col("has_books").isNull() & (F.row_number().over(order) == 1)
    start = F.coalesce(known, F.when(is_first, F.col("seq_first") - 1).otherwise(F.lit(0)))
    return days.join(before, ["node", "boot"], "left").join(nodes, "node", "left").withColumn("start", start)


def _found(blocks: DataFrame, days: DataFrame) -> DataFrame:
    """By start and day: how many numbers from the one after `start` to `seq_last` any event has, of whatever day."""
    from pyspark.sql import functions as F

    seen = blocks.groupBy("node", "boot", "block").agg(F.bit_or("mask").alias("mask"))
    first = F.shiftleft("block", 6)
    low = F.greatest(F.col("start") + 1 - first, F.lit(0)).cast("int")
    high = F.least(F.col("seq_last") - first, F.lit(63)).cast("int")
    rows = seen.join(F.broadcast(days.select(*_BOOT, "start", "seq_last")), ["node", "boot"]).where(low <= high)
    # Without the bits below, then without those above.
    bits = F.call_function("shiftleft", F.call_function("shiftrightunsigned", "mask", low), 63 - high + low)
    return rows.groupBy(*_BOOT).agg(F.sum(F.bit_count(bits)).alias("found"))


def _minutes(marks: DataFrame) -> DataFrame:
    """By start and day: how many minutes go `back` on the day, and the lowest number of the first one, `low`."""
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    minutes = marks.groupBy(*_BOOT, "minute").agg(F.min("seq_first").alias("low"), F.max("seq_last").alias("high"))
    before = F.lag("high").over(Window.partitionBy(*_BOOT).orderBy("minute"))
    goes_back = minutes.withColumn("goes_back", F.col("low") < before)
    return goes_back.groupBy(*_BOOT).agg(
        F.count_if("goes_back").alias("back"), F.min_by("low", "minute").alias("low")
    )


def _doubled(inputs: DataFrame) -> DataFrame:
    named = inputs.withColumns({"node": _in_stem(2), "boot": _in_stem(3)})
    return named.groupBy(*_BOOT).agg(_sum("doubled"))


def _event_kinds(marks: DataFrame) -> DataFrame:
    sums = {"events": "n", **{kind: kind for kind in _OF_EVENTS}}
    return _melted(marks.groupBy("dt", "node").agg(*(_sum(column, kind) for kind, column in sums.items())), sums)


def _boot_kinds(boots: DataFrame) -> DataFrame:
    from pyspark.sql import functions as F

    left = boots.withColumns({"doubled_left": F.col("n") - F.col("distinct"), "seq_missing": F.col("missing")})
    return _melted(left.groupBy("dt", "node").agg(*(_sum(kind) for kind in _OF_STARTS)), _OF_STARTS)


def _segment_kinds(inputs: DataFrame) -> DataFrame:
    from pyspark.sql import functions as F

    lost = F.greatest(F.col("lines_said") - F.col("lines"), F.lit(0))
    named = inputs.withColumns({"node": _in_stem(2), "lines_lost": lost})
    sums = {"lines": None, **_OF_SEGMENTS}
    counts = _melted(named.groupBy("dt", "node").agg(*(_sum(kind) for kind in sums)), sums)
    words = F.split(F.concat_ws(" ", "state", "remarks"), " ")
    states = named.select("dt", "node", F.explode(words).alias("word"), F.lit(1).cast("bigint").alias("n"))
    states = states.where(~F.col("word").isin("", "closed"))
    return counts.unionByName(states.select("dt", "node", F.concat(F.lit("segments_"), "word").alias("kind"), "n"))


def _causes(quarantine: DataFrame) -> DataFrame:
    from pyspark.sql import functions as F

    rows = quarantine.groupBy("dt", _in_stem(2).alias("node"), F.col("cause").alias("kind"))
    return rows.agg(F.count(F.lit(1)).alias("n"))


def _melted(frame: DataFrame, kinds: Mapping[str, object]) -> DataFrame:
    return frame.unpivot(["dt", "node"], list(kinds), "kind", "n")


def _shown(rows: DataFrame) -> DataFrame:
    from pyspark.sql import functions as F

    n = F.coalesce("n", F.lit(0).cast("bigint"))
    return rows.select("dt", "node", "kind", n.alias("n")).where((F.col("n") > 0) | F.col("kind").isin(list(_TOTALS)))


def _in_stem(group: int) -> Column:
    """Node (2) or start (3) by the name of a segment; group 1 is the time."""
    from pyspark.sql import functions as F

    return F.regexp_extract("stem", STEM, group)


def _sum(column: str, name: str | None = None) -> Column:
    from pyspark.sql import functions as F

    return F.sum(column).alias(name or column)


def _union(one: DataFrame, other: DataFrame) -> DataFrame:
    return one.unionByName(other)


JOB = Job(
    "quality",
    reads=("events", "inputs", "quarantine"),
    makes=("boots_daily", "quality_daily"),
    transform=transform,
    recalls={"boots_daily": _HISTORY_DAYS},
)
