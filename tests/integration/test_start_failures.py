"""Starts that fail, with twistd in the foreground and as a daemon: exit status, standard error and log."""

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
    """A mediator whose files are there. :ivar directory: where they are."""

    directory: Path
    port: int

    @property
    def config(self) -> Path:
        """The configuration."""
        return self.directory / "mediator.yaml"

    @property
    def log(self) -> str:
        """What twistd has written to its log."""
        path = self.directory / "twistd.log"
        return path.read_text("utf-8") if path.exists() else ""

    @property
    def pid(self) -> Path:
        """Where twistd notes its process."""
        return self.directory / "twistd.pid"

    def set(self, **settings: object) -> None:
        """Write these into the configuration."""
        now = yaml.safe_load(self.config.read_text("utf-8"))
        self.config.write_text(yaml.safe_dump({**now, **settings}), "utf-8")

    def start(self, *options: str) -> subprocess.CompletedProcess[str]:
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
def made(tmp_path: Path) -> InitializedMediator:
    """As `mediatord init` makes it."""
    port = find_free_port()
    write_initial_files(tmp_path / "m", f"http://127.0.0.1:{port}")
    return InitializedMediator(tmp_path / "m", port)


def port_in_use(made: InitializedMediator) -> AbstractContextManager[object]:
    """By somebody else."""
    return socket.create_server(("127.0.0.1", made.port))


@contextlib.contextmanager
def store_in_use(made: InitializedMediator) -> Iterator[None]:
    """By another daemon."""
    use = DatabaseFileLock(made.directory / "mediator.sqlite3")
    use.take()
    yield
    use.release()


def bad_configuration(made: InitializedMediator) -> AbstractContextManager[object]:
    """A value that is none."""
    made.set(workers="many")
    return nullcontext()


def open_keys(made: InitializedMediator) -> AbstractContextManager[object]:
    """Keys that others may read."""
    (made.directory / "keys.jwks").chmod(0o644)
    return nullcontext()


def bad_certificate(made: InitializedMediator) -> AbstractContextManager[object]:
    """A file that is none."""
    path = made.directory / "certificate.pem"
    path.write_text("none")
    made.set(listen=[f"ssl:{made.port}:privateKey={path}:certKey={path}"])
    return nullcontext()


def no_log_directory(made: InitializedMediator) -> AbstractContextManager[object]:
    """A file where it would be."""
    (made.directory / "log").write_text("")
    return nullcontext()


def workers_without_log_directory(made: InitializedMediator) -> AbstractContextManager[object]:
    """The same, which each worker finds out for itself, when twistd has long considered the daemon started."""
    made.set(workers=2)
    return no_log_directory(made)


FAILURES: dict[Callable[[InitializedMediator], AbstractContextManager[object]], tuple[int, str]] = {
    port_in_use: (1, "Address already in use"),
    store_in_use: (1, "another daemon uses it"),
    bad_configuration: (2, "workers: expected"),
    open_keys: (1, "keys.jwks is accessible to other users"),
    bad_certificate: (1, "cannot use its key or certificate"),
    no_log_directory: (1, "/log: "),
    workers_without_log_directory: (1, "/log/"),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_daemon_that_cannot_start(
    failure: Callable[[InitializedMediator], AbstractContextManager[object]], made: InitializedMediator
) -> None:
    """The command ends with a status other than 0, and says why, as the log does; nothing is left behind."""
    status, reason = FAILURES[failure]
    with failure(made):
        done = made.start()
    assert (done.returncode, made.pid.exists()) == (status, False), done.stderr + made.log
    assert done.stderr.startswith("mediatord: ")
    assert reason in done.stderr.splitlines()[0]
    assert reason in made.log
    assert "Traceback" not in done.stderr + made.log


@pytest.mark.parametrize("failure", [port_in_use, store_in_use, bad_configuration])
def test_foreground_that_cannot_start(
    failure: Callable[[InitializedMediator], AbstractContextManager[object]], made: InitializedMediator
) -> None:
    """Likewise, in one line on standard error."""
    status, reason = FAILURES[failure]
    with failure(made):
        done = made.start("--nodaemon")
    assert (done.returncode, made.pid.exists()) == (status, False), done.stderr + made.log
    (line,) = done.stderr.splitlines()
    assert line.startswith("mediatord: ") and reason in line
    assert reason in made.log
    assert "Traceback" not in done.stdout + made.log


def test_another_user(made: InitializedMediator) -> None:
    """One that may open nothing, or that it may not become, which Twisted finds out after it has bound the ports."""
    done = made.start("--uid", "nobody")
    assert done.returncode == 1
    reason = "Permission denied" if os.getuid() == 0 else "ended before it was up"
    assert done.stderr.startswith("mediatord: ")
    assert reason in done.stderr.splitlines()[0]
    assert reason in made.log


def test_daemon_that_starts(made: InitializedMediator) -> None:
    """The command returns when the daemon serves, and has nothing to say."""
    done = made.start()
    assert (done.returncode, done.stdout, done.stderr) == (0, "", ""), made.log
    pid = int(made.pid.read_bytes())
    try:
        connection = HTTPConnection("127.0.0.1", made.port, timeout=PATIENCE_SECONDS)
        connection.request("GET", "/health")
        assert connection.getresponse().status == 200
        connection.close()
    finally:
        descriptor = os.pidfd_open(pid)
        os.kill(pid, signal.SIGTERM)
        # It is no child of ours.
        assert select.select([descriptor], [], [], PATIENCE_SECONDS)[0]
        os.close(descriptor)
    assert not made.pid.exists()
