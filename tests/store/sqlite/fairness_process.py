"""
Process that writes to a database as often as it can, one row per transaction.

`python -m tests.store.sqlite.fairness_process DATABASE NAME PROCESSES ROWS`: waits for a line, then writes until each
of so many processes has written so many rows.
"""

from __future__ import annotations

import sys
from pathlib import Path
from sqlite3 import Connection

from mediatord.store.sqlite.executor import SQLiteExecutor
from tests.store.builders import ImmediateClock, InlineRunner

LOCK_TIMEOUT = 60.0
# Number of processes that have written that many rows.
COUNT_FINISHED = "SELECT count(*) FROM (SELECT 1 FROM written GROUP BY name HAVING count(*) >= ?)"


def compete(path: Path, name: str, processes: int, rows: int) -> None:
    """Write the name of this process repeatedly."""
    file = SQLiteExecutor(path, ImmediateClock(), lambda kind: InlineRunner(), patience=LOCK_TIMEOUT, shared=True)
    file.open()
    print(flush=True)  # noqa: T201  it is read by who has started this
    sys.stdin.readline()
    done: list[int] = [0]

    def write(connection: Connection) -> int:
        connection.execute("INSERT INTO written (name) VALUES (?)", (name,))
        return int(connection.execute(COUNT_FINISHED, (rows,)).fetchone()[0])

    while done[-1] < processes:
        file.write("write", write).addCallback(done.append)
    file.close()


if __name__ == "__main__":
    database, own_name, number, least = sys.argv[1:]
    compete(Path(database), own_name, int(number), int(least))
