"""The store's own books, as the page has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

from mediatord.interfaces import messages

UNACCOUNTED = "the store does not account for every message"

_DIFFERENCE = "difference"
ENTRIES = ("accepted", "acknowledged", "waiting", "expired", "evicted", "removed", "withdrawn", _DIFFERENCE)

# By half and entry; what is not known is not in it.
Books = Mapping[str, Mapping[str, int]]


def read(books: messages.Books) -> Books:
    """What the store says of them."""
    halves = {"didcomm": books.didcomm, "decentrl": books.decentrl}
    known = {half: {**asdict(one), _DIFFERENCE: one.difference} for half, one in halves.items()}
    return {half: {name: n for name, n in entries.items() if n is not None} for half, entries in known.items()}


def balance(books: Books) -> bool:
    """Whether no half has a difference, as far as is known."""
    return not any(entries.get(_DIFFERENCE) for entries in books.values())


def as_json(books: Books) -> dict[str, dict[str, int | None]]:
    """All entries, null where nobody knows."""
    return {half: {entry: entries.get(entry) for entry in ENTRIES} for half, entries in books.items()}
