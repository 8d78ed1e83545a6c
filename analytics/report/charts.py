"""The kinds of charts that the report has. Numbers on the axes have units; a chart without data is none."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from typing import TYPE_CHECKING

from analytics.report import numbers
from analytics.report.parts import Chart, Column, Grid, Row
from analytics.report.svg import BAD, FIRST, LINE, SECOND, THIRD, drawing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Told = Callable[[float], str]
_DURATIONS = (1, 10, 100, 1000, 10_000, 60_000, 600_000, 3_600_000, 36_000_000, 86_400_000)
COLOURS = (FIRST, SECOND, THIRD)


@dataclass(frozen=True, slots=True)
class Line:
    """:param values: hour, minute or day number to value; what is missing is a gap."""

    label: str
    values: Mapping[float, float]
    colour: str = FIRST
    faint: bool = False
    filled: bool = False


def _hour(value: float) -> str:
    return f"{int(value):02}:{round(value % 1 * 60):02}"


def by_hour(name: str, title: str, description: str, lines: Sequence[Line], told: Told, log: bool = False) -> Chart:
    """
    Lines over a day.

    :param lines: by hours, 0 to 24, or parts of them.
    :param log: a logarithmic scale, for what differs by orders of magnitude.
    """
    with drawing(name, title, description) as drawn:
        axes = drawn.axes
        for line in lines:
            _draw(axes, line, sorted(line.values))
        axes.set_xlim(0, max(23, *(max(line.values, default=0) for line in lines)))
        axes.set_xticks(range(0, 24, 4), [f"{hour:02}:00" for hour in range(0, 24, 4)])
        _scale(axes, told, log)
    return Chart(title, description, drawn.svg, _grid(title, "Hour (UTC)", lines, _hour, told))


def by_day(
    name: str,
    title: str,
    description: str,
    lines: Sequence[Line],
    told: Told,
    first: date,
    today: float | None = None,
) -> Chart:
    """
    Lines over days.

    :param lines: by days after `first`.
    :param today: a mark between what was and what is to come.
    """

    def day(value: float) -> str:
        return str(first + timedelta(value))

    with drawing(name, title, description) as drawn:
        axes = drawn.axes
        for line in lines:
            _draw(axes, line, sorted(line.values))
        if today is not None:
            axes.axvline(today, color=LINE, linewidth=1.2)
        _days(axes, lines, first)
        _scale(axes, told)
    return Chart(title, description, drawn.svg, _grid(title, "Day (UTC)", lines, day, told))


def band(axes: Axes, low: Mapping[float, float], high: Mapping[float, float], colour: str) -> None:
    """What lies between two lines."""
    xs = sorted(low)
    axes.fill_between(xs, [low[x] for x in xs], [high[x] for x in xs], color=colour, alpha=0.2, linewidth=0)


def forecast(
    name: str, title: str, description: str, past: Mapping[date, float], rows: Sequence[Row], told: Told
) -> Chart:
    """
    What was, and what is expected with its interval.

    :param rows: of the table forecast, one metric.
    """
    first = min(past)

    def by(column: str) -> dict[float, float]:
        return {(row["day"] - first).days: row[column] for row in rows}

    was = Line("was", {(day - first).days: value for day, value in past.items()})
    lines = [was, Line("expected", by("value"), SECOND)]
    ends = [*lines, Line("low", by("low")), Line("high", by("high"))]

    def day(value: float) -> str:
        return str(first + timedelta(value))

    with drawing(name, title, description) as drawn:
        axes = drawn.axes
        band(axes, by("low"), by("high"), SECOND)
        for line in lines:
            _draw(axes, line, sorted(line.values))
        _days(axes, ends, first)
        _scale(axes, told)
    return Chart(title, description, drawn.svg, _grid(title, "Day (UTC)", ends, day, told))


def cumulative(name: str, title: str, description: str, lines: Sequence[Line]) -> Chart:
    """Shares up to a duration. :param lines: milliseconds to share, 0 to 1."""
    with drawing(name, title, description) as drawn:
        axes = drawn.axes
        for line in lines:
            xs = sorted(line.values)
            axes.plot(xs, [line.values[x] for x in xs], color=line.colour, label=line.label, drawstyle="steps-post")
        axes.set_xscale("log")
        axes.set_ylim(0, 1.02)
        axes.yaxis.set_major_formatter(lambda value, _: numbers.share(value))
        axes.set_yticks([0, 0.25, 0.5, 0.75, 1])
        _durations(axes, [x for line in lines for x in line.values])
    shares = (0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)
    rows = [{"share": share, **{line.label: _reached(line.values, share) for line in lines}} for share in shares]
    columns = [Column("share", "Share", numbers.share), *(Column(x.label, x.label, numbers.duration) for x in lines)]
    return Chart(title, description, drawn.svg, Grid(title, columns, rows))


def _reached(values: Mapping[float, float], share: float) -> float | None:
    return next((x for x in sorted(values) if values[x] >= share - 1e-9), None)


def _durations(axes: Axes, values: Sequence[float]) -> None:
    marks = _marks(min(values), max(values))
    axes.set_xticks(marks, [numbers.duration(mark) for mark in marks])
    axes.set_xticks([], minor=True)


def _marks(low: float, high: float) -> Sequence[float]:
    """Durations that have short names; no more than five, for a phone has no room for more."""
    inside = [mark for mark in _DURATIONS if low <= mark <= high]
    return inside[:: -(-len(inside) // 5)] if inside else []


def _draw(axes: Axes, line: Line, xs: Sequence[float]) -> None:
    """Without a line across what is missing."""
    step = min((b - a for a, b in zip(xs, xs[1:], strict=False)), default=1)
    known: list[float] = []
    values: list[float] = []
    for x in xs:
        if known and x - known[-1] > step * 1.5:
            known.append(x)
            values.append(float("nan"))
        known.append(x)
        values.append(line.values[x])
    marker = "o" if len(xs) == 1 else None
    style = "--" if line.faint else "-"
    axes.plot(
        known,
        values,
        color=line.colour,
        label=line.label,
        linestyle=style,
        marker=marker,
        alpha=0.75 if line.faint else 1,
    )
    if line.filled:
        axes.fill_between(known, values, color=line.colour, alpha=0.15, linewidth=0)


def _days(axes: Axes, lines: Sequence[Line], first: date) -> None:
    last = int(max(x for line in lines for x in line.values))
    step = max(1, -(-(last + 1) // 5))
    marks = range(last % step, last + 1, step)
    axes.set_xlim(0, max(last, 1))
    axes.set_xticks(marks, [f"{first + timedelta(mark):%-d %b}" for mark in marks])


def _scale(axes: Axes, told: Told, log: bool = False) -> None:
    from matplotlib.ticker import MaxNLocator, NullLocator

    if log:
        axes.set_yscale("log")
        axes.margins(y=0.15)
        axes.set_yticks(_marks(*axes.get_ylim()))
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        axes.set_ylim(bottom=0, top=None if axes.get_ylim()[1] > 0.1 else 1)
        top = axes.get_ylim()[1]
        # Round numbers of KiB, MiB, ...
        unit = 1024 ** int(math.log(top, 1024)) if told is numbers.size and top > 1 else 1
        axes.set_yticks([unit * mark for mark in MaxNLocator(5, integer=top > 4 * unit).tick_values(0, top / unit)])
        axes.set_ylim(0, top)
    axis = numbers.short if told is numbers.count else told
    axes.yaxis.set_major_formatter(lambda value, _: axis(value))


def _grid(title: str, head: str, lines: Sequence[Line], at: Callable[[float], str], told: Told) -> Grid:
    xs = sorted({x for line in lines for x in line.values})
    rows = [{"at": at(x), **{line.label: line.values.get(x) for line in lines}} for x in xs]

    def known(value: float | None) -> str:
        return numbers.NOTHING if value is None else told(value)

    columns = [
        Column("at", head, numbers.text, number=False),
        *(Column(line.label, line.label, known) for line in lines),
    ]
    return Grid(title, columns, rows)


__all__ = ["BAD", "FIRST", "SECOND", "THIRD", "Line", "by_day", "by_hour", "cumulative", "forecast"]
