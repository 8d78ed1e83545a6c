"""
Several operations in one transaction.

A commit costs a wait for the disk whatever is in it, so operations that are there at the same time share one. An
operation is a function of the connection; it has no other effect, so that it can be run again. Until its first
write it may raise a :class:`~mediatord.errors.MediatorError`, which is its answer and nobody else's concern; to
refuse and keep what it wrote it returns an :class:`Outcome`. Any other failure undoes the transaction, and then each
of its operations gets one of its own: a bad one does not take the others with it. A work may have a method
`together(connection, works)`, which does a run of works of its kind at once and returns their outcomes; of a kind are
works with the same `kind`, and those that have none with others of their type.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from mediatord.errors import MediatorError, StoreUnavailable
from mediatord.store.known_queues import StoreConnection, begun, ended
from mediatord.store.locking import begin, locked_out
from mediatord.store.sql_ledger import settle

Work = Callable[[sqlite3.Connection], Any]


@dataclass(slots=True)
class Outcome:
    """
    What became of one operation.

    :param error: what its Deferred fails with; None when `value` is its answer.
    :param cause: what went wrong below, for the log.
    """

    value: Any = None
    error: MediatorError | None = None
    cause: BaseException | None = None

    @property
    def locked_out(self) -> bool:
        """Whether somebody else held the lock for longer than we wait."""
        return locked_out(self.cause)


def commit_together(connection: sqlite3.Connection, works: Sequence[Work], patience: float = 0.0) -> list[Outcome]:
    """
    Do all works, durably when this returns; what cannot be done fails with StoreUnavailable.

    :param patience: seconds for which to wait while another process writes.
    """
    try:
        outcomes = _commit_all(connection, works, patience)
    except _NotBegun as error:
        # None of the works is to blame, so there is no point in trying them one by one.
        return [_failed(error.reason) for _ in works]
    except Exception as error:
        return [_failed(error)] if len(works) == 1 else _commit_each(connection, works, patience)
    return outcomes


class _NotBegun(Exception):
    """The transaction could not be begun."""

    def __init__(self, reason: sqlite3.Error) -> None:
        super().__init__()
        self.reason = reason


def _commit_all(connection: sqlite3.Connection, works: Sequence[Work], patience: float) -> list[Outcome]:
    """:raise _NotBegun: the transaction could not be begun; after any other exception it was rolled back."""
    if connection.in_transaction:
        _roll_back(connection)  # which failed the last time
    queue = connection.queue if isinstance(connection, StoreConnection) else None
    if queue is not None:
        patience = queue.enter(patience)
    try:
        try:
            begin(connection, patience)
        except sqlite3.Error as error:
            raise _NotBegun(error) from None
        begun(connection)
        try:
            outcomes = attempt_all(connection, works)
            settle(connection)
            connection.execute("COMMIT")
        except Exception:
            _roll_back(connection)
            ended(connection, committed=False)
            raise
        ended(connection, committed=True)
        return outcomes
    finally:
        if queue is not None:
            queue.leave()


def read_together(connection: sqlite3.Connection, works: Sequence[Work]) -> list[Outcome]:
    """Do all works on one and the same state of the database; a failing one does not disturb the others."""
    try:
        if connection.in_transaction:
            _roll_back(connection)  # which failed the last time
        connection.execute("BEGIN")
        return [_attempt_reading(connection, work) for work in works]
    except sqlite3.Error as error:
        return [_failed(error) for _ in works]
    finally:
        _roll_back(connection)


def attempt_all(connection: sqlite3.Connection, works: Sequence[Work]) -> list[Outcome]:
    """
    Do works in their order in the transaction that is open; neighbours of a kind that knows how to be done together
    are done so.
    """
    outcomes: list[Outcome] = []
    for _, group in groupby(works, key=_kind):
        run = list(group)
        together = getattr(run[0], "together", None) if len(run) > 1 else None
        if together is None:
            outcomes += [_attempt(connection, work) for work in run]
        else:
            outcomes += together(connection, run)
    return outcomes


def _kind(work: Work) -> object:
    return getattr(work, "kind", None) or type(work)


def _attempt(connection: sqlite3.Connection, work: Work) -> Outcome:
    before = connection.total_changes
    try:
        done = work(connection)
        return done if isinstance(done, Outcome) else Outcome(done)
    except MediatorError as error:
        if connection.total_changes != before:
            raise  # what it wrote must not be committed
        return Outcome(error=error.with_traceback(None))


def _attempt_reading(connection: sqlite3.Connection, work: Work) -> Outcome:
    try:
        return Outcome(work(connection))
    except Exception as error:
        return _failed(error)


def _commit_each(connection: sqlite3.Connection, works: Sequence[Work], patience: float) -> list[Outcome]:
    outcomes: list[Outcome] = []
    for work in works:
        if outcomes and outcomes[-1].locked_out:
            outcomes.append(replace(outcomes[-1], error=StoreUnavailable()))  # each would wait as long for the lock
        else:
            outcomes.extend(commit_together(connection, [work], patience))
    return outcomes


def _roll_back(connection: sqlite3.Connection) -> None:
    if connection.in_transaction:
        try:
            connection.execute("ROLLBACK")
        except sqlite3.Error:
            pass  # it is tried again before the next BEGIN, and the thread replaces a connection that stays like this


def _failed(error: Exception) -> Outcome:
    if isinstance(error, MediatorError):
        return Outcome(error=error.with_traceback(None))
    return Outcome(error=StoreUnavailable(), cause=error)
