"""Rows of all report tables for a day on which every check fails and every section has contents."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, date, datetime, timedelta
from math import exp, log, sin, tau
from typing import Any

from analytics.job import Span
from analytics.jobs.time_series import METRICS
from analytics.report.content import REPORT_QUERIES, ReportData
from analytics.schema import TABLES
from analytics.settings import Settings
from analytics.writing.runs import RunInfo

DAY = date(2026, 11, 20)  # a Friday
HOSTILE = "<script>alert('no')</script>"
FORMULA = "=1+1"

Rows = dict[str, list[dict[str, Any]]]

RUN_INFO = RunInfo(
    version="0.1.0",
    span=Span(DAY - timedelta(2), DAY),
    now=datetime(2026, 11, 21, 1, 2, 3, tzinfo=UTC),
    final_until=DAY - timedelta(2),
    duration_s=46.6,
)


def fill_columns(table: str, row: Mapping[str, Any]) -> dict[str, Any]:
    """A row with all declared columns of its table; absent ones are null."""
    assert row.keys() <= {column.name for column in TABLES[table].columns}, (table, row)
    types = {column.name: column.type for column in TABLES[table].columns}
    columns = {name: row.get(name) for name in types} | {"dt": row.get("dt", DAY)}
    # Columns of doubles may be given as integers.
    return {
        name: float(value) if types[name] == "double" and value is not None else value
        for name, value in columns.items()
    }


def count_hourly_messages(hour: int, dt: date) -> float:
    """Messages of an hour: more by day, fewer at weekends, slowly growing."""
    growth = 1 + 0.004 * (dt - DAY).days
    return round(4000 * growth * (0.6 if dt.weekday() > 4 else 1) * (1 + 0.8 * sin(tau * (hour - 9) / 24)))


def make_hourly_metrics(hour: int, dt: date) -> dict[str, float]:
    messages_in_hour = count_hourly_messages(hour, dt)
    incident = dt == DAY and hour in (14, 15)
    return {
        "messages_accepted": messages_in_hour * (0.2 if incident else 1),
        "messages_acknowledged": messages_in_hour * (0.1 if incident else 0.97),
        "messages_lost": 180.0 if incident else 0.0,
        "requests": messages_in_hour * 2.4,
        "requests_refused": messages_in_hour * (0.4 if incident else 0.02),
        "limit_hits": 40.0 if incident else 0.0,
        "latency_live_p95_ms": 900.0 if incident else 14 + hour / 10,
        "latency_pickup_p95_ms": 7_200_000.0 + 100_000 * hour,
        "depth_max": 12_000 + messages_in_hour / 4 + (9000 if incident else 0),
    }


METRICS_WITHOUT_LOGS = {name: 0.0 for name in make_hourly_metrics(4, DAY) if METRICS[name].kind == "count"}


def make_series_rows() -> Rows:
    days = [DAY - timedelta(n) for n in range(28, -1, -1)]
    hourly = [
        {"dt": dt, "hour": hour, "metric": metric, "value": value}
        for dt in days
        for hour in range(24)
        for metric, value in (
            METRICS_WITHOUT_LOGS if (dt, hour) == (DAY, 4) else make_hourly_metrics(hour, dt)
        ).items()
    ]
    past = [DAY - timedelta(n) for n in range(55, -1, -1)]
    totals = {dt: sum(count_hourly_messages(hour, dt) for hour in range(24)) for dt in past}
    shares = {
        "messages_accepted": 1.0,
        "bytes_accepted": 2500.0,
        "connections_peak": 0.02,
        "depth_max": 0.15,
        "messages_lost": 0.0004,
    }
    daily = [
        {"dt": dt, "metric": metric, "value": round(totals[dt] * factor)}
        for metric, factor in shares.items()
        for dt in past
    ]
    forecast = [
        {"metric": metric, "day": day, "value": value, "low": value * 0.92, "high": value * (1.08 + 0.003 * n)}
        for metric, factor in shares.items()
        if METRICS[metric].capacity
        for n in range(1, 31)
        for day in [DAY + timedelta(n)]
        for value in [factor * sum(count_hourly_messages(hour, day) for hour in range(24))]
    ]
    error = {"held_back": 7, "trained_on": 49, "mape": 0.031, "naive_mape": 0.064, "inside": 6 / 7}
    return {
        "series_hourly": hourly,
        "series_daily": daily,
        "forecast": forecast,
        "forecast_error": [{"metric": metric, **error} for metric in shares if METRICS[metric].capacity],
    }


def make_latency_rows() -> Rows:
    middles = {"live": 12.0, "pickup": 1_500_000.0, "poll": 400_000.0}
    buckets = [
        {
            "hour": 9,
            "node": "a",
            "metric": "push",
            "path": path,
            "bucket": middle + n,
            "n": round(9000 * exp(-n * n / 5000)),
        }
        for path, ms in middles.items()
        for middle in [int(log(ms) / log(1.02))]
        for n in range(-150, 151, 2)
    ]
    percentiles = {"p50_ms": 12.0, "p90_ms": 40.0, "p95_ms": 66.0, "p99_ms": 910.0, "max_ms": 45_000.0}
    daily = [
        {"node": node, "metric": metric, "path": path, "n": 60_000, **percentiles}
        for node in ("*", "a")
        for metric, path in (("push", "live"), ("push", "pickup"), ("push", "*"), ("ack", "*"), ("request", "*"))
    ]
    return {"latency_hist": buckets, "latency_daily": daily}


def make_store_rows() -> list[dict[str, Any]]:
    """Two stores: one has a gap and no difference, the other a difference."""
    entries = ("accepted", "acknowledged", "expired", "evicted", "removed", "withdrawn", "waiting", "difference")
    totals_before_waiting = (500_000, 480_000, 5_000, 1_000, 300, 0)
    changes = (96_020, 93_810, 210, 150, 40, 0, 1_810, None)
    gaps = (10, 0, 0, 0, 0, None, None, None)
    rows = []
    for store, totals in (
        ("5b1c", (*totals_before_waiting, 13_700, 0)),
        (HOSTILE, (*totals_before_waiting, 13_698, 2)),
    ):
        for entry, total, change, gap in zip(entries, totals, changes, gaps, strict=True):
            logged = None if gap is None or change is None else change - gap
            row = {"store": store, "proto": "didcomm", "entry": entry, "total": total, "change": change}
            rows.append({**row, "logged": logged, "own": None if gap is None else 0, "gap": gap})
    return rows


def make_message_rows() -> Rows:
    ledger = {"opening": 11_900, "accepted": 96_000, "acked": 93_800, "expired": 210, "evicted": 150, "removed": 40}
    past = [
        {
            **ledger,
            "dt": DAY - timedelta(n),
            "expired": 9 + n,
            "evicted": 0,
            "open": 13_700,
            "orphans": 0,
            "difference": 0,
        }
        for n in range(1, 29)
    ]
    today = {
        **ledger,
        "open": 13_697,
        "difference": 3,
        "orphans": 2,
        "around_crash": 4,
        "before_books": 0,
        "again": 17,
        "overdue": 3,
        "vanished": 1,
        "lost_unaccepted": 2,
    }
    lost = [
        ("ttl", "1 <4K", "8 3d+", False, 160),
        ("fifo_count", "2 <16K", "6 <1d", True, 150),
        ("ttl", "0 <1K", "8 3d+", True, 50),
    ]
    keys = ("reason", "size_class", "age_class", "pushed", "n")
    states = {"acked": 93_800, "expired": 210, "evicted": 150, "removed": 40, "open": 13_697}
    return {
        "ledger_daily": [*past, today],
        "stores_daily": make_store_rows(),
        "lost_daily": [{**dict(zip(keys, row, strict=True)), "bytes": row[-1] * 3000} for row in lost],
        "messages_daily": [
            {"proto": "didcomm", "state": state, "age_class": "2 <1m", "pushes_class": "1", "n": n, "bytes": n * 2500}
            for state, n in states.items()
        ],
        "traffic_daily": [
            {"node": node, "proto": "didcomm", "event": event, "n": 48_000, "bytes": 120_000_000}
            for node in ("a", "b")
            for event in ("req.done", "msg.accept", "msg.push", "msg.ack")
        ],
        "anomalies": [
            {
                "hour": hour,
                "metric": "messages_lost",
                "value": 180.0,
                "expected": 0.0,
                "spread": 1.0,
                "z": 180.0,
                "samples": 4,
                "baseline": "hour_of_week",
                "reason": f"Messages lost: 180 in the hour from {hour}:00 UTC, above the usual 0 (median of 4 "
                "Fridays at that hour) by 180.0 times the usual spread of 1.",
            }
            for hour in (14, 15)
        ],
    }


def make_log_rows() -> Rows:
    agreeing_counter = {"node": "a", "counted": 96_000, "logged": 96_000, "difference": 0}
    return {
        "quality_daily": [
            {"node": "a", "kind": "lines", "n": 9_600_000},
            {"node": "a", "kind": "events", "n": 9_599_799},
            {"node": "a", "kind": "misdated", "n": 201},
            {"node": HOSTILE, "kind": "unknown_event", "n": 3},
            *(
                {"dt": DAY - timedelta(n), "node": node, "kind": "events", "n": 4_800_000}
                for n in range(1, 29)
                for node in ("a", "b", HOSTILE)
            ),
        ],
        "boots_daily": [
            {
                "node": "a",
                "boot": "b1",
                "seq_first": 1,
                "seq_last": 9,
                "n": 9,
                "missing": 0,
                "doubled": 0,
                "stepped_back": 0,
            },
            {
                "node": HOSTILE,
                "boot": "b2",
                "seq_first": 1,
                "seq_last": 9,
                "n": 9,
                "missing": 5,
                "doubled": 1,
                "stepped_back": 0,
            },
        ],
        "inputs": [
            {
                "stem": f"s{n}",
                "bytes": 64_000_000,
                "packed": "gzip",
                "state": "closed",
                "lines": 400_000,
                "corrupt": int(n == 3),
            }
            for n in range(24)
        ],
        "reconciliation_daily": [
            {**agreeing_counter, "counter": "mediator_messages_forwarded_total"},
            {**agreeing_counter, "counter": 'mediator_requests_total{outcome="failed"}', "difference": 4},
        ],
    }


def make_load_rows() -> Rows:
    gauges = {
        "depth_max": 13_000,
        "bytes_max": 30_000_000,
        "oldest_ms_max": 250_000_000,
        "conns_max": 900,
        "lag_ms_max": 41.5,
    }
    error = {
        "proto": "didcomm",
        "mtype": "https://didcomm.org/routing/2.0/forward",
        "status": 400,
        "n": 900,
        "share": 0.01,
    }
    session_sums = {
        "n": 4000,
        "dur_p50_ms": 610_000.0,
        "dur_p95_ms": 7_300_000.0,
        "n_in": 9,
        "n_out": 8,
        "bytes_in": 90_000,
        "bytes_out": 80_000,
    }
    sockets = {"opened": 9100, "authenticated": 9000, "closed": 9050, "unclosed": 2, "storm_minutes": 3, "peak": 880}
    return {
        "queue_hourly": [{"hour": hour, "node": "a", **gauges} for hour in range(24)],
        "queue_risk": [
            {
                "rank": n,
                "rcpt": f"{n:032x}",
                "waiting": 990 - n,
                "bytes": 2_000_000,
                "per_day": 12.5,
                "days_to_cap": 0.8,
                "days_to_ttl": 1.2,
            }
            for n in range(1, 9)
        ],
        "errors_daily": [
            {**error, "code": "e.p.me.res.not-found", "senders": 61, "is_new": False},
            {**error, "code": "e.p.xfer.cant-use-endpoint", "senders": None, "is_new": True},
            {**error, "mtype": HOSTILE, "code": f"{HOSTILE}$x^2$", "senders": 7, "is_new": True},
            {**error, "mtype": FORMULA, "code": "", "senders": 7, "is_new": False, "n": 1},
        ],
        "error_senders": [{"rank": 1, "sender": "ab" * 16, "n": 300, "codes": 2, "worst": "e.p.me.res.not-found"}],
        "limits_daily": [
            {"limit": "per_peer", "hits": 80, "who_n": 6, "bursts": 9, "longest_burst_s": 320.5, "share": 0.002}
        ],
        "limits_top": [{"rank": 1, "who": "cd" * 16, "limit": "per_peer", "hits": 70, "bursts": 3}],
        "replay_daily": [{"code": "DUPLICATE_NONCE", "age_class": "skew", "n": 9, "senders": None, "on_nodes": 0}],
        "sessions_daily": [
            {"node": "a", "proto": "didcomm", "ws_code": code, "reason": "peer", **session_sums}
            for code in (1000, 1001, 1006)
        ],
        "sockets_daily": [{"node": node, **sockets} for node in ("a", "b")],
        "concurrency_10m": [
            {
                "node": node,
                "at": datetime(2026, 11, 20, n // 6, n % 6 * 10, tzinfo=UTC),
                "peak": 500 + n,
                "at_end": 500,
            }
            for node in ("a", "b")
            for n in range(144)
        ],
        "node_compare": [
            {
                "node": HOSTILE,
                "metric": "request_p95_ms",
                "value": 90.0,
                "median": 30.0,
                "ratio": 3.0,
                "flagged": True,
            },
            {
                "node": "a",
                "metric": "requests",
                "value": 110_000.0,
                "median": 100_000.0,
                "ratio": 1.1,
                "flagged": False,
            },
        ],
        "cost_daily": [
            {
                "proto": "didcomm",
                "mtype": mtype,
                "size_class": "1 <4K",
                "n": 9000,
                "dur_ms": 81_000.0,
                "crypto_ms": 60_000.0,
                "dur_p50_ms": 4.0,
                "dur_p95_ms": 21.0,
            }
            for mtype in ("https://didcomm.org/routing/2.0/forward", HOSTILE)
        ],
    }


def make_push_rows() -> Rows:
    requests = {("fcm", "sent"): 900, ("fcm", "gone"): 90, ("web_push", "sent"): 80, ("web_push", "retry"): 30}
    wakeups = {"*": (800, 480), "fcm": (760, 450), "web_push": (80, 50)}
    percentiles = {"p50_ms": 2_500.0, "p90_ms": 31_000.0, "p99_ms": 1_900_000.0}
    codes = {"gone": "UNREGISTERED", "retry": HOSTILE}
    return {
        "push_daily": [
            *(
                {"event": "push.wake", "service": name, "result": result, "code": codes.get(result, ""), "n": n}
                for (name, result), n in requests.items()
            ),
            {"event": "push.forget", "service": "fcm", "result": "UNREGISTERED", "code": "", "n": 120},
        ],
        "wakeups_daily": [
            {"service": name, "n": n, "missed": missed, "missed_share": missed / n, **percentiles}
            for name, (n, missed) in wakeups.items()
        ],
        "wakeups_missed_top": [
            {"rank": n, "did": f"{n * 104_729:032x}", "n": 90 // n, "services": "fcm, webhook"} for n in range(1, 13)
        ],
    }


def make_participant_rows() -> Rows:
    def make_top_rows(name: str) -> list[dict[str, Any]]:
        return [
            {
                "rank": n,
                name: "others" if n == 12 else f"{n * 7919:032x}",
                "n": 9000 // n,
                "bytes": 9_000_000 // n,
                "partners": None if n == 12 else 40 - n,
            }
            for n in range(1, 13)
        ]

    monday = DAY - timedelta(DAY.weekday())
    return {
        "top_senders": make_top_rows("sender"),
        "top_recipients": make_top_rows("rcpt"),
        "concentration_daily": [
            {"side": side, "members": 8000, "n": 96_000, "top_share": 0.22, "gini": 0.61}
            for side in ("sender", "rcpt")
        ],
        "dormant_daily": [{"dormant": 310, "waiting": 4100, "bytes": 10_000_000, "active": 5100, "fresh": 44}],
        "retention_weekly": [
            {
                "epoch": 3,
                "cohort": monday - timedelta(7 * age),
                "week": week,
                "members": 300,
                "active": 290 - 20 * week,
            }
            for age in range(6)
            for week in range(age + 1)
        ],
    }


BUSY_ROWS: Rows = {
    table: [fill_columns(table, row) for row in rows]
    for part in (
        make_series_rows(),
        make_latency_rows(),
        make_message_rows(),
        make_log_rows(),
        make_load_rows(),
        make_push_rows(),
        make_participant_rows(),
    )
    for table, rows in part.items()
}


def make_report_data(rows: Rows) -> ReportData:
    """The report data that :func:`analytics.report.content.load_report_data` loads from tables with these rows."""
    buckets = {name: list(rows.get(name, [])) for name in REPORT_QUERIES}
    if inputs := buckets["inputs"]:
        total = {name: sum(row[name] for row in inputs) for name in ("bytes", "lines", "corrupt")}
        buckets["inputs"] = [{"dt": DAY, "state": "closed", "packed": "gzip", "segments": len(inputs), **total}]
    buckets["latency_hist"] = [
        {name: row[name] for name in ("dt", "metric", "path", "bucket", "n")} for row in buckets["latency_hist"]
    ]
    peaks = {row["at"]: row["peak"] for row in buckets["concurrency_10m"]}
    buckets["concurrency_10m"] = [
        {"dt": DAY, "at_hour": at.hour + at.minute / 60, "peak": 2 * peak} for at, peak in peaks.items()
    ]
    return ReportData(DAY, Settings(), RUN_INFO, buckets)
