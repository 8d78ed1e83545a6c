"""Directories of temporary files end with their process, or with the next one."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from analytics.spark_session import SCRATCH_PREFIX, make_scratch_directory

# Says where it writes, and waits to be killed.
PROGRAM = """
import sys
from analytics.spark_session import make_scratch_directory
with make_scratch_directory(sys.argv[1]) as folder:
    print(folder, flush=True)
    input()
"""


def test_it_ends_with_the_block(tmp_path: Path) -> None:
    """Whatever happens in it, and with all that is in it."""
    with pytest.raises(RuntimeError), make_scratch_directory(str(tmp_path)) as folder:
        Path(folder, "spilled").mkdir()
        assert Path(folder).parent == tmp_path
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_left(tmp_path: Path) -> None:
    """It is deleted by the next one, and not while the process lives; what was not made here stays."""
    foreign = tmp_path / f"{SCRATCH_PREFIX}demo"
    foreign.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout
    left = Path(process.stdout.readline().strip())
    (left / "spilled").write_text("much")
    with make_scratch_directory(str(tmp_path)) as folder:
        assert set(tmp_path.iterdir()) == {foreign, left, Path(folder)}
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert (left / "spilled").exists()
    with make_scratch_directory(str(tmp_path)) as folder:
        assert set(tmp_path.iterdir()) == {foreign, Path(folder)}
