"""
Stored and public events in SQL: saving, tagging, publishing and listing, and their search by labels. Each function
runs inside a transaction of the caller.

A label is a text of some kind that events of an owner have in common. An event has an entry under each of its labels,
in display order, and each label has the number of its entries.

A search for one label is a range of its entries, whose number is known. A search for several reads the entries of the
rarest, and probes each for the others; that, and bounds of time, require counting.

Neighbouring commands of a batch that save events share their statements.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

from mediatord.errors import PublicEventNotFound, QuotaExceeded
from mediatord.protocol.encoding import loads
from mediatord.store.caches import EventPosition, PageCursorCache, PageCursors
from mediatord.store.interfaces.decentrl import (
    DecentrlQuotas,
    EventFilter,
    PageRequest,
    PublicEvent,
    PublicEventFilter,
    ResultPage,
    StoredEvent,
    get_utf8_size,
)
from mediatord.store.sqlite.connection import BatchOperation, StoreConnection, format_placeholders
from mediatord.store.sqlite.decentrl_queries import (
    PartyRow,
    change_party_usage,
    find_parties,
    find_party,
    get_or_create_party,
)

# Kinds of labels as stored. An owner has one label of each of the first three, without a text.
STORED_LABEL, UNPROCESSED_LABEL, PUBLIC_LABEL, TAG_LABEL, PARTICIPANT_LABEL, PUBLIC_TAG_LABEL, CHANNEL_LABEL = range(
    7
)

# CROSS JOIN, so that the query planner keeps the order of the tables.
_SELECT_LABELS = """
    FROM {} w CROSS JOIN label l ON l.owner_id = w.column2 AND l.kind = w.column3 AND l.text = w.column4
"""
# By name, because otherwise the index would not be used.
_DELETE_ENTRIES = """
    WITH gone (label_id, timestamp, seq) AS (VALUES {})
    DELETE FROM labelled WHERE (label_id, timestamp, seq) IN gone
"""
_ADD_LABEL_ITEMS = """
    WITH changed (id, number) AS (VALUES {})
    UPDATE label SET items = items + changed.number FROM changed WHERE label.id = changed.id
