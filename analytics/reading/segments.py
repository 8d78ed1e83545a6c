"""
Log segments: which there are, which files hold them, and what was found in each.

Segments are found by name alone, so that a year of them costs one listing. A closed segment is
`events-<UTC start>-<node>-<boot>-<n>.jsonl`, or the same compressed; the active one is `events.jsonl`, identified by
its first line. Other files are counted, named and skipped.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime
from typing import Any

from analytics.errors import AnalyticsError
from analytics.files import FileInfo, FileSystem
from mediatord.observability.event_schema import MAX_LINE_BYTES
from mediatord.observability.segments import ACTIVE_SEGMENT_FILE, MARKER_DIRECTORY, MARKER_FILE

# Also used by DuckDB, in analytics.jobs.log_quality.
STEM_PATTERN = r"events-(\d{8}T\d{6}Z)-([A-Za-z0-9._-]+)-([A-Za-z0-9._]+)-\d{6,}(?:-\d+)?"
COMPRESSIONS = {"": "plain", ".gz": "gzip", ".zst": "zstd"}

FILE_FINDINGS = {
    "conflict": "segments with two files that differ; only the larger one was read",
    "copy": "further copies of a segment; only one was read",
    "foreign": "files skipped (not named like segments)",
    "hidden": "hidden files skipped (name starts with a dot or underscore)",
    "nameless": "active files whose first line does not name their segment; named by their time of change",
}

_SEGMENT_FILE_PATTERN = re.compile(rf"(?P<stem>{STEM_PATTERN})\.jsonl(?P<suffix>\.[A-Za-z0-9.]+)?")
_MAX_NAMED = 5


@dataclass(frozen=True, slots=True)
class Segment:
    """
    :param stem: name without suffix, the same for the plain and the compressed file.
    :param path: of the file, as :meth:`analytics.files.FileSystem.list` returns it.
    :param size: bytes of the file.
    :param packed: plain, gzip or zstd, by the suffix; any other suffix itself: such a file cannot be read.
    :param active: still being written.
    :param batch: day in its name.
    :param conflict: another file of the same segment differs.
    :param others: further files of a closed segment, the best one first.
    """

    stem: str
    path: str
    size: int
    modified: datetime
    packed: str
    active: bool
    node: str
    batch: date
    conflict: bool = False
    others: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Discovery:
    """
    :param segments: unique, by stem.
    :param findings: count of each kind of :data:`FILE_FINDINGS`.
    :param warnings: sentences for the operator.
    """

    segments: list[Segment]
    findings: Counter[str] = field(default_factory=Counter)
    warnings: list[str] = field(default_factory=list)


def discover_segments(files: FileSystem, log_dirs: Sequence[str]) -> Discovery:
    """
    Find all segments in these directories and below.

    :raise AnalyticsError: a directory does not exist.
    """
    found = {file.path: file for url in log_dirs for file in files.list(url)}
    return _SegmentSearch(files).classify_all(found.values())


def parse_segment_name(stem: str, file: FileInfo, packed: str, active: bool) -> Segment | None:
    """Parse the name of a segment; None if it is not one."""
    match = re.fullmatch(STEM_PATTERN, stem)
    if match is None:
        return None
    try:
        begin = datetime.strptime(match[1], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
    except ValueError:
        return None
    return Segment(stem, file.path, file.size, file.modified, packed, active, match[2], begin.date())


# Of a segment whose first line does not name it.
UNKNOWN_START = "unknown-unknown"


def parse_start(stem: str) -> str:
    """The start of a node, `<node>-<boot>`, in the name of a segment; the name itself if it has none."""
    match = re.fullmatch(STEM_PATTERN, stem)
    return f"{match[2]}-{match[3]}" if match else stem


class _SegmentSearch:
    def __init__(self, files: FileSystem) -> None:
        self._files = files
        self._kinds: defaultdict[str, list[str]] = defaultdict(list)

    def classify_all(self, found: Iterable[FileInfo]) -> Discovery:
        """Classify these files."""
        closed: defaultdict[str, list[Segment]] = defaultdict(list)
        active: defaultdict[str, list[Segment]] = defaultdict(list)
        for file in found:
            segment = self._classify(file)
            if segment is not None:
                (active if segment.active else closed)[segment.stem].append(segment)
        # An active segment may have been closed during discovery.
        chosen = {stem: self._choose_file(files) for stem, files in {**active, **closed}.items()}
        findings = Counter({kind: len(paths) for kind, paths in self._kinds.items()})
        return Discovery([chosen[stem] for stem in sorted(chosen)], findings, self._make_warnings())

    def _classify(self, file: FileInfo) -> Segment | None:
        folder, _, name = file.path.rpartition("/")
        if folder.rpartition("/")[2] == MARKER_DIRECTORY and name.startswith(MARKER_FILE):
            return None
        if name == ACTIVE_SEGMENT_FILE:
            return self._identify_active(file)
        match = _SEGMENT_FILE_PATTERN.fullmatch(name.lstrip("._"))
        suffix = (match["suffix"] or "") if match else ""
        segment = (
            parse_segment_name(match["stem"], file, COMPRESSIONS.get(suffix, suffix[1:]), False) if match else None
        )
        if segment is None:
            self._kinds["foreign"].append(file.path)
        elif name[0] in "._":
            self._kinds["hidden"].append(file.path)
        elif not segment.packed.endswith("tmp"):  # the daemon is compressing it
            return segment
        return None

    def _identify_active(self, file: FileInfo) -> Segment | None:
        """Identify an active segment by its first line, or else name it by its time."""
        if not file.size:
            return None
        try:
            first, ended, _ = self._files.read(file.path, MAX_LINE_BYTES).partition(b"\n")
        except AnalyticsError:  # closed meanwhile
            return None
        segment = parse_segment_name(extract_segment_name(first), file, "plain", True) if ended else None
        if segment is None:
            self._kinds["nameless"].append(file.path)
            stamp = file.modified.strftime("%Y%m%dT%H%M%SZ")
            segment = parse_segment_name(f"events-{stamp}-{UNKNOWN_START}-000000", file, "plain", True)
        return segment

    def _choose_file(self, candidates: list[Segment]) -> Segment:
        """
        Choose one of several files of a segment: the compressed one if complete, because the plain one will be
        deleted.
        """
        if len(candidates) == 1:
            return candidates[0]
        by_packing: dict[str, Segment] = {}
        conflict = False
        for one in sorted(candidates, key=lambda one: (one.size, one.path)):
            conflict |= one.packed in by_packing and by_packing[one.packed].size != one.size
            by_packing[one.packed] = one
        plain, gzip = by_packing.pop("plain", None), by_packing.pop("gzip", None)
        if plain and gzip:
            fits = self._read_unpacked_size(gzip) == plain.size % 2**32
            conflict |= not fits
            best = gzip if fits else plain
        else:
            best = plain or gzip or max(by_packing.values(), key=lambda one: (one.packed == "zstd", one.packed))
        rest = sorted((one for one in candidates if one is not best), key=_get_preference, reverse=True)
        self._kinds["conflict" if conflict else "copy"] += [one.path for one in rest]
        return replace(best, conflict=conflict, others=tuple(one.path for one in rest if not one.active))

    def _read_unpacked_size(self, segment: Segment) -> int:
        """Size in the last four bytes of gzip; -1 if there are none."""
        end = self._files.read(segment.path, 4, segment.size - 4) if segment.size >= 4 else b""
        return int.from_bytes(end, "little") if end else -1

    def _make_warnings(self) -> list[str]:
        return [
            format_file_warning(FILE_FINDINGS[kind], paths)
            for kind, paths in sorted(self._kinds.items())
            if kind != "copy"
        ]


def format_file_warning(meaning: str, names: Sequence[str]) -> str:
    """
    Format a warning: how many files of a kind there are, and the first of their names.

    :param meaning: as in :data:`FILE_FINDINGS`, with its first noun in the plural.
    """
    if len(names) == 1:
        meaning = re.sub(r"\b(segment|file)s\b|\b(cop)ies\b", lambda m: m[1] or f"{m[2]}y", meaning, count=1)
    more = ", ..." if len(names) > _MAX_NAMED else ""
    return f"{len(names)} {meaning}: {', '.join(names[:_MAX_NAMED])}{more}"


def _get_preference(one: Segment) -> tuple[bool, int, str]:
    """Sort key: readable before unreadable, large before small."""
    return one.packed in COMPRESSIONS.values(), one.size, one.path


def extract_segment_name(line: bytes) -> str:
    """Name of the segment in its first line; empty if there is none."""
    try:
        about = json.loads(line.lstrip(b"\x1e"))
    except ValueError:
        return ""
    return str(about.get("segment", "")) if isinstance(about, dict) else ""


@dataclass(frozen=True, slots=True)
class ReadSegment:
    """
    A segment as an earlier run loaded it.

    :param size: bytes of the file.
    :param modified_ms: time of its last change, milliseconds since the epoch.
    :param packed: as in :class:`Segment`.
    :param state: one of :data:`SEGMENT_STATES`.
    :param lines: valid lines, including duplicates.
    :param complete: it was closed and no line was missing or damaged: such a segment never changes again.
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


