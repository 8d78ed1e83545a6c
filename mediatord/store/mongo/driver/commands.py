"""
Commands as they are sent.

Questions whose answers come in batches.

A collection that is there to be asked and written to when nothing but the server is meant.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bson import Int64, encode

from mediatord.errors import PayloadTooLarge
from mediatord.store.interfaces.messages import ArrivalWindow

Document = dict[str, Any]

MAX_DOCUMENT_BYTES = 16_777_216
# Far below what a server takes in one message, 48 MB and 100 000 documents.
_MESSAGE_BYTES = 20_000_000
_MESSAGE_DOCUMENTS = 5_000


@dataclass(frozen=True, slots=True)
class MongoCommand:
    """
    One command.

    :param body: its name comes first.
    :param section: name of the list that is sent beside the body, in BSON already.
    :param database: ours unless given.
    """

    body: Document
    section: str = ""
    documents: Sequence[bytes] = field(default=(), repr=False)
    database: str = ""

    def with_fields(self, more: Mapping[str, Any]) -> MongoCommand:
        """The same with more in its body."""
        return MongoCommand({**self.body, **more}, self.section, self.documents, self.database)


def build_inserts(collection: str, documents: Iterable[Document], *, ordered: bool = True) -> list[MongoCommand]:
    """:raise PayloadTooLarge: one of them could not be stored."""
    return list(_build_batches({"insert": collection, "ordered": ordered}, "documents", documents))


def build_updates(collection: str, updates: Iterable[Document], *, ordered: bool = True) -> list[MongoCommand]:
    """
    :param updates: `q`, `u` and perhaps `upsert`, `multi`, `hint`, `arrayFilters` each.
    :raise PayloadTooLarge: one of them is too much for a server.
    """
    return list(_build_batches({"update": collection, "ordered": ordered}, "updates", updates))


def build_deletes(collection: str, *filters: Document) -> list[MongoCommand]:
    """All documents that match one of the filters."""
    return list(_build_batches({"delete": collection}, "deletes", [{"q": filter, "limit": 0} for filter in filters]))


def build_find_and_modify(
    collection: str,
    filter: Document,
    change: Document | Sequence[Document] | None,
    *,
    upsert: bool = False,
    new: bool = False,
    sort: Document | None = None,
    projection: Document | None = None,
) -> MongoCommand:
    """
    Change one document and tell what it was, or is now if `new`.

    :param change: an update, or a pipeline; None to remove it.
    """
    what: Document = {"remove": True} if change is None else {"update": change, "upsert": upsert, "new": new}
    more = {"sort": sort, "fields": projection}
    body = {"findAndModify": collection, "query": filter, **what}
    return MongoCommand(body | {name: value for name, value in more.items() if value})


def encode_document(document: Mapping[str, Any]) -> bytes:
    """:raise PayloadTooLarge: no server would take it."""
    data = encode(document)
    if len(data) > MAX_DOCUMENT_BYTES:
        raise PayloadTooLarge()
    return data


def _build_batches(body: Document, section: str, documents: Iterable[Document]) -> Iterator[MongoCommand]:
    """As many as it takes."""
    some: list[bytes] = []
    size = 0
    for data in map(encode_document, documents):
        if some and (size + len(data) > _MESSAGE_BYTES or len(some) == _MESSAGE_DOCUMENTS):
            yield MongoCommand(body, section, some)
            some, size = [], 0
        some.append(data)
        size += len(data)
    if some:
        yield MongoCommand(body, section, some)


# Documents that a server may put into one batch, as far as 16 MB go.
_CURSOR_BATCH_SIZE = 1000

CommandRunner = Callable[[MongoCommand], Awaitable[Document]]


def build_window_filters(field: str, window: ArrivalWindow) -> list[Document]:
    """
    What has its time in a window, in parts: all of one come before all of the next.

    Each is a range of an index; of both together with `$or` the server would read the documents.
    """
    since, until = float(window.since), float(window.until)
    if not window.after:
        return [{field: {"$gte": since, "$lt": until}}]
    behind = {field: {"$gt": since, "$lt": until}}
    return [{field: since, "_id": {"$gt": window.after}}, behind] if since < until else []


def build_find(
    collection: str,
    filter: Document,
    *,
    sort: Document | None = None,
    limit: int = 0,
    skip: int = 0,
    projection: Document | None = None,
    hint: str | None = None,
) -> MongoCommand:
    """:param limit: 0 for all."""
    more = {"sort": sort, "limit": limit, "skip": skip, "projection": projection, "hint": hint}
    body = {"find": collection, "filter": filter, "batchSize": _CURSOR_BATCH_SIZE}
    return MongoCommand(body | {name: value for name, value in more.items() if value})


def build_aggregate(collection: str, pipeline: Sequence[Document], *, hint: str | None = None) -> MongoCommand:
    body: Document = {
        "aggregate": collection,
        "pipeline": list(pipeline),
        "cursor": {"batchSize": _CURSOR_BATCH_SIZE},
    }
    return MongoCommand(body if hint is None else body | {"hint": hint})


async def read_cursor(run: CommandRunner, collection: str, reply: Document) -> list[Document]:
    """All that is found, beginning with the reply to the question itself."""
    cursor = reply["cursor"]
    found: list[Document] = cursor["firstBatch"]
    while cursor["id"]:
        more = MongoCommand(
            {"getMore": Int64(cursor["id"]), "collection": collection, "batchSize": _CURSOR_BATCH_SIZE}
        )
        cursor = (await run(more))["cursor"]
        found += cursor["nextBatch"]
    return found


HEARTBEAT_COLLECTION = "pulse"


def build_heartbeat_read() -> MongoCommand:
    """Any question."""
    return build_find(HEARTBEAT_COLLECTION, {"_id": HEARTBEAT_COLLECTION})


def build_heartbeat_write(id: str = HEARTBEAT_COLLECTION) -> list[MongoCommand]:
    """
    Any write: a server that has lost its majority can still be read.

    :param id: of the document; who writes another is in nobody's way.
    """
    return build_updates(HEARTBEAT_COLLECTION, [{"q": {"_id": id}, "u": [{"$set": {"at": "$$NOW"}}], "upsert": True}])
