"""The figures of the fleet that are watched for anomalies, forecast, and drawn as lines: declared once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Metric:
    """
    :param name: with its unit; figures without one are counts.
    :param title: for people.
    :param kind: a count is zero in an hour without events, anything else is then missing.
    :param day: how hours make a day; "own" where they cannot.
    :param floor: spread below which no hour is judged, in the metric's own unit.
    :param falls_too: whether less than usual is a finding as well.
    :param capacity: whether it is forecast.
    """

    name: str
    title: str
    kind: Literal["count", "level", "ms", "share"]
    day: Literal["sum", "max", "own"]
    floor: float
    falls_too: bool = False
    capacity: bool = False


_ALL = (
    Metric("messages_accepted", "Messages accepted", "count", "sum", 2, falls_too=True, capacity=True),
    Metric("messages_acknowledged", "Messages acknowledged", "count", "sum", 2, falls_too=True),
    Metric("messages_lost", "Messages lost", "count", "sum", 1),
    Metric("bytes_accepted", "Bytes accepted", "count", "sum", 16_384, falls_too=True, capacity=True),
    Metric("requests", "Requests", "count", "sum", 2, falls_too=True),
    Metric("requests_refused", "Requests refused or failed", "count", "sum", 2),
    Metric("error_share", "Share of requests refused or failed", "share", "own", 0.01),
    Metric("sockets_opened", "Sockets opened", "count", "sum", 2),
    Metric("limit_hits", "Hits on rate limits", "count", "sum", 2),
    Metric("replays", "Repeated or untimely requests", "count", "sum", 2),
    Metric("latency_live_p95_ms", "Live push, 95th percentile", "ms", "own", 10),
    Metric("latency_pickup_p95_ms", "Pickup after queueing, 95th percentile", "ms", "own", 1000),
    Metric("connections_peak", "Open sockets, highest", "level", "max", 2, falls_too=True, capacity=True),
    Metric("depth_max", "Waiting messages, highest", "level", "max", 10, capacity=True),
    Metric("queue_bytes_max", "Waiting bytes, highest", "level", "max", 65_536, capacity=True),
    Metric("lag_ms_max", "Reactor lag, highest", "ms", "max", 20),
    Metric("log_bytes", "Bytes of log segments as read", "count", "own", 0, capacity=True),
)

METRICS: dict[str, Metric] = {metric.name: metric for metric in _ALL}
