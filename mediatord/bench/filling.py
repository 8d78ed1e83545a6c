"""
A database with as many accounts and messages as an old mediator's, made in seconds.

What a stopped daemon has in its file is copied many times over. Rows are copies of rows that the daemon wrote itself,
with other names and numbers, so that they have whatever columns its schema has; its triggers and indexes do their
work.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

from mediatord.protocol.canonical_did import did_digest
from mediatord.store.sql_rows import key_of

_BATCH = 50_000
# Another DID of the same length: a part in the middle of the key is replaced.
_DID = "substr(one.did, 1, 24) || lower(hex(randomblob(12))) || substr(one.did, 49)"
# How much waits for whom is counted by the daemon's statements.
_QUEUES = "SELECT account_id, recipient_id, count(*), sum(size) FROM message GROUP BY account_id, recipient_id"
_NUMBERS = "WITH RECURSIVE number (i) AS (SELECT ? UNION ALL SELECT i + 1 FROM number WHERE i + 1 < ?) "


def add_accounts(database: Path, count: int) -> None:
    """Accounts with one registered DID each; the daemon is stopped, and has an account with a recipient."""
    with closing(_opened(database)) as connection:
        first = _highest(connection, "account") + 1
        columns, values = _copied(
            connection, "account", {"did": _DID, "did_key": f"account_key({_DID})", "recipients": "0"}
        )
        template = "(SELECT * FROM account ORDER BY id LIMIT 1) AS one"
        _in_batches(connection, f"INSERT INTO account ({columns}) SELECT {values} FROM number, {template}", count)
        changed = {"account_id": "account.id", "did": "account.did", "did_digest": "did_digest(account.did)"}
        columns, values = _copied(connection, "recipient", changed)
        template = "(SELECT * FROM recipient ORDER BY id LIMIT 1) AS one"
        source = f"account, {template} WHERE account.id >= {first}"
        with connection:
            connection.execute(f"INSERT INTO recipient ({columns}) SELECT {values} FROM {source}")


def add_messages(database: Path, count: int) -> None:
    """Messages for all accounts in turn; the daemon is stopped, and has one message."""
    with closing(_opened(database)) as connection:
        (recipients,) = connection.execute("SELECT count(*) FROM recipient").fetchone()
        connection.execute("CREATE TEMP TABLE addressee (i INTEGER PRIMARY KEY, id INTEGER, account_id INTEGER)")
        connection.execute("INSERT INTO addressee SELECT NULL, id, account_id FROM recipient ORDER BY id")
        changed = {
            "id": "substr(one.id, 1, 8) || printf('%08x', number.i) || lower(hex(randomblob(8)))",
            "recipient_id": "addressee.id",
            "account_id": "addressee.account_id",
        }
        columns, values = _copied(connection, "message", changed)
        template = "(SELECT * FROM message ORDER BY rowid LIMIT 1) AS one"
        source = f"number, {template} JOIN addressee ON addressee.i = 1 + number.i % {recipients}"
        _in_batches(connection, f"INSERT INTO message ({columns}) SELECT {values} FROM {source}", count)
        with connection:
            connection.execute("DELETE FROM queue")
            connection.execute(f"INSERT INTO queue {_QUEUES}")
            connection.execute("UPDATE ledger SET accepted = accepted + ? WHERE half = 'didcomm'", [count])


def make_overdue(database: Path, count: int) -> None:
    """Let the time of the newest messages be over; the daemon is stopped."""
    newest = "SELECT rowid FROM message ORDER BY rowid DESC LIMIT ?"
    with closing(_opened(database)) as connection, connection:
        connection.execute(f"UPDATE message SET expires_at = received_at WHERE rowid IN ({newest})", [count])


def _opened(database: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(database)
    for name, function in (("did_digest", did_digest), ("account_key", key_of)):
        connection.create_function(name, 1, function, deterministic=True)
    # The file is thrown away when the power fails, like everything here.
    connection.execute("PRAGMA synchronous=OFF")
    connection.execute("PRAGMA cache_size=-262144")
    return connection


def _highest(connection: sqlite3.Connection, table: str) -> int:
    (highest,) = connection.execute(f"SELECT max(id) FROM {table}").fetchone()
    return int(highest)


def _copied(connection: sqlite3.Connection, table: str, changed: Mapping[str, str]) -> tuple[str, str]:
    """Columns to be written, and what with: the row `one`, except for what is changed and the number of the row."""
    described = connection.execute(f"SELECT name, type, pk FROM pragma_table_info('{table}')").fetchall()
    columns = [name for name, kind, key in described if not (key and kind == "INTEGER")]
    return ", ".join(columns), ", ".join(changed.get(name, f"one.{name}") for name in columns)


def _in_batches(connection: sqlite3.Connection, statement: str, count: int) -> None:
    for start in range(0, count, _BATCH):
        with connection:
            connection.execute(_NUMBERS + statement, [start, min(count, start + _BATCH)])
