"""J1: how much came and went, by hour, node and protocol."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pyspark.sql import functions as F

from analytics.job import Job, Span
from analytics.settings import Settings

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_KEY = ("node", "proto", "event")


def traffic(tables: Mapping[str, DataFrame], settings: Settings, span: Span) -> dict[str, DataFrame]:
    """`traffic_hourly` and `traffic_daily`."""
    hourly = by_hour(tables["events"]).persist()
    return {"traffic_hourly": hourly, "traffic_daily": by_day(hourly)}


def by_hour(events: DataFrame) -> DataFrame:
    """Number of requests and of each message event, and the bytes of those that have a size."""
    return (
        events.where((F.col("event") == "req.done") | F.col("event").startswith("msg."))
        .groupBy(
            "dt",
            F.hour("ts").alias("hour"),
            F.coalesce("node", F.lit("")).alias("node"),
            F.coalesce("proto", F.lit("")).alias("proto"),
            "event",
        )
        .agg(F.count(F.lit(1)).alias("n"), F.coalesce(F.sum("size"), F.lit(0)).alias("bytes"))
    )


def by_day(hourly: DataFrame) -> DataFrame:
    """The hours of `traffic_hourly` added up."""
    return hourly.groupBy("dt", *_KEY).agg(F.sum("n").alias("n"), F.sum("bytes").alias("bytes"))


JOB = Job("traffic", reads=("events",), makes=("traffic_hourly", "traffic_daily"), transform=traffic)
