"""
Compares the daemon's counters and the ledgers of its stores with the lines of the log.

A `counters` line has the counters after all lines of the same start with a lower seq. Between two such lines a
counter must have grown by the number of lines that it counts; a day lasts from the last `counters` line before it to
its own last one. Only seq matters, not the clock. Lost lines cause a difference too; the missing seq explain it.

A `ledger` line has the outcome of all messages that a store ever accepted. Between two of them each entry must have
grown by the number of lines of that kind plus probe messages, which have no lines but are counted in `ledger` lines.
A day lasts from the last ledger of the two hours before it, else from its own first, to its own last one, by the
clock: what happens between a commit and its line at that moment is attributed to the other day.

All nodes that report a store share it. What an operator removes is logged by a node with its own name,
`NODE-operator`: it belongs to the store of the node NODE, or of its workers `NODE-1` and so on.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from typing import TYPE_CHECKING

from pyspark.sql import functions as F

from analytics.job import Job, Span
from analytics.jobs.column_functions import SECOND_MICROS, get_event_micros, include_time_before
from analytics.schema import OPERATOR_NODE_SUFFIX, TABLES
from analytics.settings import Settings

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, Row

# Field of the event to metric of the daemon.
COUNTER_METRICS = {
    "forwarded": "mediator_messages_forwarded_total",
    "stored": "mediator_messages_stored_total",
    "delivered": "mediator_messages_delivered_total",
    "expired": "mediator_messages_expired_total",
    "evicted": "mediator_messages_evicted_total",
    "requests_accepted": 'mediator_requests_total{outcome="accepted"}',
    "requests_rejected": 'mediator_requests_total{outcome="rejected"}',
    "requests_failed": 'mediator_requests_total{outcome="failed"}',
    "connections": "mediator_active_connections",
}
# Longest silence of a start, in days without logs.
COUNTER_HISTORY_DAYS = 7
# Counters are logged every minute: lines after the last ones belong to the last minutes of a day.
_COUNTERS_LOOK_BACK = timedelta(hours=2)

BootKey = tuple[str, str]


@dataclass(frozen=True, slots=True)
class _CounterSnapshot:
    """Values of one `counters` line, and its seq; None for missing values."""

    seq: int
    values: tuple[int | None, ...]


def _make_snapshot(line: Row) -> _CounterSnapshot:
    return _CounterSnapshot(line.seq, tuple(line[name] for name in COUNTER_METRICS))


def _get_snapshot_seq(mark: _CounterSnapshot) -> int:
    return mark.seq


@dataclass(frozen=True, slots=True)
class _CounterInterval:
    """Lines of one start on one day, with a seq between two snapshots."""

    day: date
    boot: BootKey
    begin: _CounterSnapshot
    end: _CounterSnapshot


@dataclass(frozen=True, slots=True)
class _CounterHistory:
    """
    Summary of `counters` and a few other lines, by start and day.

    :param marks: last snapshot of each day, and before the span.
    :param earliest: where to begin: 0 if the first line was seen, also on the day before the span.
    :param starts: day and time (microseconds) of each start, as far as seen.
    :param stopped: day on which a start ended normally.
    """

    marks: Mapping[BootKey, Mapping[date, _CounterSnapshot]]
    earliest: Mapping[BootKey, _CounterSnapshot]
    starts: Mapping[BootKey, tuple[date, int]]
    stopped: Mapping[BootKey, date]


def reconcile_counters(tables: Mapping[str, DataFrame], settings: Settings, span: Span) -> dict[str, DataFrame]:
    """`reconciliation_daily` and `counters`."""
    events, carried = tables["events"], tables["counters"]
    known = _load_counter_history(events, carried, span)
    return {
        "reconciliation_daily": _compare_counters(events, list(_make_intervals(known, span)), span),
        "counters": _make_frame(carried, "counters", _make_counter_rows(known, span)),
    }


def _load_counter_history(events: DataFrame, carried: DataFrame, span: Span) -> _CounterHistory:
    marks = _load_previous_counters(carried, span)
    starts = {boot: (date.min, 0) for boot in marks}
    stopped: dict[BootKey, date] = {}
    earliest = {boot: mark for boot, before in marks.items() for mark in before.values()}
    whole = set()
    for row in _summarize_boots(events, span).collect():
        boot = row.node, row.boot
        if row.whole:
            whole.add(boot)
        if row.dt < span.first:
            continue
        if row.mark is not None:
            marks.setdefault(boot, {})[row.dt] = _make_snapshot(row.mark)
            earliest[boot] = min(
                earliest.get(boot, _make_snapshot(row.earliest)), _make_snapshot(row.earliest), key=_get_snapshot_seq
            )
        starts[boot] = min(starts.get(boot, (row.dt, row.first)), (row.dt, row.first))
        if row.stopped:
            stopped[boot] = min(stopped.get(boot, row.dt), row.dt)
    earliest |= {boot: _CounterSnapshot(0, (0,) * len(COUNTER_METRICS)) for boot in whole}
    return _CounterHistory(marks, earliest, starts, stopped)


def _load_previous_counters(carried: DataFrame, span: Span) -> dict[BootKey, dict[date, _CounterSnapshot]]:
    """Last counters before the span."""
    found: dict[tuple[date, BootKey, int], dict[str, int]] = defaultdict(dict)
    for row in carried.where(F.col("dt") < F.lit(span.first)).collect():
        found[row.dt, (row.node, row.boot), row.seq][row.counter] = row.value
    last = max((day for day, _, _ in found), default=None)
    return {
        boot: {day: _CounterSnapshot(seq, tuple(values.get(metric) for metric in COUNTER_METRICS.values()))}
        for (day, boot, seq), values in found.items()
        if day == last
    }


def _summarize_boots(events: DataFrame, span: Span) -> DataFrame:
    """By start and day: last counters, time of its first line, and whether it began or ended."""
    event, counters = F.col("event"), F.col("event") == "counters"
    few = counters | event.isin("proc.start", "proc.stop") | (F.col("seq") == 1)
    return (
        events.where((F.col("dt") >= F.lit(span.widen(before=1).first)) & few & F.col("boot").isNotNull())
        .groupBy("dt", F.coalesce("node", F.lit("")).alias("node"), "boot")
        .agg(
            F.max(F.when(counters, F.struct("seq", *COUNTER_METRICS))).alias("mark"),
            F.min(F.when(counters, F.struct("seq", *COUNTER_METRICS))).alias("earliest"),
            F.min(get_event_micros(events)).alias("first"),
            F.max(event == "proc.stop").alias("stopped"),
            F.max(F.col("seq") == 1).alias("whole"),
        )
    )


def _make_intervals(known: _CounterHistory, span: Span) -> Iterator[_CounterInterval]:
    """Intervals of each start and day with counters."""
    for boot, marks in sorted(known.marks.items()):
        begin = known.earliest[boot]
        for day, mark in sorted(marks.items()):
            if day in span and mark.seq > begin.seq:
                yield _CounterInterval(day, boot, begin, mark)
            # Clocks may step back over midnight; seq does not.
            begin = max(begin, mark, key=_get_snapshot_seq)


def _make_counter_rows(known: _CounterHistory, span: Span) -> Iterator[tuple[object, ...]]:
    """
    Rows of `counters`: at the end of each day, for each node, the last ones of its latest start if that goes on.
    """
    for day in span.days:
        latest: dict[str, BootKey] = {}
        for boot, first in sorted(known.starts.items(), key=lambda item: (item[1], item[0])):
            if first[0] <= day:
                latest[boot[0]] = boot
        for boot in sorted(latest.values()):
            past = [mark for at, mark in known.marks.get(boot, {}).items() if at <= day]
            if past and not (boot in known.stopped and known.stopped[boot] <= day):
                mark = max(past, key=_get_snapshot_seq)
                for name, value in zip(COUNTER_METRICS.values(), mark.values, strict=True):
                    if value is not None:
                        yield (day, *boot, mark.seq, name, value)


def _compare_counters(events: DataFrame, stretches: Sequence[_CounterInterval], span: Span) -> DataFrame:
    """`reconciliation_daily`."""
    bounds = events.sparkSession.createDataFrame(
        [(one.day, *one.boot, one.begin.seq, one.end.seq) for one in stretches],
        "dt date, node string, boot string, begin bigint, end bigint",
    )
    growth = events.sparkSession.createDataFrame(
        list(_sum_counter_growth(stretches)), "dt date, node string, counter string, counted bigint"
    )
    lines = _count_logged_lines(events, bounds, span)
    return (
        growth.join(F.broadcast(lines), ["dt", "node", "counter"], "left")
        .withColumn("logged", F.coalesce("logged", F.lit(0)))
        .withColumn("difference", F.col("counted") - F.col("logged"))
    )


def _sum_counter_growth(stretches: Iterable[_CounterInterval]) -> Iterator[tuple[object, ...]]:
    """Growth of the counters of each node and day."""
    sums: dict[tuple[date, str, str], int] = defaultdict(int)
    for one in stretches:
        for name, before, after in zip(COUNTER_METRICS.values(), one.begin.values, one.end.values, strict=True):
            if before is not None and after is not None:
                sums[one.day, one.boot[0], name] += after - before
    return ((*key, value) for key, value in sorted(sums.items()))


def _count_logged_lines(events: DataFrame, bounds: DataFrame, span: Span) -> DataFrame:
    """Logged lines by counter: dt, node, counter, logged."""
    event = F.col("event")
    counted = event.startswith("msg.") | event.isin("req.done", "conn.open", "conn.close")
    lines = (
        include_time_before(events, span, _COUNTERS_LOOK_BACK)
        .where(counted)
        .select(
            F.coalesce("node", F.lit("")).alias("node"),
            "boot",
            "seq",
            *(m.alias(n) for n, m in _make_counter_columns().items()),
        )
    )
    sums = (
        lines.join(F.broadcast(bounds), ["node", "boot"])
        .where((F.col("seq") > F.col("begin")) & (F.col("seq") < F.col("end")))
        .groupBy("dt", "node")
        .agg(*(F.sum(name).alias(name) for name in COUNTER_METRICS))
    )
    return sums.unpivot(["dt", "node"], list(COUNTER_METRICS), "field", "logged").select(
        "dt", "node", _get_metric_name().alias("counter"), "logged"
    )


def _get_metric_name() -> Column:
    return F.coalesce(*(F.when(F.col("field") == name, F.lit(metric)) for name, metric in COUNTER_METRICS.items()))


def _make_counter_columns() -> dict[str, Column]:
    """Increment of each counter by each line."""
    event = F.col("event")
    fell_back = (event == "msg.push") & ~F.coalesce("ok", F.lit(True))
    queued = (event == "msg.accept") & (F.coalesce("method", F.lit("")) == "queue")
    request, failed, refused = event == "req.done", F.col("status") >= 500, F.col("code").isNotNull()
    failed = F.coalesce(failed, F.lit(False))
    cases = {
        "forwarded": event == "msg.accept",
        "stored": fell_back | queued,
        "delivered": event == "msg.ack",
        "expired": event == "msg.expire",
        "evicted": event == "msg.evict",
        "requests_accepted": request & ~failed & ~refused,
        "requests_rejected": request & ~failed & refused,
        "requests_failed": request & failed,
    }
    counted = {name: case.cast("int") for name, case in cases.items()}
    return counted | {"connections": (event == "conn.open").cast("int") - (event == "conn.close").cast("int")}


def _make_frame(like: DataFrame, table: str, rows: Iterable[tuple[object, ...]]) -> DataFrame:
    return like.sparkSession.createDataFrame(list(rows), TABLES[table].struct())


RECONCILIATION_JOB = Job(
    "reconciliation",
    reads=("events",),
    writes=("reconciliation_daily", "counters"),
    transform=reconcile_counters,
    history_days={"events": 1, "counters": COUNTER_HISTORY_DAYS},
)


# Ledger entry to event.
ENTRY_EVENTS = {
    "accepted": "msg.accept",
    "acknowledged": "msg.ack",
    "expired": "msg.expire",
    "evicted": "msg.evict",
    "removed": "msg.remove",
}
_PROBE_ENTRIES = ("accepted", "acknowledged", "expired", "evicted")
_DIFFERENCE_ENTRY = "difference"
STORE_ENTRIES = (*ENTRY_EVENTS, "withdrawn", "waiting", _DIFFERENCE_ENTRY)
_OPERATOR_SUFFIX, _WORKER_SUFFIX = f"{OPERATOR_NODE_SUFFIX}$", r"-\d+$"
_LEDGER_LOOK_BACK = timedelta(hours=2)
_LEDGER_LOOK_BACK_MICROS = int(_LEDGER_LOOK_BACK.total_seconds()) * SECOND_MICROS
_STORE_KEY = ("dt", "store", "proto")


def reconcile_stores(tables: Mapping[str, DataFrame], settings: Settings, span: Span) -> dict[str, DataFrame]:
    """`stores_daily`."""
    events = include_time_before(tables["events"], span, _LEDGER_LOOK_BACK)
    ledger_lines = _select_ledger_lines(events)
    bounds = _find_ledger_bounds(ledger_lines, span)
    counted = _select_within_bounds(_select_store_lines(events, ledger_lines), bounds).unionByName(
        _select_within_bounds(_count_probe_messages(ledger_lines), bounds)
    )
    sums = counted.groupBy(*_STORE_KEY, "entry").agg(F.sum("logged").alias("logged"), F.sum("own").alias("own"))
    return {"stores_daily": _compare_store_entries(bounds, sums)}


def _select_ledger_lines(events: DataFrame) -> DataFrame:
    """The `ledger` lines."""
    lines = events.where((F.col("event") == "ledger") & F.col("store").isNotNull() & F.col("proto").isNotNull())
    totals = (
        *(
            F.col(name if name in ("waiting", _DIFFERENCE_ENTRY) else f"all_{name}").alias(name)
            for name in STORE_ENTRIES
        ),
    )
    own = (f"own_{name}" for name in _PROBE_ENTRIES)
    return lines.select(
        *_STORE_KEY,
        _make_node_column(),
        "boot",
        get_event_micros(events).alias("at"),
        F.struct(*totals).alias("books"),
        *own,
    )


def _make_node_column() -> Column:
    return F.coalesce("node", F.lit("")).alias("node")


def _find_ledger_bounds(ledger_lines: DataFrame, span: Span) -> DataFrame:
    """By day, store and protocol: the last ledger, the one to compare it with, and the times of both."""
    daily = ledger_lines.groupBy(*_STORE_KEY).agg(
        F.max(F.struct("at", "books")).alias("end"), F.min(F.struct("at", "books")).alias("first")
    )
    before = daily.select(F.date_add("dt", 1).alias("dt"), "store", "proto", F.col("end").alias("before"))
    recent = before.where(
        F.col("before.at") >= F.unix_micros(F.col("dt").cast("timestamp")) - _LEDGER_LOOK_BACK_MICROS
    )
    return (
        daily.where(F.col("dt") >= F.lit(span.first))
        .join(recent, list(_STORE_KEY), "left")
        .select(*_STORE_KEY, "end", F.coalesce("before", "first").alias("begin"))
    )


def _select_store_lines(events: DataFrame, ledger_lines: DataFrame) -> DataFrame:
    """Lines that the ledger should have counted, with their store."""
    entry = F.coalesce(*(F.when(F.col("event") == event, F.lit(entry)) for entry, event in ENTRY_EVENTS.items()))
    lines = events.where(F.col("event").isin(*ENTRY_EVENTS.values()) & F.col("proto").isNotNull()).select(
        "dt", "proto", _make_node_column(), "boot", get_event_micros(events).alias("at"), entry.alias("entry")
    )
    members = ledger_lines.select("node", "boot", "store").distinct()
    names = members.select(
        F.explode(F.array("node", F.regexp_replace("node", _WORKER_SUFFIX, ""))).alias("node"), "store"
    )
    theirs = lines.where(F.col("node").rlike(_OPERATOR_SUFFIX)).withColumn(
        "node", F.regexp_replace("node", _OPERATOR_SUFFIX, "")
    )
    own = lines.join(F.broadcast(members), ["node", "boot"])
    return (
        own.unionByName(theirs.join(F.broadcast(names.distinct()), "node"))
        .drop("node", "boot")
        .withColumns({"logged": F.lit(1), "own": F.lit(0)})
    )


def _count_probe_messages(ledger_lines: DataFrame) -> DataFrame:
    """Probe messages of each process since its line before."""
    each = F.array(
        *(F.struct(F.lit(name).alias("entry"), F.col(f"own_{name}").alias("own")) for name in _PROBE_ENTRIES)
    )
    rows = ledger_lines.select(*_STORE_KEY, "at", F.inline(each)).where(F.col("own").isNotNull())
    return rows.withColumn("logged", F.lit(0))


def _select_within_bounds(lines: DataFrame, bounds: DataFrame) -> DataFrame:
    """Lines after the first ledger of a day and not after the last; late lines may belong to the next day."""
    midnight = F.unix_micros(F.date_add("dt", 1).cast("timestamp"))
    both = F.array(F.col("dt"), F.date_add("dt", 1))
    days = F.when(F.col("at") >= midnight - _LEDGER_LOOK_BACK_MICROS, both).otherwise(F.array(F.col("dt")))
    times = bounds.select(*_STORE_KEY, F.col("begin.at").alias("since"), F.col("end.at").alias("until"))
    return (
        lines.withColumn("dt", F.explode(days))
        .join(F.broadcast(times), list(_STORE_KEY))
        .where((F.col("at") > F.col("since")) & (F.col("at") <= F.col("until")))
        .select(*_STORE_KEY, "entry", F.col("logged").cast("bigint"), F.col("own").cast("bigint"))
    )


def _compare_store_entries(bounds: DataFrame, sums: DataFrame) -> DataFrame:
    """`stores_daily`."""
    each = F.array(*(_make_store_entry(name) for name in STORE_ENTRIES))
    has_lines = F.col("entry").isin(*ENTRY_EVENTS)
    joined = bounds.select(*_STORE_KEY, F.inline(each)).join(sums, [*_STORE_KEY, "entry"], "left")
    counted = {name: F.when(has_lines, F.coalesce(name, F.lit(0))) for name in ("logged", "own")}
    gap = F.col("change") - F.col("unseen") - F.col("logged") - F.col("own")
    return joined.withColumns(counted).withColumn("gap", gap).drop("unseen")


def _make_store_entry(name: str) -> Column:
    """:return: entry, total, change; unseen: part of the change without lines, because the sender was refused."""
    change = F.lit(None).cast("bigint") if name == _DIFFERENCE_ENTRY else _get_entry_growth(name)
    return F.struct(
        F.lit(name).alias("entry"),
        F.col(f"end.books.{name}").alias("total"),
        change.alias("change"),
        (_get_entry_growth("withdrawn") if name == "accepted" else F.lit(0).cast("bigint")).alias("unseen"),
    )


def _get_entry_growth(name: str) -> Column:
    return F.col(f"end.books.{name}") - F.col(f"begin.books.{name}")


STORES_JOB = Job("stores", ("events",), ("stores_daily",), reconcile_stores, history_days={"events": 1})
