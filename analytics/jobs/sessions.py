"""
Sockets, their durations and close codes, and the number of concurrent ones.

A node has one start at a time: sockets that a start left open are gone when it stops, or when the next one begins.
They count as `unclosed` on that day, the sign of a crash or of lost lines.

Peak concurrency is computed in two levels: within each ten minutes, in parallel, then over the sums of those. It
starts from the sockets open at the end of the day before. Where that is unknown, it starts from the minimum that must
have been open: sockets that closed and are older than the span, and enough for the count never to be negative.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby, pairwise
from typing import TYPE_CHECKING

from pyspark.sql import Window
from pyspark.sql import functions as F

from analytics.job import Job, Span
from analytics.jobs.column_functions import (
    DAY_MICROS,
    SECOND_MICROS,
    compute_percentiles,
    day_to_micros,
    get_event_micros,
    make_bucket_column,
    micros_to_day,
)
from analytics.settings import Settings

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, Row

_TEN_MINUTES = 600 * SECOND_MICROS
_MINUTES_PER_DAY = 1440
# In a storm minute more sockets are opened than this many times the median, and than this number.
_STORM_FACTOR = 10
_STORM_MINIMUM = 100
_SESSION_KEY = ("dt", "node", "proto", "ws_code", "reason")
_SUMMED_COLUMNS = ("n_in", "n_out", "bytes_in", "bytes_out")


def make_sessions(tables: Mapping[str, DataFrame], settings: Settings, span: Span) -> dict[str, DataFrame]:
    """`sessions_daily`, `sockets_daily` and `concurrency_10m`."""
    events = tables["events"].where(F.col("dt") >= F.lit(span.first))
    before = tables["concurrency_10m"].where(F.col("dt") == F.lit(span.widen(before=1).first))
    opening = {row.node: row.n for row in before.groupBy("node").agg(F.max_by("at_end", "at").alias("n")).collect()}
    starts = _summarize_boots(events, span).collect()
    older = Counter[str]()
    for row in starts:
        older[row.node] += 0 if row.began or row.node in opening else row.older
    left = list(_find_unclosed_sockets(starts, {**older, **opening}))
    tens = _compute_concurrency(events, left, opening, older, span).persist()
    return {
        "sessions_daily": _summarize_closed_sockets(events),
        "sockets_daily": _summarize_sockets(events, left, tens),
        "concurrency_10m": tens,
    }


def _make_node_column() -> Column:
    return F.coalesce("node", F.lit("")).alias("node")


def _summarize_closed_sockets(events: DataFrame) -> DataFrame:
    """`sessions_daily`."""
    closed = events.where(F.col("event") == "conn.close").select(
        "dt",
        _make_node_column(),
        F.coalesce("proto", F.lit("")).alias("proto"),
        F.coalesce("ws_code", F.lit(0)).alias("ws_code"),
        F.coalesce("reason", F.lit("")).alias("reason"),
        make_bucket_column(F.col("dur_ms")).alias("bucket"),
        *_SUMMED_COLUMNS,
    )
    counted = closed.groupBy(*_SESSION_KEY, "bucket").agg(
        F.count(F.lit(1)).alias("n"), *(F.sum(name).alias(name) for name in _SUMMED_COLUMNS)
    )
    durations = compute_percentiles(
        counted.where(F.col("bucket").isNotNull()), _SESSION_KEY, {"dur_p50_ms": 0.5, "dur_p95_ms": 0.95}
    ).drop("n")
    totals = counted.groupBy(*_SESSION_KEY).agg(
        F.sum("n").alias("n"), *(F.coalesce(F.sum(name), F.lit(0)).alias(name) for name in _SUMMED_COLUMNS)
    )
    return totals.join(durations, list(_SESSION_KEY), "left")


def _summarize_boots(events: DataFrame, span: Span) -> DataFrame:
    """
    By start of a node: first and last line, sockets left open, whether it stopped, and sockets older than the span
    that closed.
    """
    event, at = F.col("event"), get_event_micros(events)
    opened = at - (F.col("dur_ms") * 1000).cast("bigint")
    few = event.isin("conn.open", "conn.close", "proc.start", "proc.stop") | (F.col("seq") == 1)
    return (
        events.where(few & F.col("boot").isNotNull())
        .groupBy(_make_node_column(), "boot")
        .agg(
            F.min(at).alias("first"),
            F.max(at).alias("last"),
            F.sum(_get_socket_delta()).alias("net"),
            F.count_if((event == "conn.close") & (opened < day_to_micros(span.first))).alias("older"),
            F.max(event == "proc.stop").alias("stopped"),
            F.max((F.col("seq") == 1) | (event == "proc.start")).alias("began"),
        )
    )


def _get_socket_delta() -> Column:
    return F.when(F.col("event") == "conn.open", 1).when(F.col("event") == "conn.close", -1).otherwise(0)


def _find_unclosed_sockets(starts: Iterable[Row], opening: Mapping[str, int]) -> Iterator[tuple[str, int, int]]:
    """
    Sockets left open by starts that ended.

    :param starts: rows of :func:`_summarize_boots`.
    :return: node, when they were gone (microseconds), number.
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


