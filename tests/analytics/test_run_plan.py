"""Run plans: which segments are read again, and which days are computed."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from typing import Any

from analytics.job import Span
from analytics.reading.segments import ReadSegment, Segment
from analytics.run_plan import (
    find_overlapping_segments,
    find_shrunk_segments,
    get_computed_span,
    make_backfill_warnings,
    make_plan,
)

D = date(2026, 11, 20)
MODIFIED = datetime(2026, 11, 21, 1, 2, 3, 456000, tzinfo=UTC)
MODIFIED_MS = 1795222923456


def make_segment(name: str, batch: date = D, size: int = 100, modified: datetime = MODIFIED) -> Segment:
    return Segment(
        stem=name,
        path=f"/logs/{name}.jsonl",
        size=size,
        modified=modified,
        packed="plain",
        active=False,
        node="a",
        batch=batch,
    )


def make_read_segment(batch: date = D, size: int = 100, **fields: Any) -> ReadSegment:
    defaults: dict[str, Any] = {"packed": "plain", "state": "crashed", "lines": 10}
    return ReadSegment(batch, size, MODIFIED_MS, **defaults | fields)


def days_ago(days: int) -> date:
    return D - timedelta(days)


def test_reads_only_new_and_changed_segments() -> None:
    """Not a segment that was complete and looks different: its rows are kept."""
    segments = [
        make_segment("same"),
        make_segment("new"),
        make_segment("longer", size=101),
        make_segment("later", modified=MODIFIED + timedelta(milliseconds=1)),
        make_segment("packed since", size=10),
    ]
    known = {segment.stem: make_read_segment(complete=segment.stem == "packed since") for segment in segments}
    del known["new"]
    plan = make_plan(Span(D, D), 2, segments, known)
    assert [segment.stem for segment in plan.read] == ["new", "longer", "later"]
    assert plan.kept == {D: ["packed since", "same"]}


def test_conditions_of_a_changed_batch() -> None:
    """Size, time and compression of segments that were not complete; segments that were missing or growing."""
    complete, incomplete = make_read_segment(complete=True), make_read_segment()
    later = MODIFIED + timedelta(milliseconds=1)
    for segment, before, changed in (
        (make_segment("s"), None, True),
        (make_segment("s"), incomplete, False),
        (make_segment("s", size=101), incomplete, True),
        (make_segment("s", modified=later), incomplete, True),
        (make_segment("s", size=10, modified=later), complete, False),
        (make_segment("s"), make_read_segment(state="vanished"), True),
        (make_segment("s"), make_read_segment(state="unread"), False),
        (make_segment("s"), make_read_segment(state="unread", packed="gzip"), True),
        (replace(make_segment("s"), active=True), make_read_segment(state="active"), False),
        (make_segment("s"), make_read_segment(state="active"), True),
    ):
        known = {} if before is None else {"s": before}
        assert make_plan(Span(D, D), 0, [segment], known).batches == ([D] if changed else [])


def test_reads_nothing_without_changes() -> None:
    """Only the requested days are computed."""
    plan = make_plan(Span(D, D), 2, [make_segment("same")], {"same": make_read_segment()})
    assert (plan.read, plan.kept, plan.batches) == ([], {}, [])
    assert get_computed_span(Span(D, D), plan.window, []) == Span(D, D)


def test_keeps_rows_of_deleted_segment() -> None:
    """A late segment is read."""
    known = {"gone": make_read_segment(days_ago(1)), "other day": make_read_segment(D)}
    plan = make_plan(Span(D, D), 2, [make_segment("late", days_ago(1))], known)
    assert plan.kept == {days_ago(1): ["gone"]}


def test_window_is_requested_days_and_look_back() -> None:
    """Changes before it are reported; later days are not considered."""
    segments = [make_segment(f"{n}", days_ago(n)) for n in range(5)]
    plan = make_plan(Span(days_ago(1), D), 1, segments, {"4": make_read_segment(days_ago(4))})
    assert plan.window == Span(days_ago(2), D)
    assert plan.batches == [days_ago(2), days_ago(1), D]
    assert plan.outside == [days_ago(3)]


def test_pruned_segments_are_no_new_input() -> None:
    """They are read again on request, if their batch is complete."""
    segments = [make_segment(name, days_ago(9)) for name in ("one", "two")]
    known = {segment.stem: make_read_segment(days_ago(9), complete=True, deleted=True) for segment in segments}
    changed = [replace(segments[0], size=101), segments[1]]
    for current in (segments, changed):
        plan = make_plan(Span(D, D), 2, current, known)
        assert (plan.batches, plan.outside) == ([], [])
    assert make_plan(Span(days_ago(9), D), 2, changed, known).read == changed
    for current in (segments[:1], [*segments[:1], make_segment("late", days_ago(9))]):
        plan = make_plan(Span(days_ago(9), D), 2, current, known)
        assert (plan.batches, plan.read) == ([], [])


def test_keeps_rows_of_shrunk_segments() -> None:
    """Segments with fewer valid lines than the tables have."""

    def row(stem: str, lines: int, corrupt: int = 0, state: str = "crashed") -> dict[str, Any]:
        return {"stem": stem, "lines": lines, "corrupt": corrupt, "unfinished": 0, "state": state, "remarks": ""}

    known = {name: make_read_segment() for name in ("same", "less", "damaged", "gone")}
    rows = [row("same", 10), row("less", 9), row("damaged", 11, 2), row("gone", 0, state="vanished")]
    deleted = {"deleted": make_read_segment(deleted=True)}
    current = find_shrunk_segments([*rows, row("new", 0), row("deleted", 9)], {**known, **deleted})
    assert [(row_of_inputs["stem"], row_of_inputs["remarks"]) for row_of_inputs in current] == [
        ("less", "shrunk"),
        ("damaged", "shrunk"),
        ("gone", ""),
    ]


def make_inputs_row(stem: str, first: int | None, last: int | None) -> dict[str, Any]:
    return {"stem": stem, "seq_first": first, "seq_last": last}


def test_finds_segments_that_may_repeat_lines() -> None:
    """Those of one start of a node with overlapping numbers, or of an unknown one; one of them must be new."""

    def name(start: str, number: int) -> str:
        return f"events-20261120T000000Z-{start}-{number:06d}"

    rows = [
        make_inputs_row(name("a-b1", 1), 1, 100),
        make_inputs_row(name("a-b1", 2), 101, 300),
        make_inputs_row(name("a-b1", 3), 150, 160),
        make_inputs_row(name("a-b1", 4), 300, 400),
        make_inputs_row(name("a-b1", 5), 401, 500),
        make_inputs_row(name("a-b2", 1), 1, 500),
        make_inputs_row(name("b-b3", 1), None, None),
    ]
    overlapping = {name("a-b1", n) for n in (2, 3, 4)}
    assert find_overlapping_segments(rows, {name("a-b1", 3)}) == overlapping
    assert find_overlapping_segments(rows, {name("a-b1", 1), name("a-b2", 1)}) == set()
    unknown = name("unknown-unknown", 0)
    rows.append(make_inputs_row(unknown, 90, 100))
    assert find_overlapping_segments(rows, {unknown}) == {unknown, name("a-b1", 1), name("a-b2", 1), *overlapping}


def test_computes_all_days_from_first_affected_day() -> None:
    """Days before the window stay."""
    window = Span(days_ago(2), D)
    assert get_computed_span(Span(D, D), window, [days_ago(2)]) == Span(days_ago(2), D)
    assert get_computed_span(Span(D, D), window, [days_ago(3), days_ago(1)]) == Span(days_ago(1), D)
    assert get_computed_span(Span(D, D), window, [D + timedelta(1)]) == Span(D, D)


def test_warnings_name_command() -> None:
    """For changed days before the window, and for later days with outdated results."""
    changed = make_plan(Span(D, D), 1, [make_segment("late", days_ago(1)), make_segment("too late", days_ago(5))], {})
    assert make_backfill_warnings(changed, Span(days_ago(1), D), [days_ago(2), days_ago(1)], [], "run") == [
        "segments of 2 days before 2026-11-19 arrived late and were not analysed;"
        " run run --from 2026-11-15 --to 2026-11-20"
    ]
    later = [D + timedelta(1), D + timedelta(2)]
    assert make_backfill_warnings(changed, Span(days_ago(1), D), [], later, "run")[1:] == [
        "results after 2026-11-20 are outdated; run run --from 2026-11-21 --to 2026-11-22"
    ]
    unchanged = make_plan(Span(D, D), 1, [], {})
    assert make_backfill_warnings(unchanged, Span(D, D), [], later, "run") == []
