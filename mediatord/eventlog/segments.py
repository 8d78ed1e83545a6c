"""
The files of the event log: one that grows, and closed ones whose names never change.

`events.jsonl` is written to. Closed, it becomes `events-<UTC start>-<node>-<boot>-<n>.jsonl` and later, compressed,
the same with `.gz`. Nothing is ever appended to a file that was found at start: a line torn by a crash stays the
last of its segment.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from datetime import UTC, datetime
from pathlib import Path

ACTIVE = "events.jsonl"
_CLOSED = re.compile(r"(events-[A-Za-z0-9._-]+)\.jsonl(?:\.gz)?")
_STEM = re.compile(r"events-[A-Za-z0-9._-]{1,200}")
_LONGEST_LINE = 4096


class Segments:
    """
    The directory of one daemon's event log.

    :param node: stands in the names; letters, digits, dots, hyphens and underscores.
    :param boot: likewise.
    """

    def __init__(self, directory: Path, node: str, boot: str) -> None:
        self._directory = directory
        self._node = node
        self._boot = boot
        self._count = 0

    @property
    def active(self) -> Path:
        """The file that grows."""
        return self._directory / ACTIVE

    def next_name(self, now: float) -> str:
        """The name, without suffix, of a segment that begins now."""
        self._count += 1
        return f"events-{_stamp(now)}-{self._node}-{self._boot}-{self._count:06d}"

    def prepare(self, now: float) -> list[Path]:
        """
        Make the directory, give what a crash left its closed name, and return closed segments in plain text.

        :raise OSError: the directory cannot be made or written to.
        """
        self._directory.mkdir(mode=0o750, parents=True, exist_ok=True)
        for draft in self._directory.glob("events-*.tmp"):
            draft.unlink(missing_ok=True)
        if self.active.exists():
            self.close(self._left_name(now))
        return sorted(path for path in self._closed_files() if path.suffix == ".jsonl")

    def close(self, name: str) -> Path:
        """Give the growing file its closed name; another that has it already keeps it."""
        target = self._directory / f"{name}.jsonl"
        suffix = 1
        while target.exists() or target.with_name(target.name + ".gz").exists():
            suffix += 1
            target = self._directory / f"{name}-{suffix}.jsonl"
        self.active.rename(target)
        return target

    def prune(self, keep: int) -> int:
        """
        Delete all closed segments but the newest, as far as possible; returns how many those are.

        Those of this boot are newer than all others, and newer the higher their number, whatever the clock said.
        """
        files: dict[str, list[Path]] = {}
        for path in self._closed_files():
            files.setdefault(path.name.split(".jsonl")[0], []).append(path)
        old = sorted(files, key=self._age)[: max(0, len(files) - keep)]
        for name in old:
            for path in files[name]:
                with contextlib.suppress(OSError):
                    path.unlink()
        return len(old)

    def _age(self, name: str) -> tuple[bool, str]:
        """To sort names by, oldest first."""
        _, ours, number = name.rpartition(f"-{self._node}-{self._boot}-")
        return (True, number) if ours else (False, name)

    def _closed_files(self) -> list[Path]:
        return [path for path in self._directory.iterdir() if _CLOSED.fullmatch(path.name)]

    def _left_name(self, now: float) -> str:
        """What the first line of the file says that its name is to be, or else one made of its age."""
        try:
            with self.active.open("rb") as file:
                name = json.loads(file.readline(_LONGEST_LINE))["segment"]
            if _STEM.fullmatch(name):
                return str(name)
        except (OSError, ValueError, TypeError, KeyError):
            pass
        try:
            written = os.stat(self.active).st_mtime
        except OSError:
            written = now
        return f"events-{_stamp(written)}-{self._node}-unknown-000000"


def _stamp(seconds: float) -> str:
    return datetime.fromtimestamp(int(seconds), UTC).strftime("%Y%m%dT%H%M%SZ")
