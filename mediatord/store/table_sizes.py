"""How many bytes each table of an SQLite database takes."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from time import monotonic

# Seconds that one look may take: `dbstat` reads every page.
_SECONDS = 0.2
# Of SQLite's virtual machine, between two looks at the clock; some five for a page.
_STEPS = 1_000
# It took too long, or this SQLite was built without `dbstat`.
_EXPECTED = (sqlite3.SQLITE_INTERRUPT, sqlite3.SQLITE_ERROR)

_TABLES = "SELECT name, tbl_name FROM sqlite_schema WHERE rootpage UNION ALL SELECT 'sqlite_schema', 'sqlite_schema'"
# A row for each page, so that it can be ended between two of them.
_SIZE = "SELECT sum(pgsize) FROM dbstat WHERE name = ?"


class TableSizes:
    """
    Measures a few tables and indexes at each call, and remembers the others.

    One that could not be measured in time is estimated from what the others leave of the database; more than one such
    are not told.

    :param steady: seconds since any time, by a clock that nobody sets.
    """

    def __init__(self, steady: Callable[[], float] = monotonic) -> None:
        self._steady = steady
        self._known: dict[str, int] = {}
        self._slow: set[str] = set()
        self._next: list[str] = []

    def measure(self, connection: sqlite3.Connection) -> dict[str, int]:
        """Bytes by table, those of its indexes among them, with `free` for pages without content."""
        owners = dict(connection.execute(_TABLES).fetchall())
        self._measure_some(connection, sorted(owners))
        page_size = _number(connection, "page_size")
        free = _number(connection, "freelist_count") * page_size
        sizes: dict[str, int] = {"free": free}
        for name, owner in owners.items():
            if name in self._known:
                sizes[owner] = sizes.get(owner, 0) + self._known[name]
        missing = {owners[name] for name in owners if name not in self._known}
        if len(missing) == 1:
            rest = _number(connection, "page_count") * page_size - sum(sizes.values())
            (owner,) = missing
            sizes[owner] = sizes.get(owner, 0) + max(0, rest)
            return sizes
        return {owner: size for owner, size in sizes.items() if owner not in missing}

    def _measure_some(self, connection: sqlite3.Connection, names: list[str]) -> None:
        end = self._steady() + _SECONDS
        # Those that took too long come last, so that they keep nobody from being measured.
        self._next = [name for name in self._next if name in names] or sorted(names, key=self._slow.__contains__)
        connection.set_progress_handler(lambda: self._steady() > end, _STEPS)
        try:
            while self._next and self._steady() < end:
                name = self._next.pop(0)
                try:
                    ((size,),) = connection.execute(_SIZE, (name,)).fetchall()
                    self._known[name] = size or 0
                except sqlite3.OperationalError as error:
                    if error.sqlite_errorcode not in _EXPECTED:
                        raise
                    self._slow.add(name)
        finally:
            connection.set_progress_handler(None, 0)


def _number(connection: sqlite3.Connection, pragma: str) -> int:
    ((number,),) = connection.execute(f"PRAGMA {pragma}").fetchall()
    return int(number)
