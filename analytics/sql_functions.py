"""
SQL that Spark and DuckDB share: functions under one name in both, and literals.

A scan is one SQL statement that both engines run with the same result, so it uses what both have: the functions
declared here, `"name"` for identifiers that are keywords, `count(*) FILTER (WHERE ...)`, `max_by`, `bit_or`,
`greatest` and `least` (which ignore nulls), `left`, `hour`, `date_trunc('minute', ...)`, `LIKE` without escapes,
`regexp_like`, `VALUES`, `SEMI JOIN`, `ANTI JOIN`, `QUALIFY`, window functions, `GROUP BY ALL`,
`x IS DISTINCT FROM y`. It has no structs, arrays, lambdas, `EXCLUDE` or subtraction of dates. Times are microseconds
since the epoch.

Percentiles come from histograms with logarithmic buckets: bucket b holds 1.02**b to 1.02**(b + 1) ms. Counts of
nodes, paths and hours add up, so percentiles of any period come from stored counts and are the same on every run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from math import log
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import duckdb
    from pyspark.sql import SparkSession

SECOND_MICROS = 1_000_000
DAY_MICROS = 86_400 * SECOND_MICROS
BUCKET_BASE = 1.02
MIN_DURATION_MS = 0.001

_MINUTE_MS = 60_000
_HOUR_MS = 60 * _MINUTE_MS
_DAY_MS = 24 * _HOUR_MS
_KIB = 1024

# Upper bounds, exclusive; the last class has none.
AGE_CLASSES = {
    "0 <1s": 1000,
    "1 <10s": 10_000,
    "2 <1m": _MINUTE_MS,
    "3 <10m": 10 * _MINUTE_MS,
    "4 <1h": _HOUR_MS,
    "5 <6h": 6 * _HOUR_MS,
    "6 <1d": _DAY_MS,
    "7 <3d": 3 * _DAY_MS,
    "8 3d+": None,
}
SIZE_CLASSES = {
    "0 <1K": _KIB,
    "1 <4K": 4 * _KIB,
    "2 <16K": 16 * _KIB,
    "3 <64K": 64 * _KIB,
    "4 <256K": 256 * _KIB,
    "5 <1M": _KIB * _KIB,
    "6 1M+": None,
}
PUSHES_CLASSES = {"0": 1, "1": 2, "2-4": 5, "5+": None}


def _make_cases(value: str, bounds: Mapping[str, int | None]) -> str:
    cases = " ".join(f"WHEN {value} < {bound} THEN '{name}'" for name, bound in bounds.items() if bound is not None)
    return f"CASE WHEN {value} IS NULL THEN '' {cases} ELSE '{list(bounds)[-1]}' END"


@dataclass(frozen=True, slots=True)
class _Function:
    """
    :param parameters: name to type, in words of both engines.
    :param spark: body; `duckdb`: the same for DuckDB if it differs.
    """

    parameters: Mapping[str, str]
    returns: str
    spark: str
    duckdb: str = ""


FUNCTIONS: Mapping[str, _Function] = {
    # Microseconds of a time, and of the beginning of a day.
    "micros": _Function({"ts": "TIMESTAMP"}, "BIGINT", "unix_micros(ts)", "epoch_us(ts)"),
    "day_micros": _Function({"d": "DATE"}, "BIGINT", "unix_micros(CAST(d AS TIMESTAMP))", "epoch_us(d)"),
    # The time and the day of microseconds.
    "micros_time": _Function({"us": "BIGINT"}, "TIMESTAMP", "timestamp_micros(us)", "make_timestamp(us)"),
    "micros_day": _Function(
        {"us": "BIGINT"}, "DATE", "CAST(timestamp_micros(us) AS DATE)", "CAST(make_timestamp(us) AS DATE)"
    ),
    # Days from one to the other.
    "days_between": _Function({"a": "DATE", "b": "DATE"}, "INT", "datediff(b, a)", "CAST(b - a AS INTEGER)"),
    # Quotient of integers that are not negative.
    "divide": _Function({"a": "BIGINT", "b": "BIGINT"}, "BIGINT", "a DIV b", "a // b"),
    # Whole microseconds of a duration in milliseconds: sums of integers do not depend on order.
    "duration_micros": _Function({"ms": "DOUBLE"}, "BIGINT", "CAST(round(ms * 1000) AS BIGINT)"),
    # Bucket of a duration in milliseconds.
    "latency_bucket": _Function(
        {"ms": "DOUBLE"},
        "INT",
        f"CAST(floor(ln(CASE WHEN ms < {MIN_DURATION_MS} THEN {MIN_DURATION_MS} ELSE ms END) /"
        f" {log(BUCKET_BASE)!r}) AS INT)",
    ),
    # The 64 sequence numbers that one belongs to, and its bit among them.
    "seq_block": _Function({"seq": "BIGINT"}, "BIGINT", "seq >> 6"),
    "seq_bit": _Function(
        {"seq": "BIGINT"},
        "BIGINT",
        "shiftleft(1L, CAST(seq & 63 AS INT))",
        f"CASE WHEN seq & 63 = 63 THEN {-(2**63)} ELSE 1::BIGINT << (seq & 63) END",
    ),
    # Classes; a negative age counts as 0.
    "age_class": _Function({"ms": "DOUBLE"}, "STRING", _make_cases("ms", AGE_CLASSES)),
    "size_class": _Function({"bytes": "BIGINT"}, "STRING", _make_cases("bytes", SIZE_CLASSES)),
    "pushes_class": _Function({"n": "BIGINT"}, "STRING", _make_cases("n", PUSHES_CLASSES)),
}


def create_spark_functions(spark: SparkSession) -> None:
    """Create the functions in a Spark session."""
    for name, function in FUNCTIONS.items():
        parameters = ", ".join(f"{parameter} {kind}" for parameter, kind in function.parameters.items())
        spark.sql(
            f"CREATE OR REPLACE TEMPORARY FUNCTION {name}({parameters}) RETURNS {function.returns}"
            f" RETURN {function.spark}"
        )


def create_duckdb_functions(connection: duckdb.DuckDBPyConnection) -> None:
    """Create the functions in a DuckDB database, with those of Spark that scans use."""
    for name, function in FUNCTIONS.items():
        body = function.duckdb or function.spark
        for parameter, kind in function.parameters.items():
            body = _replace_word(body, parameter, f"CAST({parameter} AS {kind})")
        connection.execute(f"CREATE OR REPLACE TEMPORARY MACRO {name}({', '.join(function.parameters)}) AS {body}")
    connection.execute("CREATE OR REPLACE TEMPORARY MACRO regexp_like(a, b) AS regexp_matches(a, b)")


def _replace_word(text: str, word: str, by: str) -> str:
    import re

    return re.sub(rf"\b{word}\b", by, text)


def quote_text(value: str) -> str:
    """A literal."""
    return "'" + value.replace("'", "''") + "'"


def quote_day(day: date) -> str:
    """`DATE '2026-11-20'`."""
    return f"DATE '{day}'"


def list_texts(values: Iterable[str]) -> str:
    """Literals for `IN (...)`."""
    return ", ".join(map(quote_text, values))


def day_to_micros(day: date) -> int:
    """Microseconds at the start of a day."""
    return int(datetime(day.year, day.month, day.day, tzinfo=UTC).timestamp()) * SECOND_MICROS


EVENT_MICROS = "CASE WHEN CAST(ts AS DATE) = dt THEN micros(ts) ELSE day_micros(dt) END"
"""Expression for the time of a line: the start of `dt` if its time is on another day."""


def rank_per_day(query: str, count: int, order: str) -> str:
    """
    Query for the first `count` rows of each `dt`, with their `rank`, an int from 1. For DuckDB only.

    :param order: must be total within a day, so that ties are always broken the same way.
    """
    return (
        f"SELECT *, CAST(row_number() OVER (PARTITION BY dt ORDER BY {order}) AS INTEGER) AS rank FROM ({query})"
        f" QUALIFY rank <= {count}"
    )


def compute_percentiles(hist: str, by: Sequence[str], shares: Mapping[str, float], maximum: str | None = None) -> str:
    """
    Query for the percentiles of each group, by nearest rank. For DuckDB only.

    :param hist: query or table with columns `by`, `bucket` (int) and `n` (count); rows of equal buckets are summed.
    :param shares: column name to the share of values at or below, 0 to 1.
    :param maximum: name of a column for the upper end of the highest bucket.
    :return: columns `by`, `n`, a double in milliseconds for each share, the geometric middle of its bucket and so at
        most 1 % off, and the maximum; no row for a group without values.
    """
    keys = ", ".join(by)
    # Rounded, because 0.07 * 100 exceeds 7 in binary.
    ranks = {name: f"ceil(round(total * {share}, 6))" for name, share in shares.items()}
    columns = [
        f"{_convert_bucket_to_ms(f'min(bucket) FILTER (WHERE upto >= {rank}) + 0.5')} AS {name}"
        for name, rank in ranks.items()
    ]
    if maximum:
        columns.append(f"{_convert_bucket_to_ms('max(bucket) + 1')} AS {maximum}")
    source = hist if hist.isidentifier() else f"({hist})"
    return f"""
        WITH counts AS (SELECT {keys}, bucket, sum(n) AS n FROM {source} GROUP BY ALL HAVING sum(n) > 0),
        ranked AS (
            SELECT *, sum(n) OVER (PARTITION BY {keys} ORDER BY bucket) AS upto,
                sum(n) OVER (PARTITION BY {keys}) AS total
            FROM counts)
        SELECT {keys}, CAST(sum(n) AS BIGINT) AS n, {", ".join(columns)} FROM ranked GROUP BY {keys}
    """


def _convert_bucket_to_ms(exponent: str) -> str:
    return f"round(pow({BUCKET_BASE}, {exponent}), 6)"


def suppress_small_group(count: str, k: int, value: str = "") -> str:
    """Expression for `value`, or the count itself; null if the count of individuals is from 1 to k - 1."""
    return f"CASE WHEN {count} NOT BETWEEN 1 AND {k - 1} THEN {value or count} END"
