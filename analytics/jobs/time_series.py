"""
Figures of all nodes by hour and day, anomalies among them, and a capacity forecast.

Series: an hour without any line, between hours with lines, is an outage: its counts are 0. Hours before the first and
after the last line have no values: their logs may be missing.

Anomalies: both the baseline and its spread are medians, so that one bad hour among the samples changes neither. With
three or four samples the deviation of an hour is mostly chance; it is therefore never taken to be less than usual
for the metric at all hours.

Forecast: a linear trend plus an effect of each weekday. The trend is the median slope between equal weekdays
(Theil-Sen, by season as in Hirsch and Slack), so that neither weekends nor a few odd days bend it. The interval comes
from the residuals of the history and widens with the distance from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import reduce
from typing import TYPE_CHECKING, Any, Literal

from pyspark.sql import Window
from pyspark.sql import functions as F

from analytics.job import Job, Span
from analytics.jobs.column_functions import compute_percentiles
from analytics.settings import Settings

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


@dataclass(frozen=True, slots=True)
class Metric:
    """
    :param name: includes the unit; figures without one are counts.
    :param title: display name.
    :param kind: a count is 0 in an hour without events; other kinds are missing then.
    :param day: how hours aggregate to a day; "own" if they cannot.
    :param floor: minimum spread, in the metric's unit.
    :param falls_too: whether low values are anomalies as well.
    :param capacity: whether it is forecast.
    """

    name: str
    title: str
    kind: Literal["count", "level", "ms", "share"]
    day: Literal["sum", "max", "own"]
    floor: float
    falls_too: bool = False
    capacity: bool = False


_METRICS = (
    Metric("messages_accepted", "Messages accepted", "count", "sum", 2, falls_too=True, capacity=True),
    Metric("messages_acknowledged", "Messages acknowledged", "count", "sum", 2, falls_too=True),
    Metric("messages_lost", "Messages lost", "count", "sum", 1),
    Metric("bytes_accepted", "Bytes accepted", "count", "sum", 16_384, falls_too=True, capacity=True),
    Metric("requests", "Requests", "count", "sum", 2, falls_too=True),
    Metric("requests_refused", "Requests refused or failed", "count", "sum", 2),
    Metric("error_share", "Share of requests refused or failed", "share", "own", 0.01),
    Metric("sockets_opened", "Sockets opened", "count", "sum", 2),
    Metric("limit_hits", "Rate-limit hits", "count", "sum", 2),
    Metric("replays", "Replayed or untimely requests", "count", "sum", 2),
    Metric("latency_live_p95_ms", "Live push, 95th percentile", "ms", "own", 10),
    Metric("latency_pickup_p95_ms", "Pickup after queueing, 95th percentile", "ms", "own", 1000),
    Metric("connections_peak", "Concurrent sockets, maximum", "level", "max", 2, falls_too=True, capacity=True),
    Metric("depth_max", "Queued messages, maximum", "level", "max", 10, capacity=True),
    Metric("queue_bytes_max", "Queued bytes, maximum", "level", "max", 65_536, capacity=True),
    Metric("lag_ms_max", "Reactor lag, maximum", "ms", "max", 20),
    Metric("log_bytes", "Bytes of log segments", "count", "own", 0, capacity=True),
)

METRICS: dict[str, Metric] = {metric.name: metric for metric in _METRICS}


# Minimum numbers of values for an hourly figure to be meaningful.
_MIN_VALUES_FOR_P95 = 20
_MIN_REQUESTS_FOR_SHARE = 100

_HOUR_KEY = ("dt", "hour")
_LATENCY_PATHS = {"latency_live_p95_ms": ("live",), "latency_pickup_p95_ms": ("pickup", "poll")}


def _make_series(tables: Mapping[str, DataFrame], settings: Settings, span: Span) -> dict[str, DataFrame]:
    hours = _combine_hours(tables, tables["series_hourly"].select("dt", "hour"))
    hourly = hours.join(_compute_p95(tables["latency_hist"], *_HOUR_KEY), [*_HOUR_KEY], "left")
    daily = _sum_days(hours).join(_compute_p95(tables["latency_hist"], "dt"), "dt", "left")
    daily = daily.join(tables["inputs"].groupBy("dt").agg(F.sum("bytes").alias("log_bytes")), "dt", "left")
    return {"series_hourly": _unpivot_metrics(hourly, *_HOUR_KEY), "series_daily": _unpivot_metrics(daily, "dt")}


def _combine_hours(tables: Mapping[str, DataFrame], before: DataFrame) -> DataFrame:
    """
    A row for each hour with any line, and for hours of outages; a column for each metric except latencies.

    :param before: hours of the day before the span.
    """
    sources = [
        _measure_traffic(tables["traffic_hourly"]),
        _measure_gauges(tables["queue_hourly"]),
        _count_rare_events(tables["events"]),
    ]
    together = reduce(lambda one, other: one.unionByName(other, allowMissingColumns=True), sources)
    names = [name for name in together.columns if name not in _HOUR_KEY]
    # Each column has one source: all other rows of the hour are null.
    logged = together.groupBy(*_HOUR_KEY).agg(*(F.max(name).alias(name) for name in names)).persist()
    hours = _fill_outage_hours(logged.select(*_HOUR_KEY), before).join(logged, [*_HOUR_KEY], "left")
    counts = {name: F.coalesce(name, F.lit(0)) for name in names if METRICS[name].kind == "count"}
    return _add_error_share(hours.withColumns(counts))


def _fill_outage_hours(logged: DataFrame, before: DataFrame) -> DataFrame:
    """These hours, and those between two of the same day, or between one of the day before and the first."""
    days = logged.groupBy("dt").agg(F.min("hour").alias("first"), F.max("hour").alias("last"))
    after = logged.unionByName(before).select(F.date_add("dt", 1).alias("dt"), F.lit(0).alias("midnight")).distinct()
    hours = F.sequence(F.coalesce("midnight", "first"), "last")
    return days.join(after, "dt", "left").select("dt", F.explode(hours).alias("hour"))


def _measure_traffic(traffic: DataFrame) -> DataFrame:
    def total(*events: str, of: str = "n") -> Column:
        return F.sum(F.when(F.col("event").isin(*events), F.col(of)))

    return traffic.groupBy(*_HOUR_KEY).agg(
        total("msg.accept").alias("messages_accepted"),
        total("msg.ack").alias("messages_acknowledged"),
        total("msg.expire", "msg.evict").alias("messages_lost"),
        total("msg.accept", of="bytes").alias("bytes_accepted"),
        total("req.done").alias("requests"),
    )


def _measure_gauges(queues: DataFrame) -> DataFrame:
    """Nodes share one store, so its depth is the maximum over nodes; sockets are summed."""
    return queues.groupBy(*_HOUR_KEY).agg(
        F.sum("conns_max").alias("connections_peak"),
        F.max("depth_max").alias("depth_max"),
        F.max("bytes_max").alias("queue_bytes_max"),
        F.max("lag_ms_max").alias("lag_ms_max"),
    )


def _count_rare_events(events: DataFrame) -> DataFrame:
    """Hourly counts that no other table has."""
    event = F.col("event")
    refused = (event == "req.done") & (F.col("code").isNotNull() | (F.col("status") >= 400))
    wanted = events.where(event.isin("conn.open", "limit.hit", "replay.drop") | refused)
    return wanted.groupBy("dt", F.hour("ts").alias("hour")).agg(
        F.count_if(event == "req.done").alias("requests_refused"),
        F.count_if(event == "conn.open").alias("sockets_opened"),
        F.count_if(event == "limit.hit").alias("limit_hits"),
        F.count_if(event == "replay.drop").alias("replays"),
    )


def _compute_p95(hist: DataFrame, *by: str) -> DataFrame:
    """Columns `by`, and the 95th percentiles of live and of queued delivery, in milliseconds since acceptance."""
    name = reduce(
        lambda other, metric: F.when(F.col("path").isin(*_LATENCY_PATHS[metric]), F.lit(metric)).otherwise(other),
        _LATENCY_PATHS,
        F.lit(None),
    )
    named = hist.where("metric = 'push'").withColumn("name", name).where("name is not null")
    found = compute_percentiles(named, [*by, "name"], {"p95": 0.95}).where(F.col("n") >= _MIN_VALUES_FOR_P95)
    wanted = (F.max(F.when(F.col("name") == metric, F.col("p95"))).alias(metric) for metric in _LATENCY_PATHS)
    return found.groupBy(*by).agg(*wanted)


def _sum_days(hours: DataFrame) -> DataFrame:
    make = {"sum": F.sum, "max": F.max}
    totals = [make[METRICS[name].day](name).alias(name) for name in hours.columns if _is_additive(name)]
    return _add_error_share(hours.groupBy("dt").agg(*totals))


def _is_additive(name: str) -> bool:
    return name in METRICS and METRICS[name].day != "own"


def _add_error_share(frame: DataFrame) -> DataFrame:
    share = F.round(F.col("requests_refused") / F.col("requests"), 6)
    return frame.withColumn("error_share", F.when(F.col("requests") >= _MIN_REQUESTS_FOR_SHARE, share))


def _unpivot_metrics(wide: DataFrame, *by: str) -> DataFrame:
    """Columns `by`, `metric` and `value`, without nulls."""
    names = [name for name in wide.columns if name in METRICS]
    doubles = wide.select(*by, *(F.col(name).cast("double").alias(name) for name in names))
    return doubles.unpivot(list(by), list(names), "metric", "value").where("value is not null")


SERIES_JOB = Job(
    name="series",
    reads=("traffic_hourly", "queue_hourly", "latency_hist", "inputs", "events"),
    writes=("series_hourly", "series_daily"),
    transform=_make_series,
    history_days={"series_hourly": 1},
)


MAX_BASELINE_DAYS = 92
# A whole week, so that Sundays are not compared with working days only.
_MIN_ANY_DAY_SAMPLES = 7
# For a normal distribution: sigma by median deviation, by third quartile of deviations, by decile range.
_SIGMA_PER_MAD = 1.4826
_SIGMA_PER_THIRD_QUARTILE = 1 / 1.1503
_SIGMA_PER_DECILE_RANGE = 1 / 2.5631
# Relative to the baseline. Durations have long tails: less than three times the baseline is no anomaly.
_RELATIVE_FLOOR = 0.05
_RELATIVE_FLOOR_MS = 0.35

_CELL_KEY = ("dt", "metric", "hour")


def _make_anomalies(tables: Mapping[str, DataFrame], settings: Settings, span: Span) -> dict[str, DataFrame]:
    series = tables["series_hourly"].select("dt", "hour", "metric", "value")
    current = series.where(F.col("dt").between(F.lit(span.first), F.lit(span.last)))
    history = series.where(F.col("dt") >= F.lit(span.first - timedelta(settings.baseline_days)))
    usual = _compute_baseline(_collect_samples(current, history, settings.baseline_days), settings.baseline_samples)
    found = _select_anomalies(current.join(usual, [*_CELL_KEY]), settings.anomaly_z)
    return {"anomalies": found}


def _collect_samples(current: DataFrame, history: DataFrame, days: int) -> DataFrame:
    """Columns dt, metric, hour, sample (value), weekday: the history of each day and metric."""
    earlier = history.select(F.col("dt").alias("day"), "metric", "hour", F.col("value").alias("sample"))
    within = F.col("day").between(F.date_sub("dt", days), F.date_sub("dt", 1))
    return (
        current.select("dt", "metric")
        .distinct()
        .join(earlier, "metric")
        .where(within)
        .withColumn("weekday", F.weekday("day"))
    )


def _compute_baseline(samples: DataFrame, fewest: int) -> DataFrame:
    """Columns dt, metric, hour, expected, spread, samples, baseline; no row with too few samples."""
    of_week = Window.partitionBy(*_CELL_KEY, "weekday")
    deviations = samples.withColumn("middle", F.median("sample").over(of_week)).withColumn(
        "off", F.abs(F.col("sample") - F.col("middle"))
    )
    return (
        _compute_daily_baseline(deviations)
        .join(_compute_weekly_baseline(deviations, fewest), [*_CELL_KEY], "left")
        .join(_measure_noise(deviations), ["dt", "metric"])
        .where((F.col("week_samples") >= fewest) | (F.col("day_samples") >= max(fewest, _MIN_ANY_DAY_SAMPLES)))
        .select(*_CELL_KEY, *_choose_baseline())
    )


def _compute_weekly_baseline(deviations: DataFrame, fewest: int) -> DataFrame:
    same = deviations.where(F.col("weekday") == F.weekday("dt"))
    return (
        same.groupBy(*_CELL_KEY)
        .agg(
            F.count("*").alias("week_samples"),
            F.max("middle").alias("week_middle"),
            (F.median("off") * _SIGMA_PER_MAD).alias("week_spread"),
        )
        .where(F.col("week_samples") >= fewest)
    )


def _compute_daily_baseline(deviations: DataFrame) -> DataFrame:
    """Working days and weekends differ, so the spread comes from the outer deciles."""
    deciles = F.percentile("sample", F.lit(0.9)) - F.percentile("sample", F.lit(0.1))
    return deviations.groupBy(*_CELL_KEY).agg(
        F.count("*").alias("day_samples"),
        F.median("sample").alias("day_middle"),
        (deciles * _SIGMA_PER_DECILE_RANGE).alias("day_spread"),
    )


def _measure_noise(deviations: DataFrame) -> DataFrame:
    """Spread at all hours, relative to the baseline, or to its root for counts."""
    off = F.col("off") / F.greatest(_get_scale(F.col("middle")), F.lit(1e-9))
    third_quartile = F.percentile(F.when(F.col("middle") > 0, off), F.lit(0.75))
    return deviations.groupBy("dt", "metric").agg((third_quartile * _SIGMA_PER_THIRD_QUARTILE).alias("noise"))


def _get_scale(usual: Column) -> Column:
    return F.when(_get_metric_attribute("counted"), F.sqrt(usual)).otherwise(usual)


def _choose_baseline() -> list[Column]:
    weekly = F.col("week_samples").isNotNull()
    expected = F.when(weekly, F.col("week_middle")).otherwise(F.col("day_middle"))
    scale = _get_scale(expected)
    relative = F.when(_get_metric_attribute("kind") == "ms", _RELATIVE_FLOOR_MS).otherwise(_RELATIVE_FLOOR)
    by_chance = F.when(_get_metric_attribute("counted"), scale)
    floors = (F.col("noise") * scale, expected * relative, by_chance, _get_metric_attribute("floor"))
    own = F.when(weekly, F.col("week_spread")).otherwise(F.col("day_spread"))
    return [
        F.round(expected, 6).alias("expected"),
        F.round(F.greatest(own, *floors), 6).alias("spread"),
        F.when(weekly, F.col("week_samples")).otherwise(F.col("day_samples")).cast("int").alias("samples"),
        F.when(weekly, F.lit("hour_of_week")).otherwise(F.lit("hour_of_day")).alias("baseline"),
    ]


def _select_anomalies(measured: DataFrame, limit: float) -> DataFrame:
    z = F.round((F.col("value") - F.col("expected")) / F.col("spread"), 3)
    beyond = (F.col("z") > limit) | (_get_metric_attribute("falls_too") & (F.col("z") < -limit))
    return measured.withColumn("z", z).where(beyond).withColumn("reason", _format_reason())


def _format_reason() -> Column:
    hour = F.lpad(F.col("hour").cast("string"), 2, "0")
    weekly = F.col("baseline") == "hour_of_week"
    samples = F.when(weekly, F.concat(F.date_format("dt", "EEEE"), F.lit("s"))).otherwise(F.lit("days"))
    return F.concat(
        *(
            _get_metric_attribute("title"),
            F.lit(": "),
            _format_value("value"),
            F.lit(" in the hour from "),
            hour,
            F.lit(":00 UTC, "),
        ),
        F.when(F.col("z") > 0, F.lit("above")).otherwise(F.lit("below")),
        *(F.lit(" the usual "), _format_value("expected"), F.lit(" (median of "), F.col("samples").cast("string")),
        *(F.lit(" "), samples, F.lit(" at that hour) by "), F.format_number(F.abs("z"), 1)),
        *(F.lit(" times the usual spread of "), _format_value("spread"), F.lit(".")),
    )


def _format_value(name: str) -> Column:
    """A value with its unit."""
    value = F.col(name)
    percent = F.concat(F.format_number(value * 100, 1), F.lit(" %"))
    milliseconds = F.concat(F.format_number(value, 0), F.lit(" ms"))
    kind = _get_metric_attribute("kind")
    return F.when(kind == "share", percent).when(kind == "ms", milliseconds).otherwise(F.format_number(value, 0))


def _get_metric_attribute(what: str) -> Column:
    """Declared attribute of the row's metric; null of an unknown one."""
    attributes: dict[str, Any] = {
        name: metric.kind in ("count", "level") if what == "counted" else getattr(metric, what)
        for name, metric in METRICS.items()
    }
    pairs = (F.lit(float(part) if type(part) is int else part) for pair in attributes.items() for part in pair)
    return F.create_map(*pairs)[F.col("metric")]