def has_segment_changed(segment: Segment, before: ReadSegment | None) -> bool:
    """Whether a segment is new, was never read, or was incomplete when read and differs now."""
    if before is None or before.state == VANISHED:
        return True
    return not before.complete and differs_from_read(segment, before)


def differs_from_read(segment: Segment, before: ReadSegment) -> bool:
    modified_ms = round(segment.modified.timestamp() * 1000)
    is_closed_since = before.state == ACTIVE and not segment.active
    same = (before.size, before.modified_ms, before.packed)
    return is_closed_since or (segment.size, modified_ms, segment.packed) != same


CLOSED, CRASHED, ACTIVE, EMPTY, UNREAD, VANISHED = "closed", "crashed", "active", "empty", "unread", "vanished"
PARTIAL = "partial"
SHRUNK = "shrunk"
SEGMENT_STATES = {
    CLOSED: "segments closed normally",
    CRASHED: "segments without log.close: the daemon was killed, or the end of the file is lost",
    ACTIVE: "segments still being written; the rest is read in the next run",
    PARTIAL: "segments with damaged compression, read as far as possible",
    EMPTY: "empty segments",
    UNREAD: "segments skipped (unknown suffix, or content that does not match it)",
    VANISHED: "segments that disappeared before they were read",
}
SEGMENT_REMARKS = {
    "conflict": "segments with another file that differs",
    "separators": "segments with record separators (0x1E); read anyway",
    SHRUNK: "segments that became shorter; the lines loaded before are kept",
}

