"""
Loads segments into the tables `events`, `quarantine` and `inputs`.

Each segment is a task, in a pool of processes or on workers of Spark. It reads the file once, parses it in chunks
(:mod:`analytics.reading.lines`), and writes `events/dt=<day>/batch=<day>/<stem>.parquet` for each day of its lines
and `quarantine/dt=<day>/<stem>.parquet`. So a segment that has not changed is never touched again. The bytes of
these files depend on nothing but the lines.

The row of a segment in `inputs` accounts for every line: `lines` is events, `corrupt`, `unfinished` and `doubled`.
Findings that are not lines, such as a second file that differs, are in `remarks`.

Each start of a node numbers its lines, so (node, boot, seq) identifies a line. Duplicates within a segment are
omitted by its task. Between segments of a batch they are searched for only if ranges of numbers overlap; the line in
the lowest stem stays.
"""

from __future__ import annotations

import gc
import os
import shutil
import signal
import zlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date, timedelta
from multiprocessing import active_children, get_context, parent_process
from pathlib import Path
from threading import Thread
from typing import IO, TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from analytics.errors import STOP_HANDLER, STOP_SIGNALS, AnalyticsError
from analytics.files import get_local_path
from analytics.reading.lines import LINE_SCHEMA, parse_lines
from analytics.reading.segments import (
    ACTIVE,
    CLOSED,
    COMPRESSED_MAGIC,
    COMPRESSIONS,
    CRASHED,
    EMPTY,
    MAGIC_BYTES,
    MAX_MAGIC_BYTES,
    PARTIAL,
    UNREAD,
    VANISHED,
    Segment,
    extract_segment_name,
    find_successor,
)
from analytics.spark_session import get_available_memory, is_local_master
from analytics.sql_functions import quote_text
from mediatord.observability.event_schema import MAX_LINE_BYTES

if TYPE_CHECKING:
    from analytics.database import Database
    from analytics.engine import AnalysisSession

CHUNK_BYTES = 4 << 20
BLOCK_BYTES = 32 << 20
# A longer line is damaged in any case.
_MAX_READ_LINE_BYTES = 8 << 20
# Rows of an event in a block that make row groups of their own.
_MANY_ROWS = 10_000
_COMPRESSED_PIECE_BYTES = 1 << 14

LineKey = tuple[str, str]
"""Node and boot."""


@dataclass(frozen=True, slots=True)
class SegmentTask:
    """
    :param source: local path of its file.
    :param target: local directory that has directories of tables.
    """

    segment: Segment
    source: str
    target: str


@dataclass(slots=True)
class SegmentReading:
    """
    What a task found in a segment.

    :ivar state: one of :data:`analytics.reading.segments.SEGMENT_STATES`; empty until its lines tell whether it was
        closed.
    :ivar unfinished: incomplete last lines, in a file that grows.
    :ivar events: events, without the duplicates (`doubled`).
    :ivar corrupt: lines in quarantine.
    :ivar lines_said: number of lines according to its log.close.
    :ivar ranges: lowest and highest `seq` of each start of a node.
    :ivar files: written files below the target directory.
    """

    segment: Segment
    state: str = ""
    unfinished: int = 0
    events: int = 0
    doubled: int = 0
    corrupt: int = 0
    lines_said: int | None = None
    closed: bool = False
    separators: bool = False
    ranges: dict[LineKey, tuple[int, int]] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)

    @property
    def lines(self) -> int:
        """Number of all lines."""
        return self.events + self.doubled + self.corrupt + self.unfinished

    def get_final_state(self) -> str:
        """One of :data:`analytics.reading.segments.SEGMENT_STATES`."""
        return self.state or (CLOSED if self.closed else CRASHED)

    def row(self) -> dict[str, Any]:
        """Row of the table `inputs`."""
        segment = self.segment
        remarks = {"conflict": segment.conflict, "separators": self.separators}
        return {
            "dt": segment.batch,
            "stem": segment.stem,
            "path": segment.path,
            "bytes": segment.size,
            "modified": segment.modified.replace(tzinfo=None),
            "packed": segment.packed,
            "state": self.get_final_state(),
            "lines": self.lines,
            "corrupt": self.corrupt,
            "seq_first": min((first for first, _ in self.ranges.values()), default=None),
            "seq_last": max((last for _, last in self.ranges.values()), default=None),
            "lines_said": self.lines_said,
            "unfinished": self.unfinished,
            "doubled": self.doubled,
            "remarks": " ".join(name for name, found in remarks.items() if found),
        }


