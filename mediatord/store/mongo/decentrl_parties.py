"""
What stands for texts of the Decentrl half in its indexes, and how long texts are.

The DIDs of the Decentrl half: until when they are registered, and how much is kept for them.

Slices of what is kept for a party.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum
from hashlib import blake2b
from typing import Any

from bson import ObjectId
from twisted.internet.interfaces import IReactorTime

from mediatord.clock import REQUEST_TIME_LIMIT
from mediatord.errors import PayloadTooLarge
from mediatord.store.interfaces.decentrl import MAX_PAGE_BYTES, DecentrlQuotas, PageRequest, ResultPage
from mediatord.store.mongo.driver.commands import (
    Document,
    MongoCommand,
    build_deletes,
    build_find,
    build_inserts,
    build_updates,
)
from mediatord.store.mongo.driver.executor import OperationExecutor
from mediatord.store.mongo.schema import PARTIES, PartyCollection

_KEY_BYTES = 16


class EventLabelKind(Enum):
    """What an event is found by."""

    ALL = b"all"
    TAG = b"tag"
    PARTICIPANT = b"participant"
    CHANNEL = b"channel"


def make_party_key(did: str) -> bytes:
    """What stands for a DID."""
    return blake2b(did.encode(), digest_size=_KEY_BYTES).digest()


def make_event_label(owner: bytes, kind: EventLabelKind, text: str = "", *, unprocessed: bool = False) -> bytes:
    """
    What stands for something that events of an owner are found by.

    :param owner: its key.
    :param unprocessed: for those events alone that are unprocessed.
    """
    salt = b"unprocessed" if unprocessed else b""
    return blake2b(text.encode(), digest_size=_KEY_BYTES, key=owner, person=kind.value, salt=salt).digest()


def sum_utf8_sizes(*texts: str) -> int:
    """Bytes as UTF-8."""
    return sum([len(text) if text.isascii() else len(text.encode()) for text in texts])


@dataclass(frozen=True, slots=True)
class PartyRecord:
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

    def has_room(self, caps: DecentrlQuotas, items: int, size: int) -> bool:
        """Whether so much more may be stored or published; what is less than before is never too much."""
        if items > 0 and self.stored + self.published + items > caps.stored:
            return False
        return size <= 0 or self.archive_bytes + size <= caps.stored_bytes

    def registered(self, until: float) -> PartyRecord:
        """As it is with another registration."""
        return replace(self, registered_until=max(self.registered_until, until), edition=ObjectId())

    def resized(self, size: int) -> PartyRecord:
        """As it is with so many more bytes of events, or less."""
        return replace(self, archive_bytes=self.archive_bytes + size, edition=ObjectId())

    def counted(self, table: PartyCollection, number: int, size: int) -> PartyRecord:
        """As it is with so many more documents, or less."""
        counters = {table.counter: number, table.bytes: size} if table.bytes else {table.counter: number}
        sums = {name: getattr(self, name) + more for name, more in counters.items()}
        return replace(self, **sums, edition=ObjectId() if table.payloads else self.edition)

    def values(self) -> Document:
        """What its document says."""
        values = {name: getattr(self, name) for name in _PARTY_FIELDS}
        # In indexes of those for whom it is so, which is said of the others by nothing.
        marks = {"waited_for": self.pending > 0, "unused": self.is_unused}
        return values | {name: True for name, holds in marks.items() if holds}


_PARTY_FIELDS = tuple([field.name for field in fields(PartyRecord) if field.name not in ("key", "known")])


def build_party_query(*dids: str) -> MongoCommand:
    """For the documents of parties."""
    return build_find(PARTIES, {"_id": {"$in": [make_party_key(did) for did in dict.fromkeys(dids)]}}, hint="_id_")


def find_party(documents: Iterable[Document], did: str) -> PartyRecord:
    """The one with this DID, for whom nothing is kept if it is not there."""
    key = make_party_key(did)
    for document in documents:
        if document["_id"] == key:
            return PartyRecord(key=key, known=True, **{name: document[name] for name in _PARTY_FIELDS})
    return PartyRecord(did, key)


def build_party_documents_query(
    table: PartyCollection, did: str, ids: Iterable[str], projection: Document | None = None
) -> MongoCommand:
    """For those of these documents that are a party's, in order of arrival; for what is counted of them and more."""
    filter = {"_id": {"$in": list(dict.fromkeys(ids))}, "party": make_party_key(did)}
    fields = {"size": 1, "tags_size": 1, **(projection or {})}
    return build_find(table.name, filter, sort={"seq": 1}, projection=fields, hint="_id_")


