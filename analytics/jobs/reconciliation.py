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
from datetime import date, datetime, time, timedelta

from analytics.database import Row
from analytics.job import Job, JobRun, Span
from analytics.jobs.shared_scans import scan_state_events
from analytics.schema import OPERATOR_NODE_SUFFIX
from analytics.sql_functions import EVENT_MICROS, SECOND_MICROS, list_texts, quote_day, quote_text

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
# Counters and ledgers are logged every minute: what follows the last ones is of the last minutes of a day.
_LOOK_BACK = timedelta(hours=2)
_LOOK_BACK_MICROS = int(_LOOK_BACK.total_seconds()) * SECOND_MICROS

BootKey = tuple[str, str]


@dataclass(frozen=True, slots=True)
class _CounterSnapshot:
    """Values of one `counters` line, and its seq; None for missing values."""

    seq: int
    values: tuple[int | None, ...]


def _make_snapshot(line: Row) -> _CounterSnapshot:
    return _CounterSnapshot(line["seq"], tuple(line[name] for name in COUNTER_METRICS))


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


def reconcile_counters(run: JobRun) -> dict[str, Sequence[Row]]:
    """`reconciliation_daily` and `counters`."""
    known = _load_counter_history(run)
    return {
        "reconciliation_daily": _compare_counters(run, list(_make_intervals(known, run.span))),
        "counters": list(_make_counter_rows(known, run.span)),
    }


def _load_counter_history(run: JobRun) -> _CounterHistory:
    scan_state_events(run)
    marks = _load_previous_counters(run)
    starts = {boot: (date.min, 0) for boot in marks}
    stopped: dict[BootKey, date] = {}
    earliest = {boot: mark for boot, before in marks.items() for mark in before.values()}
    for row in _load_snapshots(run):
        boot, mark = (row["node"], row["boot"]), _make_snapshot(row)
        # In order of seq: the last one of a day remains.
        marks.setdefault(boot, {})[row["dt"]] = mark
        earliest[boot] = min(earliest.get(boot, mark), mark, key=_get_snapshot_seq)
    for row in _summarize_boots(run):
        boot = row["node"], row["boot"]
        if row["whole"]:
            earliest[boot] = _CounterSnapshot(0, (0,) * len(COUNTER_METRICS))
        if row["dt"] >= run.span.first:
            first = row["dt"], row["first_at"]
            starts[boot] = min(starts.get(boot, first), first)
            if row["stopped"]:
                stopped[boot] = min(stopped.get(boot, row["dt"]), row["dt"])
    return _CounterHistory(marks, earliest, starts, stopped)


def _load_previous_counters(run: JobRun) -> dict[BootKey, dict[date, _CounterSnapshot]]:
    """Last counters before the span."""
    history = quote_day(run.span.widen(before=COUNTER_HISTORY_DAYS).first)
    found: dict[tuple[date, BootKey, int], dict[str, int]] = defaultdict(dict)
    for row in run.rows(
        f"SELECT * FROM counters WHERE dt >= {history} AND dt < {run.first} QUALIFY dt = max(dt) OVER ()"
    ):
        found[row["dt"], (row["node"], row["boot"]), row["seq"]][row["counter"]] = row["value"]
    return {
        boot: {day: _CounterSnapshot(seq, tuple(values.get(metric) for metric in COUNTER_METRICS.values()))}
        for (day, boot, seq), values in found.items()
    }


def _load_snapshots(run: JobRun) -> list[Row]:
    """First and last `counters` line of each start and day of the span, in order of seq."""
    fields = ", ".join(COUNTER_METRICS)
    upwards = ", ".join(f"{name} NULLS FIRST" for name in ("seq", *COUNTER_METRICS))
    downwards = ", ".join(f"{name} DESC NULLS LAST" for name in ("seq", *COUNTER_METRICS))
    return run.rows(f"""
        SELECT dt, node, boot, seq, {fields} FROM state_events
        WHERE event = 'counters' AND boot IS NOT NULL AND dt >= {run.first}
        QUALIFY row_number() OVER (PARTITION BY dt, node, boot ORDER BY {upwards}) = 1
            OR row_number() OVER (PARTITION BY dt, node, boot ORDER BY {downwards}) = 1
        ORDER BY dt, node, boot, {upwards}
    """)


