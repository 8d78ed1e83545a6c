"""
Events that identities keep for themselves, in SQL; each function runs inside a transaction of the caller.

Commands to save some that stand next to each other in a batch share their statements.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from sqlite3 import Connection
from typing import Any, NamedTuple

from mediatord.errors import OverQuota
from mediatord.interfaces.decentrl import Caps, EventFilter, Found, StoredEvent
from mediatord.store.group_commit import Outcome, Work
from mediatord.store.sql_labels import (
    PARTICIPANT,
    STORED,
    TAG,
    UNPROCESSED,
    Entry,
    Label,
    insert_entries,
    intern,
    read_tags,
    texts_of,
    write_tags,
)
from mediatord.store.sql_parties import NOBODY, Party, enter_party, find_parties, find_party
from mediatord.store.sql_rows import gather_in, gather_texts, insert_numbered, insert_rows, nothing, size_of
from mediatord.store.sql_search import Reading, Search, find_events

_INSERT = """
    INSERT OR ROLLBACK INTO stored_event (
        id, owner_id, timestamp, sender, recipient, contract_id, size, processed, tags_size, tags
    )
"""
_INSERT_PAYLOAD = "INSERT OR ROLLBACK INTO stored_payload (seq, payload)"
_COUNT = "INSERT INTO holding (party_id, stored, stored_bytes)"
_COUNTED = """
    ON CONFLICT DO UPDATE SET
        stored = stored + excluded.stored, stored_bytes = stored_bytes + excluded.stored_bytes, edition = edition + 1
"""


def has_room(party: Party, caps: Caps, items: int, size: int) -> bool:
    """Whether so much more may be kept; what is less than before is never too much."""
    if items > 0 and party.stored + items > caps.stored:
        return False
    return size <= 0 or party.stored_bytes + size <= caps.stored_bytes


@dataclass(frozen=True, slots=True)
class Saving:
    """
    Events to be saved, as an operation of a batch.

    :param size: bytes of their payloads and tags.
    """

    owner: str
    events: tuple[StoredEvent, ...]
    size: int
    caps: Caps

    def __call__(self, connection: Connection) -> Outcome:
        """By itself."""
        return self.together(connection, [self])[0]

    def together(self, connection: Connection, works: Sequence[Work]) -> list[Outcome]:
        """This one and those after it."""
        savings = [work for work in works if isinstance(work, Saving)]
        parties = find_parties(connection, list(dict.fromkeys([one.owner for one in savings])))
        rooms = {one.owner: _Room(parties.get(one.owner, NOBODY)) for one in savings}
        outcomes = [rooms[one.owner].take(one) for one in savings]
        for owner, room in rooms.items():
            if room.items and owner not in parties:
                room.party = enter_party(connection, owner)
        arrivals = [
            NewEvent(event, rooms[one.owner].party.id, event.sender_did == one.owner)
            for one, outcome in zip(savings, outcomes, strict=True)
            if outcome.error is None
            for event in one.events
        ]
        insert_arrivals(connection, arrivals)
        counted = [(room.party.id, room.items, room.size) for room in rooms.values() if room.items]
        count_arrivals(connection, counted)
        return outcomes


@dataclass(eq=False, slots=True)
class _Room:
    """An owner as it was before, and how much more it keeps."""

    party: Party
    items: int = 0
    size: int = 0

    def take(self, saving: Saving) -> Outcome:
        """Count what is to be saved if it is not too much."""
        items, size = self.items + len(saving.events), self.size + saving.size
        if not has_room(self.party, saving.caps, items, size):
            return Outcome(error=OverQuota())
        self.items, self.size = items, size
        return Outcome()


def events(connection: Connection, owner: str, wanted: EventFilter, reading: Reading) -> Found[StoredEvent] | None:
    """None if it takes more patience."""
    party = find_party(connection, owner)
    if party is None or not party.stored:
        return nothing()
    groups = [tuple([Label(party.id, TAG, tag) for tag in wanted.tags])] if wanted.tags else []
    if wanted.participant is not None:
        groups.append((Label(party.id, PARTICIPANT, wanted.participant),))
    if wanted.unprocessed_only:
        groups.append((Label(party.id, UNPROCESSED),))
    search = Search(Label(party.id, STORED), tuple(groups), wanted.after, wanted.before)
    found = find_events(connection, party, search, reading)
    return None if found is None else Found(tuple(_read(connection, found[0])), found[1])


def _read(connection: Connection, seqs: Sequence[int]) -> list[StoredEvent]:
    """Events by their places in the order of arrival, in the order of those."""
    columns = "seq, id, sender, recipient, tags, timestamp, contract_id, size"
    rows = {row[0]: row for row in gather_in(connection, columns, "FROM stored_event WHERE seq IN ({})", seqs)}
    tags = {seq: read_tags(row[4]) for seq, row in rows.items()}
    texts = texts_of(connection, {id for seq, row in rows.items() for id in (row[2], row[3], *tags[seq])})
    payloads = gather_texts(connection, "stored_payload", "payload", {seq: row[7] for seq, row in rows.items()})
    found = []
    for seq in seqs:
        _, id, sender, recipient, _, timestamp, contract_id, _ = rows[seq]
        own = tuple([texts[tag] for tag in tags[seq]])
        found.append(
            StoredEvent(id, texts[sender], texts[recipient], payloads[seq], own, float(timestamp), contract_id)
        )
    return found


class NewEvent(NamedTuple):
    """An event on its way into the tables."""

    event: StoredEvent
    owner_id: int
    processed: bool

    def labels(self) -> set[Label]:
        """All that it is found by."""
        event, owner_id = self.event, self.owner_id
        labels = {Label(owner_id, TAG, tag) for tag in event.tags}
        labels.add(Label(owner_id, STORED))
        labels.add(Label(owner_id, PARTICIPANT, event.sender_did))
        labels.add(Label(owner_id, PARTICIPANT, event.recipient_did))
        if not self.processed:
            labels.add(Label(owner_id, UNPROCESSED))
        return labels

    def row(self, ids: Mapping[Label, int]) -> tuple[Any, ...]:
        event, owner_id = self.event, self.owner_id
        return (
            event.id,
            owner_id,
            repr(float(event.timestamp)),
            ids[Label(owner_id, PARTICIPANT, event.sender_did)],
            ids[Label(owner_id, PARTICIPANT, event.recipient_did)],
            event.contract_id,
            size_of(event.payload),
            int(self.processed),
            size_of(*event.tags),
            write_tags([ids[Label(owner_id, TAG, tag)] for tag in event.tags]),
        )


def insert_arrivals(connection: Connection, arrivals: Collection[NewEvent]) -> None:
    """Without counting them for their owners."""
    if not arrivals:
        return
    labels = [one.labels() for one in arrivals]
    ids = intern(connection, Counter([label for some in labels for label in some]))
    seqs = insert_numbered(connection, _INSERT, [one.row(ids) for one in arrivals])
    placed = list(zip(seqs, arrivals, labels, strict=True))
    insert_rows(connection, _INSERT_PAYLOAD, [(seq, one.event.payload) for seq, one, _ in placed])
    insert_entries(
        connection, [Entry(ids[label], one.event.timestamp, seq) for seq, one, some in placed for label in some]
    )


def count_arrivals(connection: Connection, counted: Sequence[tuple[int, int, int]]) -> None:
    """So many more events and bytes, by the number of their owner."""
    insert_rows(connection, _COUNT, counted, _COUNTED)
