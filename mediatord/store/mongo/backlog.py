"""
What waits by age and by queue, of both halves together.

Messages and events are found by their ids, which begin with the time that they came, so that of most of them nothing
but a key is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from mediatord.interfaces import Backlog, Cohort, LongQueue
from mediatord.store.backlog import completed, earliest, spans, together
from mediatord.store.mongo.books import Ask, patience, read_with
from mediatord.store.mongo.collections import MESSAGES, RECIPIENTS
from mediatord.store.mongo.cursors import aggregating, collect, finding
from mediatord.store.mongo.decentrl_schema import PARTIES, PENDING, PENDING_OF_PARTY
from mediatord.store.mongo.operations import Operations
from mediatord.store.mongo.replies import Refused
from mediatord.store.mongo.requests import Document, Request
from mediatord.store.mongo.server import Server
from mediatord.store.mongo.sizes import longest, number_of

# Of each cohort: keys that are counted, and documents at most whose bytes are added up.
_COUNTED = 20_000
_WEIGHED = 2_000


@dataclass(frozen=True, slots=True)
class _Half:
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


_HALVES = (
    _Half(MESSAGES, RECIPIENTS, "messages", "bytes", "recipient", "message_of_recipient"),
    _Half(PENDING.name, PARTIES, PENDING.counter, PENDING.bytes, "party", PENDING_OF_PARTY),
)


async def backlog(server: Server, bounds: Sequence[float], top: int) -> Backlog:
    """As :meth:`~mediatord.interfaces.IMessageStore.backlog`."""

    async def look(operations: Operations, deadline: float) -> Backlog:
        largest = await _largest(operations, top, deadline) if top > 0 else []
        books, cohorts = await read_with(operations, deadline, partial(_of_halves, bounds))
        totals = [
            (await number_of(operations, half.waits, deadline) if waiting is None else waiting, None)
            for half, waiting in zip(_HALVES, (books.didcomm.waiting, books.decentrl.waiting), strict=True)
        ]
        halves = [completed(some, *total) for some, total in zip(cohorts, totals, strict=True)]
        found = replace(together(halves, totals, largest), books=books)
        sizes = [one.bytes for one in found.cohorts]
        return found if None in sizes else replace(found, bytes=sum([size or 0 for size in sizes]))

    return await server.operate("backlog", look, until=patience(server))


async def _of_halves(bounds: Sequence[float], ask: Ask) -> list[list[Cohort]]:
    return [await _cohorts(ask, half.waits, bounds) for half in _HALVES]


async def _cohorts(ask: Ask, name: str, bounds: Sequence[float]) -> list[Cohort]:
    matches = [_match(first, end) for first, end in spans(bounds)]
    count: list[Document] = [{"$limit": _COUNTED}, {"$count": "n"}]
    counts = await ask([aggregating(name, [some, *count], hint="_id_") for some in matches])
    numbers = [found[0]["n"] if found else 0 for found in counts]
    weigh: list[Document] = [{"$limit": _WEIGHED}, {"$group": {"_id": None, "n": {"$sum": "$size"}}}]
    few = [place for place, number in enumerate(numbers) if 0 < number < _WEIGHED]
    questions = [aggregating(name, [matches[place], *weigh], hint="_id_") for place in few]
    sizes: dict[int, int | None] = {place: 0 for place, number in enumerate(numbers) if not number}
    for place, found in zip(few, await ask(questions) if questions else [], strict=True):
        sizes[place] = found[0]["n"] if found else 0
    return [Cohort(number, sizes.get(place), number < _COUNTED) for place, number in enumerate(numbers)]


def _match(first: str | None, end: str | None) -> Document:
    bounds: Document = {} if first is None else {"$gte": first}
    if end is not None:
        bounds["$lt"] = end
    return {"$match": {"_id": bounds} if bounds else {}}


async def _largest(operations: Operations, top: int, deadline: float) -> list[LongQueue]:
    pipelines = [longest(half.counter, top, {"bytes": f"${half.bytes}", "_id": 1}) for half in _HALVES]
    (ours, theirs), (recipients, parties) = _HALVES, pipelines
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
    found = await operations.query(aggregating(ours.waiters, pipeline), deadline)
    queues = [(one["_id"], queue) for one in found for queue in one["queues"]]
    firsts = await _ask(operations, [_first(half, queue) for _, queue in queues for half in _HALVES], deadline)
    times: dict[str, list[float | None]] = {}
    for number, first in enumerate(firsts):
        did, _ = queues[number // len(_HALVES)]
        times.setdefault(did, []).append(first[0]["received_at"] if first else None)
    return [LongQueue(one["_id"], one["number"], one["bytes"], earliest(*times[one["_id"]])) for one in found]


def _first(half: _Half, queue: Any) -> Request:
    """What arrived first in a queue; a queue of the other half has nothing in this one."""
    projection = {"_id": 0, "received_at": 1}
    return finding(half.waits, {half.of: queue}, sort={"seq": 1}, limit=1, projection=projection, hint=half.index)


async def _ask(operations: Operations, questions: Sequence[Request], deadline: float) -> list[list[Document]]:
    """
    What several questions of few answers find, asked at once.

    :raise Refused: one of them was.
    """
    if not questions:
        return []
    found = []
    for question, reply in zip(questions, await operations.all(questions, deadline), strict=True):
        if isinstance(reply, Refused):
            raise reply
        found.append(await collect(_no_more, next(iter(question.body.values())), reply))
    return found


async def _no_more(_: Request) -> Document:
    raise AssertionError("one document is never more than a batch")
