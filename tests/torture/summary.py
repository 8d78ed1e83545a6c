"""Summary of a run: a line for each kind of fault on each store."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from tests.torture.rounds import RoundOutcome

_SUMS = (
    *("posts", "accepted", "refused", "cut", "delivered", "acknowledged", "expired", "evicted", "withdrawn"),
    *("lost", "doubled"),
)
COLUMNS = ("kind", "store", "faults", *_SUMS, "difference", "slowest", "seconds", "failed")

Row = dict[str, Any]


def summary_rows(outcomes: Iterable[RoundOutcome]) -> list[Row]:
    """By kind and store; the last row is the total."""
    by_name: dict[tuple[str, str], list[RoundOutcome]] = {}
    for outcome in outcomes:
        by_name.setdefault((outcome.kind, outcome.store), []).append(outcome)
    all_outcomes = [outcome for group in by_name.values() for outcome in group]
    rows = [_row(kind, store, by_name[kind, store]) for kind, store in sorted(by_name)]
    return [*rows, _row("all", "", all_outcomes)]


def format_summary(rows: Sequence[Row]) -> str:
    """As a table; the two times are seconds: the slowest response and the sum of all rounds."""
    lines = [COLUMNS, *[[_text(row[column]) for column in COLUMNS] for row in rows]]
    widths = [max(len(line[column_number]) for line in lines) for column_number in range(len(COLUMNS))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column_number < 2 else cell.rjust(width)
            for column_number, cell, width in _cells(line, widths)
        )
        for line in lines
    )


def _cells(line: Sequence[str], widths: Sequence[int]) -> Iterable[tuple[int, str, int]]:
    return ((column_number, cell, widths[column_number]) for column_number, cell in enumerate(line))


def _row(kind: str, store: str, outcomes: Sequence[RoundOutcome]) -> Row:
    differences = [outcome.difference for outcome in outcomes if outcome.difference is not None]
    return {
        "kind": kind,
        "store": store,
        "faults": len(outcomes),
        **{name: sum(getattr(outcome, name) for outcome in outcomes) for name in _SUMS},
        "difference": sum(differences) if differences else None,
        "slowest": round(max((outcome.slowest for outcome in outcomes), default=0.0), 2),
        "seconds": round(sum(outcome.seconds for outcome in outcomes), 1),
        "failed": sum(bool(outcome.complaints) for outcome in outcomes),
    }


def _text(value: Any) -> str:
    return "-" if value is None else str(value)
