"""Child processes: their CPU time and memory in /proc, pinning to cores, and restarting a temporary daemon."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

from mediatord.wallet.temporary_daemon import DaemonStartError, TemporaryDaemon, is_healthy

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_CHILD_STOP_SECONDS = 15.0
_DAEMON_STOP_SECONDS = 60.0
_START_SECONDS = 60.0
_POLL_SECONDS = 0.01


def cpu_seconds(pid: int) -> float:
    """User and system time of a process and its children so far, in steps of 10 ms."""
    total = 0.0
    for member in _process_tree(pid):
        # The program's name is in parentheses and may contain blanks; the fields after it are plain.
        fields = Path(f"/proc/{member}/stat").read_text().rpartition(")")[2].split()
        total += (int(fields[11]) + int(fields[12])) / _TICKS_PER_SECOND
    return total


def rss_bytes(pid: int) -> int:
    """Resident memory of a process and its children."""
    return sum(int(Path(f"/proc/{one}/statm").read_text().split()[1]) * _PAGE_BYTES for one in _process_tree(pid))


def _process_tree(pid: int) -> list[int]:
    found = [pid]
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in children.read_text().split():
            found += _process_tree(int(child))
    return found


def raise_file_limit() -> int:
    """Raise the soft limit on open files to the hard limit, for this process and later children; the limit."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return most


@contextmanager
def spawn_module(module: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run a module as a child process with line-based pipes; stopped on exit if it still runs."""
    process = subprocess.Popen(
        [sys.executable, "-m", module, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        stop_process(process)


def stop_process(process: subprocess.Popen[str]) -> None:
    """Terminate a child process if it still runs; kill it after 15 s."""
    if process.poll() is None:
        process.terminate()
    try:
        process.communicate(timeout=_CHILD_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()


def read_line(process: subprocess.Popen[str]) -> str:
    """
    Read the next line from a child process.

    :raise RuntimeError: it ended instead.
    """
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError("a child process of the benchmark ended early")
    return line.strip()


def write_line(process: subprocess.Popen[str], line: str) -> None:
    """Write a line to a child process."""
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()


def print_line(line: str) -> None:
    """Write a line to the parent process."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


@dataclass(frozen=True, slots=True)
class CoreAssignment:
    """
    Cores of the server and of its clients.

    :param server: for servers and baselines, one at a time.
    :param clients: for everything else; the same core if there is only one.
    """

    server: frozenset[int]
    clients: frozenset[int]

    @property
    def apart(self) -> bool:
        """Whether servers and clients have different cores."""
        return not self.server & self.clients

    @property
    def note(self) -> str:
        """A sentence for the report."""
        if not self.apart:
            return "Servers and clients share one core."
        names = ", ".join(map(str, sorted(self.clients)))
        clients = f"core{'s' if len(self.clients) > 1 else ''} {names}"
        return f"Servers are pinned to core {min(self.server)}, one at a time; clients have {clients}."


def assign_cores() -> CoreAssignment:
    """One of the available cores for the server, the rest for its clients."""
    available = sorted(os.sched_getaffinity(0))
    return CoreAssignment(frozenset(available[:1]), frozenset(available[1:] or available))


@contextmanager
def pin_to_cores(cores: frozenset[int]) -> Iterator[None]:
    """Run on these cores; children started meanwhile stay there with all their threads."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@dataclass(frozen=True, slots=True)
class DaemonCommand:
    """How a daemon was started: command line, environment and cores."""

    words: tuple[str, ...]
    environment: dict[str, str] = field(repr=False)
    cores: frozenset[int]


def stop_daemon(pid: int) -> DaemonCommand:
    """Terminate a daemon, wait for its end, and return how to start it again."""
    process = Path(f"/proc/{pid}")
    words = process.joinpath("cmdline").read_bytes().rstrip(b"\0").split(b"\0")
    pairs = (pair.partition(b"=") for pair in process.joinpath("environ").read_bytes().split(b"\0") if pair)
    environment = {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}
    threads = process.joinpath("task").iterdir()
    cores = frozenset(core for thread in threads for core in os.sched_getaffinity(int(thread.name)))
    os.kill(pid, signal.SIGTERM)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    return DaemonCommand(tuple(map(os.fsdecode, words)), environment, cores)


@contextmanager
def restart_daemon(command: DaemonCommand, daemon: TemporaryDaemon) -> Iterator[tuple[TemporaryDaemon, float]]:
    """
    Start a stopped daemon again: the running daemon and the seconds until it was healthy; stopped on exit.

    :raise DaemonStartError: it did not start.
    """
    start = perf_counter()
    with pin_to_cores(command.cores), open(daemon.directory / "output.txt", "ab") as output:
        process = subprocess.Popen(
            command.words, env=command.environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
    try:
        while not is_healthy(daemon.url):
            if perf_counter() - start > _START_SECONDS or process.poll() is not None:
                raise DaemonStartError("the daemon did not start again")
            with suppress(subprocess.TimeoutExpired):
                process.wait(_POLL_SECONDS)
        yield TemporaryDaemon(daemon.url, daemon.directory, process.pid), perf_counter() - start
    finally:
        if process.poll() is None:
            process.terminate()
        process.wait(_DAEMON_STOP_SECONDS)
