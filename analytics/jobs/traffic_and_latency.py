"""Traffic by hour, growth of queues and those about to lose messages, durations, and processing time of requests."""

from __future__ import annotations

from collections.abc import Mapping

from analytics.job import Job, JobRun
from analytics.jobs.shared_scans import scan_requests, scan_state_events, scan_traffic
from analytics.sql_functions import compute_percentiles, rank_per_day

_TRAFFIC_EVENTS = "(event = 'req.done' OR event LIKE 'msg.%')"


def count_traffic(run: JobRun) -> Mapping[str, str]:
    """`traffic_hourly` and `traffic_daily`: requests and message events, and bytes where there is a size."""
    counts = scan_traffic(run)
    sums = f"sum(n) AS n, sum(bytes) AS bytes FROM {counts} WHERE {_TRAFFIC_EVENTS}"
    return {
        "traffic_hourly": f"SELECT dt, hour, node, proto, event, {sums} GROUP BY ALL",
        "traffic_daily": f"SELECT dt, node, proto, event, {sums} GROUP BY ALL",
    }


TRAFFIC_JOB = Job("traffic", reads=("events",), writes=("traffic_hourly", "traffic_daily"), make_tables=count_traffic)


_DAY_SECONDS = 86_400


def summarize_queues(run: JobRun) -> Mapping[str, str]:
    """`queue_hourly`, from the gauges of each hour and node, and `queue_risk`."""
    return {
        "queue_hourly": f"""
            SELECT dt, hour, node, max(depth) AS depth_max, round(avg(depth), 3) AS depth_mean,
                max(bytes) AS bytes_max, max(rcpts) AS rcpts_max, max(oldest_ms) AS oldest_ms_max,
                max(conns) AS conns_max, max(rss) AS rss_max, max(fds) AS fds_max, max(lag_ms) AS lag_ms_max
            FROM {scan_state_events(run)}
            WHERE event = 'gauge' AND dt >= {run.first}
            GROUP BY ALL
        """,
        "queue_risk": _rank_queues_at_risk(run),
    }


def _rank_queues_at_risk(run: JobRun) -> str:
    """
    Query for the queues of each day at greatest risk.

    The growth of a queue is the difference of open messages between two days, which counts every message once.
    Without a ledger of the day before it is unknown, and only expiring messages are at risk.
    """
    capacity = run.settings.queue_max_messages
    queues = f"""
        WITH waiting AS (
            SELECT dt, rcpt, size, epoch_us(accepted_at) // 1000000 + ttl_s - epoch_us(dt + 1) // 1000000 AS left_s
            FROM "open"
            WHERE rcpt IS NOT NULL AND dt BETWEEN {run.first} - 1 AND {run.last}),
        queues AS (
            SELECT dt, rcpt, count(*) AS waiting, coalesce(sum(size), 0) AS bytes,
                count(*) FILTER (WHERE left_s < {_DAY_SECONDS}) AS expiring,
                round(min(CASE WHEN left_s < 0 THEN 0 ELSE left_s END) / {_DAY_SECONDS}, 3) AS days_to_ttl
            FROM waiting GROUP BY ALL),
        after_books AS (SELECT dt + 1 AS dt, true AS has_slope FROM ledger_daily WHERE books <= dt),
        grown AS (
            SELECT dt, rcpt, queues.* EXCLUDE (dt, rcpt),
                CASE WHEN has_slope THEN queues.waiting - coalesce(before.waiting, 0) END AS per_day
            FROM queues LEFT JOIN after_books USING (dt)
            LEFT JOIN (SELECT dt + 1 AS dt, rcpt, waiting FROM queues) AS before USING (dt, rcpt)
            WHERE dt >= {run.first})
        SELECT dt, rcpt, waiting, bytes, days_to_ttl, CAST(per_day AS DOUBLE) AS per_day,
            expiring + greatest(0, waiting + per_day - {capacity}) AS at_risk,
            CASE WHEN per_day > 0 THEN round(greatest(0, {capacity} - waiting) / per_day, 3) END AS days_to_cap
        FROM grown
    """
    return rank_per_day(queues, run.settings.top, "at_risk DESC, waiting DESC, bytes DESC, rcpt")


QUEUES_JOB = Job(
    "queues",
    reads=("events", "open", "ledger_daily"),
    writes=("queue_hourly", "queue_risk"),
    make_tables=summarize_queues,
    history_days={"open": 1, "ledger_daily": 1},
)


LATENCY_QUANTILES = {"p50_ms": 0.5, "p90_ms": 0.9, "p95_ms": 0.95, "p99_ms": 0.99}
ALL_VALUES = "*"


def measure_latency(run: JobRun) -> Mapping[str, str]:
    """
    `latency_hist`, of successful pushes, acknowledgements, and requests of any status; `latency_daily`, of each node
    and path, of all nodes, of all paths, and of both.
    """
    run.scan(
        "latency_counts",
        f"""
        SELECT dt, hour(ts) AS hour, coalesce(node, '') AS node,
            CASE event WHEN 'msg.push' THEN 'push' WHEN 'msg.ack' THEN 'ack' ELSE 'request' END AS metric,
            coalesce(CASE WHEN event = 'req.done' THEN proto ELSE path END, '') AS path,
            latency_bucket(CASE WHEN event = 'req.done' THEN dur_ms ELSE latency_ms END) AS bucket, count(*) AS n
        FROM events
        WHERE dt BETWEEN {run.first} AND {run.last} AND (
            (event = 'req.done' AND dur_ms IS NOT NULL)
            OR (event = 'msg.ack' AND latency_ms IS NOT NULL)
            OR (event = 'msg.push' AND latency_ms IS NOT NULL AND coalesce(ok, true)))
        GROUP BY ALL
        """,
    )
    rolled = f"""
        SELECT dt, unnest([node, '{ALL_VALUES}']) AS node, metric, path, bucket, n
        FROM (SELECT dt, node, metric, unnest([path, '{ALL_VALUES}']) AS path, bucket, n FROM latency_counts)
    """
    return {
        "latency_hist": "SELECT * FROM latency_counts",
        "latency_daily": compute_percentiles(rolled, ("dt", "node", "metric", "path"), LATENCY_QUANTILES, "max_ms"),
    }


LATENCY_JOB = Job("latency", reads=("events",), writes=("latency_hist", "latency_daily"), make_tables=measure_latency)


_COST_KEY = ("dt", "proto", "mtype", "size_class")


def sum_request_cost(run: JobRun) -> Mapping[str, str]:
    """`cost_daily`. Requests of unknown duration count, and have no percentiles."""
    counts, key = scan_requests(run), ", ".join(_COST_KEY)
    percentiles = compute_percentiles(
        f"SELECT {key}, bucket, n FROM {counts} WHERE bucket IS NOT NULL",
        _COST_KEY,
        {"dur_p50_ms": 0.5, "dur_p95_ms": 0.95},
    )
    return {
        "cost_daily": f"""
            SELECT {key}, totals.n, dur_us / 1000 AS dur_ms, crypto_us / 1000 AS crypto_ms, dur_p50_ms, dur_p95_ms
            FROM (
                SELECT {key}, sum(n) AS n, sum(dur_us) AS dur_us, sum(crypto_us) AS crypto_us
                FROM {counts} GROUP BY ALL) AS totals
            LEFT JOIN ({percentiles}) AS percentiles USING ({key})
        """
    }


COST_JOB = Job("cost", reads=("events",), writes=("cost_daily",), make_tables=sum_request_cost)
