"""Sockets, against a count in plain Python."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from analytics.job import Span
from analytics.jobs.sessions import SESSIONS_JOB
from tests.analytics.events import at, day, event, events, plans, run, table

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Row = dict[str, Any]


def tables(spark: SparkSession, lines: list[Row], before: list[Row] | None = None) -> dict[str, Any]:
    return {"events": events(spark, lines), "concurrency_10m": table(spark, "concurrency_10m", before or [])}


def traffic(seed: int, days: int) -> list[Row]:
    """Sockets of two nodes that start once and go on."""
    chance = random.Random(seed)
    lines = [event(at(0), "log.open", node=node, boot=node, seq=1) for node in "ab"]
    for number in range(400):
        node, conn = chance.choice("ab"), f"c{number}"
        opened = at(0, second=1 + chance.random() * (days * 86_400 - 2))
        lines.append(event(opened, "conn.open", node=node, boot=node, conn=conn))
        lasted = timedelta(seconds=chance.expovariate(1 / 20_000))
        if opened + lasted < at(days):
            ms = lasted.total_seconds() * 1000
            lines.append(event(opened + lasted, "conn.close", node=node, boot=node, conn=conn, dur_ms=ms))
    chance.shuffle(lines)
    return lines


def counted(lines: list[Row], days: int) -> dict[tuple[str, datetime], tuple[int, int]]:
    """Peak and end of each ten minutes."""
    found = {}
    for node in "ab":
        open_now, own = 0, sorted((row for row in lines if row["node"] == node), key=lambda row: row["ts"])
        changes = defaultdict(list)
        for row in own:
            changes[(row["ts"] - at(0)) // timedelta(minutes=10)].append(row["event"])
        for ten in range(days * 144):
            peak = open_now
            for name in changes[ten]:
                open_now += {"conn.open": 1, "conn.close": -1}.get(name, 0)
                peak = max(peak, open_now)
            found[node, (at(0) + timedelta(minutes=10 * ten)).replace(tzinfo=None)] = peak, open_now
    return found


@pytest.mark.exhaustive
def test_concurrency_of_three_days_at_once_and_one_by_one(spark: SparkSession) -> None:
    lines = traffic(9, 3)

    whole = run(SESSIONS_JOB, tables(spark, lines), Span(day(0), day(2)))
    daily: dict[str, list[Row]] = {name: [] for name in SESSIONS_JOB.writes}
    for span in (Span(day(0), day(0)), Span(day(1), day(2))):
        made = run(SESSIONS_JOB, tables(spark, [r for r in lines if r["dt"] in span], daily["concurrency_10m"]), span)
        for name, rows in made.items():
            daily[name] += rows
    spark.catalog.clearCache()

    found = {(row["node"], row["at"]): (row["peak"], row["at_end"]) for row in whole["concurrency_10m"]}
    assert found == counted(lines, 3)
    assert daily == whole
    opened = Counter((row["dt"], row["node"]) for row in lines if row["event"] == "conn.open")
    assert {(row["dt"], row["node"]): row["opened"] for row in whole["sockets_daily"]} == opened
    assert not any(row["unclosed"] or row["storm_minutes"] for row in whole["sockets_daily"])


def test_what_a_day_can_hold(spark: SparkSession) -> None:
    def lines_of(node: str, boot: str, *rows: tuple[float, str, Row]) -> list[Row]:
        return [event(at(1, hour), name, node=node, boot=boot, **fields) for hour, name, fields in rows]

    lines = [
        # Carried 3, one more closes than opened before it crashes; the next start stops in order but leaves one.
        *lines_of("a", "1", (1, "conn.open", {}), (2, "conn.close", {}), (3, "conn.close", {})),
        *lines_of("a", "2", (4, "log.open", {"seq": 1}), (5, "conn.open", {}), (6, "proc.stop", {})),
        # It carried 2, and began anew: they are gone.
        *lines_of("b", "3", (8, "proc.start", {}), (9, "conn.open", {}), (10, "conn.auth", {"did": "d"})),
        *lines_of("b", "3", (10, "conn.auth", {"code": "c"})),
        # Two that were there before anybody looked.
        *lines_of(
            "c", "4", (1, "conn.open", {}), (2, *("conn.close", {})), (3, "conn.close", {}), (4, "conn.close", {})
        ),
        # A storm, and a busy minute.
        *(row for _ in range(101) for row in lines_of("d", "5", (1, "conn.open", {}), (1, "conn.close", {}))),
        *(row for _ in range(100) for row in lines_of("d", "5", (2, "conn.open", {}), (2, "conn.close", {}))),
        event(at(1), "conn.open", node=None, boot=None),
    ]
    before = [
        {"dt": day(0), "node": node, "at": at(0, 23, minute), "peak": 9, "at_end": open_then}
        for node, minute, open_then in [("a", 40, 7), ("a", 50, 3), ("b", 50, 2), ("e", 50, 1), ("f", 50, 0)]
    ]

    made = run(SESSIONS_JOB, tables(spark, lines, before), Span(day(1), day(1)))
    spark.catalog.clearCache()

    assert [tuple(row.values())[1:] for row in made["sockets_daily"]] == [
        ("", 1, 0, 0, 0, 0, 1),
        ("a", 2, 0, 2, 3, 0, 4),
        ("b", 1, 1, 0, 2, 0, 2),
        ("c", 1, 0, 3, 0, 0, 3),
        ("d", 201, 0, 201, 0, 1, 1),
        ("e", 0, 0, 0, 0, 0, 1),
    ]
    ends = {row["node"]: row["at_end"] for row in made["concurrency_10m"]}
    assert ends == {"": 1, "a": 0, "b": 1, "c": 0, "d": 0, "e": 1}
    assert {row["node"]: 0 for row in made["concurrency_10m"]}.keys() == ends.keys()
    assert len(made["concurrency_10m"]) == 144 * len(ends)


def test_sockets_from_before_the_books(spark: SparkSession) -> None:
    """On the first day, those that were opened before it are told by how long they were open."""
    day_ms = 86_400_000.0
    lines = [
        *(event(at(0, 1, second=n), "conn.open") for n in range(10)),
        *(event(at(0, 2, second=n), "conn.close", dur_ms=day_ms) for n in range(5)),
        *(event(at(0, 3, second=n), "conn.close", dur_ms=60_000.0) for n in range(3)),
        event(at(0, 4), "log.open", boot="next", seq=1),
        # A start that has its first line here has no older ones, whatever its clock says.
        event(at(0, 0), "log.open", node="c", seq=1),
        event(at(0, 1), "conn.open", node="c"),
        event(at(0, 2), "conn.close", node="c", dur_ms=day_ms),
    ]

    made = run(SESSIONS_JOB, tables(spark, lines), Span(day(0), day(0)))
    spark.catalog.clearCache()

    assert [(row["node"], row["unclosed"], row["peak"]) for row in made["sockets_daily"]] == [
        ("a", 7, 15),
        ("c", 0, 1),
    ]
    assert [row["at_end"] for row in made["concurrency_10m"] if row["node"] == "a"][5:26:6] == [5, 15, 10, 7]


def test_how_sockets_ended(spark: SparkSession) -> None:
    ended = {"proto": "didcomm", "ws_code": 1000, "reason": "peer", "n_in": 1, "n_out": 2, "bytes_in": 3}
    lines = [event(at(0, n / 10), "conn.close", dur_ms=float(n), **ended, bytes_out=4) for n in range(1, 101)]
    lines += [event(at(0), "conn.close", **{**ended, "ws_code": None, "n_in": None}), event(at(0), "conn.open")]

    made = run(SESSIONS_JOB, tables(spark, lines), Span(day(0), day(0)))["sessions_daily"]
    spark.catalog.clearCache()

    unknown, known = made
    assert tuple(unknown.values()) == (day(0), "a", "didcomm", 0, "peer", 1, None, None, 0, 2, 3, 0)
    assert abs(known.pop("dur_p50_ms") / 50 - 1) < 0.0101
    assert abs(known.pop("dur_p95_ms") / 95 - 1) < 0.0101
    assert tuple(known.values()) == (day(0), "a", "didcomm", 1000, "peer", 100, 100, 200, 300, 400)


def test_storms_are_measured_by_the_median(spark: SparkSession) -> None:
    def opened(minute: int, n: int) -> list[Row]:
        return [event(at(0, minute=minute, second=second / 2), "conn.open") for second in range(n)]

    # The median of all 1440 minutes is 11 here.
    lines = [row for minute in range(800) for row in opened(minute, 11)] + opened(900, 110) + opened(901, 111)

    made = run(SESSIONS_JOB, tables(spark, lines), Span(day(0), day(0)))["sockets_daily"]
    spark.catalog.clearCache()

    assert [(row["opened"], row["storm_minutes"]) for row in made] == [(800 * 11 + 221, 1)]


def test_no_sockets(spark: SparkSession) -> None:
    made = run(SESSIONS_JOB, tables(spark, [event(at(0), "gauge")]), Span(day(0), day(1)))

    assert made == {"sessions_daily": [], "sockets_daily": [], "concurrency_10m": []}


def test_plans(spark: SparkSession) -> None:
    found = plans(SESSIONS_JOB, tables(spark, []), Span(day(0), day(0)))

    assert not any(name in found for name in ("CartesianProduct", "BatchEvalPython"))
