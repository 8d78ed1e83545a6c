"""Percentiles from logarithmic buckets."""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING

from pyspark.sql import functions as F

from analytics.jobs.column_functions import (
    classify_age,
    classify_pushes,
    classify_size,
    compute_percentiles,
    make_bucket_column,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SHARES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}


def nearest_rank(values: list[float], share: float) -> float:
    """The exact percentile."""
    return sorted(values)[max(0, math.ceil(round(share * len(values), 6)) - 1)]


def test_percentiles_are_within_one_percent(spark: SparkSession) -> None:
    rng = random.Random(7)
    groups = {
        "tail": [rng.paretovariate(0.8) for _ in range(3000)],
        "normal": [rng.lognormvariate(3, 1) for _ in range(3000)],
        "tiny": [rng.uniform(0.001, 0.01) for _ in range(100)],
        "one": [42.0],
        "hundred": [float(value) for value in range(1, 101)],
    }
    values = spark.createDataFrame(
        [(name, value) for name, values_of_group in groups.items() for value in values_of_group],
        "name string, ms double",
    )
    hist = values.groupBy("name", make_bucket_column(F.col("ms")).alias("bucket")).agg(F.count("*").alias("n"))
    # Two halves of a histogram add up to it.
    split = hist.withColumn("n", F.floor(F.col("n") / 2)).unionByName(hist.withColumn("n", F.ceil(F.col("n") / 2)))

    found = {row.name: row for row in compute_percentiles(split, ["name"], SHARES, "most").collect()}

    assert {name: row.n for name, row in found.items()} == {
        name: len(values_of_group) for name, values_of_group in groups.items()
    }
    for name, values_of_group in groups.items():
        for column, share in SHARES.items():
            exact = nearest_rank(values_of_group, share)
            assert abs(found[name][column] / exact - 1) < 0.0101, (name, column)
        assert 1 <= found[name].most / max(values_of_group) * 1.0000001 < 1.0201, name


def test_percentiles_do_not_depend_on_order_or_partitions(spark: SparkSession) -> None:
    rng = random.Random(8)
    values = spark.createDataFrame([(rng.expovariate(0.01),) for _ in range(500)], "ms double")
    layouts = [values, values.repartition(7), values.orderBy(F.desc("ms"))]

    percentiles = [
        compute_percentiles(
            layout.groupBy(make_bucket_column(F.col("ms")).alias("bucket")).agg(F.count("*").alias("n")),
            [],
            SHARES,
            "most",
        ).collect()
        for layout in layouts
    ]

    assert percentiles[0] == percentiles[1] == percentiles[2]
    assert len(percentiles[0]) == 1


def test_empty_buckets_have_no_percentiles(spark: SparkSession) -> None:
    empty = spark.createDataFrame([("a", 3, 0)], "name string, bucket int, n bigint")

    assert compute_percentiles(empty, ["name"], SHARES).collect() == []


def test_bucket_of_value(spark: SparkSession) -> None:
    bucket_of_value = {
        None: None,
        -1.0: -349,
        0.0: -349,
        0.001: -349,
        0.99: -1,
        1.0: 0,
        1.03: 1,
        100.0: 232,
        1e9: 1046,
    }

    rows = spark.createDataFrame([(ms,) for ms in bucket_of_value], "ms double").select(
        "ms", make_bucket_column(F.col("ms")).alias("b")
    )

    assert {row.ms: row.b for row in rows.collect()} == bucket_of_value
    assert dict(rows.dtypes)["b"] == "int"


def test_classes_of_age_size_and_pushes(spark: SparkSession) -> None:
    values = [None, -5, 0, 1, 2, 4, 5, 1000, 1023, 1024, 59_999, 60_000, 600_000, 1_048_576, 86_400_000, 259_200_000]
    rows = (
        spark.createDataFrame([(value,) for value in values], "v bigint")
        .select(classify_age(F.col("v")), classify_size(F.col("v")), classify_pushes(F.col("v")))
        .collect()
    )

    assert [row[0] for row in rows] == [
        *("", "0 <1s", "0 <1s", "0 <1s", "0 <1s", "0 <1s", "0 <1s", "1 <10s", "1 <10s", "1 <10s"),
        *("2 <1m", "3 <10m", "4 <1h", "4 <1h", "7 <3d", "8 3d+"),
    ]
    assert [row[1] for row in rows] == [
        *("", "0 <1K", "0 <1K", "0 <1K", "0 <1K", "0 <1K", "0 <1K", "0 <1K", "0 <1K", "1 <4K"),
        *("3 <64K", "3 <64K", "5 <1M", "6 1M+", "6 1M+", "6 1M+"),
    ]
    assert [row[2] for row in rows] == ["", "0", "0", "1", "2-4", "2-4", *["5+"] * 10]
    for column in range(3):
        # Classes sort by value.
        assert [row[column] for row in rows] == sorted(row[column] for row in rows)
