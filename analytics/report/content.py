"""Contents of a report: rows read from the warehouse, figures, tables and sections, and how numbers are formatted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date, timedelta
from math import isfinite
from statistics import median
from typing import Any, Literal

from analytics.database import Database
from analytics.job import Span
from analytics.schema import OPERATOR_NODE_SUFFIX, TABLES
from analytics.settings import Settings
from analytics.sql_functions import list_texts, quote_day
from analytics.writing.runs import RunInfo

FEW_LABEL = "few"
NO_VALUE = "\N{EN DASH}"
_NO_BREAK_SPACE = "\N{NO-BREAK SPACE}"
_MAX_TEXT_CHARS = 160
_SIZE_UNITS = ((1, "B"), (1024, "KiB"), (1024**2, "MiB"), (1024**3, "GiB"), (1024**4, "TiB"))
_DURATION_UNITS = ((1, "ms"), (1000, "s"), (60_000, "min"), (3_600_000, "h"), (86_400_000, "d"))


def format_count(value: float | None) -> str:
    """`12,345`; one decimal for small fractional numbers."""
    if value is None or not isfinite(value):
        return NO_VALUE
    return f"{value:,.0f}" if value == int(value) or abs(value) >= 100 else f"{value:,.1f}"


def format_axis_count(value: float) -> str:
    """A count for an axis: `12 k`, `1.5 M`."""
    for factor, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= factor:
            return f"{value / (1000 if unit == 'k' else factor):,.4g}{_NO_BREAK_SPACE}{unit}"
    return f"{value:,.4g}"


def format_size(value: float | None) -> str:
    """Bytes: `1.2 MiB`."""
    return _format_scaled(value, _SIZE_UNITS)


def format_duration(ms: float | None) -> str:
    """Milliseconds: `350 ms`, `2.1 s`, `3.4 h`."""
    return _format_scaled(ms, _DURATION_UNITS)


def format_share(value: float | None) -> str:
    """Fraction of 1: `1.2 %`."""
    if value is None or not isfinite(value):
        return NO_VALUE
    percent = value * 100
    digits = 0 if percent >= 99.95 or percent == int(percent) else 2 if abs(percent) < 1 else 1
    return f"{percent:.{digits}f}{_NO_BREAK_SPACE}%"


def format_days(value: float | None) -> str:
    """`2.5 days`."""
    return NO_VALUE if value is None else f"{format_count(value)}{_NO_BREAK_SPACE}days"


def get_formatter(name: str) -> Callable[[float | None], str]:
    """Formatter for a figure by the unit in its name: `..._ms`, `..._share`, bytes, or a count."""
    if "bytes" in name:
        return format_size
    if "_ms" in name:
        return format_duration
    return format_share if name.endswith("share") else format_count


def format_text(value: object) -> str:
    """Text, truncated to one line; a dash if empty."""
    whole = NO_VALUE if value is None or value == "" else str(value)
    return whole if len(whole) <= _MAX_TEXT_CHARS else f"{whole[:_MAX_TEXT_CHARS]}\N{HORIZONTAL ELLIPSIS}"


def format_party_count(value: float | None) -> str:
    """Count of individuals; null if suppressed by k-anonymity."""
    return FEW_LABEL if value is None else format_count(value)


def format_plural(number: int, one: str, many: str = "") -> str:
    """`1 node`, `3 nodes`."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def _format_scaled(value: float | None, units: Sequence[tuple[int, str]]) -> str:
    if value is None or not isfinite(value):
        return NO_VALUE
    factor, unit = next((each for each in reversed(units) if abs(value) >= each[0]), units[0])
    scaled = value / factor
    digits = 0 if scaled == int(scaled) or abs(scaled) >= 100 else 1 if abs(scaled) >= 10 else 2
    return f"{scaled:.{digits}f}{_NO_BREAK_SPACE}{unit}"


Severity = Literal["good", "warn", "bad", "plain"]
Row = dict[str, Any]

NORMAL_NIGHTS = 28
MIN_NIGHTS = 3
# Any new value is outside the range of a few nights.
_MIN_NIGHTS_FOR_RANGE = 7
# Relative to the normal value.
_SMALL_CHANGE, _LARGE_CHANGE = 0.1, 0.25


