"""A MongoDB server as a child process that never outlives this process."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import SkipTest

from mediatord.wallet.temporary_daemon import find_free_port

ENVIRONMENT = Path(__file__).parents[1] / ".mongod"

START_SECONDS = 60.0
STOP_SECONDS = 60.0
# Interval at which a starting server is probed; between probes, its exit is waited for.
_POLL_SECONDS = 0.02
_MEMORY_DISK = Path("/dev/shm")
# Upper bound of a member's size during tests.
_MEMBER_BYTES = 512 << 20
_ATTEMPTS = 3

# The kernel kills the server when the thread that started it ends; this one lasts as long as the process.
_starter = ThreadPoolExecutor(1, "mongod-starter")

_OPTIONS = (
    "--nounixsocket",
    *("--bind_ip", "127.0.0.1"),
    *("--oplogSize", "64"),
    *("--wiredTigerCacheSizeGB", "0.25"),
    *("--wiredTigerEngineConfigString", "log=(prealloc=false,file_max=4MB)"),
    *("--setParameter", "diagnosticDataCollectionEnabled=false"),
    *("--setParameter", "ttlMonitorSleepSecs=1"),
    *("--setParameter", "shutdownTimeoutMillisForSignaledShutdown=100"),
    *("--setParameter", "enableTestCommands=1"),
)


@functools.cache
def mongod_binary() -> Path:
    """
    Path of the server: `MONGOD`, or the one that `make test` installs.

    :raise SkipTest: there is none that runs here; the text says how to get one.
    :raise AssertionError: `MONGOD` names one that does not run.
    """
    return find_mongod(os.environ.get("MONGOD"), ENVIRONMENT)


def find_mongod(named: str | None, environment: Path) -> Path:
    """As :func:`mongod_binary`, with the value of `MONGOD` and the directory of the environment."""
    if named:
        fault = _startup_error(Path(named))
        assert fault is None, f"MONGOD={named} does not run: {fault}"
        return Path(named)
    found = [*environment.glob("lib/python*/site-packages/fiftyone/db/bin/mongod")]
    if not found or not (environment / ".installed").exists():
        raise SkipTest(
            "no MongoDB server is installed: `make .mongod` does that, MONGOD=/path/to/mongod names another"
        )
    if fault := _startup_error(found[0]):
        raise SkipTest(f"the MongoDB server in {environment.name} does not run here ({fault}); MONGOD names another")
    return found[0]


def _startup_error(binary: Path) -> str | None:
    """Why the binary does not run, such as missing libraries or processor features."""
    try:
        ran = subprocess.run(
            [binary, "--version"], capture_output=True, text=True, timeout=START_SECONDS, check=False
        )
    except OSError as error:
        return error.strerror
    lines = ran.stderr.strip().splitlines()
    return None if ran.returncode == 0 else (lines[-1] if lines else f"exit status {ran.returncode}")


class TemporaryDataDirectory:
    """
    Directory that is deleted when this process ends, even when it is killed.

    :param members: number of servers that it has to hold.
    """

    def __init__(self, members: int = 1) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="mediatord-mongod-", dir=_has_room(members * _MEMBER_BYTES)))
        # Its standard input closes with :meth:`close` or when this process ends. A server may write for a moment
        # longer.
        self._sweeper = subprocess.Popen(
            ["sh", "-c", 'cat >/dev/null; until rm -rf "$1" 2>/dev/null; do sleep 0.1; done', "sweeper", self.path],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )

    @property
    def sweeper_pid(self) -> int:
        """Process id of the process that deletes it."""
        return self._sweeper.pid

    def close(self) -> None:
        """Delete it."""
        assert self._sweeper.stdin is not None
        self._sweeper.stdin.close()
        self._sweeper.wait()


def _has_room(size: int) -> Path | None:
    if _MEMORY_DISK.is_dir() and shutil.disk_usage(_MEMORY_DISK).free >= size:
        return _MEMORY_DISK
    return None


class Mongod:
    """
    One server. Port and data stay the same over restarts.

    :param directory: its own directory; created if missing.
    :param options: in addition to those that keep it small.
    """

    def __init__(self, directory: Path, options: Sequence[str] = ()) -> None:
        self._directory = directory
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None
        self._settled = False
        self.port = find_free_port()

    @property
    def pid(self) -> int:
        """Process id of the running server."""
        return self._running().pid

    @property
    def running(self) -> bool:
        """Whether it was started and has not been ended."""
        return self._process is not None

    @property
    def log(self) -> Path:
        """Log file; exists once the server was started."""
        return self._directory / "log"

    def start(self) -> None:
        """
        Start it and wait until it listens.

        :raise AssertionError: it ended or did not listen in time; the text has the end of its log.
        """
        assert self._process is None, "the server is running"
        for attempt in range(_ATTEMPTS):
            try:
                return self._begin()
            except AssertionError:
                # Another process may have taken the port; after the first start others know it, so it must stay.
                if self._settled or attempt == _ATTEMPTS - 1:
                    raise
                self.port = find_free_port()
        return None

    def send_kill(self) -> None:
        """Send SIGKILL without waiting, so that several servers end at the same time; :meth:`kill` must follow."""
        self._running().kill()

    def kill(self) -> None:
        """End it with SIGKILL."""
        process, self._process = self._running(), None
        process.kill()
        process.wait()

    def stop(self) -> None:
        """Shut it down in order."""
        process, self._process = self._running(), None
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise AssertionError(f"no end {STOP_SECONDS:.0f} s after SIGTERM: {self.log_tail()}") from None

    def freeze(self) -> None:
        """Suspend it: connections stay open, nothing is answered."""
        self._running().send_signal(signal.SIGSTOP)
        # Wait until all of its threads have stopped.
        os.waitid(os.P_PID, self._running().pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def thaw(self) -> None:
        """Resume it."""
        self._running().send_signal(signal.SIGCONT)

    def log_tail(self) -> str:
        """End of its log, for failure messages."""
        if not self.log.exists():
            return ""
        return "\n".join(self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-5:])

    def _running(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "the server is not running"
        return self._process

    def _begin(self) -> None:
        data = self._directory / "data"
        data.mkdir(parents=True, exist_ok=True)
        with open(self.log, "ab") as log:
            self._process = _starter.submit(
                subprocess.Popen,
                [
                    *("setpriv", "--pdeathsig", "KILL", "--", str(mongod_binary())),
                    *("--port", str(self.port), "--dbpath", str(data), *_OPTIONS, *self._options),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            ).result()
        try:
            self._await_listening(self._running())
        except BaseException:
            if self._process is not None:
                self.kill()
            raise
        self._settled = True

    def _await_listening(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not self._listens():
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = process.wait(_POLL_SECONDS)
                self._process = None
                raise AssertionError(f"exit status {status} at start: {self.log_tail()}")
            assert time.monotonic() < deadline, f"no answer after {START_SECONDS:.0f} s: {self.log_tail()}"

    def _listens(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port), timeout=START_SECONDS).close()
        except OSError:
            return False
        return True
