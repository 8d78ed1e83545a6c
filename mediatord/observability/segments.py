"""
Segments of the event log: names, rotation, retention, the read marker of the analysis, and sealing.

The active segment `events.jsonl` is renamed when closed to `events-<UTC start>-<node>-<boot>-<n>.jsonl`, and to the
same with `.gz` once compressed. A file found at start is never appended to, so a line torn by a crash stays the last
of its segment.

The nightly analysis lists the segments it has loaded in the read marker, a file in a directory that the daemon
creates for its group; segments not listed are deleted only when space runs out. The daemon remembers in a file of its
own that a marker existed, so that a missing one is not taken for the absence of an analysis.

Run as a program, this module seals a segment (flush and compress) at low priority, so that the reactor does not wait
for it. It therefore imports the standard library only, and starts fast.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import stat
import sys
from collections.abc import Iterable, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

MARKER_DIRECTORY = "analysis"
MARKER_FILE = "read-segments.json"
MARKER_SEEN_FILE = "analysis-seen"
_MARKER_VERSION = 1
_MARKER_DIRECTORY_MODE = 0o770
_MARKER_FILE_MODE = 0o644
_MAX_MARKER_BYTES = 64 << 20


class ReadMarkerError(Exception):
    """The read marker is unreadable or missing."""


def make_read_marker_path(log_directory: Path) -> Path:
    """Path of the read marker of a log directory."""
    return log_directory / MARKER_DIRECTORY / MARKER_FILE


def create_marker_directory(log_directory: Path) -> None:
    """
    Create the directory in which the group may write the marker. Errors are ignored: segments are then kept longer.
    """
    directory = log_directory / MARKER_DIRECTORY
    with suppress(OSError):
        directory.mkdir(exist_ok=True)
    with suppress(OSError):
        directory.chmod(_MARKER_DIRECTORY_MODE)


def load_expected_read_marker(log_directory: Path) -> frozenset[str] | None:
    """
    As :func:`load_read_marker`, for the daemon, which remembers that a marker existed.

    :raise ReadMarkerError: also if a marker existed before and is missing.
    """
    path, seen = make_read_marker_path(log_directory), log_directory / MARKER_SEEN_FILE
    if os.path.lexists(path):
        with suppress(OSError):
            seen.touch(mode=_MARKER_FILE_MODE)
    elif os.path.lexists(seen):
        raise ReadMarkerError(f"{path} is missing, although the analysis has written it before (see {seen})")
    return load_read_marker(log_directory)


def load_read_marker(log_directory: Path) -> frozenset[str] | None:
    """
    Names, without suffix, of the segments that were read; None if there is no marker.

    :raise ReadMarkerError: unreadable, or not a marker.
    """
    path = make_read_marker_path(log_directory)
    try:
        # Others may write to that directory: do not follow links or block on pipes.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise ReadMarkerError(f"{path}: {error.strerror}") from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size > _MAX_MARKER_BYTES:
            raise ReadMarkerError(f"{path}: not a read marker")
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            return _parse_marker(file.read(_MAX_MARKER_BYTES))
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        raise ReadMarkerError(f"{path}: not a read marker") from None
    finally:
        os.close(descriptor)


def save_read_marker(log_directory: Path, stems: Iterable[str]) -> None:
    """
    Replace the marker atomically.

    :param stems: names, without suffix, of the segments that were read.
    :raise OSError: it cannot be written.
    """
    path = make_read_marker_path(log_directory)
    draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    text = json.dumps({"version": _MARKER_VERSION, "read": sorted(stems)}, indent=0)
    try:
        draft.write_text(f"{text}\n", encoding="ascii")
        # The daemon runs as another user; the umask must not matter.
        draft.chmod(_MARKER_FILE_MODE)
        draft.replace(path)
    except BaseException:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        raise


def _parse_marker(content: bytes) -> frozenset[str]:
    marker = json.loads(content)
    names = marker["read"]
    if (
        marker["version"] != _MARKER_VERSION
        or not isinstance(names, list)
        or not all(isinstance(name, str) for name in names)
    ):
        raise ValueError("another format")
    return frozenset(names)


ACTIVE_SEGMENT_FILE = "events.jsonl"
_CLOSED_NAME = re.compile(r"(events-[A-Za-z0-9._-]+)\.jsonl(?:\.gz)?")
_SEGMENT_NAME = re.compile(r"events-[A-Za-z0-9._-]{1,200}")
_START_TIME = re.compile(r"events-(\d{8}T\d{6}Z)-")
_MAX_FIRST_LINE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class SegmentLimits:
    """
    Limits of the open segment, and of closed ones.

    :param size: bytes at which a segment is closed.
    :param keep: newest closed segments, exempt from `age`.
    :param age: seconds.
    :param bytes: total size.
    :param unread_bytes: total size beyond which unread segments are deleted too.
    :param buffer: bytes of lines that may wait for a full disk.
    """

    size: int = 67_108_864
    keep: int = 24
    age: float = 432_000.0
    bytes: int = 4_294_967_296
    unread_bytes: int = 8_589_934_592
    buffer: int = 4_194_304


class DeletedSegments(NamedTuple):
    """Number of deleted segments; `unread` of them had not been analysed."""

    segments: int = 0
    unread: int = 0


@dataclass(frozen=True, slots=True)
class _ClosedSegment:
    """
    A closed segment.

    :param size: bytes of its files.
    :param time: start or last modification, whichever is later.
    """

    name: str
    paths: Sequence[Path]
    size: int
    time: float

    def delete(self) -> bool:
        """Delete the files; returns whether they are gone."""
        for path in self.paths:
            with suppress(OSError):
                path.unlink(missing_ok=True)
        return not any(path.exists() for path in self.paths)


class SegmentDirectory:
    """
    Directory of the event log of one daemon.

    :param node: part of segment names; letters, digits, dots, hyphens and underscores.
    :param boot: likewise.
    """

    def __init__(self, directory: Path, node: str, boot: str) -> None:
        self._directory = directory
        self._node = node
        self._boot = boot
        self._count = 0

    @property
    def active(self) -> Path:
        """Path of the active segment."""
        return self._directory / ACTIVE_SEGMENT_FILE

    def next_name(self, now: float) -> str:
        """Name, without suffix, of a segment that starts now."""
        self._count += 1
        return f"events-{_format_time(now)}-{self._node}-{self._boot}-{self._count:06d}"

    def prepare(self, now: float) -> list[Path]:
        """
        Create the directory, close a segment left by a crash, and return closed uncompressed segments.

        :raise OSError: the directory cannot be created or written to.
        """
        self.ensure_directory()
        create_marker_directory(self._directory)
        for draft in self._directory.glob("events-*.tmp"):
            draft.unlink(missing_ok=True)
        self.rename_stale_file(now)
        return sorted(path for path in self._closed_files() if path.suffix == ".jsonl")

    def close(self, name: str) -> Path:
        """Rename the active segment; existing files are not overwritten."""
        target = self._directory / f"{name}.jsonl"
        suffix = 1
        while target.exists() or target.with_name(target.name + ".gz").exists():
            suffix += 1
            target = self._directory / f"{name}-{suffix}.jsonl"
        self.active.rename(target)
        return target

    def ensure_directory(self) -> bool:
        """
        Create the directory if missing; returns whether it was created.

        :raise OSError: it cannot be created.
        """
        if self._directory.is_dir():
            return False
        self._directory.mkdir(mode=0o750, parents=True, exist_ok=True)
        create_marker_directory(self._directory)
        return True

    def rename_stale_file(self, now: float) -> None:
        """
        Close an active segment of another process, so that nothing is appended to it.

        :raise OSError: it cannot be renamed.
        """
        if self.active.exists():
            self.close(self._left_name(now))

    def prune(self, limits: SegmentLimits, now: float, read: Set[str] | None) -> DeletedSegments:
        """
        Delete closed segments beyond the limits, oldest first, as far as possible.

        Segments of this boot are newer than all others and ordered by number, regardless of the clock.

        :param read: names of segments that the analysis has read; None if there is no analysis, and all may be
            deleted.
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
        return DeletedSegments(deleted + unread, unread)

    def _age(self, name: str) -> tuple[bool, str]:
        """Sort key of names, oldest first."""
        _, ours, number = name.rpartition(f"-{self._node}-{self._boot}-")
        return (True, number) if ours else (False, name)

    def _closed_segments(self) -> Iterable[_ClosedSegment]:
        files: dict[str, list[Path]] = {}
        for path in self._closed_files():
            files.setdefault(path.name.split(".jsonl")[0], []).append(path)
        for name, paths in files.items():
            size, time = 0, _parse_start_time(name)
            for path in paths:
                with suppress(OSError):  # compressed or deleted in between
                    status = path.stat()
                    size, time = size + status.st_size, max(time, status.st_mtime)
            yield _ClosedSegment(name, paths, size, time)

    def _closed_files(self) -> list[Path]:
        return [path for path in self._directory.iterdir() if _CLOSED_NAME.fullmatch(path.name)]

    def _left_name(self, now: float) -> str:
        """Name stated in the first line of the file, else one made from its modification time."""
        try:
            with self.active.open("rb") as file:
                name = json.loads(file.readline(_MAX_FIRST_LINE_BYTES))["segment"]
            if _SEGMENT_NAME.fullmatch(name):
                return str(name)
        except (OSError, ValueError, TypeError, KeyError):
            pass
        try:
            written = os.stat(self.active).st_mtime
        except OSError:
            written = now
        return f"events-{_format_time(written)}-{self._node}-unknown-000000"


