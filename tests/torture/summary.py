"""What a run comes to: a line for each kind of fault on each store."""

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
    """By kind and store; the last one is of all."""
    by_name: dict[tuple[str, str], list[RoundOutcome]] = {}
    for outcome in outcomes:
        by_name.setdefault((outcome.kind, outcome.store), []).append(outcome)
    everything = [outcome for some in by_name.values() for outcome in some]
    found = [_row(kind, store, by_name[kind, store]) for kind, store in sorted(by_name)]
    return [*found, _row("all", "", everything)]


def format_summary(found: Sequence[Row]) -> str:
    """For people; the two times are seconds, the slowest answer and all rounds together."""
    lines = [COLUMNS, *[[_text(row[column]) for column in COLUMNS] for row in found]]
    widths = [max(len(line[place]) for line in lines) for place in range(len(COLUMNS))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if place < 2 else cell.rjust(width) for place, cell, width in _placed(line, widths)
        )
        for line in lines
    )


def _placed(line: Sequence[str], widths: Sequence[int]) -> Iterable[tuple[int, str, int]]:
    return ((place, cell, widths[place]) for place, cell in enumerate(line))


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
