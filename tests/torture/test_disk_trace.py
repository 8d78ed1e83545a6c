"""The reconstructed disk has all synced data, and of the rest whole sectors."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.torture.disk_trace import SECTOR, DiskOperation, DiskState, DiskTrace, TraceEntry, read_trace

OLD, NEW = b"o" * (4 * SECTOR), b"n" * (4 * SECTOR)


class TracedDirectory:
    """A directory and its trace."""

    def __init__(self, root: Path) -> None:
        self.base, self.target, self.path = root / "base", root / "target", root / "trace"
        self.base.mkdir()
        self.target.mkdir()
        DiskTrace.create(self.path)
        self.trace = DiskTrace(self.path)

    def append(self, operation: DiskOperation, name: str, at: int = 0, data: bytes = b"") -> None:
        """Append an operation."""
        self.trace.append(TraceEntry(operation, name, at, data))

    def sync(self, name: str, number: int = 0) -> None:
        """A complete sync."""
        self.append(DiskOperation.SYNC_BEGUN, name, number)
        self.append(DiskOperation.SYNC_DONE, name, number)

    def cut_power(self, seed: int, kept: float = 0.5) -> dict[str, bytes]:
        """Files after a power cut."""
        DiskState(self.base, self.path, random.Random(seed), kept).replace(self.target)
        return {path.name: path.read_bytes() for path in self.target.iterdir()}

    def possible_contents(self, name: str, kept: float = 0.5) -> set[bytes | None]:
        """Possible contents of a file."""
        return {self.cut_power(seed, kept).get(name) for seed in range(100)}


@pytest.fixture
def traced_directory(tmp_path: Path) -> TracedDirectory:
    """With a file that existed before."""
    traced_directory = TracedDirectory(tmp_path)
    (traced_directory.base / "db").write_bytes(OLD)
    return traced_directory


def test_entries_are_read_in_order(traced_directory: TracedDirectory) -> None:
    """Also when the trace is reopened."""
    traced_directory.append(DiskOperation.WRITE, "db", 7, b"data")
    DiskTrace(traced_directory.path).append(TraceEntry(DiskOperation.TRUNCATE, "db-wal", 9))
    assert [*read_trace(traced_directory.path)] == [
        TraceEntry(DiskOperation.WRITE, "db", 7, b"data"),
        TraceEntry(DiskOperation.TRUNCATE, "db-wal", 9),
    ]


def test_synced_data_is_there(traced_directory: TracedDirectory) -> None:
    """Whatever becomes of the rest."""
    traced_directory.append(DiskOperation.WRITE, "db", 0, NEW)
    traced_directory.sync("db")
    assert traced_directory.possible_contents("db") == {NEW}


def test_unsynced_write_is_torn_between_sectors(traced_directory: TracedDirectory) -> None:
    """Each sector is old or new; all combinations occur."""
    traced_directory.append(DiskOperation.WRITE, "db", 0, NEW)
    sectors = {SECTOR * b"o", SECTOR * b"n"}
    found = traced_directory.possible_contents("db")
    assert len(found) == 2**4
    assert {one[at : at + SECTOR] for one in found if one for at in range(0, len(NEW), SECTOR)} == sectors


def test_writes_are_split_at_disk_sectors(traced_directory: TracedDirectory) -> None:
    """A write that begins within a sector keeps the bytes before it, and has two parts."""
    traced_directory.append(DiskOperation.WRITE, "db", SECTOR - 2, b"1234")
    assert {one[SECTOR - 3 : SECTOR + 3] for one in traced_directory.possible_contents("db") if one} == {
        *(b"oooooo", b"o12ooo", b"ooo34o", b"o1234o"),
    }


def test_sync_covers_earlier_writes_only(traced_directory: TracedDirectory) -> None:
    """Data written while it runs may be lost."""
    traced_directory.append(DiskOperation.WRITE, "db", 0, b"1")
    traced_directory.append(DiskOperation.SYNC_BEGUN, "db", 0)
    traced_directory.append(DiskOperation.WRITE, "db", 1, b"2")
    traced_directory.append(DiskOperation.SYNC_DONE, "db", 0)
    assert {one[:2] for one in traced_directory.possible_contents("db") if one} == {b"1o", b"12"}


def test_incomplete_sync_guarantees_nothing(traced_directory: TracedDirectory) -> None:
    """Its caller was not answered."""
    traced_directory.append(DiskOperation.WRITE, "db", 0, b"1")
    traced_directory.append(DiskOperation.SYNC_BEGUN, "db", 0)
    assert {one[:1] for one in traced_directory.possible_contents("db") if one} == {b"o", b"1"}


def test_sync_covers_one_file_only(traced_directory: TracedDirectory) -> None:
    """Neither the contents nor the existence of others."""
    traced_directory.append(DiskOperation.WRITE, "db-wal", 0, b"1")
    traced_directory.sync("db")
    assert traced_directory.possible_contents("db-wal") == {None, b"1"}


def test_truncation_may_be_lost_until_synced(traced_directory: TracedDirectory) -> None:
    """As a write."""
    traced_directory.append(DiskOperation.TRUNCATE, "db", 3)
    assert traced_directory.possible_contents("db") == {OLD, b"ooo"}
    traced_directory.sync("db")
    assert traced_directory.possible_contents("db") == {b"ooo"}


def test_deleted_file_may_reappear(traced_directory: TracedDirectory) -> None:
    """Until the directory is synced."""
    traced_directory.append(DiskOperation.DELETE, "db")
    assert traced_directory.possible_contents("db") == {OLD, None}
    traced_directory.sync("db-wal")
    assert traced_directory.possible_contents("db") == {OLD, None}
    traced_directory.sync("")
    assert traced_directory.possible_contents("db") == {None}


def test_hole_reads_as_zeros(traced_directory: TracedDirectory) -> None:
    """Between two written sectors."""
    traced_directory.append(DiskOperation.WRITE, "db-wal", SECTOR, b"2")
    traced_directory.sync("db-wal")
    assert traced_directory.possible_contents("db-wal") == {bytes(SECTOR) + b"2"}


@pytest.mark.parametrize(("kept", "expected"), [(0.0, {OLD}), (1.0, {NEW})])
def test_share_of_kept_sectors(traced_directory: TracedDirectory, kept: float, expected: set[bytes]) -> None:
    """None or all unsynced sectors, if requested."""
    traced_directory.append(DiskOperation.WRITE, "db", 0, NEW)
    assert traced_directory.possible_contents("db", kept) == expected
