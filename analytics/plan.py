"""
Which segments a run reads again, and which days it computes.

The window of a run is the days asked for and the `look_back_days` before them. A batch, the segments with the same
day in their names, is changed if one of its segments is new, or not as it was when it was read. Days that have events
of a changed batch, before or after, are computed again, and all days from the first of them to the last one asked
for: the ledger carries open messages on from day to day. A back-fill so makes the rows that nightly runs make one by
one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from typing import TYPE_CHECKING

from analytics.errors import AnalyticsError
from analytics.job import Span

if TYPE_CHECKING:
    from analytics.segments import Segment
    from analytics.warehouse import Warehouse


@dataclass(frozen=True, slots=True)
class Known:
    """
    A segment as it was read before.

    :param size: bytes of the file.
    :param modified_ms: when it was changed last, milliseconds since the epoch.
    :param complete: it was closed, and every line was there and whole: such a segment never changes again.
    """

    batch: date
    size: int
    modified_ms: int
    complete: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """
    :param window: the days asked for and the look-back.
    :param read: segments to read.
    :param kept: stems that were read before and are to stay as they are, by changed batch.
    :param outside: batches before the window that changed, or were never read.
    """

    window: Span
    read: Sequence[Segment]
    kept: Mapping[date, Sequence[str]]
    outside: Sequence[date]

    @property
    def batches(self) -> list[date]:
        """Those that changed, in order."""
        return sorted(self.kept)


def known(warehouse: Warehouse, batches: Iterable[date]) -> dict[str, Known]:
    """
    What was read of these batches before, by stem: one row for each segment.

    Segments whose events are gone, deleted by prune, count as never read.
    """
    from pyspark.sql import functions as F

    there = sorted(set(batches) & set(warehouse.days("inputs")))
    if not there:
        return {}
    events = warehouse.days_by_batch(there)
    rows = (
        warehouse.read("inputs", Span(there[0], there[-1]))
        .select(
            "dt",
            "stem",
            "bytes",
            F.unix_millis("modified").alias("modified_ms"),
            F.expr("state = 'closed' AND corrupt + unfinished = 0 AND lines = lines_said").alias("complete"),
            F.expr("lines > corrupt + unfinished + doubled").alias("has_events"),
        )
        .toLocalIterator()
    )
    return {
        row.stem: Known(row.dt, row.bytes, row.modified_ms, bool(row.complete))
        for row in rows
        if events.get(row.dt) or not row.has_events
    }


def make(asked: Span, look_back_days: int, segments: Sequence[Segment], read_before: Mapping[str, Known]) -> Plan:
    """
    A batch that changed is read again in full, so that lines that are in two of its segments count once.

    Of segments whose files are gone, deleted to save room, and of those that were complete and look different now,
    packed or damaged, what was read stays: nothing is ever replaced by less, and late segments lose nothing.
    """
    window = asked.widened(before=look_back_days)
    changed = {segment.batch for segment in segments if is_changed(segment, read_before.get(segment.stem))}
    read = [
        segment
        for segment in segments
        if segment.batch in changed and segment.batch in window and not _stays(segment, read_before.get(segment.stem))
    ]
    stems = {segment.stem for segment in read}
    kept = {
        batch: sorted(stem for stem, one in read_before.items() if one.batch == batch and stem not in stems)
        for batch in {segment.batch for segment in read}
    }
    outside = sorted(batch for batch in changed if batch < window.first)
    return Plan(window, read, kept, outside)


def computed(asked: Span, window: Span, affected: Iterable[date]) -> Span:
    """From the first affected day of the window to the last one asked for, without a gap."""
    return Span(min([asked.first, *(day for day in affected if day in window)]), asked.last)


def check(warehouse: Warehouse, span: Span) -> None:
    """
    Results are not replaced by less.

    :raise AnalyticsError: days of the span were made from events that are not there any longer.
    """
    had_events = warehouse.days("boots_daily")
    gone = [str(day) for day in had_events if day in span and not warehouse.has_events(day)]
    if gone:
        raise AnalyticsError(f"the events of {', '.join(gone)} were deleted: these days cannot be made again")


def warnings(plan: Plan, span: Span, affected: Iterable[date], later: Iterable[date], command: str) -> list[str]:
    """
    What is out of date now and stays so, with the command that helps.

    :param affected: days that have events of changed batches.
    :param later: days after the span that were computed before.
    :param command: what back-fills, without days: `... --from`.
    """
    found = []
    before = sorted({*plan.outside, *(day for day in affected if day < plan.window.first)})
    if before:
        found.append(
            f"{len(before)} days before {plan.window.first} have new input that was not looked at:"
            f" {command} --from {before[0]} --to {span.last}"
        )
    after = sorted(day for day in later if day > span.last)
    if after and plan.batches:
        found.append(
            f"days after {span.last} were made from older figures: {command} --from {after[0]} --to {after[-1]}"
        )
    return found


def is_changed(segment: Segment, before: Known | None) -> bool:
    """Whether a segment is new, or was read before it was complete and looks different now."""
    return before is None or (not before.complete and _differs(segment, before))


def _stays(segment: Segment, before: Known | None) -> bool:
    return before is not None and before.complete and _differs(segment, before)


def _differs(segment: Segment, before: Known) -> bool:
    modified_ms = round(segment.modified.timestamp() * 1000)
    return (segment.size, modified_ms) != (before.size, before.modified_ms)
