"""Evaluation of a soak test."""

from __future__ import annotations

import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path

from mediatord.bench.memory_scenarios import (
    SOAK_WALLETS,
    choose_reader_kind,
    compute_memory_growth,
    find_soak_failures,
    read_stored_ids,
)

CALM = {"prompt": 0, "slow": 0, "never": 1}


def test_reader_kinds() -> None:
    """One in ten reads slowly, one in a hundred never."""
    assert Counter(map(choose_reader_kind, range(SOAK_WALLETS))) == {"prompt": 178, "slow": 20, "never": 2}


def test_growth() -> None:
    """From the end of the warm-up to the end; a single sample does not count."""
    assert compute_memory_growth([50] * 100 + [100] * 200) == 0
    assert compute_memory_growth([50] * 100 + [100] * 100 + [110] * 100) == 0.1
    assert compute_memory_growth([50] * 100 + [100] * 199 + [900]) == 0


def test_problems() -> None:
    """Refusals, losses, and sockets that were closed wrongly or not at all."""
    assert find_soak_failures({"202": 5}, 0, CALM, 600) == ()
    assert find_soak_failures({"202": 5}, 0, {**CALM, "never": 0}, 60) == ()
    assert len(find_soak_failures({"202": 5}, 0, {**CALM, "never": 0}, 600)) == 1
    assert len(find_soak_failures({"202": 5, "503": 1}, 2, {**CALM, "prompt": 3}, 600)) == 3


def test_stored_ids(tmp_path: Path) -> None:
    """An acknowledged and stored message counts once, so ids are compared."""
    database = tmp_path / "mediator.sqlite3"
    with closing(sqlite3.connect(database)) as connection:
        connection.execute("CREATE TABLE message (id TEXT)")
        connection.executemany("INSERT INTO message VALUES (?)", [("a",), ("b",)])
        connection.commit()
    assert read_stored_ids(database) == {"a", "b"}
