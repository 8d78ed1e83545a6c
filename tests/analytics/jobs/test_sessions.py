"""Sessions and concurrency of sockets, compared with a count in plain Python."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from datetime import datetime, timedelta
from itertools import count
from typing import Any

import pytest

from analytics.job import Span
from analytics.jobs.sessions import SESSIONS_JOB
from tests.analytics.job_tables import at, day, event, run_job

Row = dict[str, Any]
_SEQ = count(1)


def make_line(name: str, ts: datetime, **fields: Any) -> Row:
    return event(name, ts, **{"boot": "b", "seq": next(_SEQ), **fields})


def make_socket_events(seed: int, days: int) -> list[Row]:
    """Sockets of two nodes that start once and keep running."""
    rng = random.Random(seed)
    lines = [make_line("log.open", at(0), node=node, boot=node, seq=1) for node in "ab"]
    for number in range(400):
        node, conn = rng.choice("ab"), f"c{number}"
        opened_at = at(0, second=1 + rng.random() * (days * 86_400 - 2))
        lines.append(make_line("conn.open", opened_at, node=node, boot=node, conn=conn))
        duration = timedelta(seconds=rng.expovariate(1 / 20_000))
        if opened_at + duration < at(days):
            ms = duration.total_seconds() * 1000
            lines.append(make_line("conn.close", opened_at + duration, node=node, boot=node, conn=conn, dur_ms=ms))
    rng.shuffle(lines)
    return lines


def count_concurrency(lines: list[Row], days: int) -> dict[tuple[str, datetime], tuple[int, int]]:
    """Peak and final number of open sockets in each ten minutes."""
    found = {}
    for node in "ab":
        open_now, node_lines = 0, sorted((row for row in lines if row["node"] == node), key=lambda row: row["ts"])
        changes = defaultdict(list)
        for row in node_lines:
            changes[(row["ts"] - at(0)) // timedelta(minutes=10)].append(row["event"])
        for interval in range(days * 144):
            peak = open_now
            for name in changes[interval]:
                open_now += {"conn.open": 1, "conn.close": -1}.get(name, 0)
                peak = max(peak, open_now)
            found[node, (at(0) + timedelta(minutes=10 * interval))] = peak, open_now
    return found


@pytest.mark.exhaustive
def test_concurrency_of_days_at_once_and_in_parts() -> None:
    lines = make_socket_events(9, 3)

    all_at_once = run_job(SESSIONS_JOB, Span(day(0), day(2)), lines)
    daily: dict[str, list[Row]] = {name: [] for name in SESSIONS_JOB.writes}
    for span in (Span(day(0), day(0)), Span(day(1), day(2))):
        result = run_job(SESSIONS_JOB, span, [row for row in lines if row["dt"] in span], tables=daily)
        for name, rows in result.items():
            daily[name] += rows

    found = {(row["node"], row["at"]): (row["peak"], row["at_end"]) for row in all_at_once["concurrency_10m"]}
    assert found == count_concurrency(lines, 3)
    assert daily == all_at_once
    opens = Counter((row["dt"], row["node"]) for row in lines if row["event"] == "conn.open")
    assert {(row["dt"], row["node"]): row["opened"] for row in all_at_once["sockets_daily"]} == opens
    assert not any(row["unclosed"] or row["storm_minutes"] for row in all_at_once["sockets_daily"])


def make_restarts() -> tuple[list[Row], list[Row]]:
    """Lines of the second day, and `concurrency_10m` of the first."""

    def make_lines(node: str, boot: str, *rows: tuple[float, str, Row]) -> list[Row]:
        return [make_line(name, at(1, hour), node=node, boot=boot, **fields) for hour, name, fields in rows]

    lines = [
        # Carries 3; one more closes than opens before a crash; the next start stops cleanly but leaves one open.
        *make_lines("a", "1", (1, "conn.open", {}), (2, "conn.close", {}), (3, "conn.close", {})),
        *make_lines("a", "2", (4, "log.open", {"seq": 1}), (5, "conn.open", {}), (6, "proc.stop", {})),
        # Carries 2, which a new start has closed.
        *make_lines("b", "3", (8, "proc.start", {}), (9, "conn.open", {}), (10, "conn.auth", {"did": "d"})),
        *make_lines("b", "3", (10, "conn.auth", {"code": "c"})),
        # Two that were open before the first line.
        *make_lines(
            "c", "4", (1, "conn.open", {}), (2, *("conn.close", {})), (3, "conn.close", {}), (4, "conn.close", {})
        ),
        # A connection storm, and a busy minute below its threshold.
        *(row for _ in range(101) for row in make_lines("d", "5", (1, "conn.open", {}), (1, "conn.close", {}))),
        *(row for _ in range(100) for row in make_lines("d", "5", (2, "conn.open", {}), (2, "conn.close", {}))),
        make_line("conn.open", at(1), node=None, boot=None),
    ]
    before = [
        {"dt": day(0), "node": node, "at": at(0, 23, minute), "peak": 9, "at_end": open_at_end}
        for node, minute, open_at_end in [("a", 40, 7), ("a", 50, 3), ("b", 50, 2), ("e", 50, 1), ("f", 50, 0)]
    ]
    return lines, before


def test_concurrency_across_restarts_and_crashes() -> None:
    lines, before = make_restarts()

    result = run_job(SESSIONS_JOB, Span(day(1), day(1)), lines, tables={"concurrency_10m": before})

    assert [tuple(row.values())[1:] for row in result["sockets_daily"]] == [
        ("", 1, 0, 0, 0, 0, 1),
        ("a", 2, 0, 2, 3, 0, 4),
        ("b", 1, 1, 0, 2, 0, 2),
        ("c", 1, 0, 3, 0, 0, 3),
        ("d", 201, 0, 201, 0, 1, 1),
        ("e", 0, 0, 0, 0, 0, 1),
    ]
    ends = {row["node"]: row["at_end"] for row in result["concurrency_10m"]}
    assert ends == {"": 1, "a": 0, "b": 1, "c": 0, "d": 0, "e": 1}
    assert {row["node"]: 0 for row in result["concurrency_10m"]}.keys() == ends.keys()
    assert len(result["concurrency_10m"]) == 144 * len(ends)


def test_infers_earlier_sockets_from_durations() -> None:
    """On the first day, sockets opened earlier are found by the duration in their `conn.close`."""
    day_ms = 86_400_000.0
    lines = [
        *(make_line("conn.open", at(0, 1, second=n)) for n in range(10)),
        *(make_line("conn.close", at(0, 2, second=n), dur_ms=day_ms) for n in range(5)),
        *(make_line("conn.close", at(0, 3, second=n), dur_ms=60_000.0) for n in range(3)),
        make_line("log.open", at(0, 4), boot="next", seq=1),
        # A start with its first line in the day has no earlier sockets, whatever its clock.
        make_line("log.open", at(0, 0), node="c", seq=1),
        make_line("conn.open", at(0, 1), node="c"),
        make_line("conn.close", at(0, 2), node="c", dur_ms=day_ms),
    ]

    result = run_job(SESSIONS_JOB, Span(day(0), day(0)), lines)

    assert [(row["node"], row["unclosed"], row["peak"]) for row in result["sockets_daily"]] == [
        ("a", 7, 15),
        ("c", 0, 1),
    ]
    assert [row["at_end"] for row in result["concurrency_10m"] if row["node"] == "a"][5:26:6] == [5, 15, 10, 7]


def test_groups_sessions_by_close_code() -> None:
    close_fields = {"proto": "didcomm", "ws_code": 1000, "reason": "peer", "n_in": 1, "n_out": 2, "bytes_in": 3}
    lines = [
        make_line("conn.close", at(0, n / 10), dur_ms=float(n), **close_fields, bytes_out=4) for n in range(1, 101)
    ]
    lines += [
        make_line("conn.close", at(0), **{**close_fields, "ws_code": None, "n_in": None}),
        make_line("conn.open", at(0)),
    ]

    result = run_job(SESSIONS_JOB, Span(day(0), day(0)), lines)["sessions_daily"]

    without_code, with_code = result
    assert tuple(without_code.values()) == (day(0), "a", "didcomm", 0, "peer", 1, None, None, 0, 2, 3, 0)
    assert abs(with_code.pop("dur_p50_ms") / 50 - 1) < 0.0101
    assert abs(with_code.pop("dur_p95_ms") / 95 - 1) < 0.0101
    assert tuple(with_code.values()) == (day(0), "a", "didcomm", 1000, "peer", 100, 100, 200, 300, 400)


def test_storm_threshold_is_relative_to_median() -> None:
    def make_opens(minute: int, n: int) -> list[Row]:
        return [make_line("conn.open", at(0, minute=minute, second=second / 2)) for second in range(n)]

    # The median of all 1440 minutes is 11 here.
    lines = (
        [row for minute in range(800) for row in make_opens(minute, 11)] + make_opens(900, 110) + make_opens(901, 111)
    )

    result = run_job(SESSIONS_JOB, Span(day(0), day(0)), lines)["sockets_daily"]

    assert [(row["opened"], row["storm_minutes"]) for row in result] == [(800 * 11 + 221, 1)]


def test_no_rows_without_sockets() -> None:
    result = run_job(SESSIONS_JOB, Span(day(0), day(1)), [make_line("gauge", at(0))])

    assert result == {"sessions_daily": [], "sockets_daily": [], "concurrency_10m": []}
