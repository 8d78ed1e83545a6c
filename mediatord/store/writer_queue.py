"""First come, first served among the processes that write to one database."""

from __future__ import annotations

import fcntl
import os
import struct
from pathlib import Path
from random import uniform
from time import monotonic, sleep

_PAUSE_SECONDS = (0.0003, 0.001)

# Bytes of the file that are locked, which need not exist: one for drawing a ticket, then one for each ticket.
_COUNTER, _TICKETS = 0, 1
_NUMBER = struct.Struct("<Q")
# Of the time a writer may wait, what it waits in line. Then it competes for SQLite's lock, which keeps transactions
# apart in any case: whoever is ahead may be a process that was stopped.
_IN_LINE = 0.5


class WriterQueue:
    """
    Hands out tickets by a file beside the database, and waits until those before have been given back.

    SQLite's own lock is polled for, so that a process which has just ended a transaction gets it more easily than
    those which wait for it. A ticket is a locked byte of the file; the system unlocks those of a process that ends.

    Where the file cannot be used, nobody waits in line.

    :param path: of the database.
    """

    def __init__(self, path: Path) -> None:
        self._path = path.with_name(f"{path.name}.writers")
        self._descriptor: int | None = None
        self._ticket: int | None = None
        # Those that were waited for in vain, and are not waited for again. A number is drawn only once.
        self._skipped: list[int] = []

    def enter(self, patience: float) -> float:
        """Wait in line. :param patience: seconds to wait at most. :return: seconds that are left of them."""
        now = monotonic()
        until = now + patience * _IN_LINE
        try:
            self._ticket = ticket = self._draw(until)
            while ticket and not self._is_first(ticket):
                if monotonic() >= until:
                    self._skip_first(ticket)
                    break
                sleep(uniform(*_PAUSE_SECONDS))  # nosec B311 # no secret
        except OSError:
            self.leave()
        return max(0.0, patience - (monotonic() - now))

    def leave(self) -> None:
        """Let the next one go on."""
        ticket, self._ticket = self._ticket, None
        if ticket is not None and self._descriptor is not None:
            fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, _TICKETS + ticket)

    def close(self) -> None:
        """Let go of the file."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _draw(self, until: float) -> int | None:
        """The next ticket, whose byte is locked; None if there was none to be had in time."""
        file = self._open()
        while not _lock(file, fcntl.LOCK_EX, 1, _COUNTER):
            if monotonic() >= until:
                return None
            sleep(_PAUSE_SECONDS[0])
        try:
            stored = os.pread(file, _NUMBER.size, 0)
            ticket = (_NUMBER.unpack(stored)[0] if len(stored) == _NUMBER.size else 0) % (1 << 60)
            os.pwrite(file, _NUMBER.pack(ticket + 1), 0)
            return ticket if _lock(file, fcntl.LOCK_EX, 1, _TICKETS + ticket) else None
        finally:
            fcntl.lockf(file, fcntl.LOCK_UN, 1, _COUNTER)

    def _is_first(self, ticket: int) -> bool:
        """Whether all tickets before this one have been given back, but for those that are skipped."""
        start = 0
        for skipped in self._skipped:
            if skipped < ticket:
                if not self._are_back(start, skipped):
                    return False
                start = skipped + 1
        return self._are_back(start, ticket)

    def _are_back(self, start: int, end: int) -> bool:
        """Whether the tickets from one to before another have been given back."""
        if start == end:
            return True
        file = self._open()
        if not _lock(file, fcntl.LOCK_SH, end - start, _TICKETS + start):
            return False
        fcntl.lockf(file, fcntl.LOCK_UN, end - start, _TICKETS + start)
        return True

    def _skip_first(self, ticket: int) -> None:
        """From now on, do not wait for the first ticket in line. :param ticket: one that is after it."""
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


def _lock(file: int, kind: int, length: int, start: int) -> bool:
    """Lock some bytes, unless another process has one of them."""
    try:
        fcntl.lockf(file, kind | fcntl.LOCK_NB, length, start)
    except (BlockingIOError, PermissionError):
        return False
    return True
