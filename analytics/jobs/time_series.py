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

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from datetime import date, timedelta
from decimal import ROUND_HALF_UP, Decimal
from math import ceil, fsum, hypot, sqrt
from statistics import median, quantiles
from typing import Literal

from analytics.database import Row
from analytics.job import Job, JobRun
from analytics.jobs.shared_scans import scan_traffic
from analytics.settings import Settings
from analytics.sql_functions import compute_percentiles, list_texts


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

    @property
    def counted(self) -> bool:
        """Whether chance alone makes it vary by its root."""
        return self.kind in ("count", "level")


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

_LATENCY_PATHS = {"latency_live_p95_ms": ("live",), "latency_pickup_p95_ms": ("pickup", "poll")}


def make_series(run: JobRun) -> dict[str, str]:
    """`series_hourly` and `series_daily`."""
    run.define("logged_hours", _measure_logged_hours(run))
    run.define("hour_figures", _fill_outage_hours(run))
    additive = {name: metric.day for name, metric in METRICS.items() if metric.day != "own"}
    sums = ", ".join(f"{aggregate}({name}) AS {name}" for name, aggregate in additive.items())
    hourly = f"{_add_error_share('hour_figures')} LEFT JOIN ({_compute_p95(run, 'dt', 'hour')}) USING (dt, hour)"
    daily = f"""
        {_add_error_share(f"(SELECT dt, {sums} FROM hour_figures GROUP BY dt)")}
        LEFT JOIN ({_compute_p95(run, "dt")}) USING (dt)
        LEFT JOIN (SELECT dt, sum(bytes) AS log_bytes FROM inputs GROUP BY dt) USING (dt)
    """
    return {
        "series_hourly": _unpivot_metrics(hourly, [name for name in METRICS if name != "log_bytes"], "dt", "hour"),
        "series_daily": _unpivot_metrics(daily, METRICS, "dt"),
    }


def _measure_logged_hours(run: JobRun) -> str:
    """
    Hours with any line, a row for each of three sources; a column for each metric that is not made from others.

    Nodes share one store, so its depth is the maximum over nodes; sockets are summed.
    """
    days = f"dt BETWEEN {run.first} AND {run.last}"
    return f"""
        SELECT dt, hour, sum(n) FILTER (WHERE event = 'msg.accept') AS messages_accepted,
            sum(n) FILTER (WHERE event = 'msg.ack') AS messages_acknowledged,
            sum(n) FILTER (WHERE event IN ('msg.expire', 'msg.evict')) AS messages_lost,
            sum(bytes) FILTER (WHERE event = 'msg.accept') AS bytes_accepted,
            sum(n) FILTER (WHERE event = 'req.done') AS requests
        FROM traffic_hourly WHERE {days} GROUP BY dt, hour
        UNION ALL BY NAME
        SELECT dt, hour, sum(n) FILTER (WHERE refused) AS requests_refused,
            sum(n) FILTER (WHERE event = 'conn.open') AS sockets_opened,
            sum(n) FILTER (WHERE event = 'limit.hit') AS limit_hits,
            sum(n) FILTER (WHERE event = 'replay.drop') AS replays
        FROM {scan_traffic(run)} WHERE refused OR event IN ('conn.open', 'limit.hit', 'replay.drop') GROUP BY dt, hour
        UNION ALL BY NAME
        SELECT dt, hour, sum(conns_max) AS connections_peak, max(depth_max) AS depth_max,
            max(bytes_max) AS queue_bytes_max, max(lag_ms_max) AS lag_ms_max
        FROM queue_hourly WHERE {days} GROUP BY dt, hour
    """


def _fill_outage_hours(run: JobRun) -> str:
    """
    A row for each hour with any line, and for hours of outages: those between two of the same day, or between one of
    the day before and the first.
    """
    figures = ", ".join(
        f"coalesce(max({name}), 0) AS {name}" if metric.kind == "count" else f"max({name}) AS {name}"
        for name, metric in METRICS.items()
        if metric.day != "own"
    )
    return f"""
        WITH days AS (SELECT dt, min(hour) AS first, max(hour) AS last FROM logged_hours GROUP BY dt),
        known AS (SELECT dt FROM days UNION SELECT dt FROM series_hourly WHERE dt = {run.first} - 1),
        hours AS (
            SELECT dt, unnest(range(CASE WHEN dt - 1 IN (FROM known) THEN 0 ELSE first END, last + 1)) AS hour
            FROM days)
        SELECT dt, hour, {figures} FROM hours LEFT JOIN logged_hours USING (dt, hour) GROUP BY dt, hour
    """


