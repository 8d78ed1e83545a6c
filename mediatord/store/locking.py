"""Waiting for the lock that only one process at a time has on the database."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from random import uniform
from time import monotonic, sleep
from typing import TypeVar

T = TypeVar("T")

PATIENCE_SECONDS = 2.5

# SQLite itself would wait longer and longer between two tries, so that who came first loses against who just came.
_PAUSE_SECONDS = (0.0003, 0.001)
_LOCKED_OUT = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}


def locked_out(error: BaseException | None) -> bool:
    """Whether somebody else held the lock."""
    code = getattr(error, "sqlite_errorcode", None)
    return code is not None and code & 0xFF in _LOCKED_OUT


def patiently(work: Callable[[], T], patience: float) -> T:
    """
    Try again and again while somebody else holds the lock; in a thread that may be kept waiting.

    :raise sqlite3.Error: it is still held after so many seconds, or something else is the matter.
    """
    end = monotonic() + patience
    while True:
        try:
            return work()
        except sqlite3.OperationalError as error:
            if not locked_out(error) or monotonic() >= end:
                raise
        sleep(uniform(*_PAUSE_SECONDS))  # nosec B311 # no secret


def begin(connection: sqlite3.Connection, patience: float) -> None:
    """
    Begin a transaction that may write.

    :raise sqlite3.Error: as :func:`patiently`.
    """
    patiently(lambda: connection.execute("BEGIN IMMEDIATE"), patience)
