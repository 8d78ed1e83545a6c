"""Forecast of capacity metrics for 30 days."""

from __future__ import annotations

import random
from datetime import date, timedelta
from math import sqrt
from statistics import fmean, median
from typing import Any

import pytest

from analytics.job import Span
from analytics.jobs.time_series import FORECAST_JOB
from tests.analytics.job_tables import run_job

FIRST = date(2026, 8, 31)  # a Monday
DAYS = 70
LAST = FIRST + timedelta(DAYS - 1)
BY_WEEKDAY = (0, 30, 20, 10, 0, -120, -140)

Series = dict[tuple[date, str], float]
Points = dict[int, float]


def make_realistic_points(rng: random.Random) -> Points:
    """Daily values by day number: growth, weekends, noise, and one day with an incident."""
    points = {
        day: 1000 + 5 * day + 2 * BY_WEEKDAY[day % 7] + rng.gauss(0, 20) + (4000 if day == 40 else 0)
        for day in range(DAYS)
    }
    return {day: round(value) for day, value in points.items()}


NOISY = make_realistic_points(random.Random(5))
METRIC_POINTS: dict[str, Points] = {
    # Linear trend and weekly cycle without noise.
    "messages_accepted": {day: 500.0 + 10 * day + BY_WEEKDAY[day % 7] for day in range(DAYS)},
    "bytes_accepted": NOISY,
    # One day too few: it began two weeks ago, and one day is missing.
    "depth_max": {day: float(day) for day in range(DAYS - 14, DAYS) if day != 60},
    # Too short for a holdout.
    "connections_peak": {day: 7.0 for day in range(DAYS - 16, DAYS)},
    # Falls to zero.
    "queue_bytes_max": {day: max(0.0, 700.0 - 12 * day) for day in range(DAYS)},
    # Not a capacity metric.
    "replays": {day: 5.0 for day in range(DAYS)},
}

Rows = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def forecasts() -> dict[str, Rows]:
    series = [
        {"dt": FIRST + timedelta(day), "metric": metric, "value": float(value)}
        for metric, points in METRIC_POINTS.items()
        for day, value in points.items()
    ]
    tables = run_job(FORECAST_JOB, Span(LAST - timedelta(1), LAST), tables={"series_daily": series})
    found: dict[str, Rows] = {}
    for name, rows in tables.items():
        by_metric = found.setdefault(name, {})
        for row in rows:
            if row["dt"] == LAST:
                by_metric.setdefault(row["metric"], []).append(row)
    return found


def test_extrapolates_trend_and_weekly_cycle_exactly(forecasts: dict[str, Rows]) -> None:
    rows = forecasts["forecast"]["messages_accepted"]
    days = {row["day"]: row for row in rows}

    assert sorted(days) == [LAST + timedelta(n) for n in range(1, 31)]
    for day, row in days.items():
        n = (day - FIRST).days
        assert row["value"] == row["low"] == row["high"] == 500 + 10 * n + BY_WEEKDAY[n % 7]
    assert forecasts["forecast_error"]["messages_accepted"] == [
        {
            "dt": LAST,
            "metric": "messages_accepted",
            "held_back": 7,
            "trained_on": 49,
            "mape": 0.0,
            # Each value is 70 higher than a week earlier.
            "naive_mape": round(490 / sum(METRIC_POINTS["messages_accepted"][n] for n in range(63, 70)), 6),
            "inside": 1.0,
        }
    ]


def test_requires_two_weeks_of_history(forecasts: dict[str, Rows]) -> None:
    """Three weeks for the error on a holdout."""
    assert set(forecasts["forecast"]) == {
        "messages_accepted",
        "bytes_accepted",
        "connections_peak",
        "queue_bytes_max",
    }
    assert set(forecasts["forecast_error"]) == {"messages_accepted", "bytes_accepted"}


def test_forecast_is_never_negative(forecasts: dict[str, Rows]) -> None:
    rows = forecasts["forecast"]["queue_bytes_max"]

    assert all(row["low"] == row["value"] == 0 for row in rows[5:])
    assert all(
        row["low"] <= row["value"] <= row["high"]
        for rows_of_metric in forecasts["forecast"].values()
        for row in rows_of_metric
    )


def quantile(values: list[float], share: float) -> float:
    at = (len(values) - 1) * share
    low = int(at)
    ordered = sorted(values)
    return ordered[low] + (at - low) * (ordered[min(low + 1, len(values) - 1)] - ordered[low])


def compute_reference(points: Points, first: int, last: int, day: int) -> tuple[float, float, float]:
    """Value, low and high for one day from the days `first` to `last`, in plain Python."""
    training = {n: y for n, y in points.items() if first <= n <= last}
    slope = median(
        (training[m] - training[n]) / (m - n) for m in training for n in training if m > n and (m - n) % 7 == 0
    )
    level = median(y - slope * (n - DAYS + 1) for n, y in training.items())
    residuals = {n: y - slope * (n - DAYS + 1) - level for n, y in training.items()}
    effects = {d: median(rest for n, rest in residuals.items() if n % 7 == d) for d in range(7)}
    remainders = [rest - effects[n % 7] for n, rest in residuals.items()]
    value = level + slope * (day - DAYS + 1) + effects[day % 7]
    freedom_factor = sqrt(len(training) / (len(training) - 8))
    mean = fmean(training)
    leverage = abs(day - mean) / sqrt(sum((n - mean) ** 2 for n in training))
    trend = 1.2816 * 1.4826 * median(map(abs, remainders)) * freedom_factor * leverage
    low, high = (sqrt((quantile(remainders, share) * freedom_factor) ** 2 + trend**2) for share in (0.1, 0.9))
    return value, value - low, value + high


def test_agrees_with_reference_implementation(forecasts: dict[str, Rows]) -> None:
    for row in forecasts["forecast"]["bytes_accepted"]:
        expected = compute_reference(NOISY, DAYS - 56, DAYS - 1, (row["day"] - FIRST).days)
        assert (row["value"], row["low"], row["high"]) == pytest.approx(expected, abs=0.001)

    error = forecasts["forecast_error"]["bytes_accepted"][0]
    holdout = {n: compute_reference(NOISY, DAYS - 56, DAYS - 8, n) for n in range(DAYS - 7, DAYS)}
    total = sum(NOISY[n] for n in holdout)
    assert error["mape"] == pytest.approx(sum(abs(holdout[n][0] - NOISY[n]) for n in holdout) / total, abs=1e-5)
    assert error["naive_mape"] == pytest.approx(sum(abs(NOISY[n - 7] - NOISY[n]) for n in holdout) / total, abs=1e-5)
    assert error["inside"] == pytest.approx(fmean(low <= NOISY[n] <= high for n, (_, low, high) in holdout.items()))
    # Better than repeating the week before, in spite of the incident.
    assert error["mape"] < error["naive_mape"]


def test_interval_contains_80_percent_of_days() -> None:
    """Over many series, with the reference implementation."""
    contained = []
    for seed in range(60):
        points = make_realistic_points(random.Random(seed))
        for day in range(DAYS - 10, DAYS):
            _, low, high = compute_reference(points, 0, DAYS - 11, day)
            contained.append(low <= points[day] <= high)

    assert 0.72 < fmean(contained) < 0.92
