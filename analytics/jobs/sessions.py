"""
J10: sockets, how they ended, and how many were open at a time.

A node has one start at a time: the sockets that an earlier one did not close are gone once the next begins, or once
it has stopped. They count as `unclosed` on that day: a crash, or lost lines.

The most open at a time is found in two levels: within each ten minutes, where many hands can work, then over the few
sums of those. It begins with what was open at the end of the day before; where nobody knows, with as many as must
have been open for those that closed: by how long they were open, and as there are never fewer than none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby, pairwise
from typing import TYPE_CHECKING

from pyspark.sql import Window
from pyspark.sql import functions as F

from analytics.histogram import bucket, percentiles
from analytics.job import Job, Span
from analytics.settings import Settings
from analytics.times import DAY, SECOND, day_of, happened, micros

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, Row

_TEN_MINUTES = 600 * SECOND
_MINUTES_A_DAY = 1440
# A minute is a storm if it opened over so many times the median, and over so many.
_STORM_TIMES = 10
_STORM_LEAST = 100
_KEY = ("dt", "node", "proto", "ws_code", "reason")
_SUMS = ("n_in", "n_out", "bytes_in", "bytes_out")


def sessions(tables: Mapping[str, DataFrame], settings: Settings, span: Span) -> dict[str, DataFrame]:
    """`sessions_daily`, `sockets_daily` and `concurrency_10m`."""
    events = tables["events"].where(F.col("dt") >= F.lit(span.first))
    before = tables["concurrency_10m"].where(F.col("dt") == F.lit(span.widened(before=1).first))
    opening = {row.node: row.n for row in before.groupBy("node").agg(F.max_by("at_end", "at").alias("n")).collect()}
    starts = _starts(events, span).collect()
    older = Counter[str]()
    for row in starts:
        older[row.node] += 0 if row.began or row.node in opening else row.older
    left = list(_left_open(starts, {**older, **opening}))
    tens = _concurrency(events, left, opening, older, span).persist()
    return {
        "sessions_daily": _ended(events),
        "sockets_daily": _sockets(events, left, tens),
        "concurrency_10m": tens,
    }


def _node() -> Column:
    return F.coalesce("node", F.lit("")).alias("node")


def _ended(events: DataFrame) -> DataFrame:
    """`sessions_daily`."""
    closed = events.where(F.col("event") == "conn.close").select(
        "dt",
        _node(),
        F.coalesce("proto", F.lit("")).alias("proto"),
        F.coalesce("ws_code", F.lit(0)).alias("ws_code"),
        F.coalesce("reason", F.lit("")).alias("reason"),
        bucket(F.col("dur_ms")).alias("bucket"),
        *_SUMS,
    )
    counted = closed.groupBy(*_KEY, "bucket").agg(
        F.count(F.lit(1)).alias("n"), *(F.sum(name).alias(name) for name in _SUMS)
    )
    durations = percentiles(
        counted.where(F.col("bucket").isNotNull()), _KEY, {"dur_p50_ms": 0.5, "dur_p95_ms": 0.95}
    ).drop("n")
    totals = counted.groupBy(*_KEY).agg(
        F.sum("n").alias("n"), *(F.coalesce(F.sum(name), F.lit(0)).alias(name) for name in _SUMS)
    )
    return totals.join(durations, list(_KEY), "left")


def _starts(events: DataFrame, span: Span) -> DataFrame:
    """
    A row for each start of a node: when it was first and last heard of, what it left open, whether it stopped, how
    many sockets closed that are older than the span.
    """
    event, at = F.col("event"), happened(events)
    opened = at - (F.col("dur_ms") * 1000).cast("bigint")
    few = event.isin("conn.open", "conn.close", "proc.start", "proc.stop") | (F.col("seq") == 1)
    return (
        events.where(few & F.col("boot").isNotNull())
        .groupBy(_node(), "boot")
        .agg(
            F.min(at).alias("first"),
            F.max(at).alias("last"),
            F.sum(_delta()).alias("net"),
            F.count_if((event == "conn.close") & (opened < micros(span.first))).alias("older"),
            F.max(event == "proc.stop").alias("stopped"),
            F.max((F.col("seq") == 1) | (event == "proc.start")).alias("began"),
        )
    )


def _delta() -> Column:
    return F.when(F.col("event") == "conn.open", 1).when(F.col("event") == "conn.close", -1).otherwise(0)


def _left_open(starts: Iterable[Row], opening: Mapping[str, int]) -> Iterator[tuple[str, int, int]]:
    """
    What starts that ended had left open.

    :param starts: as of :func:`_starts`.
    :return: node, when they were gone (microseconds), how many.
    """
    for node, own in groupby(sorted(starts, key=lambda row: (row.node, row.first, row.boot)), lambda row: row.node):
        rows = list(own)
        carried = opening.get(node, 0)
        if rows[0].began and carried > 0:
            yield node, rows[0].first, carried
            carried = 0
        for row, after in pairwise([*rows, None]):
            assert row is not None
            net, carried = row.net + carried, 0
            ended = row.last if row.stopped else after.first if after else None
            if net > 0 and ended is not None:
                yield node, ended, net


def _concurrency(
    events: DataFrame,
    left: list[tuple[str, int, int]],
    opening: Mapping[str, int],
    older: Mapping[str, int],
    span: Span,
) -> DataFrame:
    """
    `concurrency_10m`: of each node and day with a line about a socket, or with an open one.

    :param opening: node to sockets that were open before the span, of those nodes of which that is known.
    :param older: node to sockets that were open then at least, of the others.
    """
    lines = events.where(F.col("event").isin("conn.open", "conn.close")).select(
        _node(), happened(events).alias("at"), "seq", _delta().cast("bigint").alias("delta")
    )
    spark = events.sparkSession
    gone = spark.createDataFrame([(node, at, -n) for node, at, n in left], "node string, at bigint, delta bigint")
    levels = [*((node, n, 0) for node, n in opening.items()), *((node, None, n) for node, n in older.items() if n)]
    known = spark.createDataFrame(levels, "node string, opening bigint, older bigint")
    changes = lines.unionByName(gone.withColumn("seq", F.lit(None).cast("bigint")))
    return _levels(_buckets(changes), known, span)


def _buckets(changes: DataFrame) -> DataFrame:
    """For each node and ten minutes: net change, and the highest over what was open at their beginning."""
    changes = changes.withColumn("begin", F.col("at") - F.pmod("at", F.lit(_TEN_MINUTES)))
    # What is gone with its start goes last.
    order = Window.partitionBy("node", "begin").orderBy("at", F.col("seq").asc_nulls_last(), "delta")
    running = F.sum("delta").over(order.rowsBetween(Window.unboundedPreceding, Window.currentRow))
    return (
        changes.withColumn("running", running)
        .groupBy("node", "begin")
        .agg(F.sum("delta").alias("net"), F.max("running").alias("rise"), F.min("running").alias("fall"))
    )


def _levels(buckets: DataFrame, known: DataFrame, span: Span) -> DataFrame:
    """Every ten minutes of a day; from changes to levels. Windows over 144 rows a day for each node."""
    first, last = micros(span.first), micros(span.last) + DAY - _TEN_MINUTES
    every = F.explode(F.sequence(F.lit(first), F.lit(last), F.lit(_TEN_MINUTES)))
    nodes = buckets.select("node").union(known.where("opening > 0").select("node")).distinct()
    grid = nodes.select("node", every.alias("begin")).join(buckets, ["node", "begin"], "left")
    upto = Window.partitionBy("node").orderBy("begin").rowsBetween(Window.unboundedPreceding, Window.currentRow)
    node, day = Window.partitionBy("node"), Window.partitionBy("node", "dt")
    change, net = F.sum(F.coalesce("net", F.lit(0))).over(upto), F.coalesce("net", F.lit(0))
    lowest = F.min(F.col("before") + F.coalesce("fall", F.lit(0))).over(node)
    start = F.coalesce("opening", F.greatest(-F.col("lowest"), "older", F.lit(0)))
    return (
        grid.withColumn("before", change - net)
        .withColumn("lowest", lowest)
        .join(F.broadcast(known), "node", "left")
        .withColumn("start", start + F.col("before"))
        .withColumn("peak", F.greatest(F.col("start") + F.greatest("rise", F.lit(0)), F.lit(0)))
        .withColumn("at_end", F.greatest(F.col("start") + net, F.lit(0)))
        .withColumn("dt", day_of(F.col("begin")))
        .withColumn("seen", F.max(F.col("net").isNotNull() | (F.col("peak") > 0)).over(day))
        .where("seen")
        .select("dt", "node", F.timestamp_micros("begin").alias("at"), "peak", "at_end")
    )


def _sockets(events: DataFrame, left: list[tuple[str, int, int]], tens: DataFrame) -> DataFrame:
    """`sockets_daily`."""
    event, key = F.col("event"), ["dt", "node"]
    minutes = (
        events.where(event.isin("conn.open", "conn.auth", "conn.close"))
        .groupBy("dt", _node(), F.date_trunc("minute", "ts").alias("minute"))
        .agg(
            F.count(F.when(event == "conn.open", 1)).alias("opened"),
            F.count(F.when((event == "conn.auth") & F.col("code").isNull(), 1)).alias("authenticated"),
            F.count(F.when(event == "conn.close", 1)).alias("closed"),
        )
    )
    opened = F.sort_array(F.collect_list(minutes["opened"]))
    # The minutes without a line come first, and are not in the list.
    middle = F.size(opened) - _MINUTES_A_DAY // 2
    median = F.when(middle > 0, F.get(opened, middle - 1)).otherwise(0)
    bound = F.greatest(median * _STORM_TIMES, F.lit(_STORM_LEAST))
    counts = minutes.groupBy(*key).agg(
        *(F.sum(name).alias(name) for name in ("opened", "authenticated", "closed")),
        F.size(F.filter(opened, lambda n: n > bound)).cast("bigint").alias("storm_minutes"),
    )
    unclosed = (
        events.sparkSession.createDataFrame(left, "node string, at bigint, n bigint")
        .groupBy(day_of(F.col("at")).alias("dt"), "node")
        .agg(F.sum("n").alias("unclosed"))
    )
    rows = tens.groupBy(*key).agg(F.max("peak").alias("peak"))
    for part in (counts, unclosed):
        rows = rows.join(part, key, "full")
    numbers = ("opened", "authenticated", "closed", "unclosed", "storm_minutes", "peak")
    return rows.select(*key, *(F.coalesce(name, F.lit(0)).alias(name) for name in numbers))


JOB = Job(
    "sessions",
    reads=("events",),
    makes=("sessions_daily", "concurrency_10m", "sockets_daily"),
    transform=sessions,
    recalls={"concurrency_10m": 1},
)
