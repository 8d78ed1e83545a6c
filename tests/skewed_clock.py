"""Daemons whose clock is wrong, or is set while they run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.integration.daemon import Daemon

# Python runs it at start, in workers as well.
_SITECUSTOMIZE = """
import time

_true = time.time


def _time():
    with open({path!r}) as file:
        return _true() + float(file.read())


time.time = _time
"""


class SkewedClock:
    """
    Clock for child processes.

    :param ahead: seconds ahead of the true time.
    """

    def __init__(self, ahead: float = 0.0) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="mediatord-clock-"))
        self._path = self._directory / "ahead"
        code = _SITECUSTOMIZE.format(path=str(self._path))
        (self._directory / "sitecustomize.py").write_text(code, encoding="utf-8")
        self.set(ahead)

    def set(self, ahead: float) -> None:
        """Set the clock for all processes that use it."""
        # Replaced atomically, so that readers see all of it.
        temporary = self._path.with_suffix(".new")
        temporary.write_text(str(ahead), encoding="ascii")
        temporary.replace(self._path)

    def remove(self) -> None:
        """Delete its files; no process uses it any more."""
        shutil.rmtree(self._directory)

    def variables(self) -> dict[str, str]:
        """Environment variables of processes that use it."""
        return {"PYTHONPATH": os.pathsep.join(filter(None, [str(self._directory), os.environ.get("PYTHONPATH")]))}


class ClockedDaemon(Daemon):
    """
    Daemon that uses a skewed clock. It runs as a program of its own, as only those load `sitecustomize`.

    :param settings: as of :class:`Daemon`.
    :param variables: further environment variables.
    """

    def __init__(
        self,
        clock: SkewedClock,
        settings: Mapping[str, Any] | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(settings)
        self._variables = {**clock.variables(), **(variables or {})}

    def start(self, health: int = 200) -> None:
        """As :meth:`Daemon.start`."""
        if not self.config.exists():
            self.initialise()
        environment = {name: value for name, value in os.environ.items() if not name.startswith("MEDIATORD_")}
        with open(self._root / "output", "ab") as output:
            process: Any = subprocess.Popen(
                [sys.executable, "-m", "mediatord", "run", "--config", str(self.config)],
                cwd=self._root,
                env={**environment, **self._variables},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self._process = process
        self.await_health(health)
