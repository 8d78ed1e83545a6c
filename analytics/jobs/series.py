"""
J12, first part: the fleet's figures by hour and by day (:data:`analytics.metrics.METRICS`), a row for each.

An hour in which no node logged anything, between hours with logs, is an outage: nothing was accepted, so its counts
are 0. The hours before the first logs and after the last ones say nothing: there may be logs that are not here.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from typing import TYPE_CHECKING

from pyspark.sql import functions as F

from analytics.histogram import percentiles
from analytics.job import Job, Span
from analytics.metrics import METRICS
from analytics.settings import Settings

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

# Below these many values an hour says nothing: a percentile of ten, a share of thirty.
_FEWEST_FOR_P95 = 20
_FEWEST_FOR_SHARE = 100

_HOUR = ("dt", "hour")
_LATENCIES = {"latency_live_p95_ms": ("live",), "latency_pickup_p95_ms": ("pickup", "poll")}


def _transform(tables: Mapping[str, DataFrame], settings: Settings, span: Span) -> dict[str, DataFrame]:
    hours = _hours(tables, tables["series_hourly"].select("dt", "hour"))
    hourly = hours.join(_latency(tables["latency_hist"], *_HOUR), [*_HOUR], "left")
    daily = _days(hours).join(_latency(tables["latency_hist"], "dt"), "dt", "left")
    daily = daily.join(tables["inputs"].groupBy("dt").agg(F.sum("bytes").alias("log_bytes")), "dt", "left")
    return {"series_hourly": _rows(hourly, *_HOUR), "series_daily": _rows(daily, "dt")}


def _hours(tables: Mapping[str, DataFrame], before: DataFrame) -> DataFrame:
    """
    A row for each hour that any node logged something in, and those of outages; a column for each metric but
    latencies.

    :param before: the hours of the day before the span.
    """
    sources = [_traffic(tables["traffic_hourly"]), _gauges(tables["queue_hourly"]), _rare(tables["events"])]
    together = reduce(lambda one, other: one.unionByName(other, allowMissingColumns=True), sources)
    names = [name for name in together.columns if name not in _HOUR]
    # Each column comes from one source: all other rows of the hour are null.
    logged = together.groupBy(*_HOUR).agg(*(F.max(name).alias(name) for name in names)).persist()
    hours = _without_gaps(logged.select(*_HOUR), before).join(logged, [*_HOUR], "left")
    counts = {name: F.coalesce(name, F.lit(0)) for name in names if METRICS[name].kind == "count"}
    return _with_share(hours.withColumns(counts))


def _without_gaps(logged: DataFrame, before: DataFrame) -> DataFrame:
    """These hours, and those that lie between two of the same day, or between one of the day before and the first."""
    days = logged.groupBy("dt").agg(F.min("hour").alias("first"), F.max("hour").alias("last"))
    after = logged.unionByName(before).select(F.date_add("dt", 1).alias("dt"), F.lit(0).alias("midnight")).distinct()
    hours = F.sequence(F.coalesce("midnight", "first"), "last")
    return days.join(after, "dt", "left").select("dt", F.explode(hours).alias("hour"))


def _traffic(traffic: DataFrame) -> DataFrame:
    def total(*events: str, of: str = "n") -> Column:
        return F.sum(F.when(F.col("event").isin(*events), F.col(of)))

    return traffic.groupBy(*_HOUR).agg(
        total("msg.accept").alias("messages_accepted"),
        total("msg.ack").alias("messages_acknowledged"),
        total("msg.expire", "msg.evict", "msg.remove").alias("messages_lost"),
        total("msg.accept", of="bytes").alias("bytes_accepted"),
        total("req.done").alias("requests"),
    )


def _gauges(queues: DataFrame) -> DataFrame:
    """Nodes share one store, so its depth is what the highest of them says; sockets are each node's own."""
    return queues.groupBy(*_HOUR).agg(
        F.sum("conns_max").alias("connections_peak"),
        F.max("depth_max").alias("depth_max"),
        F.max("bytes_max").alias("queue_bytes_max"),
        F.max("lag_ms_max").alias("lag_ms_max"),
    )


def _rare(events: DataFrame) -> DataFrame:
    """What no other table has by the hour."""
    event = F.col("event")
    refused = (event == "req.done") & (F.col("code").isNotNull() | (F.col("status") >= 400))
    wanted = events.where(event.isin("conn.open", "limit.hit", "replay.drop") | refused)
    return wanted.groupBy("dt", F.hour("ts").alias("hour")).agg(
        F.count_if(event == "req.done").alias("requests_refused"),
        F.count_if(event == "conn.open").alias("sockets_opened"),
        F.count_if(event == "limit.hit").alias("limit_hits"),
        F.count_if(event == "replay.drop").alias("replays"),
    )


def _latency(hist: DataFrame, *by: str) -> DataFrame:
    """Columns `by` and a percentile each of live and of queued delivery, milliseconds since acceptance."""
    name = reduce(
        lambda other, metric: F.when(F.col("path").isin(*_LATENCIES[metric]), F.lit(metric)).otherwise(other),
        _LATENCIES,
        F.lit(None),
    )
    named = hist.where("metric = 'push'").withColumn("name", name).where("name is not null")
    found = percentiles(named, [*by, "name"], {"p95": 0.95}).where(F.col("n") >= _FEWEST_FOR_P95)
    wanted = (F.max(F.when(F.col("name") == metric, F.col("p95"))).alias(metric) for metric in _LATENCIES)
    return found.groupBy(*by).agg(*wanted)


def _days(hours: DataFrame) -> DataFrame:
    make = {"sum": F.sum, "max": F.max}
    totals = [make[METRICS[name].day](name).alias(name) for name in hours.columns if _adds_up(name)]
    return _with_share(hours.groupBy("dt").agg(*totals))


def _adds_up(name: str) -> bool:
    return name in METRICS and METRICS[name].day != "own"


def _with_share(frame: DataFrame) -> DataFrame:
    share = F.round(F.col("requests_refused") / F.col("requests"), 6)
    return frame.withColumn("error_share", F.when(F.col("requests") >= _FEWEST_FOR_SHARE, share))


def _rows(wide: DataFrame, *by: str) -> DataFrame:
    """Columns `by`, `metric` and `value`; none where there is no value."""
    names = [name for name in wide.columns if name in METRICS]
    doubles = wide.select(*by, *(F.col(name).cast("double").alias(name) for name in names))
    return doubles.unpivot(list(by), list(names), "metric", "value").where("value is not null")


JOB = Job(
    name="series",
    reads=("traffic_hourly", "queue_hourly", "latency_hist", "inputs", "events"),
    makes=("series_hourly", "series_daily"),
    transform=_transform,
    recalls={"series_hourly": 1},
)