def _add_error_share(source: str) -> str:
    share = "round(requests_refused / requests, 6)"
    return f"SELECT *, CASE WHEN requests >= {_MIN_REQUESTS_FOR_SHARE} THEN {share} END AS error_share FROM {source}"


def _compute_p95(run: JobRun, *by: str) -> str:
    """Columns `by`, and the 95th percentiles of live and of queued delivery, in milliseconds since acceptance."""
    names = " ".join(f"WHEN path IN ({list_texts(paths)}) THEN '{name}'" for name, paths in _LATENCY_PATHS.items())
    hist = f"""
        SELECT {", ".join(by)}, CASE {names} END AS name, bucket, n
        FROM latency_hist WHERE metric = 'push' AND name IS NOT NULL AND dt BETWEEN {run.first} AND {run.last}
    """
    columns = ", ".join(f"max(p95) FILTER (WHERE name = '{name}') AS {name}" for name in _LATENCY_PATHS)
    return f"""
        SELECT {", ".join(by)}, {columns} FROM ({compute_percentiles(hist, [*by, "name"], {"p95": 0.95})})
        WHERE n >= {_MIN_VALUES_FOR_P95} GROUP BY ALL
    """


def _unpivot_metrics(wide: str, names: Collection[str], *by: str) -> str:
    """Columns `by`, `metric` and `value`, without nulls."""
    keys = ", ".join(by)
    doubles = ", ".join(f"CAST({name} AS DOUBLE) AS {name}" for name in names)
    return f"""
        SELECT {keys}, metric, value
        FROM (SELECT {keys}, {doubles} FROM ({wide})) UNPIVOT (value FOR metric IN ({", ".join(names)}))
    """


SERIES_JOB = Job(
    "series",
    reads=("traffic_hourly", "queue_hourly", "latency_hist", "inputs", "events"),
    writes=("series_hourly", "series_daily"),
    make_tables=make_series,
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


def find_anomalies(run: JobRun) -> dict[str, list[Row]]:
    """`anomalies`, from `series_hourly` of the span and of the days before it."""
    cells = run.rows(_compare_with_history(run))
    return {"anomalies": [found for cell in cells for found in _assess_hour(cell, run.settings)]}


def _compare_with_history(run: JobRun) -> str:
    """
    Each value of the span with the number of samples, median and spread of the same hour of the week (`week_`) and of
    all days (`day_`), and the `noise`: the spread at all hours, relative to the median, or to its root for counts.
    """
    counted = list_texts(name for name, metric in METRICS.items() if metric.counted)
    return f"""
        WITH current AS (
            SELECT dt, metric, hour, value FROM series_hourly WHERE dt BETWEEN {run.first} AND {run.last}),
        samples AS (
            SELECT days.dt, metric, hour, isodow(earlier.dt) AS weekday, value
            FROM (SELECT DISTINCT dt, metric FROM current) AS days JOIN series_hourly AS earlier USING (metric)
            WHERE earlier.dt BETWEEN days.dt - {run.settings.baseline_days} AND days.dt - 1),
        middles AS (
            SELECT dt, metric, hour, weekday, median(value) AS middle FROM samples GROUP BY ALL),
        deviations AS (
            SELECT *, abs(value - middle) AS off FROM samples JOIN middles USING (dt, metric, hour, weekday)),
        weekly AS (
            SELECT dt, metric, hour, count(*) AS week_samples, median(value) AS week_middle,
                median(off) * {_SIGMA_PER_MAD} AS week_spread
            FROM deviations WHERE weekday = isodow(dt) GROUP BY ALL),
        daily AS (
            SELECT dt, metric, hour, count(*) AS day_samples, median(value) AS day_middle,
                (quantile_cont(value, 0.9) - quantile_cont(value, 0.1)) * {_SIGMA_PER_DECILE_RANGE} AS day_spread
            FROM samples GROUP BY ALL),
        noises AS (
            SELECT dt, metric, {_SIGMA_PER_THIRD_QUARTILE} * quantile_cont(
                CASE WHEN middle > 0 THEN off / CASE WHEN metric IN ({counted}) THEN sqrt(middle) ELSE middle END END,
                0.75) AS noise
            FROM deviations GROUP BY ALL)
        SELECT * FROM current JOIN daily USING (dt, metric, hour) LEFT JOIN weekly USING (dt, metric, hour)
            JOIN noises USING (dt, metric)
    """


def _assess_hour(cell: Row, settings: Settings) -> Iterator[Row]:
    """The row of `anomalies`, if an hour has enough samples and is one."""
    metric, fewest = METRICS[cell["metric"]], settings.baseline_samples
    weekly = (cell["week_samples"] or 0) >= fewest
    if not weekly and cell["day_samples"] < max(fewest, _MIN_ANY_DAY_SAMPLES):
        return
    samples, expected, own = (
        cell[f"{'week' if weekly else 'day'}_{name}"] for name in ("samples", "middle", "spread")
    )
    scale = sqrt(max(expected, 0)) if metric.counted else expected
    relative = _RELATIVE_FLOOR_MS if metric.kind == "ms" else _RELATIVE_FLOOR
    by_chance = scale if metric.counted else 0
    floors = ((cell["noise"] or 0) * scale, expected * relative, by_chance, metric.floor)
    row = {name: cell[name] for name in ("dt", "hour", "metric", "value")} | {
        "expected": _round_half_up(expected, 6),
        "spread": _round_half_up(max(own, *floors), 6),
        "samples": samples,
        "baseline": "hour_of_week" if weekly else "hour_of_day",
    }
    row["z"] = _round_half_up((row["value"] - row["expected"]) / row["spread"], 3)
    if row["z"] > settings.anomaly_z or (metric.falls_too and row["z"] < -settings.anomaly_z):
        yield row | {"reason": _format_reason(row)}


def _round_half_up(value: float, digits: int) -> float:
    """Round as SQL does: 0.0000005 to 0.000001."""
    return float(Decimal(repr(value)).quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP))


