"""
Generated parts of docs/reference/analytics.md: tables, kinds of findings, skipped files, figures.

`python -m tests.docs.analysis_reference docs/reference/analytics.md` updates them.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from analytics.jobs.log_quality import FINDING_KINDS
from analytics.jobs.time_series import METRICS
from analytics.reading.segments import FILE_FINDINGS
from analytics.schema import TABLES, Table

# Tables whose columns are described one by one, as operators look into them when something is missing. Of the others
# `mediatord-analytics schema TABLE` prints the meanings.
_DESCRIBED_TABLES = ("ledger_daily", "stores_daily", "boots_daily")


def make_parts() -> dict[str, str]:
    """What stands between the marks `<!-- name -->` and `<!-- end of name -->`, by name."""
    return {
        "tables": _render_overview(TABLES.values()),
        "columns": "\n".join(_render_columns(TABLES[name]) for name in _DESCRIBED_TABLES),
        "kinds": _render_meanings("kind", FINDING_KINDS),
        "findings": _render_meanings("file", FILE_FINDINGS),
        "figures": _render_meanings("figure", {name: metric.title for name, metric in METRICS.items()}),
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


def _render_meanings(what: str, meanings: Mapping[str, str]) -> str:
    rows = [f"| `{name}` | {_escape_cell(meaning)} |" for name, meaning in meanings.items()]
    return "\n".join([f"| {what} | meaning |", "|---|---|", *rows, ""])


def _render_overview(tables: Iterable[Table]) -> str:
    return "\n".join(["| table | rows | key | other columns |", "|---|---|---|---|", *map(_render_row, tables), ""])


def _render_row(table: Table) -> str:
    key = [name for name in table.key if name != "dt"]
    others = [column.name for column in table.columns if column.name not in ("dt", *key)]
    name = f"`{table.name}`{' *' if table.private else ''}"
    shown = _format_names(key) or ("-" if table.key else "none")
    return f"| {name} | {_escape_cell(table.meaning)} | {shown} | {_format_names(others)} |"


def _render_columns(table: Table) -> str:
    meanings = {column.name: column.meaning for column in table.columns if column.name != "dt"}
    return f"### `{table.name}`\n\n{_render_meanings('column', meanings)}"


def _format_names(columns: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in columns)


def _escape_cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    document = Path(sys.argv[1])
    document.write_text(update_document(document.read_text("utf-8")), "utf-8")
