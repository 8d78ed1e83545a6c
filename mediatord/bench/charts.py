"""SVG charts of benchmark results, without scripts or fonts: latency by load, throughput beside the baseline."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor, log10
from xml.sax.saxutils import escape

from mediatord.bench.results import ResultTable

_WIDTH, _HEIGHT = 720, 360
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 150, 40, 50
_COLOURS = ("#1b6ca8", "#c8553d", "#588157", "#7b2d8b", "#b08900", "#555555")
_BAR_HEIGHT, _BAR_GAP, _LABEL_WIDTH = 18, 8, 250


@dataclass(frozen=True, slots=True)
class LineChart:
    """
    Curves over a common axis, with a logarithmic scale of values.

    :param curves: points (x, y) by name.
    """

    title: str
    x_name: str
    y_name: str
    curves: Mapping[str, Sequence[tuple[float, float]]]

    height = _HEIGHT

    def draw(self) -> Iterator[str]:
        """The chart's SVG elements."""
        points = [point for curve in self.curves.values() for point in curve if point[1] > 0]
        widest = max((x for x, _ in points), default=0.0) or 1.0
        low = floor(log10(min((y for _, y in points), default=1.0)))
        high = max(ceil(log10(max((y for _, y in points), default=1.0))), low + 1)
        bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT

        def place(x: float, y: float) -> tuple[float, float]:
            up = (bottom - _TOP) * (log10(y) - low) / (high - low)
            return _LEFT + (right - _LEFT) * x / widest, bottom - up

        yield _draw_text(_LEFT, 20, self.title, bold=True)
        for power in range(low, high + 1):
            y = place(0, 10.0**power)[1]
            yield f'<line x1="{_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>'
            yield _draw_text(_LEFT - 6, y + 4, f"{10.0**power:g}", anchor="end")
        for x in (widest * step / 4 for step in range(5)):
            yield _draw_text(place(x, 10.0**low)[0], bottom + 18, f"{x:,.0f}", anchor="middle")
        yield f'<path d="M{_LEFT} {_TOP}V{bottom}H{right}" fill="none" stroke="#333"/>'
        yield _draw_text((_LEFT + right) / 2, bottom + 38, self.x_name, anchor="middle")
        yield _draw_text(_LEFT - 6, _TOP - 6, self.y_name, anchor="end")
        for number, (name, curve) in enumerate(self.curves.items()):
            places = [place(x, y) for x, y in curve if y > 0]
            colour = _COLOURS[number % len(_COLOURS)]
            line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
            yield f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>'
            yield from (f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in places)
            yield _draw_text(right + 12, _TOP + 12 + 18 * number, name, colour=colour)


@dataclass(frozen=True, slots=True)
class BarChart:
    """
    Labelled bars.

    :param unit: of the values.
    :param goal: drawn as a line; None for no line.
    """

    title: str
    unit: str
    values: Mapping[str, float]
    goal: float | None = None

    @property
    def height(self) -> int:
        """Pixels."""
        return _TOP + len(self.values) * (_BAR_HEIGHT + _BAR_GAP) + 24

    def draw(self) -> Iterator[str]:
        """The chart's SVG elements."""
        widest = max((*self.values.values(), self.goal or 0.0), default=0.0) or 1.0
        scale = (_WIDTH - _LABEL_WIDTH - 80) / widest
        yield _draw_text(_LEFT, 20, f"{self.title} ({self.unit})", bold=True)
        for number, (name, value) in enumerate(self.values.items()):
            y, width = _TOP + number * (_BAR_HEIGHT + _BAR_GAP), value * scale
            size = f'width="{width:.1f}" height="{_BAR_HEIGHT}"'
            yield _draw_text(_LABEL_WIDTH - 8, y + 13, name, anchor="end")
            yield f'<rect x="{_LABEL_WIDTH}" y="{y}" {size} fill="{_COLOURS[number % len(_COLOURS)]}"/>'
            yield _draw_text(_LABEL_WIDTH + width + 6, y + 13, f"{value:.3g}")
        if self.goal is not None:
            x, foot = _LABEL_WIDTH + self.goal * scale, self.height - 20
            yield f'<path d="M{x:.1f} {_TOP - 6}V{foot}" stroke="#c00" stroke-dasharray="4 3"/>'
            yield _draw_text(x, foot + 12, f"goal {self.goal:g}", anchor="middle", colour="#c00")


def _draw_text(
    x: float, y: float, text: str, *, anchor: str = "start", colour: str = "#222", bold: bool = False
) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}"{weight}>{escape(text)}</text>'


def render_svg(charts: Iterable[LineChart | BarChart]) -> str:
    """An SVG document with all charts, one below the other."""
    parts, y = list[str](), 0
    for chart in charts:
        parts += [f'<g transform="translate(0 {y})">', *chart.draw(), "</g>"]
        y += chart.height + 20
    size = f'width="{_WIDTH}" height="{y}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {_WIDTH} {y}"'
    style = 'style="font-family:sans-serif;font-size:12px"'
    return "\n".join([f"{head} {style}>", f'<rect {size} fill="#fff"/>', *parts, "</svg>\n"])


# A row of a table of latencies by load.
_LOAD_ROW = re.compile(r"^(.+)  at (\d+)%$")
_RATE_COLUMNS = ("offered/s", "msg/s")
_PERCENTILE_COLUMN = re.compile(r"p(50|99|99\.9) ms|(push )?p(50|99|99\.9)")
_BASELINE_COLUMN = "of g"


def select_charts(tables: Iterable[ResultTable]) -> Iterator[LineChart | BarChart]:
    """Charts of latency by load, and of throughput relative to the key agreement baseline."""
    for table in tables:
        rows = [row for name, row in table.rows.items() if _LOAD_ROW.match(name)]
        x = next((column for column in _RATE_COLUMNS if column in table.columns), None)
        names = [column for column in table.columns if _PERCENTILE_COLUMN.fullmatch(column)]
        if rows and x is not None and names:
            curves = {name: sorted((row[x], row[name]) for row in rows) for name in names}
            yield LineChart(table.title, "forwards per second", "ms", curves)
        if _BASELINE_COLUMN in table.columns:
            shares = {name: row.get(_BASELINE_COLUMN, 1.0) for name, row in table.rows.items()}
            values = {name: share for name, share in shares.items() if share != 1.0}
            goal = next((target.goal for target in table.targets if target.name.endswith(_BASELINE_COLUMN)), None)
            yield BarChart(table.title, "messages per CPU-second, in units of g", values, goal)