def _format_reason(row: Row) -> str:
    metric = METRICS[row["metric"]]
    value, expected, spread = (_format_value(row[name], metric) for name in ("value", "expected", "spread"))
    samples = f"{row['dt']:%A}s" if row["baseline"] == "hour_of_week" else "days"
    return (
        f"{metric.title}: {value} in the hour from {row['hour']:02}:00 UTC, {'above' if row['z'] > 0 else 'below'} "
        f"the usual {expected} (median of {row['samples']} {samples} at that hour) by {abs(row['z']):,.1f} times the "
        f"usual spread of {spread}."
    )


def _format_value(value: float, metric: Metric) -> str:
    """A value with its unit."""
    if metric.kind == "share":
        return f"{value * 100:,.1f} %"
    return f"{value:,.0f}{' ms' if metric.kind == 'ms' else ''}"


ANOMALIES_JOB = Job(
    "anomalies",
    reads=(),
    writes=("anomalies",),
    make_tables=find_anomalies,
    history_days={"series_hourly": MAX_BASELINE_DAYS},
)


MAX_HISTORY_DAYS = 183
MIN_HISTORY_DAYS = 14

# Trend, and six weekdays relative to the seventh.
_MODEL_PARAMETERS = 8
# 80 % of a normal distribution.
_INTERVAL_SIGMAS = 1.2816


def make_forecast(run: JobRun) -> dict[str, list[Row]]:
    """`forecast` and `forecast_error`."""
    ahead, held_back = run.settings.forecast_days, run.settings.held_back_days
    forecast, errors = [], []
    for key, points in _collect_points(run):
        if model := _fit_model(points):
            forecast += [key | {"day": key["dt"] + timedelta(t)} | _predict(model, t) for t in range(1, ahead + 1)]
        if model := _fit_model({t: y for t, y in points.items() if t <= -held_back}):
            errors += [key | error for error in _measure_error(model, points, held_back)]
    return {"forecast": forecast, "forecast_error": errors}


# Values by days after that of the forecast, 0 or less.
_Points = Mapping[int, float]


