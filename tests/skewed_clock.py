"""Daemons that go by a clock that is wrong, or set while they run."""

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

# Python runs it before anything else, in workers as well.
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
    A clock for child processes.

    :param ahead: of the true time, in seconds.
    """

    def __init__(self, ahead: float = 0.0) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="mediatord-clock-"))
        self._path = self._directory / "ahead"
        code = _SITECUSTOMIZE.format(path=str(self._path))
        (self._directory / "sitecustomize.py").write_text(code, encoding="utf-8")
        self.set(ahead)

    def set(self, ahead: float) -> None:
        """Set it, for all who go by it."""
        # Replaced, so that what is read is always all of it.
        fresh = self._path.with_suffix(".new")
        fresh.write_text(str(ahead), encoding="ascii")
        fresh.replace(self._path)

    def remove(self) -> None:
        """Nobody goes by it any more."""
        shutil.rmtree(self._directory)

    def variables(self) -> dict[str, str]:
        """The environment of who goes by it, as far as that differs."""
        return {"PYTHONPATH": os.pathsep.join(filter(None, [str(self._directory), os.environ.get("PYTHONPATH")]))}


class ClockedDaemon(Daemon):
    """
    Goes by such a clock; it is a program that was started, as only these read the time through what they begin with.

    :param settings: as of any other.
    :param variables: more of its environment.
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
        """As any other."""
        if not self.config.exists():
            self.initialise()
        ours = {name: value for name, value in os.environ.items() if not name.startswith("MEDIATORD_")}
        with open(self._root / "output", "ab") as output:
            process: Any = subprocess.Popen(
                [sys.executable, "-m", "mediatord", "run", "--config", str(self.config)],
                cwd=self._root,
                env={**ours, **self._variables},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self._process = process
        self.await_health(health)
