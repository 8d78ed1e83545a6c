"""
Generated parts of docs/reference/analytics.md: tables and figures. `mediatord-analytics schema TABLE` prints columns.

`python -m tests.docs.analysis_reference docs/reference/analytics.md` updates them.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path
from textwrap import fill

from analytics.jobs.time_series import METRICS
from analytics.schema import TABLES, Table


def make_parts() -> dict[str, str]:
    """What stands between the marks `<!-- name -->` and `<!-- end of name -->`, by name."""
    return {
        "tables": _render_overview(TABLES.values()),
        "figures": fill(", ".join(f"`{name}`" for name in METRICS), 118) + "\n",
    }


def update_document(text: str) -> str:
    """
    A document with all parts as they are now.

    :raise ValueError: one has no place in it.
    """
    for name, part in make_parts().items():
        marks = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        place = re.compile(rf"({marks[0]}).*?({marks[1]})", re.DOTALL)
        if not place.search(text):
            raise ValueError(f"no place for {name}")
        text = place.sub(lambda match, part=part: f"{match[1]}\n{part}\n{match[2]}", text)  # type: ignore[misc]
    return text


def _render_overview(tables: Iterable[Table]) -> str:
    return _render_list(map(_describe_table, tables))


def _describe_table(table: Table) -> str:
    key = ", ".join(f"`{name}`" for name in table.key if name != "dt")
    mark = ", private" if table.private else ""
    return f"`{table.name}`{mark}{f' ({key})' if key else ''}: {table.meaning}"


def _render_list(items: Iterable[str]) -> str:
    return "\n\n".join(fill(item, 118, break_long_words=False, break_on_hyphens=False) for item in items) + "\n"


if __name__ == "__main__":
    document = Path(sys.argv[1])
    document.write_text(update_document(document.read_text("utf-8")), "utf-8")
