"""Nonces in SQL; each function runs inside a transaction of the caller."""

from __future__ import annotations

from sqlite3 import Connection


def claim(connection: Connection, key: bytes, until: float, now: float, capacity: int) -> bool:
    held = connection.execute("SELECT until FROM nonce WHERE key = ?", (key,)).fetchone()
    if held is not None:
        if held[0] > now:
            return False
        release(connection, key)
    connection.execute("INSERT INTO nonce (key, until) VALUES (?, ?)", (key, until))
    (number,) = connection.execute("SELECT value FROM tally WHERE name = 'nonces'").fetchone()
    if number > capacity:
        connection.execute(
            "DELETE FROM nonce WHERE place IN (SELECT place FROM nonce ORDER BY place LIMIT ?)", (number - capacity,)
        )
    return True


def release(connection: Connection, key: bytes) -> None:
    connection.execute("DELETE FROM nonce WHERE key = ?", (key,))


def prune(connection: Connection, now: float) -> int:
    return connection.execute("DELETE FROM nonce WHERE until <= ?", (now,)).rowcount


def ping(connection: Connection) -> None:
    """A write that reaches the disk."""
    connection.execute("UPDATE tally SET value = value + 1 WHERE name = 'pings'")


def pong(connection: Connection) -> None:
    """A read that reaches the database."""
    connection.execute("SELECT value FROM tally WHERE name = 'pings'").fetchone()
