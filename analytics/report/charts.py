"""
Charts of the report: SVG embedded in the page, and PNG for the mail.

In the page, colours and fonts are the page's own, so charts fit light and dark mode. The same data give the same
bytes, and nothing from the logs is drawn as text.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date, timedelta
from typing import TYPE_CHECKING, Any

from markupsafe import escape

from analytics.report.content import (
    NO_VALUE,
    Chart,
    ReportColumn,
    ReportTable,
    Row,
    format_axis_count,
    format_count,
    format_duration,
    format_share,
    format_size,
    format_text,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Colours of the page in light mode; in the page each is replaced by its CSS variable.
INK_COLOUR = "#55606b"
GRID_COLOUR = "#dcdfe3"
FIRST_COLOUR = "#1f7491"
SECOND_COLOUR = "#b9581b"
THIRD_COLOUR = "#6a5aa8"
BAD_COLOUR = "#ad231c"
_CSS_VARIABLES = {
    INK_COLOUR: "ink-soft",
    GRID_COLOUR: "line",
    FIRST_COLOUR: "first",
    SECOND_COLOUR: "second",
    THIRD_COLOUR: "third",
    BAD_COLOUR: "bad",
}

# CSS pixels at 72 dpi.
_CHART_WIDTH, _CHART_HEIGHT = 400, 230
# Left, bottom, width and height, with room for five tick labels on both axes and a legend on top.
_AXES_AREA = (0.155, 0.125, 0.79, 0.755)
_AXES_AREA_WITHOUT_LEGEND = (0.155, 0.125, 0.79, 0.835)
_MATPLOTLIB_STYLE: dict[Any, Any] = {
    "axes.axisbelow": True,
    "axes.edgecolor": GRID_COLOUR,
    "axes.grid": True,
    "axes.labelcolor": INK_COLOUR,
    "axes.labelsize": 12,
    "axes.prop_cycle": f"cycler('color', ['{FIRST_COLOUR}', '{SECOND_COLOUR}', '{THIRD_COLOUR}'])",
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.unicode_minus": False,
    "font.size": 12,
    "grid.color": GRID_COLOUR,
    "grid.linewidth": 0.8,
    "legend.fontsize": 12,
    "legend.frameon": False,
    "legend.labelcolor": INK_COLOUR,
    "lines.linewidth": 2,
    "lines.solid_capstyle": "round",
    "svg.fonttype": "none",
    "svg.hashsalt": "mediatord",
    "text.color": INK_COLOUR,
    "text.parse_math": False,
    "xtick.color": INK_COLOUR,
    "xtick.labelsize": 12,
    "xtick.major.pad": 6,
    "xtick.major.size": 0,
    "xtick.minor.size": 0,
    "ytick.color": INK_COLOUR,
    "ytick.labelsize": 12,
    "ytick.major.size": 0,
    "ytick.minor.size": 0,
}


class Drawing:
    """:ivar svg: the finished chart, after the `with` block."""

    def __init__(self, figure: Figure, axes: Axes) -> None:
        self.figure = figure
        self.axes = axes
        self.svg = ""

    def make_chart(self, title: str, description: str, table: ReportTable) -> Chart:
        """The finished chart."""
        return Chart(title, description, self.svg, table, self._render_png)

    def _render_png(self) -> bytes:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg

        buffer = io.BytesIO()
        with matplotlib.rc_context(_MATPLOTLIB_STYLE):
            self.figure.patch.set(visible=True, facecolor="white")
            self.figure.set_dpi(2 * 72)
            FigureCanvasAgg(self.figure).print_png(buffer, metadata={"Software": None})
        return buffer.getvalue()


@contextmanager
def draw_svg(name: str, title: str, description: str) -> Iterator[Drawing]:
    """
    Draw a chart on `axes` within the block.

    :param name: unique in the page.
    """
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_MATPLOTLIB_STYLE):
        figure = Figure(figsize=(_CHART_WIDTH / 72, _CHART_HEIGHT / 72))
        figure.patch.set_visible(False)
        axes = figure.add_axes(_AXES_AREA)
        axes.patch.set_visible(False)
        axes.grid(axis="x", visible=False)
        drawing = Drawing(figure, axes)
        yield drawing
        _add_legend(axes)
        buffer = io.StringIO()
        FigureCanvasSVG(figure).print_svg(buffer, metadata={"Date": None, "Creator": None})
    drawing.svg = _embed_svg(buffer.getvalue(), name, title, description)


def _add_legend(axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    if len(labels) < 2:
        axes.set_position(_AXES_AREA_WITHOUT_LEGEND)
    else:
        axes.legend(
            loc="lower left", bbox_to_anchor=(0, 1), ncols=3, borderaxespad=0, handlelength=1.2, columnspacing=1.2
        )


def _embed_svg(svg: str, name: str, title: str, description: str) -> str:
    """Prepare for embedding: accessible title and description, unique ids, no declarations."""
    body = svg[svg.index("<g ") : svg.rindex("</svg>")]
    body = re.sub(r"<metadata>.*?</metadata>|<style[^>]*>.*?</style>|<!--.*?-->", "", body, flags=re.DOTALL)
    body = re.sub(r"font-family: [^;]*; ", "", body)
    body = re.sub(r"\bfont: ([\d.]+)px [^;\"]*", r"font-size: \1px", body)
    body = re.sub(r'(\bid="|url\(#|href="#)', rf"\1{name}-", body).replace("xlink:href", "href")
    body = re.sub(r">\s+<", "><", body).strip()
    body = re.sub("|".join(_CSS_VARIABLES), lambda found: f"var(--{_CSS_VARIABLES[found[0]]}, {found[0]})", body)
    return (
        f'<svg viewBox="0 0 {_CHART_WIDTH} {_CHART_HEIGHT}" width="{_CHART_WIDTH}" height="{_CHART_HEIGHT}" '
        f'role="img" aria-labelledby="{name}-title {name}-desc">'
        f'<title id="{name}-title">{escape(title)}</title><desc id="{name}-desc">{escape(description)}</desc>'
        f"{body}</svg>"
    )


Formatter = Callable[[float], str]
_DURATION_TICKS = (1, 10, 100, 1000, 10_000, 60_000, 600_000, 3_600_000, 36_000_000, 86_400_000)


@dataclass(frozen=True, slots=True)
class ChartLine:
    """:param values: hour, minute or day number to value; missing ones are gaps."""

    label: str
    values: Mapping[float, float]
    colour: str = FIRST_COLOUR
    faint: bool = False
    filled: bool = False


def _format_hour(value: float) -> str:
    return f"{int(value):02}:{round(value % 1 * 60):02}"


def make_hourly_chart(
    name: str, title: str, description: str, lines: Sequence[ChartLine], format: Formatter, log: bool = False
) -> Chart:
    """
    Lines over a day.

    :param lines: by hour, 0 to 24, or fractions.
    :param log: logarithmic scale.
    """
    with draw_svg(name, title, description) as drawing:
        axes = drawing.axes
        for line in lines:
            _draw_line(axes, line, sorted(line.values))
        axes.set_xlim(0, max(23, *(max(line.values, default=0) for line in lines)))
        axes.set_xticks(range(0, 24, 4), [f"{hour:02}:00" for hour in range(0, 24, 4)])
        _set_value_scale(axes, format, log)
    return drawing.make_chart(title, description, _make_chart_table(title, "Hour (UTC)", lines, _format_hour, format))


def make_daily_chart(
    name: str,
    title: str,
    description: str,
    lines: Sequence[ChartLine],
    format: Formatter,
    first: date,
    today_x: float | None = None,
) -> Chart:
    """
    Lines over days.

    :param lines: by days after `first`.
    :param today_x: vertical mark between past and future.
    """

    def day(value: float) -> str:
        return str(first + timedelta(value))

    with draw_svg(name, title, description) as drawing:
        axes = drawing.axes
        for line in lines:
            _draw_line(axes, line, sorted(line.values))
        if today_x is not None:
            axes.axvline(today_x, color=GRID_COLOUR, linewidth=1.2)
        _set_day_ticks(axes, lines, first)
        _set_value_scale(axes, format)
    return drawing.make_chart(title, description, _make_chart_table(title, "Day (UTC)", lines, day, format))


def _fill_band(axes: Axes, low: Mapping[float, float], high: Mapping[float, float], colour: str) -> None:
    """Fill the area between two lines."""
    xs = sorted(low)
    axes.fill_between(xs, [low[x] for x in xs], [high[x] for x in xs], color=colour, alpha=0.2, linewidth=0)


def make_forecast_chart(
    name: str, title: str, description: str, past: Mapping[date, float], rows: Sequence[Row], format: Formatter
) -> Chart:
    """
    Past values, and the forecast with its interval.

    :param rows: of the table forecast, one metric.
    """
    first = min(past)

    def by(column: str) -> dict[float, float]:
        return {(row["day"] - first).days: row[column] for row in rows}

    past_line = ChartLine("past", {(day - first).days: value for day, value in past.items()})
    lines = [past_line, ChartLine("forecast", by("value"), SECOND_COLOUR)]
    ends = [*lines, ChartLine("low", by("low")), ChartLine("high", by("high"))]

    def day(value: float) -> str:
        return str(first + timedelta(value))

    with draw_svg(name, title, description) as drawing:
        axes = drawing.axes
        _fill_band(axes, by("low"), by("high"), SECOND_COLOUR)
        for line in lines:
            _draw_line(axes, line, sorted(line.values))
        _set_day_ticks(axes, ends, first)
        _set_value_scale(axes, format)
    return drawing.make_chart(title, description, _make_chart_table(title, "Day (UTC)", ends, day, format))


def make_cumulative_chart(name: str, title: str, description: str, lines: Sequence[ChartLine]) -> Chart:
    """Cumulative distribution of durations. :param lines: milliseconds to share, 0 to 1."""
    with draw_svg(name, title, description) as drawing:
        axes = drawing.axes
        for line in lines:
            xs = sorted(line.values)
            axes.plot(xs, [line.values[x] for x in xs], color=line.colour, label=line.label, drawstyle="steps-post")
        axes.set_xscale("log")
        axes.set_ylim(0, 1.02)
        axes.yaxis.set_major_formatter(lambda value, _: format_share(value))
        axes.set_yticks([0, 0.25, 0.5, 0.75, 1])
        _set_duration_ticks(axes, [x for line in lines for x in line.values])
    shares = (0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)
    rows = [
        {"share": share, **{line.label: _find_percentile(line.values, share) for line in lines}} for share in shares
    ]
    columns = [
        ReportColumn("share", "Share", format_share),
        *(ReportColumn(x.label, x.label, format_duration) for x in lines),
    ]
    return drawing.make_chart(title, description, ReportTable(title, columns, rows))


def _find_percentile(values: Mapping[float, float], share: float) -> float | None:
    return next((x for x in sorted(values) if values[x] >= share - 1e-9), None)


def _set_duration_ticks(axes: Axes, values: Sequence[float]) -> None:
    marks = _choose_duration_ticks(min(values), max(values))
    axes.set_xticks(marks, [format_duration(mark) for mark in marks])
    axes.set_xticks([], minor=True)


def _choose_duration_ticks(low: float, high: float) -> Sequence[float]:
    """At most five durations with short names, which fit on a phone."""
    inside = [mark for mark in _DURATION_TICKS if low <= mark <= high]
    return inside[:: -(-len(inside) // 5)] if inside else []


def _draw_line(axes: Axes, line: ChartLine, xs: Sequence[float]) -> None:
    """Leave gaps for missing values."""
    step = min((b - a for a, b in zip(xs, xs[1:], strict=False)), default=1)
    data: list[float] = []
    values: list[float] = []
    for x in xs:
        if data and x - data[-1] > step * 1.5:
            data.append(x)
            values.append(float("nan"))
        data.append(x)
        values.append(line.values[x])
    marker = "o" if len(xs) == 1 else None
    style = "--" if line.faint else "-"
    axes.plot(
        data,
        values,
        color=line.colour,
        label=line.label,
        linestyle=style,
        marker=marker,
        alpha=0.75 if line.faint else 1,
    )
    if line.filled:
        axes.fill_between(data, values, color=line.colour, alpha=0.15, linewidth=0)


def _set_day_ticks(axes: Axes, lines: Sequence[ChartLine], first: date) -> None:
    last = int(max(x for line in lines for x in line.values))
    step = max(1, -(-(last + 1) // 5))
    marks = range(last % step, last + 1, step)
    axes.set_xlim(0, max(last, 1))
    axes.set_xticks(marks, [f"{first + timedelta(mark):%-d %b}" for mark in marks])


def _set_value_scale(axes: Axes, format: Formatter, log: bool = False) -> None:
    from matplotlib.ticker import MaxNLocator, NullLocator

    if log:
        axes.set_yscale("log")
        axes.margins(y=0.15)
        axes.set_yticks(_choose_duration_ticks(*axes.get_ylim()))
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        axes.set_ylim(bottom=0, top=None if axes.get_ylim()[1] > 0.1 else 1)
        top = axes.get_ylim()[1]
        # Round numbers of KiB, MiB, ...
        unit = 1024 ** int(math.log(top, 1024)) if format is format_size and top > 1 else 1
        axes.set_yticks([unit * mark for mark in MaxNLocator(5, integer=top > 4 * unit).tick_values(0, top / unit)])
        axes.set_ylim(0, top)
    axis = format_axis_count if format is format_count else format
    axes.yaxis.set_major_formatter(lambda value, _: axis(value))


def _make_chart_table(
    title: str, head: str, lines: Sequence[ChartLine], at: Callable[[float], str], format: Formatter
) -> ReportTable:
    xs = sorted({x for line in lines for x in line.values})
    rows = [{"at": at(x), **{line.label: line.values.get(x) for line in lines}} for x in xs]

    def data(value: float | None) -> str:
        return NO_VALUE if value is None else format(value)

    columns = [
        ReportColumn("at", head, format_text, number=False),
        *(ReportColumn(line.label, line.label, data) for line in lines),
    ]
    return ReportTable(title, columns, rows)
