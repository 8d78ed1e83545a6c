"""
Daemons without the time that it takes to import them: children of a server that has done so, and only that.

Each runs `mediatord run` from its first line. What a process begins with otherwise is tested where the program is
started as people and service managers do (test_lifecycle.py, test_workers.py).
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from multiprocessing.connection import wait
from pathlib import Path
from threading import Lock

# What the daemon imports when it starts; nothing of it may make a reactor, which cannot be inherited.
import twisted.scripts.twistd  # noqa: F401

import mediatord.tap  # noqa: F401
from mediatord.cli.commands import main

_PR_SET_PDEATHSIG = 1

_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload([__name__])
# Beginning one asks for the status of all others, which can be read once.
_status = Lock()


class ForkedDaemonProcess:
    """
    A running `mediatord run`, which does not outlive this process however that ends.

    :param directory: where it is to work.
    :param output: what it writes is appended here.
    :param environment: all of it.
    :param before: called in the process before it begins; something that can be pickled.
    """

    def __init__(
        self,
        config: Path,
        directory: Path,
        output: Path,
        environment: Mapping[str, str],
        before: Callable[[], None] | None = None,
    ) -> None:
        arguments = (config, directory, output, dict(environment), before)
        self._process = _forks.Process(target=_run, args=arguments, daemon=True)
        with _status:
            self._process.start()

    @property
    def pid(self) -> int:
        """Of the process."""
        assert self._process.pid is not None
        return self._process.pid

    def send_signal(self, number: int) -> None:
        """Nothing, if it has ended."""
        if not wait([self._process.sentinel], 0):
            # It may end in between.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """End it as a power cut would."""
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        """
        The exit status once it has ended; negative, the signal that ended it.

        :param timeout: seconds.
        :raise TimeoutExpired: it has not.
        """
        if not wait([self._process.sentinel], timeout):
            raise subprocess.TimeoutExpired("mediatord run", timeout or 0)
        with _status:
            self._process.join()
        assert self._process.exitcode is not None
        return self._process.exitcode


def _run(
    config: Path, directory: Path, output: Path, environment: dict[str, str], before: Callable[[], None] | None
) -> None:
    """As if the program had been started like that, but to be killed with the fork server, which ends with us."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # One of them is what keeps the fork server alive.
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    nothing = os.open(os.devnull, os.O_RDONLY)
    said = os.open(output, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    for opened, number in ((nothing, 0), (said, 1), (said, 2)):
        os.dup2(opened, number)
    os.close(nothing)
    os.close(said)
    sys.argv = ["mediatord"]
    if before is not None:
        before()
    try:
        main(["run", "--config", str(config)])
    finally:
        # Children of a fork server end without.
        atexit._run_exitfuncs()
