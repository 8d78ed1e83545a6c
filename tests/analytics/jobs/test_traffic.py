"""Events and bytes by hour and day."""

from __future__ import annotations

from typing import Any

from analytics.job import Span
from analytics.jobs.traffic_and_latency import TRAFFIC_JOB
from tests.analytics.job_tables import at, day, event, run_job


def make_log() -> list[dict[str, Any]]:
    """Requests and messages of two days and nodes."""
    return [
        event("req.done", at(0, 1), proto="didcomm", size=10),
        event("req.done", at(0, 1, 59), proto="didcomm", size=5),
        event("req.done", at(0, 2), proto="didcomm", size=1),
        event("req.done", at(0, 2), proto="decentrl", node="b"),
        event("msg.accept", at(0, 23, 59, 59.999), size=7),
        event("msg.ack", at(1), node=None),
        event("gauge", at(1), bytes=99),
        event("conn.open", at(1)),
    ]


def test_counts_requests_and_messages_with_bytes() -> None:

    result = run_job(TRAFFIC_JOB, Span(day(0), day(1)), make_log())

    assert [tuple(row.values()) for row in result["traffic_hourly"]] == [
        (day(0), 1, "a", "didcomm", "req.done", 2, 15),
        (day(0), 2, "a", "didcomm", "req.done", 1, 1),
        (day(0), 2, "b", "decentrl", "req.done", 1, 0),
        (day(0), 23, "a", "", "msg.accept", 1, 7),
        (day(1), 0, "", "", "msg.ack", 1, 0),
    ]
    assert [tuple(row.values()) for row in result["traffic_daily"]] == [
        (day(0), "a", "", "msg.accept", 1, 7),
        (day(0), "a", "didcomm", "req.done", 3, 16),
        (day(0), "b", "decentrl", "req.done", 1, 0),
        (day(1), "", "", "msg.ack", 1, 0),
    ]


def test_no_rows_without_events() -> None:
    assert run_job(TRAFFIC_JOB, Span(day(0), day(0))) == {
        "traffic_hourly": [],
        "traffic_daily": [],
    }
