"""What was pushed, and by whom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mediatord.store.mongo.collections import MESSAGES
from mediatord.store.mongo.operations import Operations
from mediatord.store.mongo.requests import Document, updating
from mediatord.store.mongo.server import Server
from mediatord.store.mongo.transaction import Transaction

# Messages that become pending again at a time when a node has gone.
_AT_A_TIME = 1_000


@dataclass(frozen=True, slots=True)
class Pushed:
    """:param node: the boot that pushed them."""

    ids: Sequence[str]
    node: str


async def mark_delivered(
    operations: Operations, works: Sequence[Pushed], deadline: float, tries: int | None
) -> Sequence[None]:
    """See :class:`~.gathering.Together`."""

    async def mark(transaction: Transaction) -> None:
        updates = [
            {
                "q": {"_id": {"$in": list(dict.fromkeys(work.ids))}},
                "u": {"$set": {"delivered": work.node}, "$inc": {"pushes": 1}},
                "multi": True,
            }
            for work in works
            if work.ids
        ]
        transaction.later(updating(MESSAGES, updates))

    await operations.transact(mark, deadline, tries=tries)
    return [None] * len(works)


async def mark_pending(
    operations: Operations, works: Sequence[Sequence[str]], deadline: float, tries: int | None
) -> Sequence[list[str]]:
    """See :class:`~.gathering.Together`. The answers are the ids that were delivered."""

    async def mark(transaction: Transaction) -> list[list[str]]:
        ids = {id for work in works for id in work}
        found = await transaction.find(
            MESSAGES, {"_id": {"$in": list(ids)}, "delivered": {"$exists": True}}, projection={"_id": 1}, hint="_id_"
        )
        delivered = {one["_id"] for one in found}
        if delivered:
            transaction.later(updating(MESSAGES, [_forgetting({"_id": {"$in": list(delivered)}})]))
        answers: list[list[str]] = []
        for work in works:
            mine = [id for id in dict.fromkeys(work) if id in delivered]
            delivered.difference_update(mine)
            answers.append(mine)
        return answers

    return await operations.transact(mark, deadline, tries=tries)


async def delivered_by(server: Server) -> list[str]:
    """Boots that have delivered something which still waits."""
    # That it is a text is what the index can tell by itself.
    reply = await server.command(
        "delivered_by", {"distinct": MESSAGES, "key": "delivered", "query": {"delivered": {"$gte": ""}}}
    )
    boots: list[str] = reply["values"]
    return boots


async def release_delivered(server: Server, boot: str) -> int:
    """What was delivered by a node, and still waits, is pending again; how many those were."""
    released = 0
    while True:
        found = await server.find(
            "release_delivered",
            MESSAGES,
            {"delivered": boot},
            limit=_AT_A_TIME,
            projection={"_id": 1},
            hint="message_delivered",
        )
        if not found:
            return released
        some = {"_id": {"$in": [one["_id"] for one in found]}, "delivered": boot}
        # By their ids: by who delivered them, all would be looked at for every slice.
        (reply,) = await server.write("release_delivered", updating(MESSAGES, [_forgetting(some) | {"hint": "_id_"}]))
        released += reply["nModified"]


def _forgetting(filter: Document) -> Document:
    return {"q": filter, "u": {"$unset": {"delivered": 1}}, "multi": True}
