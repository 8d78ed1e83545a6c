"""Which queues are the longest, those of both halves together."""

from __future__ import annotations

from mediatord.store.mongo.collections import RECIPIENTS
from mediatord.store.mongo.decentrl_schema import PARTIES
from mediatord.store.mongo.requests import Document
from mediatord.store.mongo.server import Server


async def queue_sizes(server: Server, top: int) -> tuple[list[tuple[str, int]], int]:
    """The `top` largest with their DIDs, and the sum of all others."""
    both = [
        *_counted("messages"),
        {"$unionWith": {"coll": PARTIES, "pipeline": _counted("pending")}},
        {"$group": {"_id": "$did", "number": {"$sum": "$number"}}},
    ]
    total = [{"$group": {"_id": None, "number": {"$sum": "$number"}}}]
    if top <= 0:
        return [], _number(await server.aggregate("queue_sizes", RECIPIENTS, [*both, *total]))
    largest = [{"$sort": {"number": -1, "_id": 1}}, {"$limit": top}]
    (found,) = await server.aggregate(
        "queue_sizes", RECIPIENTS, [*both, {"$facet": {"largest": largest, "all": total}}]
    )
    sizes = [(one["_id"], one["number"]) for one in found["largest"]]
    return sizes, _number(found["all"]) - sum(number for _, number in sizes)


def _counted(counter: str) -> list[Document]:
    """Those that something waits for, with how much that is."""
    return [
        {"$match": {"waited_for": {"$exists": True}}},
        {"$project": {"_id": 0, "did": 1, "number": f"${counter}"}},
    ]


def _number(found: list[Document]) -> int:
    return found[0]["number"] if found else 0
