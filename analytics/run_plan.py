"""
What a run reads and computes, whether the disk has room for it, and whether its logs are complete.

The window of a run is the requested days and the `look_back_days` before them. A segment is read if it is new, or
differs from when it was read, or was missing then; the others of its batch, the day in its name, stay as they are.
Days with events of segments that were read are computed again, and so are all days from the first of them to the last
requested one, because the ledger carries open messages from day to day. A back-fill therefore makes the same rows as
nightly runs do.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from analytics.database import Database, Row
from analytics.errors import AnalyticsError
from analytics.files import FileSystem
from analytics.job import Span
from analytics.reading.ingest import copy_without_rows, find_repeated_lines
from analytics.reading.segments import (
    SHRUNK,
    UNKNOWN_START,
    VANISHED,
    ReadSegment,
    has_segment_changed,
    parse_start,
)
from analytics.sql_functions import quote_day, quote_text
from analytics.writing.warehouse import Warehouse, parse_day, parse_stem

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


def load_read_segments(warehouse: Warehouse, batches: Iterable[date]) -> dict[str, ReadSegment]:
    """Segments of these batches as loaded before, by stem."""
    there = sorted(set(batches) & set(warehouse.days("inputs")))
    if not there:
        return {}
    events = warehouse.days_by_batch(there)
    columns = f"""
        dt, stem, bytes, epoch_ms(modified) AS modified_ms, packed, state, doubled,
        lines - corrupt - unfinished AS whole,
        coalesce(state = 'closed' AND corrupt + unfinished = 0 AND lines = lines_said, false) AS complete,
        contains(remarks, {quote_text(SHRUNK)}) AS shrunk
    """
    return {
        row["stem"]: ReadSegment(
            batch=row["dt"],
            size=row["bytes"],
            modified_ms=row["modified_ms"],
            packed=row["packed"],
            state=row["state"],
            lines=row["whole"],
            complete=row["complete"],
            shrunk=row["shrunk"],
            deleted=row["whole"] > row["doubled"] and not events[row["dt"]],
        )
        for row in warehouse.rows("inputs", Span(there[0], there[-1]), columns)
        if row["dt"] in events
    }


def make_plan(
    requested: Span, look_back_days: int, segments: Sequence[Segment], read_before: Mapping[str, ReadSegment]
) -> RunPlan:
    """
    Plan a run. Only segments that are new, or have changed since they were read, are read.

    What was loaded stays if the file of a segment was deleted, or if a complete segment looks different now, because
    it was compressed or damaged: nothing is ever replaced by less.

    A batch whose events prune has deleted is read again if it is requested and all its segments still exist.
    """
    window = requested.widen(before=look_back_days)
    changed = [segment for segment in segments if has_segment_changed(segment, read_before.get(segment.stem))]
    deleted = {stem: one.batch for stem, one in read_before.items() if one.deleted}
    lost = {deleted[stem] for stem in deleted.keys() - {segment.stem for segment in segments}}
    wanted = {segment.stem for segment in changed}.union(deleted)
    read = [
        segment
        for segment in segments
        if segment.stem in wanted and segment.batch in window and segment.batch not in lost
    ]
    stems = {segment.stem for segment in read}
    kept = {
        batch: sorted(stem for stem, one in read_before.items() if one.batch == batch and stem not in stems)
        for batch in {segment.batch for segment in read}
    }
    outside = {segment.batch for segment in changed if segment.stem not in deleted and segment.batch < window.first}
    return RunPlan(window, read, kept, sorted(outside))


IngestStep = Callable[[Sequence["Segment"]], list[Row]]
# Columns of `inputs` about the file; the others are about what was read.
_FILE_COLUMNS = ("path", "bytes", "modified", "packed", "state", "remarks")


@dataclass(frozen=True, slots=True)
class StagedInput:
    """
    :param read: rows of `inputs` about segments that were read.
    :param shrunk: rows about segments whose earlier content stays.
    :param kept: number of loaded segments that stay, by changed batch.
    :param days: days with events of read segments, before or after.
    """

    read: Sequence[Row]
    shrunk: Sequence[Row]
    kept: Mapping[date, int]
    days: set[date]


def stage_input(
    warehouse: Warehouse,
    database: Database,
    plan: RunPlan,
    read_before: Mapping[str, ReadSegment],
    ingest: IngestStep,
) -> StagedInput:
    """
    Read the segments of a plan, and stage what they change in the tables `events`, `quarantine` and `inputs`.

    :param ingest: stages the files of segments, and returns their rows of `inputs`.
    """
    rows = ingest(plan.read)
    less = find_shrunk_segments(rows, read_before)
    stays = {row["stem"] for row in less}
    warehouse.discard_segments(stays)
    read = [row for row in rows if row["stem"] not in stays]
    stems = {row["stem"] for row in read}
    before = warehouse.find_event_files(stems, plan.batches)
    warehouse.replace_segments(stems)
    after = warehouse.find_event_files(stems, plan.batches)
    days = {parse_day(path) for files in (before, after) for paths in files.values() for path in paths}
    days |= warehouse.split_shared_files(plan.batches, stems)
    shrunk = [row for row in less if row["state"] != VANISHED]
    kept = _update_kept_rows(warehouse, plan.batches, stems, shrunk)
    for batch in plan.batches:
        own = [row for row in (*read, *kept) if row["dt"] == batch]
        days |= _remove_repeated_lines(warehouse, database, batch, own, stems)
    if read or shrunk:
        warehouse.stage_inputs([*read, *kept], plan.batches)
    counts = Counter(row["dt"] for row in kept)
    return StagedInput(read, shrunk, {batch: n for batch, n in sorted(counts.items())}, days)


def _update_kept_rows(
    warehouse: Warehouse, batches: Sequence[date], read: Collection[str], shrunk: Iterable[Row]
) -> list[Row]:
    """Rows of `inputs` of these batches about segments that were not read, with what is new about their files."""
    if not batches:
        return []
    files = {row["stem"]: {name: row[name] for name in _FILE_COLUMNS} for row in shrunk}
    loaded = warehouse.rows("inputs", Span(batches[0], batches[-1]))
    return [
        {**row, **files.get(row["stem"], {})} for row in loaded if row["dt"] in batches and row["stem"] not in read
    ]


def _remove_repeated_lines(
    warehouse: Warehouse, database: Database, batch: date, rows: Sequence[Row], read: Collection[str]
) -> set[date]:
    """
    Remove lines that are in a segment of a lower stem, too, and count them in the rows of their segments.

    :param rows: of all segments of the batch.
    :param read: segments that were read now; the others have no lines in common.
    :return: days of files that were changed.
    """
    suspects = find_overlapping_segments(rows, read)
    paths = [path for paths in warehouse.find_event_files(suspects, [batch]).values() for path in paths]
    local = warehouse.localize_files(paths)
    found = find_repeated_lines(database, list(local)) if paths else {}
    repeated = {local[path]: numbers for path, numbers in found.items()}
    by_stem = {row["stem"]: row for row in rows}
    for path, numbers in repeated.items():
        warehouse.rewrite_file(path, partial(copy_without_rows, numbers=numbers))
        by_stem[parse_stem(path)]["doubled"] += len(numbers)
    return {parse_day(path) for path in repeated}


def find_overlapping_segments(rows: Iterable[Row], read: Collection[str]) -> set[str]:
    """
    Stems of segments of the same start of a node whose ranges of `seq` overlap, if one of them was read now.

    :param rows: rows of `inputs`.
    """
    named: defaultdict[str, list[Row]] = defaultdict(list)
    for row in rows:
        if row["seq_first"] is not None:
            named[parse_start(row["stem"])].append(row)
    # Nobody knows whose lines these are.
    unnamed = named.pop(UNKNOWN_START, [])
    found: set[str] = set()
    for own in named.values() or [[]]:
        overlapping = _find_overlaps([*own, *unnamed])
        if not overlapping.isdisjoint(read):
            found |= overlapping
    return found


def _find_overlaps(rows: Iterable[Row]) -> set[str]:
    found = set()
    highest: Row | None = None
    for row in sorted(rows, key=lambda row: (row["seq_first"], row["stem"])):
        if highest is not None and row["seq_first"] <= highest["seq_last"]:
            found |= {row["stem"], highest["stem"]}
        if highest is None or row["seq_last"] > highest["seq_last"]:
            highest = row
    return found


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

    :param affected: days with events of segments that were read.
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


def estimate_disk_needs(segments: Iterable[Segment]) -> DiskNeeds:
    """Estimate how much a run writes."""
    raw = sum(segment.size * (1 if segment.packed == "plain" else COMPRESSION_RATIO) for segment in segments)
    return DiskNeeds(
        int(raw * PARQUET_RATIO) + TABLES_BYTES,
        int(raw * SHUFFLE_RATIO) + TABLES_BYTES,
    )


def check_disk_space(files: FileSystem, needed: DiskNeeds, out: str, scratch: str, keep_free: int) -> None:
    """
    Check free space for results and scratch. Directories on one disk, or with equal free space as in a storage pool,
    must fit together.

    :param scratch: a local directory.
    :param keep_free: bytes that must stay free.
    :raise AnalyticsError: there is too little space.
    """
    spill = f"file:{Path(scratch).absolute()}"
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

    An error means that the logs or a ledger are incomplete: a ledger that does not balance, endings without a logged
    acceptance, vanished messages, a store ledger with a difference, counters that differ from log lines, gaps in
    `seq`. Other findings, such as acceptances without a line in a crash and duplicate or damaged lines, are reported
    only.
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
