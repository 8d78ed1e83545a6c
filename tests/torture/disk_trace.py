"""
Records file operations of a process, and reconstructs the disk after a power cut.

A trace is a memory-mapped file, so it is complete even when its writer is killed.
"""

from __future__ import annotations

import mmap
import os
import random
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from threading import Lock

SECTOR = 512
_HEAD = struct.Struct("<Q")
_ENTRY = struct.Struct("<BHqI")
# The file is sparse.
_CAPACITY = 1 << 29


class DiskOperation(IntEnum):
    """
    An operation on a file.

    A sync makes writes durable that completed before it began; this is certain once it has ended. A sync of the
    directory, whose name is empty, does so for deletions.
    """

    WRITE, TRUNCATE, SYNC_BEGUN, SYNC_DONE, DELETE = range(5)


@dataclass(frozen=True, slots=True)
class TraceEntry:
    """:param at: offset of a write, size of a truncation, or number of a sync; 0 for a deletion."""

    operation: DiskOperation
    name: str
    at: int
    data: bytes = field(default=b"", repr=False)


class DiskTraceFull(Exception):
    """The trace has no space left."""


class DiskTrace:
    """Append-only trace, safe for threads. Entries persist."""

    def __init__(self, path: Path) -> None:
        with open(path, "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)
        (self._end,) = _HEAD.unpack_from(self._memory)
        self._lock = Lock()

    @staticmethod
    def create(path: Path) -> None:
        """Create an empty trace."""
        with open(path, "wb") as file:
            file.truncate(_CAPACITY)
            file.write(_HEAD.pack(_HEAD.size))

    def append(self, entry: TraceEntry) -> None:
        """
        Append an entry.

        :raise DiskTraceFull: nothing was appended.
        """
        name = entry.name.encode()
        head = _ENTRY.pack(entry.operation, len(name), entry.at, len(entry.data))
        entry_bytes = head + name + entry.data
        with self._lock:
            end = self._end + len(entry_bytes)
            if end > len(self._memory):
                raise DiskTraceFull
            self._memory[self._end : end] = entry_bytes
            # A writer killed before this has not appended it.
            _HEAD.pack_into(self._memory, 0, end)
            self._end = end


def read_trace(path: Path) -> Iterator[TraceEntry]:
    """Entries of a trace, in order."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as memory:
        (end,) = _HEAD.unpack_from(memory)
        at = _HEAD.size
        while at < end:
            act, name_size, place, data_size = _ENTRY.unpack_from(memory, at)
            name_at = at + _ENTRY.size
            data_at = name_at + name_size
            at = data_at + data_size
            yield TraceEntry(DiskOperation(act), memory[name_at:data_at].decode(), place, memory[data_at:at])


class _File:
    """
    State of one file.

    :ivar durable: content that is certainly on disk; None if the file may not exist.
    :ivar pending: later operations, any part of which may be on disk, with their positions in the trace.
    """

    def __init__(self, durable: bytearray | None = None) -> None:
        self.durable = durable
        self.pending: list[tuple[int, TraceEntry]] = []

    def apply_sync(self, until: int) -> None:
        """Everything before this position of the trace is on disk."""
        count = sum(position < until for position, _ in self.pending)
        applied, self.pending = self.pending[:count], self.pending[count:]
        content = bytearray() if self.durable is None else self.durable
        for _, entry in applied:
            _apply(content, entry)
        self.durable = content

    def apply_deletion(self, until: int) -> None:
        """A deletion before this position is certain."""
        positions = [
            position
            for position, entry in self.pending
            if entry.operation is DiskOperation.DELETE and position < until
        ]
        if positions:
            self.durable = None
            self.pending = [item for item in self.pending if item[0] > positions[-1]]

    def after_power_cut(self, chance: random.Random, kept: float) -> bytes | None:
        """Content after a power cut. :param kept: probability of each unsynced sector."""
        content = None if self.durable is None else bytearray(self.durable)
        for _, entry in self.pending:
            for part in _sectors(entry) if entry.operation is DiskOperation.WRITE else (entry,):
                if chance.random() < kept:
                    if part.operation is DiskOperation.DELETE:
                        content = None
                    else:
                        content = bytearray() if content is None else content
                        _apply(content, part)
        return None if content is None else bytes(content)


class _Directory:
    """All files of a trace. :param files: durable files at its beginning."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = {name: _File(bytearray(content)) for name, content in files.items()}
        self._sync_starts: dict[int, int] = {}

    def apply(self, position: int, entry: TraceEntry) -> None:
        """Apply an entry."""
        if entry.operation is DiskOperation.SYNC_BEGUN:
            self._sync_starts[entry.at] = position
        elif entry.operation is DiskOperation.SYNC_DONE:
            start = self._sync_starts.pop(entry.at)
            if entry.name:
                self.files.setdefault(entry.name, _File()).apply_sync(start)
            else:
                for file in self.files.values():
                    file.apply_deletion(start)
        else:
            self.files.setdefault(entry.name, _File()).pending.append((position, entry))


@dataclass(frozen=True, slots=True)
class DiskState:
    """
    Files on disk after a power cut.

    :param base: directory with copies of the durable files at the beginning of the trace.
    :param kept: probability of each unsynced sector.
    """

    base: Path
    trace: Path
    chance: random.Random
    kept: float

    def replace(self, target: Path) -> int:
        """
        Replace the files of the trace, which are in one directory.

        :return: number of unsynced writes.
        """
        directory = _Directory({path.name: path.read_bytes() for path in self.base.iterdir()})
        for position, entry in enumerate(read_trace(self.trace)):
            directory.apply(position, entry)
        for name, file in directory.files.items():
            content = file.after_power_cut(self.chance, self.kept)
            path = target / name
            path.unlink(missing_ok=True)
            if content is not None:
                with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as target_file:
                    target_file.write(content)
        return sum(len(file.pending) for file in directory.files.values())


def _apply(content: bytearray, entry: TraceEntry) -> None:
    if entry.operation is not DiskOperation.WRITE:
        content[entry.at :] = b""
        return
    content.extend(bytes(max(0, entry.at - len(content))))
    content[entry.at : entry.at + len(entry.data)] = entry.data


def _sectors(entry: TraceEntry) -> Iterator[TraceEntry]:
    """Parts of a write, each of which a disk writes atomically."""
    begin, end = entry.at, entry.at + len(entry.data)
    while begin < end:
        until = min(end, (begin // SECTOR + 1) * SECTOR)
        yield TraceEntry(DiskOperation.WRITE, entry.name, begin, entry.data[begin - entry.at : until - entry.at])
        begin = until
