"""Upper bounds for the files, calls and commits of one request of each kind, see :mod:`tests.walk`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.walk import WITHOUT_V1

# Files entered, Python frames, changes of file, commits. Lower them when a path gets shorter; never raise them.
BOUNDS: dict[str, tuple[int, ...]] = {
    "forward, fast path": (22, 93, 51, 1),
    "forward, general path": (23, 108, 55, 1),
    "forward and live push": (27, 134, 77, 1),
    "acknowledgement": (31, 184, 110, 1),
    "DIDComm v1 handshake": (40, 750, 336, 3),
    "DIDComm v1 forward": (38, 240, 125, 1),
    "DIDComm v1 forward and live push": (37, 280, 139, 1),
    "DIDComm v1 acknowledgement": (39, 287, 161, 1),
    "TWO_WAY_PRIVATE": (25, 110, 62, 1),
    "push across workers, sender's side": (25, 119, 61, 1),
    "push across workers, socket's side": (15, 53, 32, 0),
}


NUMBERS = ("files", "frames", "changes", "commits")


@pytest.fixture(scope="module")
def counts() -> dict[str, tuple[int, ...]]:
    """Output of `make walk`."""
    program = [sys.executable, "-m", "tests.walk", "--json"]
    done = subprocess.run(
        program, cwd=Path(__file__).parents[1], stdout=subprocess.PIPE, text=True, timeout=1200, check=True
    )
    return {row: tuple(numbers) for row, numbers in json.loads(done.stdout.splitlines()[-1]).items()}


def test_every_row_has_a_bound(counts: dict[str, tuple[int, ...]]) -> None:
    """Each row of the table has a bound."""
    assert {row.removesuffix(WITHOUT_V1) for row in counts} == BOUNDS.keys()


def test_didcomm_v1_costs_v2_nothing(counts: dict[str, tuple[int, ...]]) -> None:
    """A forward, a push and an acknowledgement of v2 are the same whether v1 is served or not."""
    without = {row.removesuffix(WITHOUT_V1): found for row, found in counts.items() if row.endswith(WITHOUT_V1)}
    assert len(without) == 4
    assert {row: counts[row] for row in without} == without


@pytest.mark.parametrize("row", BOUNDS)
def test_row_stays_within_its_bound(row: str, counts: dict[str, tuple[int, ...]]) -> None:
    """Files, frames, file changes and commits do not exceed the bound."""
    exceeded = [
        (what, found, bound)
        for what, found, bound in zip(NUMBERS, counts[row], BOUNDS[row], strict=True)
        if found > bound
    ]
    assert not exceeded, "run `python -m tests.walk --calls ROW` to see the calls"
