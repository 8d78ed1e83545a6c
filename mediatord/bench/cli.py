"""
Figures as a picture: SVG, written by hand, without a script or a font of its own.

Which figures of a run are worth a picture.

Results as a table for people and as JSON for programs.

The subcommand `mediatord bench`.
"""

from __future__ import annotations

import os
import platform
import re
import sqlite3
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from math import ceil, floor, log10
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import click

from mediatord.bench.scenario import (
    DEFAULT_SCENARIOS,
    MONGODB_SCENARIOS,
    SCENARIOS,
    TARGET_SCENARIOS,
    BenchmarkPlan,
    PerformanceTarget,
    ResultTable,
)
from mediatord.config.units import parse_size
from mediatord.protocol import encoding
from mediatord.wallet.temporary_daemon import DaemonStartError

_CHART_WIDTH, _CHART_HEIGHT = 720, 360
_MARGIN_LEFT, _MARGIN_RIGHT, _MARGIN_TOP, _MARGIN_BOTTOM = 70, 150, 40, 50
_COLOURS = ("#1b6ca8", "#c8553d", "#588157", "#7b2d8b", "#b08900", "#555555")
_BAR_HEIGHT, _BAR_GAP = 18, 8
_LABEL_WIDTH = 250
_SVG_STYLE = "font-family:sans-serif;font-size:12px"


