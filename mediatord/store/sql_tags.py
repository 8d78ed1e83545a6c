"""New tags for stored events, in SQL; each function runs inside a transaction of the caller."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from sqlite3 import Connection

from mediatord.errors import OverQuota
from mediatord.interfaces.decentrl import Caps
from mediatord.store.sql_archive import has_room
from mediatord.store.sql_labels import (
    TAG,
    UNPROCESSED,
    Entry,
    Label,
    delete_entries,
    discount,
    find_shelves,
    insert_entries,
    intern,
    read_tags,
    write_tags,
)
from mediatord.store.sql_parties import change_holding, find_party
from mediatord.store.sql_rows import ROWS_AT_A_TIME, gather_in, pieces, rows_clause, size_of

_FIND = "FROM stored_event WHERE +owner_id = ? AND id IN ({})"
_UPDATE = """
    WITH changed (seq, size, tags) AS (VALUES {})
    UPDATE stored_event SET processed = 1, tags_size = changed.size, tags = changed.tags
    FROM changed WHERE stored_event.seq = changed.seq
"""


@dataclass(frozen=True, slots=True)
class _Change:
    """
    An event whose tags change.

    :param size: bytes of the tags that it had.
    :param old: those by number.
    """

    seq: int
    timestamp: float
    processed: bool
    size: int
    old: frozenset[int]
    new: tuple[Label, ...]

    @property
    def new_size(self) -> int:
        return size_of(*[label.text for label in self.new])

    def entries(self, label_ids: Iterable[int]) -> list[Entry]:
        return [Entry(id, self.timestamp, self.seq) for id in label_ids]


def update_tags(connection: Connection, owner: str, tags: Sequence[tuple[str, tuple[str, ...]]], caps: Caps) -> None:
    """:raise OverQuota: they would be too much."""
    party = find_party(connection, owner)
    if party is None:
        return
    changes = _find(connection, party.id, dict(tags))
    growth = sum([one.new_size - one.size for one in changes])
    if not has_room(party, caps, 0, growth):
        raise OverQuota()
    if changes:
        _change(connection, changes)
        _process(connection, Label(party.id, UNPROCESSED), [one for one in changes if not one.processed])
        change_holding(connection, party.id, stored_bytes=growth, edition=1)


def _find(connection: Connection, owner_id: int, tags: dict[str, tuple[str, ...]]) -> list[_Change]:
    columns = "seq, id, timestamp, processed, tags_size, tags"
    return [
        _Change(
            seq=seq,
            timestamp=float(timestamp),
            processed=bool(processed),
            size=size,
            old=frozenset(read_tags(old)),
            new=tuple([Label(owner_id, TAG, tag) for tag in tags[id]]),
        )
        for seq, id, timestamp, processed, size, old in gather_in(connection, columns, _FIND, list(tags), owner_id)
    ]


def _change(connection: Connection, changes: Sequence[_Change]) -> None:
    """First what comes, then what goes, so that a tag in both is not forgotten in between."""
    ids = intern(connection, Counter([label for one in changes for label in set(one.new)]))
    coming: list[Entry] = []
    going: list[Entry] = []
    for one in changes:
        new = {ids[label] for label in one.new}
        coming += one.entries(new - one.old)
        going += one.entries(one.old - new)
    insert_entries(connection, coming)
    delete_entries(connection, going)
    discount(connection, [id for one in changes for id in one.old])
    for some in pieces(changes, ROWS_AT_A_TIME):
        rows = [(one.seq, one.new_size, write_tags([ids[label] for label in one.new])) for one in some]
        connection.execute(_UPDATE.format(rows_clause(len(rows), 3)), [value for row in rows for value in row])


def _process(connection: Connection, label: Label, unprocessed: Sequence[_Change]) -> None:
    if unprocessed:
        shelf = find_shelves(connection, [label])[label]
        delete_entries(connection, [entry for one in unprocessed for entry in one.entries([shelf.id])])
        discount(connection, [shelf.id] * len(unprocessed))
