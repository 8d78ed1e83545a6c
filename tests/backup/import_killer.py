"""
Process that imports an archive and kills itself: `python -m tests.backup.import_killer ARCHIVE CONFIG PHASE BATCHES`.

PHASE is `committed`, for a kill after so many batches, or `writing`, for one inside the next batch.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from pymongo import monitoring

from mediatord.backup.archive import import_archive, verify_archive
from mediatord.backup.records import open_record_target
from mediatord.backup.sqlite_records import SQLiteRecordTarget
from mediatord.config.file import load_config


class ImportKiller(monitoring.CommandListener):
    """Kills this process at the given point, like a power cut."""

    def __init__(self, phase: str, batches: int) -> None:
        self.phase = phase
        self.remaining_batches = batches
        self.inserted = 0

    def on_batch(self, done: int) -> None:
        """Called at the start and after each batch."""
        self.remaining_batches -= 1
        if self.phase == "committed" and self.remaining_batches < 0:
            self.kill()

    def on_sqlite_statement(self, statement: str) -> None:
        """Called before each statement of SQLite."""
        self.on_write(statement.lstrip().upper().startswith("INSERT INTO MESSAGE"))

    def started(self, event: Any) -> None:
        """Called before each command to MongoDB."""
        self.on_write(event.command_name in ("insert", "update") and "messages" in event.command.values())

    def on_write(self, matters: bool) -> None:
        """Called before each write of a batch."""
        if matters and self.phase == "writing" and self.remaining_batches < 0:
            self.inserted += 1
            if self.inserted > 1:
                self.kill()

    def kill(self) -> None:
        """Kill this process."""
        os.kill(os.getpid(), signal.SIGKILL)

    def succeeded(self, event: Any) -> None:
        """Called after each successful command to MongoDB."""
        if event.command_name == "insert":
            self.on_write(self.remaining_batches < 0)

    def failed(self, event: Any) -> None:
        """Ignored."""


def main(archive: Path, config: Path, killer: ImportKiller) -> None:
    """Run the import until it is killed."""
    monitoring.register(killer)
    with open_record_target(load_config(config).storage) as target:
        read = verify_archive(archive)

        def report_batch(done: int) -> None:
            if isinstance(target, SQLiteRecordTarget):
                target.connection.set_trace_callback(killer.on_sqlite_statement)
            killer.on_batch(done)

        import_archive(read, target, report_batch)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), ImportKiller(sys.argv[3], int(sys.argv[4])))
