"""
Stored and public events in SQL: saving, tagging, publishing and listing. Each function runs inside a transaction of
the caller.

Neighbouring commands of a batch that save events share their statements.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from sqlite3 import Connection
from typing import Any, NamedTuple

from mediatord.errors import PublicEventNotFound, QuotaExceeded
from mediatord.store.interfaces.decentrl import (
    DecentrlQuotas,
    EventFilter,
    PublicEvent,
    PublicEventFilter,
    ResultPage,
    StoredEvent,
)
from mediatord.store.quotas import get_utf8_size
from mediatord.store.sqlite.bulk_sql import (
    ROWS_PER_STATEMENT,
    format_values,
    insert_numbered_rows,
    insert_rows,
    make_empty_page,
    read_texts,
    select_rows_in,
    split_chunks,
)
from mediatord.store.sqlite.decentrl_queries import (
    UNKNOWN_PARTY,
    PartyRow,
    change_party_usage,
    find_parties,
    find_party,
    get_or_create_party,
)
from mediatord.store.sqlite.event_search import (
    CHANNEL_LABEL,
    PARTICIPANT_LABEL,
    PUBLIC_LABEL,
    PUBLIC_TAG_LABEL,
    STORED_LABEL,
    TAG_LABEL,
    UNPROCESSED_LABEL,
    EventLabel,
    EventSearch,
    LabelEntry,
    PageReadOptions,
    delete_label_entries,
    find_events,
    find_labels,
    format_tag_ids,
    insert_label_entries,
    intern_labels,
    parse_tag_ids,
    read_label_texts,
    release_labels,
)
from mediatord.store.sqlite.group_commit import OperationOutcome
from mediatord.store.sqlite.queue_accounting import StoreConnection

_INSERT_STORED_EVENTS = """
    INSERT OR ROLLBACK INTO stored_event (
        id, owner_id, timestamp, sender, recipient, contract_id, size, processed, tags_size, tags
    )
"""
_INSERT_PAYLOADS = "INSERT OR ROLLBACK INTO stored_payload (seq, payload)"
_INSERT_STORED_USAGE = "INSERT INTO holding (party_id, stored, stored_bytes)"
_ADD_STORED_USAGE = """
    ON CONFLICT DO UPDATE SET
        stored = stored + excluded.stored, stored_bytes = stored_bytes + excluded.stored_bytes, edition = edition + 1
