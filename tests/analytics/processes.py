"""Processes and their descendants, read from /proc."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

_EXIT_TIMEOUT_S = 120.0


def is_running(pid: int) -> bool:
    """Whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_for_exit(pids: Iterable[int]) -> list[int]:
    """Wait until processes end; those that still run after the timeout."""
    deadline = time.monotonic() + _EXIT_TIMEOUT_S
    while (running := [pid for pid in pids if is_running(pid)]) and time.monotonic() < deadline:
        time.sleep(0.01)
    return running


def list_process_tree(pid: int) -> Iterator[int]:
    """A process, its children and their descendants."""
    if is_running(pid):
        yield pid
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        # A thread can end during the listing.
        with suppress(FileNotFoundError, ProcessLookupError):
            for child in children.read_text().split():
                yield from list_process_tree(int(child))
