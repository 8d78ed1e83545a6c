"""
Jobs, and the days that a run is about.

A job reads tables and makes tables. To add one, declare its table in `analytics/tables.py`, write the job as a module
in `analytics/jobs/`, and name it in `analytics/jobs/catalogue.py`. This one counts the wallets that each node granted
mediation, by day::

    from pyspark.sql import functions as F

    from analytics.job import Job
    from analytics.tables import DT, NODE, Column, Table

    GRANTS = Table(
        "grants_daily",
        "wallets that were granted mediation",
        (DT, NODE, Column("n", "bigint", "wallets")),
        ("dt", "node"),
    )


    def grants(tables, settings, span):
        '''`grants_daily`: distinct wallets, by node.'''
        granted = tables["events"].where(F.col("event") == "acct.grant")
        return {"grants_daily": granted.groupBy("dt", "node").agg(F.count_distinct("did").alias("n"))}


    JOB = Job("grants", reads=("events",), makes=("grants_daily",), transform=grants)

`recalls={"grants_daily": 7}` would hand it a week of its own earlier rows too. The run checks that the columns are
those of the table, writes it by day, and replaces it when a day is made again. Filter by `event` first, select few
columns, and aggregate before joining. No Python functions on rows, no `collect()` of what grows, nothing random and
no present time, so that a repeated run gives the same rows. Identifiers stand only in private tables, or in columns
that the table names as `pseudonyms`. `tests/analytics/frames.py` makes small tables for a test; `python -m
analytics.reference docs/reference/analytics.md` puts the new table into the reference.
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
    Days in UTC, one after the other.

    :param first: the first one.
    :param last: the last one, part of the span.
    :raise ValueError: the last comes before the first.
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
        """All of them, in order."""
        return [self.first + timedelta(n) for n in range((self.last - self.first).days + 1)]

    def widened(self, before: int = 0, after: int = 0) -> Span:
        """The span that begins and ends so many days further out."""
        return Span(self.first - timedelta(before), self.last + timedelta(after))


@dataclass(frozen=True, slots=True)
class Job:
    """
    One job: reads tables, makes tables (:data:`analytics.tables.TABLES`), and does nothing else.

    Each DataFrame has a column `dt`, the day in UTC. Those of `reads` hold the days of the span; those of `recalls`
    so many days before it as well, as far as there are any, so that a job can carry something on from day to day.
    What a job makes holds the days of the span only, columns in any order; missing or undeclared ones are a mistake.

    :param reads: tables of the span, made by ingest or by jobs before this one.
    :param recalls: table to days before the span; the span itself comes with it if this job does not make the table.
    :param makes: the tables that `transform` returns, all of them.
    :param transform: pure; from frames by name of the table.
    """

    name: str
    reads: tuple[str, ...]
    makes: tuple[str, ...]
    transform: Callable[[Mapping[str, DataFrame], Settings, Span], Mapping[str, DataFrame]]
    recalls: Mapping[str, int] = field(default_factory=dict)
