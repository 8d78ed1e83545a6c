"""
What docs/how-to/read-a-nightly-report.md has from the code, as Markdown: tables, kinds of damage, figures.

`python -m analytics.reference docs/how-to/read-a-nightly-report.md` writes it there anew.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path

from analytics.jobs.quality import KINDS
from analytics.metrics import METRICS
from analytics.segments import FINDINGS
from analytics.tables import TABLES, Table


def parts() -> dict[str, str]:
    """What stands between the marks `<!-- name -->` and `<!-- end of name -->`, by name."""
    return {
        "tables": "\n".join(_section(table) for table in TABLES.values()),
        "kinds": _listed("kind", KINDS),
        "findings": _listed("file", FINDINGS),
        "figures": _listed("figure", {name: metric.title for name, metric in METRICS.items()}),
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


def _listed(what: str, meanings: Mapping[str, str]) -> str:
    rows = [f"| `{name}` | {_cell(meaning)} |" for name, meaning in meanings.items()]
    return "\n".join([f"| {what} | meaning |", "|---|---|", *rows, ""])


def _section(table: Table) -> str:
    key = ", ".join(f"`{name}`" for name in table.key) or "none: rows may be alike"
    about = f"{table.meaning[0].upper()}{table.meaning[1:]}. Key: {key}."
    if table.private:
        about += " **Private**: identifiers stand in it as they stand in the logs."
    rows = [f"| `{column.name}` | {column.type} | {_cell(column.meaning)} |" for column in table.columns]
    return "\n".join(
        [f"### `{table.name}`", "", about, "", "| column | type | meaning |", "|---|---|---|", *rows, ""]
    )


def _cell(text: str) -> str:
    return text.replace(":func:", "").replace("|", "\\|")


if __name__ == "__main__":
    document = Path(sys.argv[1])
    document.write_text(renewed(document.read_text("utf-8")), "utf-8")
