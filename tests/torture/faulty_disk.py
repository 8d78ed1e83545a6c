"""
A disk under SQLite that can be filled, write-protected and broken, and whose trace shows what was synced.

It lies between SQLite and the files of this process: the functions of SQLite's own way to the operating system are
replaced by ours, which call them.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import random
import sqlite3
import sys
import threading
import time
from collections.abc import Callable
from ctypes import CFUNCTYPE, POINTER, PYFUNCTYPE, Structure, c_char_p, c_int, c_int64, c_void_p
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from pathlib import Path
from typing import Any

from tests.torture.disk_trace import DiskOperation, DiskTrace, TraceEntry

# What a disk takes for a sync, seconds at most: a file system in memory would take no time at all.
SYNC_SECONDS = 0.008
# Database, rollback journal, write-ahead log.
_DATABASE = 0x00000100
_OURS = _DATABASE | 0x00000800 | 0x00080000
_CREATE = 0x00000004
_SQLITE_OK, _SQLITE_IOERR = 0, sqlite3.SQLITE_IOERR
# What SQLite makes of EROFS in a file that it has opened before, and of EIO.
_SQLITE_IOERR_WRITE = sqlite3.SQLITE_IOERR_WRITE


class DiskMode(IntEnum):
    """What the disk is like."""

    WELL, FULL, READ_ONLY, BROKEN = range(4)


_REFUSALS = {
    DiskMode.FULL: sqlite3.SQLITE_FULL,
    DiskMode.READ_ONLY: sqlite3.SQLITE_READONLY,
    DiskMode.BROKEN: _SQLITE_IOERR_WRITE,
}


class DiskControl:
    """What a disk is to be like, for it and for whoever decides so. :param path: of a file that both share."""

    def __init__(self, path: Path) -> None:
        with open(path, "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 1)

    @staticmethod
    def make(path: Path) -> DiskControl:
        """A disk that is well."""
        path.write_bytes(bytes((DiskMode.WELL,)))
        return DiskControl(path)

    @property
    def mode(self) -> DiskMode:
        return DiskMode(self._memory[0])

    @mode.setter
    def mode(self, mode: DiskMode) -> None:
        self._memory[0] = mode


@dataclass(frozen=True, slots=True)
class DiskSpec:
    """
    Which disk a process is to have.

    :param dial: the file of its :class:`DiskControl`.
    :param trace: file of the trace; None for none.
    :param syncs: whether syncs are noted; a disk that forgets them loses what was promised.
    """

    disk_control: Path
    trace: Path | None = None
    syncs: bool = True

    def mount(self) -> None:
        """Put it under all databases that this process opens from now on."""
        # Each write of a commit waits for the interpreter.
        sys.setswitchinterval(0.0005)
        trace = DiskTrace(self.trace) if self.trace is not None else None
        _VFSShim(DiskControl(self.disk_control), trace, syncs=self.syncs).install()


class _Methods(Structure):
    """`sqlite3_io_methods`, as far as it is called by name here; the rest goes where it went."""

    _fields_ = (
        ("iVersion", c_int),
        ("xClose", c_void_p),
        ("xRead", c_void_p),
        ("xWrite", c_void_p),
        ("xTruncate", c_void_p),
        ("xSync", c_void_p),
        ("others", c_void_p * 13),
    )


class _File(Structure):
    _fields_ = (("methods", POINTER(_Methods)),)


class _VFS(Structure):
    _fields_ = (
        ("iVersion", c_int),
        ("szOsFile", c_int),
        ("mxPathname", c_int),
        ("pNext", c_void_p),
        ("zName", c_char_p),
        ("pAppData", c_void_p),
        ("xOpen", c_void_p),
        ("xDelete", c_void_p),
    )


# Names are addresses: SQLite keeps them, and there is more behind a name.
_OPEN = (c_int, c_void_p, c_void_p, POINTER(_File), c_int, c_void_p)
_DELETE = (c_int, c_void_p, c_void_p, c_int)
_WRITE = (c_int, c_void_p, c_void_p, c_int, c_int64)
_TRUNCATE = (c_int, c_void_p, c_int64)
_SYNC = (c_int, c_void_p, c_int)


class _VFSShim:
    """Between SQLite and the operating system. Nothing of it may ever be freed."""

    def __init__(self, disk_control: DiskControl, trace: DiskTrace | None, *, syncs: bool) -> None:
        self._dial = disk_control
        self._trace = trace
        self._syncs = syncs
        self._numbers = itertools.count()
        self._names: dict[int, str] = {}
        self._new: set[int] = set()
        self._wrapped: dict[int, Any] = {}
        self._kept: list[Any] = []
        self._lock = threading.Lock()

    def install(self) -> None:
        """Replace what opens and deletes files."""
        import _sqlite3  # noqa: PLC0415  the library that this process uses, whichever it is

        library = ctypes.CDLL(_sqlite3.__file__)
        library.sqlite3_vfs_find.restype = POINTER(_VFS)
        vfs = library.sqlite3_vfs_find(None).contents
        self._replace(vfs, "xOpen", _OPEN, self._open)
        self._replace(vfs, "xDelete", _DELETE, self._delete)
        self._kept.append(self)
        _layers.append(self)

    def _replace(self, structure: Structure, name: str, kind: Any, ours: Callable[..., int]) -> None:
        """Have `ours` called, with the function that was there before its arguments."""
        address = getattr(structure, name)
        # A sync waits for the disk, and others work meanwhile; the rest is over before that was worth it.
        original = (CFUNCTYPE if name in ("xSync", "xOpen") else PYFUNCTYPE)(*kind)(address)
        callback = CFUNCTYPE(*kind)(_guarded(partial(ours, original)))
        self._kept += [original, callback]
        setattr(structure, name, ctypes.cast(callback, c_void_p))

    def _open(self, original: Any, vfs: int, name: int | None, file: Any, flags: int, out: int) -> int:
        answer = int(original(vfs, name, file, flags, out))
        if answer == _SQLITE_OK and flags & _OURS and name:
            with self._lock:
                address = ctypes.addressof(file.contents)
                self._names[address] = _base_name(name)
                # At its first sync SQLite syncs the directory of such a file as well.
                (self._new.add if flags & _OURS & ~_DATABASE and flags & _CREATE else self._new.discard)(address)
                file.contents.methods = self._methods(file.contents.methods)
        return answer

    def _methods(self, theirs: Any) -> Any:
        address = ctypes.addressof(theirs.contents)
        if address not in self._wrapped:
            ours = _Methods.from_buffer_copy(theirs.contents)
            self._replace(ours, "xWrite", _WRITE, self._write)
            self._replace(ours, "xTruncate", _TRUNCATE, self._truncate)
            self._replace(ours, "xSync", _SYNC, self._sync)
            self._wrapped[address] = ours
        return ctypes.pointer(self._wrapped[address])

    def _delete(self, original: Any, vfs: int, name: int, synced: int) -> int:
        answer = int(original(vfs, name, synced))
        if answer == _SQLITE_OK:
            self._note(TraceEntry(DiskOperation.DELETE, _base_name(name), 0))
            if synced:
                self._note_sync("", lambda: _SQLITE_OK)
        return answer

    def _write(self, original: Any, file: int, data: int, size: int, at: int) -> int:
        if (refusal := _REFUSALS.get(self._dial.mode)) is not None:
            return int(refusal)
        answer = int(original(file, data, size, at))
        if answer == _SQLITE_OK and self._trace is not None:
            self._note(TraceEntry(DiskOperation.WRITE, self._names[file], at, ctypes.string_at(data, size)))
        return answer

    def _truncate(self, original: Any, file: int, size: int) -> int:
        answer = int(original(file, size))
        if answer == _SQLITE_OK:
            self._note(TraceEntry(DiskOperation.TRUNCATE, self._names[file], size))
        return answer

    def _sync(self, original: Any, file: int, flags: int) -> int:
        answer = self._note_sync(self._names[file], lambda: _synced(original, file, flags))
        if answer == _SQLITE_OK and file in self._new:
            self._new.discard(file)
            self._note_sync("", lambda: _SQLITE_OK)
        return answer

    def _note_sync(self, name: str, sync: Callable[[], int]) -> int:
        number = next(self._numbers)
        if self._syncs:
            self._note(TraceEntry(DiskOperation.SYNC_BEGUN, name, number))
        answer = sync()
        if answer == _SQLITE_OK and self._syncs:
            self._note(TraceEntry(DiskOperation.SYNC_DONE, name, number))
        return answer

    def _note(self, entry: TraceEntry) -> None:
        if self._trace is not None:
            self._trace.append(entry)


_layers: list[_VFSShim] = []


def _base_name(path: int) -> str:
    return os.path.basename(ctypes.string_at(path).decode())


def _synced(original: Any, file: int, flags: int) -> int:
    time.sleep(random.uniform(0, SYNC_SECONDS))
    return int(original(file, flags))


def _guarded(work: Callable[..., int]) -> Callable[..., int]:
    """What C calls must not raise."""

    def guarded(*arguments: Any) -> int:
        try:
            return work(*arguments)
        except BaseException as error:
            print(f"the disk of the test fails: {error!r}", file=sys.stderr)  # noqa: T201  nobody else would say so
            return int(_SQLITE_IOERR)

    return guarded
