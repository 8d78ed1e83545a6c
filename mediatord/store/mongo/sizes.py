"""Which queues are the longest, and what waits in all of them, those of both halves together."""

from __future__ import annotations

from dataclasses import replace

from mediatord.interfaces import Books, StoreStatistics, Waiting
from mediatord.store.mongo.books import Ask, patience, read_with
from mediatord.store.mongo.collections import MESSAGES, RECIPIENTS
from mediatord.store.mongo.cursors import aggregating, finding
from mediatord.store.mongo.decentrl_schema import PARTIES, PENDING
from mediatord.store.mongo.operations import Operations
from mediatord.store.mongo.replies import Refused, Unreachable
from mediatord.store.mongo.requests import Document, Request
from mediatord.store.mongo.server import Server
from mediatord.store.waiting import both

# Seconds that it may take, as nobody's mail depends on it.
PATIENCE = 1.5
# Documents of a collection that are counted one by one.
_COUNTED = 20_000
# Queues of a half that are looked at, and of the longest of them those that may be parts of one, beside those asked
# for: a DID that has changed hands has several.
_LOOKED_AT = 50_000
_PARTS = 1_000
# Queues of a half whose bytes are added up each time that what waits is asked for.
_SUMMED = 5_000
_BYTES: Document = {"bytes": {"$add": ["$storageStats.storageSize", "$storageStats.totalIndexSize"]}}
_HALVES = (
    (RECIPIENTS, "recipient_waited_for", "bytes"),
    (PARTIES, "party_waited_for", PENDING.bytes),
)


async def queue_sizes(server: Server, top: int) -> tuple[list[tuple[str, int]], int]:
    """
    The `top` largest with their DIDs, and the sum of all others.

    Of more queues than are looked at, the largest among those. The sum is always that of all; of very many messages
    it is what the server says, which may be a little wrong, and more so after it was killed.
    """

    async def look(operations: Operations, deadline: float) -> tuple[list[tuple[str, int]], int]:
        total = 0
        for collection in (MESSAGES, PENDING.name):
            total += await number_of(operations, collection, deadline)
        found = await operations.query(_largest(top), deadline) if top > 0 else []
        sizes = [(one["_id"], one["number"]) for one in found]
        return sizes, max(total - sum(number for _, number in sizes), 0)

    return await server.operate("queue_sizes", look, until=server.clock.seconds() + PATIENCE)


async def statistics(server: Server, top: int) -> StoreStatistics:
    """
    The largest queues are looked for just before the rest, since no transaction can; the sum is of the same moment as
    the ledger.
    """

    async def look(operations: Operations, deadline: float) -> StoreStatistics:
        found = await operations.query(_largest(top), deadline) if top > 0 else []
        books, _ = await read_with(operations, deadline, _nothing)
        total = await total_of(operations, books, deadline)
        sizes = tuple((one["_id"], one["number"]) for one in found)
        return StoreStatistics(sizes, max(total - sum(number for _, number in sizes), 0), books)

    return await server.operate("statistics", look, until=patience(server))


async def _nothing(_: Ask) -> None:
    pass


async def total_of(operations: Operations, books: Books, deadline: float) -> int:
    """What waits by the ledger, or what the server says if that is not known."""
    halves = books.didcomm.waiting, books.decentrl.waiting
    if None not in halves:
        return sum(number or 0 for number in halves)
    return sum([await number_of(operations, collection, deadline) for collection in (MESSAGES, PENDING.name)])


async def waiting(server: Server) -> Waiting:
    """
    All that waits. Where a half has more queues than are added up, or that would take too long, it is not said how
    many those are and what is in them. The first message is the one with the lowest id, which begins with the time.
    """

    async def look(operations: Operations, deadline: float) -> Waiting:
        messages = await _waiting(operations, MESSAGES, deadline)
        known = both(messages, await _waiting(operations, PENDING.name, deadline))
        try:
            return await _added_up(operations, known, deadline)
        except (Unreachable, Refused):
            return known

    return await server.operate("waiting", look, until=server.clock.seconds() + PATIENCE)


