"""
What became of all that was accepted, in SQL; each function runs inside a transaction of the caller.

In a transaction of :func:`~mediatord.store.group_commit.commit_together` what its operations count is written once,
before it is committed; elsewhere at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from sqlite3 import Connection
from typing import Literal

from mediatord.interfaces import Books, Ledger
from mediatord.store.books import ENTRIES, Entry
from mediatord.store.known_queues import StoreConnection
from mediatord.store.sql_rows import insert_rows

Half = Literal["didcomm", "decentrl"]

# Rows that are counted one by one: a million take a tenth of a second.
MOST_COUNTED = 5_000_000

_INTO = f"INSERT OR ROLLBACK INTO ledger (half, {', '.join(ENTRIES)})"
_SUMS = f"ON CONFLICT DO UPDATE SET {', '.join(f'{entry} = {entry} + excluded.{entry}' for entry in ENTRIES)}"
_NUMBERS = f"SELECT {', '.join(ENTRIES)} FROM ledger WHERE half = ?"
# By name, because they are the narrowest; and no further than is counted.
_COUNT = "SELECT count(*) FROM (SELECT 1 FROM {} LIMIT ?)"
_ROWS: Mapping[Half, str] = {
    "didcomm": "message INDEXED BY message_of_recipient",
    "decentrl": "pending_event INDEXED BY pending_event_of_recipient",
}


def enter(connection: Connection, half: Half, entry: Entry, number: int) -> None:
    """So many more of a half; where they are inserted or deleted, and not before."""
    if not number:
        return
    collected = connection.entries if isinstance(connection, StoreConnection) else None
    if collected is None:
        _write(connection, {(half, entry): number})
    else:
        collected[half, entry] += number


def settle(connection: Connection) -> None:
    """Write what this transaction has collected."""
    if isinstance(connection, StoreConnection) and connection.entries:
        collected = dict(connection.entries)
        connection.entries.clear()
        _write(connection, collected)


def ledger(connection: Connection, most: int = MOST_COUNTED) -> Books:
    """
    What became of all, and what waits.

    :param most: rows that are counted.
    """
    return Books(*[_of_half(connection, half, most) for half in _ROWS])


def _of_half(connection: Connection, half: Half, most: int) -> Ledger:
    (numbers,) = connection.execute(_NUMBERS, (half,)).fetchall()
    ((waiting,),) = connection.execute(_COUNT.format(_ROWS[half]), (most + 1,)).fetchall()
    became = dict(zip(ENTRIES, numbers, strict=True))
    return Ledger(**became, waiting=waiting if waiting <= most else None)


def _write(connection: Connection, numbers: Mapping[tuple[str, str], int]) -> None:
    halves = dict.fromkeys([half for half, _ in numbers])
    rows = [(half, *[numbers.get((half, entry), 0) for entry in ENTRIES]) for half in halves]
    insert_rows(connection, _INTO, rows, _SUMS)