def run_task(task: SegmentTask) -> SegmentReading:
    """
    Read a segment and write its files.

    A process needs about 200 MiB (`_PROCESS_BYTES`), whatever the size of the segment: for the columns of a block
    (32 MiB of text), the objects of a chunk (4 MiB), and 75 MiB of code.
    """
    reading = SegmentReading(task.segment)
    try:
        file = open(task.source, "rb")
    except FileNotFoundError:
        reading.state = VANISHED
        return reading
    # Arrow's own allocator keeps a third more, and is not faster.
    pa.set_memory_pool(pa.system_memory_pool())
    with file, _gc_disabled():
        reading.state = _find_unreadable_state(task.segment, file)
        if not reading.state:
            _SegmentLoader(task, reading).load(file)
    return reading


def _find_unreadable_state(segment: Segment, file: IO[bytes]) -> str:
    """Why a file is not read, by its first bytes; empty if it is."""
    if not segment.size:
        return EMPTY
    if segment.packed not in COMPRESSIONS.values():
        return UNREAD
    if segment.active and extract_segment_name(file.readline(MAX_LINE_BYTES)) not in ("", segment.stem):
        return VANISHED  # closed since its discovery: this is the next one
    file.seek(0)
    head = file.read(MAX_MAGIC_BYTES)
    file.seek(0)
    fits = (
        head.startswith(MAGIC_BYTES[segment.packed])
        if segment.packed in MAGIC_BYTES
        else not head.startswith(COMPRESSED_MAGIC)
    )
    return "" if fits else UNREAD


class _SegmentLoader:
    def __init__(self, task: SegmentTask, reading: SegmentReading) -> None:
        self._segment, self._reading = task.segment, reading
        self._seen = _SeenLines()
        self._events = _EventFiles(Path(task.target), task.segment)
        self._quarantine = _QuarantineFile(Path(task.target), task.segment)

    def load(self, file: IO[bytes]) -> None:
        """Read the lines of a file, and write them."""
        text = _TextOfSegment(file, self._segment)
        try:
            for chunk, ends_block in text.read_chunks():
                self._add(chunk)
                if ends_block:
                    self._events.write_block()
            self._events.write_block()
            self._reading.files += self._events.close() + self._quarantine.close()
        finally:
            self._events.discard()
            self._quarantine.discard()
        reading = self._reading
        reading.unfinished = int(text.has_unfinished_line)
        reading.ranges = self._seen.ranges
        reading.state = PARTIAL if text.damaged else ACTIVE if self._segment.active else ""

    def _add(self, chunk: bytes) -> None:
        parsed = parse_lines(chunk)
        reading = self._reading
        reading.separators |= parsed.separators
        reading.corrupt += len(parsed.damaged)
        self._quarantine.add(parsed.damaged)
        reading.events += len(parsed.events)
        if is_fresh := self._seen.find_fresh(parsed.events):
            fresh = parsed.select(pa.array(is_fresh))
            repeated = len(parsed.events) - len(fresh.events)
            reading.events -= repeated
            reading.doubled += repeated
            parsed = fresh
        by_event = parsed.split_by_event()
        if "log.close" in by_event:
            reading.closed = True
            said = pc.max(by_event["log.close"]["lines"]).as_py()
            reading.lines_said = max((n for n in (said, reading.lines_said) if n is not None), default=None)
        self._events.add(by_event)


class _SeenLines:
    """
    The numbers of the lines of a segment.

    :ivar ranges: lowest and highest of each start of a node.
    """

    def __init__(self) -> None:
        self.ranges: dict[LineKey, tuple[int, int]] = {}
        self._ascending: defaultdict[LineKey, list[pa.Array]] = defaultdict(list)
        self._seen: dict[LineKey, set[int]] = {}

    def find_fresh(self, events: pa.Table) -> list[bool]:
        """For each event whether its number has not occurred before; empty if that is so of all."""
        starts = events.group_by(["node", "boot"]).aggregate([("seq", "min"), ("seq", "max")]).to_pylist()
        keys = [(start["node"], start["boot"]) for start in starts]
        is_ascending = len(keys) == 1 and self._continues(keys[0], events["seq"].combine_chunks())
        for key, start in zip(keys, starts, strict=True):
            first, last = self.ranges.get(key, (start["seq_min"], start["seq_max"]))
            self.ranges[key] = min(first, start["seq_min"]), max(last, start["seq_max"])
        if is_ascending:
            self._ascending[keys[0]].append(events["seq"].combine_chunks())
            return []
        for key in keys:
            if key not in self._seen:
                self._seen[key] = {number for part in self._ascending.pop(key, []) for number in part.to_pylist()}
        lines = zip(*(events[name].to_pylist() for name in ("node", "boot", "seq")), strict=True)
        return [self._is_fresh((node, boot), number) for node, boot, number in lines]

    def _continues(self, key: LineKey, numbers: pa.Array) -> bool:
        """Whether each number is higher than all before."""
        if key in self._seen or (key in self.ranges and numbers[0].as_py() <= self.ranges[key][1]):
            return False
        return len(numbers) < 2 or pc.all(pc.greater(numbers[1:], numbers[:-1])).as_py()

    def _is_fresh(self, key: LineKey, number: int) -> bool:
        seen = self._seen[key]
        if number in seen:
            return False
        seen.add(number)
        return True


