"""How much room a database may take, and a reserve with which messages can be deleted on a full disk."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from pathlib import Path

# Of the disk, what is left to others: a share of it, within bounds, and no more than another share of a small one.
_SHARE, _LEAST, _MOST, _SMALL_DISK = 0.05, 256 << 20, 1 << 30, 0.1
# What a disk must have beyond that for more to be taken again.
_HYSTERESIS = 0.125
# Bytes: of the file beside the database, and those that the write-ahead log has on disk beforehand.
RESERVE_BYTES = 8 << 20
_RESERVE_SHARE = 1 / 32

_KEEP_SIZE = 1  # FALLOC_FL_KEEP_SIZE


def allocate(path: Path, size: int) -> bool:
    """
    Have the file system give so many bytes to a file, whose length and content stay as they are.

    Not `posix_fallocate`: where the file system cannot do it, that writes into the file.

    :return: whether it did.
    """
    try:
        fallocate = ctypes.CDLL(None, use_errno=True).fallocate
    except AttributeError:
        return False
    fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW)
    try:
        return int(fallocate(descriptor, _KEEP_SIZE, 0, size)) == 0
    finally:
        os.close(descriptor)


class DiskSpace:
    """
    Says whether the database may grow.

    It may not when less than `min_free` would be left of the disk, or when it has `max_bytes`. Pages that are free
    inside of it count as room, since they are written to first. The reserve consists of blocks that the write-ahead
    log has beforehand, which nobody else can take, and of a file that is deleted when the disk is full.

    :param path: of the database.
    :param max_bytes: of the database; None for as much as the disk allows.
    :param min_free: bytes of the disk that are left to others; None for a share of the disk.
    """

    def __init__(self, path: Path, *, max_bytes: int | None = None, min_free: int | None = None) -> None:
        self._path = path.absolute()
        self._log = self._path.with_name(f"{path.name}-wal")
        self._reserve = self._path.with_name(f"{path.name}.reserve")
        self._max_bytes = max_bytes
        self._min_free = min_free
        self._full = False
        self._exhausted = False
        self._reusable = 0

    @property
    def wants_reusable(self) -> bool:
        """Whether it matters how much is free inside the database."""
        return self._full

    def reusable(self, size: int) -> None:
        """So many bytes are free inside the database."""
        self._reusable = size

    def is_full(self) -> bool:
        """Whether the database may not grow, as of now."""
        try:
            disk = os.statvfs(self._path.parent)
            taken = self._path.stat().st_size
        except OSError:
            return self._full
        free, total = disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize
        min_free = self._floor(total)
        reserve = _reserve_bytes(total)
        if free < reserve:
            self._give_up()
        if self._exhausted:
            # What is free inside the database is no help: there is no room to write down what changes.
            self._exhausted = free < 3 * reserve
        margin = int(_HYSTERESIS * min_free) if self._full else 0
        short = free + self._reusable < min_free + margin
        over = self._max_bytes is not None and taken - self._reusable >= self._max_bytes
        self._full = self._exhausted or short or over
        if not self._full:
            self._reusable = 0
        return self._full

    def exhausted(self) -> None:
        """SQLite could not write for want of room."""
        self._exhausted = True
        self._give_up()

    def provide(self) -> None:
        """Make the reserve if there is room for it; where the file system cannot do so, there is none."""
        if self._full:
            return
        with suppress(OSError):
            disk = os.statvfs(self._path.parent)
            free, total = disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize
            size = _reserve_bytes(total)
            if free < self._floor(total) + 3 * size:
                return
            if os.stat(self._log).st_blocks * 512 < size:
                allocate(self._log, size)
            if not self._reserve.exists():
                os.close(os.open(self._reserve, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
                allocate(self._reserve, size)

    def _floor(self, total: int) -> int:
        if self._min_free is not None:
            return self._min_free
        return int(min(max(_SHARE * total, _LEAST), _MOST, _SMALL_DISK * total))

    def _give_up(self) -> None:
        with suppress(OSError):
            self._reserve.unlink(missing_ok=True)


def _reserve_bytes(total: int) -> int:
    return int(min(RESERVE_BYTES, _RESERVE_SHARE * total))
