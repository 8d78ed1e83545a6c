"""
Imports that are killed in their midst: `python -m tests.backup.import_killer ARCHIVE CONFIG PLACE TIMES`.

PLACE says where: `committed`, after so many batches, or `writing`, inside the next one, when some of it is written.
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
    """Ends this process as a power cut would, at the time that was asked for."""

    def __init__(self, place: str, times: int) -> None:
        self.place = place
        self.left = times
        self.inserted = 0

    def told(self, done: int) -> None:
        """After the beginning and after each batch."""
        self.left -= 1
        if self.place == "committed" and self.left < 0:
            self.kill()

    def traced(self, statement: str) -> None:
        """Before each statement of SQLite."""
        self.wrote(statement.lstrip().upper().startswith("INSERT INTO MESSAGE"))

    def started(self, event: Any) -> None:
        """Before each command to MongoDB."""
        self.wrote(event.command_name in ("insert", "update") and "messages" in event.command.values())

    def wrote(self, matters: bool) -> None:
        """Some of a batch."""
        if matters and self.place == "writing" and self.left < 0:
            self.inserted += 1
            if self.inserted > 1:
                self.kill()

    def kill(self) -> None:
        """Now."""
        os.kill(os.getpid(), signal.SIGKILL)

    def succeeded(self, event: Any) -> None:
        """Nothing to do."""
        if event.command_name == "insert":
            self.wrote(self.left < 0)

    def failed(self, event: Any) -> None:
        """Nothing to do."""


def main(archive: Path, config: Path, killer: ImportKiller) -> None:
    """Import until it is killed."""
    monitoring.register(killer)
    with open_record_target(load_config(config).storage) as target:
        read = verify_archive(archive)

        def told(done: int) -> None:
            if isinstance(target, SQLiteRecordTarget):
                target.connection.set_trace_callback(killer.traced)
            killer.told(done)

        import_archive(read, target, told)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), ImportKiller(sys.argv[3], int(sys.argv[4])))
