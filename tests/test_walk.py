"""Upper bounds for the files and calls of one request of each kind, see :mod:`tests.walk`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

# Files entered, Python frames, changes of file. Lower them when a path gets shorter; never raise them.
BOUNDS: dict[str, tuple[int, int, int]] = {
    "forward, fast path": (22, 93, 51),
    "forward, general path": (23, 108, 55),
    "forward and live push": (27, 134, 77),
    "acknowledgement": (31, 184, 110),
    "TWO_WAY_PRIVATE": (25, 110, 62),
    "push across workers, sender's side": (25, 119, 61),
    "push across workers, socket's side": (15, 53, 32),
}


@pytest.fixture(scope="module")
def counts() -> dict[str, tuple[int, int, int]]:
    """Output of `make walk`."""
    program = [sys.executable, "-m", "tests.walk", "--json"]
    done = subprocess.run(
        program, cwd=Path(__file__).parents[1], stdout=subprocess.PIPE, text=True, timeout=1200, check=True
    )
    return {row: tuple(numbers) for row, numbers in json.loads(done.stdout.splitlines()[-1]).items()}


def test_every_row_has_a_bound(counts: dict[str, tuple[int, int, int]]) -> None:
    """Each row of the table has a bound."""
    assert counts.keys() == BOUNDS.keys()


@pytest.mark.parametrize("row", BOUNDS)
def test_row_stays_within_its_bound(row: str, counts: dict[str, tuple[int, int, int]]) -> None:
    """Files, frames and file changes do not exceed the bound."""
    exceeded = [
        (what, found, bound)
        for what, found, bound in zip(("files", "frames", "changes"), counts[row], BOUNDS[row], strict=True)
        if found > bound
    ]
    assert not exceeded, "run `python -m tests.walk --calls ROW` to see the calls"
