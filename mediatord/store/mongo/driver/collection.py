"""Collections, the commands on them in MongoDB's wire protocol, and reading of cursors."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, TypeVar

from bson import Int64, encode

from mediatord.errors import PayloadTooLarge

Document = dict[str, Any]
T = TypeVar("T")

MAX_DOCUMENT_BYTES = 16_777_216
# Far below the limits of a server: 48 MB and 100 000 documents in one message.
_MESSAGE_BYTES, _MESSAGE_DOCUMENTS = 20_000_000, 5_000
# Documents in one batch of a cursor, which the server also ends at 16 MB.
_CURSOR_BATCH_SIZE = 1000


@dataclass(frozen=True, slots=True)
class MongoCommand:
    """
    One command.

    :param body: its name comes first.
    :param section: name of the document sequence that is sent beside the body.
    :param documents: that sequence, BSON-encoded.
    :param database: the one of the connection settings if empty.
    """

    body: Document
    section: str = ""
    documents: Sequence[bytes] = field(default=(), repr=False)
    database: str = ""

    def with_fields(self, more: Mapping[str, Any]) -> MongoCommand:
        """Return the command with more fields in its body."""
        return MongoCommand({**self.body, **more}, self.section, self.documents, self.database)


@dataclass(frozen=True, eq=False)
class Collection:
    """
    A collection; its methods build commands.

    A changed index gets another name, because nodes of the version before use the index by its name.

    :param indexes: definitions as the server lists them by name, without that of `_id`.
    """

    name: str
    indexes: Mapping[str, Document] = field(default_factory=dict)

    def find(
        self,
        filter: Document,
        *,
        projection: Document | None = None,
        sort: Document | None = None,
        skip: int = 0,
        limit: int = 0,
        hint: str | None = None,
    ) -> MongoCommand:
        """:param limit: 0 is none."""
        options = {"projection": projection, "sort": sort, "skip": skip, "limit": limit, "hint": hint}
        body = {"find": self.name, "filter": filter, "batchSize": _CURSOR_BATCH_SIZE}
        return MongoCommand(body | {name: value for name, value in options.items() if value})

    def aggregate(self, pipeline: Sequence[Document], *, hint: str | None = None) -> MongoCommand:
        cursor = {"batchSize": _CURSOR_BATCH_SIZE}
        body: Document = {"aggregate": self.name, "pipeline": list(pipeline), "cursor": cursor}
        return MongoCommand(body if hint is None else body | {"hint": hint})

    def count(self, **options: Any) -> MongoCommand:
        """Count the documents of a `query`; without one by the metadata, which may be wrong after a crash."""
        return MongoCommand({"count": self.name, **options})

    def insert(self, documents: Iterable[Document]) -> list[MongoCommand]:
        """:raise PayloadTooLarge: a document exceeds :data:`MAX_DOCUMENT_BYTES`."""
        return self._build_batches("insert", "documents", documents)

    def update(self, filter: Document, change: Document | list[Document], **options: Any) -> list[MongoCommand]:
        """Build the command of one update; options as for :meth:`update_each`."""
        return self.update_each([{"q": filter, "u": change, **options}])

    def update_each(self, updates: Iterable[Document], *, ordered: bool = True) -> list[MongoCommand]:
        """
        Build commands of several updates.

        :param updates: with `q` and `u`, and optionally `upsert`, `multi`, `hint` each.
        :raise PayloadTooLarge: an update exceeds :data:`MAX_DOCUMENT_BYTES`.
        """
        return self._build_batches("update", "updates", updates, ordered)

    def delete(self, *filters: Document) -> list[MongoCommand]:
        """Build commands that delete all documents that match one of the filters."""
        return self._build_batches("delete", "deletes", [{"q": filter, "limit": 0} for filter in filters])

    def find_and_modify(self, filter: Document, change: Sequence[Document], **options: bool) -> MongoCommand:
        """Build a command that changes one document by a pipeline, and returns it as it was, or as it is if `new`."""
        return MongoCommand({"findAndModify": self.name, "query": filter, "update": change, **options})

    def _build_batches(
        self, name: str, section: str, documents: Iterable[Document], ordered: bool = True
    ) -> list[MongoCommand]:
        """Split documents into as few commands as the limits of a message allow."""
        body = {name: self.name, "ordered": ordered}
        batches = batch_by_size(map(encode_document, documents), len, _MESSAGE_BYTES, _MESSAGE_DOCUMENTS)
        return [MongoCommand(body, section, batch) for batch in batches]


# Its one document is read and written to check that the server does both.
HEALTH_PROBE = Collection("health_probe")


def build_probe_read() -> MongoCommand:
    """Build a query that needs authorization and costs nothing."""
    return HEALTH_PROBE.find({"_id": HEALTH_PROBE.name})


def build_probe_write(id: str = HEALTH_PROBE.name) -> list[MongoCommand]:
    """
    Build a write that only a primary with a majority acknowledges.

    :param id: of the document; writes to different documents do not conflict.
    """
    return HEALTH_PROBE.update({"_id": id}, [{"$set": {"at": "$$NOW"}}], upsert=True)


async def read_cursor(
    run: Callable[[MongoCommand], Awaitable[Document]], query: MongoCommand, reply: Document
) -> list[Document]:
    """
    Return all documents of a cursor.

    :param run: runs `getMore`.
    :param reply: to the query, with the first batch.
    """
    cursor = reply["cursor"]
    found: list[Document] = cursor["firstBatch"]
    while cursor["id"]:
        collection = next(iter(query.body.values()))
        body = {"getMore": Int64(cursor["id"]), "collection": collection, "batchSize": _CURSOR_BATCH_SIZE}
        cursor = (await run(MongoCommand(body)))["cursor"]
        found += cursor["nextBatch"]
    return found


def encode_document(document: Mapping[str, Any]) -> bytes:
    """:raise PayloadTooLarge: it exceeds :data:`MAX_DOCUMENT_BYTES`."""
    data = encode(document)
    if len(data) > MAX_DOCUMENT_BYTES:
        raise PayloadTooLarge()
    return data


def batch_by_size(
    items: Iterable[T], get_size: Callable[[T], int], max_bytes: int, max_number: float = inf
) -> Iterator[list[T]]:
    """Split items into batches of at most so many bytes and items, but at least one item each."""
    batch: list[T] = []
    size = 0
    for item in items:
        more = get_size(item)
        if batch and (size + more > max_bytes or len(batch) >= max_number):
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += more
    if batch:
        yield batch
