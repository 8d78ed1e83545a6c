"""A short slice of `make torture`: every kind of fault on every store that has it, once."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.torture.faults import KINDS

ROOT = Path(__file__).parents[2]
# Everything ends by itself before that.
PATIENCE_SECONDS = 1200
# In which half of the rounds have messages wait for wallets that come after the fault.
FORGETFUL_SEED = 4


def torture(file: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    """The exit status, and the figures."""
    command = [sys.executable, "-m", "tests.torture", "--json", str(file), "--keep", str(file.parent), *arguments]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False)
    print(ran.stdout, ran.stderr, sep="\n")  # noqa: T201  pytest shows it when the test fails
    return ran.returncode, json.loads(file.read_text(encoding="utf-8"))


def test_nothing_is_lost(tmp_path: Path) -> None:
    """What was accepted is delivered and acknowledged once, and the store's own ledger says the same."""
    seed = os.environ.get("TORTURE_SEED", str(random.SystemRandom().randrange(1_000_000)))
    status, figures = torture(tmp_path / "figures.json", "--once", "--seed", seed)
    *kinds, everything = figures["summary"]
    assert (status, everything["failed"], everything["difference"]) == (0, 0, 0)
    assert everything["lost"] == everything["doubled"] == everything["expired"] == everything["evicted"] == 0
    stores = {row["store"] for row in kinds}
    assert {(row["store"], row["kind"]) for row in kinds} == {
        (store, kind) for store in stores for kind in KINDS[store]
    }
    assert "sqlite" in stores
    refused = {row["kind"] for row in kinds if row["refused"]}
    assert refused >= {"diskfull", "readonly"}


@pytest.mark.parametrize("kind", ["clock", "halfopen", "reload"])
def test_in_memory(tmp_path: Path, kind: str) -> None:
    """What a daemon that keeps nothing has to live through; nobody but itself can read its books."""
    status, figures = torture(tmp_path / "figures.json", "--store", "memory", "--kind", kind, "--faults", "1")
    assert (status, figures["summary"][-1]["delivered"]) == (0, figures["summary"][-1]["accepted"])


def test_a_disk_that_forgets_to_sync(tmp_path: Path) -> None:
    """A power cut loses messages there, and the books show it: so all the others can fail."""
    status, figures = torture(
        tmp_path / "figures.json",
        *("--store", "sqlite", "--kind", "powercut", "--faults", "2", "--lanes", "1"),
        *("--seed", str(FORGETFUL_SEED), "--forget-syncs"),
    )
    everything = figures["summary"][-1]
    assert (status, everything["failed"]) == (1, 2)
    assert everything["lost"] > 0
    assert any("were stored" in complaint for one in figures["rounds"] for complaint in one["complaints"])
