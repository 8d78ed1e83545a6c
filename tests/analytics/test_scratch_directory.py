"""Scratch directories are deleted by their process, or by the next one."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from analytics.spark_session import SCRATCH_PREFIX, make_scratch_directory

# Prints its directory, and waits to be killed.
PROGRAM = """
import sys
from analytics.spark_session import make_scratch_directory
with make_scratch_directory(sys.argv[1]) as folder:
    print(folder, flush=True)
    input()
"""


def test_deletes_directory_after_block(tmp_path: Path) -> None:
    """With its contents, even after an exception."""
    with pytest.raises(RuntimeError), make_scratch_directory(str(tmp_path)) as folder:
        Path(folder, "spilled").mkdir()
        assert Path(folder).parent == tmp_path
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_deletes_directory_of_killed_process(tmp_path: Path) -> None:
    """Not while the process runs; other directories stay."""
    unrelated = tmp_path / f"{SCRATCH_PREFIX}demo"
    unrelated.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout
    leftover = Path(process.stdout.readline().strip())
    (leftover / "spilled").write_text("much")
    with make_scratch_directory(str(tmp_path)) as folder:
        assert set(tmp_path.iterdir()) == {unrelated, leftover, Path(folder)}
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert (leftover / "spilled").exists()
    with make_scratch_directory(str(tmp_path)) as folder:
        assert set(tmp_path.iterdir()) == {unrelated, Path(folder)}
