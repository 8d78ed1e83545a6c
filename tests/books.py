"""The books that a store keeps itself: after any test, each half has to be accounted for."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

from mediatord.interfaces import Books
from mediatord.store import sql_ledger


def of_sqlite(database: Path) -> Books:
    """As somebody else reads the file, whether the daemon runs or not."""
    with contextlib.closing(sqlite3.connect(f"{database.as_uri()}?mode=ro", uri=True)) as connection:
        connection.execute("BEGIN")
        return sql_ledger.ledger(connection)


def assert_closed(books: Books) -> None:
    """
    All that was ever accepted is somewhere.

    :raise AssertionError: it is not.
    """
    assert (books.didcomm.difference, books.decentrl.difference) == (0, 0), books
