"""Cost of requests by message type and size."""

from __future__ import annotations

from typing import Any

import pytest

from analytics.job import Span
from analytics.jobs.traffic_and_latency import COST_JOB
from tests.analytics.job_tables import at, day, event, run_job, select_columns

KEY = ("dt", "proto", "mtype", "size_class", "n")


def make_log() -> list[dict[str, Any]]:
    """Requests of two sizes, and some of unknown type or duration."""
    return [
        *(
            event("req.done", proto="didcomm", mtype="forward", size=size, dur_ms=float(ms), crypto_ms=ms / 10)
            for ms in range(1, 101)
            for size in (10, 5000)
        ),
        *(event("req.done", at(1), proto="didcomm", mtype="forward", size=10, dur_ms=0.1) for _ in range(3)),
        event("req.done", proto="didcomm", mtype="forward", size=10),
        event("req.done", status=500),
        event("msg.accept", size=10),
    ]


def test_sums_and_percentiles_by_type_and_size() -> None:
    """Sums are exact. Requests of unknown duration count, but have no percentile."""
    small, large, unknown, next_day = _sort_rows(run_job(COST_JOB, Span(day(0), day(1)), make_log())["cost_daily"])
    assert select_columns([small, large, unknown, next_day], *KEY) == [
        (day(0), "didcomm", "forward", "0 <1K", 101),
        (day(0), "didcomm", "forward", "2 <16K", 100),
        (day(0), "", "", "", 1),
        (day(1), "didcomm", "forward", "0 <1K", 3),
    ]
    assert select_columns([small, large, unknown, next_day], "dur_ms", "crypto_ms") == [
        (5050.0, 505.0),
        (5050.0, 505.0),
        (None, None),
        (0.3, None),
    ]
    for row in (small, large):
        assert row["dur_p50_ms"] == pytest.approx(50, rel=0.02)
        assert row["dur_p95_ms"] == pytest.approx(95, rel=0.02)
    assert (unknown["dur_p50_ms"], unknown["dur_p95_ms"]) == (None, None)


def _sort_rows(rows: list[dict[str, object]]) -> list[dict[str, object]]:
    """Sort by day; rows without a protocol last."""
    return sorted(rows, key=lambda row: (row["dt"], row["proto"] == "", row["size_class"]))