ANOMALIES_JOB = Job(
    name="anomalies",
    reads=(),
    writes=("anomalies",),
    transform=_make_anomalies,
    history_days={"series_hourly": MAX_BASELINE_DAYS},
)


MAX_HISTORY_DAYS = 183
MIN_HISTORY_DAYS = 14

# Key of a fit: its day, the metric, and whether the last days are held back.
_FIT_KEY = ("dt", "metric", "held")
# Trend, and six weekdays relative to the seventh.
_MODEL_PARAMETERS = 8
# 80 % of a normal distribution.
_INTERVAL_SIGMAS = 1.2816


def _make_forecast(tables: Mapping[str, DataFrame], settings: Settings, span: Span) -> dict[str, DataFrame]:
    points = _collect_points(tables["series_daily"], settings, span)
    known = points.where(~F.col("held") | (F.col("t") <= -settings.held_back_days))
    # Both tables use it.
    fit = _fit_model(known).persist()
    to_come = F.explode(F.sequence(F.lit(1), F.lit(settings.forecast_days)))
    ahead = fit.where("not held").withColumn("t", to_come).withColumn("day", F.date_add("dt", F.col("t")))
    forecast = _predict(ahead).select("dt", "metric", "day", "value", "low", "high")
    return {
        "forecast": forecast,
        "forecast_error": _measure_error(fit.where("held"), points, settings.held_back_days),
    }


