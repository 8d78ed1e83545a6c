"""What a process finds when it begins: a disk, and a clock. Nothing here may make a reactor."""

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
    """By how much a clock is ahead, in memory that processes share. :param path: of the file that it is."""

    def __init__(self, path: Path) -> None:
        with open(path, "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _AHEAD.size)

    @staticmethod
    def make(path: Path) -> SharedClockOffset:
        """One that is right."""
        path.write_bytes(_AHEAD.pack(0.0))
        return SharedClockOffset(path)

    @property
    def ahead(self) -> float:
        return float(_AHEAD.unpack_from(self._memory)[0])

    @ahead.setter
    def ahead(self, seconds: float) -> None:
        _AHEAD.pack_into(self._memory, 0, seconds)

    def hang_up(self) -> None:
        """Have this process go by it; it must not have read the time before."""
        true = time.time  # noqa: TID251  what is set is the clock of the host
        steady = mediatord.runtime.reactor_clock.MonotonicReactorClock.__init__
        assert steady.__defaults__ == (true, time.monotonic), "MonotonicReactorClock reads the time in another way"
        steady.__defaults__ = (lambda: true() + self.ahead, time.monotonic)


@dataclass(frozen=True, slots=True)
class ProcessEnvironment:
    """What a process finds when it begins. :param clock: the file of its :class:`SharedClockOffset`."""

    disk: DiskSpec
    clock: Path

    def __call__(self) -> None:
        self.disk.mount()
        SharedClockOffset(self.clock).hang_up()