"""
_INSERT_LABELS = "INSERT OR ROLLBACK INTO label (owner_id, kind, text, items)"


class EventLabel(NamedTuple):
    """A property that events of one owner may have in common."""

    owner_id: int
    kind: int
    text: str = ""


class LabelRecord(NamedTuple):
    """A label by its number, with the number of its events."""

    id: int
    items: int


class LabelEntry(NamedTuple):
    """Position of an event under a label."""

    label_id: int
    timestamp: float
    seq: int


def find_labels(connection: StoreConnection, labels: Sequence[EventLabel]) -> dict[EventLabel, LabelRecord]:
    """Those of the labels that exist."""
    rows = connection.select_matching_rows("l.id, l.items", _SELECT_LABELS, labels)
    return {labels[number]: LabelRecord(*row) for number, row in rows}


def intern_labels(connection: StoreConnection, events: Mapping[EventLabel, int]) -> dict[EventLabel, int]:
    """Numbers of labels, each with events to be added to it; labels are created as needed."""
    ids = {label: record.id for label, record in find_labels(connection, list(events)).items()}
    connection.execute_values(_ADD_LABEL_ITEMS, [(id, events[label]) for label, id in ids.items()])
    new = [label for label in events if label not in ids]
    numbers = connection.insert_numbered_rows(_INSERT_LABELS, [(*label, events[label]) for label in new])
    return ids | dict(zip(new, numbers, strict=True))


def release_labels(connection: StoreConnection, label_ids: Iterable[int]) -> None:
    """Remove one event from each of these labels; a label without events is deleted."""
    fewer = Counter(label_ids)
    connection.execute_values(_ADD_LABEL_ITEMS, [(id, -number) for id, number in fewer.items()])
    connection.execute_in("DELETE FROM label WHERE items = 0 AND id IN ({})", list(fewer))


def insert_label_entries(connection: StoreConnection, entries: Collection[LabelEntry]) -> None:
    # In the order of the table, so that neighbours are inserted one after another.
    connection.insert_rows("INSERT OR ROLLBACK INTO labelled (label_id, timestamp, seq)", sorted(entries))


def delete_label_entries(connection: StoreConnection, entries: Collection[LabelEntry]) -> None:
    connection.execute_values(_DELETE_ENTRIES, sorted(entries))


def read_label_texts(connection: StoreConnection, label_ids: Collection[int]) -> dict[int, str]:
    """Texts of labels, by their numbers."""
    return dict(connection.select_rows_in("id, text", "FROM label WHERE id IN ({})", list(label_ids)))


def format_tag_ids(label_ids: Iterable[int]) -> str:
    """Tags of an event by number, in order, as they are stored."""
    return " ".join(map(str, label_ids))


def parse_tag_ids(written: str) -> list[int]:
    """Numbers from the result of :func:`format_tag_ids`."""
    return [int(id) for id in written.split()]


# Up to this number sorted ranges are merged as they are read; more are read and then sorted.
_MAX_MERGED_RANGES = 8
# Cursors of lists of more labels than this are not cached.
_MAX_CACHED_LABELS = 64
_FIRST_COUNT_LIMIT = 1_024


@dataclass(frozen=True, slots=True)
class PageReadOptions:
    """
    How a page is read.

    :param patience: approximate number of entries that may be counted, and that may be skipped; None for any number.
    """

    part: PageRequest
    page_cursors: PageCursorCache
    patience: int | None = None


_LabelGroup = tuple[LabelRecord, ...]


def _find_groups(
    connection: StoreConnection, everything: EventLabel, groups: Sequence[Sequence[EventLabel]]
) -> list[_LabelGroup]:
    """
    Groups of labels of which an event has to have one each, the rarest group first; an empty one if nothing matches.

    :param everything: label of all events that are searched.
    """
    records = find_labels(connection, list(dict.fromkeys([everything, *chain(*groups)])))
    if everything not in records:
        return [()]
    found = [tuple([records[label] for label in dict.fromkeys(group) if label in records]) for group in groups]
    # A label that every event has is no condition.
    most = records[everything].items
    telling = [group for group in found if not any(record.items == most for record in group)]
    return sorted(telling, key=lambda group: sum([record.items for record in group])) or [(records[everything],)]


@dataclass(frozen=True, slots=True)
class _EventList:
    """A list of events: those under some labels that are also under one of each of the other groups."""

    records: _LabelGroup
    others: tuple[_LabelGroup, ...]
    after: float | None
    before: float | None
    newest_first: bool

    def count(self, connection: StoreConnection, patience: int | None) -> int | None:
        """Its length; None if that needs more patience."""
        if len(self.records) == 1 and not self.others:
            return self._count_in_time_range(connection, patience)
        if patience is not None and sum([record.items for record in self.records]) > patience:
            return None
        source, parameters = self._source(None)
        # With a limit, because without it SQLite would drop the order, which merging needs.
        query = f"SELECT count(*) FROM ({source} ORDER BY 1, 2 LIMIT -1)"
        return int(connection.select_value(query, parameters))

    def _count_in_time_range(self, connection: StoreConnection, patience: int | None) -> int | None:
        """The entries of the only label between the bounds, counted inside or outside, whichever are fewer."""
        record, (inside, parameters) = self.records[0], self._window(None)
        bounds = ("AND d.timestamp < ?", self.after), ("AND d.timestamp > ?", self.before)
        outside = [(condition, bound) for condition, bound in bounds if bound is not None]
        limit = _FIRST_COUNT_LIMIT
        while outside:
            number = _count_entries(connection, record.id, inside, parameters, limit)
            if number < limit:
                return number
            number = sum([_count_entries(connection, record.id, over, [bound], limit) for over, bound in outside])
            if number < limit:
                return record.items - number
            limit *= 4
            if patience is not None and limit > patience:
                return None
        return record.items

    def page(
        self, connection: StoreConnection, reading: PageReadOptions, total: int, cursors: PageCursors
    ) -> list[int] | None:
        """A slice of it, read from the nearest known position; None if that needs more patience."""
        part = reading.part
        number = min(part.limit, total - part.offset)
        if number <= 0:
            return []
        end = part.offset + number
        known, place = cursors.before(part.offset)
        if reading.patience is not None and min(part.offset - known, total - end) > reading.patience:
            return None
        # After a long scan the event before the page is read as well, as the cursor for the same page.
        lead = int(part.offset > known)
        if total - end < part.offset - known:
            seqs, first, last = self._read(connection, not self.newest_first, None, number + lead, total - end)
            first, last, seqs = last, first, seqs[::-1]
        else:
            seqs, first, last = self._read(
                connection, self.newest_first, place, number + lead, part.offset - known - lead
            )
        cursors.add(end, (last, seqs[-1]))
        if lead:
            cursors.add(part.offset, (first, seqs[0]))
        return seqs[lead:]

    def _read(
        self, connection: StoreConnection, newest_first: bool, place: EventPosition | None, limit: int, offset: int
    ) -> tuple[list[int], float, float]:
        """A part of it from either end, with its first and last position."""
        source, parameters = self._source(place)
        order = "1 DESC, 2 DESC" if newest_first else "1, 2"
        query = f"""
            SELECT CAST(json_group_array(seq) AS BLOB), min(timestamp), max(timestamp)
            FROM ({source} ORDER BY {order} LIMIT ? OFFSET ?)
        """
        ((text, earliest, latest),) = connection.execute(query, (*parameters, limit, offset)).fetchall()
        seqs: list[int] = loads(text)
        return (seqs, latest, earliest) if newest_first else (seqs, earliest, latest)

    def _source(self, place: EventPosition | None) -> tuple[str, list[Any]]:
        """Query for times and sequence numbers of all of it, or of the part behind a position."""
        window, within = self._window(place)
        for group in self.others:
            window += f"""
                AND EXISTS (
                    SELECT 1 FROM labelled p
                    WHERE p.label_id IN ({format_placeholders(len(group))})
                    AND p.timestamp = d.timestamp AND p.seq = d.seq
                )
            """
            within += [record.id for record in group]
        ids = [record.id for record in self.records]
        if len(ids) > _MAX_MERGED_RANGES:
            marks = format_placeholders(len(ids))
            select = f"SELECT DISTINCT d.timestamp, d.seq FROM labelled d WHERE d.label_id IN ({marks})"
            return f"{select} {window}", [*ids, *within]
        select = f"SELECT d.timestamp, d.seq FROM labelled d WHERE d.label_id = ? {window}"
        return " UNION ".join([select] * len(ids)), [value for id in ids for value in (id, *within)]

    def _window(self, place: EventPosition | None) -> tuple[str, list[Any]]:
        """Condition for events between the bounds, or behind a position if they are read to the end."""
        if place is not None:
            return f"AND (d.timestamp, d.seq) {'<' if self.newest_first else '>'} (?, ?)", [*place]
        terms = [("AND d.timestamp >= ?", self.after), ("AND d.timestamp <= ?", self.before)]
        given = [(term, bound) for term, bound in terms if bound is not None]
        return " ".join([term for term, _ in given]), [bound for _, bound in given]


def _count_entries(
    connection: StoreConnection, label_id: int, condition: str, parameters: Sequence[float], limit: int
) -> int:
    """Number of entries of a label that meet a condition, up to a limit."""
    query = f"SELECT count(*) FROM (SELECT 1 FROM labelled d WHERE d.label_id = ? {condition} LIMIT ?)"
    return int(connection.select_value(query, (label_id, *parameters, limit)))


_INSERT_STORED_EVENTS = """
    INSERT OR ROLLBACK INTO stored_event (
        id, owner_id, timestamp, sender, recipient, contract_id, size, processed, tags_size, tags
    )
