"""The ledger of a store: after any test, the messages of each protocol have to be accounted for."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

from mediatord.store.interfaces.messages import StoreLedger
from mediatord.store.sqlite import queue_accounting


def read_sqlite_ledger(database: Path) -> StoreLedger:
    """As somebody else reads the file, whether the daemon runs or not."""
    with contextlib.closing(sqlite3.connect(f"{database.as_uri()}?mode=ro", uri=True)) as connection:
        connection.execute("BEGIN")
        return queue_accounting.read_ledger(connection)


def assert_ledger_balanced(books: StoreLedger) -> None:
    """
    All that was ever accepted is somewhere.

    :raise AssertionError: it is not.
    """
    assert (books.didcomm.difference, books.decentrl.difference) == (0, 0), books
