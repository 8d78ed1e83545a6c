"""Child processes of the benchmark, their CPU time and memory in /proc, and pinning to cores."""

from __future__ import annotations

import multiprocessing
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Generic, TypeVar

from mediatord.wallet.temporary_daemon import stop_process

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_SPARE_FILES = 200

_fork = multiprocessing.get_context("fork")
Result = TypeVar("Result")


class ForkedCall(Generic[Result]):
    """A call in a forked process, which has sockets, keys and messages of this one. No thread may run here."""

    def __init__(self, function: Callable[[], Result]) -> None:
        self._outcome, theirs = _fork.Pipe(duplex=False)
        self._process = _fork.Process(target=_send_outcome, args=[function, theirs], daemon=True)
        self._process.start()
        theirs.close()

    @property
    def done(self) -> bool:
        """Whether the result is there, or the process ended without one."""
        return self._outcome.poll()

    def result(self) -> Result:
        """
        Wait for the result; what the function raises is raised here.

        :raise RuntimeError: the process ended early.
        """
        try:
            result, error = self._outcome.recv()
        except EOFError:
            raise RuntimeError("a child process of the benchmark ended early") from None
        self._process.join()
        if error is not None:
            raise error
        found: Result = result
        return found


def _send_outcome(function: Callable[[], object], outcome: Connection) -> None:
    try:
        outcome.send((function(), None))
    except Exception as error:
        outcome.send((None, error))


def cpu_seconds(pid: int) -> float:
    """User and system time of a process and its children so far, in steps of 10 ms; 0 for process 0."""
    # The program's name is in parentheses and may contain blanks; the fields after it are plain.
    stats = (text.rpartition(")")[2].split() for text in _read_tree(pid, "stat"))
    return sum(int(fields[11]) + int(fields[12]) for fields in stats) / _TICKS_PER_SECOND


def rss_bytes(pid: int) -> int:
    """Resident memory of a process and its children."""
    return sum(int(text.split()[1]) * _PAGE_BYTES for text in _read_tree(pid, "statm"))


def pss_bytes(pid: int) -> int:
    """Memory of a process and its children, each page divided by the number of processes that share it."""
    fields = (line.split() for text in _read_tree(pid, "smaps_rollup") for line in text.splitlines())
    return sum(int(field[1]) * 1024 for field in fields if field[0] == "Pss:")


def _read_tree(pid: int, name: str) -> Iterator[str]:
    """A file in /proc of a process and of its children, some of which end at any time."""
    with suppress(FileNotFoundError, ProcessLookupError):
        yield Path(f"/proc/{pid}/{name}").read_text()
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            for child in children.read_text().split():
                yield from _read_tree(int(child), name)


def list_children(pid: int) -> list[int]:
    """The child processes of a process, in the order of their start."""
    return sorted(
        int(child) for text in Path(f"/proc/{pid}/task").glob("*/children") for child in text.read_text().split()
    )


def read_command(pid: int) -> list[str]:
    """Program and arguments of a process; empty if it has ended."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")
    return []


def list_sockets(pid: int) -> set[str]:
    """Names of the sockets that a process has open, which tell them apart."""
    names = set()
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            names.add(os.readlink(path))
    return {name for name in names if name.startswith("socket:")}


def raise_file_limit() -> int:
    """Raise the soft limit on open files to the hard limit, for this process and later children; the limit."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return most


def limit_sockets(wanted: int) -> int:
    """The number of sockets that this process may open, at most `wanted`."""
    return min(wanted, raise_file_limit() - _SPARE_FILES)


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