"""


def fits_quota(party: PartyRow, caps: DecentrlQuotas, items: int, size: int) -> bool:
    """Whether items and bytes may be added; a reduction always may."""
    if items > 0 and party.stored + items > caps.stored:
        return False
    return size <= 0 or party.stored_bytes + size <= caps.stored_bytes


@dataclass(frozen=True, slots=True)
class SaveEventsOperation:
    """
    Storage of events as an operation of a batch.

    :param size: bytes of their payloads and tags.
    """

    owner: str
    events: tuple[StoredEvent, ...]
    size: int
    caps: DecentrlQuotas

    @staticmethod
    def run_batch(connection: StoreConnection, savings: Sequence[SaveEventsOperation]) -> list[OperationOutcome]:
        """Perform neighbouring operations of a batch together."""
        parties = find_parties(connection, list(dict.fromkeys([one.owner for one in savings])))
        rooms = {one.owner: _StoredUsage(parties.get(one.owner, UNKNOWN_PARTY)) for one in savings}
        outcomes = [rooms[one.owner].take(one) for one in savings]
        for owner, room in rooms.items():
            if room.items and owner not in parties:
                room.party = get_or_create_party(connection, owner)
        arrivals = [
            NewStoredEvent(event, rooms[one.owner].party.id, event.sender_did == one.owner)
            for one, outcome in zip(savings, outcomes, strict=True)
            if outcome.error is None
            for event in one.events
        ]
        insert_stored_events(connection, arrivals)
        counted = [(room.party.id, room.items, room.size) for room in rooms.values() if room.items]
        add_stored_usage(connection, counted)
        return outcomes


@dataclass(eq=False, slots=True)
class _StoredUsage:
    """Usage of an owner before the batch, and its growth."""

    party: PartyRow
    items: int = 0
    size: int = 0

    def take(self, saving: SaveEventsOperation) -> OperationOutcome:
        """Count an operation if the quota allows it."""
        items, size = self.items + len(saving.events), self.size + saving.size
        if not fits_quota(self.party, saving.caps, items, size):
            return OperationOutcome(error=QuotaExceeded())
        self.items, self.size = items, size
        return OperationOutcome()


def find_stored_events(
    connection: Connection, owner: str, wanted: EventFilter, reading: PageReadOptions
) -> ResultPage[StoredEvent] | None:
    """A page of stored events; None if it needs more patience."""
    party = find_party(connection, owner)
    if party is None or not party.stored:
        return make_empty_page()
    groups = [tuple([EventLabel(party.id, TAG_LABEL, tag) for tag in wanted.tags])] if wanted.tags else []
    if wanted.participant is not None:
        groups.append((EventLabel(party.id, PARTICIPANT_LABEL, wanted.participant),))
    if wanted.unprocessed_only:
        groups.append((EventLabel(party.id, UNPROCESSED_LABEL),))
    search = EventSearch(EventLabel(party.id, STORED_LABEL), tuple(groups), wanted.after, wanted.before)
    found = find_events(connection, party, search, reading)
    return None if found is None else ResultPage(tuple(_read_stored_events(connection, found[0])), found[1])


def _read_stored_events(connection: Connection, seqs: Sequence[int]) -> list[StoredEvent]:
    """Events by their sequence numbers, in that order."""
    columns = "seq, id, sender, recipient, tags, timestamp, contract_id, size"
    rows = {row[0]: row for row in select_rows_in(connection, columns, "FROM stored_event WHERE seq IN ({})", seqs)}
    tags = {seq: parse_tag_ids(row[4]) for seq, row in rows.items()}
    texts = read_label_texts(connection, {id for seq, row in rows.items() for id in (row[2], row[3], *tags[seq])})
    payloads = read_texts(connection, "stored_payload", "payload", {seq: row[7] for seq, row in rows.items()})
    found = []
    for seq in seqs:
        _, id, sender, recipient, _, timestamp, contract_id, _ = rows[seq]
        own = tuple([texts[tag] for tag in tags[seq]])
        found.append(
            StoredEvent(id, texts[sender], texts[recipient], payloads[seq], own, float(timestamp), contract_id)
        )
    return found


class NewStoredEvent(NamedTuple):
    """An event to be inserted."""

    event: StoredEvent
    owner_id: int
    processed: bool

    def labels(self) -> set[EventLabel]:
        """All labels that it is found by."""
        event, owner_id = self.event, self.owner_id
        labels = {EventLabel(owner_id, TAG_LABEL, tag) for tag in event.tags}
        labels.add(EventLabel(owner_id, STORED_LABEL))
        labels.add(EventLabel(owner_id, PARTICIPANT_LABEL, event.sender_did))
        labels.add(EventLabel(owner_id, PARTICIPANT_LABEL, event.recipient_did))
        if not self.processed:
            labels.add(EventLabel(owner_id, UNPROCESSED_LABEL))
        return labels

    def row(self, ids: Mapping[EventLabel, int]) -> tuple[Any, ...]:
        event, owner_id = self.event, self.owner_id
        return (
            event.id,
            owner_id,
            repr(float(event.timestamp)),
            ids[EventLabel(owner_id, PARTICIPANT_LABEL, event.sender_did)],
            ids[EventLabel(owner_id, PARTICIPANT_LABEL, event.recipient_did)],
            event.contract_id,
            get_utf8_size(event.payload),
            int(self.processed),
            get_utf8_size(*event.tags),
            format_tag_ids([ids[EventLabel(owner_id, TAG_LABEL, tag)] for tag in event.tags]),
        )


def insert_stored_events(connection: Connection, arrivals: Collection[NewStoredEvent]) -> None:
    """Insert events without counting them for their owners."""
    if not arrivals:
        return
    labels = [one.labels() for one in arrivals]
    ids = intern_labels(connection, Counter([label for some in labels for label in some]))
    seqs = insert_numbered_rows(connection, _INSERT_STORED_EVENTS, [one.row(ids) for one in arrivals])
    placed = list(zip(seqs, arrivals, labels, strict=True))
    insert_rows(connection, _INSERT_PAYLOADS, [(seq, one.event.payload) for seq, one, _ in placed])
    insert_label_entries(
        connection, [LabelEntry(ids[label], one.event.timestamp, seq) for seq, one, some in placed for label in some]
    )


def add_stored_usage(connection: Connection, counted: Sequence[tuple[int, int, int]]) -> None:
    """Add events and bytes to owners, given by their numbers."""
    insert_rows(connection, _INSERT_STORED_USAGE, counted, _ADD_STORED_USAGE)


_FIND_TAGGED_EVENTS = "FROM stored_event WHERE +owner_id = ? AND id IN ({})"
_UPDATE_TAGS = """
    WITH changed (seq, size, tags) AS (VALUES {})
    UPDATE stored_event SET processed = 1, tags_size = changed.size, tags = changed.tags
    FROM changed WHERE stored_event.seq = changed.seq