_QUARANTINE_SCHEMA = pa.schema([("stem", pa.string()), ("cause", pa.string()), ("line", pa.string())])
EVENT_SCHEMA = LINE_SCHEMA.insert(0, pa.field("stem", pa.string()))
# Values that repeat; to build dictionaries of the others takes a tenth of the time of writing.
_UNIQUE_COLUMNS = {"conn", "crypto_ms", "dur_ms", "latency_ms", "msg", "req", "seq", "ts", "rcpt", "sender"}
_PARQUET_OPTIONS: Mapping[str, Any] = {
    "compression": "zstd",
    "compression_level": 1,
    "use_dictionary": [name for name in EVENT_SCHEMA.names if name not in _UNIQUE_COLUMNS],
    # Readers skip row groups of other events.
    "write_statistics": ["event"],
}


class _QuarantineFile:
    """The file of a segment in the table `quarantine`, if it has damaged lines."""

    def __init__(self, target: Path, segment: Segment) -> None:
        self._target, self._stem = target, segment.stem
        self._name = f"quarantine/dt={segment.batch}/{segment.stem}.parquet"
        self._draft = _get_draft_path(target / self._name)
        self._lines: list[tuple[str, str]] = []
        self._writer: pq.ParquetWriter | None = None

    def add(self, damaged: Sequence[tuple[str, str]]) -> None:
        """Add causes and texts of lines; only a few are kept in memory."""
        self._lines += damaged
        whole = len(self._lines) - len(self._lines) % _MANY_ROWS
        for start in range(0, whole, _MANY_ROWS):
            self._write(self._lines[start : start + _MANY_ROWS])
        del self._lines[:whole]

    def close(self) -> list[str]:
        """Complete the file; its name below the target directory."""
        if self._lines:
            self._write(self._lines)
        if self._writer is None:
            return []
        self._writer.close()
        self._writer = None
        os.replace(self._draft, self._target / self._name)
        return [self._name]

    def discard(self) -> None:
        """Delete the file if it is not complete."""
        if self._writer is not None:
            self._writer.close()
            os.unlink(self._draft)

    def _write(self, lines: Sequence[tuple[str, str]]) -> None:
        if self._writer is None:
            Path(self._draft).parent.mkdir(parents=True, exist_ok=True)
            self._writer = pq.ParquetWriter(self._draft, _QUARANTINE_SCHEMA, compression="zstd")
        causes, texts = zip(*lines, strict=True)
        stems = [self._stem] * len(lines)
        self._writer.write_table(pa.table({"stem": stems, "cause": causes, "line": texts}, schema=_QUARANTINE_SCHEMA))


