"""Capacity a month ahead."""

from __future__ import annotations

import random
from datetime import date, timedelta
from math import sqrt
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

import pytest

from analytics.job import Span
from analytics.jobs.time_series import FORECAST_JOB
from analytics.schema import TABLES
from analytics.settings import Settings
from analytics.writing.warehouse import conform_to_schema

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FIRST = date(2026, 8, 31)  # a Monday
DAYS = 70
LAST = FIRST + timedelta(DAYS - 1)
BY_WEEKDAY = (0, 30, 20, 10, 0, -120, -140)

Series = dict[tuple[date, str], float]
Points = dict[int, float]


def believable(chance: random.Random) -> Points:
    """Days by number: growth, weekends, noise, one day of an incident."""
    points = {
        day: 1000 + 5 * day + 2 * BY_WEEKDAY[day % 7] + chance.gauss(0, 20) + (4000 if day == 40 else 0)
        for day in range(DAYS)
    }
    return {day: round(value) for day, value in points.items()}


NOISY = believable(random.Random(5))
METRIC_POINTS: dict[str, Points] = {
    # A line and a week, nothing else.
    "messages_accepted": {day: 500.0 + 10 * day + BY_WEEKDAY[day % 7] for day in range(DAYS)},
    "bytes_accepted": NOISY,
    # It began a fortnight ago, with a day missing and so one too few.
    "depth_max": {day: float(day) for day in range(DAYS - 14, DAYS) if day != 60},
    # Too short to hold anything back.
    "connections_peak": {day: 7.0 for day in range(DAYS - 16, DAYS)},
    # It falls to nothing.
    "queue_bytes_max": {day: max(0.0, 700.0 - 12 * day) for day in range(DAYS)},
    # No capacity.
    "replays": {day: 5.0 for day in range(DAYS)},
}

Rows = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def made(spark: SparkSession) -> dict[str, Rows]:
    series = [
        (FIRST + timedelta(day), metric, float(value))
        for metric, points in METRIC_POINTS.items()
        for day, value in points.items()
    ]
    frame = spark.createDataFrame(series, "dt date, metric string, value double")
    tables = FORECAST_JOB.transform({"series_daily": frame}, Settings(), Span(LAST - timedelta(1), LAST))
    found: dict[str, Rows] = {}
    for name, table in tables.items():
        by_metric = found.setdefault(name, {})
        for row in conform_to_schema(table, TABLES[name], FORECAST_JOB.name).where("dt = date'2026-11-08'").collect():
            by_metric.setdefault(row.metric, []).append(row.asDict())
    return found


def test_a_line_and_a_week_go_on(made: dict[str, Rows]) -> None:
    rows = made["forecast"]["messages_accepted"]
    days = {row["day"]: row for row in rows}

    assert sorted(days) == [LAST + timedelta(n) for n in range(1, 31)]
    for day, row in days.items():
        n = (day - FIRST).days
        assert row["value"] == row["low"] == row["high"] == 500 + 10 * n + BY_WEEKDAY[n % 7]
    assert made["forecast_error"]["messages_accepted"] == [
        {
            "dt": LAST,
            "metric": "messages_accepted",
            "held_back": 7,
            "trained_on": 49,
            "mape": 0.0,
            # A week later everything is 70 more.
            "naive_mape": round(490 / sum(METRIC_POINTS["messages_accepted"][n] for n in range(63, 70)), 6),
            "inside": 1.0,
        }
    ]


def test_which_metrics_have_a_forecast(made: dict[str, Rows]) -> None:
    """Two weeks of history at least, and three to tell the error of."""
    assert set(made["forecast"]) == {"messages_accepted", "bytes_accepted", "connections_peak", "queue_bytes_max"}
    assert set(made["forecast_error"]) == {"messages_accepted", "bytes_accepted"}


def test_nothing_is_forecast_below_zero(made: dict[str, Rows]) -> None:
    rows = made["forecast"]["queue_bytes_max"]

    assert all(row["low"] == row["value"] == 0 for row in rows[5:])
    assert all(row["low"] <= row["value"] <= row["high"] for each in made["forecast"].values() for row in each)


def quantile(values: list[float], share: float) -> float:
    at = (len(values) - 1) * share
    low = int(at)
    ordered = sorted(values)
    return ordered[low] + (at - low) * (ordered[min(low + 1, len(values) - 1)] - ordered[low])


def by_hand(points: Points, first: int, last: int, day: int) -> tuple[float, float, float]:
    """Value, low and high for one day from those from `first` to `last`, in plain Python."""
    known = {n: y for n, y in points.items() if first <= n <= last}
    slope = median((known[m] - known[n]) / (m - n) for m in known for n in known if m > n and (m - n) % 7 == 0)
    level = median(y - slope * (n - DAYS + 1) for n, y in known.items())
    rests = {n: y - slope * (n - DAYS + 1) - level for n, y in known.items()}
    effects = {d: median(rest for n, rest in rests.items() if n % 7 == d) for d in range(7)}
    left = [rest - effects[n % 7] for n, rest in rests.items()]
    value = level + slope * (day - DAYS + 1) + effects[day % 7]
    fitted = sqrt(len(known) / (len(known) - 8))
    mean = fmean(known)
    away = abs(day - mean) / sqrt(sum((n - mean) ** 2 for n in known))
    trend = 1.2816 * 1.4826 * median(map(abs, left)) * fitted * away
    low, high = (sqrt((quantile(left, share) * fitted) ** 2 + trend**2) for share in (0.1, 0.9))
    return value, value - low, value + high


def test_agrees_with_plain_python(made: dict[str, Rows]) -> None:
    for row in made["forecast"]["bytes_accepted"]:
        expected = by_hand(NOISY, DAYS - 56, DAYS - 1, (row["day"] - FIRST).days)
        assert (row["value"], row["low"], row["high"]) == pytest.approx(expected, abs=0.001)

    error = made["forecast_error"]["bytes_accepted"][0]
    held = {n: by_hand(NOISY, DAYS - 56, DAYS - 8, n) for n in range(DAYS - 7, DAYS)}
    total = sum(NOISY[n] for n in held)
    assert error["mape"] == pytest.approx(sum(abs(held[n][0] - NOISY[n]) for n in held) / total, abs=1e-5)
    assert error["naive_mape"] == pytest.approx(sum(abs(NOISY[n - 7] - NOISY[n]) for n in held) / total, abs=1e-5)
    assert error["inside"] == pytest.approx(fmean(low <= NOISY[n] <= high for n, (_, low, high) in held.items()))
    # Better than to repeat the week before, in spite of the incident.
    assert error["mape"] < error["naive_mape"]


def test_the_interval_holds_four_days_of_five() -> None:
    """Of many series, by the plain Python that the job agrees with."""
    inside = []
    for seed in range(60):
        points = believable(random.Random(seed))
        for day in range(DAYS - 10, DAYS):
            _, low, high = by_hand(points, 0, DAYS - 11, day)
            inside.append(low <= points[day] <= high)

    assert 0.72 < fmean(inside) < 0.92
