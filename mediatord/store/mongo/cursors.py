"""Questions whose answers come in batches."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from bson import Int64

from mediatord.interfaces import Window
from mediatord.store.mongo.requests import Document, Request

# Documents that a server may put into one batch, as far as 16 MB go.
_BATCH = 1000

Run = Callable[[Request], Awaitable[Document]]


def within(field: str, window: Window) -> list[Document]:
    """
    What has its time in a window, in parts: all of one come before all of the next.

    Each is a range of an index; of both together with `$or` the server would read the documents.
    """
    since, until = float(window.since), float(window.until)
    if not window.after:
        return [{field: {"$gte": since, "$lt": until}}]
    behind = {field: {"$gt": since, "$lt": until}}
    return [{field: since, "_id": {"$gt": window.after}}, behind] if since < until else []


def finding(
    collection: str,
    filter: Document,
    *,
    sort: Document | None = None,
    limit: int = 0,
    skip: int = 0,
    projection: Document | None = None,
    hint: str | None = None,
) -> Request:
    """:param limit: 0 for all."""
    more = {"sort": sort, "limit": limit, "skip": skip, "projection": projection, "hint": hint}
    body = {"find": collection, "filter": filter, "batchSize": _BATCH}
    return Request(body | {name: value for name, value in more.items() if value})


def aggregating(collection: str, pipeline: Sequence[Document], *, hint: str | None = None) -> Request:
    body: Document = {"aggregate": collection, "pipeline": list(pipeline), "cursor": {"batchSize": _BATCH}}
    return Request(body if hint is None else body | {"hint": hint})


async def collect(run: Run, collection: str, reply: Document) -> list[Document]:
    """All that is found, beginning with the reply to the question itself."""
    cursor = reply["cursor"]
    found: list[Document] = cursor["firstBatch"]
    while cursor["id"]:
        more = Request({"getMore": Int64(cursor["id"]), "collection": collection, "batchSize": _BATCH})
        cursor = (await run(more))["cursor"]
        found += cursor["nextBatch"]
    return found
