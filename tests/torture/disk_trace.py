"""
What a process did to its files, and what of it is on disk when the power fails.

A trace is memory that its writer shares with a file, so that all of it is there when the writer is killed.
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
# The file has holes: it takes as much room as there is on it.
_CAPACITY = 1 << 29


class DiskOperation(IntEnum):
    """
    What was done to a file.

    A sync makes durable what was written before it began, and that is known when it has ended. That of the directory,
    whose name is empty, does so for what was deleted.
    """

    WRITE, TRUNCATE, SYNC_BEGUN, SYNC_DONE, DELETE = range(5)


@dataclass(frozen=True, slots=True)
class TraceEntry:
    """:param at: where it was written, the size it was cut to, or which sync it is; 0 of what was deleted."""

    act: DiskOperation
    name: str
    at: int
    data: bytes = field(default=b"", repr=False)


class DiskTraceFull(Exception):
    """There is no more room on it."""


class DiskTrace:
    """To be appended to; threads may do so at the same time. What is on it stays."""

    def __init__(self, path: Path) -> None:
        with open(path, "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)
        (self._end,) = _HEAD.unpack_from(self._memory)
        self._lock = Lock()

    @staticmethod
    def blank(path: Path) -> None:
        """Make one."""
        with open(path, "wb") as file:
            file.truncate(_CAPACITY)
            file.write(_HEAD.pack(_HEAD.size))

    def append(self, entry: TraceEntry) -> None:
        """
        Note it.

        :raise TapeFull: nothing was noted.
        """
        name = entry.name.encode()
        head = _ENTRY.pack(entry.act, len(name), entry.at, len(entry.data))
        noted = head + name + entry.data
        with self._lock:
            end = self._end + len(noted)
            if end > len(self._memory):
                raise DiskTraceFull
            self._memory[self._end : end] = noted
            # Whoever is killed before this has not noted it.
            _HEAD.pack_into(self._memory, 0, end)
            self._end = end


def read_trace(path: Path) -> Iterator[TraceEntry]:
    """The entries of a trace, in order."""
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
    One file.

    :ivar durable: what is certainly on disk; None when it may be that there is no such file.
    :ivar pending: what may be there or not, any part of it, with its place in the trace.
    """

    def __init__(self, durable: bytearray | None = None) -> None:
        self.durable = durable
        self.pending: list[tuple[int, TraceEntry]] = []

    def synced(self, until: int) -> None:
        """All that was done before this place in the trace is on disk."""
        count = sum(place < until for place, _ in self.pending)
        done, self.pending = self.pending[:count], self.pending[count:]
        content = bytearray() if self.durable is None else self.durable
        for _, entry in done:
            _apply(content, entry)
        self.durable = content

    def deleted(self, until: int) -> None:
        """If it was deleted before this place, that is certain now."""
        places = [place for place, entry in self.pending if entry.act is DiskOperation.DELETE and place < until]
        if places:
            self.durable = None
            self.pending = [one for one in self.pending if one[0] > places[-1]]

    def after_power_cut(self, chance: random.Random, kept: float) -> bytes | None:
        """What is found afterwards. :param kept: the chance of each sector that was not synced."""
        found = None if self.durable is None else bytearray(self.durable)
        for _, entry in self.pending:
            for part in _sectors(entry) if entry.act is DiskOperation.WRITE else (entry,):
                if chance.random() < kept:
                    if part.act is DiskOperation.DELETE:
                        found = None
                    else:
                        found = bytearray() if found is None else found
                        _apply(found, part)
        return None if found is None else bytes(found)


class _Directory:
    """All files of a trace. :param files: those that were there, and durable, when it began."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = {name: _File(bytearray(content)) for name, content in files.items()}
        self._begun: dict[int, int] = {}

    def take(self, place: int, entry: TraceEntry) -> None:
        """Follow what was done."""
        if entry.act is DiskOperation.SYNC_BEGUN:
            self._begun[entry.at] = place
        elif entry.act is DiskOperation.SYNC_DONE:
            begun = self._begun.pop(entry.at)
            if entry.name:
                self.files.setdefault(entry.name, _File()).synced(begun)
            else:
                for file in self.files.values():
                    file.deleted(begun)
        else:
            self.files.setdefault(entry.name, _File()).pending.append((place, entry))


@dataclass(frozen=True, slots=True)
class DiskState:
    """
    What is on disk after a power cut.

    :param base: a directory with copies of the files that were there, and durable, when the trace began.
    :param kept: the chance of each sector that was not synced.
    """

    base: Path
    trace: Path
    chance: random.Random
    kept: float

    def replace(self, target: Path) -> int:
        """
        Replace the files of the trace, all of which lie in one directory.

        :return: how many writes had not been synced.
        """
        directory = _Directory({one.name: one.read_bytes() for one in self.base.iterdir()})
        for place, entry in enumerate(read_trace(self.trace)):
            directory.take(place, entry)
        for name, file in directory.files.items():
            found = file.after_power_cut(self.chance, self.kept)
            path = target / name
            path.unlink(missing_ok=True)
            if found is not None:
                with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as opened:
                    opened.write(found)
        return sum(len(file.pending) for file in directory.files.values())


def _apply(content: bytearray, entry: TraceEntry) -> None:
    if entry.act is not DiskOperation.WRITE:
        content[entry.at :] = b""
        return
    content.extend(bytes(max(0, entry.at - len(content))))
    content[entry.at : entry.at + len(entry.data)] = entry.data


def _sectors(entry: TraceEntry) -> Iterator[TraceEntry]:
    """A write in parts, each of which a disk writes as a whole."""
    begin, end = entry.at, entry.at + len(entry.data)
    while begin < end:
        until = min(end, (begin // SECTOR + 1) * SECTOR)
        yield TraceEntry(DiskOperation.WRITE, entry.name, begin, entry.data[begin - entry.at : until - entry.at])
        begin = until
