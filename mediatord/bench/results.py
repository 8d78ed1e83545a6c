"""
Interleaved rounds of contenders, the tables that scenarios return, and reports of them as text and JSON.

SVG charts of benchmark results, without scripts or fonts: latency by load, throughput beside the baseline.
"""

from __future__ import annotations

import os
import platform
import re
import sqlite3
import sys
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import wraps
from importlib.metadata import PackageNotFoundError, version
from math import ceil, floor, log10
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, TypeVar
from xml.sax.saxutils import escape

import click

from mediatord.bench.plan import BenchmarkPlan
from mediatord.runtime.progress_bar import is_terminal

# Names of figures that many scenarios report.
PER_SECOND = "msg/s"
PER_CPU_SECOND = "msg/CPU-s"
# CPU time of the load generator for each request.
CLIENT_US = "client us"
_PERCENTILES = {"p50": 0.5, "p99": 0.99, "p99.9": 0.999}
ALL_PERCENTILES = tuple(_PERCENTILES)
_PACKAGES = (
    "mediatord", "Twisted", "autobahn", "cryptography", "PyNaCl", "jwcrypto", "orjson", "pybase64",
    "prometheus-client",
)  # fmt: skip

_StepT = TypeVar("_StepT")

Figures = dict[str, float]
Contender = Callable[[], Figures]


@dataclass(slots=True)
class LoadResult:
    """
    What was sent and what came back.

    :param statuses: number of responses by HTTP status.
    :param seconds: from the first request to the last response; of the slowest process.
    :param latencies_us: from when a request was sent, or was due, to its response.
    :param late: requests sent late, because no connection was free or the generator was busy.
    :param client_seconds: CPU time of the generator.
    :param accepted: successful requests, or messages that they moved.
    :param cpu_seconds: CPU time of the servers.
    """

    statuses: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    latencies_us: array[int] = field(default_factory=lambda: array("I"))
    late: int = 0
    client_seconds: float = 0.0
    accepted: int = 0
    cpu_seconds: float = 0.0

    def rates(self) -> Figures:
        """Rates of what was accepted, and the CPU time of the generator for each."""
        return {
            PER_SECOND: safe_ratio(self.accepted, self.seconds),
            PER_CPU_SECOND: safe_ratio(self.accepted, self.cpu_seconds),
            CLIENT_US: 1e6 * safe_ratio(self.client_seconds, self.accepted),
        }

    def figures(self) -> Figures:
        """Rates and latencies; the CPU time of the generator is for each request, accepted or not."""
        client_us = 1e6 * safe_ratio(self.client_seconds, self.statuses.total())
        return {**self.rates(), **latency_figures(self.latencies_us, names=ALL_PERCENTILES), CLIENT_US: client_us}

    @property
    def late_percent(self) -> float:
        """Share of requests sent late."""
        return 100 * safe_ratio(self.late, len(self.latencies_us))


@dataclass(frozen=True, slots=True)
class PerformanceTarget:
    """
    A goal of the project and what this run measured.

    :param most: the goal is an upper bound instead of a lower one.
    """

    name: str
    goal: float
    measured: float
    most: bool = False

    @property
    def met(self) -> bool:
        """Whether this run reached the goal."""
        return self.measured <= self.goal if self.most else self.measured >= self.goal


@dataclass(frozen=True, slots=True)
class InterleavedResults:
    """
    The figures of all contenders in all rounds.

    :param found: figures of each round, by contender.
    """

    found: Mapping[str, Sequence[Figures]]

    def medians(self, name: str) -> Figures:
        """Median of each figure of a contender."""
        runs = self.found[name]
        return {figure: median(run[figure] for run in runs) for figure in runs[0]}

    def ratio(self, name: str, floor: str, figure: str) -> float:
        """
        Median of the ratios between a contender and the baseline `floor` within each round.

        Other load on the machine distorts absolute figures much more than ratios within a round.
        """
        pairs = zip(self.found[name], self.found[floor], strict=True)
        return median(safe_ratio(run[figure], beside[figure]) for run, beside in pairs)


def run_interleaved(contenders: Mapping[str, Contender], rounds: int) -> InterleavedResults:
    """Run every contender once per round, each round starting with another one."""
    names = list(contenders)
    found: dict[str, list[Figures]] = {name: [] for name in names}
    order = [names[(number + place) % len(names)] for number in range(rounds) for place in range(len(names))]
    with progress_bar(order, "rounds") as runs:
        for name in runs:
            found[name].append(contenders[name]())
    return InterleavedResults(found)


def progress_bar(steps: Iterable[_StepT], label: str) -> Any:
    """
    A progress bar on standard error over the steps of a measurement, if that is a terminal.

    It is drawn between the steps, without a thread: processes are forked during a measurement.
    """
    return click.progressbar(steps, label=label, file=sys.stderr, hidden=not is_terminal(sys.stderr))


@contextmanager
def time_bar(seconds: float) -> Iterator[Callable[[], None]]:
    """The same over a span of time; yields the function that moves the bar."""
    start = perf_counter()
    with progress_bar(range(max(1, ceil(seconds))), "seconds") as bar:
        yield lambda: bar.update(max(0, int(perf_counter() - start) - bar.pos))


