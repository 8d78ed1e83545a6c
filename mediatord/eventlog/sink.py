"""A file of lines that never raises and never grows without bound, whatever the disk does."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

_LINE_FEED = 10

FileState = Literal["closed", "in_place", "moved", "removed"]


class LineSink:
    """
    An appending file that takes what it can.

    :ivar pending: bytes not written yet, whole lines but for the first.
    :ivar size: bytes in the file.
    :ivar blocked: whether the last attempt failed.
    :ivar torn: whether the file has the beginning of the first of them.
    """

    def __init__(self, path: Path, capacity: int) -> None:
        self._path = path
        self._capacity = capacity
        self._descriptor: int | None = None
        self.pending = bytearray()
        self.size = 0
        self.blocked = False
        self.torn = False

    def open(self) -> None:
        """:raise OSError: it does not open."""
        if self._descriptor is None:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._descriptor = os.open(self._path, flags, 0o640)
            self.size = os.fstat(self._descriptor).st_size

    @property
    def is_open(self) -> bool:
        """Whether there is a file that lines go to."""
        return self._descriptor is not None

    def find_file(self) -> FileState:
        """Whether what is written still goes to a file of this path."""
        if self._descriptor is None:
            return "closed"
        status = os.fstat(self._descriptor)
        try:
            there = os.stat(self._path)
        except (FileNotFoundError, NotADirectoryError):
            return "moved" if status.st_nlink else "removed"
        except OSError:  # nobody can tell
            return "in_place"
        if (there.st_dev, there.st_ino) == (status.st_dev, status.st_ino):
            return "in_place"
        return "moved" if status.st_nlink else "removed"

    def leave_file(self, first: bytes) -> int:
        """
        Go on in another file: close this one, and keep whole lines that are not in it, after a first one.

        :return: lines given up, as a part of them is in the file that is left: none or one.
        """
        torn = self.torn
        if torn:
            del self.pending[: self.pending.find(b"\n") + 1]
        self.pending[:0] = first
        self._close()
        return int(torn)

    def add(self, line: bytes) -> bool:
        """Keep a line for the next flush; False when there is no room for it."""
        if len(self.pending) + len(line) > self._capacity:
            return False
        self.pending += line
        return True

    def flush(self) -> bool:
        """Write what waits; whether all of it went."""
        try:
            self.open()
            while self.pending:
                written = os.write(self._descriptor, self.pending)  # type: ignore[arg-type]  # open() has set it
                if written < len(self.pending):
                    self.torn = self.pending[written - 1] != _LINE_FEED
                del self.pending[:written]
                self.size += written
            self.blocked = self.torn = False
        except OSError:
            self.blocked = True
        return not self.blocked

    def close(self) -> int:
        """Close the file; what could not be written is given up: so many lines, one that is torn included."""
        given_up = self.pending.count(b"\n")
        self.pending.clear()
        self._close()
        return given_up

    def _close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor = None
        self.size = 0
        self.torn = False
