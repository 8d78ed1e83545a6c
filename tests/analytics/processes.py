"""Processes and what they start, as /proc has them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

_PATIENCE_S = 120.0


def lives(pid: int) -> bool:
    """Whether it is there, and not only waiting for somebody to ask how it ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def still_there(pids: Iterable[int]) -> list[int]:
    """Those that do not end; one that was killed just now needs the processor once more to do so."""
    until = time.monotonic() + _PATIENCE_S
    while (left := [pid for pid in pids if lives(pid)]) and time.monotonic() < until:
        time.sleep(0.01)
    return left


def family(pid: int) -> Iterator[int]:
    """A process, its children, and theirs."""
    if lives(pid):
        yield pid
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        # A thread may end while they are listed.
        with suppress(FileNotFoundError, ProcessLookupError):
            for child in children.read_text().split():
                yield from family(int(child))
