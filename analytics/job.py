"""
Jobs, and the days that a run is about.

A job makes tables in two steps. Its *scans* aggregate many lines to few rows: SQL that Spark and DuckDB both run,
over `events` and other large tables (:mod:`analytics.sql_functions` says what they may use). Its *tables* are made
from the results of scans, other tables and earlier days: SQL of DuckDB, or rows that Python computes. To add one,
declare its table in `analytics/schema.py`, write the job in `analytics/jobs/`, and add it to `JOBS` in
`analytics/jobs/__init__.py`. This one counts the wallets that each node granted mediation, by day::

    from analytics.job import Job, JobRun
    from analytics.schema import DT, NODE, Column, Table

    GRANTS = Table(
        "grants_daily",
        "wallets that were granted mediation",
        (DT, NODE, Column("n", "bigint", "wallets")),
        ("dt", "node"),
    )


    def count_grants(run: JobRun) -> dict[str, str]:
        '''`grants_daily`: distinct wallets, by node.'''
        run.scan("grants", f'''
            SELECT dt, node, did FROM events
            WHERE event = 'acct.grant' AND dt >= {run.first} GROUP BY ALL
        ''')
        return {"grants_daily": "SELECT dt, node, count(did) AS n FROM grants GROUP BY ALL"}


    JOB = Job("grants", reads=("events",), writes=("grants_daily",), make_tables=count_grants)

`events` has the days of the span and three before it; other tables have all earlier days that any job asks for in
`history_days`, and days of the span once the job that writes them has run. Results are of days of the span only. A
scan filters by `dt` and `event`, selects few columns, and aggregates before it joins. No random numbers and no
current time, so that a repeated run gives the same rows. Identifiers may be in private tables only, or in columns
that the table declares as `pseudonyms`. `tests/analytics/job_tables.py` makes small tables for tests;
`python -m tests.docs.analysis_reference docs/reference/analytics.md` adds the table to the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, timedelta
from typing import Any

from analytics.database import Database, Row
from analytics.engine import Engine
from analytics.settings import Settings
from analytics.sql_functions import quote_day


@dataclass(frozen=True, slots=True)
class Span:
    """
    Consecutive days in UTC.

    :param last: included.
    :raise ValueError: the last day is before the first.
    """

    first: date
    last: date

    def __post_init__(self) -> None:
        if self.last < self.first:
            raise ValueError(f"{self.last} is before {self.first}")

    def __contains__(self, day: date) -> bool:
        return self.first <= day <= self.last

    @property
    def days(self) -> list[date]:
        """All days, in order."""
        return [self.first + timedelta(n) for n in range((self.last - self.first).days + 1)]

    def widen(self, before: int = 0, after: int = 0) -> Span:
        """Add days before and after."""
        return Span(self.first - timedelta(before), self.last + timedelta(after))


# Days before the span whose events scans can read.
EVENT_HISTORY_DAYS = 3


@dataclass(slots=True)
class JobRun:
    """
    What a job works with.

    :param database: has all tables.
    :ivar scans: names of scans that have run.
    """

    database: Database
    engine: Engine
    settings: Settings
    span: Span
    scans: set[str] = field(default_factory=set)

    @property
    def first(self) -> str:
        """First day of the span, as SQL."""
        return quote_day(self.span.first)

    @property
    def last(self) -> str:
        """Last day of the span, as SQL."""
        return quote_day(self.span.last)

    def scan(self, name: str, query: str, small: Sequence[str] = ()) -> None:
        """
        Run a scan, unless it has run for another job; its rows are a table.

        :param name: of the scan and of the table; no other table has it.
        :param small: tables made by scans or by :meth:`define` that the query reads, at most some thousand rows each.
        """
        if name not in self.scans:
            self.engine.scan(name, query, small)
            self.scans.add(name)

    def define(self, name: str, query: str) -> None:
        """Make a table for later queries of the job."""
        self.database.define(name, query)

    def insert(self, name: str, columns: str, rows: Iterable[Sequence[Any]]) -> None:
        """Make a table from rows; as :meth:`analytics.database.Database.insert`."""
        self.database.insert(name, columns, rows)

    def rows(self, query: str) -> list[Row]:
        """Rows of a query of the database."""
        return self.database.rows(query)


@dataclass(frozen=True, slots=True)
class Job:
    """
    A job reads tables and writes tables (:data:`analytics.schema.TABLES`).

    :param reads: tables of the span, written by ingest or by jobs before this one.
    :param history_days: table to days read before the span.
    :param writes: all tables that `make_tables` returns.
    :param make_tables: the query, or the rows, of each table it writes.
    """

    name: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    make_tables: Callable[[JobRun], Mapping[str, str | Sequence[Row]]]
    history_days: Mapping[str, int] = field(default_factory=dict)
