"""Time series of all nodes by hour and by day."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date, timedelta
from typing import Any

from analytics.job import Span
from analytics.jobs.time_series import METRICS, SERIES_JOB
from tests.analytics.job_tables import at, event, run_job, select_columns

MONDAY = date(2026, 11, 16)
TUESDAY = date(2026, 11, 17)
THURSDAY = date(2026, 11, 19)


def make_traffic(hour: int, event: str, n: int, size: int = 0, node: str = "a", dt: date = MONDAY) -> dict[str, Any]:
    return {"dt": dt, "hour": hour, "node": node, "proto": "didcomm", "event": event, "n": n, "bytes": size}


def make_gauge(hour: int, node: str, conns: int, depth: int, lag_ms: float, dt: date = MONDAY) -> dict[str, Any]:
    figures = {"conns_max": conns, "depth_max": depth, "bytes_max": depth * 10, "lag_ms_max": lag_ms}
    return {"dt": dt, "hour": hour, "node": node, **figures}


def make_pushes(path: str, bucket: int, n: int, hour: int = 9, metric: str = "push") -> dict[str, Any]:
    return {"dt": MONDAY, "hour": hour, "node": "a", "metric": metric, "path": path, "bucket": bucket, "n": n}


TABLES = {
    "traffic_hourly": [
        make_traffic(9, "msg.accept", 60, 6000),
        make_traffic(9, "msg.accept", 40, 5000, node="b"),
        make_traffic(9, "msg.ack", 80),
        make_traffic(9, "msg.expire", 1),
        make_traffic(9, "msg.evict", 2, node="b"),
        make_traffic(9, "msg.remove", 4),
        make_traffic(9, "req.done", 200),
        make_traffic(10, "req.done", 99),
        make_traffic(0, "req.done", 5, dt=TUESDAY),
    ],
    # Only gauges from 11 to 12: a node without traffic. Nothing from 12 on.
    "queue_hourly": [
        make_gauge(9, "a", 10, 70, 1.5),
        make_gauge(9, "b", 20, 60, 40.25),
        make_gauge(10, "a", 12, 90, 1.0),
        make_gauge(11, "a", 0, 0, 0.0),
    ],
    "latency_hist": [
        make_pushes("live", 100, 19),
        make_pushes("live", 300, 1),
        make_pushes("pickup", 500, 10),
        make_pushes("poll", 600, 10),
        make_pushes("live", 400, 19, hour=10),
        make_pushes("live", 900, 1000, metric="ack"),
        make_pushes("http", 900, 1000),
    ],
    "inputs": [{"dt": MONDAY, "stem": "one", "bytes": 1000}, {"dt": MONDAY, "stem": "two", "bytes": 234}],
}
EVENTS = [
    event(name, at(0, hour, 59, 59), code=code, status=status)
    for hour, name, code, status in (
        (9, "req.done", None, None),
        (9, "req.done", "e.p.me.res.not-found", 400),
        (9, "req.done", None, 503),
        (10, "req.done", "SOMETHING", 200),
        (9, "conn.open", None, None),
        (11, "conn.open", None, None),
        (11, "limit.hit", None, None),
        (11, "replay.drop", None, None),
        (11, "gauge", None, None),
        (12, "gauge", None, None),
    )
]


def compute_bucket_center(bucket: int) -> float:
    return round(float(1.02 ** (bucket + 0.5)), 6)


# A column for each hour with logs: Monday 9, 10, 11 and Tuesday 0.
HOURS: dict[str, tuple[float | None, float | None, float | None, float | None]] = {
    "messages_accepted": (100, 0, 0, 0),
    "messages_acknowledged": (80, 0, 0, 0),
    # What was removed is not lost.
    "messages_lost": (3, 0, 0, 0),
    "bytes_accepted": (11_000, 0, 0, 0),
    "requests": (200, 99, 0, 5),
    "requests_refused": (2, 1, 0, 0),
    # One of ninety-nine requests is too few for a share.
    "error_share": (0.01, None, None, None),
    "sockets_opened": (1, 0, 1, 0),
    "limit_hits": (0, 0, 1, 0),
    "replays": (0, 0, 1, 0),
    # Nineteen pushes are too few for the 95th percentile.
    "latency_live_p95_ms": (compute_bucket_center(100), None, None, None),
    "latency_pickup_p95_ms": (compute_bucket_center(600), None, None, None),
    "connections_peak": (30, 12, 0, None),
    "depth_max": (70, 90, 0, None),
    "queue_bytes_max": (700, 900, 0, None),
    "lag_ms_max": (40.25, 1.0, 0, None),
}
DAYS: dict[str, tuple[float | None, float | None]] = {
    "messages_accepted": (100, 0),
    "messages_acknowledged": (80, 0),
    "messages_lost": (3, 0),
    "bytes_accepted": (11_000, 0),
    "requests": (299, 5),
    "requests_refused": (3, 0),
    "error_share": (0.010033, None),
    "sockets_opened": (2, 0),
    "limit_hits": (1, 0),
    "replays": (1, 0),
    # Of the whole day: 38 at 400 and 100, one at 300.
    "latency_live_p95_ms": (compute_bucket_center(400), None),
    "latency_pickup_p95_ms": (compute_bucket_center(600), None),
    "connections_peak": (30, None),
    "depth_max": (90, None),
    "queue_bytes_max": (900, None),
    "lag_ms_max": (40.25, None),
    "log_bytes": (1234, None),
}


def test_series_by_hour_and_day() -> None:
    """An idle node that runs yields zeros; hours before the first and after the last logs have no row."""
    found = run_job(SERIES_JOB, Span(MONDAY, TUESDAY), EVENTS, tables=TABLES)

    list_hours = ((MONDAY, 9), (MONDAY, 10), (MONDAY, 11), (TUESDAY, 0))
    assert select_columns(found["series_hourly"], "dt", "hour", "metric", "value") == sorted(
        (dt, hour, metric, value)
        for metric, values in HOURS.items()
        for (dt, hour), value in zip(list_hours, values, strict=True)
        if value is not None
    )
    assert select_columns(found["series_daily"], "dt", "metric", "value") == sorted(
        (dt, metric, value)
        for metric, values in DAYS.items()
        for dt, value in zip((MONDAY, TUESDAY), values, strict=True)
        if value is not None
    )
    assert set(DAYS) == set(METRICS)


def test_counts_during_outage_are_zero() -> None:
    """
    Hours between logs of a day, or since logs of the day before, have counts of 0 and no other metrics. A nightly run
    knows as much as a back-fill.
    """

    def run_hourly(span: Span, *lines: dict[str, Any], before: Sequence[dict[str, Any]] = ()) -> list[dict[str, Any]]:
        return run_job(SERIES_JOB, span, tables={"queue_hourly": lines, "series_hourly": before})["series_hourly"]

    nights = {
        MONDAY: [make_gauge(20, "a", 1, 5, 1.0), make_gauge(22, "a", 1, 5, 1.0)],
        TUESDAY: [make_gauge(2, "a", 1, 5, 1.0, TUESDAY)],
        THURSDAY: [make_gauge(9, "a", 1, 5, 1.0, THURSDAY)],
    }
    all_at_once = run_hourly(Span(MONDAY, THURSDAY), *(line for lines in nights.values() for line in lines))

    def list_hours(metric: str) -> list[tuple[Any, ...]]:
        return select_columns((row for row in all_at_once if row["metric"] == metric), "dt", "hour", "value")

    found = [(MONDAY, 20), (MONDAY, 21), (MONDAY, 22), (TUESDAY, 0), (TUESDAY, 1), (TUESDAY, 2), (THURSDAY, 9)]
    assert list_hours("requests") == [(*hour, 0.0) for hour in found]
    assert list_hours("depth_max") == [(*hour, 5.0) for hour in found if hour[1] not in (21, 0, 1)]
    for night, lines in nights.items():
        before = [row for row in all_at_once if row["dt"] == night - timedelta(1)]
        expected = [row for row in all_at_once if row["dt"] == night]
        assert run_hourly(Span(night, night), *lines, before=before) == expected


def test_no_rows_without_input() -> None:
    assert run_job(SERIES_JOB, Span(MONDAY, MONDAY)) == {"series_hourly": [], "series_daily": []}
