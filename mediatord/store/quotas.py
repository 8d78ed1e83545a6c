"""
How much room a database may take, and a reserve with which messages can be deleted on a full disk.

How much of an allowance is left, worked out from what was taken of it.

Takings are put together that come within a small part of the period, as if all had come at the end of it, so that
there are no more than some hundred lots however much is taken.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import ceil
from pathlib import Path

# Operations after which the store holds more than before; without the others nothing could be fetched and deleted.
GROWING_OPERATIONS = frozenset(
    {
        "enqueue",
        "grant",
        "update",
        "remember_did",
        "move",
        "save_contract",
        "request_contract",
        "deliver",
        "save_events",
        "update_tags",
        "publish",
    }
)
# Of the disk, what is left to others: a share of it, within bounds, and no more than another share of a small one.
_MIN_FREE_SHARE, _MIN_FREE_FLOOR, _MIN_FREE_CEILING, _SMALL_DISK_SHARE = 0.05, 256 << 20, 1 << 30, 0.1
# What a disk must have beyond that for more to be taken again, and by what a database must be below its bound.
_HYSTERESIS = 0.125
_MAX_HYSTERESIS_BYTES = 64 << 20
# Bytes that database and write-ahead log have on disk beyond their ends, each.
RESERVE_BYTES = 8 << 20
_RESERVE_SHARE = 1 / 16
_BLOCK_BYTES = 512  # of st_blocks

_FALLOC_FL_KEEP_SIZE = 1  # FALLOC_FL_KEEP_SIZE


@dataclass(frozen=True, slots=True)
class SpaceLimits:
    """
    How much space the database may take.

    :param max_bytes: of the database, without its journal or write-ahead log; None for no such bound.
    :param min_free_bytes: of the disk, to be left to others; None for a share of the disk.
    """

    max_bytes: int | None = None
    min_free_bytes: int | None = None

    def min_free(self, total: int) -> int:
        """Bytes to be left free of a disk of `total` bytes."""
        if self.min_free_bytes is not None:
            return self.min_free_bytes
        return int(min(max(_MIN_FREE_SHARE * total, _MIN_FREE_FLOOR), _MIN_FREE_CEILING, _SMALL_DISK_SHARE * total))

    def exceeded(self, taken: int, free: int | None, total: int, *, was_exceeded: bool) -> bool:
        """
        Whether the database may not grow.

        :param taken: bytes of the database that are in use.
        :param free: bytes that it can still write to; None where that is not known.
        :param total: bytes of the disk.
        :param was_exceeded: then more than the least room has to be there again.
        """
        margin = _HYSTERESIS if was_exceeded else 0.0
        min_free = self.min_free(total)
        if free is not None and free < min_free + int(margin * min_free):
            return True
        return self.max_bytes is not None and taken >= self.max_bytes - min(
            int(margin * self.max_bytes), _MAX_HYSTERESIS_BYTES
        )


def preallocate(descriptor: int, size: int) -> None:
    """
    Have the file system give so many bytes to a file, whose length and content stay as they are.

    Not `posix_fallocate`: where the file system cannot do it, that writes into the file; here, nothing happens.
    """
    try:
        fallocate = ctypes.CDLL(None, use_errno=True).fallocate
    except AttributeError:
        return
    fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    fallocate(descriptor, _FALLOC_FL_KEEP_SIZE, 0, size)


class DiskSpaceMonitor:
    """
    Says whether the database may grow.

    It may not when too little would be left of the disk, or when it is too large. Pages that are free inside of it
    count as room, since they are written to first. Database and write-ahead log have some blocks beyond
    their ends, which nobody else can take, so that what is deleted can be written down on a full disk.

    :param path: of the database.
    """

    def __init__(self, path: Path, limits: SpaceLimits) -> None:
        self._path = path.absolute()
        self._log = self._path.with_name(f"{path.name}-wal")
        self._limits = limits
        self._descriptor: int | None = None
        self._full = False
        self._exhausted = False
        self._reusable = 0

    def reusable(self, size: int) -> None:
        """So many bytes are free inside the database."""
        self._reusable = size

    def opened(self) -> None:
        """SQLite has opened the database."""
        if self._descriptor is None:
            self._descriptor = os.open(self._path, os.O_WRONLY)
        self.provide()

    def closed(self) -> None:
        """
        SQLite has closed the database. Not before: when a process closes a file, it loses all locks that it
        has on it, also those of SQLite.
        """
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def is_full(self) -> bool:
        """Whether the database may not grow, as of now."""
        try:
            free, total = self._disk()
            taken = self._path.stat().st_size
        except OSError:
            return self._full
        if self._exhausted:
            # What is free inside the database is no help: there is no room to write down what changes.
            self._exhausted = free < 2 * _get_reserve_bytes(total)
        self._full = self._exhausted or self._limits.exceeded(
            taken - self._reusable, free + self._reusable, total, was_exceeded=self._full
        )
        return self._full

    def exhausted(self) -> None:
        """SQLite could not write for want of room."""
        self._exhausted = True

    def provide(self) -> None:
        """See to the blocks beyond the ends of the files, if there is room for them."""
        with suppress(OSError):
            free, total = self._disk()
            reserve = _get_reserve_bytes(total)
            if self._descriptor is None or free < self._limits.min_free(total) + 2 * reserve:
                return
            _extend_reserve(self._descriptor, reserve)
            log = os.open(self._log, os.O_WRONLY)
            try:
                _extend_reserve(log, reserve)
            finally:
                os.close(log)  # SQLite has no locks on this one

    def _disk(self) -> tuple[int, int]:
        """Bytes that are free, and that there are."""
        disk = os.statvfs(self._path.parent)
        return disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize


def _extend_reserve(descriptor: int, size: int) -> None:
    """Have so many bytes beyond the end of a file, or at least half of them."""
    there = os.fstat(descriptor)
    if there.st_blocks * _BLOCK_BYTES < there.st_size + size // 2:
        preallocate(descriptor, there.st_size + size)


def _get_reserve_bytes(total: int) -> int:
    return int(min(RESERVE_BYTES, _RESERVE_SHARE * total))


# When it was taken, and how much; oldest first.
QuotaUse = tuple[float, int]

QUOTA_WINDOW_SLOTS = 128


def drop_expired_uses(lots: Sequence[QuotaUse], period: float, now: float) -> list[QuotaUse]:
    """Those that were taken less than a period ago."""
    return [lot for lot in lots if lot[0] > now - period]


def get_quota_wait(lots: Sequence[QuotaUse], amount: int, *, limit: int, period: float, now: float) -> float:
    """
    Seconds until so much more may be had; 0.0 when that is now, `period` when it is more than the limit.

    :param lots: all that still count.
    """
    if amount > limit:
        return period
    excess = sum([taken for _, taken in lots]) + amount - limit
    if excess <= 0:
        return 0.0
    for at, taken in lots:
        excess -= taken
        if excess <= 0:
            return at + period - now
    return period


def add_quota_use(lots: Sequence[QuotaUse], amount: int, *, period: float, now: float) -> list[QuotaUse]:
    """All of them and one more."""
    slot = period / QUOTA_WINDOW_SLOTS
    at = ceil(now / slot) * slot
    if lots and lots[-1][0] >= at:
        return [*lots[:-1], (lots[-1][0], lots[-1][1] + amount)]
    return [*lots, (at, amount)]


def remove_latest_use(lots: Sequence[QuotaUse], amount: int) -> list[QuotaUse]:
    """What is left when the latest takings are undone, so much together."""
    left = list(lots)
    while left and amount > 0:
        at, taken = left.pop()
        if taken > amount:
            left.append((at, taken - amount))
        amount -= taken
    return left
