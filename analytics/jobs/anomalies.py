"""
J12: hours unlike the same hours of the weeks before.

What is usual is a median, and how far values stray from it a median too, so that one bad hour among the samples
changes neither. With three or four samples the deviation of an hour is a matter of luck; it is therefore never taken
to be less than what is usual for the metric at all hours.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from pyspark.sql import Window
from pyspark.sql import functions as F

from analytics.job import Job, Span
from analytics.metrics import METRICS
from analytics.settings import Settings

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

LONGEST_BASELINE_DAYS = 92
# A whole week, so that a Sunday is not judged by working days alone.
_SAMPLES_OF_ANY_DAY = 7
# Of a normal distribution: sigma by the median of deviations, by their third quartile, by the distance of deciles.
_BY_MEDIAN_DEVIATION = 1.4826
_BY_THIRD_QUARTILE = 1 / 1.1503
_BY_DECILES = 1 / 2.5631
# Of what is usual. Durations have long tails: less than three times as long as usual is no finding.
_RELATIVE_FLOOR = 0.05
_RELATIVE_FLOOR_MS = 0.35

_CELL = ("dt", "metric", "hour")


def _transform(tables: Mapping[str, DataFrame], settings: Settings, span: Span) -> dict[str, DataFrame]:
    series = tables["series_hourly"].select("dt", "hour", "metric", "value")
    judged = series.where(F.col("dt").between(F.lit(span.first), F.lit(span.last)))
    history = series.where(F.col("dt") >= F.lit(span.first - timedelta(settings.baseline_days)))
    usual = _usual(_samples(judged, history, settings.baseline_days), settings.baseline_samples)
    found = _judged(judged.join(usual, [*_CELL]), settings.anomaly_z)
    return {"anomalies": found}


def _samples(judged: DataFrame, history: DataFrame, days: int) -> DataFrame:
    """Columns dt, metric, hour, sample (value), same_day (of the week): all of the history of each day and metric."""
    earlier = history.select(F.col("dt").alias("day"), "metric", "hour", F.col("value").alias("sample"))
    within = F.col("day").between(F.date_sub("dt", days), F.date_sub("dt", 1))
    return (
        judged.select("dt", "metric")
        .distinct()
        .join(earlier, "metric")
        .where(within)
        .withColumn("weekday", F.weekday("day"))
    )


def _usual(samples: DataFrame, fewest: int) -> DataFrame:
    """Columns dt, metric, hour, expected, spread, samples, baseline; no row where there are too few samples."""
    of_week = Window.partitionBy(*_CELL, "weekday")
    strayed = samples.withColumn("middle", F.median("sample").over(of_week)).withColumn(
        "off", F.abs(F.col("sample") - F.col("middle"))
    )
    return (
        _by_hour_of_day(strayed)
        .join(_by_hour_of_week(strayed, fewest), [*_CELL], "left")
        .join(_noise(strayed), ["dt", "metric"])
        .where((F.col("week_samples") >= fewest) | (F.col("day_samples") >= max(fewest, _SAMPLES_OF_ANY_DAY)))
        .select(*_CELL, *_choice())
    )


def _by_hour_of_week(strayed: DataFrame, fewest: int) -> DataFrame:
    same = strayed.where(F.col("weekday") == F.weekday("dt"))
    return (
        same.groupBy(*_CELL)
        .agg(
            F.count("*").alias("week_samples"),
            F.max("middle").alias("week_middle"),
            (F.median("off") * _BY_MEDIAN_DEVIATION).alias("week_spread"),
        )
        .where(F.col("week_samples") >= fewest)
    )


def _by_hour_of_day(strayed: DataFrame) -> DataFrame:
    """Working days and weekends differ, so it is the outer deciles that tell how far values stray."""
    deciles = F.percentile("sample", F.lit(0.9)) - F.percentile("sample", F.lit(0.1))
    return strayed.groupBy(*_CELL).agg(
        F.count("*").alias("day_samples"),
        F.median("sample").alias("day_middle"),
        (deciles * _BY_DECILES).alias("day_spread"),
    )


def _noise(strayed: DataFrame) -> DataFrame:
    """How far values stray at all hours: by the root of what is usual where it counts things."""
    off = F.col("off") / F.greatest(_scale(F.col("middle")), F.lit(1e-9))
    third_quartile = F.percentile(F.when(F.col("middle") > 0, off), F.lit(0.75))
    return strayed.groupBy("dt", "metric").agg((third_quartile * _BY_THIRD_QUARTILE).alias("noise"))


def _scale(usual: Column) -> Column:
    return F.when(_of_metric("counted"), F.sqrt(usual)).otherwise(usual)


def _choice() -> list[Column]:
    weekly = F.col("week_samples").isNotNull()
    expected = F.when(weekly, F.col("week_middle")).otherwise(F.col("day_middle"))
    scale = _scale(expected)
    relative = F.when(_of_metric("kind") == "ms", _RELATIVE_FLOOR_MS).otherwise(_RELATIVE_FLOOR)
    by_chance = F.when(_of_metric("counted"), scale)
    floors = (F.col("noise") * scale, expected * relative, by_chance, _of_metric("floor"))
    own = F.when(weekly, F.col("week_spread")).otherwise(F.col("day_spread"))
    return [
        F.round(expected, 6).alias("expected"),
        F.round(F.greatest(own, *floors), 6).alias("spread"),
        F.when(weekly, F.col("week_samples")).otherwise(F.col("day_samples")).cast("int").alias("samples"),
        F.when(weekly, F.lit("hour_of_week")).otherwise(F.lit("hour_of_day")).alias("baseline"),
    ]


def _judged(measured: DataFrame, limit: float) -> DataFrame:
    z = F.round((F.col("value") - F.col("expected")) / F.col("spread"), 3)
    beyond = (F.col("z") > limit) | (_of_metric("falls_too") & (F.col("z") < -limit))
    return measured.withColumn("z", z).where(beyond).withColumn("reason", _reason())


def _reason() -> Column:
    hour = F.lpad(F.col("hour").cast("string"), 2, "0")
    weekly = F.col("baseline") == "hour_of_week"
    same = F.when(weekly, F.concat(F.lit("on a "), F.date_format("dt", "EEEE"))).otherwise(F.lit("on any day"))
    return F.concat(
        *(_of_metric("title"), F.lit(": "), _told("value"), F.lit(" in the hour from "), hour, F.lit(":00 UTC; ")),
        *(F.lit("usual at that hour "), same, F.lit(" is "), _told("expected")),
        *(F.lit(" (the middle of "), F.col("samples").cast("string"), F.lit(" samples). That is ")),
        *(F.format_number(F.abs("z"), 1), F.lit(" times the usual spread of "), _told("spread")),
        F.when(F.col("z") > 0, F.lit(" above it.")).otherwise(F.lit(" below it.")),
    )


def _told(name: str) -> Column:
    """A value with its unit."""
    value = F.col(name)
    percent = F.concat(F.format_number(value * 100, 1), F.lit(" %"))
    milliseconds = F.concat(F.format_number(value, 0), F.lit(" ms"))
    kind = _of_metric("kind")
    return F.when(kind == "share", percent).when(kind == "ms", milliseconds).otherwise(F.format_number(value, 0))


def _of_metric(what: str) -> Column:
    """What is declared of the row's metric; null of an unknown one."""
    told: dict[str, Any] = {
        name: metric.kind in ("count", "level") if what == "counted" else getattr(metric, what)
        for name, metric in METRICS.items()
    }
    pairs = (F.lit(float(part) if type(part) is int else part) for pair in told.items() for part in pair)
    return F.create_map(*pairs)[F.col("metric")]


JOB = Job(
    name="anomalies",
    reads=(),
    makes=("anomalies",),
    transform=_transform,
    recalls={"series_hourly": LONGEST_BASELINE_DAYS},
)
