"""What is read again and which days are computed, from what was read before."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from typing import Any

from analytics.job import Span
from analytics.reading.segments import ReadSegment, Segment
from analytics.run_plan import find_shrunk_segments, get_computed_span, make_backfill_warnings, make_plan

D = date(2026, 11, 20)
THEN = datetime(2026, 11, 21, 1, 2, 3, 456000, tzinfo=UTC)
THEN_MS = 1795222923456


def a_segment(name: str, batch: date = D, size: int = 100, modified: datetime = THEN) -> Segment:
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


def read_before(batch: date = D, size: int = 100, **rest: Any) -> ReadSegment:
    usual: dict[str, Any] = {"packed": "plain", "state": "crashed", "lines": 10}
    return ReadSegment(batch, size, THEN_MS, **usual | rest)


def ago(days: int) -> date:
    return D - timedelta(days)


def test_a_changed_batch_is_read_again() -> None:
    """In full, but for a segment that was complete and looks different: its rows stay, whatever became of it."""
    segments = [
        a_segment("same"),
        a_segment("new"),
        a_segment("longer", size=101),
        a_segment("later", modified=THEN + timedelta(milliseconds=1)),
        a_segment("packed since", size=10),
    ]
    known = {segment.stem: read_before(complete=segment.stem == "packed since") for segment in segments}
    del known["new"]
    made = make_plan(Span(D, D), 2, segments, known)
    assert [segment.stem for segment in made.read] == ["same", "new", "longer", "later"]
    assert made.kept == {D: ["packed since"]}


def test_what_makes_a_batch_change() -> None:
    """Size, time and form of its segments, unless they were complete; whatever was gone or still grew then."""
    whole, half = read_before(complete=True), read_before()
    later = THEN + timedelta(milliseconds=1)
    for segment, before, changed in (
        (a_segment("s"), None, True),
        (a_segment("s"), half, False),
        (a_segment("s", size=101), half, True),
        (a_segment("s", modified=later), half, True),
        (a_segment("s", size=10, modified=later), whole, False),
        (a_segment("s"), read_before(state="vanished"), True),
        (a_segment("s"), read_before(state="unread"), False),
        (a_segment("s"), read_before(state="unread", packed="gzip"), True),
        (replace(a_segment("s"), active=True), read_before(state="active"), False),
        (a_segment("s"), read_before(state="active"), True),
    ):
        known = {} if before is None else {"s": before}
        assert make_plan(Span(D, D), 0, [segment], known).batches == ([D] if changed else [])


def test_nothing_changed() -> None:
    """Then nothing is read, and only the days asked for are computed."""
    made = make_plan(Span(D, D), 2, [a_segment("same")], {"same": read_before()})
    assert (made.read, made.kept, made.batches) == ([], {}, [])
    assert get_computed_span(Span(D, D), made.window, []) == Span(D, D)


def test_a_segment_whose_file_is_gone_stays() -> None:
    """Its batch got a late segment: what was read of the others is carried over."""
    known = {"gone": read_before(ago(1)), "other day": read_before(D)}
    made = make_plan(Span(D, D), 2, [a_segment("late", ago(1))], known)
    assert made.kept == {ago(1): ["gone"]}


def test_the_window() -> None:
    """The days asked for and the look-back; what changed before it is told, what comes after is not looked at yet."""
    segments = [a_segment(f"{n}", ago(n)) for n in range(5)]
    made = make_plan(Span(ago(1), D), 1, segments, {"4": read_before(ago(4))})
    assert made.window == Span(ago(2), D)
    assert made.batches == [ago(2), ago(1), D]
    assert made.outside == [ago(3)]


def test_segments_whose_events_were_deleted() -> None:
    """They are no new input; asked for they are read again, if none of their batch is missing."""
    segments = [a_segment(name, ago(9)) for name in ("one", "two")]
    known = {segment.stem: read_before(ago(9), complete=True, deleted=True) for segment in segments}
    changed = [replace(segments[0], size=101), segments[1]]
    for found in (segments, changed):
        made = make_plan(Span(D, D), 2, found, known)
        assert (made.batches, made.outside) == ([], [])
    assert make_plan(Span(ago(9), D), 2, changed, known).read == changed
    for found in (segments[:1], [*segments[:1], a_segment("late", ago(9))]):
        made = make_plan(Span(ago(9), D), 2, found, known)
        assert (made.batches, made.read) == ([], [])


def test_what_shows_less_than_before() -> None:
    """Fewer whole lines than the tables have: those stay, in the plan too."""

    def row(stem: str, lines: int, corrupt: int = 0, state: str = "crashed") -> dict[str, Any]:
        return {"stem": stem, "lines": lines, "corrupt": corrupt, "unfinished": 0, "state": state, "remarks": ""}

    known = {name: read_before() for name in ("same", "less", "damaged", "gone")}
    rows = [row("same", 10), row("less", 9), row("damaged", 11, 2), row("gone", 0, state="vanished")]
    deleted = {"deleted": read_before(deleted=True)}
    found = find_shrunk_segments([*rows, row("new", 0), row("deleted", 9)], {**known, **deleted})
    assert [(one["stem"], one["remarks"]) for one in found] == [
        ("less", "shrunk"),
        ("damaged", "shrunk"),
        ("gone", ""),
    ]
    made = make_plan(
        Span(D, D), 2, [a_segment(name) for name in ("same", "less", "new")], {**known, "z": read_before()}
    )
    assert made.kept == {D: ["damaged", "gone", "z"]}
    made = made.keep_earlier({one["stem"] for one in found})
    assert [segment.stem for segment in made.read] == ["same", "new"]
    assert made.kept == {D: ["damaged", "gone", "less", "z"]}


def test_days_are_computed_from_the_first_affected_one_on() -> None:
    """Without a gap; days before the window stay as they are."""
    window = Span(ago(2), D)
    assert get_computed_span(Span(D, D), window, [ago(2)]) == Span(ago(2), D)
    assert get_computed_span(Span(D, D), window, [ago(3), ago(1)]) == Span(ago(1), D)
    assert get_computed_span(Span(D, D), window, [D + timedelta(1)]) == Span(D, D)


def test_warnings_name_the_command() -> None:
    """For days before the window that changed, and for later ones that are based on outdated results."""
    changed = make_plan(Span(D, D), 1, [a_segment("late", ago(1)), a_segment("too late", ago(5))], {})
    assert make_backfill_warnings(changed, Span(ago(1), D), [ago(2), ago(1)], [], "run") == [
        "segments of 2 days before 2026-11-19 arrived late and were not analysed;"
        " run run --from 2026-11-15 --to 2026-11-20"
    ]
    later = [D + timedelta(1), D + timedelta(2)]
    assert make_backfill_warnings(changed, Span(ago(1), D), [], later, "run")[1:] == [
        "results after 2026-11-20 are outdated; run run --from 2026-11-21 --to 2026-11-22"
    ]
    unchanged = make_plan(Span(D, D), 1, [], {})
    assert make_backfill_warnings(unchanged, Span(D, D), [], later, "run") == []
