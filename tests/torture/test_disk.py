"""SQLite on the fault-injecting disk keeps what it has synced, and loses it if syncs are ignored."""

from __future__ import annotations

import contextlib
import random
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from tests.torture.commit_recorder import BEFORE_FAULTS, FAULT_MODES
from tests.torture.disk_trace import DiskState, DiskTrace
from tests.torture.faulty_disk import DiskControl

ROOT = Path(__file__).parents[2]


def committed_numbers(directory: Path, until: int, syncs: str) -> list[int]:
    """Numbers that a recorder had reported as committed when it was killed, after `until` was reached."""
    for name in ("data", "base"):
        (directory / name).mkdir()
    DiskControl.create(directory / "dial")
    DiskTrace.create(directory / "tape")
    with contextlib.closing(sqlite3.connect(directory / "data" / "db")) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("CREATE TABLE number (number INTEGER PRIMARY KEY, ballast BLOB NOT NULL) STRICT")
    shutil.copy(directory / "data" / "db", directory / "base")
    command = [sys.executable, "-m", "tests.torture.commit_recorder", str(directory), syncs]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as recorder:
        assert recorder.stdout is not None
        reported = []
        for line in recorder.stdout:
            reported.append(int(line))
            if reported[-1] == until:
                recorder.kill()
        return reported


def recovered_numbers(directory: Path, seed: int, kept: float) -> list[int]:
    """Numbers in the database after a power cut, if it is readable."""
    after = directory / f"after-{seed}-{kept}"
    after.mkdir()
    DiskState(directory / "base", directory / "tape", random.Random(seed), kept).replace(after)
    with contextlib.closing(sqlite3.connect(after / "db")) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        return [number for (number,) in connection.execute("SELECT number FROM number ORDER BY number")]


@pytest.mark.parametrize("until", [BEFORE_FAULTS - 1, 60, 131])
def test_synced_commits_survive_power_cut(tmp_path: Path, until: int) -> None:
    """
    Every completed commit is there, whatever part of the unsynced data is; at most one more is, which had not
    completed. Commits refused by the disk are not.
    """
    committed = committed_numbers(tmp_path, until, "yes")
    assert set(committed) == set(range(committed[-1] + 1)) - FAULT_MODES.keys()
    for seed, kept in ((0, 0.0), (1, 0.3), (2, 0.7), (3, 0.7), (4, 1.0)):
        recovered = recovered_numbers(tmp_path, seed, kept)
        assert recovered[: len(committed)] == committed
        assert len(recovered) <= len(committed) + 1


def test_commits_without_sync_are_lost(tmp_path: Path) -> None:
    """Only earlier data is left: so the other test can fail."""
    assert committed_numbers(tmp_path, 60, "no")
    assert recovered_numbers(tmp_path, 0, 0.0) == []
