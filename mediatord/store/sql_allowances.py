"""Allowances in SQL; each function runs inside a transaction of the caller."""

from __future__ import annotations

import json
from sqlite3 import Connection

from mediatord.store.allowances import Lot, still_counting, wait_for, with_taking, without_latest

PRUNED_AT_A_TIME = 5_000

_KEEP = """
    INSERT INTO allowance (key, until, lots) VALUES (?, ?, ?)
    ON CONFLICT DO UPDATE SET until = excluded.until, lots = excluded.lots
"""


def take(connection: Connection, key: bytes, amount: int, limit: int, period: float, now: float) -> float:
    """How long to wait for it; 0.0 when it was taken."""
    lots = still_counting(_lots(connection, key), period, now)
    wait = wait_for(lots, amount, limit=limit, period=period, now=now)
    if not wait and amount:
        lots = with_taking(lots, amount, period=period, now=now)
        connection.execute(_KEEP, (key, lots[-1][0] + period, json.dumps(lots)))
    return wait


def put_back(connection: Connection, key: bytes, amount: int) -> None:
    before = _lots(connection, key)
    lots = without_latest(before, amount)
    if lots != before:
        connection.execute("UPDATE allowance SET lots = ? WHERE key = ?", (json.dumps(lots), key))


def prune(connection: Connection, now: float, after: bytes | None) -> bytes | None:
    """
    Forget what counts no more among the next few thousand.

    :param after: key to begin behind; None to begin with the first.
    :return: the last key that was looked at; None when it was the last of all.
    """
    behind, start = ("key >= ?", b"") if after is None else ("key > ?", after)
    row = connection.execute(
        f"SELECT key FROM allowance WHERE {behind} ORDER BY key LIMIT 1 OFFSET ?", (start, PRUNED_AT_A_TIME - 1)
    ).fetchone()
    last: bytes | None = None if row is None else row[0]
    within, keys = (behind, [start]) if last is None else (f"{behind} AND key <= ?", [start, last])
    connection.execute(f"DELETE FROM allowance WHERE {within} AND until <= ?", (*keys, now))
    return last


def _lots(connection: Connection, key: bytes) -> list[Lot]:
    row = connection.execute("SELECT lots FROM allowance WHERE key = ?", (key,)).fetchone()
    return [] if row is None else [(at, taken) for at, taken in json.loads(row[0])]
