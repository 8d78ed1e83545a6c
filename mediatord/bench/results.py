"""Interleaved rounds of contenders, the tables that scenarios return, and reports of them as text and JSON."""

from __future__ import annotations

import os
import platform
import sqlite3
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

from mediatord.bench.plan import BenchmarkPlan

# Names of figures that many scenarios report.
PER_SECOND = "msg/s"
PER_CPU_SECOND = "msg/CPU-s"
# CPU time of the load generator for each request.
CLIENT_US = "client us"
_PERCENTILES = {"p50": 0.5, "p99": 0.99, "p99.9": 0.999}
_PACKAGES = (
    "mediatord", "Twisted", "autobahn", "cryptography", "PyNaCl", "jwcrypto", "orjson", "pybase64",
    "prometheus-client",
)  # fmt: skip

Figures = dict[str, float]
Contender = Callable[[], Figures]


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
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            found[name].append(contenders[name]())
    return InterleavedResults(found)


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