async def _waiting(operations: Operations, collection: str, deadline: float) -> Waiting:
    number = await number_of(operations, collection, deadline)
    first = finding(collection, {}, sort={"_id": 1}, limit=1, projection={"received_at": 1}, hint="_id_")
    oldest = await operations.query(first, deadline, prompt=True)
    return Waiting(number, None, None, oldest[0]["received_at"] if oldest else None)


async def _added_up(operations: Operations, known: Waiting, deadline: float) -> Waiting:
    """With what is in the queues and how many those are, unless they are too many."""
    queues = size = 0
    for collection, index, _ in _HALVES:
        # By the index alone.
        some: list[Document] = [{"$match": {"waited_for": True}}, {"$limit": _SUMMED + 1}, {"$count": "n"}]
        counted = await operations.query(aggregating(collection, some, hint=index), deadline)
        if counted and counted[0]["n"] > _SUMMED:
            return known
    for collection, index, name in _HALVES:
        total: Document = {"$group": {"_id": None, "bytes": {"$sum": f"${name}"}, "queues": {"$sum": 1}}}
        summed = aggregating(collection, [{"$match": {"waited_for": True}}, total], hint=index)
        for one in await operations.query(summed, deadline):
            queues, size = queues + one["queues"], size + one["bytes"]
    return replace(known, bytes=size, recipients=queues)


async def number_of(operations: Operations, collection: str, deadline: float) -> int:
    """How many documents there are."""
    first = aggregating(collection, [{"$limit": _COUNTED}, {"$count": "n"}], hint="_id_")
    counted = await operations.query(first, deadline, prompt=True)
    number: int = counted[0]["n"] if counted else 0
    if number < _COUNTED:
        return number
    # What is said of all of them costs nothing. It may be wrong after a crash of the server, and by what was undone.
    said: int = (await operations.command(Request({"count": collection}), deadline, prompt=True))["n"]
    return max(said, number)


async def table_sizes(server: Server) -> dict[str, int]:
    """Bytes of each collection with its indexes; none where the user may not ask."""

    async def look(operations: Operations, deadline: float) -> dict[str, int]:
        listing = Request({"listCollections": 1, "nameOnly": True, "authorizedCollections": True})
        stages: list[Document] = [{"$collStats": {"storageStats": {}}}, {"$project": _BYTES}]
        sizes: dict[str, int] = {}
        try:
            listed = await operations.command(listing, deadline)
            for one in listed["cursor"]["firstBatch"]:
                if one["type"] == "collection":
                    (stats,) = await operations.query(aggregating(one["name"], stages), deadline)
                    sizes[one["name"]] = int(stats["bytes"])
        except Refused:
            pass
        return sizes

    return await server.operate("table_sizes", look, until=server.clock.seconds() + PATIENCE)


def _largest(top: int) -> Request:
    return aggregating(
        RECIPIENTS,
        [
            *longest("messages", top),
            {"$unionWith": {"coll": PARTIES, "pipeline": longest("pending", top)}},
            {"$group": {"_id": "$did", "number": {"$sum": "$number"}}},
            {"$sort": {"number": -1, "_id": 1}},
            {"$limit": top},
        ],
    )


def longest(counter: str, top: int, more: Document | None = None) -> list[Document]:
    """
    The largest of those that something waits for, with how much that is, as stages of a pipeline.

    :param more: what else is to be told of each, as a projection.
    """
    return [
        {"$match": {"waited_for": {"$exists": True}}},
        {"$limit": _LOOKED_AT},
        {"$project": {"_id": 0, "did": 1, "number": f"${counter}", **(more or {})}},
        {"$sort": {"number": -1}},
        {"$limit": top + _PARTS},
    ]
