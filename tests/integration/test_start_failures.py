"""Failing starts, with twistd in the foreground and as a daemon: exit status, standard error and log."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path

import pytest
import yaml

from mediatord.cli.init import write_initial_files
from mediatord.store.sqlite.database_file import DatabaseFileLock
from mediatord.wallet.temporary_daemon import find_free_port
from tests.integration.daemon import clean_environment
from tests.integration.message_load import PATIENCE_SECONDS

TWISTD = str(Path(sys.executable).with_name("twistd"))


@dataclass
class InitializedMediator:
    """Files of a mediator. :ivar directory: their directory."""

    directory: Path
    port: int

    @property
    def config(self) -> Path:
        """Configuration file."""
        return self.directory / "mediator.yaml"

    @property
    def log(self) -> str:
        """Log of twistd."""
        path = self.directory / "twistd.log"
        return path.read_text("utf-8") if path.exists() else ""

    @property
    def pid(self) -> Path:
        """Pid file of twistd."""
        return self.directory / "twistd.pid"

    def update_configuration(self, **settings: object) -> None:
        """Change settings in the configuration file."""
        now = yaml.safe_load(self.config.read_text("utf-8"))
        self.config.write_text(yaml.safe_dump({**now, **settings}), "utf-8")

    def run_twistd(self, *options: str) -> subprocess.CompletedProcess[str]:
        """Run twistd until it returns."""
        files = ["--pidfile", str(self.pid), "--logfile", str(self.directory / "twistd.log")]
        return subprocess.run(
            [TWISTD, *files, *options, "mediatord", "--config", str(self.config)],
            cwd=self.directory,
            env=clean_environment(),
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
            check=False,
        )


@pytest.fixture
def initialized_mediator(tmp_path: Path) -> InitializedMediator:
    """As `mediatord init` creates it."""
    port = find_free_port()
    write_initial_files(tmp_path / "m", f"http://127.0.0.1:{port}")
    return InitializedMediator(tmp_path / "m", port)


def port_in_use(initialized_mediator: InitializedMediator) -> AbstractContextManager[object]:
    """Another process listens on the port."""
    return socket.create_server(("127.0.0.1", initialized_mediator.port))


@contextlib.contextmanager
def store_in_use(initialized_mediator: InitializedMediator) -> Iterator[None]:
    """Another daemon uses the store."""
    use = DatabaseFileLock(initialized_mediator.directory / "mediator.sqlite3")
    use.take()
    yield
    use.release()


def bad_configuration(initialized_mediator: InitializedMediator) -> AbstractContextManager[object]:
    """An invalid value."""
    initialized_mediator.update_configuration(workers="many")
    return nullcontext()


def readable_keys(initialized_mediator: InitializedMediator) -> AbstractContextManager[object]:
    """Keys that others may read."""
    (initialized_mediator.directory / "keys.jwks").chmod(0o644)
    return nullcontext()


def bad_certificate(initialized_mediator: InitializedMediator) -> AbstractContextManager[object]:
    """A file that is no certificate."""
    path = initialized_mediator.directory / "certificate.pem"
    path.write_text("none")
    initialized_mediator.update_configuration(
        listen=[f"ssl:{initialized_mediator.port}:privateKey={path}:certKey={path}"]
    )
    return nullcontext()


def no_log_directory(initialized_mediator: InitializedMediator) -> AbstractContextManager[object]:
    """A file in place of the directory."""
    (initialized_mediator.directory / "log").write_text("")
    return nullcontext()


def workers_without_log_directory(initialized_mediator: InitializedMediator) -> AbstractContextManager[object]:
    """Each worker fails itself, after twistd considers the daemon started."""
    initialized_mediator.update_configuration(workers=2)
    return no_log_directory(initialized_mediator)


FAILURES: dict[Callable[[InitializedMediator], AbstractContextManager[object]], tuple[int, str]] = {
    port_in_use: (1, "Address already in use"),
    store_in_use: (1, "another daemon uses it"),
    bad_configuration: (2, "workers: expected"),
    readable_keys: (1, "keys.jwks is accessible to other users"),
    bad_certificate: (1, "cannot use its key or certificate"),
    no_log_directory: (1, "/log: "),
    workers_without_log_directory: (1, "/log/"),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_failing_daemon_reports_the_reason(
    failure: Callable[[InitializedMediator], AbstractContextManager[object]],
    initialized_mediator: InitializedMediator,
) -> None:
    """Exit status other than 0, the reason on standard error and in the log, nothing left behind."""
    status, reason = FAILURES[failure]
    with failure(initialized_mediator):
        result = initialized_mediator.run_twistd()
    assert (result.returncode, initialized_mediator.pid.exists()) == (status, False), (
        result.stderr + initialized_mediator.log
    )
    assert result.stderr.startswith("mediatord: ")
    assert reason in result.stderr.splitlines()[0]
    assert reason in initialized_mediator.log
    assert "Traceback" not in result.stderr + initialized_mediator.log


def test_failing_foreground_start_reports_the_reason(initialized_mediator: InitializedMediator) -> None:
    """On standard error in one line, and in the log; no pid file remains."""
    with store_in_use(initialized_mediator):
        result = initialized_mediator.run_twistd("--nodaemon")
    assert (result.returncode, initialized_mediator.pid.exists()) == (1, False)
    (line,) = result.stderr.splitlines()
    assert "another daemon uses it" in line
    assert "another daemon uses it" in initialized_mediator.log


def test_unusable_user_is_reported(initialized_mediator: InitializedMediator) -> None:
    """A user without access, or that it may not switch to, which Twisted notices after binding the ports."""
    result = initialized_mediator.run_twistd("--uid", "nobody")
    assert result.returncode == 1
    reason = "Permission denied" if os.getuid() == 0 else "ended during startup"
    assert result.stderr.startswith("mediatord: ")
    assert reason in result.stderr.splitlines()[0]
    assert reason in initialized_mediator.log


def test_successful_start_returns_when_serving(initialized_mediator: InitializedMediator) -> None:
    """Without output."""
    result = initialized_mediator.run_twistd()
    assert (result.returncode, result.stdout, result.stderr) == (0, "", ""), initialized_mediator.log
    pid = int(initialized_mediator.pid.read_bytes())
    try:
        connection = HTTPConnection("127.0.0.1", initialized_mediator.port, timeout=PATIENCE_SECONDS)
        connection.request("GET", "/health")
        assert connection.getresponse().status == 200
        connection.close()
    finally:
        descriptor = os.pidfd_open(pid)
        os.kill(pid, signal.SIGTERM)
        # It is no child of this process.
        assert select.select([descriptor], [], [], PATIENCE_SECONDS)[0]
        os.close(descriptor)
    assert not initialized_mediator.pid.exists()
