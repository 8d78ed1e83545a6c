"""The store's own books, as the metrics have them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client.metrics_core import Metric

from mediatord.admin.markup import Column, Markup, count, element, table

METRICS = frozenset({"mediator_ledger_messages", "mediator_ledger_difference"})
UNACCOUNTED = "the store does not account for every message"

_DIFFERENCE = "difference"
_ENTRIES = ("accepted", "acknowledged", "waiting", "expired", "evicted", "removed", "withdrawn", _DIFFERENCE)
_NUMBER = "number"

# By half and entry; what is not known is not in it.
Books = Mapping[str, Mapping[str, int]]


def read(families: Iterable[Metric]) -> Books:
    """What metrics say of them; empty before they were read for the first time."""
    books: dict[str, dict[str, int]] = {}
    for family in families:
        if family.name in METRICS:
            for sample in family.samples:
                entry = sample.labels.get("entry", _DIFFERENCE)
                books.setdefault(sample.labels["half"], {})[entry] = int(sample.value)
    return books


def balance(books: Books) -> bool:
    """Whether no half has a difference, as far as is known."""
    return not any(entries.get(_DIFFERENCE) for entries in books.values())


def as_json(books: Books) -> dict[str, dict[str, int | None]]:
    """All entries, null where nobody knows."""
    return {half: {entry: entries.get(entry) for entry in _ENTRIES} for half, entries in books.items()}


def as_table(books: Books) -> Markup:
    """A column for each half: phones are narrow."""
    columns = [Column("", "name"), *(Column(half, _NUMBER) for half in books)]
    return table(columns, [(entry, *(_shown(half.get(entry)) for half in books.values())) for entry in _ENTRIES])


def _shown(number: int | None) -> str | Markup:
    if number is None:
        return "unknown"
    return count(number) if number >= 0 else element("span", f"\N{MINUS SIGN}{count(-number)}")