@dataclass(frozen=True, slots=True)
class LineChart:
    """
    Lines over a common axis; values upwards on a logarithmic scale.

    :param curves: name, and points as (x, y).
    """

    title: str
    x_name: str
    y_name: str
    curves: Mapping[str, Sequence[tuple[float, float]]]

    @property
    def height(self) -> int:
        """Of the picture, in pixels."""
        return _CHART_HEIGHT

    def draw(self) -> str:
        """The elements of the picture."""
        points = [point for curve in self.curves.values() for point in curve if point[1] > 0]
        if not points:
            return ""
        widest = max(x for x, _ in points) or 1.0
        low, high = floor(log10(min(y for _, y in points))), ceil(log10(max(y for _, y in points)))
        scale = _ChartScale(widest, low, max(high, low + 1))
        parts = [_draw_text(_MARGIN_LEFT, 20, self.title, bold=True), *self._axes(scale)]
        for number, (name, curve) in enumerate(self.curves.items()):
            parts += _draw_curve(name, [scale.place(x, y) for x, y in curve if y > 0], number)
        return "\n".join(parts)

    def _axes(self, scale: _ChartScale) -> list[str]:
        bottom, right = _CHART_HEIGHT - _MARGIN_BOTTOM, _CHART_WIDTH - _MARGIN_RIGHT
        parts = []
        for power in range(scale.low, scale.high + 1):
            _, y = scale.place(0, 10.0**power)
            parts.append(f'<line x1="{_MARGIN_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
            parts.append(_draw_text(_MARGIN_LEFT - 6, y + 4, f"{10.0**power:g}", anchor="end"))
        for step in range(5):
            x, _ = scale.place(scale.widest * step / 4, 10.0**scale.low)
            parts.append(_draw_text(x, bottom + 18, f"{scale.widest * step / 4:,.0f}", anchor="middle"))
        parts.append(f'<path d="M{_MARGIN_LEFT} {_MARGIN_TOP}V{bottom}H{right}" fill="none" stroke="#333"/>')
        parts.append(_draw_text((_MARGIN_LEFT + right) / 2, bottom + 38, self.x_name, anchor="middle"))
        parts.append(_draw_text(_MARGIN_LEFT - 6, _MARGIN_TOP - 6, self.y_name, anchor="end"))
        return parts


@dataclass(frozen=True, slots=True)
class _ChartScale:
    """:param low: power of ten at the foot of the picture; :param high: at its head."""

    widest: float
    low: int
    high: int

    def place(self, x: float, y: float) -> tuple[float, float]:
        """In pixels."""
        across, up = _CHART_WIDTH - _MARGIN_LEFT - _MARGIN_RIGHT, _CHART_HEIGHT - _MARGIN_TOP - _MARGIN_BOTTOM
        return _MARGIN_LEFT + across * x / self.widest, _CHART_HEIGHT - _MARGIN_BOTTOM - up * (
            log10(y) - self.low
        ) / (self.high - self.low)


def _draw_curve(name: str, places: Sequence[tuple[float, float]], number: int) -> list[str]:
    colour = _COLOURS[number % len(_COLOURS)]
    if not places:
        return []
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    dots = [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in places]
    drawn = f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>'
    return [
        drawn,
        *dots,
        _draw_text(_CHART_WIDTH - _MARGIN_RIGHT + 12, _MARGIN_TOP + 12 + 18 * number, name, colour=colour),
    ]


@dataclass(frozen=True, slots=True)
class BarChart:
    """
    Bars beside their names.

    :param unit: of the values.
    :param goal: drawn as a line; None for no line.
    """

    title: str
    unit: str
    values: Mapping[str, float]
    goal: float | None = None

    @property
    def height(self) -> int:
        """Of the picture, in pixels."""
        return _MARGIN_TOP + len(self.values) * (_BAR_HEIGHT + _BAR_GAP) + 24

    def draw(self) -> str:
        """The elements of the picture."""
        widest = max((*self.values.values(), self.goal or 0.0), default=0.0) or 1.0
        across = (_CHART_WIDTH - _LABEL_WIDTH - 80) / widest
        parts = [_draw_text(_MARGIN_LEFT, 20, f"{self.title} ({self.unit})", bold=True)]
        for number, (name, value) in enumerate(self.values.items()):
            y = _MARGIN_TOP + number * (_BAR_HEIGHT + _BAR_GAP)
            colour = _COLOURS[number % len(_COLOURS)]
            parts.append(_draw_text(_LABEL_WIDTH - 8, y + 13, name, anchor="end"))
            parts.append(
                f'<rect x="{_LABEL_WIDTH}" y="{y}" width="{value * across:.1f}" height="{_BAR_HEIGHT}" fill="{colour}"/>'
            )
            parts.append(_draw_text(_LABEL_WIDTH + value * across + 6, y + 13, f"{value:.3g}"))
        if self.goal is not None:
            x = _LABEL_WIDTH + self.goal * across
            foot = self.height - 20
            parts.append(f'<path d="M{x:.1f} {_MARGIN_TOP - 6}V{foot}" stroke="#c00" stroke-dasharray="4 3"/>')
            parts.append(_draw_text(x, foot + 12, f"goal {self.goal:g}", anchor="middle", colour="#c00"))
        return "\n".join(parts)


def render_svg(pictures: Sequence[LineChart | BarChart]) -> str:
    """A document with all pictures, one below the other."""
    parts, y = [], 0
    for picture in pictures:
        parts.append(f'<g transform="translate(0 {y})">\n{picture.draw()}\n</g>')
        y += picture.height + 20
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_CHART_WIDTH}" height="{y}" viewBox="0 0 {_CHART_WIDTH} {y}" '
        f'style="{_SVG_STYLE}">\n<rect width="{_CHART_WIDTH}" height="{y}" fill="#fff"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


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
    """Latency by load, and throughput in units of the floor."""
    for table in tables:
        curves = _latency_chart(table)
        if curves is not None:
            yield curves
        if _BASELINE_COLUMN in table.columns:
            values = {
                name: row[_BASELINE_COLUMN]
                for name, row in table.rows.items()
                if row.get(_BASELINE_COLUMN, 1.0) != 1.0
            }
            goal = next((target.goal for target in table.targets if target.name.endswith(_BASELINE_COLUMN)), None)
            yield BarChart(table.title, "messages per CPU-second, in units of g", values, goal)


def _latency_chart(table: ResultTable) -> LineChart | None:
    rows = [row for name, row in table.rows.items() if _LOAD_ROW.match(name)]
    x = next((column for column in _RATE_COLUMNS if column in table.columns), None)
    names = [column for column in table.columns if column in _PERCENTILE_COLUMNS]
    if not rows or x is None or not names:
        return None
    curves = {name: sorted((row[x], row[name]) for row in rows) for name in names}
    return LineChart(table.title, "forwards per second", "ms", curves)


_PACKAGES = (
    "mediatord",
    "Twisted",
    "autobahn",
    "cryptography",
    "PyNaCl",
    "jwcrypto",
    "orjson",
    "pybase64",
    "prometheus-client",
)


def describe_environment() -> dict[str, Any]:
    """Machine and versions: without them the figures mean nothing."""
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
    """Everything that was printed."""
    return {
        "surroundings": around,
        "plan": {name: value for name, value in asdict(plan).items() if name != "mongodb"},
        "scenarios": [
            {**asdict(table), "targets": [{**asdict(target), "met": target.met} for target in table.targets]}
            for table in tables
        ],
    }


