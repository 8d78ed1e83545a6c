"""Anomalies: hours that differ from the same hours of earlier weeks."""

from __future__ import annotations

import random
from datetime import date, timedelta
from math import ceil, floor, sin, sqrt, tau
from statistics import median
from typing import Any

import pytest

from analytics.job import Span
from analytics.jobs.time_series import ANOMALIES_JOB, METRICS
from analytics.settings import Settings
from tests.analytics.job_tables import run_job

FIRST = date(2026, 10, 5)  # a Monday
DAYS = 36
LAST = FIRST + timedelta(DAYS - 1)

Series = dict[tuple[date, int, str], float]
Anomalies = dict[tuple[date, int, str], dict[str, Any]]


def find_anomalies(series: Series, span: Span, settings: Settings | None = None) -> Anomalies:
    rows = [
        {"dt": dt, "hour": hour, "metric": metric, "value": float(value)}
        for (dt, hour, metric), value in series.items()
    ]
    found = run_job(ANOMALIES_JOB, span, settings=settings, tables={"series_hourly": rows})["anomalies"]
    return {(row["dt"], row["hour"], row["metric"]): row for row in found}


def make_realistic_series(seed: int) -> Series:
    """Five weeks of a small site: nights, weekends, growth, noise, occasional faults."""
    rng = random.Random(seed)
    series: Series = {}
    for day in range(DAYS):
        dt = FIRST + timedelta(day)
        weekend = 0.55 if dt.weekday() >= 5 else 1.0
        for hour in range(24):
            busy = max(5.0, 400 * weekend * (1 + 0.7 * sin(tau * (hour - 9) / 24)) * (1 + 0.004 * day))
            messages = max(0, round(rng.gauss(busy, 1.5 * sqrt(busy))))
            series[dt, hour, "messages_accepted"] = messages
            series[dt, hour, "bytes_accepted"] = sum(rng.lognormvariate(7, 1) for _ in range(messages))
            series[dt, hour, "messages_lost"] = float(rng.random() < 0.02)
            series[dt, hour, "error_share"] = max(0.0, rng.gauss(0.02, 0.005))
            series[dt, hour, "latency_live_p95_ms"] = rng.lognormvariate(2, 0.2)
            series[dt, hour, "latency_pickup_p95_ms"] = rng.lognormvariate(14, 0.2)
            series[dt, hour, "depth_max"] = busy + rng.gauss(0, 20)
    return series


INCIDENTS: Series = {
    (LAST, 10, "messages_lost"): 40.0,
    (LAST, 15, "messages_accepted"): 0.0,
    (LAST, 12, "error_share"): 0.3,
    (LAST, 13, "latency_live_p95_ms"): 900.0,
    (LAST, 14, "depth_max"): 5000.0,
}


@pytest.fixture(scope="module")
def found() -> Anomalies:
    # The same incidents a week earlier do not become the baseline.
    earlier = {(dt - timedelta(7), hour, metric): value for (dt, hour, metric), value in INCIDENTS.items()}
    return find_anomalies(make_realistic_series(1) | earlier | INCIDENTS, Span(LAST - timedelta(6), LAST))


def test_finds_exactly_the_incidents(found: Anomalies) -> None:
    assert found.keys() == INCIDENTS.keys()


def test_reason_states_value_baseline_and_spread(found: Anomalies) -> None:
    lost = found[LAST, 10, "messages_lost"]
    assert lost["reason"] == (
        "Messages lost: 40 in the hour from 10:00 UTC, above the usual 0 (median of 4 Mondays at that hour) by 40.0 "
        "times the usual spread of 1."
    )
    assert (lost["expected"], lost["spread"], lost["z"], lost["samples"]) == (0, 1, 40, 4)
    assert found[LAST, 12, "error_share"]["reason"].startswith("Share of requests refused or failed: 30.0 % in ")
    assert found[LAST, 13, "latency_live_p95_ms"]["reason"].startswith("Live push, 95th percentile: 900 ms in ")
    assert found[LAST, 15, "messages_accepted"]["reason"].count(" below the usual ") == 1


def percentile(values: list[float], share: float) -> float:
    at = (len(values) - 1) * share
    ordered = sorted(values)
    return ordered[floor(at)] + (at - floor(at)) * (ordered[ceil(at)] - ordered[floor(at)])


