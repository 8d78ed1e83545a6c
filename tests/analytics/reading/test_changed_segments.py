"""Nightly runs over segments that change, vanish and return: results never lose rows."""

from __future__ import annotations

import gzip
import json
import lzma
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from analytics.database import Database
from analytics.engine import AnalysisSession
from analytics.errors import EXIT_OK
from analytics.files import FileSystem
from analytics.job import Span
from analytics.jobs.log_quality import QUALITY_JOB
from analytics.nightly import NightlyOutcome, NightlyRequest, NightlySteps, run_nightly
from analytics.reading.ingest import ingest_segments
from analytics.reading.segments import Discovery, discover_segments
from analytics.settings import Settings
from analytics.writing.runs import RunInfo
from analytics.writing.warehouse import Warehouse
from tests.analytics.lines import DAY, SegmentWriter, write_file

D = DAY.date()


def report(files: FileSystem, database: Database, out: str, day: object, settings: Settings, facts: RunInfo) -> str:
    files.write(f"{out}/report/{day}/index.html", b"")
    return ""


STEPS = NightlySteps(
    discover=discover_segments,
    ingest=ingest_segments,
    jobs=(QUALITY_JOB,),
    pseudonymize=lambda request: lambda table, rows: rows,
    report=report,
    textfile=lambda *_: None,
)


class NightlyRuns:
    """Logs of one day, and consecutive nightly runs over them."""

    def __init__(self, session: AnalysisSession, root: Path) -> None:
        self.session, self.root, self.logs = session, root, root / "logs"
        self.logs.mkdir()

    def put(self, stem: str, lines: Sequence[bytes] | bytes, suffix: str = "") -> Path:
        return write_file(self.logs, f"{stem}.jsonl{suffix}", lines)

    def run(self, vanishing: Path | None = None) -> NightlyOutcome:
        """
        Run the analysis.

        :param vanishing: a file that is deleted between its discovery and its reading.
        """

        def discover(files: FileSystem, log_dirs: Sequence[str]) -> Discovery:
            found = discover_segments(files, log_dirs)
            if vanishing:
                vanishing.unlink()
            return found

        request = NightlyRequest([str(self.logs)], str(self.root / "out"), Span(D, D), Settings(), "")
        outcome = run_nightly(self.session, request, lambda line: None, replace(STEPS, discover=discover))
        assert outcome.exit_status == EXIT_OK
        return outcome

    def manifest(self, outcome: NightlyOutcome) -> dict[str, Any]:
        """-"""
        content: dict[str, Any] = json.loads((self.root / "out" / "runs" / f"{outcome.run_id}.json").read_text())
        return content

    def rows(self, name: str) -> list[dict[str, Any]]:
        warehouse = Warehouse(self.session.database, self.session.files, str(self.root / "out"))
        return warehouse.rows(name, Span(D, D))

    def inputs(self) -> dict[str, tuple[Any, ...]]:
        """State, lines, duplicates and remarks of each segment. Asserts that every line is accounted for."""
        events = [row["stem"] for row in self.rows("events")]
        found = {}
        for row in self.rows("inputs"):
            events_of_segment = events.count(row["stem"])
            assert events_of_segment + row["corrupt"] + row["unfinished"] + row["doubled"] == row["lines"], row[
                "stem"
            ]
            found[row["stem"]] = (row["state"], row["lines"], row["doubled"], row["remarks"])
        return found


@pytest.fixture
def runs(session: AnalysisSession, tmp_path: Path) -> NightlyRuns:
    return NightlyRuns(session, tmp_path)


def get_only_warning(outcome: NightlyOutcome, stem: str) -> str:
    """The only warning, which names the segment."""
    (warning,) = outcome.warnings
    assert warning.endswith(f": {stem}")
    return warning


def test_reads_vanished_segment_when_it_returns(runs: NightlyRuns) -> None:
    """Even if size and time are those of the first discovery."""
    writer = SegmentWriter()
    stem, lines = writer.segment(3)
    other, more = writer.segment(1)
    runs.put(other, more)
    path = runs.put(stem, lines)
    copy = shutil.copy2(path, runs.root / "copy")
    assert "disappeared before they were read" in get_only_warning(runs.run(vanishing=path), stem)
    assert runs.inputs() == {stem: ("vanished", 0, 0, ""), other: ("closed", 3, 0, "")}
    shutil.copy2(copy, path)
    assert runs.run().warnings == []
    assert runs.inputs() == {stem: ("closed", 5, 0, ""), other: ("closed", 3, 0, "")}


