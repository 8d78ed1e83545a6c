"""Checks of free disk space before a run."""

from __future__ import annotations

from datetime import UTC, date, datetime
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from analytics.errors import EXIT_FAILED, AnalyticsError
from analytics.files import FileSystem
from analytics.reading.segments import Segment
from analytics.run_plan import DiskNeeds, check_disk_space, estimate_disk_needs

MIB = 1 << 20
GIB = 1 << 30


class FakeDiskSpace:
    """Free bytes of disks, by the beginning of the path."""

    def __init__(self, **free: int) -> None:
        self._free = free

    def get_free_bytes(self, url: str) -> int:
        [found] = [free for name, free in self._free.items() if f"/{name}" in url]
        return found

    def get_disk_id(self, url: str) -> str:
        return url


def make_segment(size: int, packed: str) -> Segment:
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


def test_estimates_uncompressed_size() -> None:
    plain, packed = (
        estimate_disk_needs([make_segment(size, kind)]) for size, kind in ((10 * GIB, "plain"), (GIB, "gzip"))
    )
    assert plain == packed
    assert 10 * GIB / 9 < plain.out < 3 * GIB
    assert estimate_disk_needs([]).out < 100 * MIB


@pytest.mark.parametrize(
    ("out", "scratch", "keep_free", "message"),
    [
        (3 * GIB, 2 * GIB, 0, ""),
        (3 * GIB - 1, 2 * GIB, 0, "/out: 3071 MiB free, about 3072 MiB needed (0 MiB of it for --keep-free)"),
        (4 * GIB, 2 * GIB, GIB, "/scratch: 2048 MiB free, about 3072 MiB needed (1024 MiB of it for --keep-free)"),
        # One disk.
        (5 * GIB, 5 * GIB, 0, ""),
        (4 * GIB, 4 * GIB, 0, "/out: 4096 MiB free, about 5120 MiB needed (0 MiB of it for --keep-free)"),
    ],
)
def test_insufficient_space_is_one_line(out: int, scratch: int, keep_free: int, message: str) -> None:
    """With the numbers; results and scratch on one disk must fit together."""
    disks, needed = FakeDiskSpace(out=out, scratch=scratch), DiskNeeds(3 * GIB, 2 * GIB)
    if not message:
        check_disk_space(disks, needed, "/out", "/scratch", keep_free)  # type: ignore[arg-type]
        return
    with pytest.raises(AnalyticsError) as caught:
        check_disk_space(disks, needed, "/out", "/scratch", keep_free)  # type: ignore[arg-type]
    assert (str(caught.value), caught.value.exit_status) == (message, EXIT_FAILED)


def test_directories_on_one_disk_must_fit_together(spark: SparkSession, tmp_path: Path) -> None:
    """Even if free space changes between the two measurements."""

    class ShrinkingDisk(FileSystem):
        calls = 0

        def get_free_bytes(self, url: str) -> int:
            self.calls += 1
            return 4 * GIB - self.calls * MIB

    with pytest.raises(AnalyticsError, match="4095 MiB free, about 5120 MiB needed"):
        check_disk_space(
            ShrinkingDisk(spark), DiskNeeds(3 * GIB, 2 * GIB), str(tmp_path / "not yet"), str(tmp_path), 0
        )
    assert FileSystem(spark).get_disk_id(tmp_path.as_uri()) != FileSystem(spark).get_disk_id("/proc")
    assert FileSystem(spark).get_disk_id("hdfs://127.0.0.1/logs") is None


def test_relative_scratch_is_local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regardless of Hadoop's default file system."""
    monkeypatch.chdir(tmp_path)
    urls = []

    class RecordingDiskSpace(FakeDiskSpace):
        def get_free_bytes(self, url: str) -> int:
            urls.append(url)
            return GIB

    check_disk_space(RecordingDiskSpace(), DiskNeeds(0, 0), "/out", "spill", 0)  # type: ignore[arg-type]
    assert urls == ["/out", f"file:{tmp_path}/spill"]
