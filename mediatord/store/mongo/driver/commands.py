"""Commands of the MongoDB wire protocol, and reading of cursors."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict, Unpack

from bson import Int64, encode

from mediatord.errors import PayloadTooLarge

Document = dict[str, Any]

MAX_DOCUMENT_BYTES = 16_777_216
# Far below the limits of a server: 48 MB and 100 000 documents in one message.
_MESSAGE_BYTES = 20_000_000
_MESSAGE_DOCUMENTS = 5_000
# Documents in one batch of a cursor, which the server also ends at 16 MB.
_CURSOR_BATCH_SIZE = 1000
HEARTBEAT_COLLECTION = "pulse"


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


def build_inserts(collection: str, documents: Iterable[Document], *, ordered: bool = True) -> list[MongoCommand]:
    """:raise PayloadTooLarge: a document exceeds :data:`MAX_DOCUMENT_BYTES`."""
    return list(_build_batches({"insert": collection, "ordered": ordered}, "documents", documents))


def build_updates(collection: str, updates: Iterable[Document], *, ordered: bool = True) -> list[MongoCommand]:
    """
    Build update commands.

    :param updates: with `q` and `u`, and optionally `upsert`, `multi`, `hint`, `arrayFilters` each.
    :raise PayloadTooLarge: an update exceeds :data:`MAX_DOCUMENT_BYTES`.
    """
    return list(_build_batches({"update": collection, "ordered": ordered}, "updates", updates))


def build_deletes(collection: str, *filters: Document) -> list[MongoCommand]:
    """Build commands that delete all documents that match one of the filters."""
    return list(_build_batches({"delete": collection}, "deletes", [{"q": filter, "limit": 0} for filter in filters]))


def build_find_and_modify(
    collection: str,
    filter: Document,
    change: Sequence[Document],
    *,
    upsert: bool = False,
    new: bool = False,
) -> MongoCommand:
    """
    Build a command that changes one document and returns it as it was, or as it is afterwards if `new`.

    :param change: an aggregation pipeline.
    """
    return MongoCommand(
        {"findAndModify": collection, "query": filter, "update": change, "upsert": upsert, "new": new}
    )


class FindOptions(TypedDict, total=False):
    """Options of a `find` command; a limit of 0 is none."""

    sort: Document | None
    limit: int
    skip: int
    projection: Document | None
    hint: str | None


def build_find(collection: str, filter: Document, **options: Unpack[FindOptions]) -> MongoCommand:
    body = {"find": collection, "filter": filter, "batchSize": _CURSOR_BATCH_SIZE}
    return MongoCommand(body | {name: value for name, value in options.items() if value})


def build_aggregate(collection: str, pipeline: Sequence[Document], *, hint: str | None = None) -> MongoCommand:
    body: Document = {
        "aggregate": collection,
        "pipeline": list(pipeline),
        "cursor": {"batchSize": _CURSOR_BATCH_SIZE},
    }
    return MongoCommand(body if hint is None else body | {"hint": hint})


def build_heartbeat_read() -> MongoCommand:
    """Build a query that needs authorization and costs nothing."""
    return build_find(HEARTBEAT_COLLECTION, {"_id": HEARTBEAT_COLLECTION})


def build_heartbeat_write(id: str = HEARTBEAT_COLLECTION) -> list[MongoCommand]:
    """
    Build a write that only a primary with a majority acknowledges.

    :param id: of the document; writes to different documents do not conflict.
    """
    return build_updates(HEARTBEAT_COLLECTION, [{"q": {"_id": id}, "u": [{"$set": {"at": "$$NOW"}}], "upsert": True}])


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


def _build_batches(body: Document, section: str, documents: Iterable[Document]) -> Iterator[MongoCommand]:
    """Split documents into as few commands as the limits of a message allow."""
    batch: list[bytes] = []
    size = 0
    for data in map(encode_document, documents):
        if batch and (size + len(data) > _MESSAGE_BYTES or len(batch) == _MESSAGE_DOCUMENTS):
            yield MongoCommand(body, section, batch)
            batch, size = [], 0
        batch.append(data)
        size += len(data)
    if batch:
        yield MongoCommand(body, section, batch)
