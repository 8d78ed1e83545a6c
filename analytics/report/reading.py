"""What the report reads: bounded rows of each table, by a few threads as each read is mostly waiting for Spark."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import date
from typing import TYPE_CHECKING

from analytics.facts import RunFacts
from analytics.job import Span
from analytics.report.parts import Row
from analytics.settings import Settings
from analytics.tables import TABLES
from analytics.warehouse import Warehouse

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_THREADS = 4
MOST_ROWS = 1000
_MOST_OF_A_SERIES = 50_000


def _as_it_is(frame: DataFrame) -> DataFrame:
    return frame


def _distribution(hist: DataFrame) -> DataFrame:
    from pyspark.sql import functions as F

    pushes = hist.where("metric in ('push', 'ack')")
    return pushes.groupBy("dt", "metric", "path", "bucket").agg(F.sum("n").alias("n"))


def _segments(inputs: DataFrame) -> DataFrame:
    from pyspark.sql import functions as F

    totals = (F.sum(name).alias(name) for name in ("bytes", "lines", "corrupt"))
    return inputs.groupBy("dt", "state", "packed").agg(F.count("*").alias("segments"), *totals)


def _sockets(concurrency: DataFrame) -> DataFrame:
    """The hour here, as a timestamp would come back in the time zone of the process."""
    from pyspark.sql import functions as F

    at = (F.hour("at") + F.minute("at") / 60).alias("at_hour")
    return concurrency.groupBy("dt", at).agg(F.sum("peak").alias("peak"))


def _of_charts(series: DataFrame) -> DataFrame:
    from pyspark.sql import functions as F

    return series.where(F.col("metric").isin(*CHARTED))


CHARTED = (
    *("messages_accepted", "messages_acknowledged", "messages_lost", "requests", "requests_refused", "depth_max"),
    *("latency_live_p95_ms", "latency_pickup_p95_ms", "limit_hits"),
)


@dataclass(frozen=True, slots=True)
class Wanted:
    """
    :param before: days before the day of the report.
    :param first: columns, the rows with most of which are read if not all can be.
    :param made: of the table, what is read.
    """

    before: int = 0
    first: Sequence[str] = ("n",)
    most: int = MOST_ROWS
    made: Callable[[DataFrame], DataFrame] = _as_it_is


_RANKED = Wanted(first=("-rank",))
_SERIES = ("dt", "metric")

WANTED: dict[str, Wanted] = {
    "quality_daily": Wanted(),
    "boots_daily": Wanted(first=("missing", "doubled", "n")),
    "inputs": Wanted(first=("segments",), made=_segments),
    "ledger_daily": Wanted(before=28, first=("dt",)),
    "reconciliation_daily": Wanted(first=("difference", "counted")),
    "stores_daily": Wanted(first=("total",)),
    "messages_daily": Wanted(),
    "lost_daily": Wanted(),
    "traffic_daily": Wanted(),
    "latency_daily": Wanted(),
    "latency_hist": Wanted(first=("bucket",), most=_MOST_OF_A_SERIES, made=_distribution),
    "queue_hourly": Wanted(first=("depth_max",), most=5000),
    "queue_risk": _RANKED,
    "errors_daily": Wanted(first=("is_new", "n")),
    "error_senders": _RANKED,
    "limits_daily": Wanted(first=("hits",)),
    "limits_top": _RANKED,
    "replay_daily": Wanted(),
    "top_senders": _RANKED,
    "top_recipients": _RANKED,
    "concentration_daily": Wanted(),
    "dormant_daily": Wanted(first=("dormant",)),
    "retention_weekly": Wanted(first=("cohort", "week")),
    "sessions_daily": Wanted(),
    "sockets_daily": Wanted(first=("opened",)),
    "concurrency_10m": Wanted(first=("at_hour",), made=_sockets),
    "node_compare": Wanted(first=("flagged", "ratio")),
    "series_hourly": Wanted(before=28, first=_SERIES, most=_MOST_OF_A_SERIES, made=_of_charts),
    "series_daily": Wanted(before=56, first=_SERIES, most=_MOST_OF_A_SERIES),
    "anomalies": Wanted(first=("z",)),
    "forecast": Wanted(first=("metric", "day")),
    "forecast_error": Wanted(first=("metric",)),
    "cost_daily": Wanted(first=("dur_ms",)),
}
"""The tables of the report."""


@dataclass(frozen=True, slots=True)
class Day:
    """
    What is known of a day.

    :ivar rows: of each table, those with most first.
    :ivar cut: tables that have more rows.
    """

    day: date
    settings: Settings
    facts: RunFacts
    rows: dict[str, list[Row]] = field(repr=False)
    cut: frozenset[str] = frozenset()

    def today(self, table: str) -> list[Row]:
        """Rows of the day itself."""
        return [row for row in self.rows[table] if row["dt"] == self.day]

    def one(self, table: str) -> Row:
        """The row of a table that has one a day; empty if there is none."""
        return next(iter(self.today(table)), {})

    def total(self, table: str, column: str) -> int:
        """Sum over the day."""
        return sum(row[column] or 0 for row in self.today(table))

    def hours(self, metric: str) -> dict[int, float]:
        """Hour to value of the day."""
        return {row["hour"]: row["value"] for row in self.today("series_hourly") if row["metric"] == metric}

    def past(self, metric: str) -> dict[date, float]:
        """Day to value, in order, up to the day."""
        rows = [row for row in self.rows["series_daily"] if row["metric"] == metric]
        return {row["dt"]: row["value"] for row in sorted(rows, key=lambda row: row["dt"])}


def read(warehouse: Warehouse, day: date, settings: Settings, facts: RunFacts, names: Iterable[str] = WANTED) -> Day:
    """The tables of these names."""
    with ThreadPoolExecutor(_THREADS, "read") as threads:
        found = dict(zip(names, threads.map(lambda name: _rows(warehouse, name, day), names), strict=True))
    cut = frozenset(name for name, rows in found.items() if len(rows) > WANTED[name].most)
    return Day(day, settings, facts, {name: rows[: WANTED[name].most] for name, rows in found.items()}, cut)


def _rows(warehouse: Warehouse, name: str, day: date) -> list[Row]:
    """At most one row more than wanted."""
    from pyspark.sql import functions as F

    wanted = WANTED[name]
    frame = wanted.made(warehouse.read(name, Span(day, day).widened(before=wanted.before)))
    keys = [key for key in TABLES[name].key if key in frame.columns and key not in wanted.first]
    order = [F.asc(key[1:]) if key.startswith("-") else F.desc_nulls_last(key) for key in wanted.first]
    rows = frame.orderBy(*order, *map(F.asc, keys)).limit(wanted.most + 1).collect()
    return [row.asDict() for row in rows]
