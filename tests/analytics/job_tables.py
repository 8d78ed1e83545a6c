"""Small tables for tests of jobs, in a DuckDB database: a test gives the columns that matter, all others are null."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import date, datetime, timedelta
from typing import Any

from analytics.database import Database, get_duckdb_type
from analytics.engine import DuckDBEngine
from analytics.job import Job, JobRun, Span
from analytics.schema import TABLES, Table, make_events_table
from analytics.settings import Settings
from analytics.writing.warehouse import ALL_TABLES, make_table_query

DAY = date(2026, 11, 16)
"""A Monday."""


def day(number: int) -> date:
    """A day by its distance from :data:`DAY`."""
    return DAY + timedelta(number)


def at(number: int = 0, hour: float = 0, minute: float = 0, second: float = 0) -> datetime:
    """A time on a :func:`day`, in UTC, naive as in the database."""
    return datetime.combine(day(number), datetime.min.time()) + timedelta(hours=hour, minutes=minute, seconds=second)


def event(name: str, ts: datetime | None = None, **fields: Any) -> dict[str, Any]:
    """A row of `events`, on the day of its time; the default time is the beginning of :data:`DAY`."""
    ts = ts or at()
    return {"dt": ts.date(), "ts": ts, "event": name, "node": "a", "epoch": 1, **fields}


def run_job(
    job: Job,
    span: Span,
    events: Iterable[Mapping[str, Any]] = (),
    settings: Settings | None = None,
    tables: Mapping[str, Iterable[Mapping[str, Any]]] | None = None,
) -> dict[str, list[dict[str, Any]]]:
    """
    Run a job with DuckDB.

    :param tables: rows of other tables; the default day of their rows is :data:`DAY`.
    :return: rows of each table in the order of its key, with the declared columns. Asserts that all declared tables
        were made, that keys are unique and that days are in the span.
    """
    with open_tables(events, tables or {}) as database:
        return make_rows(job, JobRun(database, DuckDBEngine(database), settings or Settings(), span))


@contextmanager
def open_tables(
    events: Iterable[Mapping[str, Any]], tables: Mapping[str, Iterable[Mapping[str, Any]]]
) -> Iterator[Database]:
    """A database with these rows; all other tables are empty."""
    with tempfile.TemporaryDirectory() as scratch:
        database = Database(scratch)
        try:
            for name in TABLES:
                fill_table(database, TABLES[name], tables.get(name, ()))
            fill_table(database, make_events_table(), events)
            yield database
        finally:
            database.close()


def make_rows(job: Job, run: JobRun) -> dict[str, list[dict[str, Any]]]:
    """Rows of each table that a job makes; as :func:`run_job`."""
    made = job.make_tables(run)
    assert set(made) == set(job.writes)
    return {name: read_rows(run.database, name, content, run.span) for name, content in made.items()}


def read_rows(
    database: Database, name: str, content: str | Iterable[Mapping[str, Any]], span: Span
) -> list[dict[str, Any]]:
    """Rows of a table that a job made."""
    rows = database.rows(make_table_query(database, ALL_TABLES[name], content, "test"))
    key = TABLES[name].key
    assert len({tuple(row[column] for column in key) for row in rows}) == len(rows) or not key, f"{name}: key"
    assert all(row["dt"] in span for row in rows), (name, sorted({str(row["dt"]) for row in rows}))
    return rows


def fill_table(database: Database, table: Table, rows: Iterable[Mapping[str, Any]]) -> None:
    """Make a declared table of these rows."""
    names = [column.name for column in table.columns]
    found = list(rows)
    unknown = {name for row in found for name in row} - set(names)
    assert not unknown, unknown
    declared = ", ".join(f'"{column.name}" {get_duckdb_type(column)}' for column in table.columns)
    database.insert(table.name, declared, ([{"dt": DAY, **row}.get(name) for name in names] for row in found))


def select_columns(rows: Iterable[Mapping[str, Any]], *columns: str) -> list[tuple[Any, ...]]:
    """Selected columns of rows, as tuples."""
    return [tuple(row[column] for column in columns) for row in rows]
