"""Child processes, and what /proc says about them."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_STOP_SECONDS = 15.0


def cpu_seconds(pid: int) -> float:
    """User and system time of a process and its children so far, in steps of 10 ms."""
    return sum(_own_cpu_seconds(one) for one in _family(pid))


def rss_bytes(pid: int) -> int:
    """Resident memory of a process and its children."""
    return sum(int(Path(f"/proc/{one}/statm").read_text().split()[1]) * _PAGE_BYTES for one in _family(pid))


def _own_cpu_seconds(pid: int) -> float:
    # The name of the program is in parentheses and may hold blanks; the fields after it are plain.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_SECOND


def _family(pid: int) -> list[int]:
    found = [pid]
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in children.read_text().split():
            found += _family(int(child))
    return found


def allow_many_files() -> int:
    """Raise the limit on open files as far as it goes, for us and for children started later; the limit."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return most


@contextmanager
def child(module: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A module of this package as a process that is spoken to by lines; ended on leaving, if it still runs."""
    process = subprocess.Popen(
        [sys.executable, "-m", module, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        end(process)


def end(process: subprocess.Popen[str]) -> None:
    """Have a child end, if it still runs: in an orderly way, or after 15 s in any."""
    if process.poll() is None:
        process.terminate()
    try:
        process.communicate(timeout=_STOP_SECONDS)
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
