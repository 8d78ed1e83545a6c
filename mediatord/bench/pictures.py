"""Which figures of a run are worth a picture."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from mediatord.bench.figures import Table
from mediatord.bench.plot import Bars, Curves

# A row of a table of latencies by load.
_LOAD = re.compile(r"^(.+)  at (\d+)%$")
_OFFERED = ("offered/s", "msg/s")
_PERCENTILES = ("p50", "p99", "p99.9", "p50 ms", "p99 ms", "p99.9 ms", "push p50", "push p99", "push p99.9")
_FLOOR = "of g"


def pictures_of(tables: Iterable[Table]) -> Iterator[Curves | Bars]:
    """Latency by load, and throughput in units of the floor."""
    for table in tables:
        curves = _curves(table)
        if curves is not None:
            yield curves
        if _FLOOR in table.columns:
            values = {name: row[_FLOOR] for name, row in table.rows.items() if row.get(_FLOOR, 1.0) != 1.0}
            goal = next((target.goal for target in table.targets if target.name.endswith(_FLOOR)), None)
            yield Bars(table.title, "messages per CPU-second, in units of g", values, goal)


def _curves(table: Table) -> Curves | None:
    rows = [row for name, row in table.rows.items() if _LOAD.match(name)]
    x = next((column for column in _OFFERED if column in table.columns), None)
    names = [column for column in table.columns if column in _PERCENTILES]
    if not rows or x is None or not names:
        return None
    curves = {name: sorted((row[x], row[name]) for row in rows) for name in names}
    return Curves(table.title, "forwards per second", "ms", curves)