def _format_time(seconds: float) -> str:
    return datetime.fromtimestamp(int(seconds), UTC).strftime("%Y%m%dT%H%M%SZ")


def _parse_start_time(name: str) -> float:
    """Start time in the name of a segment; 0 if there is none."""
    found = _START_TIME.match(name)
    try:
        return datetime.strptime(found[1], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC).timestamp() if found else 0.0
    except ValueError:
        return 0.0


def seal_segment(path: Path, compress: bool) -> None:
    """
    Flush a segment to disk, or replace it atomically by its compressed form.

    A missing segment is no error: retention may have deleted it.
    """
    try:
        source = path.open("rb")
    except FileNotFoundError:
        return
    with source:
        if compress:
            _compress_file(path, source)
        else:
            os.fsync(source.fileno())
    if compress:
        path.unlink(missing_ok=True)
    _sync_directory(path.parent)


def _compress_file(path, source):  # type: ignore[no-untyped-def]  # the stubs of gzip and shutil do not agree
    draft = path.with_name(path.name + ".gz.tmp")
    with draft.open("wb") as target:
        os.fchmod(target.fileno(), os.fstat(source.fileno()).st_mode & 0o777)
        # Without name and time, equal segments compress to equal bytes.
        with gzip.GzipFile(filename="", mode="wb", fileobj=target, compresslevel=6, mtime=0) as packed:
            shutil.copyfileobj(source, packed, 1 << 20)
        target.flush()
        os.fsync(target.fileno())
    draft.rename(path.with_name(path.name + ".gz"))


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    with suppress(OSError):  # a sandbox may forbid it
        os.nice(15)
    seal_segment(Path(sys.argv[1]), compress="--gzip" in sys.argv[2:])
