"""A small run of `make torture`: every kind of fault on every store that supports it, once."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.torture.faults import FULL_FILE_SYSTEM, KINDS

ROOT = Path(__file__).parents[2]
# Longer than any run takes.
RUN_SECONDS = 1200
# Seed with which half of the rounds queue messages until after the fault.
QUEUEING_SEED = 4


def run_torture(file: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    """Exit status and figures of a run."""
    command = [sys.executable, "-m", "tests.torture", "--json", str(file), "--keep", str(file.parent), *arguments]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=RUN_SECONDS, check=False)
    print(result.stdout, result.stderr, sep="\n")  # noqa: T201  pytest shows it when the test fails
    return result.returncode, json.loads(file.read_text(encoding="utf-8"))


def test_every_fault_loses_nothing(tmp_path: Path) -> None:
    """Accepted messages are delivered and acknowledged once, and the store's ledger agrees."""
    seed = os.environ.get("TORTURE_SEED", str(random.SystemRandom().randrange(1_000_000)))
    status, figures = run_torture(tmp_path / "figures.json", "--once", "--seed", seed)
    *kinds, total = figures["summary"]
    assert (status, total["failed"], total["difference"]) == (0, 0, 0)
    assert total["lost"] == total["doubled"] == total["expired"] == total["evicted"] == 0
    stores = {row["store"] for row in kinds}
    assert {(row["store"], row["kind"]) for row in kinds} == {
        (store, kind) for store in stores for kind in KINDS[store]
    }
    assert "sqlite" in stores
    refusing = {name for faults in KINDS.values() for name, kind in faults.items() if kind.refuses}
    unrefused = [row for row in figures["rounds"] if row["kind"] in refusing and not row["refused"]]
    assert all(FULL_FILE_SYSTEM in row["marks"] for row in unrefused), unrefused


@pytest.mark.parametrize("kind", ["clock", "halfopen", "reload"])
def test_faults_of_memory_store(tmp_path: Path, kind: str) -> None:
    """Faults that a daemon without persistence must survive; only the daemon can read its ledger."""
    status, figures = run_torture(tmp_path / "figures.json", "--store", "memory", "--kind", kind, "--faults", "1")
    assert (status, figures["summary"][-1]["delivered"]) == (0, figures["summary"][-1]["accepted"])


def test_disk_without_sync_loses_messages(tmp_path: Path) -> None:
    """A power cut loses messages, and the ledger shows it: so the other tests can fail."""
    status, figures = run_torture(
        tmp_path / "figures.json",
        *("--store", "sqlite", "--kind", "powercut", "--faults", "2", "--workers", "1"),
        *("--seed", str(QUEUEING_SEED), "--forget-syncs"),
    )
    total = figures["summary"][-1]
    assert (status, total["failed"]) == (1, 2)
    assert total["lost"] > 0
    assert any(
        "were stored" in complaint for figure_line in figures["rounds"] for complaint in figure_line["complaints"]
    )
