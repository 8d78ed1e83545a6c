"""FileSystem on a local disk."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from analytics.errors import EXIT_FAILED, EXIT_USAGE, AnalyticsError
from analytics.files import FileInfo, FileSystem, _list_remote_files

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture
def files(spark: SparkSession) -> FileSystem:
    return FileSystem(spark)


def test_reads_what_was_written(files: FileSystem, tmp_path: Path) -> None:
    """A write replaces the file, and leaves no other file."""
    data = bytes(range(256)) * 9
    path = f"{tmp_path}/deep/er/a.bin"
    files.write(path, b"before")
    files.write(path, data)
    assert files.read(path) == data == Path(path).read_bytes()
    assert files.read(path, limit=3) == data[:3]
    assert files.read(path, limit=4, offset=254) == data[254:258]
    assert files.read(path, offset=2300) == data[2300:]
    assert files.read(path, limit=10, offset=len(data)) == b""
    assert files.read(f"file://{path}", limit=1) == data[:1]
    assert os.listdir(tmp_path / "deep/er") == ["a.bin"]


def test_lists_all_files_by_path(files: FileSystem, tmp_path: Path) -> None:
    """Hidden files too, in the order of Hadoop's own listing."""
    for name in ("b/.hidden", "b/_staged", "a b.jsonl", "z/x=1/part"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_bytes(b"12345"[: len(name) % 5])
    (tmp_path / "b/.part.crc").write_bytes(b"Hadoop's")
    os.utime(tmp_path / "a b.jsonl", (1, 1_700_000_000.5))
    found = files.list(str(tmp_path))
    assert [file.path for file in found] == [
        f"file:{tmp_path}/{name}" for name in ("a b.jsonl", "b/.hidden", "b/_staged", "z/x=1/part")
    ]
    at = datetime(2023, 11, 14, 22, 13, 20, 500_000, UTC)
    assert found[0] == FileInfo(f"file:{tmp_path}/a b.jsonl", 4, at)
    assert files.list(str(tmp_path), recursive=False) == found[:1]
    assert files.list(f"{tmp_path}/a b.jsonl") == found[:1]
    for recursive in (True, False):
        # The implementation for all other file systems.
        other = list(_list_remote_files(*files._resolve(str(tmp_path)), recursive))
        assert sorted(other, key=lambda file: file.path) == files.list(str(tmp_path), recursive)
    assert files.list_names(str(tmp_path)) == ["a b.jsonl", "b", "z"]


def test_moves_and_deletes_directories(files: FileSystem, tmp_path: Path) -> None:
    """The parent of the target need not exist; deleting a missing path succeeds."""
    files.write(f"{tmp_path}/a/dt=1/part", b"x")
    files.move(f"{tmp_path}/a", f"{tmp_path}/new/place")
    assert files.read(f"{tmp_path}/new/place/dt=1/part") == b"x"
    assert not files.exists(f"{tmp_path}/a")
    assert files.is_directory(f"{tmp_path}/new") and not files.is_directory(f"{tmp_path}/new/place/dt=1/part")
    files.make_directories(f"{tmp_path}/new/place")
    files.delete(f"{tmp_path}/new")
    files.delete(f"{tmp_path}/new")
    assert not files.exists(f"{tmp_path}/new") and not files.is_directory(f"{tmp_path}/new")


def test_free_bytes_of_existing_and_future_paths(files: FileSystem, tmp_path: Path) -> None:

    def free() -> int:
        found = os.statvfs(tmp_path)
        return found.f_bavail * found.f_frsize

    # Other processes write to the same disk.
    before, reported, after = free(), files.get_free_bytes(f"{tmp_path}/not/there"), free()
    assert min(before, after) - 2**30 < reported < max(before, after) + 2**30


def test_error_is_one_line_with_path(files: FileSystem, tmp_path: Path) -> None:
    """Exit status 2 for a missing or invalid path, 1 for anything else."""
    base = str(tmp_path)
    (tmp_path / "file").write_text("")
    (tmp_path / "other").mkdir()
    mistakes: list[tuple[Callable[[], object], int]] = [
        (lambda: files.list(f"{base}/nope"), EXIT_USAGE),
        (lambda: files.list_names(f"{base}/nope"), EXIT_USAGE),
        (lambda: files.read(f"{base}/nope"), EXIT_USAGE),
        (lambda: files.move(f"{base}/nope", f"{base}/x"), EXIT_USAGE),
        (lambda: files.move(f"{base}/other", f"{base}/file"), EXIT_FAILED),
        (lambda: files.make_directories(f"{base}/file/x"), EXIT_FAILED),
        (lambda: files.write(f"{base}/file/x", b""), EXIT_FAILED),
        (lambda: files.write(f"{base}/other", b""), EXIT_FAILED),
    ]
    for operation, exit_status in mistakes:
        with pytest.raises(AnalyticsError) as caught:
            operation()
        assert str(caught.value).startswith(base) and "\n" not in str(caught.value)
        assert caught.value.exit_status == exit_status
    for url in ("nope://x/y", ""):
        with pytest.raises(AnalyticsError) as caught:
            files.list(url)
        assert caught.value.exit_status == EXIT_USAGE and str(caught.value).startswith(f"{url}: ")
    assert sorted(os.listdir(tmp_path)) == ["file", "other"]


def test_failed_write_changes_nothing(files: FileSystem, tmp_path: Path) -> None:
    """No draft file is left."""
    (tmp_path / "target").mkdir()
    (tmp_path / "target/inner").write_text("kept")
    with pytest.raises(AnalyticsError):
        files.write(f"{tmp_path}/target", b"new")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["inner", "target"]


def test_downloads_and_uploads(files: FileSystem, tmp_path: Path) -> None:
    """Both replace a file, and leave no other file."""
    for data in (bytes(range(256)) * 9, b"shorter"):
        (tmp_path / "a b").write_bytes(data)
        files.upload(tmp_path / "a b", f"{tmp_path}/deep/er/remote")
        assert files.read(f"{tmp_path}/deep/er/remote") == data
        files.download(f"file:{tmp_path}/deep/er/remote", tmp_path / "c=d%20: e")
        assert (tmp_path / "c=d%20: e").read_bytes() == data
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a b", "c=d%20: e", "deep", "er", "remote"]


def test_failed_copy_changes_nothing(files: FileSystem, tmp_path: Path) -> None:
    """The error names the file that is missing or in the way."""
    (tmp_path / "directory").mkdir()
    (tmp_path / "file").write_bytes(b"kept")
    mistakes: list[tuple[Callable[[], object], str, int]] = [
        (lambda: files.upload(tmp_path / "nope", f"{tmp_path}/file"), "nope", EXIT_USAGE),
        (lambda: files.upload(tmp_path / "file", f"{tmp_path}/directory"), "directory", EXIT_FAILED),
        (lambda: files.upload(tmp_path / "directory", f"{tmp_path}/file"), "directory", EXIT_FAILED),
        (lambda: files.download(f"{tmp_path}/nope", tmp_path / "file"), "nope", EXIT_USAGE),
        (lambda: files.download(f"{tmp_path}/directory", tmp_path / "file"), "directory", EXIT_FAILED),
    ]
    for operation, name, exit_status in mistakes:
        with pytest.raises(AnalyticsError, match=f"^{tmp_path}/{name}: ") as caught:
            operation()
        assert caught.value.exit_status == exit_status
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["directory", "file"]
    assert (tmp_path / "file").read_bytes() == b"kept"