"""


@dataclass(frozen=True, slots=True)
class _TagChange:
    """
    An event whose tags change.

    :param size: bytes of its former tags.
    :param old: its former tags, by number.
    """

    seq: int
    timestamp: float
    processed: bool
    size: int
    old: frozenset[int]
    new: tuple[EventLabel, ...]

    @property
    def new_size(self) -> int:
        return get_utf8_size(*[label.text for label in self.new])

    def entries(self, label_ids: Iterable[int]) -> list[LabelEntry]:
        return [LabelEntry(id, self.timestamp, self.seq) for id in label_ids]


def update_tags(
    connection: Connection, owner: str, tags: Sequence[tuple[str, tuple[str, ...]]], caps: DecentrlQuotas
) -> None:
    """
    Replace the tags of events.

    :raise QuotaExceeded: they would exceed the quota.
    """
    party = find_party(connection, owner)
    if party is None:
        return
    changes = _find_tag_changes(connection, party.id, dict(tags))
    growth = sum([one.new_size - one.size for one in changes])
    if not fits_quota(party, caps, 0, growth):
        raise QuotaExceeded()
    if changes:
        _apply_tag_changes(connection, changes)
        _mark_processed(
            connection, EventLabel(party.id, UNPROCESSED_LABEL), [one for one in changes if not one.processed]
        )
        change_party_usage(connection, party.id, stored_bytes=growth, edition=1)


def _find_tag_changes(connection: Connection, owner_id: int, tags: dict[str, tuple[str, ...]]) -> list[_TagChange]:
    columns = "seq, id, timestamp, processed, tags_size, tags"
    return [
        _TagChange(
            seq=seq,
            timestamp=float(timestamp),
            processed=bool(processed),
            size=size,
            old=frozenset(parse_tag_ids(old)),
            new=tuple([EventLabel(owner_id, TAG_LABEL, tag) for tag in tags[id]]),
        )
        for seq, id, timestamp, processed, size, old in select_rows_in(
            connection, columns, _FIND_TAGGED_EVENTS, list(tags), owner_id
        )
    ]


def _apply_tag_changes(connection: Connection, changes: Sequence[_TagChange]) -> None:
    """Insert new entries before deleting old ones, so that a label in both is not deleted in between."""
    ids = intern_labels(connection, Counter([label for one in changes for label in set(one.new)]))
    coming: list[LabelEntry] = []
    going: list[LabelEntry] = []
    for one in changes:
        new = {ids[label] for label in one.new}
        coming += one.entries(new - one.old)
        going += one.entries(one.old - new)
    insert_label_entries(connection, coming)
    delete_label_entries(connection, going)
    release_labels(connection, [id for one in changes for id in one.old])
    for some in split_chunks(changes, ROWS_PER_STATEMENT):
        rows = [(one.seq, one.new_size, format_tag_ids([ids[label] for label in one.new])) for one in some]
        connection.execute(_UPDATE_TAGS.format(format_values(len(rows), 3)), [value for row in rows for value in row])


def _mark_processed(connection: Connection, label: EventLabel, unprocessed: Sequence[_TagChange]) -> None:
    if unprocessed:
        shelf = find_labels(connection, [label])[label]
        delete_label_entries(connection, [entry for one in unprocessed for entry in one.entries([shelf.id])])
        release_labels(connection, [shelf.id] * len(unprocessed))


_INSERT_PUBLIC_EVENT = """
    INSERT OR ROLLBACK INTO public_event (id, owner_id, timestamp, channel, tags_size, tags, signature, size, event)
    VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)