def _collect_points(series: DataFrame, settings: Settings, span: Span) -> DataFrame:
    """
    Columns of a fit, t (days after dt, 0 or less) and y: the history of each day, with and without the held-back
    days.
    """
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


def _fit_model(points: DataFrame) -> DataFrame:
    """
    Columns of a fit, `slope` and `level` (at t = 0), `effects` (weekday to effect), `below` and `above` (outer
    deciles of the residuals), their `sigma`, `n`, `sum_t` and `sum_t2`; no row with too short a history.
    """
    all_days, equal_days = Window.partitionBy(*_FIT_KEY), Window.partitionBy(*_FIT_KEY, "weekday")
    flat = points.join(_compute_slopes(points), [*_FIT_KEY]).withColumn(
        "rest", F.col("y") - F.col("slope") * F.col("t")
    )
    leveled = flat.withColumns({"level": F.median("rest").over(all_days), "weekday": _get_weekday()})
    rests = leveled.withColumn("rest", F.col("rest") - F.col("level"))
    rests = rests.withColumn("effect", F.median("rest").over(equal_days))
    rests = rests.withColumn("rest", F.col("rest") - F.col("effect"))
    return rests.groupBy(*_FIT_KEY).agg(
        F.max("slope").alias("slope"),
        F.max("level").alias("level"),
        F.map_from_entries(F.array_sort(F.collect_set(F.struct("weekday", "effect")))).alias("effects"),
        F.percentile("rest", F.lit(0.1)).alias("below"),
        F.percentile("rest", F.lit(0.9)).alias("above"),
        (F.median(F.abs("rest")) * _SIGMA_PER_MAD).alias("sigma"),
        F.count("*").alias("n"),
        F.sum("t").alias("sum_t"),
        F.sum(F.col("t") * F.col("t")).alias("sum_t2"),
    )


