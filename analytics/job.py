"""
Jobs, and the days that a run is about.

A job reads tables and writes tables. To add one, declare its table in `analytics/schema.py`, write the job in
`analytics/jobs/`, and add it to `JOBS` in `analytics/jobs/__init__.py`. This one counts the wallets that each node
granted mediation, by day::

    from pyspark.sql import functions as F

    from analytics.job import Job
    from analytics.schema import DT, NODE, Column, Table

    GRANTS = Table(
        "grants_daily",
        "wallets that were granted mediation",
        (DT, NODE, Column("n", "bigint", "wallets")),
        ("dt", "node"),
    )


    def count_grants(tables, settings, span):
        '''`grants_daily`: distinct wallets, by node.'''
        granted = tables["events"].where(F.col("event") == "acct.grant")
        return {"grants_daily": granted.groupBy("dt", "node").agg(F.count_distinct("did").alias("n"))}


    JOB = Job("grants", reads=("events",), writes=("grants_daily",), transform=count_grants)

`history_days={"grants_daily": 7}` would also pass it a week of its own earlier rows. The run checks the columns
against the table, writes the table by day, and replaces a day that is computed again. Filter by `event` first, select
few columns, and aggregate before joining. Use no Python functions on rows, no `collect()` of unbounded data, no
random numbers and no current time, so that a repeated run gives the same rows. Identifiers may be in private tables
only, or in columns that the table declares as `pseudonyms`. `tests/analytics/frames.py` makes small tables for tests;
`python -m tests.docs.analysis_reference docs/reference/analytics.md` adds the table to the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import date, timedelta
from typing import TYPE_CHECKING

from analytics.settings import Settings

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


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


@dataclass(frozen=True, slots=True)
class Job:
    """
    A job reads tables and writes tables (:data:`analytics.schema.TABLES`), without side effects.

    Each DataFrame has a column `dt`, the day in UTC. Those of `reads` hold the days of the span; those of
    `history_days` also earlier days, as far as they exist, so that a job can carry state from day to day. Results
    hold days of the span only, with columns in any order; missing or undeclared columns are an error.

    :param reads: tables of the span, written by ingest or by jobs before this one.
    :param history_days: table to days read before the span; the span itself is included unless this job writes it.
    :param writes: all tables that `transform` returns.
    :param transform: pure function of DataFrames by table name.
    """

    name: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    transform: Callable[[Mapping[str, DataFrame], Settings, Span], Mapping[str, DataFrame]]
    history_days: Mapping[str, int] = field(default_factory=dict)
