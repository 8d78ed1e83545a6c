"""Reconciliation of the daemon's counters with its log lines."""

from __future__ import annotations

import random
from datetime import datetime, timedelta
from typing import Any

from analytics.job import Span
from analytics.jobs.reconciliation import COUNTER_METRICS, RECONCILIATION_JOB
from tests.analytics.job_tables import at, day, event, run_job

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


class SimulatedDaemon:
    """Writes log lines and counts them, as the daemon does."""

    def __init__(self, node: str, boot: str, seed: int = 1) -> None:
        self.origin = {"node": node, "boot": boot}
        self.seq = 0
        self.counts = dict.fromkeys(COUNTER_METRICS, 0)
        self.lines: list[dict[str, Any]] = []
        self.rng = random.Random(seed)

    def log(self, ts: datetime, name: str, **fields: Any) -> None:
        self.seq += 1
        self.lines.append(event(name, ts, **self.origin, seq=self.seq, **fields))

    def log_counters(self, ts: datetime) -> None:
        self.log(ts, "counters", **self.counts)

    def log_random_events(self, since: datetime, n: int) -> datetime:
        """Log `n` events, one a minute, and counters after every third."""
        for number in range(n):
            since += timedelta(minutes=1)
            names = self.rng.choice(list(LINES))
            for name in names.split():
                self.counts[name.lstrip("-")] += -1 if name.startswith("-") else 1
            event_name, fields = self.rng.choice(LINES[names])
            self.log(since, event_name, **fields)
            if number % 3 == 2:
                self.log_counters(since)
        return since


def simulate_three_days() -> list[SimulatedDaemon]:
    """Two starts of node a, and node b, which ran before its first line here and logs nothing for a day."""
    first_start, second_start, other_node = (
        SimulatedDaemon("a", "1"),
        SimulatedDaemon("a", "2", 2),
        SimulatedDaemon("b", "3", 3),
    )
    first_start.log(at(0, 20), "log.open")
    # Across midnight; the day's last lines follow its last counters.
    assert first_start.log_random_events(at(0, 20), 301) > at(1, 1)
    first_start.log_counters(at(1, 2))
    first_start.log(at(1, 2), "proc.stop")
    second_start.log(at(1, 3), "log.open")
    second_start.log_random_events(at(1, 3), 100)
    other_node.seq, other_node.counts["forwarded"] = 4711, 1000
    other_node.log_counters(other_node.log_random_events(at(0, 1), 50))
    other_node.log_random_events(at(2, 1), 50)
    return [first_start, second_start, other_node]


def mix_lines(daemons: list[SimulatedDaemon]) -> list[dict[str, Any]]:
    """Their lines in any order."""
    lines = [line for daemon in daemons for line in daemon.lines]
    random.Random(1).shuffle(lines)
    return lines


def test_lines_and_counters_agree_across_days_and_restarts() -> None:
    first_start, second_start, other_node = daemons = simulate_three_days()
    lines = mix_lines(daemons)

    all_at_once = run_job(RECONCILIATION_JOB, Span(day(0), day(2)), lines)
    daily: dict[str, list[dict[str, Any]]] = {name: [] for name in RECONCILIATION_JOB.writes}
    for n in range(3):
        recent_lines = [row for row in lines if day(n - 1) <= row["dt"] <= day(n)]
        for name, rows in run_job(
            RECONCILIATION_JOB, Span(day(n), day(n)), recent_lines, tables={"counters": daily["counters"]}
        ).items():
            daily[name] += rows

    for name in RECONCILIATION_JOB.writes:
        assert daily[name] == all_at_once[name]
    assert all(row["difference"] == 0 for row in all_at_once["reconciliation_daily"])
    sums = {(node, name): 0 for node in "ab" for name in COUNTER_METRICS.values()}
    for row in all_at_once["reconciliation_daily"]:
        sums[row["node"], row["counter"]] += row["counted"]
    first_counters = next(row for row in other_node.lines if row["event"] == "counters")
    last_of_second_start = [row for row in second_start.lines if row["event"] == "counters"][-1]
    for name, metric in COUNTER_METRICS.items():
        assert sums["a", metric] == first_start.counts[name] + last_of_second_start[name]
        last_of_other_node = [row for row in other_node.lines if row["event"] == "counters"][-1]
        assert sums["b", metric] == last_of_other_node[name] - first_counters[name]
    assert [{row["boot"] for row in all_at_once["counters"] if row["dt"] == day(n)} for n in range(3)] == [
        {"1", "3"},
        {"2", "3"},
        {"2", "3"},
    ]


def test_reports_lost_lines_as_difference() -> None:
    clean, lossy, without_counters = (
        SimulatedDaemon("clean", "1"),
        SimulatedDaemon("lossy", "2"),
        SimulatedDaemon("young", "3"),
    )
    for daemon in (clean, lossy, without_counters):
        daemon.log(at(0, 1), "log.open")
    for daemon in (clean, lossy):
        daemon.counts["forwarded"] = 2
        daemon.log(at(0, 2), "msg.accept")
        daemon.log(at(0, 2), "msg.accept")
        daemon.log_counters(at(0, 3))
    del lossy.lines[1]
    # A clock that was set back across midnight, and a line after the last counters.
    clean.counts["delivered"] = 1
    clean.log(at(-1, 23), "msg.ack")
    clean.log(at(0, 4), "counters", **{**clean.counts, "evicted": None})
    clean.log(at(0, 5), "msg.accept")

    result = run_job(RECONCILIATION_JOB, Span(day(0), day(0)), [*clean.lines, *lossy.lines, *without_counters.lines])

    found = {(row["node"], row["counter"]): tuple(row.values())[3:] for row in result["reconciliation_daily"]}
    assert found["clean", COUNTER_METRICS["forwarded"]] == (2, 2, 0)
    assert found["clean", COUNTER_METRICS["delivered"]] == (1, 1, 0)
    assert found["lossy", COUNTER_METRICS["forwarded"]] == (2, 1, 1)
    assert ("clean", COUNTER_METRICS["evicted"]) not in found
    assert not any(node == "young" for node, _ in found)


def test_no_rows_without_lines() -> None:
    result = run_job(RECONCILIATION_JOB, Span(day(0), day(1)))

    assert result == {"reconciliation_daily": [], "counters": []}
