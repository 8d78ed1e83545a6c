"""The goals, and whether figures meet them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

# The large files have so many times the lines of the small ones.
SMALL = 4
_GIB = 2**30


@dataclass(slots=True)
class Figures:
    """
    Seconds are medians.

    :ivar scan: one thread, orjson, the large files.
    :ivar night: a whole run over the large files, from the start of the process to its end.
    :ivar after_ingest: of it, what came after the ingest.
    :ivar cold_ingest: of it, the ingest.
    :ivar peak: bytes resident in all processes of that run, at worst.
    :ivar ingest: of the large files, warm, with two threads; `ingest_small` of the small ones.
    :ivar ingest_alone: the same with one thread.
    :ivar parse: lines only parsed, warm.
    :ivar declared: the query on raw lines, warm; `inferred` likewise.
    :ivar wrong: what the tables say that is not so.
    :ivar unequal: tables that are not the same after a second run.
    :ivar rows: of all tables that were compared.
    :ivar duck: seconds of DuckDB by what it did.
    """

    lines: int = 0
    size: int = 0
    scan: float = 0.0
    night: float = 0.0
    cold_ingest: float = 0.0
    after_ingest: float = 0.0
    peak: int = 0
    ingest: float = 0.0
    ingest_small: float = 0.0
    ingest_alone: float = 0.0
    parse: float = 0.0
    declared: float = 0.0
    inferred: float = 0.0
    wrong: Sequence[str] = ()
    unequal: Sequence[str] = ()
    tables: int = 0
    steps: Mapping[str, float] = field(default_factory=dict)
    duck: Mapping[str, float] = field(default_factory=dict)

    def beside(self) -> list[str]:
        """What is no goal, as lines."""
        slowest = sorted(self.steps.items(), key=lambda step: -step[1])[:8]
        return [
            "",
            f"{self.lines:,} lines, {self.size / 1e6:,.0f} MB; seconds: scan {self.scan:.1f}, night {self.night:.1f},"
            f" ingest cold {self.cold_ingest:.1f} and warm {self.ingest:.1f}, query on raw lines {self.declared:.1f}",
            "DuckDB, seconds, cold: " + ", ".join(f"{name} {value:.1f}" for name, value in self.duck.items()),
            "slowest steps of the night, seconds: " + ", ".join(f"{name} {value:.1f}" for name, value in slowest),
        ]


@dataclass(frozen=True, slots=True)
class Result:
    """:param met: None if it was not to be judged."""

    name: str
    about: str
    measured: str
    goal: str
    met: bool | None

    def line(self) -> str:
        """As a line of the table."""
        said = {True: "met", False: "NOT MET", None: "not judged"}[self.met]
        return f"{self.name}  {self.about:<52} {self.measured:>10}  {self.goal:>9}  {said}"


def judged(figures: Figures, *, timed: bool) -> list[Result]:
    """:param timed: whether there was enough data for seconds to mean anything."""

    def ratio(name: str, about: str, above: float, below: float, limit: float, least: bool = False) -> Result:
        value = above / below
        sign = ">=" if least else "<="
        met = (value >= limit if least else value <= limit) if timed else None
        return Result(name, about, f"{value:.2f}x", f"{sign} {limit:.1f}x", met)

    def nothing(name: str, about: str, found: Sequence[Any]) -> Result:
        return Result(name, about + "".join(f"; {one}" for one in found), str(len(found)), "0", not found)

    peak = figures.peak / _GIB
    return [
        ratio("G1", "whole night against scan by one thread", figures.night, figures.scan, 5.0),
        ratio("G2", "ingest of 16 parts against 4 parts, warm", figures.ingest, figures.ingest_small, 4.4),
        ratio("G3", "ingest against parsing only, warm", figures.ingest, figures.parse, 2.6),
        ratio("G4", "inferred schema against declared, warm", figures.inferred, figures.declared, 1.7, least=True),
        ratio("G5", "all that follows the ingest against it", figures.after_ingest, figures.cold_ingest, 0.6),
        Result(
            "G6", "peak memory of a night, heap of 1 GB", f"{peak:.2f} GiB", "<= 2 GiB", peak <= 2 if timed else None
        ),
        ratio("G7", "ingest by one thread against two, warm", figures.ingest_alone, figures.ingest, 1.6, least=True),
        nothing("G8", "figures that differ from the truth", figures.wrong),
        nothing("G9", f"of {figures.tables} tables, unequal after a second run", figures.unequal),
    ]
