"""
What docs/reference/analytics.md has from the code, as Markdown: tables, columns, figures.

`python -m analytics.reference docs/reference/analytics.md` writes it there anew.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from textwrap import fill

from analytics.metrics import METRICS
from analytics.tables import TABLES, Table

# Tables whose columns are described one by one, as operators look into them when something is missing. Of the others
# `mediatord-analytics schema TABLE` prints the meanings.
_DESCRIBED = ("ledger_daily", "stores_daily")


def parts() -> dict[str, str]:
    """What stands between the marks `<!-- name -->` and `<!-- end of name -->`, by name."""
    return {
        "tables": _overview(TABLES.values()),
        "columns": "\n".join(_described(TABLES[name]) for name in _DESCRIBED),
        "figures": fill(", ".join(f"`{name}`" for name in METRICS), 118) + "\n",
    }


def renewed(text: str) -> str:
    """
    A document with all parts as they are now.

    :raise ValueError: one has no place in it.
    """
    for name, part in parts().items():
        marks = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        place = re.compile(rf"({marks[0]}).*?({marks[1]})", re.DOTALL)
        if not place.search(text):
            raise ValueError(f"no place for {name}")
        text = place.sub(lambda match, part=part: f"{match[1]}\n{part}\n{match[2]}", text)  # type: ignore[misc]
    return text


def _listed(meanings: Mapping[str, str]) -> str:
    return "".join(map(_item, (f"`{name}`: {meaning}" for name, meaning in meanings.items())))


def _overview(tables: Iterable[Table]) -> str:
    return "".join(map(_item, map(_describe, tables)))


def _describe(table: Table) -> str:
    key = ", ".join(f"`{name}`" for name in table.key if name != "dt")
    mark = ", private" if table.private else ""
    return f"`{table.name}`{mark}{f' ({key})' if key else ''}: {table.meaning}"


def _described(table: Table) -> str:
    meanings = {column.name: column.meaning for column in table.columns if column.name != "dt"}
    return f"### `{table.name}`\n\n{_listed(meanings)}"


def _item(text: str) -> str:
    return fill(f"* {text}", 118, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False) + "\n"


if __name__ == "__main__":
    document = Path(sys.argv[1])
    document.write_text(renewed(document.read_text("utf-8")), "utf-8")
