"""What is wrong with the file of an SQLite database: it is gone, damaged, or there is no room for more."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path

from twisted.logger import Logger

from mediatord.interfaces.store import FAULT_MESSAGES, FAULTS, Fault
from mediatord.store.disk_space import GROWING_OPERATIONS, DiskSpace

_DAMAGE_CODES = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}
# Pages that are not there, and what file systems that check their blocks say.
_DAMAGE_EXTENDED = {sqlite3.SQLITE_IOERR_SHORT_READ, sqlite3.SQLITE_IOERR_CORRUPTFS, sqlite3.SQLITE_IOERR_DATA}

_log = Logger(namespace="mediatord.store")


class FileLost(Exception):
    """What was committed went to a file that nobody will find again."""


def shows_damage(error: BaseException | None) -> bool:
    """Whether SQLite says that what is in the file is not what it wrote."""
    code = getattr(error, "sqlite_errorcode", None)
    return code is not None and (code & 0xFF in _DAMAGE_CODES or code in _DAMAGE_EXTENDED)


def shows_full(error: BaseException | None) -> bool:
    """Whether SQLite says that the disk is full."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_FULL


class FileHealth:
    """
    Knows what is wrong with the file, and which operations make no sense for that reason.

    A file that is put back is used again, and so is a disk with room. Damage stays until the daemon is restarted,
    which checks the file: until then nothing is written, as that could destroy what is left.

    :param tell: told of each fault when it begins and when it ends.
    :ivar faults: those that there are.
    :ivar is_shorter: whether the database is shorter than it was. That is damage, or the work of a program that has
        given space back to the disk, which only an examination can tell.
    """

    def __init__(self, path: Path, space: DiskSpace, tell: Callable[[Fault, bool], None]) -> None:
        self._paths = tuple(os.fspath(path.absolute()) + suffix for suffix in ("", "-wal"))
        self._shared_memory = os.fspath(path.absolute()) + "-shm"
        self._space = space
        self._tell = tell
        self._identities: tuple[tuple[int, int], ...] | None = None
        self._shared_identity: tuple[int, int] | None = None
        self._size = 0
        self.is_shorter = False
        self.faults: set[Fault] = set()

    @property
    def trouble(self) -> str:
        """What is wrong, for the operator; empty when all is well."""
        return next((FAULT_MESSAGES[fault] for fault in FAULTS if fault in self.faults), "")

    def opened(self) -> None:
        """The files that are there now are those in use; in a thread of the store."""
        self._identities = tuple(_identity(path) for path in self._paths)
        self._shared_identity = _identity(self._shared_memory)
        self._size = os.stat(self._paths[0]).st_size
        self.is_shorter = False

    def closed(self) -> None:
        """No file is in use."""
        self._identities = None
        over, self.faults = self.faults, set()
        for fault in over:
            self._tell(fault, False)

    def is_lost(self) -> bool:
        """Whether database or write-ahead log are not those that were opened; may be asked from any thread."""
        if self._identities is None:
            return False
        try:
            return any(_identity(path) != known for path, known in zip(self._paths, self._identities, strict=True))
        except OSError:
            return True

    def check(self) -> None:
        """Look at the files and at the disk."""
        if self._identities is None:
            return
        size = self._size_if_there(self._identities)
        self._change("missing", size is None)
        if size is not None:
            self.is_shorter = size < self._size
            self._size = max(size, self._size)
        self._change("full", self._space.is_full())

    def examined(self, size: int, problems: Sequence[str]) -> None:
        """
        A file that is shorter was looked through.

        :param size: that it had.
        :param problems: what is wrong in it.
        """
        if problems:
            self._change("damaged", True)
        else:
            self._size, self.is_shorter = size, False

    def failed(self, error: BaseException | None) -> None:
        """An operation has."""
        if isinstance(error, FileLost):
            self.check()
        elif shows_damage(error):
            self.check()  # a file that is gone is no damage
            if "missing" not in self.faults:
                self._change("damaged", True)
        elif shows_full(error):
            self._space.exhausted()
            self._change("full", self._space.is_full())

    def refuses_reading(self) -> bool:
        """Whether nothing is to be read."""
        return "missing" in self.faults

    def refuses_writing(self, name: str, shrinking: bool) -> bool:
        """
        Whether an operation is not to be begun, while there are faults.

        :param shrinking: whether there is less in the store after it, which its name does not say.
        """
        if self.faults != {"full"}:
            return bool(self.faults)
        if shrinking or name not in GROWING_OPERATIONS:
            return False
        # There may be room again.
        self._change("full", self._space.is_full())
        return bool(self.faults)

    def _size_if_there(self, known: tuple[tuple[int, int], ...]) -> int | None:
        """How long the database is; None if a file is not the one that was opened."""
        try:
            database, log = (os.stat(path) for path in self._paths)
            shared = _identity(self._shared_memory)
        except OSError:
            return None
        there = tuple((found.st_dev, found.st_ino) for found in (database, log))
        return database.st_size if (there, shared) == (known, self._shared_identity) else None

    def _change(self, fault: Fault, present: bool) -> None:
        if present == (fault in self.faults):
            return
        (self.faults.add if present else self.faults.discard)(fault)
        if present:
            _log.error("{trouble} ({path})", event="store.fault", trouble=FAULT_MESSAGES[fault], path=self._paths[0])
        else:
            _log.info("no longer: {trouble}", event="store.fault_over", trouble=FAULT_MESSAGES[fault])
        self._tell(fault, present)


def _identity(path: str) -> tuple[int, int]:
    """:raise OSError: there is no such file."""
    found = os.stat(path)
    return found.st_dev, found.st_ino
