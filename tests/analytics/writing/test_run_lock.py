"""The lock of a results directory if Java ends before the run; the rest is in test_nightly.py."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from analytics.files import FileSystem
from analytics.writing.runs import LOCK_PREFIX, hold_run_lock


class FileSystemWithoutJava(FileSystem):
    """Can write and list local files, but not delete them."""

    def __init__(self) -> None:
        pass

    def write(self, url: str, data: bytes) -> None:
        Path(url.removeprefix("file:")).write_bytes(data)

    def list_names(self, url: str) -> Sequence[str]:
        return sorted(path.name for path in Path(url.removeprefix("file:")).iterdir())

    def delete(self, url: str) -> None:
        raise ConnectionRefusedError


@pytest.mark.parametrize("scheme", ["", "file:"])
def test_releases_local_lock_without_java(tmp_path: Path, scheme: str) -> None:
    """The error of the run is raised, not that of the lock."""
    with (
        pytest.raises(RuntimeError, match="Java ended"),
        hold_run_lock(FileSystemWithoutJava(), f"{scheme}{tmp_path}", "run"),
    ):
        assert [path.name for path in tmp_path.iterdir()] == [f"{LOCK_PREFIX}run.json"]
        raise RuntimeError("Java ended")
    assert list(tmp_path.iterdir()) == []


def test_keeps_remote_lock_without_java(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It names the process, so that a run on the same host can remove it."""
    monkeypatch.chdir(tmp_path)
    Path("hdfs:/out").mkdir(parents=True)
    with hold_run_lock(FileSystemWithoutJava(), "hdfs:/out", "run"):
        pass
    assert [path.name for path in Path("hdfs:/out").iterdir()] == [f"{LOCK_PREFIX}run.json"]
