"""
Stored and public events in SQL: saving, tagging, publishing and listing. Each function runs inside a transaction of
the caller.

Neighbouring commands of a batch that save events share their statements.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from mediatord.errors import PublicEventNotFound, QuotaExceeded
from mediatord.store.interfaces.decentrl import (
    DecentrlQuotas,
    EventFilter,
    PublicEvent,
    PublicEventFilter,
    ResultPage,
    StoredEvent,
    get_utf8_size,
)
from mediatord.store.sqlite.connection import BatchOperation, StoreConnection
from mediatord.store.sqlite.decentrl_queries import (
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
class SaveEventsOperation(BatchOperation):
    """
    Storage of events as an operation of a batch.

    :param size: bytes of their payloads and tags.
    """

    owner: str
    events: tuple[StoredEvent, ...]
    size: int
    caps: DecentrlQuotas

    @staticmethod
    def run_batch(connection: StoreConnection, operations: Sequence[SaveEventsOperation]) -> list[Any]:
        owners = dict.fromkeys([one.owner for one in operations])
        parties = dict.fromkeys(owners, PartyRow()) | find_parties(connection, owners)
        growth = {owner: (0, 0) for owner in owners}
        outcomes: list[QuotaExceeded | None] = []
        for one in operations:
            items, size = growth[one.owner]
            items, size = items + len(one.events), size + one.size
            fits = fits_quota(parties[one.owner], one.caps, items, size)
            if fits:
                growth[one.owner] = items, size
            outcomes.append(None if fits else QuotaExceeded())
        ids = {owner: get_or_create_party(connection, owner) for owner, (items, _) in growth.items() if items}
        saved = [one for one, refusal in zip(operations, outcomes, strict=True) if refusal is None]
        insert_stored_events(
            connection,
            [
                NewStoredEvent(event, ids[one.owner], event.sender_did == one.owner)
                for one in saved
                for event in one.events
            ],
        )
        add_stored_usage(connection, [(id, *growth[owner]) for owner, id in ids.items()])
        return outcomes


def find_stored_events(
    connection: StoreConnection, owner: str, wanted: EventFilter, reading: PageReadOptions
) -> ResultPage[StoredEvent] | None:
    """A page of stored events; None if it needs more patience."""
    conditions = [
        (PARTICIPANT_LABEL, wanted.participant),
        (UNPROCESSED_LABEL, "" if wanted.unprocessed_only else None),
    ]
    found = _find_page(connection, owner, (STORED_LABEL, TAG_LABEL), wanted, conditions, reading)
    if found is None:
        return None
    columns = "sender, recipient, id, timestamp, contract_id"
    rows = _read_events(connection, found[0], "stored_event", columns, ("stored_payload", "payload"))
    events = [
        StoredEvent(id, texts[sender], texts[recipient], payload, tags, float(timestamp), contract_id)
        for (sender, recipient, id, timestamp, contract_id), payload, tags, texts in rows
    ]
    return ResultPage(tuple(events), found[1])


def find_public_events(
    connection: StoreConnection, publisher: str, wanted: PublicEventFilter, reading: PageReadOptions
) -> ResultPage[PublicEvent] | None:
    """A page of public events; None if it needs more patience."""
    conditions = [(CHANNEL_LABEL, wanted.channel_id)]
    found = _find_page(connection, publisher, (PUBLIC_LABEL, PUBLIC_TAG_LABEL), wanted, conditions, reading)
    if found is None:
        return None
    columns = "channel, NULL, id, timestamp, signature"
    rows = _read_events(connection, found[0], "public_event", columns, ("public_event", "event"))
    events = [
        PublicEvent(id, event, tags, float(timestamp), signature, texts.get(channel))
        for (channel, _, id, timestamp, signature), event, tags, texts in rows
    ]
    return ResultPage(tuple(events), found[1])


def _find_page(
    connection: StoreConnection,
    owner: str,
    kinds: tuple[int, int],
    wanted: EventFilter | PublicEventFilter,
    conditions: Sequence[tuple[int, str | None]],
    reading: PageReadOptions,
) -> tuple[list[int], int] | None:
    """
    Sequence numbers of the events of a page, and the number of all matches; None if it needs more patience.

    :param kinds: of the label that all events have, and of tags.
    :param conditions: kinds and texts of labels; those without a text do not count.
    """
    party = find_party(connection, owner)
    if not party.stored:
        return [], 0
    everything, tag = kinds
    groups = [tuple([EventLabel(party.id, tag, text) for text in wanted.tags])] if wanted.tags else []
    groups += [(EventLabel(party.id, kind, text),) for kind, text in conditions if text is not None]
    is_public = everything == PUBLIC_LABEL
    search = EventSearch(EventLabel(party.id, everything), tuple(groups), wanted.after, wanted.before, is_public)
    return find_events(connection, party, search, reading)


def _read_events(
    connection: StoreConnection, seqs: Sequence[int], table: str, columns: str, text_column: tuple[str, str]
) -> Iterator[tuple[list[Any], str, tuple[str, ...], dict[int, str]]]:
    """
    Events by their sequence numbers, in that order: other columns, payload, tags, and texts of labels.

    :param columns: the first two are labels.
    :param text_column: table and column of the payload.
    """
    source = f"FROM {table} WHERE seq IN ({{}})"
    rows = {row[0]: row[1:] for row in connection.select_rows_in(f"seq, size, tags, {columns}", source, seqs)}
    tags = {seq: parse_tag_ids(row[1]) for seq, row in rows.items()}
    labels = {id for seq, row in rows.items() for id in (*row[2:4], *tags[seq]) if id is not None}
    texts = read_label_texts(connection, labels)
    payloads = connection.read_texts(*text_column, {seq: row[0] for seq, row in rows.items()})
    for seq in seqs:
        yield rows[seq][2:], payloads[seq], tuple([texts[tag] for tag in tags[seq]]), texts


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


def insert_stored_events(connection: StoreConnection, arrivals: Collection[NewStoredEvent]) -> None:
    """Insert events without counting them for their owners."""
    if not arrivals:
        return
    labels = [one.labels() for one in arrivals]
    ids = intern_labels(connection, Counter([label for some in labels for label in some]))
    seqs = connection.insert_numbered_rows(_INSERT_STORED_EVENTS, [one.row(ids) for one in arrivals])
    placed = list(zip(seqs, arrivals, labels, strict=True))
    connection.insert_rows(_INSERT_PAYLOADS, [(seq, one.event.payload) for seq, one, _ in placed])
    insert_label_entries(
        connection, [LabelEntry(ids[label], one.event.timestamp, seq) for seq, one, some in placed for label in some]
    )


def add_stored_usage(connection: StoreConnection, counted: Sequence[tuple[int, int, int]]) -> None:
    """Add events and bytes to owners, given by their numbers."""
    connection.insert_rows(_INSERT_STORED_USAGE, counted, _ADD_STORED_USAGE)


_FIND_TAGGED_EVENTS = "FROM stored_event WHERE +owner_id = ? AND id IN ({})"
_UPDATE_TAGS = """
    WITH changed (seq, size, tags) AS (VALUES {})
    UPDATE stored_event SET processed = 1, tags_size = changed.size, tags = changed.tags
    FROM changed WHERE stored_event.seq = changed.seq
