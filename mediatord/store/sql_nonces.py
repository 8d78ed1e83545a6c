"""Nonces in SQL; each function runs inside a transaction of the caller."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from sqlite3 import Connection

from mediatord.interfaces import KEPT_BEYOND
from mediatord.store.group_commit import Outcome, Work
from mediatord.store.sql_rows import insert_rows

PRUNED_AT_A_TIME = 5_000

_COUNT = "UPDATE tally SET value = value + ? WHERE name = 'nonces'"


@dataclass(frozen=True, slots=True)
class Claim:
    """A nonce to be claimed until a time, at a time."""

    key: bytes
    until: float
    now: float


@dataclass(frozen=True, slots=True)
class Claiming:
    """A claim as an operation of a batch, whose answer is whether it was new."""

    claim: Claim
    capacity: int

    def __call__(self, connection: Connection) -> bool:
        """By itself."""
        return claim_all(connection, [self.claim], self.capacity)[0]

    def together(self, connection: Connection, works: Sequence[Work]) -> list[Outcome]:
        """This one and the claims after it."""
        claims = [work.claim for work in works if isinstance(work, Claiming)]
        return [Outcome(new) for new in claim_all(connection, claims, self.capacity)]


def claim_all(connection: Connection, claims: Sequence[Claim], capacity: int) -> list[bool]:
    """Whether each was new, as if they had come one by one; then the oldest beyond the capacity are forgotten."""
    inserted = _insert(connection, claims)
    if inserted == len(claims):
        _counted(connection, inserted, capacity)
        return [True] * inserted
    # Some are there already, perhaps over: what was inserted is taken out again, and then each has its turn.
    _delete_youngest(connection, inserted)
    return [_claim(connection, claim, capacity) for claim in claims]


def release(connection: Connection, key: bytes) -> None:
    gone = connection.execute("DELETE FROM nonce WHERE key = ?", (key,)).rowcount
    connection.execute(_COUNT, (-gone,))


def prune(connection: Connection, now: float, after: int) -> tuple[int, int | None]:
    """
    Forget those that have been over for long enough among the next few thousand.

    :param after: place to begin behind.
    :return: how many those were, and the last place that was looked at; None when it was the last of all.
    """
    row = connection.execute(
        "SELECT place FROM nonce WHERE place > ? ORDER BY place LIMIT 1 OFFSET ?", (after, PRUNED_AT_A_TIME - 1)
    ).fetchone()
    last = None if row is None else row[0]
    within = "place > ?" if last is None else "place > ? AND place <= ?"
    over = now - KEPT_BEYOND
    places = (after,) if last is None else (after, last)
    gone = connection.execute(f"DELETE FROM nonce WHERE {within} AND until <= ?", (*places, over)).rowcount
    connection.execute(_COUNT, (-gone,))
    return gone, last


def ping(connection: Connection) -> None:
    """A write that reaches the disk."""
    connection.execute("UPDATE tally SET value = value + 1 WHERE name = 'pings'")


def pong(connection: Connection) -> None:
    """A read that reaches the database."""
    connection.execute("SELECT value FROM tally WHERE name = 'pings'").fetchone()


def _insert(connection: Connection, claims: Sequence[Claim]) -> int:
    """Insert those that are not there; they get the last places."""
    return insert_rows(
        connection, "INSERT OR IGNORE INTO nonce (key, until)", [(claim.key, claim.until) for claim in claims]
    )


def _delete_youngest(connection: Connection, number: int) -> None:
    connection.execute(
        "DELETE FROM nonce WHERE place IN (SELECT place FROM nonce ORDER BY place DESC LIMIT ?)", (number,)
    )


def _claim(connection: Connection, claim: Claim, capacity: int) -> bool:
    held = connection.execute("SELECT until FROM nonce WHERE key = ?", (claim.key,)).fetchone()
    if held is not None:
        if held[0] > claim.now:
            return False
        release(connection, claim.key)
    _counted(connection, _insert(connection, [claim]), capacity)
    return True


def _counted(connection: Connection, more: int, capacity: int) -> None:
    """Count so many more, and forget the oldest if that is too many."""
    ((number,),) = connection.execute(f"{_COUNT} RETURNING value", (more,)).fetchall()
    if number > capacity:
        connection.execute(
            "DELETE FROM nonce WHERE place IN (SELECT place FROM nonce ORDER BY place LIMIT ?)", (number - capacity,)
        )
        connection.execute(_COUNT, (capacity - number,))
