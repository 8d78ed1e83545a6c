"""
What nodes that share a MongoDB know of each other.

Leases are compared by the server, in the queries and updates themselves. Presence is a record for each DID and node,
which hangs on the node's lease: a node with ten thousand sockets renews one document.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC
from typing import TypeVar

from twisted.internet.defer import Deferred
from zope.interface import implementer

from mediatord.interfaces import (
    ClusterIdentityDiffers,
    ClusterSecretDiffers,
    IClusterStore,
    Node,
    NodeNameTaken,
    Presence,
)
from mediatord.store.mongo.clocks import Clocks
from mediatord.store.mongo.cluster_allowances import putting_back, taking, wait
from mediatord.store.mongo.cluster_ends import end, ended
from mediatord.store.mongo.cluster_schema import MEETING, NODES, PICKUPS, PRESENCE, TURNS
from mediatord.store.mongo.duplicates import begin, retried
from mediatord.store.mongo.requests import Document, Request, deleting, updating
from mediatord.store.mongo.server import Server
from mediatord.store.mongo.transaction import Transaction
from mediatord.store.texts import storable

T = TypeVar("T")

_IS_LIVE: Document = {"$gt": ["$until", "$$NOW"]}
_LIVE: Document = {"$expr": _IS_LIVE}
_DIDS_AT_A_TIME = 1_000


@implementer(IClusterStore)
class MongoCluster:
    """Its many methods are those of the interface."""

    def __init__(self, server: Server, clocks: Clocks) -> None:
        self._server = server
        self._clocks = clocks
        self._own = ""

    def join(self, node: Node, lease: float) -> Deferred[None]:
        return begin(self._join(node, lease))

    def renew(self, boot: str, lease: float) -> Deferred[bool]:
        return begin(self._renew(boot, lease))

    def drop(self, boot: str, *, until: float = 0.0) -> Deferred[int]:
        return begin(self._drop(boot, until))

    def nodes(self) -> Deferred[list[Node]]:
        return begin(self._nodes())

    def lapsed(self) -> Deferred[list[str]]:
        return begin(ended(self._server))

    def announce(self, boot: str, dids: Sequence[str]) -> Deferred[None]:
        records = [{"did": did, "boot": boot} for did in dict.fromkeys(dids)]
        updates = [{"q": record, "u": {"$set": {"boot": boot}}, "upsert": True} for record in records]
        return begin(self._write("announce", updating(PRESENCE, updates, ordered=False)))

    def withdraw(self, boot: str, dids: Sequence[str]) -> Deferred[None]:
        filters = [{"boot": boot, "did": {"$in": some}} for some in _pieces(dids)]
        return begin(self._write("withdraw", deleting(PRESENCE, *filters)))

    def whereabouts(self, dids: Sequence[str]) -> Deferred[list[Presence]]:
        return begin(self._whereabouts(dids))

    def hold(self, turn: str, boot: str, lease: float) -> Deferred[bool]:
        return begin(self._hold(turn, boot, lease))

    def take(self, key: bytes, amount: int, *, limit: int, period: float) -> Deferred[float]:
        return begin(self._take(key, amount, limit, period))

    def put_back(self, key: bytes, amount: int) -> Deferred[None]:
        return begin(self._put_back(key, amount))

    def record_pickups(self, ids: Sequence[str], period: float) -> Deferred[None]:
        change = [{"$set": {"until": _until(period)}}]
        updates = [{"q": {"_id": id_}, "u": change, "upsert": True} for id_ in dict.fromkeys(storable(ids))]
        return begin(self._write("record_pickups", updating(PICKUPS, updates, ordered=False)))

    def picked_up(self, ids: Sequence[str]) -> Deferred[frozenset[str]]:
        return begin(self._picked_up(storable(ids)))

    async def _join(self, node: Node, lease: float) -> None:
        if not self._own:
            self._own = node.boot  # a process has one for as long as it lives
            self._server.belong_to(self._own)
        await self._clocks.compare()

        async def join(transaction: Transaction) -> None:
            _check(node, await transaction.find(NODES, {"_id": {"$ne": node.boot}, **_LIVE}))
            there = {"name": node.name, "address": node.address, "seal": node.seal, "identity": node.identity}
            given = {name: {"$literal": value} for name, value in there.items()}
            change = {"$set": {**given, "until": _until(lease)}}
            joining = {"q": {"_id": node.boot}, "u": [change], "upsert": True}
            transaction.later(updating(NODES, [MEETING, joining]))

        await retried(lambda: self._server.transact("join", join))

    async def _renew(self, boot: str, lease: float) -> bool:
        standing = self._clocks.standing
        live = {"_id": boot, "$expr": {"$and": [_IS_LIVE, self._clocks.agreeing()]}}
        update = {"q": live, "u": [{"$set": {"until": _until(lease)}}]}
        (reply,) = await self._server.write("renew", updating(NODES, [update]))
        if not reply["n"]:
            await self._clocks.compare()
            return False
        self._clocks.agreed(standing)
        return True

    async def _drop(self, boot: str, until: float) -> int:
        return await end(self._server, boot, until, own=boot == self._own) if boot else 0

    async def _nodes(self) -> list[Node]:
        return [_node(one) for one in await self._server.find("nodes", NODES, _LIVE, sort={"name": 1})]

    async def _whereabouts(self, dids: Sequence[str]) -> list[Presence]:
        found: list[Presence] = []
        for some in _pieces(dids):
            documents = await self._server.aggregate("whereabouts", PRESENCE, _with_live_nodes(some))
            live = {one["_id"]: _node(one) for one in documents if "name" in one}
            records = [(one["did"], one["boot"]) for one in documents if "did" in one]
            found += [Presence(did, boot, live.get(boot)) for did, boot in records]
        return found

    async def _picked_up(self, ids: Sequence[str]) -> frozenset[str]:
        found: list[Document] = []
        for some in _pieces(ids):
            found += await self._server.find("picked_up", PICKUPS, {"_id": {"$in": some}, **_LIVE}, hint="_id_")
        return frozenset(one["_id"] for one in found)

    async def _hold(self, turn: str, boot: str, lease: float) -> bool:
        free = {"$or": [{"$eq": ["$boot", {"$literal": boot}]}, {"$not": [_IS_LIVE]}]}
        agreeing = self._clocks.agreeing()  # else it is given up
        change = {
            "$set": {
                "boot": {"$cond": [free, {"$cond": [agreeing, {"$literal": boot}, ""]}, "$boot"]},
                "until": {"$cond": [free, {"$cond": [agreeing, _until(lease), "$$NOW"]}, "$until"]},
            }
        }
        held = await retried(
            lambda: self._server.find_and_modify("hold", TURNS, {"_id": turn}, [change], upsert=True, new=True)
        )
        return held is not None and held["boot"] == boot

    async def _take(self, key: bytes, amount: int, limit: int, period: float) -> float:
        request = taking(key, amount, limit, period)
        reply = await retried(lambda: self._change("take", request))
        return wait(reply["value"], amount, limit, period)

    async def _put_back(self, key: bytes, amount: int) -> None:
        await self._change("put_back", putting_back(key, amount))

    async def _change(self, name: str, request: Request) -> Document:
        return await self._server.operate(name, lambda operations, deadline: operations.command(request, deadline))

    async def _write(self, name: str, requests: Sequence[Request]) -> None:
        await retried(lambda: self._server.write(name, requests))


def _check(node: Node, others: Sequence[Document]) -> None:
    """
    :raise ClusterSecretDiffers: one of the others has another seal.
    :raise ClusterIdentityDiffers: one of them has another identity; those of an earlier version do not say which.
    :raise NodeNameTaken: one of them has the name.
    """
    if any(other["seal"] != node.seal for other in others):
        raise ClusterSecretDiffers()
    if node.identity and any(other.get("identity", node.identity) not in (node.identity, b"") for other in others):
        raise ClusterIdentityDiffers()
    for other in others:
        if other["name"] == node.name:
            raise NodeNameTaken(_node(other), other["until"].replace(tzinfo=UTC).timestamp())


def _until(lease: float) -> Document:
    """So many seconds from now."""
    return {"$add": ["$$NOW", round(lease * 1000)]}


def _node(document: Document) -> Node:
    seal, identity = bytes(document["seal"]), bytes(document.get("identity", b""))
    return Node(document["name"], document["_id"], document["address"], seal, identity)


def _with_live_nodes(dids: Sequence[str]) -> list[Document]:
    """Records, then nodes, each once: to look one up for each record would take longer than all the rest."""
    nodes = {"coll": NODES, "pipeline": [{"$match": _LIVE}]}
    return [{"$match": {"did": {"$in": list(dids)}}}, {"$project": {"_id": 0}}, {"$unionWith": nodes}]


def _pieces(dids: Sequence[str]) -> Iterator[list[str]]:
    distinct = list(dict.fromkeys(dids))
    for start in range(0, len(distinct), _DIDS_AT_A_TIME):
        yield distinct[start : start + _DIDS_AT_A_TIME]