@dataclass(slots=True)
class ResultTable:
    """
    The results of one scenario.

    :param columns: names of the figures, in the order of printing.
    :param rows: figures by row name; a row may lack figures.
    :param notes: sentences below the table.
    """

    title: str
    columns: Sequence[str]
    rows: dict[str, Figures] = field(default_factory=dict)
    targets: list[PerformanceTarget] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def compare(
        self,
        contenders: Mapping[str, Contender],
        rounds: int,
        prefix: str = "",
        ratios: Mapping[str, tuple[str, str]] | None = None,
    ) -> InterleavedResults:
        """
        Measure contenders in interleaved rounds, and add a row of medians for each.

        :param prefix: of the rows' names.
        :param ratios: baseline and figure that a column is the ratio of, by column.
        """
        results = run_interleaved(contenders, rounds)
        for name in contenders:
            row = self.rows[f"{prefix}{name}"] = results.medians(name)
            for column, (baseline, figure) in (ratios or {}).items():
                if figure in row:
                    row[column] = results.ratio(name, baseline, figure)
        return results

    def add_target(self, name: str, goal: float, measured: float, *, most: bool = False) -> None:
        """Add a goal and what was measured."""
        self.targets.append(PerformanceTarget(name, goal, measured, most))

    def as_json(self) -> dict[str, Any]:
        """The table for programs."""
        return asdict(self) | {"targets": [{**asdict(target), "met": target.met} for target in self.targets]}

    def __str__(self) -> str:
        lines = [["", *self.columns]]
        for name, row in self.rows.items():
            lines.append([name, *(_format_number(row.get(column)) for column in self.columns)])
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        text = [self.title]
        for name, *cells in lines:
            padded = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
            text.append("  ".join(["", name.ljust(widths[0]), *padded]).rstrip())
        text += [f"  {note}" for note in self.notes]
        for target in self.targets:
            verdict, bound = "met" if target.met else "missed", "at most" if target.most else "at least"
            text.append(f"  target: {target.name} {bound} {target.goal:g}: {target.measured:.2f}, {verdict}")
        text += [f"  FAILED: {failure}" for failure in self.failures]
        return "\n".join(text)


Measure = Callable[[BenchmarkPlan, ResultTable], None]


def scenario(title: str, columns: Sequence[str]) -> Callable[[Measure], Callable[[BenchmarkPlan], ResultTable]]:
    """
    Declare a scenario: a function that fills the table of its results.

    :param columns: as of :class:`ResultTable`.
    """

    def declare(measure: Measure) -> Callable[[BenchmarkPlan], ResultTable]:
        @wraps(measure)
        def run(plan: BenchmarkPlan) -> ResultTable:
            table = ResultTable(title, columns)
            measure(plan, table)
            return table

        return run

    return declare


def _format_number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.2f}"


def compute_percentile(values: Sequence[float], share: float) -> float:
    """The value that `share` of all values do not exceed; 0 without values."""
    ordered = sorted(values)
    return float(ordered[min(len(ordered) - 1, int(share * len(ordered)))]) if ordered else 0.0


def latency_figures(
    latencies_us: Sequence[float], pattern: str = "{} ms", names: Sequence[str] = ("p50", "p99")
) -> Figures:
    """
    Percentiles in milliseconds.

    :param latencies_us: microseconds.
    :param pattern: name of a figure, with `{}` for the percentile.
    """
    ordered = sorted(latencies_us)
    return {pattern.format(name): compute_percentile(ordered, _PERCENTILES[name]) / 1000 for name in names}


def safe_ratio(part: float, whole: float) -> float:
    """The quotient; 0 if the divisor is 0."""
    return part / whole if whole else 0.0


def format_size(size: int) -> str:
    """`1k` for 1024 bytes."""
    return f"{size // 1024}k" if size >= 1024 and size % 1024 == 0 else f"{size}b"


def describe_environment() -> dict[str, Any]:
    """The machine and the versions that the figures depend on."""
    return {
        "cpu": _read_cpu_name(),
        "cores": os.cpu_count(),
        "load": [round(load, 2) for load in os.getloadavg()],
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "sqlite": sqlite3.sqlite_version,
        "packages": {name: _find_version(name) for name in _PACKAGES},
        "command": " ".join(["mediatord", *sys.argv[1:]]),
    }


def _read_cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or "unknown")


def _find_version(package: str) -> str | None:
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
        "scenarios": [table.as_json() for table in tables],
    }


def format_heading(plan: BenchmarkPlan, around: dict[str, Any]) -> str:
    """Machine, versions and parameters of the run."""
    versions = ", ".join(f"{name} {found}" for name, found in around["packages"].items() if found)
    return (
        f"{around['cpu']}, {around['cores']} cores, load {around['load'][0]}, {around['system']}\n"
        f"Python {around['python']}, SQLite {around['sqlite']}, {versions}\n"
        f"{plan.rounds} interleaved rounds of {plan.seconds:g} s, medians"
    )


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
