"""The daemon's counters against its lines."""

from __future__ import annotations

import random
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from analytics.job import Span
from analytics.jobs.reconciliation import COUNTER_METRICS, RECONCILIATION_JOB
from tests.analytics.events import at, day, event, events, plans, run, table

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LINES: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "forwarded": [("msg.accept", {"method": "live"}), ("msg.accept", {})],
    "forwarded stored": [("msg.accept", {"method": "queue"})],
    "stored": [("msg.push", {"ok": False})],
    "": [("msg.push", {"ok": True}), ("msg.remove", {}), ("gauge", {}), ("conn.auth", {}), ("msg.push", {})],
    "delivered": [("msg.ack", {})],
    "expired": [("msg.expire", {})],
    "evicted": [("msg.evict", {})],
    "requests_accepted": [("req.done", {"status": 200}), ("req.done", {})],
    "requests_rejected": [("req.done", {"status": 400, "code": "c"}), ("req.done", {"status": 200, "code": "c"})],
    "requests_failed": [("req.done", {"status": 500}), ("req.done", {"status": 503, "code": "c"})],
    "connections": [("conn.open", {})],
    "-connections": [("conn.close", {})],
}


class Daemon:
    """Writes lines and counts them, as the daemon does."""

    def __init__(self, node: str, boot: str, seed: int = 1) -> None:
        self.own = {"node": node, "boot": boot}
        self.seq = 0
        self.counts = dict.fromkeys(COUNTER_METRICS, 0)
        self.lines: list[dict[str, Any]] = []
        self.chance = random.Random(seed)

    def say(self, ts: datetime, name: str, **fields: Any) -> None:
        self.seq += 1
        self.lines.append(event(ts, name, **self.own, seq=self.seq, **fields))

    def count(self, ts: datetime) -> None:
        self.say(ts, "counters", **self.counts)

    def work(self, since: datetime, n: int) -> datetime:
        """So many lines, one in a minute, and counters after every third."""
        for number in range(n):
            since += timedelta(minutes=1)
            names = self.chance.choice(list(LINES))
            for name in names.split():
                self.counts[name.lstrip("-")] += -1 if name.startswith("-") else 1
            what, fields = self.chance.choice(LINES[names])
            self.say(since, what, **fields)
            if number % 3 == 2:
                self.count(since)
        return since


def tables(spark: SparkSession, lines: list[dict[str, Any]], before: list[dict[str, Any]]) -> dict[str, Any]:
    return {"events": events(spark, lines), "counters": table(spark, "counters", before)}


def test_lines_and_counters_agree_over_days_and_restarts(spark: SparkSession) -> None:
    one, two, three = Daemon("a", "1"), Daemon("a", "2", 2), Daemon("b", "3", 3)
    one.say(at(0, 20), "log.open")
    # Over midnight, where the last lines are after the last counters of the day.
    assert one.work(at(0, 20), 301) > at(1, 1)
    one.count(at(1, 2))
    one.say(at(1, 2), "proc.stop")
    two.say(at(1, 3), "log.open")
    two.work(at(1, 3), 100)
    # It was there before anybody looked, and is silent for a day.
    three.seq, three.counts["forwarded"] = 4711, 1000
    three.count(three.work(at(0, 1), 50))
    three.work(at(2, 1), 50)
    lines = [*one.lines, *two.lines, *three.lines]
    random.Random(1).shuffle(lines)

    whole = run(RECONCILIATION_JOB, tables(spark, lines, []), Span(day(0), day(2)))
    daily: dict[str, list[dict[str, Any]]] = {name: [] for name in RECONCILIATION_JOB.writes}
    for n in range(3):
        recalled = [row for row in lines if day(n - 1) <= row["dt"] <= day(n)]
        for name, rows in run(
            RECONCILIATION_JOB, tables(spark, recalled, daily["counters"]), Span(day(n), day(n))
        ).items():
            daily[name] += rows

    for name in RECONCILIATION_JOB.writes:
        assert daily[name] == whole[name]
    assert all(row["difference"] == 0 for row in whole["reconciliation_daily"])
    sums = {(node, name): 0 for node in "ab" for name in COUNTER_METRICS.values()}
    for row in whole["reconciliation_daily"]:
        sums[row["node"], row["counter"]] += row["counted"]
    first = next(row for row in three.lines if row["event"] == "counters")
    last_of_two = [row for row in two.lines if row["event"] == "counters"][-1]
    for name, metric in COUNTER_METRICS.items():
        assert sums["a", metric] == one.counts[name] + last_of_two[name]
        last_of_three = [row for row in three.lines if row["event"] == "counters"][-1]
        assert sums["b", metric] == last_of_three[name] - first[name]
    assert [{row["boot"] for row in whole["counters"] if row["dt"] == day(n)} for n in range(3)] == [
        {"1", "3"},
        {"2", "3"},
        {"2", "3"},
    ]


def test_what_is_lost_or_made_up_shows(spark: SparkSession) -> None:
    clean, lossy, young = Daemon("clean", "1"), Daemon("lossy", "2"), Daemon("young", "3")
    for daemon in (clean, lossy, young):
        daemon.say(at(0, 1), "log.open")
    for daemon in (clean, lossy):
        daemon.counts["forwarded"] = 2
        daemon.say(at(0, 2), "msg.accept")
        daemon.say(at(0, 2), "msg.accept")
        daemon.count(at(0, 3))
    del lossy.lines[1]
    # A clock that ran back over midnight, and a line that no counters have counted yet.
    clean.counts["delivered"] = 1
    clean.say(at(-1, 23), "msg.ack")
    clean.say(at(0, 4), "counters", **{**clean.counts, "evicted": None})
    clean.say(at(0, 5), "msg.accept")

    made = run(
        RECONCILIATION_JOB, tables(spark, [*clean.lines, *lossy.lines, *young.lines], []), Span(day(0), day(0))
    )

    found = {(row["node"], row["counter"]): tuple(row.values())[3:] for row in made["reconciliation_daily"]}
    assert found["clean", COUNTER_METRICS["forwarded"]] == (2, 2, 0)
    assert found["clean", COUNTER_METRICS["delivered"]] == (1, 1, 0)
    assert found["lossy", COUNTER_METRICS["forwarded"]] == (2, 1, 1)
    assert ("clean", COUNTER_METRICS["evicted"]) not in found
    assert not any(node == "young" for node, _ in found)


def test_no_lines(spark: SparkSession) -> None:
    made = run(RECONCILIATION_JOB, tables(spark, [], []), Span(day(0), day(1)))

    assert made == {"reconciliation_daily": [], "counters": []}


def test_plans(spark: SparkSession) -> None:
    found = plans(RECONCILIATION_JOB, tables(spark, [], []), Span(day(0), day(0)))

    assert "BroadcastHashJoin" in found
    assert not any(name in found for name in ("CartesianProduct", "BatchEvalPython", "Window"))
