"""Ending nodes: all that hangs on one goes before it does, and nothing of one that has come back meanwhile."""

from __future__ import annotations

from datetime import UTC, datetime
from math import isinf

from mediatord.store.mongo.cluster_schema import MEETING, NODES, PRESENCE, ROSTER, TURNS
from mediatord.store.mongo.duplicates import retried
from mediatord.store.mongo.marks import delivered_by, release_delivered
from mediatord.store.mongo.requests import Document, deleting, updating
from mediatord.store.mongo.server import Server
from mediatord.store.mongo.transaction import Transaction

_NODES: Document = {"_id": {"$ne": ROSTER}}
_LAPSED: Document = {**_NODES, "$expr": {"$lte": ["$until", "$$NOW"]}}
# Records of presence that go in one transaction.
_AT_A_TIME = 2_000


async def ended(server: Server) -> list[str]:
    """Boots that there is something left of, and that are not live. What is left is looked at before who is there."""
    reply = await server.command("lapsed", {"distinct": PRESENCE, "key": "boot"})
    left = {*reply["values"], *await delivered_by(server)} - {""}
    known = await server.find("lapsed", NODES, _NODES, projection={"_id": 1})
    over = await server.find("lapsed", NODES, _LAPSED, projection={"_id": 1})
    return sorted({one["_id"] for one in over} | (left - {one["_id"] for one in known}))


async def end(server: Server, boot: str, until: float, *, own: bool) -> int:
    """
    End a node that is not live, or whose lease is over by `until`; how many messages are pending again.

    :param own: it is this process.
    """
    stays = _staying(boot, until)
    if await server.find("drop", NODES, stays, limit=1, projection={"_id": 1}):
        return 0
    if not own:
        await server.end_sessions(boot)
    while (left := await retried(lambda: server.transact("drop", lambda begun: _take_away(begun, boot, stays)))) > 0:
        pass
    return 0 if left < 0 else await release_delivered(server, boot)


async def _take_away(transaction: Transaction, boot: str, stays: Document) -> int:
    """
    Some of its records, and itself with the last of them: 0. Nothing if it stays: -1.

    Takes part in the meeting of those that join: a node that comes back does so before or after this, and what it
    announces then is not taken away.
    """
    if await transaction.find(NODES, stays, limit=1, projection={"_id": 1}):
        return -1
    some = await transaction.find(PRESENCE, {"boot": boot}, limit=_AT_A_TIME, projection={"_id": 1})
    transaction.later(updating(NODES, [MEETING]))
    transaction.later(deleting(PRESENCE, {"_id": {"$in": [one["_id"] for one in some]}}))
    if len(some) < _AT_A_TIME:
        transaction.later(deleting(TURNS, {"boot": boot}))
        transaction.later(deleting(NODES, {"_id": boot}))
        return 0
    return len(some)


def _staying(boot: str, until: float) -> Document:
    """Finds a node that is not to be ended."""
    if isinf(until):
        return {"_id": {"$in": []}}
    seen = datetime.fromtimestamp(until, UTC)
    return {"_id": boot, "$expr": {"$gt": ["$until", {"$max": ["$$NOW", seen]}]}}
