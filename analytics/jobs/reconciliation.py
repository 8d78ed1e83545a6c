"""
The daemon's own counters against its log lines.

A `counters` line says what the counters were after all lines of the same start with a lower seq. Between two of them
a counter must have grown by as many as there are lines that it counts; a day goes from the last such line before it
to its own last one. The clock plays no part, only seq. Lines that were lost make a difference too: it is shown all
the same, and the missing seq beside it say why.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from typing import TYPE_CHECKING

from pyspark.sql import functions as F

from analytics.job import Job, Span
from analytics.settings import Settings
from analytics.tables import TABLES
from analytics.times import happened, with_tail

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, Row

# Field of the event to metric of the daemon.
COUNTERS = {
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
# Days without any log that a start may be silent for.
REMEMBERED_DAYS = 7
# Counters are written each minute: lines after the last ones of a day are of its last minutes.
_TAIL = timedelta(hours=2)

Boot = tuple[str, str]


@dataclass(frozen=True, slots=True)
class _Mark:
    """One `counters` line: its seq and the values, None where it has none."""

    seq: int
    values: tuple[int | None, ...]


def _mark(line: Row) -> _Mark:
    return _Mark(line.seq, tuple(line[name] for name in COUNTERS))


def _seq(mark: _Mark) -> int:
    return mark.seq


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Lines of one start on one day: those with a seq between those of two marks."""

    day: date
    boot: Boot
    begin: _Mark
    end: _Mark


@dataclass(frozen=True, slots=True)
class _Known:
    """
    What the `counters` and a few other lines say, a row for each start and day.

    :param marks: the last ones of each day, and before the span.
    :param earliest: what to begin with: zero if the first line was seen, on the day before the span too.
    :param began: the day of each start, and when on it in microseconds, as far as seen.
    :param stopped: the day that a start ended on in order.
    """

    marks: Mapping[Boot, Mapping[date, _Mark]]
    earliest: Mapping[Boot, _Mark]
    began: Mapping[Boot, tuple[date, int]]
    stopped: Mapping[Boot, date]


def reconciliation(tables: Mapping[str, DataFrame], settings: Settings, span: Span) -> dict[str, DataFrame]:
    """`reconciliation_daily` and `counters`."""
    events, carried = tables["events"], tables["counters"]
    known = _known(events, carried, span)
    return {
        "reconciliation_daily": _compared(events, list(_stretches(known, span)), span),
        "counters": _frame(carried, "counters", _carried_on(known, span)),
    }


def _known(events: DataFrame, carried: DataFrame, span: Span) -> _Known:
    marks = _before(carried, span)
    began = {boot: (date.min, 0) for boot in marks}
    stopped: dict[Boot, date] = {}
    earliest = {boot: mark for boot, before in marks.items() for mark in before.values()}
    whole = set()
    for row in _signs(events, span).collect():
        boot = row.node, row.boot
        if row.whole:
            whole.add(boot)
        if row.dt < span.first:
            continue
        if row.mark is not None:
            marks.setdefault(boot, {})[row.dt] = _mark(row.mark)
            earliest[boot] = min(earliest.get(boot, _mark(row.earliest)), _mark(row.earliest), key=_seq)
        began[boot] = min(began.get(boot, (row.dt, row.first)), (row.dt, row.first))
        if row.stopped:
            stopped[boot] = min(stopped.get(boot, row.dt), row.dt)
    earliest |= {boot: _Mark(0, (0,) * len(COUNTERS)) for boot in whole}
    return _Known(marks, earliest, began, stopped)


def _before(carried: DataFrame, span: Span) -> dict[Boot, dict[date, _Mark]]:
    """The last counters before the span."""
    found: dict[tuple[date, Boot, int], dict[str, int]] = defaultdict(dict)
    for row in carried.where(F.col("dt") < F.lit(span.first)).collect():
        found[row.dt, (row.node, row.boot), row.seq][row.counter] = row.value
    last = max((day for day, _, _ in found), default=None)
    return {
        boot: {day: _Mark(seq, tuple(values.get(metric) for metric in COUNTERS.values()))}
        for (day, boot, seq), values in found.items()
        if day == last
    }