def build_party_changes(
    table: PartyCollection, party: PartyRecord, *, come: Sequence[Document] = (), gone: Sequence[Document] = ()
) -> list[MongoCommand]:
    """
    Change what is kept for a party.

    :param come: documents to be inserted, but not their payloads if those are in a collection of their own.
    :param gone: documents to be deleted, with `_id` and what is counted.
    """
    if not come and not gone:
        return []
    changed = party.counted(table, len(come) - len(gone), _sum_sizes(come) - _sum_sizes(gone))
    requests = build_party_update(party, changed)
    if gone:
        those = {"_id": {"$in": [document["_id"] for document in gone]}}
        requests += build_deletes(table.name, those)
        requests += build_deletes(table.payloads, those) if table.payloads else []
    return [*requests, *build_inserts(table.name, come)]


def build_party_update(before: PartyRecord, after: PartyRecord) -> list[MongoCommand]:
    """Write down what is different. Who has read the same before and changes it too is in the way of that."""
    old, new = before.values(), after.values()
    if not before.known:
        return build_inserts(PARTIES, [{"_id": after.key, **new}])
    changes: Document = {"$set": {name: value for name, value in new.items() if old.get(name) != value}}
    over = {name: True for name in old if name not in new}
    if over:
        changes["$unset"] = over
    return build_updates(PARTIES, [{"q": {"_id": after.key}, "u": changes}])


def _sum_sizes(documents: Sequence[Document]) -> int:
    """Of those that have one."""
    return sum([document.get("size", 0) + document.get("tags_size", 0) for document in documents])


# More than any list has.
_MAX_LIMIT = 1 << 62


@dataclass(frozen=True, slots=True)
class PartyReader:
    """
    One operation that reads, perhaps in several steps.

    :param deadline: for all of them.
    :param patient: each has as long as an operation may take, however long they take together.
    """

    executor: OperationExecutor
    clock: IReactorTime
    deadline: float
    is_patient: bool = False

    async def ask(self, question: MongoCommand) -> list[Document]:
        return await self.executor.query(question, self._until())

    async def count(self, listing: DocumentListing, skipped: int = 0) -> int:
        """How many there are, except so many."""
        counting = {"count": listing.collection, "query": listing.filter, "skip": skipped, "hint": listing.hint}
        number: int = (await self.executor.command(MongoCommand(counting), self._until()))["n"]
        return number

    async def party(self, did: str) -> PartyRecord:
        """The one with this DID, for whom nothing is kept if nothing is known of it."""
        return find_party(await self.ask(build_party_query(did)), did)

    async def page(
        self, listing: DocumentListing, part: PageRequest, total: int | None = None
    ) -> tuple[list[Document], int]:
        """
        A slice of a list, and how long that is.

        :param total: the same, if it is known.
        """
        offset, limit = max(part.offset, 0), min(part.limit, _MAX_LIMIT)
        if total is None and limit and not offset:
            found = await self.ask(listing.slice(0, limit))
            return found, len(found) if len(found) < limit else await self.count(listing)
        if total is None:
            total = await self.count(listing)
        if not limit or offset >= total:
            return [], total
        return await self.ask(listing.slice(offset, min(limit, total - offset))), total

    def with_own_deadlines(self) -> PartyReader:
        return replace(self, is_patient=True)

    def _until(self) -> float:
        return self.clock.seconds() + REQUEST_TIME_LIMIT if self.is_patient else self.deadline


@dataclass(frozen=True, slots=True)
class DocumentListing:
    """
    A list of documents.

    :param hint: the index that has them in this order.
    """

    collection: str
    filter: Document
    sort: Document
    hint: str
    projection: Document | None = None

    def slice(self, offset: int, limit: int) -> MongoCommand:
        """:param limit: not 0."""
        return build_find(
            self.collection,
            self.filter,
            sort=self.sort,
            skip=offset,
            limit=limit,
            projection=self.projection,
            hint=self.hint,
        )


def build_empty_result() -> ResultPage[Any]:
    """What is found of somebody who has nothing here."""
    return ResultPage((), 0)


def check_slice_size(documents: Sequence[Document]) -> None:
    """
    :param documents: with the `size` of their payloads.
    :raise PayloadTooLarge: those are more than a slice may have.
    """
    if sum([document["size"] for document in documents]) > MAX_PAGE_BYTES:
        raise PayloadTooLarge()