SHRINKING: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "unread": (".xz", lzma.compress),
    "partial": (".gz", lambda text: gzip.compress(text)[:-10_000]),
    "empty": ("", lambda text: b""),
    "crashed": ("", lambda text: text[: len(text) // 2]),
}


def test_keeps_rows_of_segments_that_became_shorter(runs: NightlyRuns) -> None:
    """Their state is shown, a warning is logged once, and they are no new input. A restored segment is read again."""
    segments = {state: SegmentWriter(state).segment(2000) for state in SHRINKING}
    for stem, lines in segments.values():
        runs.put(stem, lines[:-1])
    runs.run()
    for state, (suffix, damage) in SHRINKING.items():
        stem, lines = segments[state]
        (runs.logs / f"{stem}.jsonl").unlink()
        runs.put(stem, damage(b"".join(lines[:-1])), suffix)
    other, more = SegmentWriter("other").segment(1)
    runs.put(other, more)
    (warning,) = runs.run().warnings
    assert "4 segments that became shorter" in warning
    expected = {stem: (state, 2001, 0, "shrunk") for state, (stem, _) in segments.items()}
    expected[other] = ("closed", 3, 0, "")
    assert runs.inputs() == expected
    quality = {(row["node"], row["kind"]): row["n"] for row in runs.rows("quality_daily")}
    for state in SHRINKING:
        assert (quality[state, "events"], quality[state, f"segments_{state}"]) == (2001, 1)
    again = runs.run()
    assert (again.warnings, runs.manifest(again)["inputs"]) == ([], [])
    runs.put(segments["empty"][0], segments["empty"][1])
    runs.run()
    assert runs.inputs() == {**expected, segments["empty"][0]: ("closed", 2002, 0, "")}


def test_keeps_rows_of_the_only_segment_that_became_unreadable(runs: NightlyRuns) -> None:
    """The day can still be computed again."""
    stem, lines = SegmentWriter().segment(3)
    path = runs.put(stem, lines[:-1])
    runs.run()
    path.rename(f"{path}.xz")
    for warned in (True, False):
        assert [stem in warning for warning in runs.run().warnings] == [True] * warned
        assert runs.inputs() == {stem: ("unread", 4, 0, "shrunk")}


def test_keeps_rows_of_segment_deleted_before_rereading(runs: NightlyRuns) -> None:
    """As for a segment deleted earlier."""
    stem, lines = SegmentWriter().segment(3)
    path = runs.put(stem, lines[:-1])
    runs.run()
    other, more = SegmentWriter("two").segment(1)
    runs.put(other, more)
    assert runs.run(vanishing=path).warnings == []
    assert runs.inputs() == {stem: ("crashed", 4, 0, ""), other: ("closed", 3, 0, "")}


def test_repeated_lines_of_deleted_segment_count_once(runs: NightlyRuns) -> None:
    """They stay in the first segment."""
    stem, lines = SegmentWriter().segment(3)
    path = runs.put(stem, lines)
    runs.run()
    path.unlink()
    late = stem.replace("T000000Z", "T000001Z")
    runs.put(late, [*lines[:2], lines[-1]])
    for _ in range(2):
        runs.run()
        assert runs.inputs() == {stem: ("closed", 5, 0, ""), late: ("closed", 3, 3, "")}
    (totals,) = [row for row in runs.rows("quality_daily") if row["kind"] == "doubled"]
    assert totals["n"] == 3


def test_splits_files_of_several_segments(runs: NightlyRuns) -> None:
    """Of earlier versions: rows of a segment that is read again are replaced, those of others stay."""
    grown, lines = SegmentWriter("grown").segment(3)
    other, more = SegmentWriter("other").segment(2)
    path = runs.put(grown, lines[:-1])
    runs.put(other, more)
    runs.run()
    (folder,) = (runs.root / "out/tables/events").glob("dt=*/batch=*")
    both = pa.concat_tables([pq.read_table(file, partitioning=None) for file in sorted(folder.iterdir())])
    for file in folder.iterdir():
        file.unlink()
    pq.write_table(both, folder / "part-00000-1f.c000.zstd.parquet")
    before = runs.rows("events")

    path.write_bytes(path.read_bytes() + lines[-1] + b"\n")
    runs.run()
    assert runs.inputs() == {grown: ("closed", 5, 0, ""), other: ("closed", 4, 0, "")}
    assert {row["stem"] for row in before} == {grown, other}
    assert [row for row in runs.rows("events") if row["stem"] == other] == [r for r in before if r["stem"] == other]
    assert [file.name for file in sorted(folder.iterdir())] == [f"{grown}.parquet", f"{other}.parquet"]
