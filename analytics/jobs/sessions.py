"""
Sockets, their durations and close codes, and the number of concurrent ones.

A node has one start at a time: sockets that a start left open are gone when it stops, or when the next one begins.
They count as `unclosed` on that day, the sign of a crash or of lost lines.

Peak concurrency is computed in two levels: within each ten minutes, by a scan, then over the sums of those. It starts
from the sockets open at the end of the day before. Where that is unknown, it starts from the minimum that must have
been open: sockets that closed and are older than the span, and enough for the count never to be negative.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby, pairwise

from analytics.database import Row
from analytics.job import Job, JobRun
from analytics.sql_functions import (
    DAY_MICROS,
    EVENT_MICROS,
    SECOND_MICROS,
    compute_percentiles,
    day_to_micros,
    quote_day,
)

_TEN_MINUTES = 600 * SECOND_MICROS
_MINUTES_PER_DAY = 1440
# In a storm minute more sockets are opened than this many times the median, and than this number.
_STORM_FACTOR = 10
_STORM_MINIMUM = 100
_SESSION_KEY = ("dt", "node", "proto", "ws_code", "reason")
_SUMMED_COLUMNS = ("n_in", "n_out", "bytes_in", "bytes_out")


def make_sessions(run: JobRun) -> dict[str, str]:
    """`sessions_daily`, `sockets_daily` and `concurrency_10m`."""
    _scan_closed_sockets(run)
    _scan_socket_minutes(run)
    opening = _find_opening(run)
    starts = _find_starts(run)
    older = Counter[str]()
    for row in starts:
        older[row["node"]] += 0 if row["began"] or row["node"] in opening else row["older"]
    run.insert(
        "unclosed_sockets",
        "node VARCHAR, gone_at BIGINT, n BIGINT",
        _find_unclosed_sockets(starts, {**older, **opening}),
    )
    levels = [*((node, n, 0) for node, n in opening.items()), *((node, None, n) for node, n in older.items() if n)]
    run.insert("opening_sockets", "node VARCHAR, opening BIGINT, older BIGINT", levels)
    _scan_socket_changes(run)
    _define_concurrency(run)
    return {
        "sessions_daily": _SESSIONS_DAILY,
        "concurrency_10m": "FROM socket_levels",
        "sockets_daily": _SOCKETS_DAILY,
    }


def _scan_closed_sockets(run: JobRun) -> None:
    """`closed_sockets`: closed sockets by close code and bucket of their duration."""
    sums = ", ".join(f"CAST(coalesce(sum({name}), 0) AS BIGINT) AS {name}" for name in _SUMMED_COLUMNS)
    run.scan(
        "closed_sockets",
        f"""
        SELECT dt, coalesce(node, '') AS node, coalesce(proto, '') AS proto, coalesce(ws_code, 0) AS ws_code,
            coalesce(reason, '') AS reason, latency_bucket(dur_ms) AS bucket, count(*) AS n, {sums}
        FROM events
        WHERE event = 'conn.close' AND dt BETWEEN {run.first} AND {run.last}
        GROUP BY ALL
        """,
    )


def _scan_socket_minutes(run: JobRun) -> None:
    """
    `socket_minutes`: by node, start and minute.

    Columns: `dt`, `node`, `boot`, `minute`, `lines` (about sockets), `opened`, `authenticated`, `closed`, `first` and
    `last` (microseconds) of lines except conn.auth, `older`: closed sockets older than the span, `began` and
    `stopped`: whether the start did.
    """
    is_first = "coalesce(seq = 1, false)"
    opened_at = f"{EVENT_MICROS} - duration_micros(dur_ms)"
    run.scan(
        "socket_minutes",
        f"""
        SELECT dt, coalesce(node, '') AS node, boot, date_trunc('minute', ts) AS minute,
            count(*) FILTER (WHERE event LIKE 'conn.%') AS lines,
            count(*) FILTER (WHERE event = 'conn.open') AS opened,
            count(*) FILTER (WHERE event = 'conn.auth' AND code IS NULL) AS authenticated,
            count(*) FILTER (WHERE event = 'conn.close') AS closed,
            min({EVENT_MICROS}) FILTER (WHERE event <> 'conn.auth' OR {is_first}) AS first_at,
            max({EVENT_MICROS}) FILTER (WHERE event <> 'conn.auth' OR {is_first}) AS last_at,
            count(*) FILTER (WHERE event = 'conn.close' AND {opened_at} < {day_to_micros(run.span.first)}) AS older,
            count(*) FILTER (WHERE event = 'proc.start' OR {is_first}) > 0 AS began,
            count(*) FILTER (WHERE event = 'proc.stop') > 0 AS stopped
        FROM events
        WHERE dt BETWEEN {run.first} AND {run.last}
            AND (event IN ('conn.open', 'conn.auth', 'conn.close', 'proc.start', 'proc.stop') OR seq = 1)
        GROUP BY ALL
        """,
    )


def _find_opening(run: JobRun) -> dict[str, int]:
    """Sockets open before the span by node, where known."""
    rows = run.rows(f"""
        SELECT node, max_by(at_end, "at") AS n FROM concurrency_10m
        WHERE dt = {quote_day(run.span.widen(before=1).first)} GROUP BY ALL
    """)
    return {row["node"]: row["n"] for row in rows}


def _find_starts(run: JobRun) -> list[Row]:
    """
    Starts of nodes in order: first and last line, sockets left open (`net`), whether it stopped, and sockets older
    than the span that closed.
    """
    return run.rows("""
        SELECT node, boot, min(first_at) AS first_at, max(last_at) AS last_at,
            CAST(sum(opened) - sum(closed) AS BIGINT) AS net, CAST(sum(older) AS BIGINT) AS older,
            bool_or(stopped) AS stopped, bool_or(began) AS began
        FROM socket_minutes WHERE boot IS NOT NULL
        GROUP BY ALL HAVING min(first_at) IS NOT NULL ORDER BY node, first_at, boot
    """)


def _find_unclosed_sockets(starts: Iterable[Row], opening: Mapping[str, int]) -> Iterator[tuple[str, int, int]]:
    """
    Sockets left open by starts that ended.

    :param starts: rows of :func:`_find_starts`.
    :return: node, when they were gone (microseconds), number.
    """
    for node, own in groupby(starts, lambda row: row["node"]):
        rows = list(own)
        carried = opening.get(node, 0)
        if rows[0]["began"] and carried > 0:
            yield node, rows[0]["first_at"], carried
            carried = 0
        for row, after in pairwise([*rows, None]):
            assert row is not None
            net, carried = row["net"] + carried, 0
            ended = row["last_at"] if row["stopped"] else after["first_at"] if after else None
            if net > 0 and ended is not None:
                yield node, ended, net


def _scan_socket_changes(run: JobRun) -> None:
    """
    `socket_changes`: by node and ten minutes (`begin_at`, microseconds) the net change of the number of open sockets,
    and its maximum (`rise`) and minimum (`fall`) above the number at their start.
    """
    begin = f"line_at - line_at % {_TEN_MINUTES}"
    # Sockets that end with their start are counted last.
    running = f"""
        sum(delta) OVER (PARTITION BY node, {begin} ORDER BY line_at, seq NULLS LAST, delta
            ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW)
    """
    run.scan(
        "socket_changes",
        f"""
        WITH changes AS (
            SELECT coalesce(node, '') AS node, {EVENT_MICROS} AS line_at, seq,
                CAST(CASE event WHEN 'conn.open' THEN 1 ELSE -1 END AS BIGINT) AS delta
            FROM events
            WHERE event IN ('conn.open', 'conn.close') AND dt BETWEEN {run.first} AND {run.last}
            UNION ALL
            SELECT node, gone_at, CAST(NULL AS BIGINT) AS seq, -n AS delta FROM unclosed_sockets),
        levels AS (SELECT node, {begin} AS begin_at, delta, {running} AS level FROM changes)
        SELECT node, begin_at, CAST(sum(delta) AS BIGINT) AS net, CAST(max(level) AS BIGINT) AS rise,
            CAST(min(level) AS BIGINT) AS fall
        FROM levels GROUP BY ALL
        """,
        small=["unclosed_sockets"],
    )


def _define_concurrency(run: JobRun) -> None:
    """Table `socket_levels`: `concurrency_10m`, for nodes and days with a line about a socket, or an open one."""
    first, last = day_to_micros(run.span.first), day_to_micros(run.span.last) + DAY_MICROS - _TEN_MINUTES
    run.define(
        "socket_levels",
        f"""
        WITH nodes AS (
            SELECT node FROM socket_changes UNION SELECT node FROM opening_sockets WHERE opening > 0),
        grid AS (
            SELECT node, begin_at, net, coalesce(net, 0) AS change, greatest(rise, 0) AS rise,
                coalesce(fall, 0) AS fall
            FROM (FROM nodes, range({first}, {last + 1}, {_TEN_MINUTES}) AS times(begin_at))
            LEFT JOIN socket_changes USING (node, begin_at)),
        summed AS (
            SELECT *, coalesce(sum(change) OVER (PARTITION BY node ORDER BY begin_at
                ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), 0) AS before
            FROM grid),
        lowest AS (SELECT node, min(before + fall) AS lowest FROM summed GROUP BY ALL),
        levels AS (
            SELECT *, coalesce(opening, greatest(-lowest, older, 0)) + before AS level
            FROM summed JOIN lowest USING (node) LEFT JOIN opening_sockets USING (node)),
        tens AS (
            SELECT micros_day(begin_at) AS dt, node, micros_time(begin_at) AS "at", net,
                CAST(greatest(level + rise, 0) AS BIGINT) AS peak,
                CAST(greatest(level + change, 0) AS BIGINT) AS at_end
            FROM levels)
        SELECT dt, node, "at", peak, at_end FROM tens
        QUALIFY bool_or(net IS NOT NULL OR peak > 0) OVER (PARTITION BY node, dt)
        """,
    )


_SESSIONS_DAILY = f"""
    WITH durations AS ({
    compute_percentiles(
        "SELECT * FROM closed_sockets WHERE bucket IS NOT NULL",
        _SESSION_KEY,
        {"dur_p50_ms": 0.5, "dur_p95_ms": 0.95},
    )
}),
    totals AS (
        SELECT {", ".join(_SESSION_KEY)}, {", ".join(f"sum({name}) AS {name}" for name in ("n", *_SUMMED_COLUMNS))}
        FROM closed_sockets GROUP BY ALL)
    SELECT totals.*, dur_p50_ms, dur_p95_ms FROM totals LEFT JOIN durations USING ({", ".join(_SESSION_KEY)})
