"""Public events in MongoDB."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bson import Timestamp

from mediatord.errors import OverQuota, PublicEventNotFound
from mediatord.interfaces.decentrl import Caps, Found, PublicEvent, PublicFilter, Slice
from mediatord.store.mongo.decentrl_commands import Change, Scene
from mediatord.store.mongo.decentrl_events import find_events
from mediatord.store.mongo.decentrl_keys import Kind, label_of, size_of
from mediatord.store.mongo.decentrl_lists import Memory
from mediatord.store.mongo.decentrl_pages import Reading, nothing
from mediatord.store.mongo.decentrl_parties import exchanging, of_party
from mediatord.store.mongo.decentrl_schema import PUBLIC, Table
from mediatord.store.mongo.decentrl_search import Search, group_of
from mediatord.store.mongo.requests import Document, Request
from mediatord.store.mongo.server import inserting


@dataclass(frozen=True, slots=True)
class Publishing:
    """To keep an event for everybody."""

    did: str
    event: PublicEvent
    caps: Caps

    @property
    def creates(self) -> tuple[Table, Sequence[str]]:
        return PUBLIC, [self.event.id]

    @property
    def size(self) -> int:
        return size_of(self.event.event, *self.event.tags)

    def asks(self) -> list[Request]:
        return []

    async def decide(self, scene: Scene) -> Change[None]:
        """:raise OverQuota: it would be one too many."""
        event, party = self.event, scene.party
        document = document_of(event, party.key)
        if not party.has_room(self.caps, 1, document["size"] + document["tags_size"]):
            raise OverQuota()
        payload = payload_of(event)
        return Change([*exchanging(PUBLIC, party, come=[document]), *inserting(PUBLIC.payloads, [payload])], None)


def document_of(event: PublicEvent, key: bytes) -> Document:
    """
    An event without what is long in it, which :func:`payload_of` has.

    :param key: of its publisher.
    """
    channel = [] if event.channel_id is None else [label_of(key, Kind.CHANNEL, event.channel_id)]
    return {
        "_id": event.id,
        "party": key,
        "labels": [label_of(key, Kind.ALL), *channel, *group_of(key, Kind.TAG, *event.tags)],
        "at": float(event.timestamp),
        "tags": list(event.tags),
        "tags_size": size_of(*event.tags),
        "size": size_of(event.event),
        "seq": Timestamp(0, 0),
    }


def payload_of(event: PublicEvent) -> Document:
    """What is long in an event, and what nobody looks for."""
    return {
        "_id": event.id,
        "event": event.event,
        "signature": event.event_signature,
        "channel": event.channel_id,
    }


@dataclass(frozen=True, slots=True)
class Unpublishing:
    """To take an event back."""

    did: str
    event_id: str

    @property
    def creates(self) -> None:
        """Nothing."""

    @property
    def size(self) -> int:
        return 0

    def asks(self) -> list[Request]:
        return [of_party(PUBLIC, self.did, [self.event_id])]

    async def decide(self, scene: Scene) -> Change[None]:
        """:raise PublicEventNotFound: the publisher has none with this id."""
        (found,) = scene.found
        if not found:
            raise PublicEventNotFound()
        return Change(exchanging(PUBLIC, scene.party, gone=found), None)


async def public_events(
    reading: Reading, memory: Memory, publisher: str, wanted: PublicFilter, part: Slice
) -> Found[PublicEvent]:
    """:raise TooLarge: they are more than a slice may have."""
    party = await reading.party(publisher)
    if not party.published:
        return nothing()
    groups = []
    if wanted.tags:
        groups.append(group_of(party.key, Kind.TAG, *wanted.tags))
    if wanted.channel_id is not None:
        groups.append(group_of(party.key, Kind.CHANNEL, wanted.channel_id))
    everything = label_of(party.key, Kind.ALL)
    search = Search(everything, tuple(groups), wanted.after, wanted.before, newest_first=True)
    found, total = await find_events(reading, memory, PUBLIC, party, search, part)
    return Found(tuple([_event(one) for one in found]), total)


def _event(document: Document) -> PublicEvent:
    return PublicEvent(
        id=document["_id"],
        event=document["event"],
        tags=tuple(document["tags"]),
        timestamp=document["at"],
        event_signature=document["signature"],
        channel_id=document["channel"],
    )
