"""Night after night over files that change, vanish and come back: nothing is replaced by less."""

from __future__ import annotations

import gzip
import json
import lzma
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from analytics.errors import EXIT_OK
from analytics.job import Span
from analytics.jobs.log_quality import QUALITY_JOB
from analytics.nightly import NightlyOutcome, NightlyRequest, NightlySteps, run_nightly
from analytics.reading.files import FileSystem
from analytics.reading.ingest import ingest_segments
from analytics.reading.segments import Discovery, discover_segments
from analytics.settings import Settings
from analytics.writing.runs import RunInfo
from analytics.writing.warehouse import Warehouse
from tests.analytics.lines import DAY, Writer, write

D = DAY.date()


def report(files: FileSystem, warehouse: Warehouse, out: str, day: object, settings: Settings, facts: RunInfo) -> str:
    files.write(f"{out}/report/{day}/index.html", b"")
    return ""


STEPS = NightlySteps(
    discover=discover_segments,
    ingest=ingest_segments,
    jobs=(QUALITY_JOB,),
    pseudonymize=lambda request: lambda table, frame: frame,
    report=report,
    textfile=lambda *_: None,
)


class Nights:
    """Logs of one day, and what the nights after it make of them."""

    def __init__(self, spark: SparkSession, root: Path) -> None:
        self.spark, self.files, self.root, self.logs = spark, FileSystem(spark), root, root / "logs"
        self.logs.mkdir()

    def put(self, stem: str, lines: Sequence[bytes] | bytes, suffix: str = "") -> Path:
        return write(self.logs, f"{stem}.jsonl{suffix}", lines)

    def night(self, gone: Path | None = None) -> NightlyOutcome:
        """:param gone: a file that goes between the time it is found and the time it is read."""

        def discover(files: FileSystem, log_dirs: Sequence[str]) -> Discovery:
            found = discover_segments(files, log_dirs)
            if gone:
                gone.unlink()
            return found

        asked = NightlyRequest([str(self.logs)], str(self.root / "out"), Span(D, D), Settings(), str(self.root), "")
        outcome = run_nightly(self.spark, self.files, asked, lambda line: None, replace(STEPS, discover=discover))
        assert outcome.exit_status == EXIT_OK
        return outcome

    def manifest(self, outcome: NightlyOutcome) -> dict[str, Any]:
        said: dict[str, Any] = json.loads((self.root / "out" / "runs" / f"{outcome.run_id}.json").read_text())
        return said

    def rows(self, name: str) -> list[dict[str, Any]]:
        frame = Warehouse(self.spark, self.files, str(self.root / "out")).read(name, Span(D, D))
        return [row.asDict() for row in frame.collect()]

    def inputs(self) -> dict[str, tuple[Any, ...]]:
        """State, lines, doubled ones among them, and remarks of each segment; every line is accounted for."""
        events = [row["stem"] for row in self.rows("events")]
        found = {}
        for row in self.rows("inputs"):
            there = events.count(row["stem"])
            assert there + row["corrupt"] + row["unfinished"] + row["doubled"] == row["lines"], row["stem"]
            found[row["stem"]] = (row["state"], row["lines"], row["doubled"], row["remarks"])
        return found


@pytest.fixture
def nights(spark: SparkSession, tmp_path: Path) -> Nights:
    return Nights(spark, tmp_path)


def told(outcome: NightlyOutcome, stem: str) -> str:
    """The only warning, which names a segment."""
    (warning,) = outcome.warnings
    assert warning.endswith(f": {stem}")
    return warning


def test_a_segment_that_was_gone_and_returns(nights: Nights) -> None:
    """It is read then, though it looks as it did when it was found first."""
    writer = Writer()
    stem, lines = writer.segment(3)
    other, more = writer.segment(1)
    nights.put(other, more)
    path = nights.put(stem, lines)
    copy = shutil.copy2(path, nights.root / "copy")
    assert "disappeared before they were read" in told(nights.night(gone=path), stem)
    assert nights.inputs() == {stem: ("vanished", 0, 0, ""), other: ("closed", 3, 0, "")}
    shutil.copy2(copy, path)
    assert nights.night().warnings == []
    assert nights.inputs() == {stem: ("closed", 5, 0, ""), other: ("closed", 3, 0, "")}


SHRINKING: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "unread": (".xz", lzma.compress),
    "partial": (".gz", lambda text: gzip.compress(text)[:-10_000]),
    "empty": ("", lambda text: b""),
    "crashed": ("", lambda text: text[: len(text) // 2]),
}


@pytest.mark.exhaustive
def test_files_that_show_less_than_before(nights: Nights) -> None:
    """What was read of them stays; their state is shown, told once, and no new input. What is whole again is read."""
    written = {state: Writer(state).segment(2000) for state in SHRINKING}
    for stem, lines in written.values():
        nights.put(stem, lines[:-1])
    nights.night()
    for state, (suffix, damage) in SHRINKING.items():
        stem, lines = written[state]
        (nights.logs / f"{stem}.jsonl").unlink()
        nights.put(stem, damage(b"".join(lines[:-1])), suffix)
    other, more = Writer("other").segment(1)
    nights.put(other, more)
    (warning,) = nights.night().warnings
    assert "4 segments that became shorter" in warning
    expected = {stem: (state, 2001, 0, "shrunk") for state, (stem, _) in written.items()}
    expected[other] = ("closed", 3, 0, "")
    assert nights.inputs() == expected
    quality = {(row["node"], row["kind"]): row["n"] for row in nights.rows("quality_daily")}
    for state in SHRINKING:
        assert (quality[state, "events"], quality[state, f"segments_{state}"]) == (2001, 1)
    again = nights.night()
    assert (again.warnings, nights.manifest(again)["inputs"]) == ([], [])
    nights.put(written["empty"][0], written["empty"][1])
    nights.night()
    assert nights.inputs() == {**expected, written["empty"][0]: ("closed", 2002, 0, "")}


@pytest.mark.exhaustive
def test_the_only_file_of_a_day_that_cannot_be_read_any_more(nights: Nights) -> None:
    """The day can be made again all the same."""
    stem, lines = Writer().segment(3)
    path = nights.put(stem, lines[:-1])
    nights.night()
    path.rename(f"{path}.xz")
    for warned in (True, False):
        assert [stem in warning for warning in nights.night().warnings] == [True] * warned
        assert nights.inputs() == {stem: ("unread", 4, 0, "shrunk")}


@pytest.mark.exhaustive
def test_a_file_that_is_deleted_just_before_it_is_read_again(nights: Nights) -> None:
    """What was read of it stays, as for one that was deleted earlier."""
    stem, lines = Writer().segment(3)
    path = nights.put(stem, lines[:-1])
    nights.night()
    other, more = Writer("two").segment(1)
    nights.put(other, more)
    assert nights.night(gone=path).warnings == []
    assert nights.inputs() == {stem: ("crashed", 4, 0, ""), other: ("closed", 3, 0, "")}


@pytest.mark.exhaustive
def test_lines_of_a_segment_that_is_gone_come_again(nights: Nights) -> None:
    """They count once, and are doubled lines of the one whose file is gone."""
    stem, lines = Writer().segment(3)
    path = nights.put(stem, lines)
    nights.night()
    path.unlink()
    late = stem.replace("T000000Z", "T000001Z")
    nights.put(late, [*lines[:2], lines[-1]])
    for _ in range(2):
        nights.night()
        assert nights.inputs() == {stem: ("closed", 5, 3, ""), late: ("closed", 3, 0, "")}
    (totals,) = [row for row in nights.rows("quality_daily") if row["kind"] == "doubled"]
    assert totals["n"] == 3
