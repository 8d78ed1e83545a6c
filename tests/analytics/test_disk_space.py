"""Room on disk: looked for before a run, and missing in the middle of it."""

from __future__ import annotations

from datetime import UTC, date, datetime
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from analytics.errors import EXIT_FAILED, AnalyticsError
from analytics.reading.files import FileSystem
from analytics.reading.segments import Segment
from analytics.run_plan import DiskNeeds, check_disk_space, estimate_disk_needs

MIB = 1 << 20
GIB = 1 << 30


class FakeDiskSpace:
    """Files of disks with so much free, by the beginning of the path; it can be asked for nothing else."""

    def __init__(self, **free: int) -> None:
        self._free = free

    def get_free_bytes(self, url: str) -> int:
        [found] = [free for name, free in self._free.items() if f"/{name}" in url]
        return found

    def get_disk_id(self, url: str) -> str:
        return url


def a_segment(size: int, packed: str) -> Segment:
    return Segment(
        stem="s",
        path="/logs/s",
        size=size,
        modified=datetime(2026, 11, 20, tzinfo=UTC),
        packed=packed,
        active=False,
        node="a",
        batch=date(2026, 11, 20),
    )


def test_packed_segments_are_larger_than_they_look() -> None:
    """What counts is the text in them."""
    plain, packed = (
        estimate_disk_needs([a_segment(size, kind)]) for size, kind in ((10 * GIB, "plain"), (GIB, "gzip"))
    )
    assert plain == packed
    assert 10 * GIB / 9 < plain.out < 3 * GIB
    assert estimate_disk_needs([], kept_bytes=GIB).out > GIB
    assert estimate_disk_needs([]).out < 100 * MIB


@pytest.mark.parametrize(
    ("out", "scratch", "keep_free", "told"),
    [
        (3 * GIB, 2 * GIB, 0, ""),
        (3 * GIB - 1, 2 * GIB, 0, "/out: 3071 MiB free, about 3072 MiB needed (0 MiB of it for --keep-free)"),
        (4 * GIB, 2 * GIB, GIB, "/scratch: 2048 MiB free, about 3072 MiB needed (1024 MiB of it for --keep-free)"),
        # The same disk.
        (5 * GIB, 5 * GIB, 0, ""),
        (4 * GIB, 4 * GIB, 0, "/out: 4096 MiB free, about 5120 MiB needed (0 MiB of it for --keep-free)"),
    ],
)
def test_too_little_room_is_one_line(out: int, scratch: int, keep_free: int, told: str) -> None:
    """With the numbers; one disk has to have room for both."""
    room, needed = FakeDiskSpace(out=out, scratch=scratch), DiskNeeds(3 * GIB, 2 * GIB)
    if not told:
        check_disk_space(room, needed, "/out", "/scratch", keep_free)  # type: ignore[arg-type]
        return
    with pytest.raises(AnalyticsError) as caught:
        check_disk_space(room, needed, "/out", "/scratch", keep_free)  # type: ignore[arg-type]
    assert (str(caught.value), caught.value.exit_status) == (told, EXIT_FAILED)


def test_one_disk_has_to_have_room_for_both(spark: SparkSession, tmp_path: Path) -> None:
    """It is one whatever somebody else has written on it between two looks."""

    class Busy(FileSystem):
        looks = 0

        def get_free_bytes(self, url: str) -> int:
            self.looks += 1
            return 4 * GIB - self.looks * MIB

    with pytest.raises(AnalyticsError, match="4095 MiB free, about 5120 MiB needed"):
        check_disk_space(Busy(spark), DiskNeeds(3 * GIB, 2 * GIB), str(tmp_path / "not yet"), str(tmp_path), 0)
    assert FileSystem(spark).get_disk_id(tmp_path.as_uri()) != FileSystem(spark).get_disk_id("/proc")
    assert FileSystem(spark).get_disk_id("hdfs://127.0.0.1/logs") is None


def test_a_relative_scratch_is_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the default file system of Hadoop is."""
    monkeypatch.chdir(tmp_path)
    asked = []

    class Asked(FakeDiskSpace):
        def get_free_bytes(self, url: str) -> int:
            asked.append(url)
            return GIB

    check_disk_space(Asked(), DiskNeeds(0, 0), "/out", "spill", 0)  # type: ignore[arg-type]
    assert asked == ["/out", (tmp_path / "spill").as_uri()]