class _EventFiles:
    """The files of a segment in the table `events`: one for each day."""

    def __init__(self, target: Path, segment: Segment) -> None:
        self._target, self._segment = target, segment
        self._parts: defaultdict[tuple[date, str], list[pa.Table]] = defaultdict(list)
        self._writers: dict[date, tuple[str, pq.ParquetWriter]] = {}

    def add(self, by_event: Mapping[str, pa.Table]) -> None:
        """Add events to the block."""
        for event, lines in by_event.items():
            for day, rows in self._split_by_day(lines):
                self._parts[day, event].append(rows)

    def write_block(self) -> None:
        """Write the events of the block: each frequent event to row groups of its own."""
        parts, self._parts = self._parts, defaultdict(list)
        for day in sorted({day for day, _ in parts}):
            writer = self._open(day)
            rest = []
            for event in sorted(event for one, event in parts if one == day):
                table = self._make_table(parts.pop((day, event)))
                if len(table) < _MANY_ROWS:
                    rest.append(table)
                else:
                    writer.write_table(table)
            if rest:
                writer.write_table(pa.concat_tables(rest).combine_chunks())

    def close(self) -> list[str]:
        """Complete the files; their names below the target directory."""
        names = []
        for day, (draft, writer) in sorted(self._writers.items()):
            writer.close()
            names.append(self._get_name(day))
            os.replace(draft, self._target / names[-1])
        self._writers.clear()
        return names

    def discard(self) -> None:
        """Delete files that are not complete."""
        for draft, writer in self._writers.values():
            writer.close()
            os.unlink(draft)

    def _get_name(self, day: date) -> str:
        return f"events/dt={day}/batch={self._segment.batch}/{self._segment.stem}.parquet"

    def _open(self, day: date) -> pq.ParquetWriter:
        if day not in self._writers:
            path = self._target / self._get_name(day)
            path.parent.mkdir(parents=True, exist_ok=True)
            draft = _get_draft_path(path)
            self._writers[day] = draft, pq.ParquetWriter(draft, EVENT_SCHEMA, **_PARQUET_OPTIONS)
        return self._writers[day][1]

    def _split_by_day(self, lines: pa.Table) -> Iterator[tuple[date, pa.Table]]:
        """A time far from the batch does not change the day."""
        own = self._segment.batch
        ends = pc.min_max(lines["ts"]).as_py()
        first, last = ends["min"].date(), ends["max"].date()
        if first == last:
            yield first if abs(first - own) <= _DAY else own, lines
            return
        days = pc.cast(lines["ts"], pa.date32())
        near = pc.and_(pc.greater_equal(days, _as_day(own - _DAY)), pc.less_equal(days, _as_day(own + _DAY)))
        days = pc.if_else(near, days, _as_day(own))
        for day in sorted(pc.unique(days).to_pylist()):
            yield day, lines.filter(pc.equal(days, _as_day(day)))

    def _make_table(self, parts: Sequence[pa.Table]) -> pa.Table:
        own = pa.concat_tables(parts).combine_chunks()
        columns = [
            pa.repeat(self._segment.stem, len(own))
            if name == "stem"
            else own[name]
            if name in own.column_names
            else pa.nulls(len(own), kind)
            for name, kind in zip(EVENT_SCHEMA.names, EVENT_SCHEMA.types, strict=True)
        ]
        return pa.table(columns, schema=EVENT_SCHEMA)


_DAY = timedelta(1)


def _as_day(day: date) -> pa.Scalar:
    return pa.scalar(day, pa.date32())


class _TextOfSegment:
    """
    The text of a segment, up to the size at its discovery.

    :ivar damaged: its compression is damaged; what precedes the damage was read.
    :ivar has_unfinished_line: the last line of an active segment is incomplete.
    """

    def __init__(self, file: IO[bytes], segment: Segment) -> None:
        self._file, self._segment = file, segment
        self.damaged = False
        self.has_unfinished_line = False

    def read_chunks(self) -> Iterator[tuple[bytes, bool]]:
        """
        Whole lines, and whether they are the last of a block.

        Blocks end at the same lines whatever the size of chunks.
        """
        rest, place = b"", 0
        for piece in self._read_text():
            ends_block = (place + len(piece)) // BLOCK_BYTES > place // BLOCK_BYTES
            place += len(piece)
            whole, feed, rest = (rest + piece).rpartition(b"\n")
            rest = rest[:_MAX_READ_LINE_BYTES]
            if whole or ends_block:
                yield whole + feed, ends_block
        self.has_unfinished_line = bool(rest) and self._segment.active and not self.damaged
        if rest and not self.has_unfinished_line:
            yield rest, False

    def _read_text(self) -> Iterator[bytes]:
        """Pieces that end at ends of chunks and of blocks."""
        pieces, size, place = [], 0, 0
        for piece in self._unpack():
            while piece:
                end = min(CHUNK_BYTES - size, BLOCK_BYTES - place % BLOCK_BYTES)
                part, piece = piece[:end], piece[end:]
                pieces.append(part)
                size += len(part)
                place += len(part)
                if size == CHUNK_BYTES or place % BLOCK_BYTES == 0:
                    yield b"".join(pieces)
                    pieces, size = [], 0
        yield b"".join(pieces)

    def _unpack(self) -> Iterator[bytes]:
        if self._segment.packed == "gzip":
            return self._unpack_gzip()
        if self._segment.packed == "zstd":
            return self._unpack_zstd()
        return self._read_file(CHUNK_BYTES)

    def _read_file(self, size: int) -> Iterator[bytes]:
        left = self._segment.size
        while left > 0 and (data := self._file.read(min(size, left))):
            left -= len(data)
            yield data

    def _unpack_gzip(self) -> Iterator[bytes]:
        """An archive may have several members, and zero bytes after them."""
        unpacker = None
        for data in self._read_file(_COMPRESSED_PIECE_BYTES):
            if unpacker is None:
                data = data.lstrip(b"\0")
            while data and not self.damaged:
                unpacker = unpacker or zlib.decompressobj(wbits=31)
                try:
                    yield unpacker.decompress(data, CHUNK_BYTES)
                except zlib.error:
                    self.damaged = True
                    return
                data = unpacker.unconsumed_tail
                if unpacker.eof:
                    data = unpacker.unused_data.lstrip(b"\0")
                    unpacker = None
        self.damaged = unpacker is not None

    def _unpack_zstd(self) -> Iterator[bytes]:
        stream = pa.CompressedInputStream(pa.PythonFile(self._file, "r"), "zstd")
        try:
            while data := stream.read(_COMPRESSED_PIECE_BYTES):
                yield data
        except (OSError, ValueError):
            self.damaged = True


