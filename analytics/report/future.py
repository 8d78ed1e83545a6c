"""What is unlike other days, and what is to come."""

from __future__ import annotations

from analytics.jobs.forecast import FEWEST_DAYS
from analytics.metrics import METRICS
from analytics.report import charts, numbers
from analytics.report.numbers import count, share
from analytics.report.parts import Chart, Column, Figure, Grid, Row, Section
from analytics.report.reading import Day


def anomalies(known: Day) -> Section:
    """Hours unlike the same hours of the weeks before, as sentences."""
    settings = known.settings
    rows = sorted(known.today("anomalies"), key=lambda row: (-abs(row["z"]), row["hour"], row["metric"]))
    columns = [
        Column("hour", "Hour (UTC)", lambda hour: f"{hour:02}:00", number=False),
        Column("reason", "Finding", str, number=False),
    ]
    note = "" if rows else "No hour of the day stands out."
    if len(rows) > settings.top:
        note = f"{len(rows) - settings.top:,} more in anomalies.csv."
    hours = len({row["hour"] for row in rows})
    figures = [
        Figure(
            "anomalies",
            "Anomalies",
            len(rows),
            count(len(rows)),
            "Figures of an hour that were far from usual.",
            "warn" if rows else "good",
        ),
        Figure("hours", "Hours with any", hours, count(hours), "Of the 24 hours of the day."),
    ]
    return Section(
        "anomalies",
        "Anomalies",
        f"Hours more than {count(settings.anomaly_z)} times the usual spread away from the same hour of the week in "
        f"the {settings.baseline_days} days before; from that hour of all days while there are fewer than "
        f"{settings.baseline_samples} such weeks.",
        figures,
        grids=[Grid("Hours unlike others", columns, rows[: settings.top], "anomalies", note)],
    )


def forecast(known: Day) -> Section:
    """Capacity of the days to come, and how wrong such forecasts are."""
    lead = (
        "What to expect if the last weeks go on: a trend plus the day of the week. The band holds four of five days "
        f"if it does. It takes {FEWEST_DAYS} days of history."
    )
    rows = known.today("forecast")
    names = [name for name in METRICS if any(row["metric"] == name for row in rows)]
    without = [name for name, metric in METRICS.items() if metric.capacity and name not in names]
    notes = []
    if without:
        missing = ", ".join(METRICS[name].title.lower() for name in without)
        notes.append(f"Too little history (fewer than {FEWEST_DAYS} days) for: {missing}.")
    ahead = [_ahead(known, name, [row for row in rows if row["metric"] == name]) for name in names]
    return Section(
        "forecast",
        f"Forecast, {known.settings.forecast_days} days",
        lead,
        [_figure(row) for row in ahead],
        [_chart(known, name) for name in names],
        [_table(ahead), _errors(known)] if names else [],
        notes,
    )


def _ahead(known: Day, name: str, rows: list[Row]) -> Row:
    """The highest day to come against the last week."""
    past = [value for day, value in known.past(name).items() if (known.day - day).days < 7]
    highest = max(rows, key=lambda row: (row["value"], row["day"]))
    return {**highest, "name": name, "now": max(past, default=None)}


def _figure(row: Row) -> Figure:
    shown = numbers.of(row["name"])
    return Figure(
        f"{row['name']}_highest_expected",
        METRICS[row["name"]].title,
        row["value"],
        shown(row["value"]),
        f"Highest day to come, {row['day']}; with the interval up to {shown(row['high'])}. "
        f"Highest of the last week: {shown(row['now'])}.",
    )


def _chart(known: Day, name: str) -> Chart:
    rows = sorted((row for row in known.today("forecast") if row["metric"] == name), key=lambda row: row["day"])
    title = METRICS[name].title
    last = rows[-1]
    shown = numbers.of(name)
    said = (
        f"{title} by day: what was, and from {known.day} on what is expected with its interval; "
        f"{shown(last['value'])} ({shown(last['low'])} to {shown(last['high'])}) on {last['day']}."
    )
    return charts.forecast(f"forecast-{name.replace('_', '-')}", title, said, known.past(name), rows, shown)


def _table(ahead: list[Row]) -> Grid:
    shown = [
        {
            "metric": METRICS[row["name"]].title,
            "day": row["day"],
            **{name: numbers.of(row["name"])(row[name]) for name in ("now", "value", "low", "high")},
        }
        for row in ahead
    ]
    columns = [
        Column("metric", "Figure of a day", numbers.text, number=False),
        Column("now", "Highest of last week", numbers.text),
        Column("value", "Highest to come", numbers.text),
        Column("low", "Interval from", numbers.text),
        Column("high", "to", numbers.text),
        Column("day", "On", numbers.text, number=False),
    ]
    return Grid("Highest days to come", columns, shown, "forecast")


def _errors(known: Day) -> Grid:
    rows = [
        row | {"metric": METRICS[row["metric"]].title}
        for row in sorted(known.today("forecast_error"), key=lambda row: row["metric"])
    ]
    columns = [
        Column("metric", "Figure of a day", numbers.text, number=False),
        Column("mape", "Error", share),
        Column("naive_mape", "Error of repeating the week before", share),
        Column("inside", "Days inside the interval", share),
        Column("held_back", "Days held back", count),
        Column("trained_on", "Made from (days)", count),
    ]
    note = "A forecast without the last days, compared with them: mean error by mean value."
    if not rows:
        note = f"No error yet: it takes {FEWEST_DAYS + known.settings.held_back_days} days of history."
    return Grid("How wrong it would have been", columns, rows, "forecast_error", note)
