"""
Retention: deletes expired tables, reports and segments, and tells daemons by read markers which segments were loaded.

A daemon that honours read markers has a directory for them among its segments
(:mod:`mediatord.observability.segments`). Copies of logs have none, or one that nobody reads.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from analytics.files import FileSystem, get_local_path
from analytics.job import Job
from analytics.reading.segments import CLOSED, CRASHED, EMPTY, PARTIAL, ReadSegment, has_segment_changed
from analytics.settings import Settings
from analytics.writing.runs import (
    hold_run_lock,
    list_manifest_names,
    make_manifest_path,
    make_run_id,
    parse_run_start,
    recover_publication,
)
from analytics.writing.warehouse import ALL_TABLES, COMPUTED_DAYS_TABLE, TABLES_DIRECTORY, Warehouse
from mediatord.observability.segments import (
    ReadMarkerError,
    load_read_marker,
    make_read_marker_path,
    save_read_marker,
)

if TYPE_CHECKING:
    from analytics.reading.segments import Segment

# Days that the ledger reads back after days without logs; always kept.
_LEDGER_HISTORY_DAYS = 7


@dataclass(frozen=True, slots=True)
class ExpiredItem:
    """
    :param path: file or directory to delete.
    :param what: description: the table, `report`, `run` or `segment`, and the day.
    """

    path: str
    what: str


def prune_expired(
    warehouse: Warehouse,
    files: FileSystem,
    out: str,
    settings: Settings,
    jobs: Sequence[Job],
    segments: Sequence[Segment] = (),
    known: Mapping[str, ReadSegment] | None = None,
    dry_run: bool = False,
    report_item: Callable[[ExpiredItem], None] = lambda item: None,
) -> int:
    """
    Delete expired days, and expired segments that were loaded completely.

    :param report_item: receives each item that was deleted or, in a dry run, would be.
    :return: number of deleted items, or of those to delete.
    :raise AnalyticsError: an item cannot be deleted, or a run is active.
    """
    count = 0
    with hold_run_lock(files, out, f"{make_run_id(datetime.now(UTC))}-prune"):
        recover_publication(files, out)
        for one in find_expired_items(warehouse, files, out, settings, jobs, segments, known or {}):
            if not dry_run:
                files.delete(one.path)
            report_item(one)
            count += 1
    return count


def find_expired_items(
    warehouse: Warehouse,
    files: FileSystem,
    out: str,
    settings: Settings,
    jobs: Sequence[Job],
    segments: Sequence[Segment],
    known: Mapping[str, ReadSegment],
) -> Iterator[ExpiredItem]:
    """
    Find expired items. Ages count from the oldest day that a nightly run may compute again, so nothing expires while
    no day is analysed, and history that jobs read is kept.
    """
    computed = warehouse.days(COMPUTED_DAYS_TABLE)
    if not computed:
        return
    reference = computed[-1] - timedelta(settings.look_back_days)
    for name, table in ALL_TABLES.items():
        recalled = max((job.history_days.get(name, 0) for job in jobs), default=0)
        if table.private:
            keep = max(settings.keep_events_days, min(recalled, _LEDGER_HISTORY_DAYS))
        else:
            keep = max(settings.keep_tables_days, recalled)
        for day in _list_days_before(warehouse.days(name), reference - timedelta(keep)):
            yield ExpiredItem(f"{out}/{TABLES_DIRECTORY}/{name}/dt={day}", f"{name} of {day}")
    yield from _find_expired_outputs(files, out, reference - timedelta(settings.keep_tables_days))
    for segment in segments:
        before = known.get(segment.stem)
        if (
            segment.batch < reference - timedelta(settings.keep_logs_days)
            and before
            and _is_fully_read(segment, before)
        ):
            for path in (segment.path, *segment.others):
                yield ExpiredItem(path, f"segment of {segment.batch}")


def _find_expired_outputs(files: FileSystem, out: str, first: date) -> Iterator[ExpiredItem]:
    """Reports and manifests before a day; the last manifest is kept."""
    reports = files.list_names(f"{out}/report") if files.exists(f"{out}/report") else []
    for day in _list_days_before([date.fromisoformat(name) for name in reports], first):
        yield ExpiredItem(f"{out}/report/{day}", f"report of {day}")
    for name in list(list_manifest_names(files, out))[:-1]:
        started = parse_run_start(name)
        if started is not None and started.date() < first:
            yield ExpiredItem(make_manifest_path(out, name.removesuffix(".json")), f"run of {started.date()}")


def _is_fully_read(segment: Segment, before: ReadSegment) -> bool:
    """Whether the files of a segment were loaded completely."""
    if segment.active or segment.conflict or before.shrunk:
        return False
    return before.state in (CLOSED, CRASHED, EMPTY) and not has_segment_changed(segment, before)


def _list_days_before(days: Sequence[date], first: date) -> list[date]:
    return [day for day in days if day < first]


# States of segments that were read as far as possible.
_READ_STATES = (CLOSED, CRASHED, EMPTY, PARTIAL)


def list_read_stems(
    segments: Iterable[Segment], known: Mapping[str, ReadSegment], inputs: Iterable[Mapping[str, Any]]
) -> set[str]:
    """
    Stems of segments that need not be read again.

    :param known: segments loaded before this run.
    :param inputs: rows of segments loaded in this run.
    """
    states = {row["stem"]: row["state"] for row in inputs}
    found = set()
    for segment in segments:
        state, before = states.get(segment.stem), known.get(segment.stem)
        if state is None and before is not None and not has_segment_changed(segment, before):
            state = before.state
        if state in _READ_STATES and not segment.active:
            found.add(segment.stem)
    return found


def create_read_markers(segments: Iterable[Segment]) -> None:
    """
    Create empty read markers where a daemon expects them, so that it keeps unread segments.

    Errors are ignored; :func:`update_read_markers` reports them.

    :param segments: all discovered segments.
    """
    for directory in _group_stems_by_directory(segments):
        path = make_read_marker_path(directory)
        if path.parent.is_dir() and not os.path.lexists(path):
            with suppress(OSError):
                save_read_marker(directory, ())


def update_read_markers(segments: Iterable[Segment], stems: Collection[str]) -> list[str]:
    """
    Add these segments to the read markers of their directories, and remove those that no longer exist.

    :param segments: all discovered segments.
    :return: warnings about markers that cannot be written.
    """
    found = sorted(_group_stems_by_directory(segments).items())
    return [line for directory, there in found for line in _update_read_marker(directory, there, stems)]


def _group_stems_by_directory(segments: Iterable[Segment]) -> Mapping[Path, set[str]]:
    by_directory: defaultdict[Path, set[str]] = defaultdict(set)
    for segment in segments:
        for url in (segment.path, *segment.others):
            path = get_local_path(url)
            if path is not None:
                by_directory[path.parent].add(segment.stem)
    return by_directory


def _update_read_marker(directory: Path, there: Collection[str], stems: Collection[str]) -> Sequence[str]:
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
        return [f"{make_read_marker_path(directory)}: {reason}; the daemon treats loaded segments as unread"]
    return []
