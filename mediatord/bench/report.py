"""Results as a table for people and as JSON for programs."""

from __future__ import annotations

import os
import platform
import sqlite3
import sys
from collections.abc import Iterable
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from mediatord.bench.figures import Table, Target
from mediatord.bench.plan import Plan

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


def surroundings() -> dict[str, Any]:
    """Machine and versions: without them the figures mean nothing."""
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "load": [round(load, 2) for load in os.getloadavg()],
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "sqlite": sqlite3.sqlite_version,
        "packages": {name: _version(name) for name in _PACKAGES},
        "command": " ".join(["mediatord", *sys.argv[1:]]),
    }


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def as_json(plan: Plan, tables: Iterable[Table], around: dict[str, Any]) -> dict[str, Any]:
    """Everything that was printed."""
    return {
        "surroundings": around,
        "plan": {name: value for name, value in asdict(plan).items() if name != "mongodb"},
        "scenarios": [
            {**asdict(table), "targets": [{**asdict(target), "met": target.met} for target in table.targets]}
            for table in tables
        ],
    }


def heading(plan: Plan, around: dict[str, Any]) -> str:
    """Where and how."""
    versions = ", ".join(f"{name} {found}" for name, found in around["packages"].items() if found)
    return (
        f"{around['cpu']}, {around['cores']} cores, load {around['load'][0]}, {around['system']}\n"
        f"Python {around['python']}, SQLite {around['sqlite']}, {versions}\n"
        f"{plan.rounds} interleaved rounds of {plan.seconds:g} s, medians"
    )


def as_text(table: Table) -> str:
    """One scenario."""
    head = ["", *table.columns]
    lines = [[name, *(_number(row.get(column)) for column in table.columns)] for name, row in table.rows.items()]
    widths = [max(len(line[place]) for line in [head, *lines]) for place in range(len(head))]
    text = [table.title]
    for name, *cells in [head, *lines]:
        padded = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
        text.append("  ".join(["", name.ljust(widths[0]), *padded]).rstrip())
    text += [f"  {note}" for note in table.notes]
    text += [f"  target: {_target(target)}" for target in table.targets]
    text += [f"  FAILED: {failure}" for failure in table.failures]
    return "\n".join(text)


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.2f}"


def _target(target: Target) -> str:
    verdict = "met" if target.met else "missed"
    bound = "at most" if target.most else "at least"
    return f"{target.name} {bound} {target.goal:g}: {target.measured:.2f}, {verdict}"
