"""SQLite: what the daemon has stored, and how fast the bare library stores the same (the floor of durability)."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import cycle, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter, process_time

from mediatord.bench.drive import PER_CPU_SECOND, PER_SECOND
from mediatord.bench.figures import Figures, percentile

DATABASE = "mediator.sqlite3"

_SCHEMA = """
CREATE TABLE message (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, recipient TEXT NOT NULL, payload BLOB NOT NULL,
    received_at REAL NOT NULL, expires_at REAL NOT NULL
) STRICT;
CREATE INDEX waiting ON message (recipient, seq);
"""
_INSERT = "INSERT INTO message (id, recipient, payload, received_at, expires_at) VALUES (?, ?, ?, ?, ?)"


def stored_rows(database: Path, table: str = "message") -> int:
    """How many there are, seen by another process than the one that stores them."""
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
        (count,) = connection.execute(f"SELECT count(*) FROM {table}").fetchone()
        return int(count)


@contextmanager
def bare_database() -> Iterator[sqlite3.Connection]:
    """An empty database beside the daemon's: WAL, synchronous=FULL."""
    with TemporaryDirectory(prefix="mediatord-bench-") as directory:
        connection = sqlite3.connect(Path(directory) / "bare.sqlite3", isolation_level=None)
        with closing(connection):
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA synchronous=FULL")
            connection.executescript(_SCHEMA)
            yield connection


class BareStore:
    """
    Inserts rows like the daemon's, one transaction per batch, on the calling thread.

    :param batch: rows in one commit: as many as there are clients waiting for one.
    """

    def __init__(self, connection: sqlite3.Connection, payloads: list[tuple[str, bytes]], batch: int) -> None:
        self._connection = connection
        self._payloads = cycle(payloads)
        self._batch = batch
        self._next_id = 0

    def run(self, seconds: float) -> Figures:
        """Rows per second and commits' latency."""
        start, start_cpu = perf_counter(), process_time()
        latencies, done = [], 0
        while perf_counter() - start < seconds:
            begun = perf_counter()
            self._connection.execute("BEGIN IMMEDIATE")
            self._connection.executemany(_INSERT, self._rows())
            self._connection.execute("COMMIT")
            latencies.append((perf_counter() - begun) * 1000)
            done += self._batch
        spent, spent_cpu = perf_counter() - start, process_time() - start_cpu
        return {
            PER_SECOND: done / spent,
            PER_CPU_SECOND: done / spent_cpu,
            "p50 ms": percentile(latencies, 0.50),
            "p99 ms": percentile(latencies, 0.99),
        }

    def _rows(self) -> Iterator[tuple[str, str, bytes, float, float]]:
        for recipient, payload in islice(self._payloads, self._batch):
            self._next_id += 1
            yield f"{self._next_id:032x}", recipient, payload, 1.8e9, 1.8e9 + 259_200
