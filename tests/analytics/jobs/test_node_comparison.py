"""Comparison of each node with the median of all nodes."""

from __future__ import annotations

from typing import Any

import pytest

from analytics.job import Span
from analytics.jobs.node_comparison import NODES_JOB
from analytics.settings import Settings
from tests.analytics.job_tables import at, day, event, run_job

Row = dict[str, Any]

SPAN = Span(day(0), day(1))


def test_flags_nodes_far_from_median() -> None:
    """A node without traffic is flagged, too. Negligible values and a single node are not."""
    found = run_job(NODES_JOB, SPAN, make_events(), Settings(node_factor=2), make_tables())["node_compare"]
    first = {(row["metric"], row["node"]): row for row in found if row["dt"] == day(0)}
    assert {key for key, row in first.items() if row["flagged"]} == {
        ("requests", "idle"),
        ("messages_accepted", "idle"),
        ("bytes_accepted", "idle"),
        ("error_share", "slow"),
        ("failed_share", "slow"),
        ("request_p95_ms", "slow"),
        ("push_live_p95_ms", "slow"),
        ("request_mean_ms", "slow"),
        ("lag_max_ms", "slow"),
    }
    figures = {
        ("requests", "fast"): (1000, 850, 1000 / 850),
        ("requests", "idle"): (0, 850, 100 / 850),
        ("error_share", "slow"): (0.5, 0, 50),
        ("request_p95_ms", "slow"): (90, 30, 3),
        ("push_live_p95_ms", "slow"): (150, 9, 3),
        ("push_live_p95_ms", "fast"): (9, 9, 1),
        ("request_mean_ms", "slow"): (40.5, 2, 20.25),
        ("crypto_mean_ms", "fast"): (1.5, 1.5, 1),
        ("messages_acked", "idle"): (0, 5, 1),
        ("queue_depth_max", "idle"): (70, 70, 1),
        ("lag_max_ms", "fast"): (3, 2, 1),
    }
    for key, expected in figures.items():
        row = first[key]
        assert (row["value"], row["median"], row["ratio"]) == pytest.approx(expected, abs=1e-6), key
    # A node without requests has no duration; a single node is the median.
    assert ("request_p95_ms", "idle") not in first
    single = [row for row in found if row["dt"] == day(1)]
    assert {row["node"] for row in single} == {"fast"}
    assert {(row["ratio"], row["flagged"]) for row in single} == {(1.0, False)}


def make_events() -> list[Row]:
    """Requests of three nodes, of which one is slow and fails."""
    request: dict[str, Any] = {"proto": "didcomm", "status": 200}
    return [
        event("req.done", node="fast", dur_ms=1.0, crypto_ms=1.5, **request),
        event("req.done", node="fast", dur_ms=3.0, **request),
        event("req.done", node="other", dur_ms=2.0, **request),
        event("req.done", node="slow", dur_ms=80.0, **request),
        event("req.done", node="slow", dur_ms=1.0, status=500),
        event("req.done", at(1), node="fast", dur_ms=1.0, code="x", **request),
    ]


def make_tables() -> dict[str, list[Row]]:
    """Figures of four nodes, of which one has only gauges."""
    traffic = [
        {"node": node, "event": name, "n": n, "bytes": n * 1000}
        for node, requests in (("fast", 1000), ("other", 900), ("slow", 800))
        for name, n in (("req.done", requests - 300), ("req.done", 300), ("msg.accept", 400), ("msg.ack", 5))
    ]
    latency = [
        {"node": node, "metric": metric, "path": path, "p95_ms": p95}
        for node, metric, path, p95 in (
            ("fast", "request", "*", 20.0),
            ("other", "request", "*", 30.0),
            ("slow", "request", "*", 90.0),
            ("slow", "request", "didcomm", 500.0),
            ("*", "request", "*", 60.0),
            ("fast", "push", "live", 9.0),
            ("other", "push", "live", 9.0),
            ("slow", "push", "live", 150.0),
            # Late fetches of one node dominate its percentile over all paths.
            ("fast", "push", "pickup", 3_600_000.0),
            ("fast", "push", "*", 3_600_000.0),
            ("other", "push", "*", 9.0),
            ("slow", "push", "*", 9.0),
        )
    ]
    gauges = [
        {"node": node, "hour": hour, "depth_max": 60 + 10 * hour, "conns_max": 2, "rss_max": 1000, "lag_ms_max": lag}
        for node, lag in (("fast", 3.0), ("other", 1.0), ("slow", 101.0), ("idle", 1.0))
        for hour in range(2)
    ]
    return {
        "traffic_daily": traffic,
        "latency_daily": latency,
        "queue_hourly": gauges,
        "sockets_daily": [{"node": "fast", "opened": 3}],
    }
