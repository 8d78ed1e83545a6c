"""
What a run reads and computes, whether the disk has room for it, and whether its logs are complete.

The window of a run is the requested days and the `look_back_days` before them. A batch, the segments of one day by
name, has changed if a segment is new, differs from when it was read, or was missing then. Days with events of a
changed batch are computed again, and so are all days from the first of them to the last requested one, because the
ledger carries open messages from day to day. A back-fill therefore makes the same rows as nightly runs do.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from analytics.database import Database
from analytics.errors import AnalyticsError
from analytics.job import Span
from analytics.reading.files import FileSystem
from analytics.reading.segments import SHRUNK, VANISHED, ReadSegment, differs_from_read, has_segment_changed
from analytics.sql_functions import quote_day, quote_text
from analytics.writing.warehouse import Warehouse

if TYPE_CHECKING:
    from analytics.reading.segments import Segment


@dataclass(frozen=True, slots=True)
class RunPlan:
    """
    :param window: requested days and look-back.
    :param read: segments to read.
    :param kept: stems of loaded segments that stay unchanged, by changed batch.
    :param outside: batches before the window with input that was never loaded.
    """

    window: Span
    read: Sequence[Segment]
    kept: Mapping[date, Sequence[str]]
    outside: Sequence[date]

    @property
    def batches(self) -> list[date]:
        """Changed batches, in order."""
        return sorted(self.kept)

    def keep_earlier(self, stems: Collection[str]) -> RunPlan:
        """Return a plan that keeps the loaded content of these segments instead of reading them."""
        kept = {batch: list(there) for batch, there in self.kept.items()}
        for segment in self.read:
            if segment.stem in stems:
                kept[segment.batch].append(segment.stem)
        return replace(
            self,
            read=[segment for segment in self.read if segment.stem not in stems],
            kept={batch: sorted(there) for batch, there in kept.items()},
        )


def load_read_segments(warehouse: Warehouse, batches: Iterable[date]) -> dict[str, ReadSegment]:
    """Segments of these batches as loaded before, by stem."""
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
        row.stem: ReadSegment(
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


def make_plan(
    requested: Span, look_back_days: int, segments: Sequence[Segment], read_before: Mapping[str, ReadSegment]
) -> RunPlan:
    """
    Plan a run. A batch that changed is read again in full, so that lines that are in two of its segments count once.

    What was loaded stays if the file of a segment was deleted, or if a complete segment looks different now, because
    it was compressed or damaged: nothing is ever replaced by less.

    A batch whose events prune has deleted is read again if it is requested and all its segments still exist.
    """
    window = requested.widen(before=look_back_days)
    changed = [segment for segment in segments if has_segment_changed(segment, read_before.get(segment.stem))]
    deleted = {stem: one.batch for stem, one in read_before.items() if one.deleted}
    lost = {deleted[stem] for stem in deleted.keys() - {segment.stem for segment in segments}}
    again = {segment.batch for segment in changed}.union(deleted.values()) - lost
    read = [
        segment
        for segment in segments
        if segment.batch in again
        and segment.batch in window
        and not _keeps_earlier_content(segment, read_before.get(segment.stem))
    ]
    stems = {segment.stem for segment in read}
    kept = {
        batch: sorted(stem for stem, one in read_before.items() if one.batch == batch and stem not in stems)
        for batch in {segment.batch for segment in read}
    }
    outside = {segment.batch for segment in changed if segment.stem not in deleted and segment.batch < window.first}
    return RunPlan(window, read, kept, sorted(outside))


def find_shrunk_segments(
    inputs: Iterable[Mapping[str, Any]], read_before: Mapping[str, ReadSegment]
) -> list[dict[str, Any]]:
    """
    Rows of `inputs` with fewer whole lines than are loaded of the segment; their remarks say so unless the file is
    missing.
    """
    found = []
    for row in inputs:
        before = read_before.get(row["stem"])
        lines = row["lines"] - row["corrupt"] - row["unfinished"]
        if before is not None and not before.deleted and lines < before.lines:
            remarks = row["remarks"] if row["state"] == VANISHED else f"{row['remarks']} {SHRUNK}".strip()
            found.append({**row, "remarks": remarks})
    return found


def get_computed_span(requested: Span, window: Span, affected: Iterable[date]) -> Span:
    """From the first affected day of the window to the last requested day."""
    return Span(min([requested.first, *(day for day in affected if day in window)]), requested.last)


def check_events_exist(warehouse: Warehouse, span: Span) -> None:
    """
    Refuse to replace results by less.

    :raise AnalyticsError: the events of a day in the span were deleted.
    """
    had_events = warehouse.days("boots_daily")
    gone = [str(day) for day in had_events if day in span and not warehouse.has_events(day)]
    if gone:
        raise AnalyticsError(f"cannot recompute {', '.join(gone)}: prune has deleted their events")


def make_backfill_warnings(
    plan: RunPlan, span: Span, affected: Iterable[date], later: Iterable[date], command: str
) -> list[str]:
    """
    Warn of results that remain outdated, with the command that updates them.

    :param affected: days with events of changed batches.
    :param later: computed days after the span.
    :param command: back-fill command without days: `... --from`.
    """
    found = []
    before = sorted({*plan.outside, *(day for day in affected if day < plan.window.first)})
    if before:
        found.append(
            f"segments of {len(before)} day{'s' * (len(before) > 1)} before {plan.window.first} arrived late and were"
            f" not analysed; run {command} --from {before[0]} --to {span.last}"
        )
    after = sorted(day for day in later if day > span.last)
    if after and plan.batches:
        found.append(f"results after {span.last} are outdated; run {command} --from {after[0]} --to {after[-1]}")
    return found


def _keeps_earlier_content(segment: Segment, before: ReadSegment | None) -> bool:
    return before is not None and before.complete and not before.deleted and differs_from_read(segment, before)


# Measured once on generated logs; real logs compress less, hence a reserve.
COMPRESSION_RATIO = 10
PARQUET_RATIO = 1 / 6
SHUFFLE_RATIO = 1 / 4
TABLES_BYTES = 64 << 20
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class DiskNeeds:
    """
    :param out: bytes of new tables, which coexist with the old ones. :param scratch: upper bound of bytes that Spark
        spills.
    """

    out: int
    scratch: int


def estimate_disk_needs(segments: Iterable[Segment], kept_bytes: int = 0) -> DiskNeeds:
    """
    Estimate how much a run writes.

    :param kept_bytes: Parquet that is carried over.
    """
    raw = sum(segment.size * (1 if segment.packed == "plain" else COMPRESSION_RATIO) for segment in segments)
    return DiskNeeds(
        int(raw * PARQUET_RATIO) + kept_bytes + TABLES_BYTES,
        int((raw + kept_bytes / PARQUET_RATIO) * SHUFFLE_RATIO) + TABLES_BYTES,
    )


def check_disk_space(files: FileSystem, needed: DiskNeeds, out: str, scratch: str, keep_free: int) -> None:
    """
    Check free space for results and scratch. Directories on one disk, or with equal free space as in a storage pool,
    must fit together.

    :param scratch: a local directory.
    :param keep_free: bytes that must stay free.
    :raise AnalyticsError: there is too little space.
    """
    spill = Path(scratch).absolute().as_uri()
    free_out, free_scratch = files.get_free_bytes(out), files.get_free_bytes(spill)
    is_shared = free_out == free_scratch or files.get_disk_id(out) == files.get_disk_id(spill)
    together = needed.out + needed.scratch if is_shared else 0
    for path, free, need in ((out, free_out, needed.out), (scratch, free_scratch, needed.scratch)):
        required_bytes = max(need, together) + keep_free
        if free < required_bytes:
            raise AnalyticsError(
                f"{path}: {free // MIB} MiB free, about {-(-required_bytes // MIB)} MiB needed"
                f" ({keep_free // MIB} MiB of it for --keep-free)"
            )


def find_integrity_errors(database: Database, span: Span) -> list[str]:
    """
    Describe integrity errors of a span, one sentence for each day and kind; exit status 4 if there are any.

    An error means that messages or log lines are lost: a ledger that does not balance, endings without a logged
    acceptance, vanished messages, a store ledger with a difference, counters that differ from log lines, gaps in
    `seq`. Other findings, such as acceptances lost in a crash and duplicate or damaged lines, are only reported.
    """
    days = f"dt BETWEEN {quote_day(span.first)} AND {quote_day(span.last)}"
    store_difference = "CASE WHEN entry = 'difference' THEN abs(total) END"
    errors = (
        ("ledger_daily", "the message ledger has a difference of", "abs(difference)"),
        ("ledger_daily", "messages that ended without a logged acceptance:", "orphans"),
        ("ledger_daily", "messages that became overdue without a logged ending:", "vanished"),
        ("reconciliation_daily", "counters and log lines differ by", "abs(difference)"),
        ("stores_daily", "the ledgers of the stores have a difference of", store_difference),
        ("boots_daily", "missing log lines:", "missing"),
    )
    sums = " UNION ALL ".join(
        f"SELECT dt, {quote_text(text)} AS text, sum({count}) AS n FROM {table} WHERE {days} GROUP BY dt"
        for table, text, count in errors
    )
    rows = database.rows(f"SELECT dt, text || ' ' || n AS text FROM ({sums}) WHERE n > 0 ORDER BY dt, text")
    return [f"{row['dt']}: {row['text']}" for row in rows]