"""
_INSERT_PAYLOADS = "INSERT OR ROLLBACK INTO stored_payload (seq, payload)"
STORED_USAGE = ("stored", "stored_bytes", "edition")


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
        parties = find_parties(connection, list({one.owner: None for one in operations}))
        growth = dict.fromkeys(parties, (0, 0))
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
        change_party_usage(connection, STORED_USAGE, [(id, *growth[owner], 1) for owner, id in ids.items()])
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
    everything, tag = kinds
    wanted_labels = [[EventLabel(party.id, tag, text) for text in wanted.tags]] if wanted.tags else []
    wanted_labels += [[EventLabel(party.id, kind, text)] for kind, text in conditions if text is not None]
    groups = _find_groups(connection, EventLabel(party.id, everything), wanted_labels)
    if not all(groups):
        return [], 0
    newest_first = everything == PUBLIC_LABEL
    listing = _EventList(groups[0], tuple(groups[1:]), wanted.after, wanted.before, newest_first)
    small = sum(map(len, groups)) <= _MAX_CACHED_LABELS
    cursors = reading.page_cursors.of((party.id, listing), party.edition) if small else PageCursors(party.edition)
    if cursors.total is None:
        cursors.total = listing.count(connection, reading.patience)
        if cursors.total is None:
            return None
    seqs = listing.page(connection, reading, cursors.total, cursors)
    return None if seqs is None else (seqs, cursors.total)


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
    old_entries: set[LabelEntry] = set()
    new_entries: set[LabelEntry] = set()
    changed: list[tuple[int, int, str]] = []
    for seq, id_, timestamp, processed, _, written in rows:
        new_ids = [ids[label] for label in new[seq]]
        old_ids = [*parse_tag_ids(written), *([] if processed else [label.id for label in unprocessed])]
        new_entries |= {LabelEntry(label_id, float(timestamp), seq) for label_id in new_ids}
        old_entries |= {LabelEntry(label_id, float(timestamp), seq) for label_id in old_ids}
        changed.append((seq, get_utf8_size(*wanted[id_]), format_tag_ids(new_ids)))
    if changed:
        # New entries first, so that a label in both is not deleted in between.
        insert_label_entries(connection, new_entries - old_entries)
        delete_label_entries(connection, old_entries - new_entries)
        release_labels(connection, [entry.label_id for entry in old_entries])
        connection.execute_values(_UPDATE_TAGS, changed)
        change_party_usage(connection, STORED_USAGE, [(party.id, 0, growth, 1)])


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
    change_party_usage(connection, STORED_USAGE, [(owner_id, 1, size + tags_size, 1)])


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
    change_party_usage(connection, STORED_USAGE, [(party.id, -1, -size, 1)])