@dataclass(frozen=True, slots=True)
class Normal:
    """
    What a figure is compared with: its values in the :data:`NORMAL_NIGHTS` nights before.

    :param median: None of fewer than :data:`MIN_NIGHTS` nights.
    :param before: value of the day before; None if unknown.
    :param format: formats a value.
    """

    median: float | None
    before: float | None
    lowest: float
    highest: float
    nights: int
    format: Callable[[float | None], str]

    @property
    def shown(self) -> str:
        """The median, formatted."""
        return "no normal yet" if self.median is None else self.format(self.median)

    @property
    def shown_before(self) -> str:
        """The value of the day before, formatted."""
        return self.format(self.before)

    def describe_change(self, value: float | str | None) -> str:
        """Compare with the median and the range: `3.4 times normal, highest of 28 nights`; empty if unknown."""
        if self.median is None or value is None or isinstance(value, str):
            return ""
        change = _describe_ratio(value, self.median)
        extreme = self.describe_extreme(value)
        return f"{change}, {extreme}" if extreme else change

    def describe_extreme(self, value: float | str | None) -> str:
        """`highest of 28 nights` or `lowest of 28 nights`; empty within the range or near the median."""
        if self.median is None or value is None or isinstance(value, str) or self.nights < _MIN_NIGHTS_FOR_RANGE:
            return ""
        if self.lowest <= value <= self.highest or abs(value - self.median) <= _LARGE_CHANGE * abs(self.median):
            return ""
        return f"{'highest' if value > self.highest else 'lowest'} of {self.nights} nights"


def _describe_ratio(value: float, normal: float) -> str:
    if abs(value - normal) <= _SMALL_CHANGE * abs(normal):
        return "as normal"
    if not normal:
        return "above normal" if value > 0 else "below normal"
    if value >= 2 * normal > 0:
        return f"{value / normal:,.{1 if value < 10 * normal else 0}f} times normal"
    return f"{value / normal - 1:+.0%}".replace("%", f"{_NO_BREAK_SPACE}%")


def find_normal(values: Mapping[date, float], day: date, format: Callable[[float | None], str]) -> Normal:
    """The normal value of a day. :param values: by day; days without one are missing."""
    past = [values[before] for n in range(1, NORMAL_NIGHTS + 1) if (before := day - timedelta(n)) in values]
    usual = median(past) if len(past) >= MIN_NIGHTS else None
    lowest, highest = (min(past), max(past)) if past else (0, 0)
    return Normal(usual, values.get(day - timedelta(1)), lowest, highest, len(past), format)


@dataclass(frozen=True, slots=True)
class Advice:
    """:param text: a sentence. :param runbook: heading in docs/runbooks/alerts.md."""

    text: str
    runbook: str


def is_operator(node: str | None) -> bool:
    """Whether lines of this name are those of an operator's commands, not of a node."""
    return (node or "").endswith(OPERATOR_NODE_SUFFIX)


@dataclass(frozen=True, slots=True)
class Figure:
    """
    A single figure.

    :param key: name in summary.json, with the unit.
    :param value: value in summary.json.
    :param shown: formatted value with its unit.
    :param meaning: explanation.
    :param normal: what the value is compared with.
    :param section: id of the section to look at.
    :param advice: what to do if it is WARNING or CRITICAL, with the heading of a runbook in docs/runbooks/alerts.md.
    """

    key: str
    label: str
    value: float | str | None
    shown: str
    meaning: str
    state: Severity = "plain"
    normal: Normal | None = None
    section: str = ""
    advice: Advice | None = None

    @property
    def change(self) -> str:
        """How the value compares with the normal one, in a few words; empty if unknown."""
        return "" if self.normal is None else self.normal.describe_change(self.value)

    @property
    def is_unusual(self) -> bool:
        """Whether the value is outside the range of the nights before."""
        return self.normal is not None and bool(self.normal.describe_extreme(self.value))


@dataclass(frozen=True, slots=True)
class ReportColumn:
    """:param format: formats a value. :param number: aligned right."""

    name: str
    title: str
    format: Callable[[Any], str]
    number: bool = True


@dataclass(frozen=True, slots=True)
class ReportTable:
    """
    A table.

    :param source: table of the warehouse, also the name of the CSV file; empty if there is none.
    :param note: below the table.
    :param highlighted_rows: indexes of rows to highlight.
    """

    caption: str
    columns: Sequence[ReportColumn]
    rows: Sequence[Row]
    source: str = ""
    note: str = ""
    highlighted_rows: frozenset[int] = frozenset()

    @property
    def cells(self) -> list[list[str]]:
        """Formatted cells."""
        return [[column.format(row.get(column.name)) for column in self.columns] for row in self.rows]