def _summarize_boots(run: JobRun) -> list[Row]:
    """By start and day, also of the day before the span: time of its first line, and whether it began or ended."""
    return run.rows("""
        SELECT dt, node, boot, min(state_events.at) AS first_at, bool_or(event = 'proc.stop') AS stopped,
            bool_or(seq = 1) AS whole
        FROM state_events
        WHERE (event IN ('counters', 'proc.start', 'proc.stop') OR seq = 1) AND boot IS NOT NULL GROUP BY ALL
    """)


def _make_intervals(known: _CounterHistory, span: Span) -> Iterator[_CounterInterval]:
    """Intervals of each start and day with counters."""
    for boot, marks in sorted(known.marks.items()):
        begin = known.earliest[boot]
        for day, mark in sorted(marks.items()):
            if day in span and mark.seq > begin.seq:
                yield _CounterInterval(day, boot, begin, mark)
            # Clocks may step back over midnight; seq does not.
            begin = max(begin, mark, key=_get_snapshot_seq)


def _make_counter_rows(known: _CounterHistory, span: Span) -> Iterator[Row]:
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
                        row = {"dt": day, "node": boot[0], "boot": boot[1], "seq": mark.seq}
                        yield {**row, "counter": name, "value": value}


def _compare_counters(run: JobRun, intervals: Sequence[_CounterInterval]) -> list[Row]:
    """`reconciliation_daily`."""
    if not intervals:
        return []
    logged = _count_logged_lines(run, intervals)
    return [
        {
            "dt": day,
            "node": node,
            "counter": COUNTER_METRICS[field],
            "counted": counted,
            "logged": logged.get((day, node, field), 0),
            "difference": counted - logged.get((day, node, field), 0),
        }
        for (day, node, field), counted in _sum_counter_growth(intervals).items()
    ]


def _sum_counter_growth(intervals: Iterable[_CounterInterval]) -> dict[tuple[date, str, str], int]:
    """Growth of the counters of each day, node and field."""
    sums: dict[tuple[date, str, str], int] = defaultdict(int)
    for one in intervals:
        for field, before, after in zip(COUNTER_METRICS, one.begin.values, one.end.values, strict=True):
            if before is not None and after is not None:
                sums[one.day, one.boot[0], field] += after - before
    return sums


# Expressions for the lines that each counter counts.
_FAILED = "coalesce(status >= 500, false)"
_COUNTED_LINES = {
    "forwarded": "event = 'msg.accept'",
    "stored": "(event = 'msg.push' AND NOT coalesce(ok, true)) OR (event = 'msg.accept' AND method = 'queue')",
    "delivered": "event = 'msg.ack'",
    "expired": "event = 'msg.expire'",
    "evicted": "event = 'msg.evict'",
    "requests_accepted": f"event = 'req.done' AND NOT {_FAILED} AND code IS NULL",
    "requests_rejected": f"event = 'req.done' AND NOT {_FAILED} AND code IS NOT NULL",
    "requests_failed": f"event = 'req.done' AND {_FAILED}",
    "connections": "event = 'conn.open'",
}
_UNCOUNTED_LINES = {"connections": "event = 'conn.close'"}
_COUNTED_EVENTS = (
    "msg.accept",
    "msg.push",
    "msg.ack",
    "msg.expire",
    "msg.evict",
    "req.done",
    "conn.open",
    "conn.close",
)


def _count_logged_lines(run: JobRun, intervals: Sequence[_CounterInterval]) -> dict[tuple[date, str, str], int]:
    """Logged lines within the intervals, by day, node and counter."""
    run.insert(
        "counter_intervals",
        "dt DATE, node VARCHAR, boot VARCHAR, seq_before BIGINT, seq_after BIGINT",
        ((one.day, *one.boot, one.begin.seq, one.end.seq) for one in intervals),
    )
    sums = ", ".join(f"CAST({_sum_lines(field)} AS BIGINT) AS {field}" for field in COUNTER_METRICS)
    run.scan(
        "counted_lines",
        f"""
        SELECT /*+ BROADCAST(counter_intervals) */ dt, node, {sums}
        FROM (
            SELECT coalesce(node, '') AS node, boot, seq, event, ok, method, status, code
            FROM events WHERE event IN ({list_texts(_COUNTED_EVENTS)}) AND {_include_time_before(run)}
        ) AS lines
        JOIN counter_intervals USING (node, boot)
        WHERE seq > seq_before AND seq < seq_after GROUP BY ALL
        """,
        small=["counter_intervals"],
    )
    rows = run.rows("SELECT * FROM counted_lines")
    return {(row["dt"], row["node"], field): row[field] for row in rows for field in COUNTER_METRICS}


