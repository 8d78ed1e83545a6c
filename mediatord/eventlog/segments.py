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
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from mediatord.eventlog.read_marker import make_marker_directory

ACTIVE = "events.jsonl"
_CLOSED = re.compile(r"(events-[A-Za-z0-9._-]+)\.jsonl(?:\.gz)?")
_STEM = re.compile(r"events-[A-Za-z0-9._-]{1,200}")
_STAMP = re.compile(r"events-(\d{8}T\d{6}Z)-")
_LONGEST_LINE = 4096


@dataclass(frozen=True, slots=True)
class RetentionLimits:
    """
    :param keep: the newest closed segments, which age does not delete.
    :param age: seconds.
    :param bytes: of all closed segments.
    :param unread_bytes: of all closed segments, before those go that the analysis has not read.
    """

    keep: int = 24
    age: float = 432_000.0
    bytes: int = 4_294_967_296
    unread_bytes: int = 8_589_934_592


class Deletions(NamedTuple):
    """Closed segments that were deleted; `unread` of them before the analysis had read them."""

    segments: int = 0
    unread: int = 0


@dataclass(frozen=True, slots=True)
class _ClosedSegment:
    """
    :param size: bytes of its files.
    :param time: when it began or was written last, whichever is later.
    """

    name: str
    paths: Sequence[Path]
    size: int
    time: float

    def delete(self) -> bool:
        """Whether it is gone."""
        for path in self.paths:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
        return not any(path.exists() for path in self.paths)


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
        self.ensure_directory()
        make_marker_directory(self._directory)
        for draft in self._directory.glob("events-*.tmp"):
            draft.unlink(missing_ok=True)
        self.set_aside(now)
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

    def ensure_directory(self) -> bool:
        """
        Whether the directory had to be made.

        :raise OSError: it is not there and cannot be made.
        """
        if self._directory.is_dir():
            return False
        self._directory.mkdir(mode=0o750, parents=True, exist_ok=True)
        make_marker_directory(self._directory)
        return True

    def set_aside(self, now: float) -> None:
        """
        Give a growing file that is not ours its closed name, so that nothing is appended to it.

        :raise OSError: it cannot be renamed.
        """
        if self.active.exists():
            self.close(self._left_name(now))

    def prune(self, limits: RetentionLimits, now: float, read: Set[str] | None) -> Deletions:
        """
        Delete closed segments that are too old or too many, oldest first, as far as possible.

        Those of this boot are newer than all others, and newer the higher their number, whatever the clock said.

        :param read: names of those that the analysis has read; None: there is no analysis, and all may be deleted.
        """
        closed = sorted(self._closed_segments(), key=lambda segment: self._age(segment.name))
        total = sum(segment.size for segment in closed)
        young = {segment.name for segment in closed[max(0, len(closed) - limits.keep) :]}
        deleted = unread = 0
        left = []
        for segment in closed:
            too_old = segment.name not in young and now - segment.time > limits.age
            may_go = read is None or segment.name in read
            if may_go and (too_old or total > limits.bytes) and segment.delete():
                total -= segment.size
                deleted += 1
            elif not may_go:
                left.append(segment)
        for segment in left:
            if total <= limits.unread_bytes:
                break
            if segment.delete():
                total -= segment.size
                unread += 1
        return Deletions(deleted + unread, unread)

    def _age(self, name: str) -> tuple[bool, str]:
        """To sort names by, oldest first."""
        _, ours, number = name.rpartition(f"-{self._node}-{self._boot}-")
        return (True, number) if ours else (False, name)

    def _closed_segments(self) -> Iterable[_ClosedSegment]:
        files: dict[str, list[Path]] = {}
        for path in self._closed_files():
            files.setdefault(path.name.split(".jsonl")[0], []).append(path)
        for name, paths in files.items():
            found = [status for path in paths if (status := _status(path)) is not None]
            times = [status.st_mtime for status in found]
            yield _ClosedSegment(name, paths, sum(status.st_size for status in found), max([_began(name), *times]))

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


def _began(name: str) -> float:
    """The time in the name of a segment; 0 if there is none."""
    found = _STAMP.match(name)
    try:
        return datetime.strptime(found[1], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC).timestamp() if found else 0.0
    except ValueError:
        return 0.0


def _status(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError:  # compressed or deleted since
        return None
