"""Disk space of a database: its limits, and a reserve for deletions on a full disk."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

# Operations that let the store grow; the others are performed on a full disk, so that messages can be deleted.
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
        "set_device",
        "put_v1_connection",
    }
)
# Share of the disk that is left free, its bounds, and its maximum as a share of a small disk.
_MIN_FREE_SHARE, _MIN_FREE_FLOOR, _MIN_FREE_CEILING, _SMALL_DISK_SHARE = 0.05, 256 << 20, 1 << 30, 0.1
# Share by which free space must exceed the minimum, and the database be below its limit, for it to grow again.
_HYSTERESIS = 0.125
_MAX_HYSTERESIS_BYTES = 64 << 20
# Bytes that database and write-ahead log have on disk beyond their ends, each.
RESERVE_BYTES = 8 << 20
_RESERVE_SHARE = 1 / 16
_BLOCK_BYTES = 512  # of st_blocks

_FALLOC_FL_KEEP_SIZE = 1  # FALLOC_FL_KEEP_SIZE
# Loaded once: every further CDLL leaves reference cycles with classes of its own.
_fallocate = getattr(ctypes.CDLL(None), "fallocate", None)
if _fallocate is not None:
    _fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


@dataclass(frozen=True, slots=True)
class SpaceLimits:
    """
    Limits of the disk space of a database.

    :param max_bytes: of the database, without journal and write-ahead log; None for no limit.
    :param min_free_bytes: of the disk, left free for others; None for a share of the disk.
    """

    max_bytes: int | None = None
    min_free_bytes: int | None = None

    def min_free(self, total: int) -> int:
        """Bytes of a disk of `total` bytes to be left free."""
        if self.min_free_bytes is not None:
            return self.min_free_bytes
        return int(min(max(_MIN_FREE_SHARE * total, _MIN_FREE_FLOOR), _MIN_FREE_CEILING, _SMALL_DISK_SHARE * total))

    def exceeded(self, taken: int, free: int | None, total: int, *, was_exceeded: bool) -> bool:
        """
        Whether the database may not grow.

        :param taken: bytes of the database that are in use.
        :param free: bytes that it can still write to; None if unknown.
        :param total: bytes of the disk.
        :param was_exceeded: then more than the minimum has to be free again.
        """
        margin = _HYSTERESIS if was_exceeded else 0.0
        min_free = self.min_free(total)
        if free is not None and free < min_free + int(margin * min_free):
            return True
        return self.max_bytes is not None and taken >= self.max_bytes - min(
            int(margin * self.max_bytes), _MAX_HYSTERESIS_BYTES
        )


def preallocate(descriptor: int, start: int, size: int) -> None:
    """
    Allocate disk blocks to a part of a file, whose length and content stay the same.

    `posix_fallocate` writes into the file where the file system does not support this; here, nothing happens then.
    """
    if _fallocate is not None:
        _fallocate(descriptor, _FALLOC_FL_KEEP_SIZE, start, size)


class DiskSpaceMonitor:
    """
    Checks whether the database may grow: it must be below its limit, and enough of the disk must be free.

    Free pages inside the database count as free space, since they are written to first. Database and write-ahead log
    have a reserve of blocks beyond their ends, so that deletions can be written on a full disk.

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
        """Record the bytes that are free inside the database."""
        self._reusable = size

    def opened(self) -> None:
        """Start after SQLite has opened the database."""
        if self._descriptor is None:
            self._descriptor = os.open(self._path, os.O_WRONLY)
        self.provide()

    def closed(self) -> None:
        """
        Stop after SQLite has closed the database. Not before: a process that closes a file loses all its locks on it,
        including those of SQLite.
        """
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def is_full(self) -> bool:
        """Whether the database may not grow at the moment."""
        try:
            free, total = self._disk()
            taken = self._path.stat().st_size
        except OSError:
            return self._full
        if self._exhausted:
            # Free pages do not help: there is no space for the write-ahead log.
            self._exhausted = free < 2 * _get_reserve_bytes(total)
        self._full = self._exhausted or self._limits.exceeded(
            taken - self._reusable, free + self._reusable, total, was_exceeded=self._full
        )
        return self._full

    def exhausted(self) -> None:
        """Record that SQLite found no space to write to."""
        self._exhausted = True

    def provide(self) -> None:
        """Allocate the reserve of both files, if there is enough space."""
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

    @contextmanager
    def keep_reserve(self) -> Iterator[None]:
        """
        Allocate the reserve again that a checkpoint inside frees: a complete one truncates the database. If it was
        there, it is allocated however little space is left, before others take it.
        """
        reserve, was_there = 0, False
        with suppress(OSError):
            reserve = _get_reserve_bytes(self._disk()[1])
            was_there = self._descriptor is not None and _has_reserve(self._descriptor, reserve)
        try:
            yield
        finally:
            if was_there and self._descriptor is not None:
                with suppress(OSError):
                    _extend_reserve(self._descriptor, reserve)
            self.provide()

    def _disk(self) -> tuple[int, int]:
        """Bytes of the disk that are free, and all."""
        disk = os.statvfs(self._path.parent)
        return disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize


def _extend_reserve(descriptor: int, size: int) -> None:
    """Extend the reserve beyond the end of a file, unless at least half of it is there."""
    if not _has_reserve(descriptor, size):
        # Only beyond the end: the blocks before it, which are there, would be looked up one by one.
        preallocate(descriptor, os.fstat(descriptor).st_size, size)


def _has_reserve(descriptor: int, size: int) -> bool:
    there = os.fstat(descriptor)
    return there.st_blocks * _BLOCK_BYTES >= there.st_size + size // 2


def _get_reserve_bytes(total: int) -> int:
    return int(min(RESERVE_BYTES, _RESERVE_SHARE * total))
