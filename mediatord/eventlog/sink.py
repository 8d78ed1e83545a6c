"""A file of lines that never raises and never grows without bound, whatever the disk does."""

from __future__ import annotations

import os
from pathlib import Path


class LineSink:
    """
    An appending file that takes what it can.

    :ivar pending: bytes not written yet, whole lines but for the first.
    :ivar size: bytes in the file.
    :ivar blocked: whether the last attempt failed.
    """

    def __init__(self, path: Path, capacity: int) -> None:
        self._path = path
        self._capacity = capacity
        self._descriptor: int | None = None
        self.pending = bytearray()
        self.size = 0
        self.blocked = False

    def open(self) -> None:
        """:raise OSError: it does not open."""
        if self._descriptor is None:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._descriptor = os.open(self._path, flags, 0o640)
            self.size = os.fstat(self._descriptor).st_size

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
                del self.pending[:written]
                self.size += written
            self.blocked = False
        except OSError:
            self.blocked = True
        return not self.blocked

    def close(self) -> int:
        """Close the file; what could not be written is given up: so many lines, one that is torn included."""
        given_up = self.pending.count(b"\n")
        self.pending.clear()
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor = None
        self.size = 0
        return given_up
