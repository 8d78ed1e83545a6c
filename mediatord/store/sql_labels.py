"""
What stored and public events can be asked for by, in SQL; each function runs inside a transaction of the caller.

A label is a text of some kind that events of an owner have in common. An event has an entry under each of its labels,
in the order in which events are shown, and each label knows how many entries it has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from sqlite3 import Connection
from typing import NamedTuple

from mediatord.store.sql_rows import (
    ROWS_AT_A_TIME,
    change_in,
    gather,
    gather_in,
    insert_numbered,
    insert_rows,
    numbered_values,
    pieces,
    rows_clause,
)

# Kinds of labels, as they are in the database. Of the first three an owner has one each, without a text.
STORED, UNPROCESSED, PUBLIC, TAG, PARTICIPANT, PUBLIC_TAG, CHANNEL = range(7)

# CROSS JOIN, because the order of the tables is never to be chosen otherwise.
_KNOWN = """
    FROM (
        SELECT column1 AS number, column2 AS owner_id, column3 AS kind, column4 AS text FROM (VALUES {})
    ) w CROSS JOIN label l ON l.owner_id = w.owner_id AND l.kind = w.kind AND l.text = w.text
"""
# By a name, because otherwise it would not be looked up in the index.
_GONE = """
    WITH gone (label_id, timestamp, seq) AS (VALUES {})
    DELETE FROM labelled WHERE (label_id, timestamp, seq) IN gone
"""
_INSERT = "INSERT OR ROLLBACK INTO label (owner_id, kind, text, items)"


class Label(NamedTuple):
    """What events of one owner may have in common."""

    owner_id: int
    kind: int
    text: str = ""


class Shelf(NamedTuple):
    """A label by its number, with how many events have it."""

    id: int
    items: int


class Entry(NamedTuple):
    """An event's place under a label."""

    label_id: int
    timestamp: float
    seq: int


def find_shelves(connection: Connection, labels: Sequence[Label]) -> dict[Label, Shelf]:
    """Those of the labels that any event has."""
    shelves: dict[Label, Shelf] = {}
    for some in pieces(labels, ROWS_AT_A_TIME):
        source = _KNOWN.format(numbered_values(len(some), 3))
        rows = gather(connection, "w.number, l.id, l.items", source, [value for label in some for value in label])
        shelves |= {some[number]: Shelf(id, items) for number, id, items in rows}
    return shelves


def intern(connection: Connection, events: Mapping[Label, int]) -> dict[Label, int]:
    """The numbers of labels that so many more events have."""
    ids = {label: shelf.id for label, shelf in find_shelves(connection, list(events)).items()}
    _count(
        connection,
        "UPDATE label SET items = items + ? WHERE id IN ({})",
        {ids[label]: events[label] for label in ids},
    )
    new = [label for label in events if label not in ids]
    numbers = insert_numbered(connection, _INSERT, [(*label, events[label]) for label in new])
    return ids | dict(zip(new, numbers, strict=True))


def discount(connection: Connection, label_ids: Iterable[int]) -> None:
    """Of each of these one event less has it; a label that none has is forgotten."""
    fewer = Counter(label_ids)
    _count(connection, "UPDATE label SET items = items - ? WHERE id IN ({})", fewer)
    change_in(connection, "DELETE FROM label WHERE items = 0 AND id IN ({})", list(fewer))


def insert_entries(connection: Connection, entries: Collection[Entry]) -> None:
    # In their order in the table, so that neighbours are inserted one after another.
    insert_rows(connection, "INSERT OR ROLLBACK INTO labelled (label_id, timestamp, seq)", sorted(entries))


def delete_entries(connection: Connection, entries: Collection[Entry]) -> None:
    for some in pieces(sorted(entries), ROWS_AT_A_TIME):
        connection.execute(_GONE.format(rows_clause(len(some), 3)), [value for entry in some for value in entry])


def texts_of(connection: Connection, label_ids: Collection[int]) -> dict[int, str]:
    """What labels say, by their numbers."""
    return {
        id: text for id, text in gather_in(connection, "id, text", "FROM label WHERE id IN ({})", list(label_ids))
    }


def write_tags(label_ids: Iterable[int]) -> str:
    """An event's tags by number, in their order."""
    return " ".join(map(str, label_ids))


def read_tags(written: str) -> list[int]:
    """The numbers that :func:`write_tags` has written."""
    return [int(id) for id in written.split()]


def _count(connection: Connection, statement: str, numbers: Mapping[int, int]) -> None:
    """Change labels, those together that change by the same number."""
    alike: dict[int, list[int]] = {}
    for id, number in numbers.items():
        alike.setdefault(number, []).append(id)
    for number, ids in alike.items():
        change_in(connection, statement, ids, number)
