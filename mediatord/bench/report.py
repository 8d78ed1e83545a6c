"""Benchmark reports: text tables, JSON, and SVG charts without scripts or fonts."""

from __future__ import annotations

import os
import platform
import re
import sqlite3
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from math import ceil, floor, log10
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from mediatord.bench.scenario import BenchmarkPlan, PerformanceTarget, ResultTable

_PACKAGES = (
    "mediatord", "Twisted", "autobahn", "cryptography", "PyNaCl", "jwcrypto", "orjson", "pybase64",
    "prometheus-client",
)  # fmt: skip


def describe_environment() -> dict[str, Any]:
    """The machine and the versions that the figures depend on."""
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "load": [round(load, 2) for load in os.getloadavg()],
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "sqlite": sqlite3.sqlite_version,
        "packages": {name: _package_version(name) for name in _PACKAGES},
        "command": " ".join(["mediatord", *sys.argv[1:]]),
    }


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def _package_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def build_json_report(plan: BenchmarkPlan, tables: Iterable[ResultTable], around: dict[str, Any]) -> dict[str, Any]:
    """
    Everything that is printed, for programs.

    :param around: the result of :func:`describe_environment`.
    """
    return {
        "surroundings": around,
        "plan": {name: value for name, value in asdict(plan).items() if name != "mongodb"},
        "scenarios": [
            {**asdict(table), "targets": [{**asdict(target), "met": target.met} for target in table.targets]}
            for table in tables
        ],
    }


def format_heading(plan: BenchmarkPlan, around: dict[str, Any]) -> str:
    """Machine, versions and parameters of the run."""
    versions = ", ".join(f"{name} {found}" for name, found in around["packages"].items() if found)
    return (
        f"{around['cpu']}, {around['cores']} cores, load {around['load'][0]}, {around['system']}\n"
        f"Python {around['python']}, SQLite {around['sqlite']}, {versions}\n"
        f"{plan.rounds} interleaved rounds of {plan.seconds:g} s, medians"
    )


def format_table(table: ResultTable) -> str:
    """The results of one scenario as text."""
    head = ["", *table.columns]
    lines = [
        [name, *(_format_number(row.get(column)) for column in table.columns)] for name, row in table.rows.items()
    ]
    widths = [max(len(line[place]) for line in [head, *lines]) for place in range(len(head))]
    text = [table.title]
    for name, *cells in [head, *lines]:
        padded = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
        text.append("  ".join(["", name.ljust(widths[0]), *padded]).rstrip())
    text += [f"  {note}" for note in table.notes]
    text += [f"  target: {_format_target(target)}" for target in table.targets]
    text += [f"  FAILED: {failure}" for failure in table.failures]
    return "\n".join(text)


def _format_number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.2f}"


