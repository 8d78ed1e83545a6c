"""
Telling a daemon which of its log segments are in the tables, so that it deletes no other before it has to.

A daemon that wants to know has a directory for that among its segments (:mod:`mediatord.eventlog.read_marker`).
Copies of logs elsewhere have none, or one of which nobody reads the marker.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from analytics.intake import CLOSED, CRASHED, EMPTY, PARTIAL
from analytics.places import local_path
from analytics.plan import Known, is_changed
from mediatord.eventlog.read_marker import MarkerError, marker_path, read_marker, write_marker

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


def leave(segments: Iterable[Segment], stems: Collection[str]) -> list[str]:
    """
    Add these segments to the markers of the directories that they are in, and forget those that are gone.

    :param segments: all that were found.
    :return: sentences for the operator, about markers that cannot be written.
    """
    by_directory: defaultdict[Path, set[str]] = defaultdict(set)
    for segment in segments:
        for url in (segment.path, *segment.others):
            path = local_path(url)
            if path is not None:
                by_directory[path.parent].add(segment.stem)
    return [line for directory, there in sorted(by_directory.items()) for line in _left(directory, there, stems)]


def _left(directory: Path, there: Collection[str], stems: Collection[str]) -> Sequence[str]:
    if not marker_path(directory).parent.is_dir():
        return []
    try:
        before = read_marker(directory) or frozenset()
    except MarkerError:
        before = frozenset()
    try:
        write_marker(directory, (before | set(stems)) & set(there))
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        return [f"{marker_path(directory)}: {reason}; the daemon keeps what was read as if it were unread"]
    return []