def format_heading(plan: BenchmarkPlan, around: dict[str, Any]) -> str:
    """Where and how."""
    versions = ", ".join(f"{name} {found}" for name, found in around["packages"].items() if found)
    return (
        f"{around['cpu']}, {around['cores']} cores, load {around['load'][0]}, {around['system']}\n"
        f"Python {around['python']}, SQLite {around['sqlite']}, {versions}\n"
        f"{plan.rounds} interleaved rounds of {plan.seconds:g} s, medians"
    )


def format_table(table: ResultTable) -> str:
    """One scenario."""
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


# Looked up when it is its turn: a scenario's modules are not there for the others to wait for.
SCENARIO_FUNCTIONS = {
    "opening": "forward_scenarios:measure_envelopes",
    "forward": "forward_scenarios:measure_forwards",
    "latency": "forward_scenarios:measure_latency",
    "cycle": "delivery_scenarios:measure_cycle",
    "drain": "delivery_scenarios:measure_drain",
    "storm": "delivery_scenarios:measure_connection_storm",
    "mixed": "delivery_scenarios:measure_mixed",
    "command": "decentrl_scenarios:measure_commands",
    "log": "capacity_scenarios:measure_event_log",
    "push": "delivery_scenarios:measure_push",
    "sockets": "delivery_scenarios:measure_sockets",
    "memory": "capacity_scenarios:measure_memory",
    "workers": "scaling_scenarios:measure_workers",
    "accounts": "capacity_scenarios:measure_accounts",
    "disk": "capacity_scenarios:measure_disk",
    "soak": "resilience_scenarios:measure_soak",
    "cost": "capacity_scenarios:measure_cost",
    "pages": "decentrl_scenarios:measure_pages",
    "abuse": "resilience_scenarios:measure_abuse",
    "mongodb": "scaling_scenarios:measure_mongodb",
    "nodes": "scaling_scenarios:measure_nodes",
    "elsewhere": "scaling_scenarios:measure_remote_push",
    "presence": "scaling_scenarios:measure_presence",
}
# What is measured of a mediator that is not ours in another way than of a daemon of our own.
_TARGET_SCENARIO_FUNCTIONS = {"forward": "forward_scenarios:measure_target_forwards"}
_DEFAULT_PLAN = BenchmarkPlan()


def _parse_sizes(context: click.Context, parameter: click.Parameter, text: str) -> tuple[int, ...]:
    """A comma-separated list."""
    try:
        sizes = tuple(parse_size(size) for size in text.split(","))
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a list of sizes like 1k,16k") from None
    # A forward of more is refused by the daemon: base64 twice makes 1 MiB of it.
    if not all(256 <= size <= 512 * 1024 for size in sizes):
        raise click.BadParameter("sizes are between 256 bytes and 512k")
    return sizes


def _parse_numbers(context: click.Context, parameter: click.Parameter, text: str) -> tuple[int, ...]:
    """A comma-separated list of positive numbers."""
    try:
        numbers = tuple(int(number) for number in text.split(","))
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a list of numbers like 1000,100000") from None
    if min(numbers) < 1:
        raise click.BadParameter("numbers are positive")
    return numbers


_POSITIVE = click.IntRange(1)
_NEW_FILE = click.Path(dir_okay=False, path_type=Path)


