"""Processes and what they start, as /proc has them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def lives(pid: int) -> bool:
    """Whether it is there, and not only waiting for somebody to ask how it ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def family(pid: int) -> Iterator[int]:
    """A process, its children, and theirs."""
    if lives(pid):
        yield pid
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        # A thread may end while they are listed.
        with suppress(FileNotFoundError, ProcessLookupError):
            for child in children.read_text().split():
                yield from family(int(child))