def _collect_points(run: JobRun) -> Iterator[tuple[Row, _Points]]:
    """The day and metric of each forecast, with its history."""
    days = run.settings.forecast_history_days
    capacity = list_texts(name for name, metric in METRICS.items() if metric.capacity)
    series: dict[str, dict[date, float]] = defaultdict(dict)
    for row in run.rows(
        f"SELECT dt, metric, value FROM series_daily WHERE metric IN ({capacity})"
        f" AND dt > {run.first} - {days} AND dt <= {run.last} ORDER BY dt, metric"
    ):
        series[row["metric"]][row["dt"]] = row["value"]
    for metric, values in series.items():
        for today in filter(values.__contains__, run.span.days):
            distances = {(day - today).days: value for day, value in values.items()}
            yield {"dt": today, "metric": metric}, {t: y for t, y in distances.items() if -days < t <= 0}


@dataclass(frozen=True, slots=True)
class _Model:
    """
    :param level: without effects of weekdays, on the day of the forecast.
    :param slope: per day.
    :param effects: of days t with equal t % 7.
    :param below: first decile of the residuals; `above`: the last.
    :param times: days of the history.
    """

    level: float
    slope: float
    effects: Mapping[int, float]
    below: float
    above: float
    sigma: float
    times: Collection[int]


def _fit_model(points: _Points) -> _Model | None:
    """:return: None if the history is too short."""
    if len(points) < MIN_HISTORY_DAYS:
        return None
    slope = median((points[b] - points[a]) / (b - a) for a in points for b in points if b > a and (b - a) % 7 == 0)
    rests = {t: y - slope * t for t, y in points.items()}
    level = median(rests.values())
    by_weekday = defaultdict(list)
    for t, rest in rests.items():
        by_weekday[t % 7].append(rest - level)
    effects = {weekday: median(rests_of_day) for weekday, rests_of_day in by_weekday.items()}
    residuals = [rest - level - effects[t % 7] for t, rest in rests.items()]
    deciles = quantiles(residuals, n=10, method="inclusive")
    sigma = median(map(abs, residuals)) * _SIGMA_PER_MAD
    return _Model(level, slope, effects, deciles[0], deciles[-1], sigma, points.keys())


def _predict(model: _Model, t: int) -> Row:
    """`value`, `low` and `high`, none below 0."""
    value = model.level + model.slope * t + model.effects.get(t % 7, 0.0)
    n, sum_t = len(model.times), sum(model.times)
    # With few days the residuals underestimate the error.
    fitted = sqrt(n / (n - _MODEL_PARAMETERS))
    away = abs(t - sum_t / n) / sqrt(sum(t * t for t in model.times) - sum_t * sum_t / n)
    trend = _INTERVAL_SIGMAS * model.sigma * fitted * away
    low, high = value - hypot(model.below * fitted, trend), value + hypot(model.above * fitted, trend)
    return {name: _round_half_up(max(end, 0.0), 3) for name, end in (("value", value), ("low", low), ("high", high))}


def _measure_error(model: _Model, points: _Points, held_back: int) -> Iterator[Row]:
    """The error on the held-back days, if they are not all 0; days without an equal weekday before are left out."""
    found, naive, actual = [], [], []
    for t, y in points.items():
        # The last equal weekday that was not held back.
        before = t - 7 * ceil((t + held_back) / 7)
        if t > -held_back and before in points:
            found.append(_predict(model, t))
            naive.append(points[before])
            actual.append(y)
    if total := fsum(map(abs, actual)):
        off = fsum(abs(row["value"] - y) for row, y in zip(found, actual, strict=True))
        naive_off = fsum(abs(one - y) for one, y in zip(naive, actual, strict=True))
        inside = sum(row["low"] <= y <= row["high"] for row, y in zip(found, actual, strict=True))
        yield {
            "held_back": len(actual),
            "trained_on": len(model.times),
            "mape": _round_half_up(off / total, 6),
            "naive_mape": _round_half_up(naive_off / total, 6),
            "inside": _round_half_up(inside / len(actual), 6),
        }


FORECAST_JOB = Job(
    "forecast",
    reads=(),
    writes=("forecast", "forecast_error"),
    make_tables=make_forecast,
    history_days={"series_daily": MAX_HISTORY_DAYS},
)
