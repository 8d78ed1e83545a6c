"""Events that identities keep for themselves, in MongoDB."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bson import Timestamp

from mediatord.errors import OverQuota
from mediatord.interfaces.decentrl import Caps, EventFilter, Found, Slice, StoredEvent
from mediatord.store.mongo.decentrl_commands import Change, Scene
from mediatord.store.mongo.decentrl_events import find_events
from mediatord.store.mongo.decentrl_keys import Kind, label_of, size_of
from mediatord.store.mongo.decentrl_lists import Memory
from mediatord.store.mongo.decentrl_pages import Reading, nothing
from mediatord.store.mongo.decentrl_parties import changing, exchanging, of_party
from mediatord.store.mongo.decentrl_schema import STORED, Table
from mediatord.store.mongo.decentrl_search import Search, group_of
from mediatord.store.mongo.requests import Document, Request
from mediatord.store.mongo.server import inserting, updating

# Labels that an event keeps, processed or not, come first: of all, of its sender and of its recipient.
_LASTING = 3


@dataclass(frozen=True, slots=True)
class Saving:
    """To keep events for their owner."""

    did: str
    events: tuple[StoredEvent, ...]
    caps: Caps

    @property
    def creates(self) -> tuple[Table, Sequence[str]]:
        return STORED, [event.id for event in self.events]

    @property
    def size(self) -> int:
        return sum([size_of(event.payload, *event.tags) for event in self.events])

    def asks(self) -> list[Request]:
        return []

    async def decide(self, scene: Scene) -> Change[None]:
        """:raise OverQuota: they would be too much."""
        party = scene.party
        documents = [document_of(event, party.key, processed=event.sender_did == self.did) for event in self.events]
        size = sum([document["size"] + document["tags_size"] for document in documents])
        if not party.has_room(self.caps, len(documents), size):
            raise OverQuota()
        payloads = [payload_of(event) for event in self.events]
        return Change([*exchanging(STORED, party, come=documents), *inserting(STORED.payloads, payloads)], None)


def document_of(event: StoredEvent, key: bytes, *, processed: bool) -> Document:
    """
    An event without what is long in it, which :func:`payload_of` has.

    :param key: of its owner.
    """
    return {
        "_id": event.id,
        "party": key,
        "labels": [
            *_labels(event, key),
            *([] if processed else _labels(event, key, unprocessed=True)),
        ],
        "at": float(event.timestamp),
        "tags": list(event.tags),
        "tags_size": size_of(*event.tags),
        "size": size_of(event.payload),
        "seq": Timestamp(0, 0),
    }


def payload_of(event: StoredEvent) -> Document:
    """What is long in an event, and what nobody looks for."""
    return {
        "_id": event.id,
        "sender_did": event.sender_did,
        "recipient_did": event.recipient_did,
        "contract_id": event.contract_id,
        "payload": event.payload,
    }


def _labels(event: StoredEvent, key: bytes, *, unprocessed: bool = False) -> list[bytes]:
    people = [event.sender_did, event.recipient_did]
    return [
        label_of(key, Kind.ALL, unprocessed=unprocessed),
        *[label_of(key, Kind.PARTICIPANT, did, unprocessed=unprocessed) for did in people],
        *group_of(key, Kind.TAG, *event.tags, unprocessed=unprocessed),
    ]


@dataclass(frozen=True, slots=True)
class Tagging:
    """To give events of an owner new tags."""

    did: str
    tags: dict[str, tuple[str, ...]]
    caps: Caps

    @property
    def creates(self) -> None:
        """Nothing."""

    @property
    def size(self) -> int:
        return sum([size_of(*tags) for tags in self.tags.values()])

    def asks(self) -> list[Request]:
        return [of_party(STORED, self.did, self.tags, {"labels": {"$slice": _LASTING}})]

    async def decide(self, scene: Scene) -> Change[None]:
        """:raise OverQuota: they would be too much."""
        (found,) = scene.found
        party = scene.party
        growth = sum([size_of(*self.tags[one["_id"]]) - one["tags_size"] for one in found])
        if not party.has_room(self.caps, 0, growth):
            raise OverQuota()
        if not found:
            return Change((), None)
        updates = [{"q": {"_id": one["_id"]}, "u": {"$set": self._changed(one, party.key)}} for one in found]
        return Change([*changing(party, party.resized(growth)), *updating(STORED.name, updates)], None)

    def _changed(self, document: Document, key: bytes) -> Document:
        tags = self.tags[document["_id"]]
        return {
            "labels": [*document["labels"], *group_of(key, Kind.TAG, *tags)],
            "tags": list(tags),
            "tags_size": size_of(*tags),
        }


async def events(
    reading: Reading, memory: Memory, owner: str, wanted: EventFilter, part: Slice
) -> Found[StoredEvent]:
    """:raise TooLarge: their payloads are more than a slice may have."""
    party = await reading.party(owner)
    if not party.stored:
        return nothing()
    key, unprocessed = party.key, wanted.unprocessed_only
    groups = []
    if wanted.tags:
        groups.append(group_of(key, Kind.TAG, *wanted.tags, unprocessed=unprocessed))
    if wanted.participant is not None:
        groups.append(group_of(key, Kind.PARTICIPANT, wanted.participant, unprocessed=unprocessed))
    if unprocessed and not groups:
        groups.append(group_of(key, Kind.ALL, "", unprocessed=True))
    search = Search(label_of(key, Kind.ALL), tuple(groups), wanted.after, wanted.before)
    found, total = await find_events(reading, memory, STORED, party, search, part)
    return Found(tuple([_event(one) for one in found]), total)


def _event(document: Document) -> StoredEvent:
    return StoredEvent(
        id=document["_id"],
        sender_did=document["sender_did"],
        recipient_did=document["recipient_did"],
        payload=document["payload"],
        tags=tuple(document["tags"]),
        timestamp=document["at"],
        contract_id=document["contract_id"],
    )
