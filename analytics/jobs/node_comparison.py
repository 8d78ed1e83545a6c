"""Each node compared with the median of all nodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from analytics.job import Job, JobRun
from analytics.jobs.shared_scans import scan_requests
from analytics.jobs.traffic_and_latency import ALL_VALUES


@dataclass(frozen=True, slots=True)
class NodeMetric:
    """
    A compared figure.

    :param floor: lower values count as this, because ratios of very small values mean nothing.
    :param counted: a missing value counts as 0.
    """

    name: str
    floor: float
    counted: bool = False


NODE_METRICS = (
    NodeMetric("requests", 100, counted=True),
    NodeMetric("messages_accepted", 100, counted=True),
    NodeMetric("bytes_accepted", 100_000, counted=True),
    NodeMetric("messages_acked", 100, counted=True),
    NodeMetric("sockets_opened", 100, counted=True),
    NodeMetric("error_share", 0.01),
    NodeMetric("failed_share", 0.001),
    NodeMetric("request_p95_ms", 5),
    NodeMetric("push_live_p95_ms", 50),
    NodeMetric("request_mean_ms", 1),
    NodeMetric("crypto_mean_ms", 1),
    NodeMetric("queue_depth_max", 100),
    NodeMetric("sockets_max", 20),
    NodeMetric("rss_max_bytes", 50_000_000),
    NodeMetric("lag_max_ms", 50),
)


def compare_nodes(run: JobRun) -> Mapping[str, str]:
    """`node_compare`; a node is flagged outside 1/node_factor to node_factor times the median of all."""
    factor = run.settings.node_factor
    names = ", ".join(metric.name for metric in NODE_METRICS)
    floors = ", ".join(f"('{metric.name}', {metric.floor}::DOUBLE)" for metric in NODE_METRICS)
    return {
        "node_compare": f"""
            WITH compared AS (
                SELECT *, median(value) OVER (PARTITION BY dt, metric) AS median
                FROM (UNPIVOT ({_measure_nodes(run)}) ON {names} INTO NAME metric VALUE value)),
            ratios AS (
                SELECT *, greatest(value, floor) / greatest(median, floor) AS ratio
                FROM compared JOIN (VALUES {floors}) AS floors (metric, floor) USING (metric))
            SELECT dt, node, metric, round(value, 6) AS value, round(median, 6) AS median, round(ratio, 6) AS ratio,
                ratio NOT BETWEEN {1 / factor!r} AND {factor!r} AS flagged
            FROM ratios
        """
    }


def _measure_nodes(run: JobRun) -> str:
    """
    Query for :data:`NODE_METRICS` of every node that logged traffic, a gauge or a request: a double each, null if
    unknown. A node that only removed messages is an operator and is omitted.
    """
    columns = ", ".join(
        f"CAST({f'coalesce({metric.name}, 0)' if metric.counted else metric.name} AS DOUBLE) AS {metric.name}"
        for metric in NODE_METRICS
    )
    days = f"dt BETWEEN {run.first} AND {run.last}"
    sources = (
        _measure_traffic(days),
        _measure_requests(scan_requests(run)),
        _measure_latencies(days),
        _measure_gauges(days),
        f"SELECT dt, node, opened AS sockets_opened FROM sockets_daily WHERE {days}",
    )
    joined = " FULL JOIN ".join(
        f"({source}) AS source_{number}{' USING (dt, node)' if number else ''}"
        for number, source in enumerate(sources)
    )
    return f"SELECT dt, node, {columns} FROM {joined}"


def _measure_traffic(days: str) -> str:
    def total(event: str, column: str, name: str) -> str:
        return f"sum({column}) FILTER (WHERE event = '{event}') AS {name}"

    return f"""
        SELECT dt, node, {total("req.done", "n", "requests")}, {total("msg.accept", "n", "messages_accepted")},
            {total("msg.accept", "bytes", "bytes_accepted")}, {total("msg.ack", "n", "messages_acked")}
        FROM traffic_daily WHERE event <> 'msg.remove' AND {days} GROUP BY dt, node
    """


def _measure_requests(counts: str) -> str:
    """Shares of refused and of failed requests, 0 to 1, and mean times in milliseconds."""
    return f"""
        SELECT dt, node, coalesce(sum(n) FILTER (WHERE refused), 0) / sum(n) AS error_share,
            coalesce(sum(n) FILTER (WHERE status >= 500), 0) / sum(n) AS failed_share,
            sum(dur_us) / sum(timed) / 1000 AS request_mean_ms,
            sum(crypto_us) / sum(crypto_timed) / 1000 AS crypto_mean_ms
        FROM {counts} GROUP BY dt, node
    """


def _measure_latencies(days: str) -> str:
    """Live pushes only: the time before a pickup does not depend on the node."""

    def p95(metric: str, path: str, name: str) -> str:
        return f"max(p95_ms) FILTER (WHERE metric = '{metric}' AND path = '{path}') AS {name}"

    return f"""
        SELECT dt, node, {p95("request", ALL_VALUES, "request_p95_ms")}, {p95("push", "live", "push_live_p95_ms")}
        FROM latency_daily WHERE node <> '{ALL_VALUES}' AND {days} GROUP BY dt, node
    """


def _measure_gauges(days: str) -> str:
    return f"""
        SELECT dt, node, max(depth_max) AS queue_depth_max, max(conns_max) AS sockets_max,
            max(rss_max) AS rss_max_bytes, max(lag_ms_max) AS lag_max_ms
        FROM queue_hourly WHERE {days} GROUP BY dt, node
    """


NODES_JOB = Job(
    "nodes",
    reads=("events", "traffic_daily", "latency_daily", "queue_hourly", "sockets_daily"),
    writes=("node_compare",),
    make_tables=compare_nodes,
)
