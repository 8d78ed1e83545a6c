"""Locks SQLite databases against writers."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def lock_database(database: Path) -> Iterator[None]:
    """Hold the write lock; for less than the time after which writers give up (LOCK_TIMEOUT_SECONDS)."""
    with contextlib.closing(sqlite3.connect(database, isolation_level=None, timeout=60.0)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        yield
        connection.execute("ROLLBACK")
