"""Findings of the quality job about the logs of a day."""

from __future__ import annotations

from datetime import date, timedelta
from typing import Any

from analytics.job import Span
from analytics.jobs.log_quality import FINDING_KINDS, QUALITY_JOB
from analytics.reading.lines import QUARANTINE_CAUSES
from analytics.reading.segments import SEGMENT_REMARKS, SEGMENT_STATES
from tests.analytics.job_tables import at, day, event, run_job

STEM = "events-20261116T000000Z-{}-{}-000001"


def make_events(seqs: list[int], node: str, boot: str, number: int = 0, **fields: Any) -> list[dict[str, Any]]:
    """Events of a day with these sequence numbers, one second apart."""
    return [
        event("msg.ack", at(number, second=i), node=node, boot=boot, seq=seq, **fields) for i, seq in enumerate(seqs)
    ]


def test_counts_missing_and_duplicate_sequence_numbers() -> None:
    """
    Numbers can be missing within a day, between days and at the beginning of a start, but not before the first day of
    the ledger.
    """
    rows = [
        *make_events([*range(10, 100), *range(103, 201)], "books", "old"),
        *make_events([1, 2, 3], "books", "new", dt=day(0)),
        *make_events([7, 9, 9], "books", "later", 1),
        *make_events([205], "books", "old", 1),
        *make_events([500, 501], "fresh", "a"),
        *make_events([3, 4], "fresh", "b", 1),
    ]
    history = [
        {"dt": day(-3), "node": "books", "boot": "old", "seq_first": 1, "seq_last": 8, "n": 8},
        {"dt": day(-1), "node": "books", "boot": "gone", "seq_first": 1, "seq_last": 8, "n": 8},
    ]
    inputs = [{"dt": day(0), "stem": STEM.format("books", "new"), "state": "closed", "doubled": 4}]
    result = run_job(QUALITY_JOB, Span(day(0), day(1)), rows, tables={"inputs": inputs, "boots_daily": history})
    boots = {(row["dt"], row["node"], row["boot"]): row for row in result["boots_daily"]}
    figures = {
        key: tuple(row[name] for name in ("seq_first", "seq_last", "n", "missing", "doubled"))
        for key, row in boots.items()
    }
    assert figures == {
        (day(0), "books", "old"): (10, 200, 188, 4, 0),
        (day(0), "books", "new"): (1, 3, 3, 0, 4),
        (day(1), "books", "later"): (7, 9, 3, 7, 0),
        (day(1), "books", "old"): (205, 205, 1, 4, 0),
        (day(0), "fresh", "a"): (500, 501, 2, 0, 0),
        (day(1), "fresh", "b"): (3, 4, 2, 2, 0),
    }
    kinds = {(row["dt"], row["node"], row["kind"]): row["n"] for row in result["quality_daily"]}
    assert kinds == {
        (day(0), "books", "events"): 191,
        (day(0), "books", "seq_missing"): 4,
        (day(0), "books", "doubled"): 4,
        (day(0), "books", "lines"): 0,
        (day(1), "books", "events"): 4,
        (day(1), "books", "seq_missing"): 11,
        (day(1), "books", "doubled_left"): 1,
        (day(0), "fresh", "events"): 2,
        (day(1), "fresh", "events"): 2,
        (day(1), "fresh", "seq_missing"): 2,
    }


def make_every_finding() -> tuple[list[dict[str, Any]], dict[str, list[dict[str, Any]]]]:
    """Events and other tables with every kind of finding about the log of a node."""
    rows = [
        event("msg.ack", at(0, second=second), node="n-1", boot="x", seq=seq)
        for second, seq in ((0, 1), (70, 2), (130, 3), (20, 4), (80, 5), (140, 6), (200, 7))
    ]
    rows += [
        event("msg.new", at(0, 1), node="n-1", boot="x", seq=8, v=2),
        event("gauge", at(-5), node="n-1", boot="x", seq=9, dt=day(0)),
        event("log.drop", at(0, 2), node="n-1", boot="x", seq=10, dropped=12),
    ]
    stems = {state: STEM.format("n-1", f"b{number}") for number, state in enumerate(SEGMENT_STATES)}
    inputs = [
        {"dt": day(0), "stem": stem, "state": state, "lines": 10, "unfinished": 0, "doubled": 0, "remarks": ""}
        for state, stem in stems.items()
    ]
    inputs[0] |= {"lines_said": 13, "unfinished": 1, "doubled": 2, "remarks": " ".join(SEGMENT_REMARKS)}
    inputs[1] |= {"lines_said": 9}
    quarantine = [
        {"dt": day(0), "stem": stems["closed"], "cause": cause, "line": "x"} for cause in [*QUARANTINE_CAUSES, "torn"]
    ]
    return rows, {"inputs": inputs, "quarantine": quarantine}


def test_counts_every_kind_of_finding_by_node() -> None:
    """Every kind has a description."""
    rows, tables = make_every_finding()
    result = run_job(QUALITY_JOB, Span(day(0), day(0)), rows, tables=tables)
    kinds = {row["kind"]: row["n"] for row in result["quality_daily"]}
    assert {row["node"] for row in result["quality_daily"]} == {"n-1"}
    assert kinds.keys() == FINDING_KINDS.keys() - {"seq_missing", "doubled_left"}
    expected = {"lines": 70, "events": 10, "torn": 2, "doubled": 2, "lines_lost": 3, "stepped_back": 3, "dropped": 12}
    assert {kind: kinds[kind] for kind in expected} == expected
    assert all(n == 1 for kind, n in kinds.items() if kind not in expected)
    assert result["boots_daily"][0]["stepped_back"] == 3


def test_clock_set_back_across_midnight_loses_no_lines() -> None:
    """Lines of the next day that precede the last lines of a day are not missing on either day."""

    def result(rows: list[dict[str, Any]], span: Span, history: list[dict[str, Any]] | None = None) -> list[Any]:
        rows = [{**row, "boot": "b"} for row in rows]
        return run_job(QUALITY_JOB, span, rows, tables={"boots_daily": history or []})["boots_daily"]

    # Lines 100 to 300 are of the next day, except 290; 201 is on both days; 150, 280 and 320 are lost.
    before = [event("gauge", at(0, 23, 59), seq=seq) for seq in range(1, 100)]
    after = [event("gauge", at(1, 0, 0, 1), seq=seq) for seq in range(100, 300) if seq not in (150, 280, 290)]
    late = [event("gauge", at(0, 23, 59, 58), seq=seq) for seq in (201, 290)]
    rest = [
        event("proc.stop" if seq == 340 else "gauge", at(1, 0, 1), seq=seq) for seq in range(300, 341) if seq != 320
    ]

    both = result([*before, *after, *late, *rest], Span(day(0), day(1)))

    figures = ("seq_last", "missing", "stepped_back", "last_at", "stopped")
    assert [tuple(row[name] for name in figures) for row in both] == [
        (290, 2, 0, at(0, 23, 59, 58), False),
        (340, 1, 1, at(1, 0, 1), True),
    ]
    assert result([*after, *rest], Span(day(1), day(1)), both[:1]) == both[1:]


def test_no_rows_for_a_day_without_input() -> None:
    assert run_job(QUALITY_JOB, Span(date(2026, 1, 1), date(2026, 1, 1) + timedelta(3))) == {
        "boots_daily": [],
        "quality_daily": [],
    }
