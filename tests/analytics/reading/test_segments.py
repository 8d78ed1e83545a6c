"""Discovery of log segments by their names."""

from __future__ import annotations

import gzip
from datetime import date
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from analytics.errors import EXIT_USAGE, AnalyticsError
from analytics.files import FileSystem
from analytics.reading.segments import Discovery, discover_segments
from tests.analytics.lines import SegmentWriter, write_file


@pytest.fixture
def files(spark: SparkSession) -> FileSystem:
    return FileSystem(spark)


def list_file_names(found: Discovery) -> list[str]:
    """Names of the files to read."""
    return [segment.path.rpartition("/")[2] for segment in found.segments]


def test_finds_segments_of_all_nodes_recursively(files: FileSystem, tmp_path: Path) -> None:
    """Node, day and compression follow from the names of files."""
    one, two = SegmentWriter("node-a"), SegmentWriter("b.c")
    stem, lines = one.segment(3)
    packed, other = two.segment(2)
    write_file(tmp_path, f"node-1/{stem}.jsonl", lines)
    write_file(tmp_path, f"node-2/deep/{packed}.jsonl.gz", gzip.compress(b"".join(other)))
    write_file(tmp_path, f"node-2/{packed}-2.jsonl.zst", b"whatever")
    write_file(tmp_path, "node-1/analysis/read-segments.json", b"{}")
    found = discover_segments(files, [str(tmp_path), str(tmp_path / "node-1")])
    assert [
        (segment.stem, segment.packed, segment.node, segment.batch, segment.active) for segment in found.segments
    ] == [
        (packed, "gzip", "b.c", date(2026, 11, 20), False),
        (f"{packed}-2", "zstd", "b.c", date(2026, 11, 20), False),
        (stem, "plain", "node-a", date(2026, 11, 20), False),
    ]
    assert found.segments[2].size == sum(map(len, lines))
    assert not found.findings and not found.warnings


def test_selects_one_file_of_each_segment(files: FileSystem, tmp_path: Path) -> None:
    """A complete compressed file, otherwise the plain one; of copies the larger; copies that differ are a finding."""
    writer = SegmentWriter()
    (complete, lines), (truncated, more), (copied, others), (differs, last) = (
        writer.segment(n) for n in (3, 4, 5, 6)
    )
    write_file(tmp_path, f"{complete}.jsonl", lines)
    write_file(tmp_path, f"{complete}.jsonl.gz", gzip.compress(b"".join(lines)))
    write_file(tmp_path, f"{truncated}.jsonl", more)
    write_file(tmp_path, f"{truncated}.jsonl.gz", gzip.compress(b"".join(more))[:-20])
    write_file(tmp_path, f"{copied}.jsonl", others)
    write_file(tmp_path, f"backup/{copied}.jsonl", others)
    write_file(tmp_path, f"{differs}.jsonl", last)
    write_file(tmp_path, f"backup/{differs}.jsonl", last[:-1])
    found = discover_segments(files, [str(tmp_path)])
    assert list_file_names(found) == [
        f"{complete}.jsonl.gz",
        f"{truncated}.jsonl",
        f"{copied}.jsonl",
        f"{differs}.jsonl",
    ]
    assert [segment.conflict for segment in found.segments] == [False, True, False, True]
    assert found.segments[3].size == sum(map(len, last))
    first, _, copy, _ = (segment.others for segment in found.segments)
    further = [path.removeprefix(f"file:{tmp_path}/") for path in (*first, *copy)]
    assert further == [f"{complete}.jsonl", f"backup/{copied}.jsonl"]
    assert found.findings == {"copy": 2, "conflict": 2}
    assert len(found.warnings) == 1 and "backup" in found.warnings[0]


def test_names_open_segment_by_its_first_line(files: FileSystem, tmp_path: Path) -> None:
    """Without such a line, by its modification time."""
    writer = SegmentWriter()
    stem, lines = writer.segment(2)
    write_file(tmp_path, "node-1/events.jsonl", lines[:-1])
    write_file(tmp_path, "node-2/events.jsonl", lines[0][:30])
    write_file(tmp_path, "node-3/events.jsonl", b"")
    closed, others = writer.segment(1)
    write_file(tmp_path, f"node-4/{closed}.jsonl", others)
    write_file(tmp_path, "node-4/events.jsonl", others)
    found = discover_segments(files, [str(tmp_path)])
    assert [(segment.stem, segment.active) for segment in found.segments[:2]] == [(stem, True), (closed, False)]
    assert found.segments[2].stem.endswith("-unknown-unknown-000000") and found.segments[2].active
    assert found.findings == {"nameless": 1}


def test_selects_largest_copy_of_open_segment(files: FileSystem, tmp_path: Path) -> None:
    """Copies left behind after the segment was closed are ignored."""
    one, two = SegmentWriter("a"), SegmentWriter("b")
    stem, lines = one.segment(9)
    for number, name in ((2, "1"), (5, "2"), (5, "3"), (4, "4")):
        write_file(tmp_path, f"{name}/events.jsonl", lines[:number])
    closed, others = two.segment(1)
    write_file(tmp_path, "5/events.jsonl", others[:-1])
    write_file(tmp_path, f"6/{closed}.jsonl", others)
    found = discover_segments(files, [str(tmp_path)])
    open_segment, complete = found.segments
    assert (open_segment.stem, open_segment.size, open_segment.conflict, open_segment.others) == (
        stem,
        len(b"".join(lines[:5])),
        True,
        (),
    )
    assert (complete.stem, complete.active) == (closed, False)
    assert found.findings == {"conflict": 3}


def test_counts_other_files(files: FileSystem, tmp_path: Path) -> None:
    """
    They are counted and named in a warning, except for files that the daemon is compressing. Unknown suffixes are
    segments.
    """
    stem, lines = SegmentWriter().segment(1)
    write_file(tmp_path, f"{stem}.jsonl", lines)
    write_file(tmp_path, f"{stem}.jsonl.gz.tmp", b"draft")
    write_file(tmp_path, f"_{stem}.jsonl", lines)
    write_file(tmp_path, "mediatord.log", b"text")
    write_file(tmp_path, "events-20261399T000000Z-one-b-000001.jsonl", b"text")
    unknown_suffix, others = SegmentWriter("x").segment(1)
    write_file(tmp_path, f"{unknown_suffix}.jsonl.xz", others)
    found = discover_segments(files, [str(tmp_path)])
    assert [(segment.stem, segment.packed) for segment in found.segments] == [(stem, "plain"), (unknown_suffix, "xz")]
    assert found.findings == {"hidden": 1, "foreign": 2}
    assert any("mediatord.log" in warning for warning in found.warnings)


def test_missing_directory_is_usage_error(files: FileSystem, tmp_path: Path) -> None:
    """An empty directory has no segments."""
    assert discover_segments(files, [str(tmp_path)]) == Discovery([])
    with pytest.raises(AnalyticsError, match="no such file or directory") as caught:
        discover_segments(files, [str(tmp_path / "nowhere")])
    assert caught.value.exit_status == EXIT_USAGE
