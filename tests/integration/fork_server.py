"""
Runs daemons as forks of a server process that has imported them already.

Each runs `mediatord run` from its first line. Starting the actual program is tested in test_lifecycle.py and
test_workers.py.
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

# Modules that the daemon imports at start; none may install a reactor, which cannot be inherited.
import twisted.scripts.twistd  # noqa: F401

import mediatord.tap  # noqa: F401
from mediatord.cli.commands import main

_PR_SET_PDEATHSIG = 1

_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload([__name__])
# Starting a process polls the others, whose exit status can be read only once.
_status = Lock()


class ForkedDaemonProcess:
    """
    A running `mediatord run`, which never outlives this process.

    :param directory: working directory.
    :param output: file to which its output is appended.
    :param environment: its whole environment.
    :param before: called in the process before the daemon starts; must be picklable.
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
        """Process id."""
        assert self._process.pid is not None
        return self._process.pid

    def send_signal(self, number: int) -> None:
        """Send a signal; does nothing if it has ended."""
        if not wait([self._process.sentinel], 0):
            # It may end meanwhile.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """End it with SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        """
        Wait for its end; return the exit status, or the negative signal number.

        :param timeout: seconds.
        :raise TimeoutExpired: it has not ended.
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
    """Run the daemon as if started as a program; it is killed with the fork server, which ends with this process."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # One of them is what keeps the fork server alive.
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    nothing = os.open(os.devnull, os.O_RDONLY)
    log = os.open(output, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    for descriptor, number in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(descriptor, number)
    os.close(nothing)
    os.close(log)
    sys.argv = ["mediatord"]
    if before is not None:
        before()
    try:
        main(["run", "--config", str(config)])
    finally:
        # Children of a fork server end without.
        atexit._run_exitfuncs()