"""

# Minutes without a line count as minutes without an opened socket.
_SOCKETS_DAILY = f"""
    WITH minutes AS (
        SELECT dt, node, minute, sum(opened) AS opened, sum(authenticated) AS authenticated, sum(closed) AS closed
        FROM socket_minutes WHERE lines > 0 GROUP BY ALL),
    ranked AS (
        SELECT *, row_number() OVER (PARTITION BY dt, node ORDER BY opened DESC) AS place FROM minutes),
    medians AS (
        SELECT dt, node, coalesce(max(opened) FILTER (WHERE place > {_MINUTES_PER_DAY // 2}), 0) AS median
        FROM ranked GROUP BY ALL),
    counts AS (
        SELECT dt, node, sum(opened) AS opened, sum(authenticated) AS authenticated, sum(closed) AS closed,
            count(*) FILTER (WHERE opened > greatest(median * {_STORM_FACTOR}, {_STORM_MINIMUM})) AS storm_minutes
        FROM minutes JOIN medians USING (dt, node) GROUP BY ALL),
    gone AS (SELECT micros_day(gone_at) AS dt, node, sum(n) AS unclosed FROM unclosed_sockets GROUP BY ALL),
    peaks AS (SELECT dt, node, max(peak) AS peak FROM socket_levels GROUP BY ALL)
    SELECT dt, node,
        {
    ", ".join(
        f"coalesce({name}, 0) AS {name}"
        for name in ("opened", "authenticated", "closed", "unclosed", "storm_minutes", "peak")
    )
}
    FROM peaks FULL JOIN counts USING (dt, node) FULL JOIN gone USING (dt, node)
"""


SESSIONS_JOB = Job(
    "sessions",
    reads=("events",),
    writes=("sessions_daily", "concurrency_10m", "sockets_daily"),
    make_tables=make_sessions,
    history_days={"concurrency_10m": 1},
)
