"""One segment on its way into the tables: which files hold its lines, how they are read, and what was found."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from analytics.errors import AnalyticsError
from analytics.files import Files
from analytics.segments import PACKINGS, Segment, told
from analytics.tables import TABLES

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

CLOSED, CRASHED, ACTIVE, EMPTY, UNREAD, VANISHED = "closed", "crashed", "active", "empty", "unread", "vanished"
PARTIAL = "partial"
SHRUNK = "shrunk"
STATES = {
    CLOSED: "segments that were closed in order",
    CRASHED: "segments without log.close: the daemon was killed, or the end of the file is lost",
    ACTIVE: "segments that are still written; the rest is read in the next run",
    PARTIAL: "segments in a damaged archive, read as far as possible",
    EMPTY: "empty segments",
    UNREAD: "segments not read: unknown suffix, or content that does not match it",
    VANISHED: "segments that disappeared before they were read",
}
REMARKS = {
    "conflict": "segments with another file that differs",
    "separators": "segments with record separators (0x1E); read nevertheless",
    SHRUNK: "segments that have become shorter; what was read before stays",
}

_SEPARATOR = b"\x1e"
_MAGIC = {"gzip": b"\x1f\x8b", "zstd": b"\x28\xb5\x2f\xfd"}
# Also xz, bzip2, zip and lz4: what may have been packed and renamed.
_PACKED = (*_MAGIC.values(), b"\xfd7zX", b"BZh", b"PK\x03\x04", b"\x04\x22\x4d\x18")
_CHUNK = 4 << 20
_LONGEST_MAGIC = 4


@dataclass(slots=True)
class Reading:
    """
    :ivar paths: of the files with its lines; none if there is nothing to read.
    :ivar state: one of :data:`STATES`; empty as long as only its lines can tell whether it was closed.
    :ivar careful: lines are looked at one by one: see :mod:`analytics.parsing`.
    :ivar unfinished: lines without an end yet, in a file that grows.
    :ivar events: lines that are events; `doubled` ones are not among them.
    :ivar corrupt: lines in quarantine.
    :ivar lines_said: how many lines there are by its own log.close.
    """

    segment: Segment
    paths: Sequence[str] = ()
    state: str = ""
    careful: bool = False
    unfinished: int = 0
    events: int = 0
    doubled: int = 0
    corrupt: int = 0
    seq_first: int | None = None
    seq_last: int | None = None
    lines_said: int | None = None
    closed: bool = False
    separators: bool = False

    @property
    def partial(self) -> bool:
        """Whether it is a damaged archive."""
        return self.state == PARTIAL

    @property
    def lines(self) -> int:
        """Every line that was there."""
        return self.events + self.doubled + self.corrupt + self.unfinished

    @property
    def doubtful(self) -> bool:
        """Whether it was read quickly, and that has not shown every line as it is."""
        return not self.careful and (self.separators or not self._adds_up())

    def _adds_up(self) -> bool:
        """By its own log.close; without one by the numbers of its events, which have a gap where one is not seen."""
        if self.lines_said is not None:
            return self.lines_said == self.lines
        if self.seq_first is None or self.seq_last is None:
            return True
        return self.seq_last - self.seq_first + 1 == self.events

    def final_state(self) -> str:
        """One of :data:`STATES`."""
        return self.state or (CLOSED if self.closed else CRASHED)

    def row(self) -> tuple[Any, ...]:
        """Of the table `inputs`."""
        segment = self.segment
        remarks = {"conflict": segment.conflict, "separators": self.separators}
        row = {
            "dt": segment.batch,
            "stem": segment.stem,
            "path": segment.path,
            "bytes": segment.size,
            "modified": segment.modified,
            "packed": segment.packed,
            "state": self.final_state(),
            "lines": self.lines,
            "corrupt": self.corrupt,
            "seq_first": self.seq_first,
            "seq_last": self.seq_last,
            "lines_said": self.lines_said,
            "unfinished": self.unfinished,
            "doubled": self.doubled,
            "remarks": " ".join(name for name, found in remarks.items() if found),
        }
        return tuple(row[column.name] for column in TABLES["inputs"].columns)


def prepare(files: Files, segment: Segment, scratch: str) -> Reading:
    """
    How to read a segment, by its first bytes.

    :param scratch: directory for what was written so far of a growing file, as whole lines.
    """
    if not segment.active:
        return _closed(files, segment)
    try:
        return _snapshot(files, segment, scratch)
    except AnalyticsError:
        if files.exists(segment.path):
            raise
        return _successor(files, segment)


def _closed(files: Files, segment: Segment) -> Reading:
    if not segment.size:
        return Reading(segment, state=EMPTY)
    if segment.packed not in PACKINGS.values():
        return Reading(segment, state=UNREAD)
    try:
        head = files.read(segment.path, _LONGEST_MAGIC)
    except AnalyticsError:
        if files.exists(segment.path):
            raise
        return _successor(files, segment)
    if not (head.startswith(_MAGIC[segment.packed]) if segment.packed in _MAGIC else not head.startswith(_PACKED)):
        return Reading(segment, state=UNREAD)
    separators = head.startswith(_SEPARATOR)
    return Reading(segment, [segment.path], careful=separators, separators=separators)


def warnings(inputs: Iterable[Mapping[str, Any]]) -> list[str]:
    """About segments of which nothing was read now, by rows of `inputs`, as sentences for the operator."""
    stems: defaultdict[str, list[str]] = defaultdict(list)
    for row in inputs:
        stems[SHRUNK if SHRUNK in row["remarks"].split() else row["state"]].append(row["stem"])
    meanings = {UNREAD: STATES[UNREAD], VANISHED: STATES[VANISHED], SHRUNK: REMARKS[SHRUNK]}
    return [told(meaning, stems[kind]) for kind, meaning in meanings.items() if kind in stems]


def rechecked(spark: SparkSession, files: Files, reading: Reading) -> Reading:
    """The same, or if that could not work another reading: the file is gone, or a damaged archive."""
    if not reading.paths or reading.partial or reading.segment.active:
        return reading
    if not files.exists(reading.segment.path):
        return _successor(files, reading.segment)
    if reading.segment.packed == "plain" or _is_readable(spark, reading.segment.path):
        return reading
    return replace(reading, state=PARTIAL)


def _is_readable(spark: SparkSession, path: str) -> bool:
    from py4j.protocol import Py4JJavaError
    from pyspark.errors import PySparkException

    try:
        spark.read.text(path).write.format("noop").mode("overwrite").save()
    except (PySparkException, Py4JJavaError):
        return False
    return True


def _successor(files: Files, segment: Segment) -> Reading:
    """A segment whose file is gone was packed, most likely; or there is another file of it elsewhere."""
    base = segment.path.rpartition("/")[0]
    beside = [f"{base}/{segment.stem}.jsonl{suffix}" for suffix in PACKINGS]
    for path in (*beside, *segment.others):
        if path != segment.path and files.exists(path):
            found = files.list(path)[0]
            suffix = path.rpartition(".jsonl")[2]
            packed = PACKINGS.get(suffix, suffix[1:])
            changed = replace(segment, path=path, size=found.size, modified=found.modified, packed=packed)
            return _closed(files, replace(changed, active=False))
    return Reading(segment, state=VANISHED)


def _snapshot(files: Files, segment: Segment, scratch: str) -> Reading:
    """Copy the whole lines of a growing file, as far as it went when it was found."""
    paths: list[str] = []
    rest, offset = b"", 0
    while offset < segment.size:
        chunk = files.read(segment.path, min(_CHUNK, segment.size - offset), offset)
        if not chunk:
            break
        offset += len(chunk)
        whole, end, rest = (rest + chunk).rpartition(b"\n")
        if whole:
            paths.append(f"{scratch}/{segment.stem}.jsonl.{len(paths):06d}")
            files.write(paths[-1], whole + end)
    return Reading(segment, paths, state=ACTIVE, careful=True, unfinished=int(bool(rest)))