@click.command(context_settings={"show_default": True})
@click.option("--seconds", type=click.FloatRange(0.1), default=_DEFAULT_PLAN.seconds, help="Per contender and round.")
@click.option(
    "--rounds", type=_POSITIVE, default=_DEFAULT_PLAN.rounds, help="Contenders take turns; medians of so many."
)
@click.option("--clients", type=click.IntRange(1, 1000), default=_DEFAULT_PLAN.clients, help="Connections that post.")
@click.option(
    "--sockets", type=_POSITIVE, default=_DEFAULT_PLAN.sockets, help="Idle WebSockets, or those of the storm."
)
@click.option(
    "--messages", type=click.IntRange(100), default=_DEFAULT_PLAN.messages, help="Over which memory is watched."
)
@click.option(
    "--events", type=click.IntRange(1000), default=_DEFAULT_PLAN.events, help="In the large store of `pages`."
)
@click.option(
    "--accounts",
    callback=_parse_numbers,
    default=",".join(map(str, _DEFAULT_PLAN.accounts)),
    help="Registered DIDs of `accounts`, in turn.",
)
@click.option("--queued", type=_POSITIVE, default=_DEFAULT_PLAN.queued, help="Messages that wait, of `accounts`.")
@click.option("--minutes", type=click.FloatRange(0.1), default=_DEFAULT_PLAN.minutes, help="Of `soak`.")
@click.option("--even", is_flag=True, help="Open-loop requests come in a beat, not at random (Poisson).")
@click.option(
    "--sizes", callback=_parse_sizes, default="1k,16k", help="Of the innermost plaintext, or of the payload."
)
@click.option(
    "--scenario",
    "scenarios",
    type=click.Choice(SCENARIOS),
    metavar="NAME",
    multiple=True,
    help=f"Only this; repeatable: {', '.join(SCENARIOS)}. Without it all that take seconds and need nothing.",
)
@click.option(
    "--target",
    metavar="URL",
    default="",
    help="Measure the DIDComm v2 mediator that runs there, of any make: at its URL, or at an invitation of it.",
)
@click.option("--target-did", metavar="DID", help="Of the target, if it does not say so at `/did` or `/invitation`.")
@click.option(
    "--target-pid", type=_POSITIVE, help="Of the target's first process, if it runs here: its CPU time counts then."
)
@click.option(
    "--mongodb",
    metavar="URI",
    default="",
    help="A replica set, for the scenarios that need one; databases are made in it and dropped.",
)
@click.option("--json", "json_file", type=_NEW_FILE, help="Write all figures there.")
@click.option("--svg", "svg_file", type=_NEW_FILE, help="Draw latencies by load, and throughput by floors, there.")
def bench(
    sizes: tuple[int, ...],
    scenarios: tuple[str, ...],
    target_pid: int | None,
    json_file: Path | None,
    svg_file: Path | None,
    **numbers: Any,
) -> int:
    """
    Measure this mediator on this machine, each figure beside a floor measured in the same run.

    Starts daemons of its own in temporary directories (TMPDIR chooses the disk) and leaves nothing behind.
    Exit status 1 means that messages were lost or refused, or that memory grew; a missed target is only reported.
    """
    plan = BenchmarkPlan(sizes=sizes, target_pid=target_pid or 0, **numbers)
    wanted = scenarios or (TARGET_SCENARIOS if plan.target else DEFAULT_SCENARIOS)
    _validate_plan(plan, wanted)
    around = describe_environment()
    click.echo(format_heading(plan, around))
    tables = []
    try:
        for name in wanted:
            click.echo(f"measuring: {name}", err=True)
            tables.append(_load_scenario(name, plan)(plan))
            click.echo(f"\n{format_table(tables[-1])}")
    except (DaemonStartError, OSError, RuntimeError) as error:
        raise click.ClickException(str(error)) from error
    if json_file is not None:
        json_file.write_bytes(encoding.dumps(build_json_report(plan, tables, around)) + b"\n")
    if svg_file is not None:
        svg_file.write_text(render_svg(list(select_charts(tables))), "utf-8")
    return 1 if any(table.failures for table in tables) else 0


def _validate_plan(plan: BenchmarkPlan, wanted: Sequence[str]) -> None:
    if not plan.mongodb and (needing := sorted(set(wanted) & set(MONGODB_SCENARIOS))):
        raise click.UsageError(f"{', '.join(needing)}: expected --mongodb with the URI of a replica set")
    if plan.target and (ours := sorted(set(wanted) - set(TARGET_SCENARIOS))):
        raise click.UsageError(f"{', '.join(ours)}: only a daemon of our own can show that, not a --target")
    if not plan.target and (plan.target_did or plan.target_pid):
        raise click.UsageError("--target-did and --target-pid belong to a --target")


def _load_scenario(name: str, plan: BenchmarkPlan) -> Callable[[BenchmarkPlan], ResultTable]:
    where = (
        _TARGET_SCENARIO_FUNCTIONS.get(name, SCENARIO_FUNCTIONS[name]) if plan.target else SCENARIO_FUNCTIONS[name]
    )
    module, _, function = where.partition(":")
    found: Callable[[BenchmarkPlan], ResultTable] = getattr(import_module(f"mediatord.bench.{module}"), function)
    return found