def _format_target(target: PerformanceTarget) -> str:
    verdict = "met" if target.met else "missed"
    bound = "at most" if target.most else "at least"
    return f"{target.name} {bound} {target.goal:g}: {target.measured:.2f}, {verdict}"


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

    @property
    def height(self) -> int:
        """Pixels."""
        return _HEIGHT

    def draw(self) -> str:
        """The chart's SVG elements."""
        points = [point for curve in self.curves.values() for point in curve if point[1] > 0]
        if not points:
            return ""
        widest = max(x for x, _ in points) or 1.0
        low = floor(log10(min(y for _, y in points)))
        high = max(ceil(log10(max(y for _, y in points))), low + 1)
        bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT

        def place(x: float, y: float) -> tuple[float, float]:
            up = (bottom - _TOP) * (log10(y) - low) / (high - low)
            return _LEFT + (right - _LEFT) * x / widest, bottom - up

        parts = [_draw_text(_LEFT, 20, self.title, bold=True)]
        for power in range(low, high + 1):
            y = place(0, 10.0**power)[1]
            parts.append(f'<line x1="{_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
            parts.append(_draw_text(_LEFT - 6, y + 4, f"{10.0**power:g}", anchor="end"))
        for step in range(5):
            x = widest * step / 4
            parts.append(_draw_text(place(x, 10.0**low)[0], bottom + 18, f"{x:,.0f}", anchor="middle"))
        parts.append(f'<path d="M{_LEFT} {_TOP}V{bottom}H{right}" fill="none" stroke="#333"/>')
        parts.append(_draw_text((_LEFT + right) / 2, bottom + 38, self.x_name, anchor="middle"))
        parts.append(_draw_text(_LEFT - 6, _TOP - 6, self.y_name, anchor="end"))
        for number, (name, curve) in enumerate(self.curves.items()):
            places = [place(x, y) for x, y in curve if y > 0]
            if not places:
                continue
            colour = _COLOURS[number % len(_COLOURS)]
            line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
            parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in places]
            parts.append(_draw_text(right + 12, _TOP + 12 + 18 * number, name, colour=colour))
        return "\n".join(parts)


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

    def draw(self) -> str:
        """The chart's SVG elements."""
        widest = max((*self.values.values(), self.goal or 0.0), default=0.0) or 1.0
        scale = (_WIDTH - _LABEL_WIDTH - 80) / widest
        parts = [_draw_text(_LEFT, 20, f"{self.title} ({self.unit})", bold=True)]
        for number, (name, value) in enumerate(self.values.items()):
            y, width = _TOP + number * (_BAR_HEIGHT + _BAR_GAP), value * scale
            colour = _COLOURS[number % len(_COLOURS)]
            size = f'width="{width:.1f}" height="{_BAR_HEIGHT}"'
            parts.append(_draw_text(_LABEL_WIDTH - 8, y + 13, name, anchor="end"))
            parts.append(f'<rect x="{_LABEL_WIDTH}" y="{y}" {size} fill="{colour}"/>')
            parts.append(_draw_text(_LABEL_WIDTH + width + 6, y + 13, f"{value:.3g}"))
        if self.goal is not None:
            x, foot = _LABEL_WIDTH + self.goal * scale, self.height - 20
            parts.append(f'<path d="M{x:.1f} {_TOP - 6}V{foot}" stroke="#c00" stroke-dasharray="4 3"/>')
            parts.append(_draw_text(x, foot + 12, f"goal {self.goal:g}", anchor="middle", colour="#c00"))
        return "\n".join(parts)


def render_svg(charts: Sequence[LineChart | BarChart]) -> str:
    """An SVG document with all charts, one below the other."""
    parts, y = [], 0
    for chart in charts:
        parts.append(f'<g transform="translate(0 {y})">\n{chart.draw()}\n</g>')
        y += chart.height + 20
    size = f'width="{_WIDTH}" height="{y}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {_WIDTH} {y}"'
    style = 'style="font-family:sans-serif;font-size:12px"'
    return f'{head} {style}>\n<rect {size} fill="#fff"/>\n' + "\n".join(parts) + "\n</svg>\n"


def _draw_text(
    x: float, y: float, text: str, *, anchor: str = "start", colour: str = "#222", bold: bool = False
) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}"{weight}>{escape(text)}</text>'


# A row of a table of latencies by load.
_LOAD_ROW = re.compile(r"^(.+)  at (\d+)%$")
_RATE_COLUMNS = ("offered/s", "msg/s")
_PERCENTILE_COLUMNS = ("p50", "p99", "p99.9", "p50 ms", "p99 ms", "p99.9 ms", "push p50", "push p99", "push p99.9")
_BASELINE_COLUMN = "of g"


def select_charts(tables: Iterable[ResultTable]) -> Iterator[LineChart | BarChart]:
    """Charts of latency by load, and of throughput relative to the key agreement baseline."""
    for table in tables:
        rows = [row for name, row in table.rows.items() if _LOAD_ROW.match(name)]
        x = next((column for column in _RATE_COLUMNS if column in table.columns), None)
        names = [column for column in table.columns if column in _PERCENTILE_COLUMNS]
        if rows and x is not None and names:
            curves = {name: sorted((row[x], row[name]) for row in rows) for name in names}
            yield LineChart(table.title, "forwards per second", "ms", curves)
        if _BASELINE_COLUMN in table.columns:
            shares = {name: row.get(_BASELINE_COLUMN, 1.0) for name, row in table.rows.items()}
            values = {name: share for name, share in shares.items() if share != 1.0}
            goal = next((target.goal for target in table.targets if target.name.endswith(_BASELINE_COLUMN)), None)
            yield BarChart(table.title, "messages per CPU-second, in units of g", values, goal)