@contextmanager
def _replace_file(path: Path) -> Iterator[str]:
    """Path of a draft that replaces a file at the end."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = _get_draft_path(path)
    yield draft
    os.replace(draft, path)


def _get_draft_path(path: Path) -> str:
    return str(path.with_name(f"_{path.name}.draft"))


@contextmanager
def _gc_disabled() -> Iterator[None]:
    """Millions of small objects without cycles would be searched for cycles again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


TaskRunner = Callable[[Sequence[SegmentTask]], Iterable[SegmentReading]]

_PROCESS_BYTES = 200 << 20
# Below this, starting processes costs more than it gains.
_SMALL_INPUT_BYTES = 32 << 20
_COMPRESSION_RATIO = 10
_POLL_S = 0.1
# A file may be compressed while it is read, and its copy, too.
_MAX_ATTEMPTS = 3


def ingest_segments(session: AnalysisSession, segments: Sequence[Segment], staging: str) -> list[dict[str, Any]]:
    """
    Write the events and the damaged lines of these segments to `staging/events/` and `staging/quarantine/`.

    :return: rows of `inputs` about them, by stem.
    """
    with _open_runner(session, segments, staging) as run:
        ingestion = _Ingestion(session, staging, run)
        readings = {reading.segment.stem: reading for reading in ingestion.read(segments)}
        for _ in range(_MAX_ATTEMPTS):
            vanished = [reading.segment for reading in readings.values() if reading.state == VANISHED]
            found = [find_successor(session.files, segment) for segment in vanished]
            again = [segment for segment in found if segment is not None]
            readings |= {reading.segment.stem: reading for reading in ingestion.read(again)}
    return [reading.row() for _, reading in sorted(readings.items())]


class _Ingestion:
    def __init__(self, session: AnalysisSession, staging: str, run: TaskRunner) -> None:
        self._files, self._staging, self._run = session.files, staging, run
        self._scratch = Path(session.scratch, "ingest")

    def read(self, segments: Sequence[Segment]) -> Iterator[SegmentReading]:
        """Read segments, large ones first."""
        ordered = sorted(segments, key=lambda segment: (-segment.size, segment.stem))
        here = get_local_path(self._staging)
        paths = {segment.stem: get_local_path(segment.path) for segment in ordered}
        if here is not None and None not in paths.values():
            yield from self._run([SegmentTask(one, str(paths[one.stem]), str(here)) for one in ordered])
            return
        step = 2 * _count_processors()
        for start in range(0, len(ordered), step):
            yield from self._read_remotely(ordered[start : start + step])

    def _read_remotely(self, segments: Sequence[Segment]) -> Iterator[SegmentReading]:
        """Read copies of files, and copy what is written."""
        shutil.rmtree(self._scratch, ignore_errors=True)
        (self._scratch / "logs").mkdir(parents=True)
        tasks = []
        for segment in segments:
            source = self._scratch / "logs" / segment.stem
            try:
                if segment.size and segment.packed in COMPRESSIONS.values():
                    self._files.download(segment.path, source)
                else:
                    source.touch()
            except AnalyticsError:
                if self._files.exists(segment.path):
                    raise
            tasks.append(SegmentTask(segment, str(source), str(self._scratch)))
        for reading in self._run(tasks):
            for name in reading.files:
                self._files.upload(self._scratch / name, f"{self._staging}/{name}")
            yield reading
        shutil.rmtree(self._scratch)