def compute_reference(series: Series, key: tuple[date, int, str]) -> tuple[float, float, int, str]:
    """Expected value, spread, samples and baseline of one hour, in plain Python."""
    dt, hour, metric = key
    cells: dict[tuple[int, int], list[float]] = {}
    for (day, at, name), value in series.items():
        if name == metric and 1 <= (dt - day).days <= 28:
            cells.setdefault((day.weekday(), at), []).append(value)
    counted = METRICS[metric].kind in ("count", "level")
    middles = {cell: median(values) for cell, values in cells.items()}
    scale = {cell: sqrt(middle) if counted else middle for cell, middle in middles.items()}
    deviations = [
        abs(value - middles[cell]) / scale[cell]
        for cell, values in cells.items()
        for value in values
        if middles[cell] > 0
    ]
    same_hour_of_week = cells.get((dt.weekday(), hour), [])
    same_hour_of_all_days = [value for (_, at), values in cells.items() if at == hour for value in values]
    if len(same_hour_of_week) >= 3:
        expected, samples, name = median(same_hour_of_week), len(same_hour_of_week), "hour_of_week"
        own_spread = 1.4826 * median(abs(value - expected) for value in same_hour_of_week)
    else:
        expected, samples, name = median(same_hour_of_all_days), len(same_hour_of_all_days), "hour_of_day"
        own_spread = (percentile(same_hour_of_all_days, 0.9) - percentile(same_hour_of_all_days, 0.1)) / 2.5631
    noise = percentile(deviations, 0.75) / 1.1503 if deviations else 0.0
    scale_of_expected = sqrt(expected) if counted else expected
    relative = 0.35 if METRICS[metric].kind == "ms" else 0.05
    poisson = scale_of_expected if counted else 0.0
    return (
        expected,
        max(own_spread, noise * scale_of_expected, relative * expected, poisson, METRICS[metric].floor),
        samples,
        name,
    )


def test_agrees_with_reference_implementation() -> None:
    """For all hours of two days, one after three weeks and one after ten days of history."""
    series = make_realistic_series(2)
    days = (FIRST + timedelta(30), FIRST + timedelta(10))
    found: Anomalies = {}
    for day in days:
        found |= find_anomalies(series, Span(day, day), Settings(anomaly_z=0.001))

    keys = [key for key in series if key[0] in days]
    compared = 0
    for key in keys:
        expected, spread, samples, baseline = compute_reference(series, key)
        z = (series[key] - expected) / spread
        if round(z, 3) > 0.001 or (METRICS[key[2]].falls_too and round(z, 3) < -0.001):
            row = found.pop(key)
            assert (row["samples"], row["baseline"]) == (samples, baseline), key
            assert row["expected"] == pytest.approx(expected, abs=1e-5), key
            assert row["spread"] == pytest.approx(spread, rel=1e-6, abs=1e-5), key
            assert row["z"] == pytest.approx(z, abs=0.001), key
            compared += 1
    assert not found
    assert compared > len(keys) / 2


def test_reports_no_anomaly_in_normal_series() -> None:
    """
    Constant series, tiny counts, fewer losses than usual, a first weekend, and six days of noise in seven metrics.
    """
    series: Series = {}
    for day in range(DAYS):
        for hour in range(24):
            series[FIRST + timedelta(day), hour, "requests"] = 1000.0
            series[FIRST + timedelta(day), hour, "replays"] = 0.0
            series[FIRST + timedelta(day), hour, "messages_lost"] = 500.0
    series[LAST, 1, "requests"] = 1250.0
    series[LAST, 2, "replays"] = 3.0
    series[LAST, 3, "messages_lost"] = 0.0
    # A week of history only.
    first_week = {key: value for key, value in make_realistic_series(3).items() if (key[0] - FIRST).days < 15}

    assert find_anomalies(series | make_realistic_series(4), Span(LAST - timedelta(5), LAST)) == {}
    assert find_anomalies(first_week, Span(FIRST, FIRST + timedelta(14))) == {}


def test_reports_nothing_without_a_week_of_history() -> None:
    """The first week has no baseline; the first hour after it has one."""
    series: Series = {(FIRST + timedelta(day), 9, "requests"): 10.0 ** (day % 7) for day in range(7)}
    with_outlier = {**series, (FIRST + timedelta(7), 9, "requests"): 1e9}

    assert find_anomalies(series, Span(FIRST, FIRST + timedelta(6))) == {}
    assert list(find_anomalies(with_outlier, Span(FIRST, FIRST + timedelta(7)))) == [
        (FIRST + timedelta(7), 9, "requests")
    ]


def test_rounds_half_up() -> None:
    """A median halfway between two decimals, which has no exact binary form."""
    key = (FIRST + timedelta(28), 5, "error_share")
    shares = (0.020384, 0.020385, 0.020384, 0.020385, 0.5)
    series: Series = {(FIRST + timedelta(7 * week), *key[1:]): share for week, share in enumerate(shares)}
    assert find_anomalies(series, Span(key[0], key[0]))[key]["expected"] == 0.020385
