"""
Runs mediatord for a test or module: a child process with new keys on a free loopback port.

::

    with Daemon({"queue": {"max_messages": 3}}) as daemon:
        send_requests_to(daemon.url)
        daemon.kill()
        daemon.start()
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from types import TracebackType
from typing import Any

import yaml

from mediatord.cli.init import write_initial_files
from mediatord.wallet.temporary_daemon import find_free_port
from tests.integration.fork_server import ForkedDaemonProcess
from tests.ledger_checks import assert_ledger_balanced, read_sqlite_ledger

# Longer than any start or stop takes on a busy machine.
START_SECONDS = 120.0
STOP_SECONDS = 60.0
# Interval at which a starting daemon is probed; between probes, its exit is waited for.
POLL_SECONDS = 0.05

# Limits for tests, which send in a second what a wallet sends in a day.
PLENTY: dict[str, Any] = {
    "limits": {
        "did_per_minute": 1_000_000,
        "ip_per_minute": 1_000_000,
        "account_per_minute": 1_000_000,
        "accounts_per_address_per_day": 1_000_000,
        "registration_bytes_per_address_per_day": 1 << 30,
        "max_connections_per_ip": 10_000,
    }
}


class Daemon:
    """
    A daemon; as a context manager it starts and stops it.

    :param settings: changes to the configuration of ``mediatord init``; sections are merged.
    :ivar environment: variables in addition to those of this process.
    """

    def __init__(self, settings: Mapping[str, Any] | None = None) -> None:
        self._settings = settings or {}
        self.environment: dict[str, str] = {}
        self._root = Path(tempfile.mkdtemp(prefix="mediatord-test-"))
        self._process: ForkedDaemonProcess | None = None
        self.port = find_free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.directory = self._root / "mediator"
        self.config = self.directory / "mediator.yaml"

    @property
    def running(self) -> bool:
        """Whether it was started and has not been ended."""
        return self._process is not None

    @property
    def pid(self) -> int:
        """Process id of the running daemon."""
        assert self._process is not None, "the daemon is not running"
        return self._process.pid

    @property
    def log_directory(self) -> Path:
        """Directory of the event log."""
        return self.directory / str(self.configuration()["log"]["directory"])

    def configuration(self) -> dict[str, Any]:
        """The current configuration file."""
        return dict(yaml.safe_load(self.config.read_text(encoding="utf-8")))

    def output(self) -> str:
        """Standard output and standard error of the daemon."""
        path = self._root / "output"
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

    def start(self, health: int = 200) -> None:
        """
        Start the daemon and wait until it serves; the first time, create its files.

        :param health: expected status of `/health`.
        :raise AssertionError: it ended or did not answer so in time; the text has its output.
        """
        assert self._process is None, "the daemon is running"
        if not self.config.exists():
            self.initialise()
        self._process = ForkedDaemonProcess(
            self.config, self._root, self._root / "output", {**clean_environment(), **self.environment}
        )
        self.await_health(health)

    def stop(self) -> None:
        """
        Stop the daemon with SIGTERM.

        :raise AssertionError: it did not end in time with exit status 0.
        """
        process = self._release_process()
        process.send_signal(signal.SIGTERM)
        try:
            status = process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise AssertionError(f"no end {STOP_SECONDS:.0f} s after SIGTERM:\n{self.output()}") from None
        assert status == 0, f"exit status {status} after SIGTERM:\n{self.output()}"

    def kill(self) -> None:
        """End the daemon with SIGKILL."""
        process = self._release_process()
        process.kill()
        process.wait()

    def restart(self) -> None:
        """Stop and start it with the same directory and port."""
        self.stop()
        self.start()

    def __enter__(self) -> Daemon:
        try:
            self.start()
        except BaseException:
            self.clean()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            # An unclean stop is reported only if the test has not failed already.
            if self._process is not None and kind is None:
                self.stop()
                self._check_ledger()
        finally:
            self.clean()

    def _check_ledger(self) -> None:
        """:raise AssertionError: the SQLite store does not account for all accepted messages."""
        storage = self.configuration().get("storage", {})
        database = self.directory / storage.get("sqlite", {}).get("path", "mediator.sqlite3")
        if storage.get("backend", "sqlite") == "sqlite" and database.exists():
            assert_ledger_balanced(read_sqlite_ledger(database))

    def initialise(self) -> None:
        """Create its files as `mediatord init` does, which takes as long as a start."""
        write_initial_files(self.directory, self.url)
        listen = {"listen": [f"tcp:{self.port}:interface=127.0.0.1"]}
        merged = merge_settings(merge_settings(merge_settings(self.configuration(), PLENTY), listen), self._settings)
        self.config.write_text(yaml.safe_dump(merged, sort_keys=False), encoding="utf-8")

    def await_health(self, status: int = 200) -> None:
        """
        Wait for a status of `/health`.

        :raise AssertionError: it was not answered in time, or the daemon ended; the text has its output.
        """
        assert self._process is not None, "the daemon is not running"
        self._await(self._process, lambda: self._health() == status, f"not {status}")

    def await_output(self, text: str) -> None:
        """
        Wait until the daemon has written this text.

        :raise AssertionError: it did not in time, or ended; the text has its output.
        """
        assert self._process is not None, "the daemon is not running"
        self._await(self._process, lambda: text in self.output(), f"no {text!r}")

    def _await(self, process: ForkedDaemonProcess, reached: Callable[[], bool], otherwise: str) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not reached():
            try:
                status = process.wait(POLL_SECONDS)
            except subprocess.TimeoutExpired:
                assert time.monotonic() < deadline, f"{otherwise} after {START_SECONDS:.0f} s:\n{self.output()}"
            else:
                self._process = None
                raise AssertionError(f"exit status {status} at start:\n{self.output()}")

    def _health(self) -> int | None:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=START_SECONDS)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status
        except (OSError, HTTPException):
            return None
        finally:
            connection.close()

    def _release_process(self) -> ForkedDaemonProcess:
        """The running process, which :meth:`stop` no longer ends."""
        process, self._process = self._process, None
        assert process is not None, "the daemon is not running"
        return process

    def clean(self) -> None:
        """Kill it if it runs, and delete its files."""
        if self._process is not None:
            self.kill()
        for last in (False, False, True):
            # A program that compresses a segment may outlive the daemon for a moment, and still write.
            if self._root.exists():
                with contextlib.nullcontext() if last else contextlib.suppress(OSError):
                    shutil.rmtree(self._root)


def merge_settings(settings: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`settings` with `changes`; mappings are merged, other values replaced."""
    merged = dict(settings)
    for name, value in changes.items():
        ours = merged.get(name)
        merged[name] = (
            merge_settings(ours, value) if isinstance(ours, Mapping) and isinstance(value, Mapping) else value
        )
    return merged


def clean_environment() -> dict[str, str]:
    """The environment without settings of mediatord."""
    return {name: value for name, value in os.environ.items() if not name.startswith("MEDIATORD_")}
