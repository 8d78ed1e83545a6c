"""Disk and clock of a process, installed at its start. Nothing here may install a reactor."""

from __future__ import annotations

import mmap
import struct
import time
from dataclasses import dataclass
from pathlib import Path

import mediatord.runtime.reactor_clock
from tests.torture.faulty_disk import DiskSpec

_AHEAD = struct.Struct("<d")


class SharedClockOffset:
    """Clock offset in shared memory. :param path: its file."""

    def __init__(self, path: Path) -> None:
        with open(path, "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _AHEAD.size)

    @staticmethod
    def create(path: Path) -> SharedClockOffset:
        """An offset of zero."""
        path.write_bytes(_AHEAD.pack(0.0))
        return SharedClockOffset(path)

    @property
    def ahead(self) -> float:
        return float(_AHEAD.unpack_from(self._memory)[0])

    @ahead.setter
    def ahead(self, seconds: float) -> None:
        _AHEAD.pack_into(self._memory, 0, seconds)

    def install(self) -> None:
        """Use it in this process, which must not have read the time before."""
        true = time.time  # noqa: TID251  what is set is the clock of the host
        steady = mediatord.runtime.reactor_clock.MonotonicReactorClock.__init__
        assert steady.__defaults__ == (true, time.monotonic), "MonotonicReactorClock reads the time in another way"
        steady.__defaults__ = (lambda: true() + self.ahead, time.monotonic)


@dataclass(frozen=True, slots=True)
class ProcessEnvironment:
    """Disk and clock of a process. :param clock: the file of its :class:`SharedClockOffset`."""

    disk: DiskSpec
    clock: Path

    def __call__(self) -> None:
        self.disk.mount()
        SharedClockOffset(self.clock).install()
