"""DuckDB: the same work beside Spark's, and a second pair of eyes on what Spark has written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import duckdb

from mediatord.observability.event_schema import ENVELOPE, FIELDS

_TYPES = {"string": "VARCHAR", "integer": "BIGINT", "number": "DOUBLE", "boolean": "BOOLEAN"}
QUERY = """
    SELECT date_trunc('hour', ts) AS hour, node, event, path, count(*), sum(size),
        quantile_cont(latency_ms, [0.5, 0.95, 0.99]), count(DISTINCT rcpt)
    FROM {source} GROUP BY ALL
"""


def connected(threads: int) -> duckdb.DuckDBPyConnection:
    """A database in memory."""
    database = duckdb.connect(config={"threads": threads, "memory_limit": "2GB"})
    # It would go to standard output.
    database.execute("SET enable_progress_bar = false")
    return database


def raw(files: Sequence[str]) -> str:
    """Log segments as a table: with all fields as declared, null where a line is none."""
    columns = {name: _TYPES[kind] for name, (kind, _) in {**ENVELOPE, **FIELDS}.items()} | {"ts": "TIMESTAMP"}
    declared = ", ".join(f"'{name}': '{kind}'" for name, kind in columns.items())
    listed = ", ".join(f"'{file}'" for file in files)
    return f"read_json([{listed}], format='newline_delimited', ignore_errors=true, columns={{{declared}}})"


def work(files: Sequence[str], target: str, threads: int) -> dict[str, float]:
    """Seconds that the equivalents of ingest and of the query take, on raw lines and on Parquet."""
    database, seconds = connected(threads), dict[str, float]()

    def timed(name: str, query: str) -> None:
        began = perf_counter()
        database.execute(query).fetchall()
        seconds[name] = perf_counter() - began

    timed(
        "ingest",
        f"COPY (SELECT *, ts::DATE AS dt FROM {raw(files)} WHERE event IS NOT NULL)"
        f" TO '{target}' (FORMAT parquet, COMPRESSION zstd, PARTITION_BY (dt))",
    )
    timed("query_raw", QUERY.format(source=raw(files)))
    timed("query_parquet", QUERY.format(source=f"read_parquet('{target}/**/*.parquet')"))
    return seconds


def digests(tables: Path) -> dict[str, str]:
    """Every table to its number of rows and two sums over all of their values, whichever order they are in."""
    database = connected(2)
    found = {}
    for table in sorted(tables.iterdir()):
        if any(table.rglob("*.parquet")):
            rows = database.execute(
                f"SELECT count(*), bit_xor(hash(t)), sum(hash(t)) FROM {_stored(table)} t"
            ).fetchone()
            found[table.name] = " ".join(map(str, rows or ()))
    return found


def totals(tables: Path) -> Mapping[str, Any]:
    """What the tables say about the one day that was ingested, in the words of the generator's truth."""
    database = connected(2)

    def one(table: str, query: str) -> dict[str, Any]:
        found = database.execute(f"SELECT {query} FROM {_stored(tables / table)}")
        values = found.fetchone() or ()
        return dict(zip((column[0] for column in found.description or ()), values, strict=True))

    events = database.execute(f"SELECT event, count(*) FROM {_stored(tables / 'events')} GROUP BY event").fetchall()
    ledger = one(
        "ledger_daily",
        "accepted, acked, expired, evicted, removed, open, orphans + around_crash + before_books AS orphans,"
        " difference, again",
    )
    drift = database.execute(
        f"SELECT counter, sum(difference)::BIGINT FROM {_stored(tables / 'reconciliation_daily')}"
        " GROUP BY counter HAVING sum(difference) <> 0"
    ).fetchall()
    return {
        "events": dict(events),
        "damaged": one("inputs", "sum(corrupt)::BIGINT AS n")["n"],
        "missing": one("boots_daily", "sum(missing)::BIGINT AS n")["n"],
        "drift": dict(drift),
        **ledger,
    }


def _stored(table: Path) -> str:
    return f"read_parquet('{table}/**/*.parquet', hive_partitioning=true, union_by_name=true)"
