"""
Commits numbers to a database on a fault-injecting disk, and prints each when it is committed.

``python -m tests.torture.commit_recorder DIRECTORY yes`` syncs; with `no` the disk ignores syncs.
"""

from __future__ import annotations

import itertools
import sqlite3
import sys
from pathlib import Path

from mediatord.store.sqlite.connection import connect
from tests.torture.faulty_disk import DiskControl, DiskMode, DiskSpec

# Commits before the first fault; each of the next ones meets another fault.
BEFORE_FAULTS = 30
FAULT_MODES = {
    BEFORE_FAULTS + number: mode for number, mode in enumerate((DiskMode.FULL, DiskMode.READ_ONLY, DiskMode.BROKEN))
}


def main(directory: Path, syncs: bool) -> None:
    """Commit until the process is killed."""
    DiskSpec(directory / "dial", directory / "tape", syncs).mount()
    connection = connect(directory / "data" / "db")
    disk_control = DiskControl(directory / "dial")
    for number in itertools.count():
        disk_control.mode = FAULT_MODES.get(number, DiskMode.WELL)
        try:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("INSERT INTO number VALUES (?, zeroblob(6000))", (number,))
            connection.execute("COMMIT")
            print(number, flush=True)  # noqa: T201  whoever started it reads that
        except sqlite3.Error:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
        if number % 40 == BEFORE_FAULTS // 2:
            connection.execute("PRAGMA wal_checkpoint(PASSIVE)")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] == "yes")
