"""Deleting what was kept long enough."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import TYPE_CHECKING

from analytics import lock, runs
from analytics.files import Files
from analytics.intake import CLOSED, CRASHED, EMPTY
from analytics.job import Job
from analytics.journal import recover
from analytics.plan import Known, is_changed
from analytics.settings import Settings
from analytics.warehouse import COMPUTED, PUBLISHED, TABLES_AND_EVENTS, Warehouse

if TYPE_CHECKING:
    from analytics.segments import Segment

# Days that the ledger looks back to go on after days without logs: kept whatever is asked for.
_BOOKS_DAYS = 7


@dataclass(frozen=True, slots=True)
class Stale:
    """
    :param path: what is to be deleted, a file or a directory.
    :param what: for people: the table, `report`, `run` or `segment`, and the day.
    """

    path: str
    what: str


def prune(
    warehouse: Warehouse,
    files: Files,
    out: str,
    settings: Settings,
    jobs: Sequence[Job],
    segments: Sequence[Segment] = (),
    known: Mapping[str, Known] | None = None,
    dry_run: bool = False,
    progress: Callable[[str], None] = lambda line: None,
) -> int:
    """
    Delete old days, and segments that are given and were read in full.

    :return: how many things were deleted, or would be.
    :raise AnalyticsError: something cannot be deleted, or a run is going on.
    """
    count = 0
    with lock.held(files, out, f"{runs.new_id(datetime.now(UTC))}-prune"):
        recover(files, out)
        for one in stale(warehouse, files, out, settings, jobs, segments, known or {}):
            progress(f"{'would delete' if dry_run else 'delete'} {one.what}: {one.path}")
            if not dry_run:
                files.delete(one.path)
            count += 1
    return count


def stale(
    warehouse: Warehouse,
    files: Files,
    out: str,
    settings: Settings,
    jobs: Sequence[Job],
    segments: Sequence[Segment],
    known: Mapping[str, Known],
) -> Iterator[Stale]:
    """
    What is old. Ages count from the oldest day that a nightly run may still make again, so while no day is analysed
    nothing grows old, and what jobs recall is there.
    """
    computed = warehouse.days(COMPUTED)
    if not computed:
        return
    reference = computed[-1] - timedelta(settings.look_back_days)
    for name, table in TABLES_AND_EVENTS.items():
        recalled = max((job.recalls.get(name, 0) for job in jobs), default=0)
        if table.private:
            keep = max(settings.keep_events_days, min(recalled, _BOOKS_DAYS))
        else:
            keep = max(settings.keep_tables_days, recalled)
        for day in _before(warehouse.days(name), reference - timedelta(keep)):
            yield Stale(f"{out}/{PUBLISHED}/{name}/dt={day}", f"{name} of {day}")
    yield from _outputs(files, out, reference - timedelta(settings.keep_tables_days))
    for segment in segments:
        before = known.get(segment.stem)
        if segment.batch < reference - timedelta(settings.keep_logs_days) and before and _read(segment, before):
            for path in (segment.path, *segment.others):
                yield Stale(path, f"segment of {segment.batch}")


def _outputs(files: Files, out: str, first: date) -> Iterator[Stale]:
    """Reports and manifests from before a day; the last manifest stays."""
    reports = files.names(f"{out}/report") if files.exists(f"{out}/report") else []
    for day in _before([date.fromisoformat(name) for name in reports], first):
        yield Stale(f"{out}/report/{day}", f"report of {day}")
    for name in list(runs.names(files, out))[:-1]:
        began = runs.started(name)
        if began is not None and began.date() < first:
            yield Stale(runs.path(out, name.removesuffix(".json")), f"run of {began.date()}")


def _read(segment: Segment, before: Known) -> bool:
    """Whether all that is in the files of a segment is in the tables, or was."""
    if segment.active or segment.conflict or before.shrunk:
        return False
    return before.state in (CLOSED, CRASHED, EMPTY) and not is_changed(segment, before)


def _before(days: Sequence[date], first: date) -> list[date]:
    return [day for day in days if day < first]
