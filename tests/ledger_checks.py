"""Reads the message ledger of a store; after each test, all messages of both protocols must be accounted for."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

from mediatord.store.interfaces.messages import StoreLedger
from mediatord.store.sqlite import queue_statistics
from mediatord.store.sqlite.connection import StoreConnection


def read_sqlite_ledger(database: Path) -> StoreLedger:
    """Read the ledger from the database file, whether or not the daemon runs."""
    uri = f"{database.as_uri()}?mode=ro"
    with contextlib.closing(sqlite3.connect(uri, uri=True, factory=StoreConnection)) as connection:
        connection.execute("BEGIN")
        return queue_statistics.read_ledger(connection)


def assert_ledger_balanced(ledger: StoreLedger) -> None:
    """
    Every accepted message is accounted for.

    :raise AssertionError: one is not.
    """
    assert (ledger.didcomm.difference, ledger.decentrl.difference) == (0, 0), ledger
