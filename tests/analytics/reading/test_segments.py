"""Finding log segments by their names."""

from __future__ import annotations

import gzip
from datetime import date
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from analytics.errors import EXIT_USAGE, AnalyticsError
from analytics.reading.files import FileSystem
from analytics.reading.segments import Discovery, discover_segments
from tests.analytics.lines import Writer, write


@pytest.fixture
def files(spark: SparkSession) -> FileSystem:
    return FileSystem(spark)


def names(found: Discovery) -> list[str]:
    """The files to be read."""
    return [segment.path.rpartition("/")[2] for segment in found.segments]


def test_segments_of_several_nodes(files: FileSystem, tmp_path: Path) -> None:
    """Every directory below is looked into; plain and packed segments say whose and of which day they are."""
    one, two = Writer("node-a"), Writer("b.c")
    stem, lines = one.segment(3)
    packed, other = two.segment(2)
    write(tmp_path, f"node-1/{stem}.jsonl", lines)
    write(tmp_path, f"node-2/deep/{packed}.jsonl.gz", gzip.compress(b"".join(other)))
    write(tmp_path, f"node-2/{packed}-2.jsonl.zst", b"whatever")
    write(tmp_path, "node-1/analysis/read-segments.json", b"{}")
    found = discover_segments(files, [str(tmp_path), str(tmp_path / "node-1")])
    assert [(each.stem, each.packed, each.node, each.batch, each.active) for each in found.segments] == [
        (packed, "gzip", "b.c", date(2026, 11, 20), False),
        (f"{packed}-2", "zstd", "b.c", date(2026, 11, 20), False),
        (stem, "plain", "node-a", date(2026, 11, 20), False),
    ]
    assert found.segments[2].size == sum(map(len, lines))
    assert not found.findings and not found.warnings


def test_a_segment_counts_once(files: FileSystem, tmp_path: Path) -> None:
    """Packed is read if it is whole, else plain; of copies the larger one, and copies that differ are a finding."""
    writer = Writer()
    (whole, lines), (half, more), (copied, others), (differs, last) = (writer.segment(n) for n in (3, 4, 5, 6))
    write(tmp_path, f"{whole}.jsonl", lines)
    write(tmp_path, f"{whole}.jsonl.gz", gzip.compress(b"".join(lines)))
    write(tmp_path, f"{half}.jsonl", more)
    write(tmp_path, f"{half}.jsonl.gz", gzip.compress(b"".join(more))[:-20])
    write(tmp_path, f"{copied}.jsonl", others)
    write(tmp_path, f"backup/{copied}.jsonl", others)
    write(tmp_path, f"{differs}.jsonl", last)
    write(tmp_path, f"backup/{differs}.jsonl", last[:-1])
    found = discover_segments(files, [str(tmp_path)])
    assert names(found) == [f"{whole}.jsonl.gz", f"{half}.jsonl", f"{copied}.jsonl", f"{differs}.jsonl"]
    assert [segment.conflict for segment in found.segments] == [False, True, False, True]
    assert found.segments[3].size == sum(map(len, last))
    first, _, copy, _ = (segment.others for segment in found.segments)
    further = [path.removeprefix(f"file:{tmp_path}/") for path in (*first, *copy)]
    assert further == [f"{whole}.jsonl", f"backup/{copied}.jsonl"]
    assert found.findings == {"copy": 2, "conflict": 2}
    assert len(found.warnings) == 1 and "backup" in found.warnings[0]


def test_the_growing_file(files: FileSystem, tmp_path: Path) -> None:
    """It is the segment that its first line names; without such a line it is named by its age."""
    writer = Writer()
    stem, lines = writer.segment(2)
    write(tmp_path, "node-1/events.jsonl", lines[:-1])
    write(tmp_path, "node-2/events.jsonl", lines[0][:30])
    write(tmp_path, "node-3/events.jsonl", b"")
    closed, others = writer.segment(1)
    write(tmp_path, f"node-4/{closed}.jsonl", others)
    write(tmp_path, "node-4/events.jsonl", others)
    found = discover_segments(files, [str(tmp_path)])
    assert [(segment.stem, segment.active) for segment in found.segments[:2]] == [(stem, True), (closed, False)]
    assert found.segments[2].stem.endswith("-unknown-unknown-000000") and found.segments[2].active
    assert found.findings == {"nameless": 1}


def test_copies_of_a_growing_file(files: FileSystem, tmp_path: Path) -> None:
    """The larger one is read, wherever it is found first; nothing, once it was closed, that stayed behind."""
    one, two = Writer("a"), Writer("b")
    stem, lines = one.segment(9)
    for number, name in ((2, "1"), (5, "2"), (5, "3"), (4, "4")):
        write(tmp_path, f"{name}/events.jsonl", lines[:number])
    closed, others = two.segment(1)
    write(tmp_path, "5/events.jsonl", others[:-1])
    write(tmp_path, f"6/{closed}.jsonl", others)
    found = discover_segments(files, [str(tmp_path)])
    growing, whole = found.segments
    assert (growing.stem, growing.size, growing.conflict, growing.others) == (
        stem,
        len(b"".join(lines[:5])),
        True,
        (),
    )
    assert (whole.stem, whole.active) == (closed, False)
    assert found.findings == {"conflict": 3}


def test_what_is_no_segment(files: FileSystem, tmp_path: Path) -> None:
    """Other names are counted and named, what the daemon is packing is not; unknown suffixes stay segments."""
    stem, lines = Writer().segment(1)
    write(tmp_path, f"{stem}.jsonl", lines)
    write(tmp_path, f"{stem}.jsonl.gz.tmp", b"draft")
    write(tmp_path, f"_{stem}.jsonl", lines)
    write(tmp_path, "mediatord.log", b"text")
    write(tmp_path, "events-20261399T000000Z-one-b-000001.jsonl", b"text")
    strange, others = Writer("x").segment(1)
    write(tmp_path, f"{strange}.jsonl.xz", others)
    found = discover_segments(files, [str(tmp_path)])
    assert [(segment.stem, segment.packed) for segment in found.segments] == [(stem, "plain"), (strange, "xz")]
    assert found.findings == {"hidden": 1, "foreign": 2}
    assert any("mediatord.log" in warning for warning in found.warnings)


def test_no_directory(files: FileSystem, tmp_path: Path) -> None:
    """An empty directory has no segments; one that is not there is a mistake in the command."""
    assert discover_segments(files, [str(tmp_path)]) == Discovery([])
    with pytest.raises(AnalyticsError, match="no such file or directory") as caught:
        discover_segments(files, [str(tmp_path / "nowhere")])
    assert caught.value.exit_status == EXIT_USAGE
