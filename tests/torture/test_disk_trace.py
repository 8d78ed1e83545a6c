"""What the power cut of the torture leaves of a file: all that was synced, and of the rest whole sectors."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.torture.disk_trace import SECTOR, DiskOperation, DiskState, DiskTrace, TraceEntry, read_trace

OLD, NEW = b"o" * (4 * SECTOR), b"n" * (4 * SECTOR)


class Site:
    """A directory, and what is done in it."""

    def __init__(self, root: Path) -> None:
        self.base, self.target, self.path = root / "base", root / "target", root / "tape"
        self.base.mkdir()
        self.target.mkdir()
        DiskTrace.blank(self.path)
        self.trace = DiskTrace(self.path)

    def do(self, act: DiskOperation, name: str, at: int = 0, data: bytes = b"") -> None:
        """Note it."""
        self.trace.append(TraceEntry(act, name, at, data))

    def sync(self, name: str, number: int = 0) -> None:
        """From beginning to end."""
        self.do(DiskOperation.SYNC_BEGUN, name, number)
        self.do(DiskOperation.SYNC_DONE, name, number)

    def cut(self, seed: int, kept: float = 0.5) -> dict[str, bytes]:
        """The files after a power cut."""
        DiskState(self.base, self.path, random.Random(seed), kept).replace(self.target)
        return {path.name: path.read_bytes() for path in self.target.iterdir()}

    def contents(self, name: str, kept: float = 0.5) -> set[bytes | None]:
        """What a file may come to."""
        return {self.cut(seed, kept).get(name) for seed in range(100)}


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """With a file that was there before."""
    site = Site(tmp_path)
    (site.base / "db").write_bytes(OLD)
    return site


def test_what_was_noted_is_read(site: Site) -> None:
    """In order, also when the trace is opened again."""
    site.do(DiskOperation.WRITE, "db", 7, b"data")
    DiskTrace(site.path).append(TraceEntry(DiskOperation.TRUNCATE, "db-wal", 9))
    assert [*read_trace(site.path)] == [
        TraceEntry(DiskOperation.WRITE, "db", 7, b"data"),
        TraceEntry(DiskOperation.TRUNCATE, "db-wal", 9),
    ]


def test_what_was_synced_is_there(site: Site) -> None:
    """Whatever becomes of the rest."""
    site.do(DiskOperation.WRITE, "db", 0, NEW)
    site.sync("db")
    assert site.contents("db") == {NEW}


def test_what_was_not_synced_is_torn_between_sectors(site: Site) -> None:
    """Each sector is the old or the new one; all combinations happen."""
    site.do(DiskOperation.WRITE, "db", 0, NEW)
    sectors = {SECTOR * b"o", SECTOR * b"n"}
    found = site.contents("db")
    assert len(found) == 2**4
    assert {one[at : at + SECTOR] for one in found if one for at in range(0, len(NEW), SECTOR)} == sectors


def test_sectors_are_those_of_the_disk(site: Site) -> None:
    """A write that begins inside one leaves what stands before it, and is in two parts."""
    site.do(DiskOperation.WRITE, "db", SECTOR - 2, b"1234")
    assert {one[SECTOR - 3 : SECTOR + 3] for one in site.contents("db") if one} == {
        *(b"oooooo", b"o12ooo", b"ooo34o", b"o1234o"),
    }


def test_a_sync_covers_what_was_there_when_it_began(site: Site) -> None:
    """What is written while it lasts may be lost."""
    site.do(DiskOperation.WRITE, "db", 0, b"1")
    site.do(DiskOperation.SYNC_BEGUN, "db", 0)
    site.do(DiskOperation.WRITE, "db", 1, b"2")
    site.do(DiskOperation.SYNC_DONE, "db", 0)
    assert {one[:2] for one in site.contents("db") if one} == {b"1o", b"12"}


def test_a_sync_that_did_not_end_says_nothing(site: Site) -> None:
    """Nobody was told that it is done."""
    site.do(DiskOperation.WRITE, "db", 0, b"1")
    site.do(DiskOperation.SYNC_BEGUN, "db", 0)
    assert {one[:1] for one in site.contents("db") if one} == {b"o", b"1"}


def test_a_sync_of_one_file_says_nothing_about_others(site: Site) -> None:
    """Nor about their being there."""
    site.do(DiskOperation.WRITE, "db-wal", 0, b"1")
    site.sync("db")
    assert site.contents("db-wal") == {None, b"1"}


def test_truncation(site: Site) -> None:
    """It may be lost as a write may, and is certain once it was synced."""
    site.do(DiskOperation.TRUNCATE, "db", 3)
    assert site.contents("db") == {OLD, b"ooo"}
    site.sync("db")
    assert site.contents("db") == {b"ooo"}


def test_what_was_deleted_may_come_back(site: Site) -> None:
    """Until the directory was synced."""
    site.do(DiskOperation.DELETE, "db")
    assert site.contents("db") == {OLD, None}
    site.sync("db-wal")
    assert site.contents("db") == {OLD, None}
    site.sync("")
    assert site.contents("db") == {None}


def test_a_hole(site: Site) -> None:
    """What was never written between two sectors reads as zeros."""
    site.do(DiskOperation.WRITE, "db-wal", SECTOR, b"2")
    site.sync("db-wal")
    assert site.contents("db-wal") == {bytes(SECTOR) + b"2"}


@pytest.mark.parametrize(("kept", "expected"), [(0.0, {OLD}), (1.0, {NEW})])
def test_how_much_is_kept(site: Site, kept: float, expected: set[bytes]) -> None:
    """None or all of what was not synced, if so wished."""
    site.do(DiskOperation.WRITE, "db", 0, NEW)
    assert site.contents("db", kept) == expected
