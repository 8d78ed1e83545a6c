"""
The generated list of tables in docs/reference/analytics.md. `mediatord-analytics schema TABLE` prints columns.

`python -m tests.docs.analysis_reference docs/reference/analytics.md` updates it.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from textwrap import fill

from analytics.schema import TABLES, Table

_PLACE = re.compile(r"(<!-- tables -->\n).*?(<!-- end of tables -->)", re.DOTALL)


def update_document(text: str) -> str:
    """
    A document with the list as it is now.

    :raise ValueError: there is no place for it.
    """
    if not _PLACE.search(text):
        raise ValueError("no place for tables")
    items = (_describe_table(table) for table in TABLES.values())
    part = "\n\n".join(fill(item, 118, break_long_words=False, break_on_hyphens=False) for item in items)
    return _PLACE.sub(lambda match: f"{match[1]}\n{part}\n\n{match[2]}", text)


def _describe_table(table: Table) -> str:
    return f"`{table.name}`{', private' if table.private else ''}: {table.meaning}"


if __name__ == "__main__":
    document = Path(sys.argv[1])
    document.write_text(update_document(document.read_text("utf-8")), "utf-8")