"""


def update_tags(
    connection: StoreConnection, owner: str, tags: Sequence[tuple[str, tuple[str, ...]]], caps: DecentrlQuotas
) -> None:
    """
    Replace the tags of events.

    :raise QuotaExceeded: they would exceed the quota.
    """
    party, wanted = find_party(connection, owner), dict(tags)
    columns = "seq, id, timestamp, processed, tags_size, tags"
    rows = connection.select_rows_in(columns, _FIND_TAGGED_EVENTS, list(wanted), party.id)
    growth = sum([get_utf8_size(*wanted[id]) - size for _, id, _, _, size, _ in rows])
    if not fits_quota(party, caps, 0, growth):
        raise QuotaExceeded()
    new = {row[0]: [EventLabel(party.id, TAG_LABEL, tag) for tag in wanted[row[1]]] for row in rows}
    ids = intern_labels(connection, Counter([label for labels in new.values() for label in set(labels)]))
    unprocessed = find_labels(connection, [EventLabel(party.id, UNPROCESSED_LABEL)]).values()
    coming: list[LabelEntry] = []
    going: list[LabelEntry] = []
    released: list[int] = []
    changed: list[tuple[int, int, str]] = []
    for seq, id_, timestamp, processed, _, written in rows:
        old, tag_ids = set(parse_tag_ids(written)), [ids[label] for label in new[seq]]
        marks = [] if processed else [label.id for label in unprocessed]
        coming += [LabelEntry(label_id, float(timestamp), seq) for label_id in {*tag_ids} - old]
        going += [LabelEntry(label_id, float(timestamp), seq) for label_id in [*(old - {*tag_ids}), *marks]]
        released += [*old, *marks]
        changed.append((seq, get_utf8_size(*wanted[id_]), format_tag_ids(tag_ids)))
    if changed:
        # New entries first, so that a label in both is not deleted in between.
        insert_label_entries(connection, coming)
        delete_label_entries(connection, going)
        release_labels(connection, released)
        connection.execute_values(_UPDATE_TAGS, changed)
        change_party_usage(connection, party.id, stored_bytes=growth, edition=1)


def publish_event(connection: StoreConnection, publisher: str, event: PublicEvent, caps: DecentrlQuotas) -> None:
    """
    Insert a public event.

    :raise QuotaExceeded: it would exceed the quota.
    """
    size, tags_size = get_utf8_size(event.event), get_utf8_size(*event.tags)
    if not fits_quota(find_party(connection, publisher), caps, 1, size + tags_size):
        raise QuotaExceeded()
    owner_id = get_or_create_party(connection, publisher)
    tags = [EventLabel(owner_id, PUBLIC_TAG_LABEL, tag) for tag in event.tags]
    channel = None if event.channel_id is None else EventLabel(owner_id, CHANNEL_LABEL, event.channel_id)
    labels = {EventLabel(owner_id, PUBLIC_LABEL), *tags}
    ids = intern_labels(connection, dict.fromkeys(labels if channel is None else {*labels, channel}, 1))
    time, tag_ids = repr(float(event.timestamp)), format_tag_ids([ids[tag] for tag in tags])
    channel_id = None if channel is None else ids[channel]
    (seq,) = connection.insert_numbered_rows(
        """
        INSERT OR ROLLBACK INTO public_event (
            id, owner_id, timestamp, channel, tags_size, tags, signature, size, event
        )
        """,
        [(event.id, owner_id, time, channel_id, tags_size, tag_ids, event.event_signature, size, event.event)],
    )
    insert_label_entries(connection, [LabelEntry(id, event.timestamp, seq) for id in ids.values()])
    change_party_usage(connection, owner_id, stored=1, stored_bytes=size + tags_size, edition=1)


def unpublish_event(connection: StoreConnection, publisher: str, event_id: str) -> None:
    """
    Delete a public event.

    :raise PublicEventNotFound: the publisher has none with this id.
    """
    party = find_party(connection, publisher)
    row = connection.execute(
        """
        SELECT seq, timestamp, size + tags_size, channel, tags FROM public_event WHERE id = ? AND +owner_id = ?
        """,
        (event_id, party.id),
    ).fetchone()
    if row is None:
        raise PublicEventNotFound()
    seq, timestamp, size, channel, tags = row
    everything = EventLabel(party.id, PUBLIC_LABEL)
    label_ids = {find_labels(connection, [everything])[everything].id, channel, *parse_tag_ids(tags)} - {None}
    connection.execute("DELETE FROM public_event WHERE seq = ?", (seq,))
    delete_label_entries(connection, [LabelEntry(id, float(timestamp), seq) for id in label_ids])
    release_labels(connection, label_ids)
    change_party_usage(connection, party.id, stored=-1, stored_bytes=-size, edition=1)
