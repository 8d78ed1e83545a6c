"""Percentiles from logarithmic buckets."""

from __future__ import annotations

import math
import random

from analytics.database import Database
from analytics.sql_functions import compute_percentiles

SHARES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}
_HISTOGRAM = "SELECT name, latency_bucket(ms) AS bucket, count(*) AS n FROM durations GROUP BY ALL"


def nearest_rank(values: list[float], share: float) -> float:
    """The exact percentile."""
    return sorted(values)[max(0, math.ceil(round(share * len(values), 6)) - 1)]


def test_percentiles_are_within_one_percent(database: Database) -> None:
    rng = random.Random(7)
    groups = {
        "tail": [rng.paretovariate(0.8) for _ in range(3000)],
        "normal": [rng.lognormvariate(3, 1) for _ in range(3000)],
        "tiny": [rng.uniform(0.001, 0.01) for _ in range(100)],
        "one": [42.0],
        "hundred": [float(value) for value in range(1, 101)],
    }
    database.insert(
        "durations", "name VARCHAR, ms DOUBLE", ((name, ms) for name, values in groups.items() for ms in values)
    )
    database.define("hist", _HISTOGRAM)
    # Two halves of a histogram add up to it.
    split = "SELECT name, bucket, n // 2 AS n FROM hist UNION ALL SELECT name, bucket, n - n // 2 FROM hist"

    found = {row["name"]: row for row in database.rows(compute_percentiles(split, ["name"], SHARES, "most"))}

    assert {name: row["n"] for name, row in found.items()} == {
        name: len(values_of_group) for name, values_of_group in groups.items()
    }
    for name, values_of_group in groups.items():
        for column, share in SHARES.items():
            exact = nearest_rank(values_of_group, share)
            assert abs(found[name][column] / exact - 1) < 0.0101, (name, column)
        assert 1 <= found[name]["most"] / max(values_of_group) * 1.0000001 < 1.0201, name


def test_percentiles_do_not_depend_on_order(database: Database) -> None:
    rng = random.Random(8)
    values = [("a", rng.expovariate(0.01)) for _ in range(500)]

    percentiles = []
    for layout in (values, sorted(values), sorted(values, reverse=True)):
        database.insert("durations", "name VARCHAR, ms DOUBLE", layout)
        percentiles.append(database.rows(compute_percentiles(_HISTOGRAM, ["name"], SHARES, "most")))

    assert percentiles[0] == percentiles[1] == percentiles[2]
    assert len(percentiles[0]) == 1


def test_empty_buckets_have_no_percentiles(database: Database) -> None:
    database.insert("hist", "name VARCHAR, bucket INT, n BIGINT", [("a", 3, 0)])

    assert database.rows(compute_percentiles("hist", ["name"], SHARES)) == []
