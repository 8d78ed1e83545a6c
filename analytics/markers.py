"""
Telling a daemon which of its log segments are in the tables, so that it deletes no other before it has to.

A daemon that wants to know has a directory for that among its segments (:mod:`mediatord.observability.segments`).
Copies of logs elsewhere have none, or one of which nobody reads the marker.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from analytics.intake import CLOSED, CRASHED, EMPTY, PARTIAL
from analytics.places import local_path
from analytics.plan import Known, is_changed
from mediatord.observability.segments import (
    ReadMarkerError,
    load_read_marker,
    make_read_marker_path,
    save_read_marker,
)

if TYPE_CHECKING:
    from analytics.segments import Segment

# As far as they can be read at all.
_READ = (CLOSED, CRASHED, EMPTY, PARTIAL)


def read_stems(
    segments: Iterable[Segment], known: Mapping[str, Known], inputs: Iterable[Mapping[str, Any]]
) -> set[str]:
    """
    Segments that need not be read again, by stem.

    :param known: what was read before this run.
    :param inputs: rows of the table, of what was read in it.
    """
    states = {row["stem"]: row["state"] for row in inputs}
    found = set()
    for segment in segments:
        state, before = states.get(segment.stem), known.get(segment.stem)
        if state is None and before is not None and not is_changed(segment, before):
            state = before.state
        if state in _READ and not segment.active:
            found.add(segment.stem)
    return found


def create_markers(segments: Iterable[Segment]) -> None:
    """
    Leave an empty marker where a daemon waits for one and there is none: it then keeps what was not read.

    Nothing is raised or said: :func:`update_markers` will say what is in the way.

    :param segments: all that were found.
    """
    for directory in _stems_by_directory(segments):
        path = make_read_marker_path(directory)
        if path.parent.is_dir() and not os.path.lexists(path):
            with suppress(OSError):
                save_read_marker(directory, ())


def update_markers(segments: Iterable[Segment], stems: Collection[str]) -> list[str]:
    """
    Add these segments to the markers of the directories that they are in, and forget those that are gone.

    :param segments: all that were found.
    :return: sentences for the operator, about markers that cannot be written.
    """
    found = sorted(_stems_by_directory(segments).items())
    return [line for directory, there in found for line in _update_marker(directory, there, stems)]


def _stems_by_directory(segments: Iterable[Segment]) -> Mapping[Path, set[str]]:
    by_directory: defaultdict[Path, set[str]] = defaultdict(set)
    for segment in segments:
        for url in (segment.path, *segment.others):
            path = local_path(url)
            if path is not None:
                by_directory[path.parent].add(segment.stem)
    return by_directory


def _update_marker(directory: Path, there: Collection[str], stems: Collection[str]) -> Sequence[str]:
    if not make_read_marker_path(directory).parent.is_dir():
        return []
    try:
        before = load_read_marker(directory) or frozenset()
    except ReadMarkerError:
        before = frozenset()
    try:
        save_read_marker(directory, (before | set(stems)) & set(there))
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        return [f"{make_read_marker_path(directory)}: {reason}; the daemon keeps what was read as if it were unread"]
    return []
