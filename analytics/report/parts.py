"""What a report is put together from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

State = Literal["good", "warn", "bad", "plain"]
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Figure:
    """
    One number.

    :param key: its name in summary.json, with the unit.
    :param value: as it is in summary.json.
    :param shown: the same with its unit, for people.
    :param meaning: a sentence.
    """

    key: str
    label: str
    value: float | str | None
    shown: str
    meaning: str
    state: State = "plain"


@dataclass(frozen=True, slots=True)
class Column:
    """:param told: makes text of a value. :param number: set to the right."""

    name: str
    title: str
    told: Callable[[Any], str]
    number: bool = True


@dataclass(frozen=True, slots=True)
class Grid:
    """
    A table.

    :param source: the table of the warehouse; its rows are in a CSV file of that name. Empty: there is none.
    :param note: under the table.
    :param marked: rows, by their place, that stand out.
    """

    caption: str
    columns: Sequence[Column]
    rows: Sequence[Row]
    source: str = ""
    note: str = ""
    marked: frozenset[int] = frozenset()

    @property
    def cells(self) -> list[list[str]]:
        """What is shown."""
        return [[column.told(row.get(column.name)) for column in self.columns] for row in self.rows]


@dataclass(frozen=True, slots=True)
class Chart:
    """:param description: what it shows, for those who do not see it. :param svg: complete and safe."""

    title: str
    description: str
    svg: str
    table: Grid | None = None


@dataclass(frozen=True, slots=True)
class Section:
    """:param lead: what this is about, a sentence or two."""

    id: str
    title: str
    lead: str
    figures: Sequence[Figure] = ()
    charts: Sequence[Chart] = ()
    grids: Sequence[Grid] = ()
    notes: Sequence[str] = field(default=())


def capped(rows: Sequence[Row], most: int, source: str) -> tuple[Sequence[Row], str]:
    """The first rows, and a note if there are more."""
    left = len(rows) - most
    return rows[:most], f"{left:,} more in {source}.csv." if left > 0 else ""
