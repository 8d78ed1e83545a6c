"""
J12, last part: capacity a month ahead: a straight trend plus what each day of the week is above or below it.

The trend is the median slope between equal days of the week (Theil and Sen, by season as Hirsch and Slack have it),
so that neither weekends nor a few odd days bend it. The interval comes from how far the days of the history were from
the model, and widens with the distance from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING

from pyspark.sql import Window
from pyspark.sql import functions as F

from analytics.job import Job, Span
from analytics.metrics import METRICS
from analytics.settings import Settings

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

LONGEST_HISTORY_DAYS = 183
FEWEST_DAYS = 14

# One fit: the day that it is made on, the metric, and whether the last days are held back from it.
_FIT = ("dt", "metric", "held")
# Trend, and six days of the week against the seventh.
_PARAMETERS = 8
# 80 % of a normal distribution.
_WIDTH = 1.2816
_BY_MEDIAN_DEVIATION = 1.4826


def _transform(tables: Mapping[str, DataFrame], settings: Settings, span: Span) -> dict[str, DataFrame]:
    points = _points(tables["series_daily"], settings, span)
    known = points.where(~F.col("held") | (F.col("t") <= -settings.held_back_days))
    # Two tables come from it.
    fit = _fit(known).persist()
    to_come = F.explode(F.sequence(F.lit(1), F.lit(settings.forecast_days)))
    ahead = fit.where("not held").withColumn("t", to_come).withColumn("day", F.date_add("dt", F.col("t")))
    forecast = _predicted(ahead).select("dt", "metric", "day", "value", "low", "high")
    return {"forecast": forecast, "forecast_error": _error(fit.where("held"), points, settings.held_back_days)}


def _points(series: DataFrame, settings: Settings, span: Span) -> DataFrame:
    """Columns of a fit, t (days after dt, 0 or less) and y: the history of each day of the span, held back or not."""
    wanted = series.where(F.col("metric").isin(*(name for name, metric in METRICS.items() if metric.capacity)))
    days = wanted.where(F.col("dt").between(F.lit(span.first), F.lit(span.last))).select("dt", "metric")
    history = wanted.where(F.col("dt") > F.lit(span.first - timedelta(settings.forecast_history_days))).select(
        F.col("dt").alias("day"), "metric", F.col("value").alias("y")
    )
    t = F.date_diff("day", "dt")
    pairs = days.join(history, "metric").withColumn("t", t)
    pairs = pairs.where(F.col("t").between(1 - settings.forecast_history_days, 0))
    held = F.explode(F.array(F.lit(False), F.lit(True)))
    return pairs.select("dt", "metric", held.alias("held"), "t", "y")


def _fit(points: DataFrame) -> DataFrame:
    """
    Columns of a fit, `slope` and `level` (of t = 0), `effects` (weekday to effect), `below` and `above` (outer
    deciles of what is left), `sigma` of it, `n`, `sum_t` and `sum_t2`; none of too short a history.
    """
    all_days, equal_days = Window.partitionBy(*_FIT), Window.partitionBy(*_FIT, "weekday")
    flat = points.join(_slopes(points), [*_FIT]).withColumn("rest", F.col("y") - F.col("slope") * F.col("t"))
    leveled = flat.withColumns({"level": F.median("rest").over(all_days), "weekday": _weekday()})
    rests = leveled.withColumn("rest", F.col("rest") - F.col("level"))
    rests = rests.withColumn("effect", F.median("rest").over(equal_days))
    rests = rests.withColumn("rest", F.col("rest") - F.col("effect"))
    return rests.groupBy(*_FIT).agg(
        F.max("slope").alias("slope"),
        F.max("level").alias("level"),
        F.map_from_entries(F.array_sort(F.collect_set(F.struct("weekday", "effect")))).alias("effects"),
        F.percentile("rest", F.lit(0.1)).alias("below"),
        F.percentile("rest", F.lit(0.9)).alias("above"),
        (F.median(F.abs("rest")) * _BY_MEDIAN_DEVIATION).alias("sigma"),
        F.count("*").alias("n"),
        F.sum("t").alias("sum_t"),
        F.sum(F.col("t") * F.col("t")).alias("sum_t2"),
    )


def _slopes(points: DataFrame) -> DataFrame:
    """Columns of a fit and `slope`: a day more; of histories of two weeks or more only."""
    later = points.select(*_FIT, F.col("t").alias("t2"), F.col("y").alias("y2"))
    same_weekday = (F.col("t2") > F.col("t")) & ((F.col("t2") - F.col("t")) % 7 == 0)
    slope = (F.col("y2") - F.col("y")) / (F.col("t2") - F.col("t"))
    enough = points.withColumn("days", F.count("*").over(Window.partitionBy(*_FIT)))
    pairs = enough.where(F.col("days") >= FEWEST_DAYS).join(later, [*_FIT]).where(same_weekday)
    return pairs.groupBy(*_FIT).agg(F.median(slope).alias("slope"))


def _predicted(wanted: DataFrame) -> DataFrame:
    """Fits with a column `t`; adds `value`, `low` and `high`, none of them below zero."""
    effect = F.coalesce(F.try_element_at("effects", _weekday()), F.lit(0.0))
    value = F.col("level") + F.col("slope") * F.col("t") + effect
    # The fewer days a model was made from, the closer it is to them.
    fitted = F.sqrt(F.col("n") / (F.col("n") - _PARAMETERS))
    mean = F.col("sum_t") / F.col("n")
    away = F.abs(F.col("t") - mean) / F.sqrt(F.col("sum_t2") - mean * F.col("sum_t"))
    trend = _WIDTH * F.col("sigma") * fitted * away

    def half(quantile: Column) -> Column:
        return F.sqrt(F.pow(quantile * fitted, F.lit(2)) + F.pow(trend, F.lit(2)))

    ends = {"value": value, "low": value - half(F.col("below")), "high": value + half(F.col("above"))}
    return wanted.withColumns({name: F.round(F.greatest(end, F.lit(0.0)), 3) for name, end in ends.items()})


def _weekday() -> Column:
    return F.weekday(F.date_add("dt", F.col("t")))


def _error(fit: DataFrame, points: DataFrame, held_back: int) -> DataFrame:
    every = points.where("held")
    last = every.where(F.col("t") > -held_back)
    # The last equal day of the week that was not held back.
    weeks = F.ceil((F.col("t") + held_back) / 7)
    repeated = every.select(*_FIT, F.col("t").alias("naive_t"), F.col("y").alias("naive"))
    against = (
        _predicted(fit.join(last, [*_FIT]))
        .withColumn("naive_t", F.col("t") - weeks * 7)
        .join(repeated, [*_FIT, "naive_t"])
    )
    actual = F.sum(F.abs("y"))
    share = {
        "mape": F.sum(F.abs(F.col("value") - F.col("y"))),
        "naive_mape": F.sum(F.abs(F.col("naive") - F.col("y"))),
    }
    inside = F.col("y").between(F.col("low"), F.col("high"))
    return (
        against.groupBy("dt", "metric")
        .agg(
            F.count("*").cast("int").alias("held_back"),
            F.max("n").cast("int").alias("trained_on"),
            *(F.round(F.try_divide(off, actual), 6).alias(name) for name, off in share.items()),
            F.round(F.avg(inside.cast("int")), 6).alias("inside"),
        )
        .where("mape is not null")
    )


JOB = Job(
    name="forecast",
    reads=(),
    makes=("forecast", "forecast_error"),
    transform=_transform,
    recalls={"series_daily": LONGEST_HISTORY_DAYS},
)
