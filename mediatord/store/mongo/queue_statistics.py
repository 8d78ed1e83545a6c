"""
Which queues are the longest, and what waits in all of them, those of both halves together.

What waits by age and by queue, of both halves together.

Messages and events are found by their ids, which begin with the time that they came, so that of most of them nothing
but a key is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
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
from mediatord.store.message_operations import (
    add_queue_totals,
    build_backlog,
    complete_buckets,
    find_earliest,
    get_id_ranges,
)
from mediatord.store.mongo.driver.client import ReplicaSetClient
from mediatord.store.mongo.driver.commands import Document, MongoCommand, build_aggregate, build_find, read_cursor
from mediatord.store.mongo.driver.errors import MongoCommandError, ServerUnreachable
from mediatord.store.mongo.driver.executor import OperationExecutor
from mediatord.store.mongo.ledger import LedgerQuery, get_ledger_deadline, read_ledger_with
from mediatord.store.mongo.schema import MESSAGES, PARTIES, PENDING_EVENTS, PENDING_OF_PARTY, RECIPIENTS

# Seconds that it may take, as nobody's mail depends on it.
STATISTICS_TIMEOUT = 1.5
# Documents of a collection that are counted one by one.
_EXACT_COUNT_LIMIT = 20_000
# Queues of a half that are looked at, and of the longest of them those that may be parts of one, beside those asked
# for: a DID that has changed hands has several.
_MAX_RANKED_QUEUES = 50_000
_EXTRA_RANKED_QUEUES = 1_000
# Queues of a half whose bytes are added up each time that what waits is asked for.
_MAX_SUMMED_QUEUES = 5_000
_COLLECTION_BYTES: Document = {"bytes": {"$add": ["$storageStats.storageSize", "$storageStats.totalIndexSize"]}}
_SUMMED_COLLECTIONS = (
    (RECIPIENTS, "recipient_waited_for", "bytes"),
    (PARTIES, "party_waited_for", PENDING_EVENTS.bytes),
)


async def read_queue_sizes(client: ReplicaSetClient, top: int) -> tuple[list[tuple[str, int]], int]:
    """
    The `top` largest with their DIDs, and the sum of all others.

    Of more queues than are looked at, the largest among those. The sum is always that of all; of very many messages
    it is what the server says, which may be a little wrong, and more so after it was killed.
    """

    async def look(executor: OperationExecutor, deadline: float) -> tuple[list[tuple[str, int]], int]:
        total = 0
        for collection in (MESSAGES, PENDING_EVENTS.name):
            total += await count_documents(executor, collection, deadline)
        found = await executor.query(_build_largest_queues_query(top), deadline) if top > 0 else []
        sizes = [(one["_id"], one["number"]) for one in found]
        return sizes, max(total - sum(number for _, number in sizes), 0)

    return await client.operate("queue_sizes", look, until=client.clock.seconds() + STATISTICS_TIMEOUT)


async def read_statistics(client: ReplicaSetClient, top: int) -> StoreStatistics:
    """
    The largest queues are looked for just before the rest, since no transaction can; the sum is of the same moment as
    the ledger.
    """

    async def look(executor: OperationExecutor, deadline: float) -> StoreStatistics:
        found = await executor.query(_build_largest_queues_query(top), deadline) if top > 0 else []
        books, _ = await read_ledger_with(executor, deadline, _read_nothing)
        total = await read_total(executor, books, deadline)
        sizes = tuple((one["_id"], one["number"]) for one in found)
        return StoreStatistics(sizes, max(total - sum(number for _, number in sizes), 0), books)

    return await client.operate("statistics", look, until=get_ledger_deadline(client))


async def _read_nothing(_: LedgerQuery) -> None:
    pass


async def read_total(executor: OperationExecutor, books: StoreLedger, deadline: float) -> int:
    """What waits by the ledger, or what the server says if that is not known."""
    halves = books.didcomm.waiting, books.decentrl.waiting
    if None not in halves:
        return sum(number or 0 for number in halves)
    return sum(
        [await count_documents(executor, collection, deadline) for collection in (MESSAGES, PENDING_EVENTS.name)]
    )


async def read_waiting(client: ReplicaSetClient) -> QueueTotals:
    """
    All that waits. Where a half has more queues than are added up, or that would take too long, it is not said how
    many those are and what is in them. The first message is the one with the lowest id, which begins with the time.
    """

    async def look(executor: OperationExecutor, deadline: float) -> QueueTotals:
        messages = await _read_waiting_in(executor, MESSAGES, deadline)
        known = add_queue_totals(messages, await _read_waiting_in(executor, PENDING_EVENTS.name, deadline))
        try:
            return await _add_queue_totals(executor, known, deadline)
        except (ServerUnreachable, MongoCommandError):
            return known

    return await client.operate("waiting", look, until=client.clock.seconds() + STATISTICS_TIMEOUT)


async def _read_waiting_in(executor: OperationExecutor, collection: str, deadline: float) -> QueueTotals:
    number = await count_documents(executor, collection, deadline)
    first = build_find(collection, {}, sort={"_id": 1}, limit=1, projection={"received_at": 1}, hint="_id_")
    oldest = await executor.query(first, deadline, prompt=True)
    return QueueTotals(number, None, None, oldest[0]["received_at"] if oldest else None)


async def _add_queue_totals(executor: OperationExecutor, known: QueueTotals, deadline: float) -> QueueTotals:
    """With what is in the queues and how many those are, unless they are too many."""
    queues = size = 0
    for collection, index, _ in _SUMMED_COLLECTIONS:
        # By the index alone.
        some: list[Document] = [{"$match": {"waited_for": True}}, {"$limit": _MAX_SUMMED_QUEUES + 1}, {"$count": "n"}]
        counted = await executor.query(build_aggregate(collection, some, hint=index), deadline)
        if counted and counted[0]["n"] > _MAX_SUMMED_QUEUES:
            return known
    for collection, index, name in _SUMMED_COLLECTIONS:
        total: Document = {"$group": {"_id": None, "bytes": {"$sum": f"${name}"}, "queues": {"$sum": 1}}}
        summed = build_aggregate(collection, [{"$match": {"waited_for": True}}, total], hint=index)
        for one in await executor.query(summed, deadline):
            queues, size = queues + one["queues"], size + one["bytes"]
    return replace(known, bytes=size, recipients=queues)


async def count_documents(executor: OperationExecutor, collection: str, deadline: float) -> int:
    """How many documents there are."""
    first = build_aggregate(collection, [{"$limit": _EXACT_COUNT_LIMIT}, {"$count": "n"}], hint="_id_")
    counted = await executor.query(first, deadline, prompt=True)
    number: int = counted[0]["n"] if counted else 0
    if number < _EXACT_COUNT_LIMIT:
        return number
    # What is said of all of them costs nothing. It may be wrong after a crash of the server, and by what was undone.
    said: int = (await executor.command(MongoCommand({"count": collection}), deadline, prompt=True))["n"]
    return max(said, number)


async def read_collection_sizes(client: ReplicaSetClient) -> dict[str, int]:
    """Bytes of each collection with its indexes; none where the user may not ask."""

    async def look(executor: OperationExecutor, deadline: float) -> dict[str, int]:
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

    return await client.operate("table_sizes", look, until=client.clock.seconds() + STATISTICS_TIMEOUT)


def _build_largest_queues_query(top: int) -> MongoCommand:
    return build_aggregate(
        RECIPIENTS,
        [
            *build_ranking_stages("messages", top),
            {"$unionWith": {"coll": PARTIES, "pipeline": build_ranking_stages("pending", top)}},
            {"$group": {"_id": "$did", "number": {"$sum": "$number"}}},
            {"$sort": {"number": -1, "_id": 1}},
            {"$limit": top},
        ],
    )


def build_ranking_stages(counter: str, top: int, more: Document | None = None) -> list[Document]:
    """
    The largest of those that something waits for, with how much that is, as stages of a pipeline.

    :param more: what else is to be told of each, as a projection.
    """
    return [
        {"$match": {"waited_for": {"$exists": True}}},
        {"$limit": _MAX_RANKED_QUEUES},
        {"$project": {"_id": 0, "did": 1, "number": f"${counter}", **(more or {})}},
        {"$sort": {"number": -1}},
        {"$limit": top + _EXTRA_RANKED_QUEUES},
    ]


# Of each cohort: keys that are counted, and documents at most whose bytes are added up.
_COHORT_COUNT_LIMIT = 20_000
_COHORT_SIZE_LIMIT = 2_000


@dataclass(frozen=True, slots=True)
class _BacklogHalf:
    """
    :param waits: the collection of what waits.
    :param waiters: and of those that it waits for, with how much, under `counter` and `bytes`.
    :param of: the field of the first that names one of the second, and an index that begins with it.
    """

    waits: str
    waiters: str
    counter: str
    bytes: str
    of: str
    index: str


_BACKLOG_HALVES = (
    _BacklogHalf(MESSAGES, RECIPIENTS, "messages", "bytes", "recipient", "message_of_recipient"),
    _BacklogHalf(
        PENDING_EVENTS.name, PARTIES, PENDING_EVENTS.counter, PENDING_EVENTS.bytes, "party", PENDING_OF_PARTY
    ),
)


async def read_backlog(client: ReplicaSetClient, bounds: Sequence[float], top: int) -> QueueBacklog:
    """As :meth:`~mediatord.store.interfaces.messages.IMessageStore.read_backlog`."""

    async def look(executor: OperationExecutor, deadline: float) -> QueueBacklog:
        largest = await _find_longest_queues(executor, top, deadline) if top > 0 else []
        books, cohorts = await read_ledger_with(executor, deadline, partial(_read_all_cohorts, bounds))
        totals = [
            (await count_documents(executor, half.waits, deadline) if waiting is None else waiting, None)
            for half, waiting in zip(_BACKLOG_HALVES, (books.didcomm.waiting, books.decentrl.waiting), strict=True)
        ]
        halves = [complete_buckets(some, *total) for some, total in zip(cohorts, totals, strict=True)]
        found = replace(build_backlog(halves, totals, largest), books=books)
        sizes = [one.bytes for one in found.cohorts]
        return found if None in sizes else replace(found, bytes=sum([size or 0 for size in sizes]))

    return await client.operate("backlog", look, until=get_ledger_deadline(client))


async def _read_all_cohorts(bounds: Sequence[float], ask: LedgerQuery) -> list[list[AgeBucket]]:
    return [await _read_cohorts(ask, half.waits, bounds) for half in _BACKLOG_HALVES]


async def _read_cohorts(ask: LedgerQuery, name: str, bounds: Sequence[float]) -> list[AgeBucket]:
    matches = [_build_id_match(first, end) for first, end in get_id_ranges(bounds)]
    count: list[Document] = [{"$limit": _COHORT_COUNT_LIMIT}, {"$count": "n"}]
    counts = await ask([build_aggregate(name, [some, *count], hint="_id_") for some in matches])
    numbers = [found[0]["n"] if found else 0 for found in counts]
    weigh: list[Document] = [{"$limit": _COHORT_SIZE_LIMIT}, {"$group": {"_id": None, "n": {"$sum": "$size"}}}]
    few = [place for place, number in enumerate(numbers) if 0 < number < _COHORT_SIZE_LIMIT]
    questions = [build_aggregate(name, [matches[place], *weigh], hint="_id_") for place in few]
    sizes: dict[int, int | None] = {place: 0 for place, number in enumerate(numbers) if not number}
    for place, found in zip(few, await ask(questions) if questions else [], strict=True):
        sizes[place] = found[0]["n"] if found else 0
    return [AgeBucket(number, sizes.get(place), number < _COHORT_COUNT_LIMIT) for place, number in enumerate(numbers)]


def _build_id_match(first: str | None, end: str | None) -> Document:
    bounds: Document = {} if first is None else {"$gte": first}
    if end is not None:
        bounds["$lt"] = end
    return {"$match": {"_id": bounds} if bounds else {}}


async def _find_longest_queues(executor: OperationExecutor, top: int, deadline: float) -> list[LargeQueue]:
    pipelines = [
        build_ranking_stages(half.counter, top, {"bytes": f"${half.bytes}", "_id": 1}) for half in _BACKLOG_HALVES
    ]
    (ours, theirs), (recipients, parties) = _BACKLOG_HALVES, pipelines
    together: Document = {
        "_id": "$did",
        "number": {"$sum": "$number"},
        "bytes": {"$sum": "$bytes"},
        "queues": {"$push": "$_id"},
    }
    pipeline = [
        *recipients,
        {"$unionWith": {"coll": theirs.waiters, "pipeline": parties}},
        {"$group": together},
        {"$sort": {"number": -1, "_id": 1}},
        {"$limit": top},
    ]
    found = await executor.query(build_aggregate(ours.waiters, pipeline), deadline)
    queues = [(one["_id"], queue) for one in found for queue in one["queues"]]
    firsts = await _run_queries(
        executor, [_build_oldest_query(half, queue) for _, queue in queues for half in _BACKLOG_HALVES], deadline
    )
    times: dict[str, list[float | None]] = {}
    for number, first in enumerate(firsts):
        did, _ = queues[number // len(_BACKLOG_HALVES)]
        times.setdefault(did, []).append(first[0]["received_at"] if first else None)
    return [LargeQueue(one["_id"], one["number"], one["bytes"], find_earliest(*times[one["_id"]])) for one in found]


def _build_oldest_query(half: _BacklogHalf, queue: Any) -> MongoCommand:
    """What arrived first in a queue; a queue of the other half has nothing in this one."""
    projection = {"_id": 0, "received_at": 1}
    return build_find(half.waits, {half.of: queue}, sort={"seq": 1}, limit=1, projection=projection, hint=half.index)


async def _run_queries(
    executor: OperationExecutor, questions: Sequence[MongoCommand], deadline: float
) -> list[list[Document]]:
    """
    What several questions of few answers find, asked at once.

    :raise Refused: one of them was.
    """
    if not questions:
        return []
    found = []
    for question, reply in zip(questions, await executor.all(questions, deadline), strict=True):
        if isinstance(reply, MongoCommandError):
            raise reply
        found.append(await read_cursor(_reject_next_batch, next(iter(question.body.values())), reply))
    return found


async def _reject_next_batch(_: MongoCommand) -> Document:
    raise AssertionError("one document is never more than a batch")
