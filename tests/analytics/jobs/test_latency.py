"""Histograms and percentiles of latencies."""

from __future__ import annotations

import random
from typing import Any

from analytics.job import Span
from analytics.jobs.traffic_and_latency import LATENCY_JOB
from tests.analytics.job_tables import at, day, event, run_job
from tests.analytics.jobs.test_percentiles import nearest_rank


def test_percentiles_by_node_and_path_and_over_all() -> None:
    rng = random.Random(3)
    values = {(node, path): [rng.lognormvariate(4, 2) for _ in range(200)] for node in "ab" for path in "xy"}
    lines = [
        event("msg.ack", at(0, rng.uniform(0, 24)), node=node, path=path, latency_ms=ms)
        for (node, path), latencies in values.items()
        for ms in latencies
    ]

    result = run_job(LATENCY_JOB, Span(day(0), day(0)), lines)

    assert sum(row["n"] for row in result["latency_hist"]) == 800
    assert {row["metric"] for row in result["latency_hist"]} == {"ack"}
    assert len(result["latency_daily"]) == 9
    for row in result["latency_daily"]:
        expected = [
            ms
            for (node, path), latencies in values.items()
            if row["node"] in (node, "*") and row["path"] in (path, "*")
            for ms in latencies
        ]
        assert row["n"] == len(expected)
        for share in (50, 90, 95, 99):
            assert abs(row[f"p{share}_ms"] / nearest_rank(expected, share / 100) - 1) < 0.0101
        assert 1 <= row["max_ms"] / max(expected) * 1.0000001 < 1.0201


def make_log() -> list[dict[str, Any]]:
    """Pushes, acknowledgements and requests, with and without durations."""
    return [
        event("msg.push", at(0, 5), path="live", latency_ms=1.0, ok=True),
        event("msg.push", at(0, 5), path="live", latency_ms=1.0),
        event("msg.push", at(0, 5), path="live", latency_ms=9.0, ok=False),
        event("msg.push", at(0, 5), path="live", ok=True),
        event("msg.ack", at(0, 6), latency_ms=0.0),
        event("req.done", at(0, 7), proto="decentrl", dur_ms=100.0, latency_ms=7.0),
        event("req.done", at(0, 7), node=None, dur_ms=100.0),
        event("conn.close", at(0, 7), dur_ms=100.0),
    ]


def test_selects_metric_and_path_by_event() -> None:

    result = run_job(LATENCY_JOB, Span(day(0), day(0)), make_log())

    assert [tuple(row.values())[1:] for row in result["latency_hist"]] == [
        (5, "a", "push", "live", 0, 2),
        (6, "a", "ack", "", -349, 1),
        (7, "", "request", "", 232, 1),
        (7, "a", "request", "decentrl", 232, 1),
    ]
