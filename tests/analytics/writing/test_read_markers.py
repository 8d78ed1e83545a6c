"""Which segments are named to the daemon as read, without Spark."""

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
AT = datetime(2026, 11, 16, 12, tzinfo=UTC)


def segment(stem: str, folder: Path = Path("/log"), **other: Any) -> Segment:
    path = f"file:{folder}/{stem}.jsonl"
    return replace(Segment(stem, path, 10, AT, "plain", False, "a", DAY), **other)


def known(state: str, **other: Any) -> ReadSegment:
    return replace(ReadSegment(DAY, 10, round(AT.timestamp() * 1000), "plain", state, 3), **other)


@pytest.mark.parametrize(
    ("state", "read"),
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
def test_states(state: str, read: bool) -> None:
    """What is in the tables from end to end, or as far as it can be read, in this run or before."""
    stems = {"s"} if read else set()
    assert list_read_stems([segment("s")], {}, [{"stem": "s", "state": state}]) == stems
    assert list_read_stems([segment("s")], {"s": known(state)}, []) == stems


def test_changed_since() -> None:
    """One that grew since it was read, still grows, or was never looked at is not named."""
    grown = segment("grown", size=11)
    segments = [grown, segment("growing", active=True), segment("new")]
    before = {"grown": known("crashed"), "growing": known("closed")}
    assert list_read_stems(segments, before, [{"stem": "growing", "state": "closed"}]) == set()
    assert list_read_stems([grown], {"grown": known("closed", complete=True)}, []) == {"grown"}


def test_markers_of_several_directories(tmp_path: Path) -> None:
    """Each names its own; what was named stays named while it is there; who did not ask gets none."""
    node, worker, copy = (tmp_path / name for name in ("n", "n/n-1", "copy"))
    for directory in (node, worker, copy):
        directory.mkdir()
    for directory in (node, worker):
        create_marker_directory(directory)
    save_read_marker(node, ["a", "gone"])
    found = [
        segment("a", node, others=(f"file:{copy}/a.jsonl",)),
        segment("b", node),
        segment("c", worker),
        segment("d", worker),
        segment("e", path="s3a://bucket/e.jsonl"),
    ]
    assert update_read_markers(found, {"b", "c", "e"}) == []
    assert (load_read_marker(node), load_read_marker(worker)) == (frozenset({"a", "b"}), frozenset({"c"}))
    assert list(copy.iterdir()) == []


def test_markers_before_anything_was_read(tmp_path: Path) -> None:
    """Daemons are to keep what the first run has not read. A marker that is there stays; a copy gets none."""
    fresh, known, copy = (tmp_path / name for name in ("fresh", "known", "copy"))
    for directory in (fresh, known, copy):
        directory.mkdir()
    for directory in (fresh, known):
        create_marker_directory(directory)
    save_read_marker(known, ["a"])
    create_read_markers([segment("a", known), segment("b", fresh), segment("c", copy)])
    assert (load_read_marker(fresh), load_read_marker(known)) == (frozenset(), frozenset({"a"}))
    assert list(copy.iterdir()) == []


def test_marker_that_is_damaged_or_cannot_be_written(tmp_path: Path) -> None:
    """It is written anew, or the operator is told and the run goes on."""
    create_marker_directory(tmp_path)
    make_read_marker_path(tmp_path).write_text("{")
    assert update_read_markers([segment("a", tmp_path)], {"a"}) == []
    assert load_read_marker(tmp_path) == frozenset({"a"})
    make_read_marker_path(tmp_path).unlink()
    make_read_marker_path(tmp_path).mkdir()
    assert update_read_markers([segment("a", tmp_path)], {"a"}) == [
        f"{make_read_marker_path(tmp_path)}: is a directory; the daemon treats loaded segments as unread"
    ]
    assert len(list(make_read_marker_path(tmp_path).parent.iterdir())) == 1