MAGIC_BYTES = {"gzip": b"\x1f\x8b", "zstd": b"\x28\xb5\x2f\xfd"}
# Also xz, bzip2, zip and lz4: files may have been compressed and renamed.
COMPRESSED_MAGIC = (*MAGIC_BYTES.values(), b"\xfd7zX", b"BZh", b"PK\x03\x04", b"\x04\x22\x4d\x18")
MAX_MAGIC_BYTES = 4


def make_segment_warnings(inputs: Iterable[Mapping[str, Any]]) -> list[str]:
    """Warn of segments that were not read now, by rows of `inputs`."""
    stems: defaultdict[str, list[str]] = defaultdict(list)
    for row in inputs:
        stems[SHRUNK if SHRUNK in row["remarks"].split() else row["state"]].append(row["stem"])
    meanings = {UNREAD: SEGMENT_STATES[UNREAD], VANISHED: SEGMENT_STATES[VANISHED], SHRUNK: SEGMENT_REMARKS[SHRUNK]}
    return [format_file_warning(meaning, stems[kind]) for kind, meaning in meanings.items() if kind in stems]


def find_successor(files: FileSystem, segment: Segment) -> Segment | None:
    """Find the file of a segment whose file has vanished: it was compressed or moved, or there is another."""
    base = segment.path.rpartition("/")[0]
    beside = [f"{base}/{segment.stem}.jsonl{suffix}" for suffix in COMPRESSIONS]
    for path in (*beside, *segment.others):
        if path != segment.path and files.exists(path):
            found = files.list(path)[0]
            suffix = path.rpartition(".jsonl")[2]
            packed = COMPRESSIONS.get(suffix, suffix[1:])
            return replace(segment, path=path, size=found.size, modified=found.modified, packed=packed, active=False)
    return None
