"""The ledger of a store: after any test, the messages of each protocol have to be accounted for."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

from mediatord.store.interfaces.messages import StoreLedger
from mediatord.store.sqlite import queue_statistics
from mediatord.store.sqlite.connection import StoreConnection


def read_sqlite_ledger(database: Path) -> StoreLedger:
    """As somebody else reads the file, whether the daemon runs or not."""
    uri = f"{database.as_uri()}?mode=ro"
    with contextlib.closing(sqlite3.connect(uri, uri=True, factory=StoreConnection)) as connection:
        connection.execute("BEGIN")
        return queue_statistics.read_ledger(connection)


def assert_ledger_balanced(books: StoreLedger) -> None:
    """
    All that was ever accepted is somewhere.

    :raise AssertionError: it is not.
    """
    assert (books.didcomm.difference, books.decentrl.difference) == (0, 0), books