def _compute_concurrency(
    events: DataFrame,
    left: list[tuple[str, int, int]],
    opening: Mapping[str, int],
    older: Mapping[str, int],
    span: Span,
) -> DataFrame:
    """
    `concurrency_10m`, of each node and day with a line about a socket, or an open socket.

    :param opening: node to sockets open before the span, where known.
    :param older: node to the minimum of sockets open then, for other nodes.
    """
    lines = events.where(F.col("event").isin("conn.open", "conn.close")).select(
        _make_node_column(),
        get_event_micros(events).alias("at"),
        "seq",
        _get_socket_delta().cast("bigint").alias("delta"),
    )
    spark = events.sparkSession
    gone = spark.createDataFrame([(node, at, -n) for node, at, n in left], "node string, at bigint, delta bigint")
    levels = [*((node, n, 0) for node, n in opening.items()), *((node, None, n) for node, n in older.items() if n)]
    known = spark.createDataFrame(levels, "node string, opening bigint, older bigint")
    changes = lines.unionByName(gone.withColumn("seq", F.lit(None).cast("bigint")))
    return _compute_levels(_sum_changes(changes), known, span)


def _sum_changes(changes: DataFrame) -> DataFrame:
    """By node and ten minutes: net change, and maximum above the level at their start."""
    changes = changes.withColumn("begin", F.col("at") - F.pmod("at", F.lit(_TEN_MINUTES)))
    # Sockets that end with their start are counted last.
    order = Window.partitionBy("node", "begin").orderBy("at", F.col("seq").asc_nulls_last(), "delta")
    running = F.sum("delta").over(order.rowsBetween(Window.unboundedPreceding, Window.currentRow))
    return (
        changes.withColumn("running", running)
        .groupBy("node", "begin")
        .agg(F.sum("delta").alias("net"), F.max("running").alias("rise"), F.min("running").alias("fall"))
    )


def _compute_levels(buckets: DataFrame, known: DataFrame, span: Span) -> DataFrame:
    """Levels for every ten minutes of a day. Windows cover 144 rows a day per node."""
    first, last = day_to_micros(span.first), day_to_micros(span.last) + DAY_MICROS - _TEN_MINUTES
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
        .withColumn("dt", micros_to_day(F.col("begin")))
        .withColumn("seen", F.max(F.col("net").isNotNull() | (F.col("peak") > 0)).over(day))
        .where("seen")
        .select("dt", "node", F.timestamp_micros("begin").alias("at"), "peak", "at_end")
    )


def _summarize_sockets(events: DataFrame, left: list[tuple[str, int, int]], tens: DataFrame) -> DataFrame:
    """`sockets_daily`."""
    event, key = F.col("event"), ["dt", "node"]
    minutes = (
        events.where(event.isin("conn.open", "conn.auth", "conn.close"))
        .groupBy("dt", _make_node_column(), F.date_trunc("minute", "ts").alias("minute"))
        .agg(
            F.count(F.when(event == "conn.open", 1)).alias("opened"),
            F.count(F.when((event == "conn.auth") & F.col("code").isNull(), 1)).alias("authenticated"),
            F.count(F.when(event == "conn.close", 1)).alias("closed"),
        )
    )
    opened = F.sort_array(F.collect_list(minutes["opened"]))
    # Minutes without a line would be first; they are not in the list.
    middle = F.size(opened) - _MINUTES_PER_DAY // 2
    median = F.when(middle > 0, F.get(opened, middle - 1)).otherwise(0)
    bound = F.greatest(median * _STORM_FACTOR, F.lit(_STORM_MINIMUM))
    counts = minutes.groupBy(*key).agg(
        *(F.sum(name).alias(name) for name in ("opened", "authenticated", "closed")),
        F.size(F.filter(opened, lambda n: n > bound)).cast("bigint").alias("storm_minutes"),
    )
    unclosed = (
        events.sparkSession.createDataFrame(left, "node string, at bigint, n bigint")
        .groupBy(micros_to_day(F.col("at")).alias("dt"), "node")
        .agg(F.sum("n").alias("unclosed"))
    )
    rows = tens.groupBy(*key).agg(F.max("peak").alias("peak"))
    for part in (counts, unclosed):
        rows = rows.join(part, key, "full")
    numbers = ("opened", "authenticated", "closed", "unclosed", "storm_minutes", "peak")
    return rows.select(*key, *(F.coalesce(name, F.lit(0)).alias(name) for name in numbers))


SESSIONS_JOB = Job(
    "sessions",
    reads=("events",),
    writes=("sessions_daily", "concurrency_10m", "sockets_daily"),
    transform=make_sessions,
    history_days={"concurrency_10m": 1},
)
