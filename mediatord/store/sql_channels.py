"""Public events in SQL; each function runs inside a transaction of the caller."""

from __future__ import annotations

from collections.abc import Sequence
from sqlite3 import Connection

from mediatord.errors import OverQuota, PublicEventNotFound
from mediatord.interfaces.decentrl import Caps, Found, PublicEvent, PublicFilter
from mediatord.store.sql_archive import has_room
from mediatord.store.sql_labels import (
    CHANNEL,
    PUBLIC,
    PUBLIC_TAG,
    Entry,
    Label,
    delete_entries,
    discount,
    find_shelves,
    insert_entries,
    intern,
    read_tags,
    texts_of,
    write_tags,
)
from mediatord.store.sql_parties import NOBODY, change_holding, enter_party, find_party
from mediatord.store.sql_rows import gather_in, gather_texts, nothing, size_of
from mediatord.store.sql_search import Reading, Search, find_events

_INSERT = """
    INSERT OR ROLLBACK INTO public_event (id, owner_id, timestamp, channel, tags_size, tags, signature, size, event)
    VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)
"""


def publish(connection: Connection, publisher: str, event: PublicEvent, caps: Caps) -> None:
    """:raise OverQuota: it would be one too many."""
    size, tags_size = size_of(event.event), size_of(*event.tags)
    if not has_room(find_party(connection, publisher) or NOBODY, caps, 1, size + tags_size):
        raise OverQuota()
    party = enter_party(connection, publisher)
    tags = [Label(party.id, PUBLIC_TAG, tag) for tag in event.tags]
    channel = None if event.channel_id is None else Label(party.id, CHANNEL, event.channel_id)
    labels = {Label(party.id, PUBLIC), *tags}
    ids = intern(connection, dict.fromkeys(labels if channel is None else {*labels, channel}, 1))
    seq = connection.execute(
        _INSERT,
        (
            event.id,
            party.id,
            repr(float(event.timestamp)),
            None if channel is None else ids[channel],
            tags_size,
            write_tags([ids[tag] for tag in tags]),
            event.event_signature,
            size,
            event.event,
        ),
    ).lastrowid
    assert seq is not None
    insert_entries(connection, [Entry(id, event.timestamp, seq) for id in ids.values()])
    change_holding(connection, party.id, stored=1, stored_bytes=size + tags_size, edition=1)


def unpublish(connection: Connection, publisher: str, event_id: str) -> None:
    """:raise PublicEventNotFound: the publisher has none with this id."""
    party = find_party(connection, publisher)
    row = connection.execute(
        "SELECT owner_id, seq, timestamp, size + tags_size, channel, tags FROM public_event WHERE id = ?", (event_id,)
    ).fetchone()
    if party is None or row is None or row[0] != party.id:
        raise PublicEventNotFound()
    _, seq, timestamp, size, channel, tags = row
    everything = Label(party.id, PUBLIC)
    label_ids = {find_shelves(connection, [everything])[everything].id, *read_tags(tags)}
    if channel is not None:
        label_ids.add(channel)
    connection.execute("DELETE FROM public_event WHERE seq = ?", (seq,))
    delete_entries(connection, [Entry(id, float(timestamp), seq) for id in label_ids])
    discount(connection, label_ids)
    change_holding(connection, party.id, stored=-1, stored_bytes=-size, edition=1)


def public_events(
    connection: Connection, publisher: str, wanted: PublicFilter, reading: Reading
) -> Found[PublicEvent] | None:
    """None if it takes more patience."""
    party = find_party(connection, publisher)
    if party is None or not party.stored:
        return nothing()
    groups = [tuple([Label(party.id, PUBLIC_TAG, tag) for tag in wanted.tags])] if wanted.tags else []
    if wanted.channel_id is not None:
        groups.append((Label(party.id, CHANNEL, wanted.channel_id),))
    search = Search(Label(party.id, PUBLIC), tuple(groups), wanted.after, wanted.before, newest_first=True)
    found = find_events(connection, party, search, reading)
    return None if found is None else Found(tuple(_read(connection, found[0])), found[1])


def _read(connection: Connection, seqs: Sequence[int]) -> list[PublicEvent]:
    """Events by their places in the order of arrival, in the order of those."""
    columns = "seq, id, tags, timestamp, signature, channel, size"
    rows = {row[0]: row for row in gather_in(connection, columns, "FROM public_event WHERE seq IN ({})", seqs)}
    tags = {seq: read_tags(row[2]) for seq, row in rows.items()}
    texts = texts_of(connection, {id for seq, row in rows.items() for id in (row[5], *tags[seq]) if id is not None})
    events = gather_texts(connection, "public_event", "event", {seq: row[6] for seq, row in rows.items()})
    found = []
    for seq in seqs:
        _, id, _, timestamp, signature, channel, _ = rows[seq]
        own = tuple([texts[tag] for tag in tags[seq]])
        found.append(PublicEvent(id, events[seq], own, float(timestamp), signature, texts.get(channel)))
    return found
