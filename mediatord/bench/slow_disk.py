"""
The daemon on a disk whose sync takes 50 ms: ``python -m mediatord.bench.slow_disk run --config ...``.

All is as in `mediatord`, but wherever SQLite has waited for the disk, the same thread waits for longer.
"""

from __future__ import annotations

import runpy
import sqlite3
from sqlite3 import Connection, Cursor
from time import sleep
from typing import Any

SYNC_SECONDS = 0.05

# How often each waits for the disk: a commit for the log, a checkpoint for the log and for the database.
_SYNCS = {"COMMIT": 1, "PRAGMA wal_checkpoint(PASSIVE)": 2, "PRAGMA wal_checkpoint(TRUNCATE)": 2}

_connect = sqlite3.connect


def slow(factory: type[Connection]) -> type[Connection]:
    """Connections of a kind, to a database on such a disk."""

    class SlowConnection(factory):  # type: ignore[valid-type, misc]  # of whatever kind the store's are
        def execute(self, sql: str, parameters: Any = (), /) -> Cursor:
            cursor: Cursor = super().execute(sql, parameters)
            syncs = _SYNCS.get(sql)
            if syncs is not None:
                sleep(syncs * SYNC_SECONDS)
            return cursor

    return SlowConnection


def connect(*arguments: Any, factory: type[Connection] = Connection, **options: Any) -> Connection:
    """As :func:`sqlite3.connect`."""
    return _connect(*arguments, factory=slow(factory), **options)


if __name__ == "__main__":
    vars(sqlite3)["connect"] = connect
    runpy.run_module("mediatord", run_name="__main__")
