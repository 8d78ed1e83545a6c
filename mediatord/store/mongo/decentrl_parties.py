"""Decentrl parties: registration, document counters and paged reading of their documents."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from hashlib import blake2b
from typing import Any

from bson import ObjectId

from mediatord.errors import PayloadTooLarge
from mediatord.store.interfaces.decentrl import MAX_PAGE_BYTES, DecentrlQuotas, PageRequest, ResultPage
from mediatord.store.mongo.driver.collection import Collection, Document, MongoCommand
from mediatord.store.mongo.driver.operation import Operation
from mediatord.store.mongo.schema import PARTIES, PartyCollection

EMPTY_PAGE: ResultPage[Any] = ResultPage((), 0)
PARTY_KEY_BYTES = 16
# More documents than any list has.
_MAX_LIMIT = 1 << 62


def make_party_key(did: str) -> bytes:
    """Digest of a DID, which identifies the party in other documents."""
    return blake2b(did.encode(), digest_size=PARTY_KEY_BYTES).digest()


def build_pair_filter(did: str, field: str, other_did: str) -> Document:
    """Build a filter for documents of a party that concern another one."""
    return {"party": make_party_key(did), field: make_party_key(other_did)}


@dataclass(frozen=True, slots=True)
class PartyRecord:
    """
    A DID with the counters of its documents.

    :param registered_until: the latest end of its registrations, whether past or not.
    :param stored: number of stored events; `published` of public ones, and `archive_bytes` of both.
    :param edition: changes with its stored and public events and its registrations.
    """

    did: str
    key: bytes
    registered_until: float = 0.0
    contracts: int = 0
    requests: int = 0
    pending: int = 0
    pending_bytes: int = 0
    stored: int = 0
    published: int = 0
    archive_bytes: int = 0
    edition: ObjectId | None = None

    def has_room(self, caps: DecentrlQuotas, items: int, size: int) -> bool:
        """Whether the quotas allow more events and bytes; fewer are always allowed."""
        if items > 0 and self.stored + self.published + items > caps.stored:
            return False
        return size <= 0 or self.archive_bytes + size <= caps.stored_bytes

    def registered(self, until: float) -> PartyRecord:
        """Return the party with one more registration."""
        return replace(self, registered_until=max(self.registered_until, until), edition=ObjectId())

    def resized(self, size: int) -> PartyRecord:
        """Return the party with more bytes of events, or fewer."""
        return replace(self, archive_bytes=self.archive_bytes + size, edition=ObjectId())

    def counted(self, table: PartyCollection, number: int, size: int) -> PartyRecord:
        """Return the party with more documents, or fewer."""
        counters = {table.counter: number, table.bytes: size} if table.bytes else {table.counter: number}
        sums = {name: getattr(self, name) + more for name, more in counters.items()}
        return replace(self, **sums, edition=ObjectId() if table.payloads else self.edition)


_PARTY_FIELDS = tuple([field.name for field in fields(PartyRecord) if field.name != "key"])


def build_party_query(*dids: str) -> MongoCommand:
    return PARTIES.find({"_id": {"$in": [make_party_key(did) for did in dict.fromkeys(dids)]}}, hint="_id_")


def find_party(documents: Iterable[Document], did: str) -> PartyRecord:
    """Return the party with this DID; an empty one if it has no document."""
    key = make_party_key(did)
    for document in documents:
        if document["_id"] == key:
            return PartyRecord(key=key, **{name: document[name] for name in _PARTY_FIELDS})
    return PartyRecord(did, key)


async def read_party(run: Operation, did: str) -> PartyRecord:
    """Return the party with this DID; an empty one if it has no document."""
    return find_party(await run.query(build_party_query(did)), did)


def build_party_documents_query(
    table: PartyCollection, did: str, ids: Iterable[str], projection: Document | None = None
) -> MongoCommand:
    """
    Build a query for documents of a party by id, in order of arrival.

    :param projection: fields beside those that are counted.
    """
    filter = {"_id": {"$in": list(dict.fromkeys(ids))}, "party": make_party_key(did)}
    wanted = {"size": 1, "tags_size": 1, **(projection or {})}
    return table.find(filter, sort={"seq": 1}, projection=wanted, hint="_id_")


def build_party_changes(
    table: PartyCollection, party: PartyRecord, *, come: Sequence[Document] = (), gone: Sequence[Document] = ()
) -> list[MongoCommand]:
    """
    Build the writes that insert and delete documents of a party and count them.

    :param come: new documents, without payloads that are in a collection of their own.
    :param gone: documents to be deleted, with `_id` and what is counted.
    """
    if not come and not gone:
        return []
    changed = party.counted(table, len(come) - len(gone), _sum_sizes(come) - _sum_sizes(gone))
    requests = build_party_update(changed)
    if gone:
        filter = {"_id": {"$in": [document["_id"] for document in gone]}}
        requests += table.delete(filter)
        requests += table.payloads.delete(filter) if table.payloads else []
    return [*requests, *table.insert(come)]


def build_party_update(party: PartyRecord) -> list[MongoCommand]:
    """Build the write of a party; it conflicts with concurrent changes of the party."""
    # Fields of partial indexes, absent where they do not hold.
    has_documents = party.contracts or party.requests or party.pending or party.stored or party.published
    flags = {"waited_for": party.pending > 0, "unused": not has_documents}
    values = {name: getattr(party, name) for name in _PARTY_FIELDS}
    change = {
        "$set": values | {name: True for name, holds in flags.items() if holds},
        "$unset": {name: 1 for name, holds in flags.items() if not holds},
    }
    return PARTIES.update({"_id": party.key}, change, upsert=True)


def _sum_sizes(documents: Sequence[Document]) -> int:
    return sum([document.get("size", 0) + document.get("tags_size", 0) for document in documents])


@dataclass(frozen=True, slots=True)
class DocumentListing:
    """
    A sorted list of documents.

    :param hint: name of the index to use.
    """

    collection: Collection
    filter: Document
    sort: Document
    hint: str
    projection: Document | None = None

    def slice(self, offset: int, limit: int) -> MongoCommand:
        """:param limit: not 0."""
        found = self.collection.find(self.filter, projection=self.projection, sort=self.sort, hint=self.hint)
        return found.with_fields({"skip": offset, "limit": limit})

    async def count(self, run: Operation, skipped: int = 0) -> int:
        """Count the documents after the first `skipped`."""
        counting = self.collection.count(query=self.filter, skip=skipped, hint=self.hint)
        number: int = (await run.command(counting))["n"]
        return number

    async def read_page(
        self, run: Operation, page: PageRequest, total: int | None = None
    ) -> tuple[list[Document], int]:
        """
        Return a page of the list, and the length of the list.

        :param total: that length, if known.
        """
        offset, limit = max(page.offset, 0), min(page.limit, _MAX_LIMIT)
        if total is None and limit and not offset:
            found = await run.query(self.slice(0, limit))
            return found, len(found) if len(found) < limit else await self.count(run)
        if total is None:
            total = await self.count(run)
        if not limit or offset >= total:
            return [], total
        return await run.query(self.slice(offset, min(limit, total - offset))), total


def check_page_size(documents: Sequence[Document]) -> None:
    """
    Check documents that have the `size` of their payloads.

    :raise PayloadTooLarge: the payloads exceed :data:`MAX_PAGE_BYTES`.
    """
    if sum([document["size"] for document in documents]) > MAX_PAGE_BYTES:
        raise PayloadTooLarge()
