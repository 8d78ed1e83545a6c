"""
Nodes, presence, leases, quotas and pickups of a cluster that shares a MongoDB database.

Leases are compared by the server, in the queries and updates themselves. Presence is a record for each DID and node
that lasts as long as the node's lease, so a node with ten thousand sockets renews one document.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from math import isinf
from typing import Any

from twisted.logger import Logger
from zope.interface import implementer

from mediatord.errors import StoreUnavailable
from mediatord.store.interfaces.cluster_and_quotas import (
    QUOTA_WINDOW_SLOTS,
    ClockSkewError,
    ClusterIdentityMismatch,
    ClusterNode,
    ClusterSecretMismatch,
    IClusterStore,
    NodeNameTaken,
    PresenceRecord,
    get_quota_wait,
)
from mediatord.store.interfaces.messages import filter_valid_ids
from mediatord.store.mongo.driver.client import ClockSkewMonitor, ReplicaSetClient
from mediatord.store.mongo.driver.collection import Document, MongoCommand, batch_by_size
from mediatord.store.mongo.driver.operation import operation, retry_on_duplicate_key
from mediatord.store.mongo.driver.transactions import Transaction
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

_IS_LIVE: Document = {"$gt": ["$until", "$$NOW"]}
_LIVE: Document = {"$expr": _IS_LIVE}
_ALL_NODES: Document = {"_id": {"$ne": MEMBERSHIP_LOCK_ID}}
_LAPSED_NODES: Document = {**_ALL_NODES, "$expr": {"$lte": ["$until", "$$NOW"]}}
_SERVER_MILLISECONDS: Document = {"$toLong": "$$NOW"}
# Quotas do not wait for a majority: a failover loses only what was taken a moment before.
_UNREPLICATED = {"writeConcern": {"w": 1}}
_DIDS_PER_QUERY, _QUERY_BYTES = 1_000, 8_388_608
# Presence records that are deleted in one transaction.
_PRESENCE_DELETE_BATCH = 2_000

_log = Logger(namespace="mediatord.store")


@implementer(IClusterStore)
class MongoClusterStore:
    """Cluster state in MongoDB."""

    def __init__(self, client: ReplicaSetClient, clocks: ClockSkewMonitor) -> None:
        self._client = client
        self._clocks = clocks
        self._own_boot = ""

    @operation
    async def join(self, node: ClusterNode, lease: float) -> None:
        if not self._own_boot:
            self._own_boot = node.boot  # which never changes
            self._client.set_session_owner(self._own_boot)
        await self._check_clock()

        async def join(transaction: Transaction) -> None:
            _check_node(node, await transaction.query(NODES.find({"_id": {"$ne": node.boot}, **_LIVE})))
            fields = {"name": node.name, "address": node.address, "seal": node.seal, "identity": node.identity}
            literals = {name: {"$literal": value} for name, value in fields.items()}
            change = {"$set": {**literals, "until": _build_lease_end(lease)}}
            joining = {"q": {"_id": node.boot}, "u": [change], "upsert": True}
            transaction.write_at_end(NODES.update_each([MEMBERSHIP_LOCK_UPDATE, joining]))

        await self._client.transact("join", join)

    @operation
    async def renew(self, boot: str, lease: float) -> bool:
        wall_offset = self._clocks.wall_offset
        live = {"_id": boot, "$expr": {"$and": [_IS_LIVE, self._clocks.build_check()]}}
        update = NODES.update(live, [{"$set": {"until": _build_lease_end(lease)}}])
        (reply,) = await self._client.write("renew", update)
        if not reply["n"]:
            await self._check_clock()
            return False
        self._clocks.record_agreement(wall_offset)
        return True

    @operation
    async def drop(self, boot: str, *, until: float = 0.0) -> int:
        """Delete the records of a node and then the node, unless its lease lasts longer than `until`."""
        if not boot:
            return 0
        # Matches the node if its lease lasts longer than `until` and has not lapsed.
        alive: Document = {"_id": {"$in": []}}
        if not isinf(until):
            longer = {"$gt": ["$until", {"$max": ["$$NOW", datetime.fromtimestamp(until, UTC)]}]}
            alive = {"_id": boot, "$expr": longer}
        if await self._client.query("drop", NODES.find(alive, limit=1, projection={"_id": 1})):
            return 0
        if boot != self._own_boot:
            await self._client.end_sessions(boot)

        remove = partial(_remove_node_records, boot=boot, alive=alive)
        while (left := await self._client.transact("drop", remove)) > 0:
            pass
        return 0 if left < 0 else await release_delivered(self._client, boot)

    @operation
    async def list_nodes(self) -> list[ClusterNode]:
        return [_parse_node(one) for one in await self._client.query("nodes", NODES.find(_LIVE, sort={"name": 1}))]

    @operation
    async def list_lapsed_nodes(self) -> list[str]:
        """Records are read before nodes, so that a node that joins meanwhile is not taken for a lapsed one."""
        reply = await self._client.command("lapsed", {"distinct": PRESENCE.name, "key": "boot"})
        left = {*reply["values"], *await list_delivering_boots(self._client)} - {""}
        known = await self._client.query("lapsed", NODES.find(_ALL_NODES, projection={"_id": 1}))
        lapsed = await self._client.query("lapsed", NODES.find(_LAPSED_NODES, projection={"_id": 1}))
        return sorted({one["_id"] for one in lapsed} | (left - {one["_id"] for one in known}))

    @operation
    async def add_presence(self, boot: str, dids: Sequence[str]) -> None:
        records = [{"did": did, "boot": boot} for did in dict.fromkeys(dids)]
        updates = [{"q": record, "u": {"$set": {"boot": boot}}, "upsert": True} for record in records]
        await self._client.write("add_presence", PRESENCE.update_each(updates, ordered=False))

    @operation
    async def remove_presence(self, boot: str, dids: Sequence[str]) -> None:
        filters = [{"boot": boot, "did": {"$in": some}} for some in _split_values(dids)]
        await self._client.write("remove_presence", PRESENCE.delete(*filters))

    @operation
    async def find_presence(self, dids: Sequence[str]) -> list[PresenceRecord]:
        found: list[PresenceRecord] = []
        # Records and all live nodes, each once; a `$lookup` per record would take far longer.
        nodes: Document = {"$unionWith": {"coll": NODES.name, "pipeline": [{"$match": _LIVE}]}}
        for some in _split_values(dids):
            records = PRESENCE.aggregate([{"$match": {"did": {"$in": some}}}, {"$project": {"_id": 0}}, nodes])
            documents = await self._client.query("find_presence", records)
            live = {one["_id"]: _parse_node(one) for one in documents if "name" in one}
            present = [(one["did"], one["boot"]) for one in documents if "did" in one]
            found += [PresenceRecord(did, boot, live.get(boot)) for did, boot in present]
        return found

    @operation
    async def acquire_lease(self, turn: str, boot: str, lease: float) -> bool:
        is_free = {"$or": [{"$eq": ["$boot", {"$literal": boot}]}, {"$not": [_IS_LIVE]}]}
        has_right_clock = self._clocks.build_check()  # else the lease is given up
        change = {
            "$set": {
                "boot": {"$cond": [is_free, {"$cond": [has_right_clock, {"$literal": boot}, ""]}, "$boot"]},
                "until": {
                    "$cond": [is_free, {"$cond": [has_right_clock, _build_lease_end(lease), "$$NOW"]}, "$until"]
                },
            }
        }
        command = LEASES.find_and_modify({"_id": turn}, [change], upsert=True, new=True)
        (reply,) = await self._client.write("acquire_lease", [command])
        held: Document | None = reply["value"]
        return held is not None and held["boot"] == boot

    @operation
    async def take_quota(self, key: bytes, amount: int, *, limit: int, period: float) -> float:
        command = _build_quota_take(key, amount, limit, period)
        reply = await retry_on_duplicate_key(lambda: self._client.command("take_quota", command.body))
        found = reply["value"]
        if found["taken"]:
            return 0.0
        lots = [(lot["at"] / 1000, lot["n"]) for lot in found["lots"]]
        return get_quota_wait(lots, amount, limit=limit, period=period, now=found["now"] / 1000) or period

    @operation
    async def return_quota(self, key: bytes, amount: int) -> None:
        await self._client.command("return_quota", _build_quota_return(key, amount).body)

    @operation
    async def record_pickups(self, ids: Sequence[str], period: float) -> None:
        change = [{"$set": {"until": _build_lease_end(period)}}]
        updates = [{"q": {"_id": id_}, "u": change, "upsert": True} for id_ in dict.fromkeys(filter_valid_ids(ids))]
        await self._client.write("record_pickups", PICKUPS.update_each(updates, ordered=False))

    @operation
    async def find_picked_up(self, ids: Sequence[str]) -> frozenset[str]:
        found: list[Document] = []
        for some in _split_values(filter_valid_ids(ids)):
            query = PICKUPS.find({"_id": {"$in": some}, **_LIVE}, hint="_id_")
            found += await self._client.query("picked_up", query)
        return frozenset(one["_id"] for one in found)

    async def _check_clock(self) -> None:
        """:raise ClockSkewError: the clocks of this host and of the server are too far apart."""
        if ahead := await self._clocks.measure_skew():
            raise ClockSkewError(ahead)


class SessionOwnerRecord:
    """Record of this process as an owner of sessions, so that others can end them after its death."""

    def __init__(self, client: ReplicaSetClient) -> None:
        self._client = client
        self._owner = client.transactions.sessions.owner
        self._warned: set[str] = set()

    async def enter(self, live: Collection[str]) -> None:
        """
        Write the record, and end the sessions of dead processes; one that is alive retries what was aborted.

        :param live: boots of live nodes.
        """
        client = self._client
        status = await client.command("enter", {"connectionStatus": 1}, database="admin")
        # Empty without access control.
        user = ", ".join(f"{one['user']}@{one['db']}" for one in status["authInfo"]["authenticatedUsers"])
        others = SESSION_OWNERS.find({"_id": {"$nin": [self._owner, *live]}})
        for other in await client.query("enter", others):
            self._compare_users(user, other["user"])
            await client.end_sessions(other["_id"])
            await client.write("enter", SESSION_OWNERS.delete({"_id": other["_id"]}))
        change: Document = {"$set": {"since": "$$NOW", "user": {"$literal": user}}}
        await client.write("enter", SESSION_OWNERS.update({"_id": self._owner}, [change], upsert=True))

    async def leave(self) -> None:
        """Delete the record, if possible."""
        if self._client.is_available:
            with suppress(StoreUnavailable):
                await self._client.write("leave", SESSION_OWNERS.delete({"_id": self._owner}))

    def _compare_users(self, ours: str, theirs: str) -> None:
        """Warn of another user, whose sessions the server silently does not end."""
        if theirs == ours or theirs in self._warned:
            return
        self._warned.add(theirs)
        _log.warn(
            "this node connects to MongoDB as user {ours}, another node as {theirs}; use the same user on all nodes, "
            "or the open transactions of a killed node cannot be aborted and block the others for a minute",
            ours=ours or "nobody",
            theirs=theirs or "nobody",
        )


async def _remove_node_records(transaction: Transaction, boot: str, alive: Document) -> int:
    """
    Delete some records of a node, and the node with the last of them; return the number of records, 0 if none is
    left, -1 if the node is alive.

    Writes the membership lock: a node that rejoins does so before or after this, and keeps what it announces then.
    """
    alive_nodes, some = await transaction.query_many(
        NODES.find(alive, limit=1, projection={"_id": 1}),
        PRESENCE.find({"boot": boot}, limit=_PRESENCE_DELETE_BATCH, projection={"_id": 1}),
    )
    if alive_nodes:
        return -1
    records = {"_id": {"$in": [one["_id"] for one in some]}}
    transaction.write_at_end(NODES.update_each([MEMBERSHIP_LOCK_UPDATE]), PRESENCE.delete(records))
    if len(some) < _PRESENCE_DELETE_BATCH:
        transaction.write_at_end(LEASES.delete({"boot": boot}), NODES.delete({"_id": boot}))
        return 0
    return len(some)


def _check_node(node: ClusterNode, others: Sequence[Document]) -> None:
    """
    Check a node that joins against the live ones.

    :raise ClusterSecretMismatch: one has another seal.
    :raise ClusterIdentityMismatch: one has another identity; an empty one is unknown.
    :raise NodeNameTaken: one has the same name.
    """
    if any(other["seal"] != node.seal for other in others):
        raise ClusterSecretMismatch()
    if node.identity and any(other["identity"] not in (node.identity, b"") for other in others):
        raise ClusterIdentityMismatch()
    for other in others:
        if other["name"] == node.name:
            raise NodeNameTaken(_parse_node(other), other["until"].replace(tzinfo=UTC).timestamp())


def _parse_node(document: Document) -> ClusterNode:
    seal, identity = bytes(document["seal"]), bytes(document["identity"])
    return ClusterNode(document["name"], document["_id"], document["address"], seal, identity)


def _build_lease_end(lease: float) -> Document:
    return {"$add": ["$$NOW", round(lease * 1000)]}


def _split_values(values: Sequence[str]) -> Iterator[list[str]]:
    """Split distinct values into chunks for `$in`."""
    return batch_by_size(dict.fromkeys(values), len, _QUERY_BYTES, _DIDS_PER_QUERY)


def _build_quota_take(key: bytes, amount: int, limit: int, period: float) -> MongoCommand:
    """Build a command that adds to the latest lot if the limit allows; see `QuotaUse`."""
    milliseconds = period * 1000
    slot = milliseconds / QUOTA_WINDOW_SLOTS
    at = {"$multiply": [{"$ceil": {"$divide": ["$now", slot]}}, slot]}
    in_window = {"$gt": ["$$lot.at", {"$subtract": ["$now", milliseconds]}]}
    lots = {"$filter": {"input": {"$ifNull": ["$lots", []]}, "as": "lot", "cond": in_window}}
    is_allowed = {"$lte": [{"$add": [{"$sum": "$lots.n"}, amount]}, limit]}
    # All lots, with the amount in that of `$$at`, which is the last one or new.
    before = {"$filter": {"input": "$lots", "as": "lot", "cond": {"$lt": ["$$lot.at", "$$at"]}}}
    same = {"$filter": {"input": "$lots", "as": "lot", "cond": {"$gte": ["$$lot.at", "$$at"]}}}
    number = {"$let": {"vars": {"same": same}, "in": {"$sum": "$$same.n"}}}
    appended = {"$concatArrays": [before, [{"at": "$$at", "n": {"$add": [number, amount]}}]]}
    added = {"$let": {"vars": {"at": {"$max": [at, {"$last": "$lots.at"}]}}, "in": appended}}
    until = {"$add": ["$$NOW", round(milliseconds + slot)]}
    pipeline = [
        {"$set": {"now": _SERVER_MILLISECONDS}},
        {"$set": {"lots": lots}},
        {"$set": {"taken": is_allowed}},
        {
            "$set": {
                "lots": {"$cond": ["$taken", added, "$lots"]},
                "until": {"$cond": ["$taken", until, {"$ifNull": ["$until", until]}]},
            }
        },
    ]
    return QUOTAS.find_and_modify({"_id": key}, pipeline, upsert=True, new=True).with_fields(_UNREPLICATED)


def _build_quota_return(key: bytes, amount: int) -> MongoCommand:
    """Build a command that takes an amount off the latest lots."""
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
    return QUOTAS.find_and_modify({"_id": key}, pipeline).with_fields(_UNREPLICATED)
