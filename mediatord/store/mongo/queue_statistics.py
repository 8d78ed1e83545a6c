"""
Statistics of queued messages: sizes, totals, age and the longest queues, of both halves together.

Ids of messages and events begin with the time of arrival, so their age is found by keys alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from mediatord.store.interfaces.messages import (
    AgeBucket,
    LargeQueue,
    QueueBacklog,
    QueueTotals,
    StoreLedger,
    StoreStatistics,
)
from mediatord.store.mongo.driver.client import ReplicaSetClient
from mediatord.store.mongo.driver.commands import Document, MongoCommand, build_aggregate, build_find
from mediatord.store.mongo.driver.errors import MongoCommandError, ServerUnreachable
from mediatord.store.mongo.driver.executor import OperationExecutor
from mediatord.store.mongo.ledger import LedgerQuery, get_ledger_deadline, read_ledger_with, read_nothing
from mediatord.store.mongo.schema import QUEUES, QueueCollections
from mediatord.store.queue_backlog import (
    add_queue_totals,
    build_backlog,
    complete_buckets,
    find_earliest,
    get_id_ranges,
)

# Seconds for an operation.
STATISTICS_TIMEOUT = 1.5
# Documents of a collection that are counted one by one.
_EXACT_COUNT_LIMIT = 20_000
# Queues of a half that are ranked; and those of the longest that are kept beside the ones asked for, since a DID that
# has changed its account has several.
_MAX_RANKED_QUEUES = 50_000
_EXTRA_RANKED_QUEUES = 1_000
# Queues of a half whose bytes are summed.
_MAX_SUMMED_QUEUES = 5_000
# Of each age: keys that are counted, and documents whose bytes are summed.
_COHORT_COUNT_LIMIT = 20_000
_COHORT_SIZE_LIMIT = 2_000
_COLLECTION_BYTES: Document = {"bytes": {"$add": ["$storageStats.storageSize", "$storageStats.totalIndexSize"]}}


async def read_queue_sizes(client: ReplicaSetClient, top: int) -> tuple[list[tuple[str, int]], int]:
    """
    Return the longest queues with their DIDs, and the sum of all others.

    Of very many queues only :data:`_MAX_RANKED_QUEUES` are ranked. Of very many messages the sum is that of the
    metadata, which may be a little wrong, and more so after a crash of the server.
    """

    async def read(executor: OperationExecutor, deadline: float) -> tuple[list[tuple[str, int]], int]:
        total = sum([await _count_documents(executor, half.messages, deadline) for half in QUEUES.values()])
        sizes = await _rank_queues(executor, top, deadline)
        return sizes, max(total - sum(number for _, number in sizes), 0)

    return await client.operate("queue_sizes", read, until=client.clock.seconds() + STATISTICS_TIMEOUT)


async def read_statistics(client: ReplicaSetClient, top: int) -> StoreStatistics:
    """Rank queues just before the rest, since no transaction can; the sum is that of the ledger."""

    async def read(executor: OperationExecutor, deadline: float) -> StoreStatistics:
        sizes = await _rank_queues(executor, top, deadline)
        ledger, _ = await read_ledger_with(executor, deadline, read_nothing)
        total = sum(await _read_totals(executor, ledger, deadline))
        return StoreStatistics(tuple(sizes), max(total - sum(number for _, number in sizes), 0), ledger)

    return await client.operate("statistics", read, until=get_ledger_deadline(client))


async def read_waiting(client: ReplicaSetClient) -> QueueTotals:
    """
    Return the totals of all queues. With too many queues, or not enough time, their number and bytes are unknown. The
    oldest message is the one with the lowest id.
    """

    async def read(executor: OperationExecutor, deadline: float) -> QueueTotals:
        totals = QueueTotals(0, None, None, None)
        for half in QUEUES.values():
            number = await _count_documents(executor, half.messages, deadline)
            first = build_find(
                half.messages, {}, sort={"_id": 1}, limit=1, projection={"received_at": 1}, hint="_id_"
            )
            oldest = await executor.query(first, deadline, low_latency=True)
            arrival = oldest[0]["received_at"] if oldest else None
            totals = add_queue_totals(totals, QueueTotals(number, None, None, arrival))
        try:
            return await _add_queue_bytes(executor, totals, deadline)
        except (ServerUnreachable, MongoCommandError):
            return totals

    return await client.operate("waiting", read, until=client.clock.seconds() + STATISTICS_TIMEOUT)


async def _add_queue_bytes(executor: OperationExecutor, totals: QueueTotals, deadline: float) -> QueueTotals:
    """Add number and bytes of the queues, unless they are too many."""
    queues = size = 0
    nonempty: Document = {"$match": {"waited_for": True}}
    for half in QUEUES.values():
        stages: list[Document] = [nonempty, {"$limit": _MAX_SUMMED_QUEUES + 1}, {"$count": "n"}]
        counted = await executor.query(build_aggregate(half.owners, stages, hint=half.nonempty), deadline)
        if counted and counted[0]["n"] > _MAX_SUMMED_QUEUES:
            return totals
    for half in QUEUES.values():
        total: Document = {"$group": {"_id": None, "bytes": {"$sum": f"${half.bytes}"}, "queues": {"$sum": 1}}}
        query = build_aggregate(half.owners, [nonempty, total], hint=half.nonempty)
        for one in await executor.query(query, deadline):
            queues, size = queues + one["queues"], size + one["bytes"]
    return replace(totals, bytes=size, recipients=queues)


async def _count_documents(executor: OperationExecutor, collection: str, deadline: float) -> int:
    query = build_aggregate(collection, [{"$limit": _EXACT_COUNT_LIMIT}, {"$count": "n"}], hint="_id_")
    counted = await executor.query(query, deadline, low_latency=True)
    number: int = counted[0]["n"] if counted else 0
    if number < _EXACT_COUNT_LIMIT:
        return number
    # The metadata costs nothing, and may be wrong after a crash of the server and by transactions that were aborted.
    reply = await executor.command(MongoCommand({"count": collection}), deadline, low_latency=True)
    return max(int(reply["n"]), number)


async def _read_totals(executor: OperationExecutor, ledger: StoreLedger, deadline: float) -> list[int]:
    """Return the number of queued messages of each half, by the ledger or else by a count."""
    numbers = ledger.didcomm.waiting, ledger.decentrl.waiting
    return [
        await _count_documents(executor, half.messages, deadline) if number is None else number
        for half, number in zip(QUEUES.values(), numbers, strict=True)
    ]


async def read_collection_sizes(client: ReplicaSetClient) -> dict[str, int]:
    """Return the bytes of each collection with its indexes; none if the user is not authorized to read them."""

    async def read(executor: OperationExecutor, deadline: float) -> dict[str, int]:
        listing = MongoCommand({"listCollections": 1, "nameOnly": True, "authorizedCollections": True})
        stages: list[Document] = [{"$collStats": {"storageStats": {}}}, {"$project": _COLLECTION_BYTES}]
        sizes: dict[str, int] = {}
        try:
            listed = await executor.command(listing, deadline)
            for one in listed["cursor"]["firstBatch"]:
                if one["type"] == "collection":
                    (stats,) = await executor.query(build_aggregate(one["name"], stages), deadline)
                    sizes[one["name"]] = int(stats["bytes"])
        except MongoCommandError:
            pass
        return sizes

    return await client.operate("table_sizes", read, until=client.clock.seconds() + STATISTICS_TIMEOUT)


async def _rank_queues(executor: OperationExecutor, top: int, deadline: float) -> list[tuple[str, int]]:
    found = await executor.query(_build_ranking_query(top), deadline) if top > 0 else []
    return [(one["_id"], one["number"]) for one in found]


def _build_ranking_query(top: int, *, detailed: bool = False) -> MongoCommand:
    """
    Build a query for the longest queues of both halves: documents with the DID as `_id`, and `number`.

    :param detailed: whether to find `bytes`, and ids of the owners as `queues`, as well.
    """
    ours, theirs = [_build_ranking_stages(half, top, detailed) for half in QUEUES.values()]
    sums: Document = {"_id": "$did", "number": {"$sum": "$number"}}
    if detailed:
        sums |= {"bytes": {"$sum": "$bytes"}, "queues": {"$push": "$_id"}}
    union: Document = {"$unionWith": {"coll": QUEUES["decentrl"].owners, "pipeline": theirs}}
    last: list[Document] = [{"$group": sums}, {"$sort": {"number": -1, "_id": 1}}, {"$limit": top}]
    return build_aggregate(QUEUES["didcomm"].owners, [*ours, union, *last])


def _build_ranking_stages(half: QueueCollections, top: int, detailed: bool) -> list[Document]:
    more = {"_id": 1, "bytes": f"${half.bytes}"} if detailed else {"_id": 0}
    return [
        {"$match": {"waited_for": {"$exists": True}}},
        {"$limit": _MAX_RANKED_QUEUES},
        {"$project": {"did": 1, "number": f"${half.counter}", **more}},
        {"$sort": {"number": -1}},
        {"$limit": top + _EXTRA_RANKED_QUEUES},
    ]


async def read_backlog(client: ReplicaSetClient, bounds: Sequence[float], top: int) -> QueueBacklog:
    """As :meth:`~mediatord.store.interfaces.messages.IMessageStore.read_backlog`."""

    async def read(executor: OperationExecutor, deadline: float) -> QueueBacklog:
        largest = await _find_longest_queues(executor, top, deadline) if top > 0 else []
        ledger, buckets = await read_ledger_with(executor, deadline, partial(_read_buckets, bounds))
        totals = [(number, None) for number in await _read_totals(executor, ledger, deadline)]
        halves = [complete_buckets(some, *total) for some, total in zip(buckets, totals, strict=True)]
        found = replace(build_backlog(halves, totals, largest), books=ledger)
        sizes = [one.bytes for one in found.cohorts]
        return found if None in sizes else replace(found, bytes=sum([size or 0 for size in sizes]))

    return await client.operate("backlog", read, until=get_ledger_deadline(client))


async def _read_buckets(bounds: Sequence[float], run: LedgerQuery) -> list[list[AgeBucket]]:
    """Count the messages of each half by age, and sum their bytes where they are few."""
    buckets = []
    for half in QUEUES.values():
        matches = [_build_id_match(first, end) for first, end in get_id_ranges(bounds)]
        count: list[Document] = [{"$limit": _COHORT_COUNT_LIMIT}, {"$count": "n"}]
        counts = await run([build_aggregate(half.messages, [match, *count], hint="_id_") for match in matches])
        numbers = [found[0]["n"] if found else 0 for found in counts]
        total: list[Document] = [{"$limit": _COHORT_SIZE_LIMIT}, {"$group": {"_id": None, "n": {"$sum": "$size"}}}]
        few = [place for place, number in enumerate(numbers) if 0 < number < _COHORT_SIZE_LIMIT]
        queries = [build_aggregate(half.messages, [matches[place], *total], hint="_id_") for place in few]
        sizes: dict[int, int | None] = {place: 0 for place, number in enumerate(numbers) if not number}
        for place, found in zip(few, await run(queries) if queries else [], strict=True):
            sizes[place] = found[0]["n"] if found else 0
        buckets.append(
            [
                AgeBucket(number, sizes.get(place), number < _COHORT_COUNT_LIMIT)
                for place, number in enumerate(numbers)
            ]
        )
    return buckets


def _build_id_match(first: str | None, end: str | None) -> Document:
    bounds: Document = {} if first is None else {"$gte": first}
    if end is not None:
        bounds["$lt"] = end
    return {"$match": {"_id": bounds} if bounds else {}}


async def _find_longest_queues(executor: OperationExecutor, top: int, deadline: float) -> list[LargeQueue]:
    found = await executor.query(_build_ranking_query(top, detailed=True), deadline)
    # A queue of one half has nothing in the other one.
    queues = [(one["_id"], queue, half) for one in found for queue in one["queues"] for half in QUEUES.values()]
    replies = await executor.run_reads([_build_oldest_query(half, queue) for _, queue, half in queues], deadline)
    times: dict[str, list[float | None]] = {}
    for (did, _, _), reply in zip(queues, replies, strict=True):
        if isinstance(reply, MongoCommandError):
            raise reply
        first = reply["cursor"]["firstBatch"]
        times.setdefault(did, []).append(first[0]["received_at"] if first else None)
    return [LargeQueue(one["_id"], one["number"], one["bytes"], find_earliest(*times[one["_id"]])) for one in found]


def _build_oldest_query(half: QueueCollections, queue: Any) -> MongoCommand:
    projection = {"_id": 0, "received_at": 1}
    return build_find(
        half.messages, {half.owner: queue}, sort={"seq": 1}, limit=1, projection=projection, hint=half.index
    )
