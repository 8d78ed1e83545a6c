"""The daemon under torture: on a disk and by a clock that somebody else has in hand."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.integration.daemon import Daemon, clean_environment
from tests.integration.fork_server import ForkedDaemonProcess
from tests.torture.disk_trace import DiskTrace
from tests.torture.faulty_disk import DiskControl, DiskSpec
from tests.torture.process_environment import ProcessEnvironment, SharedClockOffset

_DATABASE = "mediator.sqlite3"


class ControlledDaemon(Daemon):
    """
    One daemon, started over and over again.

    :ivar dial: what its disk is like.
    :ivar clock: what it goes by.
    """

    def __init__(self, settings: Mapping[str, Any] | None = None) -> None:
        super().__init__(settings)
        self.disk_control = DiskControl.make(self._root / "dial")
        self.clock = SharedClockOffset.make(self._root / "clock")
        self.trace = self._root / "tape"
        self.base = self._root / "base"
        self.syncs = True
        self._tracing = False

    @property
    def database(self) -> Path:
        """The file of SQLite, if that is what it keeps everything in."""
        return self.directory / _DATABASE

    def start_trace(self) -> None:
        """From the next start on everything that is written is noted; what is there now is on disk."""
        assert not self.running, "what it has written so far is not known"
        shutil.rmtree(self.base, ignore_errors=True)
        self.base.mkdir()
        for file in self.directory.glob(f"{_DATABASE}*"):
            if file.suffix == ".sqlite3" or file.name.endswith(("-wal", "-journal")):
                shutil.copy(file, self.base)
        DiskTrace.blank(self.trace)
        self._tracing = True

    def stop_trace(self) -> None:
        """Nothing is noted any more, from the next start on."""
        self._tracing = False
        self.trace.unlink(missing_ok=True)

    def start(self, health: int = 200) -> None:
        """As any other."""
        assert self._process is None, "the daemon is running"
        if not self.config.exists():
            self.initialise()
        disk = DiskSpec(self._root / "dial", self.trace if self._tracing else None, self.syncs)
        world = ProcessEnvironment(disk, self._root / "clock")
        self._process = ForkedDaemonProcess(
            self.config, self._root, self._root / "output", clean_environment(), world
        )
        self.await_health(health)
