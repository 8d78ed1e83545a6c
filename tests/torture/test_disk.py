"""SQLite on the disk of the torture: it keeps what it has synced, and loses it if syncs are forgotten."""

from __future__ import annotations

import contextlib
import random
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from tests.torture.commit_recorder import REFUSED, WELL
from tests.torture.disk_trace import DiskState, DiskTrace
from tests.torture.faulty_disk import DiskControl

ROOT = Path(__file__).parents[2]


def promised(directory: Path, until: int, syncs: str) -> list[int]:
    """The numbers that a recorder reported as committed when it was killed, after this number."""
    for name in ("data", "base"):
        (directory / name).mkdir()
    DiskControl.make(directory / "dial")
    DiskTrace.blank(directory / "tape")
    with contextlib.closing(sqlite3.connect(directory / "data" / "db")) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("CREATE TABLE number (number INTEGER PRIMARY KEY, ballast BLOB NOT NULL) STRICT")
    shutil.copy(directory / "data" / "db", directory / "base")
    command = [sys.executable, "-m", "tests.torture.commit_recorder", str(directory), syncs]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as recorder:
        assert recorder.stdout is not None
        said = []
        for line in recorder.stdout:
            said.append(int(line))
            if said[-1] == until:
                recorder.kill()
        return said


def found(directory: Path, seed: int, kept: float) -> list[int]:
    """What is in the database after a power cut, if that can be read at all."""
    after = directory / f"after-{seed}-{kept}"
    after.mkdir()
    DiskState(directory / "base", directory / "tape", random.Random(seed), kept).replace(after)
    with contextlib.closing(sqlite3.connect(after / "db")) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        return [number for (number,) in connection.execute("SELECT number FROM number ORDER BY number")]


@pytest.mark.parametrize("until", [WELL - 1, 60, 131])
def test_what_was_synced_survives(tmp_path: Path, until: int) -> None:
    """
    Every commit that has returned is there, whatever part of what was not synced is; at most one more is, which had
    not returned. What met a disk that takes nothing is not.
    """
    said = promised(tmp_path, until, "yes")
    assert set(said) == set(range(said[-1] + 1)) - REFUSED.keys()
    for seed, kept in ((0, 0.0), (1, 0.3), (2, 0.7), (3, 0.7), (4, 1.0)):
        there = found(tmp_path, seed, kept)
        assert there[: len(said)] == said
        assert len(there) <= len(said) + 1


def test_what_was_not_synced_is_lost(tmp_path: Path) -> None:
    """On a disk that forgets to sync nothing is left but what was there before: so the other test can fail."""
    assert promised(tmp_path, 60, "no")
    assert found(tmp_path, 0, 0.0) == []
