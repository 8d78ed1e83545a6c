"""
Fault-injecting disk for SQLite: it can be full, read-only or broken, and its trace shows what was synced.

It wraps the functions of SQLite's default VFS.
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

# Longest duration of a sync in seconds; a memory file system would need none.
SYNC_SECONDS = 0.008
# Open flags of database, rollback journal and write-ahead log.
_DATABASE = 0x00000100
_TRACED = _DATABASE | 0x00000800 | 0x00080000
_CREATE = 0x00000004
_SQLITE_OK, _SQLITE_IOERR = 0, sqlite3.SQLITE_IOERR
# SQLite's errors for EROFS in an open file, and for EIO.
_SQLITE_IOERR_WRITE = sqlite3.SQLITE_IOERR_WRITE


class DiskMode(IntEnum):
    """State of the disk."""

    WELL, FULL, READ_ONLY, BROKEN = range(4)


_REFUSALS = {
    DiskMode.FULL: sqlite3.SQLITE_FULL,
    DiskMode.READ_ONLY: sqlite3.SQLITE_READONLY,
    DiskMode.BROKEN: _SQLITE_IOERR_WRITE,
}


class DiskControl:
    """Shared state of a disk. :param path: file shared by the processes."""

    def __init__(self, path: Path) -> None:
        with open(path, "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 1)

    @staticmethod
    def create(path: Path) -> DiskControl:
        """A disk that works."""
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
    Disk of a process.

    :param disk_control: file of its :class:`DiskControl`.
    :param trace: trace file; None for no trace.
    :param syncs: whether syncs are traced; a disk that ignores them loses data.
    """

    disk_control: Path
    trace: Path | None = None
    syncs: bool = True

    def mount(self) -> None:
        """Use it for all databases that this process opens from now on."""
        # Each write of a commit calls into the interpreter.
        sys.setswitchinterval(0.0005)
        trace = DiskTrace(self.trace) if self.trace is not None else None
        _VFSShim(DiskControl(self.disk_control), trace, syncs=self.syncs).install()


class _Methods(Structure):
    """`sqlite3_io_methods`, as far as used here; other functions are unchanged."""

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


# Names are passed as addresses: SQLite keeps them, and further data follows a name.
_OPEN = (c_int, c_void_p, c_void_p, POINTER(_File), c_int, c_void_p)
_DELETE = (c_int, c_void_p, c_void_p, c_int)
_WRITE = (c_int, c_void_p, c_void_p, c_int, c_int64)
_TRUNCATE = (c_int, c_void_p, c_int64)
_SYNC = (c_int, c_void_p, c_int)