def _compute_slopes(points: DataFrame) -> DataFrame:
    """Columns of a fit and `slope` per day; only of histories of two weeks or more."""
    later = points.select(*_FIT_KEY, F.col("t").alias("t2"), F.col("y").alias("y2"))
    same_weekday = (F.col("t2") > F.col("t")) & ((F.col("t2") - F.col("t")) % 7 == 0)
    slope = (F.col("y2") - F.col("y")) / (F.col("t2") - F.col("t"))
    enough = points.withColumn("days", F.count("*").over(Window.partitionBy(*_FIT_KEY)))
    pairs = enough.where(F.col("days") >= MIN_HISTORY_DAYS).join(later, [*_FIT_KEY]).where(same_weekday)
    return pairs.groupBy(*_FIT_KEY).agg(F.median(slope).alias("slope"))


def _predict(wanted: DataFrame) -> DataFrame:
    """Add `value`, `low` and `high`, none below 0, to fits with a column `t`."""
    effect = F.coalesce(F.try_element_at("effects", _get_weekday()), F.lit(0.0))
    value = F.col("level") + F.col("slope") * F.col("t") + effect
    # With few days the residuals underestimate the error.
    fitted = F.sqrt(F.col("n") / (F.col("n") - _MODEL_PARAMETERS))
    mean = F.col("sum_t") / F.col("n")
    away = F.abs(F.col("t") - mean) / F.sqrt(F.col("sum_t2") - mean * F.col("sum_t"))
    trend = _INTERVAL_SIGMAS * F.col("sigma") * fitted * away

    def half_width(quantile: Column) -> Column:
        return F.sqrt(F.pow(quantile * fitted, F.lit(2)) + F.pow(trend, F.lit(2)))

    ends = {"value": value, "low": value - half_width(F.col("below")), "high": value + half_width(F.col("above"))}
    return wanted.withColumns({name: F.round(F.greatest(end, F.lit(0.0)), 3) for name, end in ends.items()})


def _get_weekday() -> Column:
    return F.weekday(F.date_add("dt", F.col("t")))


def _measure_error(fit: DataFrame, points: DataFrame, held_back: int) -> DataFrame:
    every = points.where("held")
    last = every.where(F.col("t") > -held_back)
    # The last equal weekday that was not held back.
    weeks = F.ceil((F.col("t") + held_back) / 7)
    repeated = every.select(*_FIT_KEY, F.col("t").alias("naive_t"), F.col("y").alias("naive"))
    against = (
        _predict(fit.join(last, [*_FIT_KEY]))
        .withColumn("naive_t", F.col("t") - weeks * 7)
        .join(repeated, [*_FIT_KEY, "naive_t"])
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


FORECAST_JOB = Job(
    name="forecast",
    reads=(),
    writes=("forecast", "forecast_error"),
    transform=_make_forecast,
    history_days={"series_daily": MAX_HISTORY_DAYS},
)
