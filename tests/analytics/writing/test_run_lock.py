"""The lock of a directory of results when Java is gone by the end of the run; the rest is in test_nightly.py."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from analytics.reading.files import FileSystem
from analytics.writing.runs import LOCK_PREFIX, hold_run_lock


class FilesUntilJavaIsGone(FileSystem):
    """Files of this machine that can be written and listed, and not be deleted any more."""

    def __init__(self) -> None:
        pass

    def write(self, url: str, data: bytes) -> None:
        Path(url.removeprefix("file:")).write_bytes(data)

    def list_names(self, url: str) -> Sequence[str]:
        return sorted(path.name for path in Path(url.removeprefix("file:")).iterdir())

    def delete(self, url: str) -> None:
        raise ConnectionRefusedError


@pytest.mark.parametrize("scheme", ["", "file:"])
def test_a_lock_of_this_machine_is_given_back_without_java(tmp_path: Path, scheme: str) -> None:
    """And the error of the run is told, not the one of the lock."""
    with (
        pytest.raises(RuntimeError, match="Java ended"),
        hold_run_lock(FilesUntilJavaIsGone(), f"{scheme}{tmp_path}", "run"),
    ):
        assert [path.name for path in tmp_path.iterdir()] == [f"{LOCK_PREFIX}run.json"]
        raise RuntimeError("Java ended")
    assert list(tmp_path.iterdir()) == []


def test_a_lock_elsewhere_stays_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It names the process, so that a run on the same host passes it by."""
    monkeypatch.chdir(tmp_path)
    Path("hdfs:/out").mkdir(parents=True)
    with hold_run_lock(FilesUntilJavaIsGone(), "hdfs:/out", "run"):
        pass
    assert [path.name for path in Path("hdfs:/out").iterdir()] == [f"{LOCK_PREFIX}run.json"]