def _signs(events: DataFrame, span: Span) -> DataFrame:
    """For each start and day: its last counters, its first line of few kinds, and whether it began or ended."""
    event, counters = F.col("event"), F.col("event") == "counters"
    few = counters | event.isin("proc.start", "proc.stop") | (F.col("seq") == 1)
    return (
        events.where((F.col("dt") >= F.lit(span.widened(before=1).first)) & few & F.col("boot").isNotNull())
        .groupBy("dt", F.coalesce("node", F.lit("")).alias("node"), "boot")
        .agg(
            F.max(F.when(counters, F.struct("seq", *COUNTERS))).alias("mark"),
            F.min(F.when(counters, F.struct("seq", *COUNTERS))).alias("earliest"),
            F.min(happened(events)).alias("first"),
            F.max(event == "proc.stop").alias("stopped"),
            F.max(F.col("seq") == 1).alias("whole"),
        )
    )


def _stretches(known: _Known, span: Span) -> Iterator[_Stretch]:
    """Of each start and day with counters."""
    for boot, marks in sorted(known.marks.items()):
        begin = known.earliest[boot]
        for day, mark in sorted(marks.items()):
            if day in span and mark.seq > begin.seq:
                yield _Stretch(day, boot, begin, mark)
            # Clocks may run back over midnight, seq does not.
            begin = max(begin, mark, key=_seq)


def _carried_on(known: _Known, span: Span) -> Iterator[tuple[object, ...]]:
    """Rows of `counters`: at the end of each day for each node the last ones of its latest start, if that goes on."""
    for day in span.days:
        latest: dict[str, Boot] = {}
        for boot, first in sorted(known.began.items(), key=lambda item: (item[1], item[0])):
            if first[0] <= day:
                latest[boot[0]] = boot
        for boot in sorted(latest.values()):
            past = [mark for at, mark in known.marks.get(boot, {}).items() if at <= day]
            if past and not (boot in known.stopped and known.stopped[boot] <= day):
                mark = max(past, key=_seq)
                for name, value in zip(COUNTERS.values(), mark.values, strict=True):
                    if value is not None:
                        yield (day, *boot, mark.seq, name, value)


def _compared(events: DataFrame, stretches: Sequence[_Stretch], span: Span) -> DataFrame:
    """`reconciliation_daily`."""
    bounds = events.sparkSession.createDataFrame(
        [(one.day, *one.boot, one.begin.seq, one.end.seq) for one in stretches],
        "dt date, node string, boot string, begin bigint, end bigint",
    )
    growth = events.sparkSession.createDataFrame(
        list(_growth(stretches)), "dt date, node string, counter string, counted bigint"
    )
    lines = _lines(events, bounds, span)
    return (
        growth.join(F.broadcast(lines), ["dt", "node", "counter"], "left")
        .withColumn("logged", F.coalesce("logged", F.lit(0)))
        .withColumn("difference", F.col("counted") - F.col("logged"))
    )


def _growth(stretches: Iterable[_Stretch]) -> Iterator[tuple[object, ...]]:
    """By how much the counters of each node grew on each day."""
    sums: dict[tuple[date, str, str], int] = defaultdict(int)
    for one in stretches:
        for name, before, after in zip(COUNTERS.values(), one.begin.values, one.end.values, strict=True):
            if before is not None and after is not None:
                sums[one.day, one.boot[0], name] += after - before
    return ((*key, value) for key, value in sorted(sums.items()))


def _lines(events: DataFrame, bounds: DataFrame, span: Span) -> DataFrame:
    """What the counters should have counted: dt, node, counter, logged."""
    event = F.col("event")
    counted = event.startswith("msg.") | event.isin("req.done", "conn.open", "conn.close")
    lines = (
        with_tail(events, span, _TAIL)
        .where(counted)
        .select(
            F.coalesce("node", F.lit("")).alias("node"), "boot", "seq", *(m.alias(n) for n, m in _counted().items())
        )
    )
    sums = (
        lines.join(F.broadcast(bounds), ["node", "boot"])
        .where((F.col("seq") > F.col("begin")) & (F.col("seq") < F.col("end")))
        .groupBy("dt", "node")
        .agg(*(F.sum(name).alias(name) for name in COUNTERS))
    )
    return sums.unpivot(["dt", "node"], list(COUNTERS), "field", "logged").select(
        "dt", "node", _metric().alias("counter"), "logged"
    )


def _metric() -> Column:
    return F.coalesce(*(F.when(F.col("field") == name, F.lit(metric)) for name, metric in COUNTERS.items()))


def _counted() -> dict[str, Column]:
    """What each line adds to each counter."""
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


def _frame(like: DataFrame, table: str, rows: Iterable[tuple[object, ...]]) -> DataFrame:
    return like.sparkSession.createDataFrame(list(rows), TABLES[table].struct())


JOB = Job(
    "reconciliation",
    reads=("events",),
    makes=("reconciliation_daily", "counters"),
    transform=reconciliation,
    recalls={"events": 1, "counters": REMEMBERED_DAYS},
)
