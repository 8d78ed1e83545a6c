"""Functions that both engines have, at the bounds of their values."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from datetime import date, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from analytics.database import Database
from analytics.sql_functions import FUNCTIONS, create_spark_functions

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_RANDOM = random.Random(5)
_NUMBERS = (None, -(2**40), -5, -1, 0, 1, 2, 4, 5, 62, 63, 64, 127, 128, 999, 1000, 1023, 1024, 4095, 4096, 16_384)
_LARGE = (59_999, 60_000, 65_536, 262_144, 600_000, 2**20, 3_600_000, 21_600_000, 86_400_000, 259_200_000, 2**50)
_INTEGERS = (*_NUMBERS, *_LARGE)
_DURATIONS = (
    *(None if number is None else float(number) for number in _INTEGERS),
    *(0.0004, 0.0005, 0.001, 0.0015, 0.9994999, 0.9995, 1.0, 1.02, 1.0404, 999.9999, 1e7, -0.0005, -0.5, 1e12),
    # Durations have whole microseconds.
    *(_RANDOM.randrange(1, 10 ** _RANDOM.randrange(3, 10)) / 1000 for _ in range(3000)),
)
_TIMES = (
    None,
    *map(
        datetime.fromisoformat,
        ("1970-01-01", "2026-11-16", "2026-11-16T00:00:00.000001", "2026-11-16T23:59:59.999999"),
    ),
)
_DAYS = (None, date(1970, 1, 1), date(2026, 2, 28), date(2026, 3, 1), date(2026, 11, 16))
_MICROS = (None, 0, 1, 86_399_999_999, 86_400_000_000, 1_794_787_199_999_999)

ARGUMENTS: Mapping[str, Sequence[tuple[Any, ...]]] = {
    "micros": [(ts,) for ts in _TIMES],
    "day_micros": [(day,) for day in _DAYS],
    "micros_time": [(us,) for us in _MICROS],
    "micros_day": [(us,) for us in _MICROS],
    "days_between": [(one, other) for one in _DAYS for other in _DAYS],
    "divide": [(us, divisor) for us in _MICROS for divisor in (1, 7, 1_000_000, None)],
    "duration_micros": [(ms,) for ms in _DURATIONS],
    "latency_bucket": [(ms,) for ms in _DURATIONS],
    "seq_block": [(number,) for number in _INTEGERS],
    "seq_bit": [(number,) for number in _INTEGERS],
    "age_class": [(ms,) for ms in _DURATIONS],
    "size_class": [(number,) for number in _INTEGERS],
    "pushes_class": [(number,) for number in _INTEGERS],
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_engines_agree(name: str, database: Database, spark: SparkSession, tmp_path: Path) -> None:
    parameters = FUNCTIONS[name].parameters
    _fill(database, name, ARGUMENTS[name])
    path = tmp_path / "arguments.parquet"
    database.execute(f"COPY arguments TO '{path}'")
    declared = ", ".join(f"`{parameter}` {kind}" for parameter, kind in parameters.items())
    spark.read.schema(f"number BIGINT, {declared}").parquet(str(path)).createOrReplaceTempView("arguments")
    create_spark_functions(spark)
    call = f"{name}({', '.join(parameters)})"
    if FUNCTIONS[name].returns == "TIMESTAMP":
        # As a value of Python it would be in the time zone of this process.
        call = f"micros({call})"
    query = f"SELECT number, {call} AS found FROM arguments ORDER BY number"

    by_spark = [row.found for row in spark.sql(query).collect()]
    by_duckdb = [row["found"] for row in database.rows(query)]

    assert list(zip(ARGUMENTS[name], by_spark, strict=True)) == list(zip(ARGUMENTS[name], by_duckdb, strict=True))
    assert len(by_duckdb) == len(ARGUMENTS[name])
    assert any(found is not None for found in by_duckdb)


def test_bucket_of_duration(database: Database) -> None:
    bucket_of_duration = {
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
    assert _apply(database, "latency_bucket", [(ms,) for ms in bucket_of_duration]) == [*bucket_of_duration.values()]


def test_classes_of_age_size_and_pushes(database: Database) -> None:
    """They sort by value."""
    values = [None, -5, 0, 1, 2, 4, 5, 1000, 1023, 1024, 59_999, 60_000, 600_000, 1_048_576, 86_400_000, 259_200_000]
    ages, sizes, pushes = (
        _apply(database, name, [(value,) for value in values]) for name in ("age_class", "size_class", "pushes_class")
    )
    assert ages == [
        *("", "0 <1s", "0 <1s", "0 <1s", "0 <1s", "0 <1s", "0 <1s", "1 <10s", "1 <10s", "1 <10s"),
        *("2 <1m", "3 <10m", "4 <1h", "4 <1h", "7 <3d", "8 3d+"),
    ]
    assert sizes == [
        *("", "0 <1K", "0 <1K", "0 <1K", "0 <1K", "0 <1K", "0 <1K", "0 <1K", "0 <1K", "1 <4K"),
        *("3 <64K", "3 <64K", "5 <1M", "6 1M+", "6 1M+", "6 1M+"),
    ]
    assert pushes == ["", "0", "0", "1", "2-4", "2-4", *["5+"] * 10]
    for classes in (ages, sizes, pushes):
        assert classes == sorted(classes)


def test_bits_of_64_sequence_numbers_are_distinct(database: Database) -> None:
    bits = _apply(database, "seq_bit", [(seq,) for seq in range(64, 128)])
    assert [bit % 2**64 for bit in bits] == [2**number for number in range(64)]
    assert set(_apply(database, "seq_block", [(seq,) for seq in range(64, 128)])) == {1}


def _apply(database: Database, name: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
    _fill(database, name, arguments)
    call = f"{name}({', '.join(FUNCTIONS[name].parameters)})"
    return [row["found"] for row in database.rows(f"SELECT {call} AS found FROM arguments ORDER BY number")]


def _fill(database: Database, name: str, arguments: Sequence[tuple[Any, ...]]) -> None:
    declared = ", ".join(f"{parameter} {kind}" for parameter, kind in FUNCTIONS[name].parameters.items())
    rows = ((number, *values) for number, values in enumerate(arguments))
    database.insert("arguments", f"number BIGINT, {declared}", rows)
