"""
Completeness and damage of the logs of a day.

Every start of a node numbers its lines from 1, so missing lines are known exactly: the numbers between the highest of
the days before and the highest of the day that no event has. An event of a later day may have such a number, because
clocks step back, also over midnight. On the first day of a node the first start may begin with any number.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from typing import TYPE_CHECKING

from analytics.job import Job, Span
from analytics.reading.ingest import QUARANTINE_CAUSES, aggregate_seq_mask, make_block_column
from analytics.reading.segments import SEGMENT_REMARKS, SEGMENT_STATES, STEM_PATTERN
from analytics.schema import TABLES, list_known_events
from analytics.settings import Settings
from mediatord.observability.event_schema import SCHEMA_VERSION

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

# Days of silence after which a start is forgotten.
_HISTORY_DAYS = 40

_TOTAL_KINDS = {
    "lines": "lines of the segments of the day",
    "events": "events of the day",
}
_EVENT_KINDS = {
    "misdated": "events more than a day away from the day of their segment; counted on the day of the segment",
    "unknown_event": "events unknown to this version; stored, but counted nowhere else",
    "unknown_version": "events of another schema version, read as if they were of this one",
    "dropped": "lines that the daemon reports as dropped; their sequence numbers are missing too",
}
_BOOT_KINDS = {
    "seq_missing": "sequence numbers without a line: lost, or not collected yet",
    "doubled_left": "events with a sequence number that occurs in segments of another day or run",
    "stepped_back": "minutes that begin with a lower sequence number than the minute before ended with: a clock step",
}
_SEGMENT_KINDS = {
    "unfinished": "incomplete last lines of active segments",
    "doubled": "duplicate lines, omitted",
    "lines_lost": "lines counted by log.close that are not in the segment",
}
FINDING_KINDS: dict[str, str] = {
    **_TOTAL_KINDS,
    **QUARANTINE_CAUSES,
    **_SEGMENT_KINDS,
    **_BOOT_KINDS,
    **_EVENT_KINDS,
    **{f"segments_{state}": meaning for state, meaning in SEGMENT_STATES.items() if state != "closed"},
    **{f"segments_{remark}": meaning for remark, meaning in SEGMENT_REMARKS.items()},
}
"""Meaning of each `kind` in quality_daily. Kinds that do not occur have no row, except for the totals."""

_BOOT_KEY = ("dt", "node", "boot")


def assess_log_quality(tables: Mapping[str, DataFrame], settings: Settings, span: Span) -> Mapping[str, DataFrame]:
    """`boots_daily` and `quality_daily`."""
    marks = _summarize_minutes(tables["events"]).persist()
    inputs = tables["inputs"]
    boots = _make_boots(marks, tables["boots_daily"], inputs).persist()
    kinds = [
        _count_event_kinds(marks),
        _count_boot_kinds(boots),
        _count_segment_kinds(inputs),
        _count_causes(tables["quarantine"]),
    ]
    rows = reduce(_union_by_name, kinds).groupBy("dt", "node", "kind").agg(_sum_column("n"))
    columns = TABLES["boots_daily"].struct().names
    return {"boots_daily": boots.select(*columns), "quality_daily": _select_reported_kinds(rows)}


def _summarize_minutes(events: DataFrame) -> DataFrame:
    """A row for each 64 numbers of each minute, with all that is needed of the events, in one pass."""
    from pyspark.sql import functions as F

    minute = F.date_trunc("minute", "ts").alias("minute")
    return events.groupBy(*_BOOT_KEY, minute, make_block_column().alias("block")).agg(
        F.count(F.lit(1)).alias("n"),
        aggregate_seq_mask().alias("mask"),
        F.min("seq").alias("seq_first"),
        F.max("seq").alias("seq_last"),
        F.max(F.when(F.col("dt") == F.to_date("ts"), F.col("ts"))).alias("last_at"),
        F.max(F.col("event") == "proc.stop").alias("stopped"),
        F.count_if(F.col("dt") != F.to_date("ts")).alias("misdated"),
        F.count_if(~F.col("event").isin(list_known_events())).alias("unknown_event"),
        F.count_if(F.col("v") != SCHEMA_VERSION).alias("unknown_version"),
        F.sum(F.when(F.col("event") == "log.drop", F.col("dropped"))).alias("dropped"),
    )


def _make_boots(marks: DataFrame, history: DataFrame, inputs: DataFrame) -> DataFrame:
    """`boots_daily`, and `distinct`: the count of distinct numbers."""
    from pyspark.sql import functions as F

    blocks = marks.groupBy(*_BOOT_KEY, "block").agg(F.bit_or("mask").alias("mask"), *_make_line_aggregates("minute"))
    days = blocks.groupBy(*_BOOT_KEY).agg(
        F.sum(F.bit_count("mask")).alias("distinct"), *_make_line_aggregates("begin")
    )
    days = _add_previous_seq(days, history)
    rows = days
    for part in (_count_found_numbers(blocks, days), _find_clock_steps(marks), _count_duplicates(inputs)):
        rows = rows.join(part, list(_BOOT_KEY), "left")
    rows = rows.fillna(0, ["found", "doubled"])
    missing = F.greatest("seq_last", "start") - F.col("start") - F.col("found")
    # Detect steps across midnight by the numbers of all earlier days, whose minutes may not be loaded.
    over_midnight = F.when(F.col("low") < F.col("start"), 1).otherwise(0)
    return rows.withColumns({"missing": missing, "stepped_back": F.col("back") + over_midnight})


def _make_line_aggregates(begin: str) -> list[Column]:
    """Aggregates: number of lines, first and last number, and their times."""
    from pyspark.sql import functions as F

    latest = (F.max(name).alias(name) for name in ("seq_last", "last_at", "stopped"))
    return [_sum_column("n"), F.min("seq_first").alias("seq_first"), F.min(begin).alias("begin"), *latest]


def _add_previous_seq(days: DataFrame, history: DataFrame) -> DataFrame:
    """Add `start`: the highest number before those of the day."""
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    before = history.groupBy("node", "boot").agg(F.max("seq_last").alias("seq_before"))
    nodes = history.select("node", F.lit(True).alias("has_books")).distinct()
    earlier = Window.partitionBy("node", "boot").orderBy("dt").rowsBetween(Window.unboundedPreceding, -1)
    # In order of time; starts in the same minute by their numbers.
    order = Window.partitionBy("node").orderBy("dt", "begin", "seq_first", "boot")
    known = F.greatest(F.max("seq_last").over(earlier), F.col("seq_before"))
    is_first = F.col("has_books").isNull() & (F.row_number().over(order) == 1)
    start = F.coalesce(known, F.when(is_first, F.col("seq_first") - 1).otherwise(F.lit(0)))
    return days.join(before, ["node", "boot"], "left").join(nodes, "node", "left").withColumn("start", start)


def _count_found_numbers(blocks: DataFrame, days: DataFrame) -> DataFrame:
    """By start and day: how many numbers from `start` + 1 to `seq_last` occur in events of any day."""
    from pyspark.sql import functions as F

    seen = blocks.groupBy("node", "boot", "block").agg(F.bit_or("mask").alias("mask"))
    first = F.shiftleft("block", 6)
    low = F.greatest(F.col("start") + 1 - first, F.lit(0)).cast("int")
    high = F.least(F.col("seq_last") - first, F.lit(63)).cast("int")
    rows = seen.join(F.broadcast(days.select(*_BOOT_KEY, "start", "seq_last")), ["node", "boot"]).where(low <= high)
    # Mask the bits below, then those above.
    bits = F.call_function("shiftleft", F.call_function("shiftrightunsigned", "mask", low), 63 - high + low)
    return rows.groupBy(*_BOOT_KEY).agg(F.sum(F.bit_count(bits)).alias("found"))


def _find_clock_steps(marks: DataFrame) -> DataFrame:
    """By start and day: number of minutes that go `back`, and `low`, the lowest number of the first minute."""
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    minutes = marks.groupBy(*_BOOT_KEY, "minute").agg(
        F.min("seq_first").alias("low"), F.max("seq_last").alias("high")
    )
    before = F.lag("high").over(Window.partitionBy(*_BOOT_KEY).orderBy("minute"))
    goes_back = minutes.withColumn("goes_back", F.col("low") < before)
    return goes_back.groupBy(*_BOOT_KEY).agg(
        F.count_if("goes_back").alias("back"), F.min_by("low", "minute").alias("low")
    )


def _count_duplicates(inputs: DataFrame) -> DataFrame:
    named = inputs.withColumns({"node": _extract_from_stem(2), "boot": _extract_from_stem(3)})
    return named.groupBy(*_BOOT_KEY).agg(_sum_column("doubled"))


def _count_event_kinds(marks: DataFrame) -> DataFrame:
    sums = {"events": "n", **{kind: kind for kind in _EVENT_KINDS}}
    return _unpivot_kinds(
        marks.groupBy("dt", "node").agg(*(_sum_column(column, kind) for kind, column in sums.items())), sums
    )


def _count_boot_kinds(boots: DataFrame) -> DataFrame:
    from pyspark.sql import functions as F

    left = boots.withColumns({"doubled_left": F.col("n") - F.col("distinct"), "seq_missing": F.col("missing")})
    return _unpivot_kinds(left.groupBy("dt", "node").agg(*(_sum_column(kind) for kind in _BOOT_KINDS)), _BOOT_KINDS)


def _count_segment_kinds(inputs: DataFrame) -> DataFrame:
    from pyspark.sql import functions as F

    lost = F.greatest(F.col("lines_said") - F.col("lines"), F.lit(0))
    named = inputs.withColumns({"node": _extract_from_stem(2), "lines_lost": lost})
    sums = {"lines": None, **_SEGMENT_KINDS}
    counts = _unpivot_kinds(named.groupBy("dt", "node").agg(*(_sum_column(kind) for kind in sums)), sums)
    words = F.split(F.concat_ws(" ", "state", "remarks"), " ")
    states = named.select("dt", "node", F.explode(words).alias("word"), F.lit(1).cast("bigint").alias("n"))
    states = states.where(~F.col("word").isin("", "closed"))
    return counts.unionByName(states.select("dt", "node", F.concat(F.lit("segments_"), "word").alias("kind"), "n"))


def _count_causes(quarantine: DataFrame) -> DataFrame:
    from pyspark.sql import functions as F

    rows = quarantine.groupBy("dt", _extract_from_stem(2).alias("node"), F.col("cause").alias("kind"))
    return rows.agg(F.count(F.lit(1)).alias("n"))


def _unpivot_kinds(frame: DataFrame, kinds: Mapping[str, object]) -> DataFrame:
    return frame.unpivot(["dt", "node"], list(kinds), "kind", "n")


def _select_reported_kinds(rows: DataFrame) -> DataFrame:
    from pyspark.sql import functions as F

    n = F.coalesce("n", F.lit(0).cast("bigint"))
    return rows.select("dt", "node", "kind", n.alias("n")).where(
        (F.col("n") > 0) | F.col("kind").isin(list(_TOTAL_KINDS))
    )


def _extract_from_stem(group: int) -> Column:
    """Extract node (2) or start (3) from the name of a segment; group 1 is the time."""
    from pyspark.sql import functions as F

    return F.regexp_extract("stem", STEM_PATTERN, group)


def _sum_column(column: str, name: str | None = None) -> Column:
    from pyspark.sql import functions as F

    return F.sum(column).alias(name or column)


def _union_by_name(one: DataFrame, other: DataFrame) -> DataFrame:
    return one.unionByName(other)


QUALITY_JOB = Job(
    "quality",
    reads=("events", "inputs", "quarantine"),
    writes=("boots_daily", "quality_daily"),
    transform=assess_log_quality,
    history_days={"boots_daily": _HISTORY_DAYS},
)
