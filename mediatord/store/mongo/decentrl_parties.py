"""The DIDs of the Decentrl half: until when they are registered, and how much is kept for them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace

from bson import ObjectId

from mediatord.interfaces.decentrl import Caps
from mediatord.store.mongo.cursors import finding
from mediatord.store.mongo.decentrl_keys import key_of
from mediatord.store.mongo.decentrl_schema import PARTIES, Table
from mediatord.store.mongo.requests import Document, Request, deleting, inserting, updating


@dataclass(frozen=True, slots=True)
class Party:
    """
    A DID, and how much is kept for it.

    :param key: what stands for it in other documents.
    :param known: whether it has a document.
    :param registered_until: the end of the registration that lasts longest, be that over or not.
    :param stored: stored events, `published` being public ones, and `archive_bytes` those of both.
    :param edition: another one after every change of its stored or public events, or registrations.
    """

    did: str
    key: bytes
    known: bool = False
    registered_until: float = 0.0
    contracts: int = 0
    requests: int = 0
    pending: int = 0
    pending_bytes: int = 0
    stored: int = 0
    published: int = 0
    archive_bytes: int = 0
    edition: ObjectId | None = None

    @property
    def is_unused(self) -> bool:
        """Whether nothing is kept for it."""
        return not (self.contracts or self.requests or self.pending or self.stored or self.published)

    def has_room(self, caps: Caps, items: int, size: int) -> bool:
        """Whether so much more may be stored or published; what is less than before is never too much."""
        if items > 0 and self.stored + self.published + items > caps.stored:
            return False
        return size <= 0 or self.archive_bytes + size <= caps.stored_bytes

    def registered(self, until: float) -> Party:
        """As it is with another registration."""
        return replace(self, registered_until=max(self.registered_until, until), edition=ObjectId())

    def resized(self, size: int) -> Party:
        """As it is with so many more bytes of events, or less."""
        return replace(self, archive_bytes=self.archive_bytes + size, edition=ObjectId())

    def counted(self, table: Table, number: int, size: int) -> Party:
        """As it is with so many more documents, or less."""
        counters = {table.counter: number, table.bytes: size} if table.bytes else {table.counter: number}
        sums = {name: getattr(self, name) + more for name, more in counters.items()}
        return replace(self, **sums, edition=ObjectId() if table.payloads else self.edition)

    def values(self) -> Document:
        """What its document says."""
        values = {name: getattr(self, name) for name in _NAMES}
        # In indexes of those for whom it is so, which is said of the others by nothing.
        marks = {"waited_for": self.pending > 0, "unused": self.is_unused}
        return values | {name: True for name, holds in marks.items() if holds}


_NAMES = tuple([field.name for field in fields(Party) if field.name not in ("key", "known")])


def asking_for(*dids: str) -> Request:
    """For the documents of parties."""
    return finding(PARTIES, {"_id": {"$in": [key_of(did) for did in dict.fromkeys(dids)]}}, hint="_id_")


def party_among(documents: Iterable[Document], did: str) -> Party:
    """The one with this DID, for whom nothing is kept if it is not there."""
    key = key_of(did)
    for document in documents:
        if document["_id"] == key:
            return Party(key=key, known=True, **{name: document[name] for name in _NAMES})
    return Party(did, key)


def of_party(table: Table, did: str, ids: Iterable[str], projection: Document | None = None) -> Request:
    """For those of these documents that are a party's, in order of arrival; for what is counted of them and more."""
    filter = {"_id": {"$in": list(dict.fromkeys(ids))}, "party": key_of(did)}
    fields = {"size": 1, "tags_size": 1, **(projection or {})}
    return finding(table.name, filter, sort={"seq": 1}, projection=fields, hint="_id_")


def exchanging(
    table: Table, party: Party, *, come: Sequence[Document] = (), gone: Sequence[Document] = ()
) -> list[Request]:
    """
    Change what is kept for a party.

    :param come: documents to be inserted, but not their payloads if those are in a collection of their own.
    :param gone: documents to be deleted, with `_id` and what is counted.
    """
    if not come and not gone:
        return []
    changed = party.counted(table, len(come) - len(gone), _size(come) - _size(gone))
    requests = changing(party, changed)
    if gone:
        those = {"_id": {"$in": [document["_id"] for document in gone]}}
        requests += deleting(table.name, those)
        requests += deleting(table.payloads, those) if table.payloads else []
    return [*requests, *inserting(table.name, come)]


def changing(before: Party, after: Party) -> list[Request]:
    """Write down what is different. Who has read the same before and changes it too is in the way of that."""
    old, new = before.values(), after.values()
    if not before.known:
        return inserting(PARTIES, [{"_id": after.key, **new}])
    changes: Document = {"$set": {name: value for name, value in new.items() if old.get(name) != value}}
    over = {name: True for name in old if name not in new}
    if over:
        changes["$unset"] = over
    return updating(PARTIES, [{"q": {"_id": after.key}, "u": changes}])


def _size(documents: Sequence[Document]) -> int:
    """Of those that have one."""
    return sum([document.get("size", 0) + document.get("tags_size", 0) for document in documents])
