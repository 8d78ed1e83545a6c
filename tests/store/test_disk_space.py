"""The disk-space monitor of a database file."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

from mediatord.store.disk_space import DiskSpaceMonitor, SpaceLimits, preallocate

TOTAL = 1 << 40


class FakeDisk(DiskSpaceMonitor):
    """A monitor of a disk whose free space the test sets; None if it cannot be read."""

    free: int | None = 1 << 39

    def _disk(self) -> tuple[int, int]:
        if self.free is None:
            raise OSError
        return self.free, TOTAL


@pytest.fixture
def disk(tmp_path: Path) -> FakeDisk:
    """A disk with space, and a database of 1,000 bytes on it."""
    (tmp_path / "database").write_bytes(bytes(1000))
    return FakeDisk(tmp_path / "database", SpaceLimits(min_free_bytes=1000))


def test_failed_write_counts_until_space_is_free(disk: FakeDisk) -> None:
    """After SQLite found no space the database is full until twice the reserve is free, whatever the limit."""
    assert not disk.is_full()
    disk.exhausted()
    disk.free = 2000
    assert disk.is_full()
    disk.free = 1 << 39
    assert not disk.is_full()


def test_keeps_last_answer_if_disk_cannot_be_read(disk: FakeDisk) -> None:
    """Neither a full nor a usable database changes while the file system gives an error."""
    disk.free = None
    assert not disk.is_full()
    disk.free = 999
    assert disk.is_full()
    disk.free = None
    assert disk.is_full()


def test_preallocation_leaves_no_reference_cycles(tmp_path: Path) -> None:
    """It is called with every checkpoint, and objects of its age are rarely garbage-collected."""
    with (tmp_path / "database").open("wb") as file:
        while gc.collect():  # finalizing garbage of other tests may create more
            pass
        gc.disable()
        try:
            preallocate(file.fileno(), 0, 4096)
            assert gc.collect() == 0
        finally:
            gc.enable()
