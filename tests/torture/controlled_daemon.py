"""Daemon with a controllable disk and clock."""

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
    A daemon that is restarted many times.

    :ivar disk_control: state of its disk.
    :ivar clock: offset of its clock.
    """

    def __init__(self, settings: Mapping[str, Any] | None = None) -> None:
        super().__init__(settings)
        self.disk_control = DiskControl.create(self._root / "disk-control")
        self.clock = SharedClockOffset.create(self._root / "clock")
        self.trace = self._root / "trace"
        self.base = self._root / "base"
        self.syncs = True
        self._tracing = False

    @property
    def database(self) -> Path:
        """The SQLite file, if that is its store."""
        return self.directory / _DATABASE

    def start_trace(self) -> None:
        """From the next start on record all writes; the current files count as synced."""
        assert not self.running, "earlier writes were not recorded"
        shutil.rmtree(self.base, ignore_errors=True)
        self.base.mkdir()
        for file in self.directory.glob(f"{_DATABASE}*"):
            if file.suffix == ".sqlite3" or file.name.endswith(("-wal", "-journal")):
                shutil.copy(file, self.base)
        DiskTrace.create(self.trace)
        self._tracing = True

    def stop_trace(self) -> None:
        """Record nothing from the next start on."""
        self._tracing = False
        self.trace.unlink(missing_ok=True)

    def start(self, health: int = 200) -> None:
        """As :meth:`Daemon.start`."""
        assert self._process is None, "the daemon is running"
        if not self.config.exists():
            self.initialise()
        disk = DiskSpec(self._root / "disk-control", self.trace if self._tracing else None, self.syncs)
        environment = ProcessEnvironment(disk, self._root / "clock")
        self._process = ForkedDaemonProcess(
            self.config, self._root, self._root / "output", clean_environment(), environment
        )
        self.await_health(health)
