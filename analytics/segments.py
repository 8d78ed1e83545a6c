"""
Which log segments there are: found by their names alone, so that a year of them costs one listing.

A closed segment is `events-<UTC start>-<node>-<boot>-<n>.jsonl`, or the same packed; the file that still grows is
`events.jsonl`, known by what its first line says. Whatever else lies there is counted and named, and not read.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime

from analytics.errors import AnalyticsError
from analytics.files import FileInfo, Files
from mediatord.observability.event_schema import MAX_LINE_BYTES
from mediatord.observability.segments import ACTIVE_SEGMENT_FILE, MARKER_DIRECTORY, MARKER_FILE

# In regular expressions of Java too: see analytics.jobs.quality.
STEM = r"events-(\d{8}T\d{6}Z)-([A-Za-z0-9._-]+)-([A-Za-z0-9._]+)-\d{6,}(?:-\d+)?"
PACKINGS = {"": "plain", ".gz": "gzip", ".zst": "zstd"}

FINDINGS = {
    "conflict": "segments with two files that differ; the larger one is read",
    "copy": "further copies of a segment; one is read",
    "foreign": "files not named like segments; not read",
    "hidden": "hidden files, whose names begin with a dot or underscore; not read",
    "nameless": "active files whose first line does not name their segment",
}

_SEGMENT = re.compile(rf"(?P<stem>{STEM})\.jsonl(?P<suffix>\.[A-Za-z0-9.]+)?")
_NAMED_AT_MOST = 5


@dataclass(frozen=True, slots=True)
class Segment:
    """
    :param stem: its name without suffix, the same in whatever form it is found.
    :param path: of the file, as :meth:`analytics.files.Files.list` gives it.
    :param size: bytes of the file.
    :param packed: plain, gzip or zstd, by the suffix; another suffix as it is: such a file cannot be read.
    :param active: it is still written.
    :param batch: the day in its name.
    :param conflict: there is a file of the same segment that differs.
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
    :param segments: by stem, each once.
    :param findings: how many of each kind of :data:`FINDINGS`.
    :param warnings: for the operator, as sentences.
    """

    segments: list[Segment]
    findings: Counter[str] = field(default_factory=Counter)
    warnings: list[str] = field(default_factory=list)


def discover(files: Files, log_dirs: Sequence[str]) -> Discovery:
    """
    All segments in these directories and below them.

    :raise AnalyticsError: a directory is not there.
    """
    found = {file.path: file for url in log_dirs for file in files.list(url)}
    return _Search(files).result(found.values())


def segment_of(stem: str, file: FileInfo, packed: str, active: bool) -> Segment | None:
    """The segment of this name; None if it is no name of a segment."""
    match = re.fullmatch(STEM, stem)
    if match is None:
        return None
    try:
        begin = datetime.strptime(match[1], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
    except ValueError:
        return None
    return Segment(stem, file.path, file.size, file.modified, packed, active, match[2], begin.date())


class _Search:
    def __init__(self, files: Files) -> None:
        self._files = files
        self._kinds: defaultdict[str, list[str]] = defaultdict(list)

    def result(self, found: Iterable[FileInfo]) -> Discovery:
        """What these files are."""
        closed: defaultdict[str, list[Segment]] = defaultdict(list)
        active: defaultdict[str, list[Segment]] = defaultdict(list)
        for file in found:
            segment = self._classified(file)
            if segment is not None:
                (active if segment.active else closed)[segment.stem].append(segment)
        # What still grew may have been closed while we looked.
        chosen = {stem: self._chosen(files) for stem, files in {**active, **closed}.items()}
        findings = Counter({kind: len(paths) for kind, paths in self._kinds.items()})
        return Discovery([chosen[stem] for stem in sorted(chosen)], findings, self._warnings())

    def _classified(self, file: FileInfo) -> Segment | None:
        folder, _, name = file.path.rpartition("/")
        if folder.rpartition("/")[2] == MARKER_DIRECTORY and name.startswith(MARKER_FILE):
            return None
        if name == ACTIVE_SEGMENT_FILE:
            return self._active(file)
        match = _SEGMENT.fullmatch(name.lstrip("._"))
        suffix = (match["suffix"] or "") if match else ""
        segment = segment_of(match["stem"], file, PACKINGS.get(suffix, suffix[1:]), False) if match else None
        if segment is None:
            self._kinds["foreign"].append(file.path)
        elif name[0] in "._":
            self._kinds["hidden"].append(file.path)
        elif not segment.packed.endswith("tmp"):  # the daemon is just packing it
            return segment
        return None

    def _active(self, file: FileInfo) -> Segment | None:
        """Whatever its first line says; a name made of its age if that is not known."""
        if not file.size:
            return None
        try:
            first, ended, _ = self._files.read(file.path, MAX_LINE_BYTES).partition(b"\n")
        except AnalyticsError:  # closed since
            return None
        segment = segment_of(_said(first), file, "plain", True) if ended else None
        if segment is None:
            self._kinds["nameless"].append(file.path)
            stamp = file.modified.strftime("%Y%m%dT%H%M%SZ")
            segment = segment_of(f"events-{stamp}-unknown-unknown-000000", file, "plain", True)
        return segment

    def _chosen(self, candidates: list[Segment]) -> Segment:
        """Of several files of one segment the one to read: packed if that is whole, for the plain one will go."""
        if len(candidates) == 1:
            return candidates[0]
        by_packing: dict[str, Segment] = {}
        conflict = False
        for one in sorted(candidates, key=lambda one: (one.size, one.path)):
            conflict |= one.packed in by_packing and by_packing[one.packed].size != one.size
            by_packing[one.packed] = one
        plain, gzip = by_packing.pop("plain", None), by_packing.pop("gzip", None)
        if plain and gzip:
            fits = self._unpacked_size(gzip) == plain.size % 2**32
            conflict |= not fits
            best = gzip if fits else plain
        else:
            best = plain or gzip or max(by_packing.values(), key=lambda one: (one.packed == "zstd", one.packed))
        rest = sorted((one for one in candidates if one is not best), key=_worth, reverse=True)
        self._kinds["conflict" if conflict else "copy"] += [one.path for one in rest]
        return replace(best, conflict=conflict, others=tuple(one.path for one in rest if not one.active))

    def _unpacked_size(self, segment: Segment) -> int:
        """By the last four bytes; -1 if it has none."""
        end = self._files.read(segment.path, 4, segment.size - 4) if segment.size >= 4 else b""
        return int.from_bytes(end, "little") if end else -1

    def _warnings(self) -> list[str]:
        return [told(FINDINGS[kind], paths) for kind, paths in sorted(self._kinds.items()) if kind != "copy"]


def told(meaning: str, names: Sequence[str]) -> str:
    """A sentence for the operator: how many there are of what, and the first of them by name."""
    more = ", ..." if len(names) > _NAMED_AT_MOST else ""
    return f"{len(names)} {meaning}: {', '.join(names[:_NAMED_AT_MOST])}{more}"


def _worth(one: Segment) -> tuple[bool, int, str]:
    """What can be read before what cannot, large before small."""
    return one.packed in PACKINGS.values(), one.size, one.path


def _said(line: bytes) -> str:
    """The name of the segment in its first line; empty if it has none."""
    try:
        about = json.loads(line.lstrip(b"\x1e"))
    except ValueError:
        return ""
    return str(about.get("segment", "")) if isinstance(about, dict) else ""
