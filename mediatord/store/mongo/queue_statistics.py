"""
Statistics of queued messages: ledger, sizes, totals, age and the longest queues, of both protocols together.

Ids of messages and events begin with the time of arrival, so their age is found by keys alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import TypeVar

from mediatord.store.interfaces.messages import (
    AgeBucket,
    LargeQueue,
    QueueBacklog,
    QueueTotals,
    StoreLedger,
    StoreStatistics,
)
from mediatord.store.mongo.driver.client import ReplicaSetClient
from mediatord.store.mongo.driver.collection import Collection, Document, MongoCommand
from mediatord.store.mongo.driver.errors import MongoCommandError, ServerUnreachable
from mediatord.store.mongo.driver.operation import Operation, operation
from mediatord.store.mongo.driver.transactions import Transaction
from mediatord.store.mongo.ledger import LEDGER_TIMEOUT, read_ledger_with, read_nothing
from mediatord.store.mongo.schema import NOT_EMPTY, PRESENT, QUEUES
from mediatord.store.queue_backlog import (
    add_queue_totals,
    build_backlog,
    complete_buckets,
    find_earliest,
    get_id_ranges,
)

T = TypeVar("T")

# Seconds for an operation.
STATISTICS_TIMEOUT = 1.5
# Documents of a collection that are counted one by one.
_EXACT_COUNT_LIMIT = 20_000
# Queues of a protocol that are ranked; and those of the longest that are kept beside the ones asked for, since a DID
# that has changed its account has several.
_MAX_RANKED_QUEUES = 50_000
_EXTRA_RANKED_QUEUES = 1_000
# Queues of a protocol whose bytes are summed.
_MAX_SUMMED_QUEUES = 5_000
# Of each age: keys that are counted, and documents whose bytes are summed.
_BUCKET_COUNT_LIMIT = 20_000
_BUCKET_SIZE_LIMIT = 2_000


class MongoQueueStatistics:
    """Statistics of the store; see `IMessageStore`."""

    _client: ReplicaSetClient

    @operation
    async def read_ledger(self) -> StoreLedger:
        with self._operate("ledger", LEDGER_TIMEOUT) as run:
            ledger, _ = await read_ledger_with(run, read_nothing)
        return ledger

    @operation
    async def queue_sizes(self, top: int) -> tuple[list[tuple[str, int]], int]:
        """
        Return the longest queues with their DIDs, and the sum of all others.

        Of very many queues only :data:`_MAX_RANKED_QUEUES` are ranked. Of very many messages the sum is that of the
        metadata, which may be a little wrong, and more so after a crash of the server.
        """
        with self._operate("queue_sizes") as run:
            total = sum([await _count_documents(run, collections.messages) for collections in QUEUES.values()])
            sizes = await _rank_queues(run, top)
        return sizes, max(total - sum(number for _, number in sizes), 0)

    @operation
    async def read_statistics(self, top: int) -> StoreStatistics:
        """Rank queues just before the rest, since no transaction can; the sum is that of the ledger."""
        with self._operate("statistics", LEDGER_TIMEOUT) as run:
            sizes = await _rank_queues(run, top)
            ledger, _ = await read_ledger_with(run, read_nothing)
            total = sum(await _read_totals(run, ledger))
            return StoreStatistics(tuple(sizes), max(total - sum(number for _, number in sizes), 0), ledger)

    @operation
    async def get_queue_totals(self) -> QueueTotals:
        """
        Return the totals of all queues. With too many queues, or not enough time, their number and bytes are unknown.
        The oldest message is the one with the lowest id.
        """
        with self._operate("waiting") as run:
            totals = QueueTotals(0, None, None, None)
            for collections in QUEUES.values():
                number = await _count_documents(run, collections.messages)
                first = collections.messages.find(
                    {}, sort={"_id": 1}, limit=1, projection={"received_at": 1}, hint="_id_"
                )
                oldest = await run.query(first, low_latency=True)
                arrival = oldest[0]["received_at"] if oldest else None
                totals = add_queue_totals(totals, QueueTotals(number, None, None, arrival))
            try:
                return await _add_queue_bytes(run, totals)
            except (ServerUnreachable, MongoCommandError):
                return totals

    @operation
    async def read_backlog(self, bounds: Sequence[float], top: int) -> QueueBacklog:
        edges = tuple(bounds)
        with self._operate("backlog", LEDGER_TIMEOUT) as run:
            largest = await _find_longest_queues(run, top) if top > 0 else []
            ledger, buckets = await read_ledger_with(run, partial(_read_buckets, edges))
            totals = [(number, None) for number in await _read_totals(run, ledger)]
            buckets = [complete_buckets(some, *total) for some, total in zip(buckets, totals, strict=True)]
            found = replace(build_backlog(buckets, totals, largest), ledger=ledger)
            sizes = [one.bytes for one in found.buckets]
            return found if None in sizes else replace(found, bytes=sum([size or 0 for size in sizes]))

    @operation
    async def table_sizes(self) -> dict[str, int]:
        """Return the bytes of each collection with its indexes; none if the user is not authorized to read them."""
        with self._operate("table_sizes") as run:
            listing = MongoCommand({"listCollections": 1, "nameOnly": True, "authorizedCollections": True})
            size: Document = {"bytes": {"$add": ["$storageStats.storageSize", "$storageStats.totalIndexSize"]}}
            sizes: dict[str, int] = {}
            try:
                listed = await run.command(listing)
                for one in listed["cursor"]["firstBatch"]:
                    if one["type"] == "collection":
                        stages: list[Document] = [{"$collStats": {"storageStats": {}}}, {"$project": size}]
                        for stats in await run.query(Collection(one["name"]).aggregate(stages)):
                            # None of a collection that is just being created or dropped.
                            sizes[one["name"]] = int(stats["bytes"] or 0)
            except MongoCommandError:
                pass
            return sizes

    def _operate(self, name: str, seconds: float | None = None) -> AbstractContextManager[Operation]:
        until = self._client.clock.seconds() + (STATISTICS_TIMEOUT if seconds is None else seconds)
        return self._client.operate(name, until=until)


async def _add_queue_bytes(run: Operation, totals: QueueTotals) -> QueueTotals:
    """Add number and bytes of the queues, unless they are too many."""
    queues = size = 0
    for collections in QUEUES.values():
        stages: list[Document] = [NOT_EMPTY, {"$limit": _MAX_SUMMED_QUEUES + 1}, {"$count": "n"}]
        counted = await run.query(collections.owners.aggregate(stages, hint=collections.nonempty))
        if counted and counted[0]["n"] > _MAX_SUMMED_QUEUES:
            return totals
    for collections in QUEUES.values():
        for one in await run.query(collections.build_sum_query()):
            queues, size = queues + one["queues"], size + one["bytes"]
    return replace(totals, bytes=size, recipients=queues)


async def _count_documents(run: Operation, collection: Collection) -> int:
    query = collection.aggregate([{"$limit": _EXACT_COUNT_LIMIT}, {"$count": "n"}], hint="_id_")
    number: int = sum([one["n"] for one in await run.query(query, low_latency=True)])
    if number < _EXACT_COUNT_LIMIT:
        return number
    # The metadata costs nothing, and may be wrong after a crash of the server and by transactions that were aborted.
    return max(int((await run.command(collection.count(), low_latency=True))["n"]), number)


async def _read_totals(run: Operation, ledger: StoreLedger) -> list[int]:
    """Return the number of queued messages of each protocol, by the ledger or else by a count."""
    numbers = ledger.didcomm.waiting, ledger.decentrl.waiting
    return [
        await _count_documents(run, collections.messages) if number is None else number
        for collections, number in zip(QUEUES.values(), numbers, strict=True)
    ]


async def _rank_queues(run: Operation, top: int) -> list[tuple[str, int]]:
    found = await run.query(_build_ranking_query(top)) if top > 0 else []
    return [(one["_id"], one["number"]) for one in found]


def _build_ranking_query(top: int) -> MongoCommand:
    """
    Build a query for the longest queues of both protocols by DID.

    :return: finds the DID as `_id`, `number`, `bytes`, and `queues`, the ids of the owners.
    """
    stages: list[list[Document]] = [
        [
            {"$match": {"waited_for": PRESENT}},
            {"$limit": _MAX_RANKED_QUEUES},
            {"$project": {"did": 1, "number": f"${collections.counter}", "bytes": f"${collections.bytes}"}},
            {"$sort": {"number": -1}},
            {"$limit": top + _EXTRA_RANKED_QUEUES},
        ]
        for collections in QUEUES.values()
    ]
    union: Document = {"$unionWith": {"coll": QUEUES["decentrl"].owners.name, "pipeline": stages[1]}}
    sums = {"number": {"$sum": "$number"}, "bytes": {"$sum": "$bytes"}, "queues": {"$push": "$_id"}}
    last: list[Document] = [
        {"$group": {"_id": "$did", **sums}},
        {"$sort": {"number": -1, "_id": 1}},
        {"$limit": top},
    ]
    return QUEUES["didcomm"].owners.aggregate([*stages[0], union, *last])


async def _read_buckets(bounds: Sequence[float], transaction: Transaction) -> list[list[AgeBucket]]:
    """Count the messages of each protocol by age, and sum their bytes where they are few."""
    buckets = []
    count: list[Document] = [{"$limit": _BUCKET_COUNT_LIMIT}, {"$count": "n"}]
    total: list[Document] = [{"$limit": _BUCKET_SIZE_LIMIT}, {"$group": {"_id": None, "n": {"$sum": "$size"}}}]
    for collections in QUEUES.values():
        matches = [_build_id_match(first, end) for first, end in get_id_ranges(bounds)]
        counts = await transaction.query_many(
            *[collections.messages.aggregate([match, *count], hint="_id_") for match in matches]
        )
        numbers = [found[0]["n"] if found else 0 for found in counts]
        few = [place for place, number in enumerate(numbers) if 0 < number < _BUCKET_SIZE_LIMIT]
        sums = await transaction.query_many(
            *[collections.messages.aggregate([matches[place], *total], hint="_id_") for place in few]
        )
        sizes: dict[int, int | None] = {place: 0 for place, number in enumerate(numbers) if not number}
        sizes |= {place: found[0]["n"] if found else 0 for place, found in zip(few, sums, strict=True)}
        buckets.append(
            [
                AgeBucket(number, sizes.get(place), number < _BUCKET_COUNT_LIMIT)
                for place, number in enumerate(numbers)
            ]
        )
    return buckets


def _build_id_match(first: str | None, end: str | None) -> Document:
    bounds: Document = {} if first is None else {"$gte": first}
    if end is not None:
        bounds["$lt"] = end
    return {"$match": {"_id": bounds} if bounds else {}}


async def _find_longest_queues(run: Operation, top: int) -> list[LargeQueue]:
    found = await run.query(_build_ranking_query(top))
    # A queue of one protocol has nothing in the other one.
    queues = [
        (one["_id"], queue, collections)
        for one in found
        for queue in one["queues"]
        for collections in QUEUES.values()
    ]
    replies = await run.run_reads([collections.build_first_query(queue) for _, queue, collections in queues])
    times: dict[str, list[float | None]] = {}
    for (did, _, _), reply in zip(queues, replies, strict=True):
        if isinstance(reply, MongoCommandError):
            raise reply
        first = reply["cursor"]["firstBatch"]
        times.setdefault(did, []).append(first[0]["received_at"] if first else None)
    return [LargeQueue(one["_id"], one["number"], one["bytes"], find_earliest(*times[one["_id"]])) for one in found]
