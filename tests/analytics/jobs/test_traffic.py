"""Events and bytes by hour and day."""

from __future__ import annotations

from typing import TYPE_CHECKING

from analytics.job import Span
from analytics.jobs.traffic_and_latency import TRAFFIC_JOB
from tests.analytics.events import at, day, event, events, run_job

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_counts_requests_and_messages_with_bytes(spark: SparkSession) -> None:
    lines = [
        event(at(0, 1), "req.done", proto="didcomm", size=10),
        event(at(0, 1, 59), "req.done", proto="didcomm", size=5),
        event(at(0, 2), "req.done", proto="didcomm", size=1),
        event(at(0, 2), "req.done", proto="decentrl", node="b"),
        event(at(0, 23, 59, 59.999), "msg.accept", size=7),
        event(at(1), "msg.ack", node=None),
        event(at(1), "gauge", bytes=99),
        event(at(1), "conn.open"),
    ]

    result = run_job(TRAFFIC_JOB, {"events": events(spark, lines)}, Span(day(0), day(1)))

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


def test_no_rows_without_events(spark: SparkSession) -> None:
    assert run_job(TRAFFIC_JOB, {"events": events(spark, [])}, Span(day(0), day(0))) == {
        "traffic_hourly": [],
        "traffic_daily": [],
    }
