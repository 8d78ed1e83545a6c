"""
Which segments a run reads again, and which days it computes.

The window of a run is the days asked for and the `look_back_days` before them. A batch, the segments with the same
day in their names, is changed if one of its segments is new, or not as it was when it was read, or was gone then.
Days that have events of a changed batch, before or after, are computed again, and all days from the first of them to
the last one asked for: the ledger carries open messages on from day to day. A back-fill so makes the rows that
nightly runs make one by one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from typing import TYPE_CHECKING, Any

from analytics.errors import AnalyticsError
from analytics.intake import ACTIVE, SHRUNK, VANISHED
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
    :param packed: as :class:`analytics.segments.Segment` says it.
    :param state: one of :data:`analytics.intake.STATES`.
    :param lines: events that it has, doubled ones too: lines that were whole.
    :param complete: it was closed, and every line was there and whole: such a segment never changes again.
    :param shrunk: the lines are those of an earlier file, which had more of them.
    :param deleted: prune has deleted its events.
    """

    batch: date
    size: int
    modified_ms: int
    packed: str
    state: str
    lines: int
    complete: bool = False
    shrunk: bool = False
    deleted: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """
    :param window: the days asked for and the look-back.
    :param read: segments to read.
    :param kept: stems that were read before and are to stay as they are, by changed batch.
    :param outside: batches before the window that have input which was never looked at.
    """

    window: Span
    read: Sequence[Segment]
    kept: Mapping[date, Sequence[str]]
    outside: Sequence[date]

    @property
    def batches(self) -> list[date]:
        """Those that changed, in order."""
        return sorted(self.kept)

    def keeping(self, stems: Collection[str]) -> Plan:
        """The same, but what was read of these segments before stays."""
        kept = {batch: list(there) for batch, there in self.kept.items()}
        for segment in self.read:
            if segment.stem in stems:
                kept[segment.batch].append(segment.stem)
        return replace(
            self,
            read=[segment for segment in self.read if segment.stem not in stems],
            kept={batch: sorted(there) for batch, there in kept.items()},
        )


def known(warehouse: Warehouse, batches: Iterable[date]) -> dict[str, Known]:
    """What was read of these batches before, by stem."""
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
            "packed",
            "state",
            F.expr("lines - corrupt - unfinished").alias("whole"),
            "doubled",
            F.expr("state = 'closed' AND corrupt + unfinished = 0 AND lines = lines_said").alias("complete"),
            F.contains("remarks", F.lit(SHRUNK)).alias("shrunk"),
        )
        .toLocalIterator()
    )
    return {
        row.stem: Known(
            batch=row.dt,
            size=row.bytes,
            modified_ms=row.modified_ms,
            packed=row.packed,
            state=row.state,
            lines=row.whole,
            complete=bool(row.complete),
            shrunk=bool(row.shrunk),
            deleted=row.whole > row.doubled and not events[row.dt],
        )
        for row in rows
        if row.dt in events
    }


def make(asked: Span, look_back_days: int, segments: Sequence[Segment], read_before: Mapping[str, Known]) -> Plan:
    """
    A batch that changed is read again in full, so that lines that are in two of its segments count once.

    Of segments whose files are gone, deleted to save room, and of those that were complete and look different now,
    packed or damaged, what was read stays: nothing is ever replaced by less, and late segments lose nothing.

    Batches of which prune has deleted the events are read again if they are asked for and all their segments are
    still there.
    """
    window = asked.widened(before=look_back_days)
    changed = [segment for segment in segments if is_changed(segment, read_before.get(segment.stem))]
    deleted = {stem: one.batch for stem, one in read_before.items() if one.deleted}
    lost = {deleted[stem] for stem in deleted.keys() - {segment.stem for segment in segments}}
    again = {segment.batch for segment in changed}.union(deleted.values()) - lost
    read = [
        segment
        for segment in segments
        if segment.batch in again and segment.batch in window and not _stays(segment, read_before.get(segment.stem))
    ]
    stems = {segment.stem for segment in read}
    kept = {
        batch: sorted(stem for stem, one in read_before.items() if one.batch == batch and stem not in stems)
        for batch in {segment.batch for segment in read}
    }
    outside = {segment.batch for segment in changed if segment.stem not in deleted and segment.batch < window.first}
    return Plan(window, read, kept, sorted(outside))


def shrunk(inputs: Iterable[Mapping[str, Any]], read_before: Mapping[str, Known]) -> list[dict[str, Any]]:
    """
    Those rows of `inputs` that show fewer whole lines than the tables have of their segments, with the remark that
    says so if there is a file.
    """
    found = []
    for row in inputs:
        before = read_before.get(row["stem"])
        lines = row["lines"] - row["corrupt"] - row["unfinished"]
        if before is not None and not before.deleted and lines < before.lines:
            remarks = row["remarks"] if row["state"] == VANISHED else f"{row['remarks']} {SHRUNK}".strip()
            found.append({**row, "remarks": remarks})
    return found


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
    """Whether a segment is new, or was not read, or was read before it was complete and looks different now."""
    if before is None or before.state == VANISHED:
        return True
    return not before.complete and _differs(segment, before)


def _stays(segment: Segment, before: Known | None) -> bool:
    return before is not None and before.complete and not before.deleted and _differs(segment, before)


def _differs(segment: Segment, before: Known) -> bool:
    modified_ms = round(segment.modified.timestamp() * 1000)
    is_closed_since = before.state == ACTIVE and not segment.active
    same = (before.size, before.modified_ms, before.packed)
    return is_closed_since or (segment.size, modified_ms, segment.packed) != same
