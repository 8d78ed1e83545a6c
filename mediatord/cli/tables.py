"""Tables: drawn on a terminal, and plain columns for whatever else reads them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from math import isfinite

from mediatord.cli.visible import visible

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_SPANS = (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1))


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """:param columns: their titles; one that ends in `#` has numbers, which stand to the right."""
    rows = [[visible(cell) for cell in row] for row in rows]
    if not sys.stdout.isatty():
        print(plain_table(columns, rows))  # noqa: T201  this is a program's output
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in columns:
        right = column.endswith("#")
        table.add_column(column.rstrip(" #"), justify="right" if right else "left", overflow="fold", no_wrap=right)
    for row in rows:
        table.add_row(*row)
    Console(highlight=False, markup=False, emoji=False).print(table)  # there is one for `:key:`


def plain_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns with two blanks between, none of them cut."""
    lines = [[column.rstrip(" #") for column in columns], *rows]
    widths = [max(len(line[place]) for line in lines) for place in range(len(columns))]

    def cell(text: str, place: int) -> str:
        return text.rjust(widths[place]) if columns[place].endswith("#") else text.ljust(widths[place])

    return "\n".join("  ".join(cell(text, place) for place, text in enumerate(line)).rstrip() for line in lines)


def size_text(size: float) -> str:
    """Bytes in the unit that fits."""
    for unit in _UNITS[:-1]:
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} {_UNITS[-1]}"


def span_text(seconds: float) -> str:
    """By its two largest units."""
    if not isfinite(seconds):
        return "?"
    left = max(0, round(seconds))
    parts: list[str] = []
    for unit, size in _SPANS:
        if left >= size or (unit == "s" and not parts):
            parts.append(f"{left // size} {unit}")
            left %= size
    return " ".join(parts[:2])
