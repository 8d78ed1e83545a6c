"""Read markers, which name loaded segments to the daemon; without Spark."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import pytest

from analytics.reading.segments import ReadSegment, Segment
from analytics.writing.retention import create_read_markers, list_read_stems, update_read_markers
from mediatord.observability.segments import (
    create_marker_directory,
    load_read_marker,
    make_read_marker_path,
    save_read_marker,
)

DAY = date(2026, 11, 16)
MODIFIED = datetime(2026, 11, 16, 12, tzinfo=UTC)


def make_segment(stem: str, folder: Path = Path("/log"), **fields: Any) -> Segment:
    path = f"file:{folder}/{stem}.jsonl"
    return replace(Segment(stem, path, 10, MODIFIED, "plain", False, "a", DAY), **fields)


def make_read_segment(state: str, **fields: Any) -> ReadSegment:
    return replace(ReadSegment(DAY, 10, round(MODIFIED.timestamp() * 1000), "plain", state, 3), **fields)


@pytest.mark.parametrize(
    ("state", "is_read"),
    [
        ("closed", True),
        ("crashed", True),
        ("empty", True),
        ("partial", True),
        ("active", False),
        ("unread", False),
        ("vanished", False),
    ],
)
def test_states_that_count_as_read(state: str, is_read: bool) -> None:
    """Segments read completely, or as far as possible, in this run or before."""
    stems = {"s"} if is_read else set()
    assert list_read_stems([make_segment("s")], {}, [{"stem": "s", "state": state}]) == stems
    assert list_read_stems([make_segment("s")], {"s": make_read_segment(state)}, []) == stems


def test_excludes_changed_and_new_segments() -> None:
    """Segments that grew since, still grow, or were never read."""
    grown = make_segment("grown", size=11)
    segments = [grown, make_segment("growing", active=True), make_segment("new")]
    before = {"grown": make_read_segment("crashed"), "growing": make_read_segment("closed")}
    assert list_read_stems(segments, before, [{"stem": "growing", "state": "closed"}]) == set()
    assert list_read_stems([grown], {"grown": make_read_segment("closed", complete=True)}, []) == {"grown"}


def test_each_directory_names_its_segments(tmp_path: Path) -> None:
    """A segment stays named while its file exists; directories without a marker directory get none."""
    node, worker, copy = (tmp_path / name for name in ("n", "n/n-1", "copy"))
    for directory in (node, worker, copy):
        directory.mkdir()
    for directory in (node, worker):
        create_marker_directory(directory)
    save_read_marker(node, ["a", "gone"])
    found = [
        make_segment("a", node, others=(f"file:{copy}/a.jsonl",)),
        make_segment("b", node),
        make_segment("c", worker),
        make_segment("d", worker),
        make_segment("e", path="s3a://bucket/e.jsonl"),
    ]
    assert update_read_markers(found, {"b", "c", "e"}) == []
    assert (load_read_marker(node), load_read_marker(worker)) == (frozenset({"a", "b"}), frozenset({"c"}))
    assert list(copy.iterdir()) == []


def test_creates_empty_markers_before_first_run(tmp_path: Path) -> None:
    """Daemons keep segments that the first run has not read. Existing markers stay; a copy gets none."""
    unmarked, make_read_segment, copy = (tmp_path / name for name in ("fresh", "known", "copy"))
    for directory in (unmarked, make_read_segment, copy):
        directory.mkdir()
    for directory in (unmarked, make_read_segment):
        create_marker_directory(directory)
    save_read_marker(make_read_segment, ["a"])
    create_read_markers([make_segment("a", make_read_segment), make_segment("b", unmarked), make_segment("c", copy)])
    assert (load_read_marker(unmarked), load_read_marker(make_read_segment)) == (frozenset(), frozenset({"a"}))
    assert list(copy.iterdir()) == []


def test_replaces_damaged_marker(tmp_path: Path) -> None:
    """A marker that cannot be written causes a warning."""
    create_marker_directory(tmp_path)
    make_read_marker_path(tmp_path).write_text("{")
    assert update_read_markers([make_segment("a", tmp_path)], {"a"}) == []
    assert load_read_marker(tmp_path) == frozenset({"a"})
    make_read_marker_path(tmp_path).unlink()
    make_read_marker_path(tmp_path).mkdir()
    assert update_read_markers([make_segment("a", tmp_path)], {"a"}) == [
        f"{make_read_marker_path(tmp_path)}: is a directory; the daemon treats loaded segments as unread"
    ]
    assert len(list(make_read_marker_path(tmp_path).parent.iterdir())) == 1