@dataclass(frozen=True, slots=True)
class Chart:
    """
    :param description: text alternative.
    :param svg: complete and safe.
    :param render_png: draws the same chart on white, in twice the resolution.
    """

    title: str
    description: str
    svg: str
    table: ReportTable
    render_png: Callable[[], bytes]


@dataclass(frozen=True, slots=True)
class Section:
    """:param lead: introduction, a sentence or two."""

    id: str
    title: str
    lead: str
    figures: Sequence[Figure] = ()
    charts: Sequence[Chart] = ()
    grids: Sequence[ReportTable] = ()
    notes: Sequence[str] = field(default=())


def limit_rows(rows: Sequence[Row], most: int, source: str) -> tuple[Sequence[Row], str]:
    """The first rows, and a note if there are more."""
    left = len(rows) - most
    return rows[:most], f"{left:,} more in {source}.csv." if left > 0 else ""


MAX_ROWS = 1000
_MAX_SERIES_ROWS = 50_000


CHARTED_METRICS = (
    *("messages_accepted", "messages_acknowledged", "messages_lost", "requests", "requests_refused", "depth_max"),
    *("latency_live_p95_ms", "latency_pickup_p95_ms", "limit_hits"),
)


@dataclass(frozen=True, slots=True)
class TableQuery:
    """
    :param days_before: days before the day of the report.
    :param order: columns whose largest rows are read if there are too many.
    :param query: SQL for the rows, of those of the days, which are called `rows`.
    """

    days_before: int = 0
    order: Sequence[str] = ("n",)
    max_rows: int = MAX_ROWS
    query: str = "SELECT * FROM rows"


_SUM_SEGMENTS = """
    SELECT dt, state, packed, count(*) AS segments, sum(bytes)::BIGINT AS bytes, sum(lines)::BIGINT AS lines,
        sum(corrupt)::BIGINT AS corrupt
    FROM rows GROUP BY ALL
"""
_SUM_DISTRIBUTION = """
    SELECT dt, metric, path, bucket, sum(n)::BIGINT AS n FROM rows WHERE metric IN ('push', 'ack') GROUP BY ALL
"""
_SUM_SOCKETS = """
    SELECT dt, hour("at") + minute("at") / 60 AS at_hour, sum(peak)::BIGINT AS peak FROM rows GROUP BY ALL
"""
_SELECT_CHARTED = f"SELECT * FROM rows WHERE metric IN ({list_texts(CHARTED_METRICS)})"
_RANKED_QUERY = TableQuery(order=("-rank",))
# For normal values.
_HISTORY_QUERY = TableQuery(days_before=NORMAL_NIGHTS, max_rows=20_000)
_SERIES_KEY = ("dt", "metric")

REPORT_QUERIES: dict[str, TableQuery] = {
    "quality_daily": _HISTORY_QUERY,
    "boots_daily": TableQuery(order=("missing", "doubled", "n")),
    "inputs": TableQuery(days_before=NORMAL_NIGHTS, order=("segments",), query=_SUM_SEGMENTS),
    "ledger_daily": TableQuery(days_before=28, order=("dt",)),
    "reconciliation_daily": replace(_HISTORY_QUERY, order=("difference", "counted")),
    "stores_daily": replace(_HISTORY_QUERY, order=("total",)),
    "messages_daily": TableQuery(),
    "lost_daily": TableQuery(),
    "traffic_daily": TableQuery(),
    "latency_daily": TableQuery(),
    "latency_hist": TableQuery(order=("bucket",), max_rows=_MAX_SERIES_ROWS, query=_SUM_DISTRIBUTION),
    "queue_hourly": TableQuery(order=("depth_max",), max_rows=5000),
    "queue_risk": replace(_HISTORY_QUERY, order=("-rank",)),
    "errors_daily": TableQuery(order=("is_new", "n")),
    "error_senders": _RANKED_QUERY,
    "limits_daily": TableQuery(order=("hits",)),
    "limits_top": _RANKED_QUERY,
    "replay_daily": TableQuery(),
    "top_senders": _RANKED_QUERY,
    "top_recipients": _RANKED_QUERY,
    "concentration_daily": TableQuery(),
    "dormant_daily": TableQuery(order=("dormant",)),
    "retention_weekly": TableQuery(order=("cohort", "week")),
    "sessions_daily": TableQuery(),
    "sockets_daily": TableQuery(order=("opened",)),
    "concurrency_10m": TableQuery(order=("at_hour",), query=_SUM_SOCKETS),
    "push_daily": _HISTORY_QUERY,
    "wakeups_daily": _HISTORY_QUERY,
    "wakeups_missed_top": _RANKED_QUERY,
    "node_compare": TableQuery(order=("flagged", "ratio")),
    "series_hourly": TableQuery(days_before=28, order=_SERIES_KEY, max_rows=_MAX_SERIES_ROWS, query=_SELECT_CHARTED),
    "series_daily": TableQuery(days_before=56, order=_SERIES_KEY, max_rows=_MAX_SERIES_ROWS),
    "anomalies": replace(_HISTORY_QUERY, order=("z",)),
    "forecast": TableQuery(order=("metric", "day")),
    "forecast_error": TableQuery(order=("metric",)),
    "cost_daily": TableQuery(order=("dur_ms",)),
}
"""The tables of the report."""


