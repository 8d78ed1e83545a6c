"""
A process that commits numbers to a database on a disk of ours, and says each when it is committed.

``python -m tests.torture.scribe DIRECTORY yes`` syncs, with `no` the disk forgets that it was asked to.
"""

from __future__ import annotations

import itertools
import sqlite3
import sys
from pathlib import Path

from mediatord.store.database import connect
from tests.torture.disk import Dial, Disk, Mode

# Until then all goes well; each of the next ones meets another disk.
WELL = 30
REFUSED = {WELL + number: mode for number, mode in enumerate((Mode.FULL, Mode.READ_ONLY, Mode.BROKEN))}


def main(directory: Path, syncs: bool) -> None:
    """Until it is killed."""
    Disk(directory / "dial", directory / "tape", syncs).mount()
    connection = connect(directory / "data" / "db")
    dial = Dial(directory / "dial")
    for number in itertools.count():
        dial.mode = REFUSED.get(number, Mode.WELL)
        try:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("INSERT INTO number VALUES (?, zeroblob(6000))", (number,))
            connection.execute("COMMIT")
            print(number, flush=True)  # noqa: T201  whoever started it reads that
        except sqlite3.Error:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
        if number % 40 == WELL // 2:
            connection.execute("PRAGMA wal_checkpoint(PASSIVE)")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] == "yes")