@contextmanager
def _open_runner(session: AnalysisSession, segments: Sequence[Segment], staging: str) -> Iterator[TaskRunner]:
    """What runs tasks: workers of a cluster, processes, or this process if there is little to read."""
    spark = session.spark
    paths = [staging, *(segment.path for segment in segments)]
    if spark is not None and can_workers_read(spark.sparkContext.master or "local", paths):
        context = spark.sparkContext
        yield lambda tasks: context.parallelize(tasks, len(tasks)).map(run_task).collect() if tasks else []
        return
    size = sum(one.size * (1 if one.packed == "plain" else _COMPRESSION_RATIO) for one in segments)
    processes = min(count_processes(_count_processors(), get_available_memory()), len(segments))
    if processes < 2 or size < _SMALL_INPUT_BYTES:
        yield lambda tasks: map(run_task, tasks)
        return
    with ProcessPoolExecutor(processes, get_context("spawn"), _initialize_process) as pool:
        yield lambda tasks: _run_in_pool(pool, tasks)


def _run_in_pool(pool: ProcessPoolExecutor, tasks: Sequence[SegmentTask]) -> list[SegmentReading]:
    """
    :raise AnalyticsError: a process was killed.
    :raise StoppedBySignal: a signal was received.
    """
    futures = [pool.submit(run_task, task) for task in tasks]
    pending: Collection[Future[SegmentReading]] = futures
    try:
        while pending:
            _, pending = wait(pending, _POLL_S, FIRST_EXCEPTION)
            STOP_HANDLER.check()
        return [future.result() for future in futures]
    except BaseException as error:
        for process in active_children():
            process.kill()
        if isinstance(error, BrokenProcessPool):
            raise AnalyticsError("a process that reads segments was killed: is there too little memory?") from error
        raise


def _initialize_process() -> None:
    """The parent handles signals; if it is killed, end, too."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def count_processes(processors: int, memory: int) -> int:
    """How many processes read segments: all of them take at most half of this memory."""
    return max(1, min(processors, memory // 2 // _PROCESS_BYTES))


def _count_processors() -> int:
    return len(os.sched_getaffinity(0))


def can_workers_read(master: str, paths: Sequence[str]) -> bool:
    """
    Whether workers of a cluster read segments: all machines have mounted local directories, but not the driver's
    scratch, where copies of other files are.

    :param paths: of segments, and of what is written.
    """
    return not is_local_master(master) and None not in map(get_local_path, paths)


def find_repeated_lines(database: Database, paths: Sequence[str]) -> dict[str, list[int]]:
    """
    Lines (node, boot, seq) that are in an event file of a lower stem, too.

    :param paths: local event files.
    :return: by path, numbers of rows.
    """
    listed = ", ".join(map(quote_text, paths))
    rows = database.rows(
        "SELECT filename, list(file_row_number ORDER BY file_row_number) AS numbers FROM ("
        "SELECT filename, file_row_number, stem, min(stem) OVER (PARTITION BY node, boot, seq) AS lowest"
        f" FROM read_parquet([{listed}], filename = true, file_row_number = true)"
        ") WHERE stem > lowest GROUP BY filename ORDER BY filename"
    )
    return {row["filename"]: row["numbers"] for row in rows}


def copy_without_rows(source: str, target: str, numbers: Sequence[int]) -> int:
    """Copy an event file without some rows; return how many remain. Without any there is no copy."""
    dropped, place, remaining = pa.array(numbers, pa.int64()), 0, 0
    with pq.ParquetFile(source) as file, _replace_file(Path(target)) as draft:
        with pq.ParquetWriter(draft, EVENT_SCHEMA, **_PARQUET_OPTIONS) as writer:
            for group in range(file.num_row_groups):
                table = file.read_row_group(group)
                own = pa.array(range(place, place + len(table)), pa.int64())
                place += len(table)
                kept = table.filter(pc.invert(pc.is_in(own, value_set=dropped)))
                remaining += len(kept)
                if len(kept):
                    writer.write_table(kept)
    if not remaining:
        os.unlink(target)
    return remaining