class _VFSShim:
    """Wrapper of the VFS. It must never be freed."""

    def __init__(self, disk_control: DiskControl, trace: DiskTrace | None, *, syncs: bool) -> None:
        self._disk_control = disk_control
        self._trace = trace
        self._syncs = syncs
        self._numbers = itertools.count()
        self._names: dict[int, str] = {}
        self._new: set[int] = set()
        self._wrapped: dict[int, Any] = {}
        self._references: list[Any] = []
        self._lock = threading.Lock()

    def install(self) -> None:
        """Replace the functions that open and delete files."""
        import _sqlite3  # noqa: PLC0415  the library that this process uses, whichever it is

        library = ctypes.CDLL(_sqlite3.__file__)
        library.sqlite3_vfs_find.restype = POINTER(_VFS)
        vfs = library.sqlite3_vfs_find(None).contents
        self._replace(vfs, "xOpen", _OPEN, self._open)
        self._replace(vfs, "xDelete", _DELETE, self._delete)
        self._references.append(self)
        _installed_shims.append(self)

    def _replace(self, structure: Structure, name: str, kind: Any, wrapper: Callable[..., int]) -> None:
        """Replace a function by `wrapper`, which gets the original function as first argument."""
        address = getattr(structure, name)
        # Only a sync waits long enough to release the interpreter.
        original = (CFUNCTYPE if name in ("xSync", "xOpen") else PYFUNCTYPE)(*kind)(address)
        callback = CFUNCTYPE(*kind)(_guarded(partial(wrapper, original)))
        self._references += [original, callback]
        setattr(structure, name, ctypes.cast(callback, c_void_p))

    def _open(self, original: Any, vfs: int, name: int | None, file: Any, flags: int, out: int) -> int:
        code = int(original(vfs, name, file, flags, out))
        if code == _SQLITE_OK and flags & _TRACED and name:
            with self._lock:
                address = ctypes.addressof(file.contents)
                self._names[address] = _base_name(name)
                # SQLite also syncs the directory at the first sync of such a file.
                (self._new.add if flags & _TRACED & ~_DATABASE and flags & _CREATE else self._new.discard)(address)
                file.contents.methods = self._methods(file.contents.methods)
        return code

    def _methods(self, original: Any) -> Any:
        address = ctypes.addressof(original.contents)
        if address not in self._wrapped:
            methods = _Methods.from_buffer_copy(original.contents)
            self._replace(methods, "xWrite", _WRITE, self._write)
            self._replace(methods, "xTruncate", _TRUNCATE, self._truncate)
            self._replace(methods, "xSync", _SYNC, self._sync)
            self._wrapped[address] = methods
        return ctypes.pointer(self._wrapped[address])

    def _delete(self, original: Any, vfs: int, name: int, synced: int) -> int:
        code = int(original(vfs, name, synced))
        if code == _SQLITE_OK:
            self._append(TraceEntry(DiskOperation.DELETE, _base_name(name), 0))
            if synced:
                self._trace_sync("", lambda: _SQLITE_OK)
        return code

    def _write(self, original: Any, file: int, data: int, size: int, at: int) -> int:
        if (refusal := _REFUSALS.get(self._disk_control.mode)) is not None:
            return int(refusal)
        code = int(original(file, data, size, at))
        if code == _SQLITE_OK and self._trace is not None:
            self._append(TraceEntry(DiskOperation.WRITE, self._names[file], at, ctypes.string_at(data, size)))
        return code

    def _truncate(self, original: Any, file: int, size: int) -> int:
        code = int(original(file, size))
        if code == _SQLITE_OK:
            self._append(TraceEntry(DiskOperation.TRUNCATE, self._names[file], size))
        return code

    def _sync(self, original: Any, file: int, flags: int) -> int:
        code = self._trace_sync(self._names[file], lambda: _sync_with_delay(original, file, flags))
        if code == _SQLITE_OK and file in self._new:
            self._new.discard(file)
            self._trace_sync("", lambda: _SQLITE_OK)
        return code

    def _trace_sync(self, name: str, sync: Callable[[], int]) -> int:
        number = next(self._numbers)
        if self._syncs:
            self._append(TraceEntry(DiskOperation.SYNC_BEGUN, name, number))
        code = sync()
        if code == _SQLITE_OK and self._syncs:
            self._append(TraceEntry(DiskOperation.SYNC_DONE, name, number))
        return code

    def _append(self, entry: TraceEntry) -> None:
        if self._trace is not None:
            self._trace.append(entry)


_installed_shims: list[_VFSShim] = []


def _base_name(path: int) -> str:
    return os.path.basename(ctypes.string_at(path).decode())


def _sync_with_delay(original: Any, file: int, flags: int) -> int:
    time.sleep(random.uniform(0, SYNC_SECONDS))
    return int(original(file, flags))


def _guarded(work: Callable[..., int]) -> Callable[..., int]:
    """Callbacks from C must not raise."""

    def guarded(*arguments: Any) -> int:
        try:
            return work(*arguments)
        except BaseException as error:
            print(f"the disk of the test fails: {error!r}", file=sys.stderr)  # noqa: T201  nobody else would say so
            return int(_SQLITE_IOERR)

    return guarded
