"""Writing to a SQLite database as earlier versions of the schema have it."""

from __future__ import annotations

import sqlite3

from tests.store.builders import NOON


def register_in_old_schema(connection: sqlite3.Connection, account: str, *dids: str) -> None:
    """An account and what it has registered, as versions before the sixth have inserted it."""
    inserted = connection.execute("INSERT INTO account (did, created_at) VALUES (?, ?)", (account, NOON))
    rows = [(inserted.lastrowid, did, place) for place, did in enumerate(dids, 1)]
    connection.executemany("INSERT INTO recipient (account_id, did, registered) VALUES (?, ?, ?)", rows)