"""


def publish_event(connection: Connection, publisher: str, event: PublicEvent, caps: DecentrlQuotas) -> None:
    """
    Insert a public event.

    :raise QuotaExceeded: it would exceed the quota.
    """
    size, tags_size = get_utf8_size(event.event), get_utf8_size(*event.tags)
    if not fits_quota(find_party(connection, publisher) or UNKNOWN_PARTY, caps, 1, size + tags_size):
        raise QuotaExceeded()
    party = get_or_create_party(connection, publisher)
    tags = [EventLabel(party.id, PUBLIC_TAG_LABEL, tag) for tag in event.tags]
    channel = None if event.channel_id is None else EventLabel(party.id, CHANNEL_LABEL, event.channel_id)
    labels = {EventLabel(party.id, PUBLIC_LABEL), *tags}
    ids = intern_labels(connection, dict.fromkeys(labels if channel is None else {*labels, channel}, 1))
    seq = connection.execute(
        _INSERT_PUBLIC_EVENT,
        (
            event.id,
            party.id,
            repr(float(event.timestamp)),
            None if channel is None else ids[channel],
            tags_size,
            format_tag_ids([ids[tag] for tag in tags]),
            event.event_signature,
            size,
            event.event,
        ),
    ).lastrowid
    assert seq is not None
    insert_label_entries(connection, [LabelEntry(id, event.timestamp, seq) for id in ids.values()])
    change_party_usage(connection, party.id, stored=1, stored_bytes=size + tags_size, edition=1)


def unpublish_event(connection: Connection, publisher: str, event_id: str) -> None:
    """
    Delete a public event.

    :raise PublicEventNotFound: the publisher has none with this id.
    """
    party = find_party(connection, publisher)
    row = connection.execute(
        "SELECT owner_id, seq, timestamp, size + tags_size, channel, tags FROM public_event WHERE id = ?", (event_id,)
    ).fetchone()
    if party is None or row is None or row[0] != party.id:
        raise PublicEventNotFound()
    _, seq, timestamp, size, channel, tags = row
    everything = EventLabel(party.id, PUBLIC_LABEL)
    label_ids = {find_labels(connection, [everything])[everything].id, *parse_tag_ids(tags)}
    if channel is not None:
        label_ids.add(channel)
    connection.execute("DELETE FROM public_event WHERE seq = ?", (seq,))
    delete_label_entries(connection, [LabelEntry(id, float(timestamp), seq) for id in label_ids])
    release_labels(connection, label_ids)
    change_party_usage(connection, party.id, stored=-1, stored_bytes=-size, edition=1)


def find_public_events(
    connection: Connection, publisher: str, wanted: PublicEventFilter, reading: PageReadOptions
) -> ResultPage[PublicEvent] | None:
    """A page of public events; None if it needs more patience."""
    party = find_party(connection, publisher)
    if party is None or not party.stored:
        return make_empty_page()
    groups = [tuple([EventLabel(party.id, PUBLIC_TAG_LABEL, tag) for tag in wanted.tags])] if wanted.tags else []
    if wanted.channel_id is not None:
        groups.append((EventLabel(party.id, CHANNEL_LABEL, wanted.channel_id),))
    search = EventSearch(
        EventLabel(party.id, PUBLIC_LABEL), tuple(groups), wanted.after, wanted.before, newest_first=True
    )
    found = find_events(connection, party, search, reading)
    return None if found is None else ResultPage(tuple(_read_public_events(connection, found[0])), found[1])


def _read_public_events(connection: Connection, seqs: Sequence[int]) -> list[PublicEvent]:
    """Events by their sequence numbers, in that order."""
    columns = "seq, id, tags, timestamp, signature, channel, size"
    rows = {row[0]: row for row in select_rows_in(connection, columns, "FROM public_event WHERE seq IN ({})", seqs)}
    tags = {seq: parse_tag_ids(row[2]) for seq, row in rows.items()}
    texts = read_label_texts(
        connection, {id for seq, row in rows.items() for id in (row[5], *tags[seq]) if id is not None}
    )
    events = read_texts(connection, "public_event", "event", {seq: row[6] for seq, row in rows.items()})
    found = []
    for seq in seqs:
        _, id, _, timestamp, signature, channel, _ = rows[seq]
        own = tuple([texts[tag] for tag in tags[seq]])
        found.append(PublicEvent(id, events[seq], own, float(timestamp), signature, texts.get(channel)))
    return found
