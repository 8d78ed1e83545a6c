"""
The read marker: which closed segments of a log directory the nightly analysis has in its tables.

The analysis may not write among the logs. It writes this one file, in a directory that the daemon makes for its
group, and the daemon deletes no segment that is not named there before it has to. The daemon remembers that there was
a marker, in a file that only it can write: one that is missing later is not taken for the absence of an analysis.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

MARKER_DIRECTORY = "analysis"
MARKER_FILE = "read-segments.json"
SEEN_FILE = "analysis-seen"
_VERSION = 1
_DIRECTORY_MODE = 0o770
_FILE_MODE = 0o644
_LONGEST = 64 << 20


class MarkerError(Exception):
    """There is a marker, and nobody can tell what it says."""


def marker_path(log_directory: Path) -> Path:
    """Where the marker of a log directory is."""
    return log_directory / MARKER_DIRECTORY / MARKER_FILE


def make_marker_directory(log_directory: Path) -> None:
    """Let the group of the daemon leave a marker. Nothing is raised: without it segments are only kept for longer."""
    directory = log_directory / MARKER_DIRECTORY
    with suppress(OSError):
        directory.mkdir(exist_ok=True)
    with suppress(OSError):
        directory.chmod(_DIRECTORY_MODE)


def read_expected_marker(log_directory: Path) -> frozenset[str] | None:
    """
    As :func:`read_marker`, for the daemon, which remembers that there is a marker.

    :raise MarkerError: also if there was a marker earlier and it is missing.
    """
    path, seen = marker_path(log_directory), log_directory / SEEN_FILE
    if os.path.lexists(path):
        with suppress(OSError):
            seen.touch(mode=_FILE_MODE)
    elif os.path.lexists(seen):
        raise MarkerError(f"{path}: missing, although {seen} says that there was one")
    return read_marker(log_directory)


def read_marker(log_directory: Path) -> frozenset[str] | None:
    """
    Names, without suffix, of the segments that were read; None if no analysis has ever left a marker.

    :raise MarkerError: it cannot be read, or is no marker.
    """
    path = marker_path(log_directory)
    try:
        # Others may write in that directory: no link is followed and no pipe is waited for.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise MarkerError(f"{path}: {error.strerror}") from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size > _LONGEST:
            raise MarkerError(f"{path}: not a read marker")
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            return _decoded(file.read(_LONGEST))
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        raise MarkerError(f"{path}: not a read marker") from None
    finally:
        os.close(descriptor)


def write_marker(log_directory: Path, stems: Iterable[str]) -> None:
    """
    Replace the marker, whole or not at all.

    :param stems: names, without suffix, of the segments that were read.
    :raise OSError: it cannot be written.
    """
    path = marker_path(log_directory)
    draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    text = json.dumps({"version": _VERSION, "read": sorted(stems)}, indent=0)
    try:
        draft.write_text(f"{text}\n", encoding="ascii")
        # The daemon is another user, whatever the mask of this one.
        draft.chmod(_FILE_MODE)
        draft.replace(path)
    except BaseException:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        raise


def _decoded(content: bytes) -> frozenset[str]:
    marker = json.loads(content)
    names = marker["read"]
    if (
        marker["version"] != _VERSION
        or not isinstance(names, list)
        or not all(isinstance(name, str) for name in names)
    ):
        raise ValueError("another format")
    return frozenset(names)
