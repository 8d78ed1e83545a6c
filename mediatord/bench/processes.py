"""
Child processes, and what /proc says about them.

Which cores the server has to itself and which ones its clients, so that "one core" is one.

Stop a daemon of ours, do something to its files, and start it again.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

from mediatord.wallet.temporary_daemon import DaemonStartError, TemporaryDaemon, is_healthy

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_CHILD_STOP_SECONDS = 15.0


def cpu_seconds(pid: int) -> float:
    """User and system time of a process and its children so far, in steps of 10 ms."""
    return sum(_single_cpu_seconds(one) for one in _process_tree(pid))


def rss_bytes(pid: int) -> int:
    """Resident memory of a process and its children."""
    return sum(int(Path(f"/proc/{one}/statm").read_text().split()[1]) * _PAGE_BYTES for one in _process_tree(pid))


def _single_cpu_seconds(pid: int) -> float:
    # The name of the program is in parentheses and may hold blanks; the fields after it are plain.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_SECOND


def _process_tree(pid: int) -> list[int]:
    found = [pid]
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in children.read_text().split():
            found += _process_tree(int(child))
    return found


def raise_file_limit() -> int:
    """Raise the limit on open files as far as it goes, for us and for children started later; the limit."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return most


@contextmanager
def spawn_module(module: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A module of this package as a process that is spoken to by lines; ended on leaving, if it still runs."""
    process = subprocess.Popen(
        [sys.executable, "-m", module, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        stop_process(process)


def stop_process(process: subprocess.Popen[str]) -> None:
    """Have a child end, if it still runs: in an orderly way, or after 15 s in any."""
    if process.poll() is None:
        process.terminate()
    try:
        process.communicate(timeout=_CHILD_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()


def read_line(process: subprocess.Popen[str]) -> str:
    """
    The next line a child says.

    :raise RuntimeError: it ended instead.
    """
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError("a child process of the benchmark ended early")
    return line.strip()


def write_line(process: subprocess.Popen[str], line: str) -> None:
    """Say one line to a child."""
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()


@dataclass(frozen=True, slots=True)
class CoreAssignment:
    """
    :param server: where servers and floors run, one at a time.
    :param clients: where everything else runs; the same ones where there is only one.
    """

    server: frozenset[int]
    clients: frozenset[int]

    @property
    def apart(self) -> bool:
        """Whether servers and clients do not get into each other's way."""
        return not self.server & self.clients

    @property
    def note(self) -> str:
        """A sentence that says so."""
        if not self.apart:
            return "Servers and clients share one core."
        return f"Servers are pinned to core {min(self.server)}, one at a time; clients have {_format_cores(self.clients)}."


def assign_cores(servers: int = 1) -> CoreAssignment:
    """
    So many of the cores that we may use for the server, the rest for its clients.

    :param servers: at least one core is left to the clients, if there are two.
    """
    mine = sorted(os.sched_getaffinity(0))
    if len(mine) == 1:
        return CoreAssignment(frozenset(mine), frozenset(mine))
    servers = min(servers, len(mine) - 1)
    return CoreAssignment(frozenset(mine[:servers]), frozenset(mine[servers:]))


@contextmanager
def pin_to_cores(cores: frozenset[int]) -> Iterator[None]:
    """Run on these cores; children started meanwhile stay there with all their threads."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def process_cores(pid: int) -> frozenset[int]:
    """Where the threads of a process may run, all of them together."""
    return frozenset(
        core for thread in Path(f"/proc/{pid}/task").iterdir() for core in os.sched_getaffinity(int(thread.name))
    )


def _format_cores(cores: frozenset[int]) -> str:
    return f"core {min(cores)}" if len(cores) == 1 else f"cores {', '.join(map(str, sorted(cores)))}"


_DAEMON_STOP_SECONDS = 60.0
_START_SECONDS = 60.0
_POLL_SECONDS = 0.01


@dataclass(frozen=True, slots=True)
class DaemonCommand:
    """How a daemon was started: its command line, its environment, and where it runs."""

    words: tuple[str, ...]
    environment: dict[str, str] = field(repr=False)
    cores: frozenset[int]

    @classmethod
    def of(cls, pid: int) -> DaemonCommand:
        """That of a running process."""
        words = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
        pairs = (pair.partition(b"=") for pair in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") if pair)
        environment = {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}
        return cls(tuple(map(os.fsdecode, words)), environment, process_cores(pid))


def stop_daemon(pid: int) -> DaemonCommand:
    """End a child process in an orderly way, and wait for that; how it could be started again."""
    daemon_command = DaemonCommand.of(pid)
    os.kill(pid, signal.SIGTERM)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    return daemon_command


@contextmanager
def restart_daemon(daemon_command: DaemonCommand, daemon: TemporaryDaemon) -> Iterator[tuple[TemporaryDaemon, float]]:
    """
    The daemon under another process id, and the seconds until it said that it is well; ended on leaving.

    :param daemon: the one that was stopped.
    :raise DaemonFailed: it did not start.
    """
    begun = perf_counter()
    with pin_to_cores(daemon_command.cores), open(daemon.directory / "output.txt", "ab") as output:
        process = subprocess.Popen(
            daemon_command.words,
            env=daemon_command.environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    try:
        while not is_healthy(daemon.url):
            if perf_counter() - begun > _START_SECONDS or process.poll() is not None:
                raise DaemonStartError("the daemon did not start again")
            _wait_briefly(process)
        yield TemporaryDaemon(daemon.url, daemon.directory, process.pid), perf_counter() - begun
    finally:
        if process.poll() is None:
            process.terminate()
        process.wait(_DAEMON_STOP_SECONDS)


def _wait_briefly(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(_POLL_SECONDS)
    except subprocess.TimeoutExpired:
        return