def _sum_lines(field: str) -> str:
    counted = f"count(*) FILTER (WHERE {_COUNTED_LINES[field]})"
    return f"{counted} - count(*) FILTER (WHERE {_UNCOUNTED_LINES[field]})" if field in _UNCOUNTED_LINES else counted


def _include_time_before(run: JobRun) -> str:
    """Condition for lines of the span and shortly before it; selects little of the previous day."""
    since = datetime.combine(run.span.first, time()) - _LOOK_BACK
    return (
        f"dt BETWEEN {quote_day(run.span.widen(before=1).first)} AND {run.last}"
        f" AND (dt >= {run.first} OR ts >= TIMESTAMP '{since}')"
    )


RECONCILIATION_JOB = Job(
    "reconciliation",
    reads=("events",),
    writes=("reconciliation_daily", "counters"),
    make_tables=reconcile_counters,
    history_days={"counters": COUNTER_HISTORY_DAYS},
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
_WORKER_SUFFIX = r"-\d+$"


def reconcile_stores(run: JobRun) -> dict[str, str | Sequence[Row]]:
    """`stores_daily`."""
    scan_state_events(run)
    _define_ledgers(run)
    _define_ledger_bounds(run)
    if not run.rows("SELECT 1 FROM ledger_bounds LIMIT 1"):
        return {"stores_daily": []}
    _scan_store_lines(run)
    return {"stores_daily": _make_stores_query()}


def _define_ledgers(run: JobRun) -> None:
    """`ledgers`: the `ledger` lines, with totals by the name of their entry."""
    totals = ", ".join(f"{_get_ledger_field(entry)} AS {entry}" for entry in STORE_ENTRIES)
    own = ", ".join(f"own_{entry}" for entry in _PROBE_ENTRIES)
    run.define(
        "ledgers",
        f"""
        SELECT dt, store, proto, node, boot, state_events.at AS logged_at, {totals}, {own} FROM state_events
        WHERE event = 'ledger' AND store IS NOT NULL AND proto IS NOT NULL AND {_include_time_before(run)}
        """,
    )


def _get_ledger_field(entry: str) -> str:
    return entry if entry in ("waiting", _DIFFERENCE_ENTRY) else f"all_{entry}"


def _define_ledger_bounds(run: JobRun) -> None:
    """
    `ledger_bounds`: by day, store and protocol, the last ledger and the one to compare it with: their times `until`
    and `since`, and their entries, `end_...` and `begin_...`.
    """
    upwards = ", ".join(f"{name} NULLS FIRST" for name in ("logged_at", *STORE_ENTRIES))
    downwards = ", ".join(f"{name} DESC NULLS LAST" for name in ("logged_at", *STORE_ENTRIES))
    day = "PARTITION BY dt, store, proto"
    entries = ", ".join(
        f"ends.{entry} AS end_{entry},"
        f" CASE WHEN before.dt IS NULL THEN first.{entry} ELSE before.{entry} END AS begin_{entry}"
        for entry in STORE_ENTRIES
    )
    run.define(
        "ledger_bounds",
        f"""
        WITH firsts AS (
            SELECT * FROM ledgers QUALIFY row_number() OVER ({day} ORDER BY {upwards}) = 1),
        lasts AS (
            SELECT * FROM ledgers QUALIFY row_number() OVER ({day} ORDER BY {downwards}) = 1)
        SELECT dt, store, proto, coalesce(before.logged_at, first.logged_at) AS since,
            ends.logged_at AS until, {entries}
        FROM lasts AS ends
        JOIN firsts AS first USING (dt, store, proto)
        LEFT JOIN lasts AS before ON before.dt = ends.dt - 1 AND before.store = ends.store
            AND before.proto = ends.proto AND before.logged_at >= day_micros(ends.dt) - {_LOOK_BACK_MICROS}
        WHERE ends.dt >= {run.first}
        """,
    )
    # Lines of the last hours of a day may belong to the next one: `day` is that of the line.
    run.define(
        "ledger_periods",
        f"""
        SELECT dt AS day, dt, store, proto, since, until FROM ledger_bounds
        UNION ALL
        SELECT CAST(dt - 1 AS DATE), dt, store, proto,
            greatest(since, day_micros(dt) - {_LOOK_BACK_MICROS + 1}), until FROM ledger_bounds
        """,
    )


def _scan_store_lines(run: JobRun) -> None:
    """`store_lines`: lines that the ledgers should have counted, by day, store, protocol and event."""
    run.define(
        "store_members",
        f"""
        SELECT node, {_get_member_boot()} AS boot, store FROM ledgers WHERE boot IS NOT NULL
        UNION
        SELECT unnest([node, regexp_replace(node, '{_WORKER_SUFFIX}', '')]) || '{OPERATOR_NODE_SUFFIX}', '', store
        FROM ledgers
        """,
    )
    run.scan(
        "store_lines",
        f"""
        SELECT /*+ BROADCAST(store_members, ledger_periods) */ dt, store, proto, event, count(*) AS n
        FROM (
            SELECT dt AS day, coalesce(node, '') AS node, proto, event, {EVENT_MICROS} AS logged_at,
                {_get_member_boot()} AS boot
            FROM events WHERE event IN ({list_texts(ENTRY_EVENTS.values())}) AND {_include_time_before(run)}
        ) AS lines
        JOIN store_members USING (node, boot) JOIN ledger_periods USING (day, store, proto)
        WHERE logged_at > since AND logged_at <= until GROUP BY ALL
        """,
        small=["store_members", "ledger_periods"],
    )


def _get_member_boot() -> str:
    """Expression for the start that is a member of a store; of an operator any start, because no ledger names it."""
    return f"CASE WHEN node LIKE '%{OPERATOR_NODE_SUFFIX}' THEN '' ELSE boot END"


def _make_stores_query() -> str:
    """`stores_daily`."""
    entries = " UNION ALL ".join(map(_select_store_entry, STORE_ENTRIES))
    events = " ".join(f"WHEN {quote_text(event)} THEN {quote_text(entry)}" for entry, event in ENTRY_EVENTS.items())
    own = ", ".join(f"CAST(sum(own_{entry}) AS BIGINT) AS {entry}" for entry in _PROBE_ENTRIES)
    return f"""
        WITH entries AS ({entries}),
        logged AS (SELECT dt, store, proto, CASE event {events} END AS entry, n AS logged FROM store_lines),
        probes AS (
            SELECT ledger_periods.dt, store, proto, {own}
            FROM ledgers JOIN ledger_periods USING (store, proto)
            WHERE day = ledgers.dt AND logged_at > since AND logged_at <= until GROUP BY ALL),
        own AS (UNPIVOT probes ON {", ".join(_PROBE_ENTRIES)} INTO NAME entry VALUE own),
        counted AS (
            SELECT dt, store, proto, entry, total, change, unseen,
                CASE WHEN entry IN ({list_texts(ENTRY_EVENTS)}) THEN coalesce(logged, 0) END AS logged,
                CASE WHEN entry IN ({list_texts(ENTRY_EVENTS)}) THEN coalesce(own, 0) END AS own
            FROM entries LEFT JOIN logged USING (dt, store, proto, entry)
                LEFT JOIN own USING (dt, store, proto, entry))
        SELECT * EXCLUDE (unseen), change - unseen - logged - own AS gap FROM counted
    """


def _select_store_entry(entry: str) -> str:
    """Query for the total and change of an entry; `unseen`: change without lines, because the sender was refused."""
    change = "NULL" if entry == _DIFFERENCE_ENTRY else f"end_{entry} - begin_{entry}"
    unseen = "end_withdrawn - begin_withdrawn" if entry == "accepted" else "0"
    return (
        f"SELECT dt, store, proto, {quote_text(entry)} AS entry, end_{entry} AS total, {change} AS change,"
        f" {unseen} AS unseen FROM ledger_bounds"
    )


STORES_JOB = Job("stores", ("events",), ("stores_daily",), reconcile_stores)
