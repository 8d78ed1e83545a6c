"""
Ending nodes: all that hangs on one goes before it does, and nothing of one that has come back meanwhile.

Updates of allowances that the server works out, so that one round trip does for a taking.

Processes that have sessions, so that what they had begun can be ended when they have died.

What nodes that share a MongoDB know of each other.

Leases are compared by the server, in the queries and updates themselves. Presence is a record for each DID and node,
which hangs on the node's lease: a node with ten thousand sockets renews one document.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from math import isinf
from typing import Any, TypeVar

from twisted.internet.defer import Deferred
from twisted.logger import Logger
from zope.interface import implementer

from mediatord.errors import StoreUnavailable
from mediatord.store.interfaces.cluster import (
    ClusterIdentityMismatch,
    ClusterNode,
    ClusterSecretMismatch,
    IClusterStore,
    NodeNameTaken,
    PresenceRecord,
)
from mediatord.store.mongo.driver.client import ClockSkewMonitor, ReplicaSetClient
from mediatord.store.mongo.driver.commands import (
    Document,
    MongoCommand,
    build_deletes,
    build_find_and_modify,
    build_updates,
)
from mediatord.store.mongo.driver.executor import retry_on_duplicate_key, start_operation
from mediatord.store.mongo.driver.transactions import Transaction
from mediatord.store.mongo.ledger import KEEPS_LEDGER
from mediatord.store.mongo.message_queues import list_delivering_boots, release_delivered
from mediatord.store.mongo.schema import (
    LEASES,
    MEMBERSHIP_LOCK_ID,
    MEMBERSHIP_LOCK_UPDATE,
    NODES,
    PICKUPS,
    PRESENCE,
    QUOTAS,
    SESSION_OWNERS,
)
from mediatord.store.quotas import QUOTA_WINDOW_SLOTS, get_quota_wait
from mediatord.store.recipient_names import filter_valid_ids

_ALL_NODES: Document = {"_id": {"$ne": MEMBERSHIP_LOCK_ID}}
_LAPSED_NODES: Document = {**_ALL_NODES, "$expr": {"$lte": ["$until", "$$NOW"]}}
# Records of presence that go in one transaction.
_PRESENCE_DELETE_BATCH = 2_000


async def list_lapsed_boots(client: ReplicaSetClient) -> list[str]:
    """Boots that there is something left of, and that are not live. What is left is looked at before who is there."""
    reply = await client.command("lapsed", {"distinct": PRESENCE, "key": "boot"})
    left = {*reply["values"], *await list_delivering_boots(client)} - {""}
    known = await client.find("lapsed", NODES, _ALL_NODES, projection={"_id": 1})
    over = await client.find("lapsed", NODES, _LAPSED_NODES, projection={"_id": 1})
    return sorted({one["_id"] for one in over} | (left - {one["_id"] for one in known}))


async def end_node(client: ReplicaSetClient, boot: str, until: float, *, own: bool) -> int:
    """
    End a node that is not live, or whose lease is over by `until`; how many messages are pending again.

    :param own: it is this process.
    """
    stays = _build_staying_filter(boot, until)
    if await client.find("drop", NODES, stays, limit=1, projection={"_id": 1}):
        return 0
    if not own:
        await client.end_sessions(boot)
    while (
        left := await retry_on_duplicate_key(
            lambda: client.transact("drop", lambda begun: _remove_node_records(begun, boot, stays))
        )
    ) > 0:
        pass
    return 0 if left < 0 else await release_delivered(client, boot)


async def _remove_node_records(transaction: Transaction, boot: str, stays: Document) -> int:
    """
    Some of its records, and itself with the last of them: 0. Nothing if it stays: -1.

    Takes part in the meeting of those that join: a node that comes back does so before or after this, and what it
    announces then is not taken away.
    """
    if await transaction.find(NODES, stays, limit=1, projection={"_id": 1}):
        return -1
    some = await transaction.find(PRESENCE, {"boot": boot}, limit=_PRESENCE_DELETE_BATCH, projection={"_id": 1})
    transaction.write_at_end(build_updates(NODES, [MEMBERSHIP_LOCK_UPDATE]))
    transaction.write_at_end(build_deletes(PRESENCE, {"_id": {"$in": [one["_id"] for one in some]}}))
    if len(some) < _PRESENCE_DELETE_BATCH:
        transaction.write_at_end(build_deletes(LEASES, {"boot": boot}))
        transaction.write_at_end(build_deletes(NODES, {"_id": boot}))
        return 0
    return len(some)


def _build_staying_filter(boot: str, until: float) -> Document:
    """Finds a node that is not to be ended."""
    if isinf(until):
        return {"_id": {"$in": []}}
    seen = datetime.fromtimestamp(until, UTC)
    return {"_id": boot, "$expr": {"$gt": ["$until", {"$max": ["$$NOW", seen]}]}}


_SERVER_MILLISECONDS: Document = {"$toLong": "$$NOW"}
# What is lost with a primary was taken a moment before: nobody waits for a majority.
_UNREPLICATED = {"writeConcern": {"w": 1}}


def build_quota_take(key: bytes, amount: int, limit: int, period: float) -> MongoCommand:
    """One more lot if there is enough left; see :func:`~mediatord.store.quotas.add_quota_use`."""
    milliseconds = period * 1000
    slot = milliseconds / QUOTA_WINDOW_SLOTS
    at = {"$multiply": [{"$ceil": {"$divide": ["$now", slot]}}, slot]}
    counting = {"$gt": ["$$lot.at", {"$subtract": ["$now", milliseconds]}]}
    lots = {"$filter": {"input": {"$ifNull": ["$lots", []]}, "as": "lot", "cond": counting}}
    enough = {"$lte": [{"$add": [{"$sum": "$lots.n"}, amount]}, limit]}
    added = {"$let": {"vars": {"at": {"$max": [at, {"$last": "$lots.at"}]}}, "in": _build_lot_append(amount)}}
    until = {"$add": ["$$NOW", round(milliseconds + slot)]}
    until_then = {"$cond": ["$taken", until, {"$ifNull": ["$until", until]}]}
    pipeline = [
        {"$set": {"now": _SERVER_MILLISECONDS}},
        {"$set": {"lots": lots}},
        {"$set": {"taken": enough}},
        {"$set": {"lots": {"$cond": ["$taken", added, "$lots"]}, "until": until_then}},
    ]
    return build_find_and_modify(QUOTAS, {"_id": key}, pipeline, upsert=True, new=True).with_fields(_UNREPLICATED)


def compute_quota_wait(found: Document, amount: int, limit: int, period: float) -> float:
    """How long to wait, after :func:`taking`, for what was not taken."""
    if found["taken"]:
        return 0.0
    lots = [(lot["at"] / 1000, lot["n"]) for lot in found["lots"]]
    return get_quota_wait(lots, amount, limit=limit, period=period, now=found["now"] / 1000) or period


def build_quota_return(key: bytes, amount: int) -> MongoCommand:
    """The latest lots are gone, so much together."""
    rest: Document = {"at": "$$this.at", "n": {"$subtract": ["$$this.n", "$$value.left"]}}
    step = {
        "left": {"$max": [{"$subtract": ["$$value.left", "$$this.n"]}, 0]},
        "lots": {
            "$cond": [
                {"$gt": ["$$this.n", "$$value.left"]},
                {"$concatArrays": [[rest], "$$value.lots"]},
                "$$value.lots",
            ]
        },
    }
    start = {"left": amount, "lots": []}
    undone: Any = {"$reduce": {"input": {"$reverseArray": "$lots"}, "initialValue": start, "in": step}}
    pipeline = [{"$set": {"lots": {"$let": {"vars": {"undone": undone}, "in": "$$undone.lots"}}}}]
    return build_find_and_modify(QUOTAS, {"_id": key}, pipeline).with_fields(_UNREPLICATED)


def _build_lot_append(amount: int) -> Document:
    """All lots, this amount in that of `$$at`, which is the last one or a new one."""
    before = {"$filter": {"input": "$lots", "as": "lot", "cond": {"$lt": ["$$lot.at", "$$at"]}}}
    same = {"$filter": {"input": "$lots", "as": "lot", "cond": {"$gte": ["$$lot.at", "$$at"]}}}
    there = {"$let": {"vars": {"same": same}, "in": {"$sum": "$$same.n"}}}
    return {"$concatArrays": [before, [{"at": "$$at", "n": {"$add": [there, amount]}}]]}


_log = Logger(namespace="mediatord.store")


class SessionOwnerRecord:
    """Ours among them."""

    def __init__(self, client: ReplicaSetClient) -> None:
        self._client = client
        self._owner = client.owner
        self._warned: set[str] = set()

    async def enter(self, live: Collection[str]) -> None:
        """
        Be one of them, and end what those have begun that have died. Should one of them be alive after all, it does
        again what it was about.

        :param live: those that are alive.
        """
        client = self._client
        user = await self._user()
        for other in await client.find("enter", SESSION_OWNERS, {"_id": {"$nin": [self._owner, *live]}}):
            self._compare(user, other.get("user", user))
            await client.end_sessions(other["_id"])
            await client.write("enter", build_deletes(SESSION_OWNERS, {"_id": other["_id"]}))
        entry = {"since": "$$NOW", "user": {"$literal": user}, KEEPS_LEDGER: True}
        ours = {"q": {"_id": self._owner}, "u": [{"$set": entry}], "upsert": True}
        await client.write("enter", build_updates(SESSION_OWNERS, [ours]))

    async def leave(self) -> None:
        """Be none of them any more, if that can be said."""
        if self._client.answers:
            with suppress(StoreUnavailable):
                await self._client.write("leave", build_deletes(SESSION_OWNERS, {"_id": self._owner}))

    async def _user(self) -> str:
        """As whom the server knows us; empty if it lets everybody in."""
        status = await self._client.command("enter", {"connectionStatus": 1}, database="admin")
        return ", ".join(f"{one['user']}@{one['db']}" for one in status["authInfo"]["authenticatedUsers"])

    def _compare(self, ours: str, theirs: str) -> None:
        """The server lets nobody end the sessions of another user, and says that it has."""
        if theirs == ours or theirs in self._warned:
            return
        self._warned.add(theirs)
        _log.warn(
            "this node is MongoDB user {ours}, another one {theirs}: neither can end what the other leaves behind"
            " when it is killed, which is in the way for a minute; give all nodes the same user",
            ours=ours or "nobody",
            theirs=theirs or "nobody",
        )


T = TypeVar("T")

_IS_LIVE: Document = {"$gt": ["$until", "$$NOW"]}
_LIVE: Document = {"$expr": _IS_LIVE}
_DIDS_PER_QUERY = 1_000


@implementer(IClusterStore)
class MongoClusterStore:
    """Its many methods are those of the interface."""

    def __init__(self, client: ReplicaSetClient, clocks: ClockSkewMonitor) -> None:
        self._client = client
        self._clocks = clocks
        self._own_boot = ""

    def join(self, node: ClusterNode, lease: float) -> Deferred[None]:
        return start_operation(self._join(node, lease))

    def renew(self, boot: str, lease: float) -> Deferred[bool]:
        return start_operation(self._renew(boot, lease))

    def drop(self, boot: str, *, until: float = 0.0) -> Deferred[int]:
        return start_operation(self._drop(boot, until))

    def list_nodes(self) -> Deferred[list[ClusterNode]]:
        return start_operation(self._nodes())

    def list_lapsed_nodes(self) -> Deferred[list[str]]:
        return start_operation(list_lapsed_boots(self._client))

    def add_presence(self, boot: str, dids: Sequence[str]) -> Deferred[None]:
        records = [{"did": did, "boot": boot} for did in dict.fromkeys(dids)]
        updates = [{"q": record, "u": {"$set": {"boot": boot}}, "upsert": True} for record in records]
        return start_operation(self._write("announce", build_updates(PRESENCE, updates, ordered=False)))

    def remove_presence(self, boot: str, dids: Sequence[str]) -> Deferred[None]:
        filters = [{"boot": boot, "did": {"$in": some}} for some in _split_dids(dids)]
        return start_operation(self._write("withdraw", build_deletes(PRESENCE, *filters)))

    def find_presence(self, dids: Sequence[str]) -> Deferred[list[PresenceRecord]]:
        return start_operation(self._whereabouts(dids))

    def acquire_lease(self, turn: str, boot: str, lease: float) -> Deferred[bool]:
        return start_operation(self._hold(turn, boot, lease))

    def take_quota(self, key: bytes, amount: int, *, limit: int, period: float) -> Deferred[float]:
        return start_operation(self._take(key, amount, limit, period))

    def return_quota(self, key: bytes, amount: int) -> Deferred[None]:
        return start_operation(self._put_back(key, amount))

    def record_pickups(self, ids: Sequence[str], period: float) -> Deferred[None]:
        change = [{"$set": {"until": _build_lease_end(period)}}]
        updates = [{"q": {"_id": id_}, "u": change, "upsert": True} for id_ in dict.fromkeys(filter_valid_ids(ids))]
        return start_operation(self._write("record_pickups", build_updates(PICKUPS, updates, ordered=False)))

    def find_picked_up(self, ids: Sequence[str]) -> Deferred[frozenset[str]]:
        return start_operation(self._picked_up(filter_valid_ids(ids)))

    async def _join(self, node: ClusterNode, lease: float) -> None:
        if not self._own_boot:
            self._own_boot = node.boot  # a process has one for as long as it lives
            self._client.set_session_owner(self._own_boot)
        await self._clocks.compare()

        async def join(transaction: Transaction) -> None:
            _check_node(node, await transaction.find(NODES, {"_id": {"$ne": node.boot}, **_LIVE}))
            there = {"name": node.name, "address": node.address, "seal": node.seal, "identity": node.identity}
            given = {name: {"$literal": value} for name, value in there.items()}
            change = {"$set": {**given, "until": _build_lease_end(lease)}}
            joining = {"q": {"_id": node.boot}, "u": [change], "upsert": True}
            transaction.write_at_end(build_updates(NODES, [MEMBERSHIP_LOCK_UPDATE, joining]))

        await retry_on_duplicate_key(lambda: self._client.transact("join", join))

    async def _renew(self, boot: str, lease: float) -> bool:
        wall_offset = self._clocks.wall_offset
        live = {"_id": boot, "$expr": {"$and": [_IS_LIVE, self._clocks.agreeing()]}}
        update = {"q": live, "u": [{"$set": {"until": _build_lease_end(lease)}}]}
        (reply,) = await self._client.write("renew", build_updates(NODES, [update]))
        if not reply["n"]:
            await self._clocks.compare()
            return False
        self._clocks.record_agreement(wall_offset)
        return True

    async def _drop(self, boot: str, until: float) -> int:
        return await end_node(self._client, boot, until, own=boot == self._own_boot) if boot else 0

    async def _nodes(self) -> list[ClusterNode]:
        return [_parse_node(one) for one in await self._client.find("nodes", NODES, _LIVE, sort={"name": 1})]

    async def _whereabouts(self, dids: Sequence[str]) -> list[PresenceRecord]:
        found: list[PresenceRecord] = []
        for some in _split_dids(dids):
            documents = await self._client.aggregate("whereabouts", PRESENCE, _build_presence_pipeline(some))
            live = {one["_id"]: _parse_node(one) for one in documents if "name" in one}
            records = [(one["did"], one["boot"]) for one in documents if "did" in one]
            found += [PresenceRecord(did, boot, live.get(boot)) for did, boot in records]
        return found

    async def _picked_up(self, ids: Sequence[str]) -> frozenset[str]:
        found: list[Document] = []
        for some in _split_dids(ids):
            found += await self._client.find("picked_up", PICKUPS, {"_id": {"$in": some}, **_LIVE}, hint="_id_")
        return frozenset(one["_id"] for one in found)

    async def _hold(self, turn: str, boot: str, lease: float) -> bool:
        free = {"$or": [{"$eq": ["$boot", {"$literal": boot}]}, {"$not": [_IS_LIVE]}]}
        agreeing = self._clocks.agreeing()  # else it is given up
        change = {
            "$set": {
                "boot": {"$cond": [free, {"$cond": [agreeing, {"$literal": boot}, ""]}, "$boot"]},
                "until": {"$cond": [free, {"$cond": [agreeing, _build_lease_end(lease), "$$NOW"]}, "$until"]},
            }
        }
        held = await retry_on_duplicate_key(
            lambda: self._client.find_and_modify("hold", LEASES, {"_id": turn}, [change], upsert=True, new=True)
        )
        return held is not None and held["boot"] == boot

    async def _take(self, key: bytes, amount: int, limit: int, period: float) -> float:
        request = build_quota_take(key, amount, limit, period)
        reply = await retry_on_duplicate_key(lambda: self._change("take", request))
        return compute_quota_wait(reply["value"], amount, limit, period)

    async def _put_back(self, key: bytes, amount: int) -> None:
        await self._change("put_back", build_quota_return(key, amount))

    async def _change(self, name: str, request: MongoCommand) -> Document:
        return await self._client.operate(name, lambda executor, deadline: executor.command(request, deadline))

    async def _write(self, name: str, requests: Sequence[MongoCommand]) -> None:
        await retry_on_duplicate_key(lambda: self._client.write(name, requests))


def _check_node(node: ClusterNode, others: Sequence[Document]) -> None:
    """
    :raise ClusterSecretDiffers: one of the others has another seal.
    :raise ClusterIdentityDiffers: one of them has another identity; those of an earlier version do not say which.
    :raise NodeNameTaken: one of them has the name.
    """
    if any(other["seal"] != node.seal for other in others):
        raise ClusterSecretMismatch()
    if node.identity and any(other.get("identity", node.identity) not in (node.identity, b"") for other in others):
        raise ClusterIdentityMismatch()
    for other in others:
        if other["name"] == node.name:
            raise NodeNameTaken(_parse_node(other), other["until"].replace(tzinfo=UTC).timestamp())


def _build_lease_end(lease: float) -> Document:
    """So many seconds from now."""
    return {"$add": ["$$NOW", round(lease * 1000)]}


def _parse_node(document: Document) -> ClusterNode:
    seal, identity = bytes(document["seal"]), bytes(document.get("identity", b""))
    return ClusterNode(document["name"], document["_id"], document["address"], seal, identity)


def _build_presence_pipeline(dids: Sequence[str]) -> list[Document]:
    """Records, then nodes, each once: to look one up for each record would take longer than all the rest."""
    nodes = {"coll": NODES, "pipeline": [{"$match": _LIVE}]}
    return [{"$match": {"did": {"$in": list(dids)}}}, {"$project": {"_id": 0}}, {"$unionWith": nodes}]


def _split_dids(dids: Sequence[str]) -> Iterator[list[str]]:
    distinct = list(dict.fromkeys(dids))
    for start in range(0, len(distinct), _DIDS_PER_QUERY):
        yield distinct[start : start + _DIDS_PER_QUERY]
