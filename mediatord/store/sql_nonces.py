"""Nonces in SQL; each function runs inside a transaction of the caller."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from sqlite3 import Connection
from typing import Any

from mediatord.errors import ReplayMemoryFull
from mediatord.interfaces import KEPT_BEYOND
from mediatord.store.group_commit import Outcome, Work
from mediatord.store.sql_rows import insert_rows

PRUNED_AT_A_TIME = 5_000

_COUNT = "UPDATE tally SET value = value + ? WHERE name = 'nonces'"


@dataclass(frozen=True, slots=True)
class Claim:
    """
    A nonce to be claimed until a time, at a time.

    :param share: of the capacity, how much may be taken already.
    """

    key: bytes
    until: float
    now: float
    share: float = 1.0


@dataclass(frozen=True, slots=True)
class Claiming:
    """A claim as an operation of a batch, whose answer is whether it was new."""

    claim: Claim
    capacity: int

    def __call__(self, connection: Connection) -> Any:
        """By itself; a refusal is an outcome, as it is written before it is known, and others are in the batch."""
        return self.together(connection, [self])[0]

    def together(self, connection: Connection, works: Sequence[Work]) -> list[Outcome]:
        """This one and the claims after it."""
        claims = [work.claim for work in works if isinstance(work, Claiming)]
        answers = claim_all(connection, claims, self.capacity)
        return [Outcome(error=one) if isinstance(one, ReplayMemoryFull) else Outcome(one) for one in answers]


# Whether it was new; or it would be, and there is no room.
Claimed = bool | ReplayMemoryFull


def claim_all(connection: Connection, claims: Sequence[Claim], capacity: int) -> list[Claimed]:
    """What became of each, as if they had come one by one."""
    inserted = _insert(connection, claims)
    room = min([_room(claim, capacity) for claim in claims], default=capacity)
    if inserted == len(claims):
        if _counted(connection, inserted) <= room:
            return [True] * inserted
        _counted(connection, -inserted)
    # Some are there already, perhaps over, or are too many: what was inserted is taken out, and each has its turn.
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


def _claim(connection: Connection, claim: Claim, capacity: int) -> Claimed:
    held = connection.execute("SELECT until FROM nonce WHERE key = ?", (claim.key,)).fetchone()
    if held is not None:
        if held[0] > claim.now:
            return False
        release(connection, claim.key)
    elif _counted(connection, 0) >= _room(claim, capacity):
        return ReplayMemoryFull()
    _counted(connection, _insert(connection, [claim]))
    return True


def _room(claim: Claim, capacity: int) -> int:
    return int(claim.share * capacity)


def _counted(connection: Connection, more: int) -> int:
    """Count so many more; how many there are then."""
    ((number,),) = connection.execute(f"{_COUNT} RETURNING value", (more,)).fetchall()
    return int(number)