@dataclass(frozen=True, slots=True)
class ReportData:
    """
    Data of a day.

    :ivar rows: of each table, largest first.
    :ivar truncated_tables: tables with more rows than were read.
    """

    day: date
    settings: Settings
    run_info: RunInfo
    rows: dict[str, list[Row]] = field(repr=False)
    truncated_tables: frozenset[str] = frozenset()

    def get_rows(self, table: str) -> list[Row]:
        """Rows of the day."""
        return [row for row in self.rows[table] if row["dt"] == self.day]

    def get_row(self, table: str) -> Row:
        """Row of a table with one row a day; empty if there is none."""
        return next(iter(self.get_rows(table)), {})

    def sum_column(self, table: str, column: str) -> int:
        """Sum over the day."""
        return sum(row[column] or 0 for row in self.get_rows(table))

    def get_hours(self, metric: str) -> dict[int, float]:
        """Values of the day by hour."""
        return {row["hour"]: row["value"] for row in self.get_rows("series_hourly") if row["metric"] == metric}

    def get_past_days(self, metric: str) -> dict[date, float]:
        """Values by day, in order, up to the day."""
        rows = [row for row in self.rows["series_daily"] if row["metric"] == metric]
        return {row["dt"]: row["value"] for row in sorted(rows, key=lambda row: row["dt"])}

    def get_normal(self, metric: str) -> Normal:
        """Normal value of a metric of series_daily."""
        return find_normal(self.get_past_days(metric), self.day, get_formatter(metric))

    def count_normal(self, table: str, count: Callable[[Row], float | None], format: Callable[[Any], str]) -> Normal:
        """Normal sum over the rows of a night; 0 for an analysed night without rows."""
        sums = {row["dt"]: 0.0 for row in self.rows["quality_daily"]}
        for row in self.rows[table]:
            sums[row["dt"]] = sums.get(row["dt"], 0) + (count(row) or 0)
        return find_normal(sums, self.day, format)


def load_report_data(
    database: Database, day: date, settings: Settings, facts: RunInfo, names: Iterable[str] = REPORT_QUERIES
) -> ReportData:
    """Load these tables, which the database has."""
    found = {name: _load_rows(database, name, day) for name in names}
    cut = frozenset(name for name, rows in found.items() if len(rows) > REPORT_QUERIES[name].max_rows)
    return ReportData(
        day, settings, facts, {name: rows[: REPORT_QUERIES[name].max_rows] for name, rows in found.items()}, cut
    )


def _load_rows(database: Database, name: str, day: date) -> list[Row]:
    """Load at most one row more than the limit."""
    query = REPORT_QUERIES[name]
    first = Span(day, day).widen(before=query.days_before).first
    rows = (
        f"WITH rows AS (SELECT * FROM {name} WHERE dt BETWEEN {quote_day(first)} AND {quote_day(day)}) {query.query}"
    )
    columns = database.describe(rows)
    keys = [key for key in TABLES[name].key if key in columns and key not in query.order]
    order = [f'"{key[1:]}" ASC' if key.startswith("-") else f'"{key}" DESC NULLS LAST' for key in query.order]
    ordered = ", ".join([*order, *(f'"{key}" ASC' for key in keys)])
    return database.rows(f"SELECT * FROM ({rows}) ORDER BY {ordered} LIMIT {query.max_rows + 1}")
