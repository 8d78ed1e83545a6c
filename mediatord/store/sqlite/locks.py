"""
Locks between processes that write to one database: waiting for the lock of SQLite, and a ticket lock that makes it
fair.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
import struct
from collections.abc import Callable
from pathlib import Path
from random import uniform
from time import monotonic, sleep
from typing import TypeVar

T = TypeVar("T")

LOCK_TIMEOUT_SECONDS = 2.5

# SQLite itself waits longer before every retry, so that newcomers would win against those that wait.
_LOCK_RETRY_SECONDS = (0.0003, 0.001)
_LOCK_ERRORS = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}


def is_lock_error(error: BaseException | None) -> bool:
    """Whether another connection held the lock."""
    code = getattr(error, "sqlite_errorcode", None)
    return code is not None and code & 0xFF in _LOCK_ERRORS


def retry_while_locked(work: Callable[[], T], patience: float) -> T:
    """
    Retry while another process holds the lock; blocks the thread.

    :raise sqlite3.Error: it is still held after `patience` seconds, or another error.
    """
    end = monotonic() + patience
    while True:
        try:
            return work()
        except sqlite3.OperationalError as error:
            if not is_lock_error(error) or monotonic() >= end:
                raise
        sleep(uniform(*_LOCK_RETRY_SECONDS))  # nosec B311 # no secret


def begin_immediate(connection: sqlite3.Connection, patience: float) -> None:
    """
    Begin a transaction that may write.

    :raise sqlite3.Error: as :func:`retry_while_locked`.
    """
    retry_while_locked(lambda: connection.execute("BEGIN IMMEDIATE"), patience)


_TICKET_RETRY_SECONDS = (0.0003, 0.001)

# Bytes that are locked, which need not exist in the file: one for drawing a ticket, then one for each ticket.
_COUNTER_BYTE, _FIRST_TICKET_BYTE = 0, 1
_TICKET_STRUCT = struct.Struct("<Q")
# Share of its patience that a writer waits for earlier tickets. Then it competes for SQLite's lock, which guarantees
# exclusion in any case: an earlier ticket may be held by a process that was stopped.
_TICKET_WAIT_SHARE = 0.5


class WriteTicketLock:
    """
    Grants writes in the order of tickets, which are drawn from a file beside the database.

    SQLite's own lock is polled, so a process that has just ended a transaction gets it more easily than those that
    wait. A ticket is a locked byte of the file; the system unlocks those of a process that ends. Where the file
    cannot be used, there are no tickets.

    :param path: of the database.
    """

    def __init__(self, path: Path) -> None:
        self._path = path.with_name(f"{path.name}.writers")
        self._descriptor: int | None = None
        self._ticket: int | None = None
        # Tickets that were waited for in vain, and are not waited for again; numbers are not reused.
        self._skipped: list[int] = []

    def enter(self, patience: float) -> float:
        """
        Wait for all earlier tickets.

        :param patience: seconds to wait at most.
        :return: seconds that are left of them.
        """
        now = monotonic()
        until = now + patience * _TICKET_WAIT_SHARE
        try:
            self._ticket = ticket = self._draw(until)
            while ticket and not self._is_first(ticket):
                if monotonic() >= until:
                    self._skip_first(ticket)
                    break
                sleep(uniform(*_TICKET_RETRY_SECONDS))  # nosec B311 # no secret
        except OSError:
            self.leave()
        return max(0.0, patience - (monotonic() - now))

    def leave(self) -> None:
        """Give the ticket back."""
        ticket, self._ticket = self._ticket, None
        if ticket is not None and self._descriptor is not None:
            fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, _FIRST_TICKET_BYTE + ticket)

    def close(self) -> None:
        """Close the file."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _draw(self, until: float) -> int | None:
        """The next ticket, whose byte is locked; None if there was none in time."""
        file = self._open()
        while not _try_lock_bytes(file, fcntl.LOCK_EX, 1, _COUNTER_BYTE):
            if monotonic() >= until:
                return None
            sleep(_TICKET_RETRY_SECONDS[0])
        try:
            stored = os.pread(file, _TICKET_STRUCT.size, 0)
            ticket = (_TICKET_STRUCT.unpack(stored)[0] if len(stored) == _TICKET_STRUCT.size else 0) % (1 << 60)
            os.pwrite(file, _TICKET_STRUCT.pack(ticket + 1), 0)
            return ticket if _try_lock_bytes(file, fcntl.LOCK_EX, 1, _FIRST_TICKET_BYTE + ticket) else None
        finally:
            fcntl.lockf(file, fcntl.LOCK_UN, 1, _COUNTER_BYTE)

    def _is_first(self, ticket: int) -> bool:
        """Whether all earlier tickets have been given back, except those that are skipped."""
        start = 0
        for skipped in self._skipped:
            if skipped < ticket:
                if not self._are_back(start, skipped):
                    return False
                start = skipped + 1
        return self._are_back(start, ticket)

    def _are_back(self, start: int, end: int) -> bool:
        """Whether the tickets from `start` to before `end` have been given back."""
        if start == end:
            return True
        file = self._open()
        if not _try_lock_bytes(file, fcntl.LOCK_SH, end - start, _FIRST_TICKET_BYTE + start):
            return False
        fcntl.lockf(file, fcntl.LOCK_UN, end - start, _FIRST_TICKET_BYTE + start)
        return True

    def _skip_first(self, ticket: int) -> None:
        """
        Skip the first ticket that is held from now on.

        :param ticket: one that is after it.
        """
        first, later = 0, ticket
        while later - first > 1:
            middle = (first + later) // 2
            if self._is_first(middle):
                first = middle
            else:
                later = middle
        held = [skipped for skipped in self._skipped if not self._are_back(skipped, skipped + 1)]
        self._skipped = sorted({*held, first})

    def _open(self) -> int:
        if self._descriptor is None:
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        return self._descriptor


def _try_lock_bytes(file: int, kind: int, length: int, start: int) -> bool:
    """Lock bytes, unless another process has locked one of them."""
    try:
        fcntl.lockf(file, kind | fcntl.LOCK_NB, length, start)
    except (BlockingIOError, PermissionError):
        return False
    return True
