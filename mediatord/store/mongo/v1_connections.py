"""
Connections of DIDComm v1 in MongoDB.

A connection is pending while its account does not exist. That is recorded in its document, so that pending ones are
counted and found by an index. Nodes of former versions do not record it when they grant an account; that is found out
before such a connection would expire.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from math import inf

from bson import ObjectId
from twisted.internet.defer import Deferred, fail, succeed
from twisted.internet.interfaces import IReactorTime
from zope.interface import implementer

from mediatord.errors import StoreUnavailable
from mediatord.store.caches import OwnerCache
from mediatord.store.interfaces.v1_connections import (
    MAX_REPLACED_CONNECTIONS,
    ImplicitPickup,
    IV1ConnectionStore,
    V1Connection,
)
from mediatord.store.mongo.driver.client import ReplicaSetClient
from mediatord.store.mongo.driver.collection import Document, MongoCommand
from mediatord.store.mongo.driver.operation import Operation, operation
from mediatord.store.mongo.driver.transactions import Transaction
from mediatord.store.mongo.schema import ACCOUNTS, V1_CONNECTIONS
from mediatord.store.mongo.space_limit import MongoSpaceLimit
from mediatord.store.mongo.transaction_batcher import TransactionBatcher

# Connections in the cache, and seconds for which one is kept there.
_CACHE_SIZE, _CACHE_LIFETIME = 8_192, 2.0
# What a handshake does not change of a connection that exists.
_KEPT = "has_base58_keys", "implicit_pickup", "created_at"
_FIELDS = [one.name for one in fields(V1Connection) if one.name != "account"]


@implementer(IV1ConnectionStore)
class MongoV1ConnectionStore:
    """
    Connections of DIDComm v1. Those that were found lately are cached; other processes may have changed them.

    :param clock: for the times of connections.
    :param lookup_batcher: for reads by key.
    """

    def __init__(
        self,
        client: ReplicaSetClient,
        clock: IReactorTime,
        space_limit: MongoSpaceLimit,
        lookup_batcher: TransactionBatcher,
    ) -> None:
        self._client = client
        self._clock = clock
        self._space_limit = space_limit
        self._lookup_batcher = lookup_batcher
        self._cache: OwnerCache[V1Connection] = OwnerCache(
            _CACHE_SIZE, now=client.clock.seconds, lifetime=_CACHE_LIFETIME, length=_measure
        )

    @operation
    async def put_connection(self, connection: V1Connection, *, max_pending: int) -> V1Connection:
        """
        Concurrent calls may exceed `max_pending` by their number, because pending connections are counted in a
        snapshot, hardly more than `max_pending` of them.
        """
        self._space_limit.admit("put_v1_connection")
        now = self._clock.seconds()
        own_keys = {connection.own_key}

        async def put(t: Transaction) -> V1Connection:
            mine, did = {"_id": connection.account}, connection.account
            found, accounts = await t.query_many(
                V1_CONNECTIONS.find(mine, projection=dict.fromkeys(("own_key", *_KEPT), 1)),
                ACCOUNTS.find({"did": did}, projection={"_id": 1}),
            )
            if not found and not accounts:
                excess = await _count_pending(t, max_pending + MAX_REPLACED_CONNECTIONS - 1) - max_pending + 1
                if excess > 0:
                    own_keys.update((await _remove_oldest(t, inf, excess))[0])
            own_keys.update([one["own_key"] for one in found])
            kept = {name: found[0][name] for name in _KEPT} if found else {"created_at": now}
            stored = replace(connection, **kept)
            document = _build_document(stored)
            # The document of the account is written too, or the key of one in the index, so that its removal or
            # creation at the same time conflicts with this.
            if accounts:
                t.write_at_end(ACCOUNTS.update({"_id": accounts[0]["_id"]}, {"$set": {"connected": ObjectId()}}))
            else:
                document["pending_since"] = stored.created_at
                t.write_at_end(ACCOUNTS.insert([{"did": did}]), ACCOUNTS.delete({"did": did}))
            t.write_at_end(V1_CONNECTIONS.update(mine, document, upsert=True))
            return stored

        try:
            return await self._client.transact("put_v1_connection", put)
        finally:
            self._cache.forget(own_keys)

    def find_connection(self, own_key: str) -> Deferred[V1Connection | None]:
        """Fire from the cache if it is recent enough; concurrent calls share a query."""
        if not self._client.is_available:
            return fail(StoreUnavailable())
        connection = self._cache.get(own_key)
        if connection is not None:
            return succeed(connection)
        return self._lookup_batcher.submit("find_v1_connection", self._find_connections, own_key, ())

    async def _find_connections(
        self, run: Operation, own_keys: Sequence[str], _: int | None
    ) -> list[V1Connection | None]:
        """Find connections by our keys; a BatchOperation."""
        age = self._cache.age
        query = V1_CONNECTIONS.find({"own_key": {"$in": list(set(own_keys))}}, hint="v1_connection_key")
        connections = {one["own_key"]: _parse(one) for one in await run.query(query, low_latency=True)}
        for own_key, connection in connections.items():
            self._cache.keep(own_key, connection, age)
        return [connections.get(own_key) for own_key in own_keys]

    @operation
    async def get_connection(self, account: str) -> V1Connection | None:
        found = await self._client.query("get_v1_connection", V1_CONNECTIONS.find({"_id": account}))
        return _parse(found[0]) if found else None

    @operation
    async def change_connection(
        self, account: str, *, has_base58_keys: bool | None = None, implicit_pickup: ImplicitPickup | None = None
    ) -> bool:
        changes = {"has_base58_keys": has_base58_keys, "implicit_pickup": implicit_pickup}
        changes = {name: value for name, value in changes.items() if value is not None}
        mine = {"_id": account}
        with self._client.operate("change_v1_connection") as run:
            found = await run.query(V1_CONNECTIONS.find(mine, projection={"own_key": 1}))
            try:
                updates = V1_CONNECTIONS.update(mine, {"$set": changes}) if found and changes else []
                return bool(found) and all([reply["n"] for reply in await run.write(updates)])
            finally:
                self._cache.forget([one["own_key"] for one in found])

    @operation
    async def remove_connection(self, account: str) -> bool:
        mine = {"_id": account}
        with self._client.operate("remove_v1_connection") as run:
            found = await run.query(V1_CONNECTIONS.find(mine, projection={"own_key": 1}))
            try:
                return bool(found) and any([reply["n"] for reply in await run.write(V1_CONNECTIONS.delete(mine))])
            finally:
                self._cache.forget([one["own_key"] for one in found])

    @operation
    async def expire_connections(self, created_before: float, limit: int) -> int:
        async def expire(t: Transaction) -> tuple[list[str], bool]:
            return await _remove_oldest(t, created_before, limit)

        expired: list[str] = []
        is_unfinished = limit > 0
        while is_unfinished and not expired:
            expired, is_unfinished = await self._client.transact("expire_v1_connections", expire)
        self._cache.forget(expired)
        return len(expired)

    @operation
    async def count_connections(self) -> tuple[int, int]:
        """Count all by the metadata, which may be a little wrong after a crash of the server."""
        with self._client.operate("count_v1_connections") as run:
            number = (await run.command(V1_CONNECTIONS.count()))["n"]
            waiting = _get_number(await run.query(_build_pending_count()))
        return max(number - waiting, 0), waiting

    @operation
    async def scan_connections(self, after: str, limit: int) -> Sequence[V1Connection]:
        if limit <= 0:
            return []
        wanted = V1_CONNECTIONS.find({"_id": {"$gt": after}}, sort={"_id": 1}, limit=limit, hint="_id_")
        return [_parse(one) for one in await self._client.query("scan_v1_connections", wanted)]

    def forget_connections(self) -> None:
        """Forget what was cached, because accounts have changed."""
        self._cache.clear()


def build_granted_updates(accounts: Sequence[str]) -> list[MongoCommand]:
    """Build the write after which connections with accounts are not pending; it also belongs to a grant."""
    return V1_CONNECTIONS.update({"_id": {"$in": list(accounts)}}, {"$unset": {"pending_since": 1}}, multi=True)


async def _remove_oldest(t: Transaction, created_before: float, limit: int) -> tuple[list[str], bool]:
    """Remove pending connections; our keys of them, and whether some of those found had an account."""
    old = {"pending_since": {"$lt": created_before}}
    query = V1_CONNECTIONS.find(
        old, sort={"pending_since": 1}, limit=limit, projection={"own_key": 1}, hint="v1_connection_pending"
    )
    found = {one["_id"]: one["own_key"] for one in await t.query(query)}
    accounts = await t.query(ACCOUNTS.find({"did": {"$in": list(found)}}, projection={"did": 1}))
    granted = [one["did"] for one in accounts]
    expired = [account for account in found if account not in granted]
    if granted:
        t.write_at_end(build_granted_updates(granted))
    if expired:
        t.write_at_end(V1_CONNECTIONS.delete({"_id": {"$in": expired}}))
    return [found[account] for account in expired], bool(granted)


async def _count_pending(t: Transaction, most: int) -> int:
    """Count pending connections, `most` of them at most."""
    return _get_number(await t.query(_build_pending_count(most))) if most > 0 else 0


def _build_pending_count(most: int = 0) -> MongoCommand:
    """:param most: 0 for all."""
    # The condition lets the server read keys only.
    stages: list[Document] = [{"$match": {"pending_since": {"$gte": 0.0}}}]
    stages += [{"$limit": most}] if most else []
    return V1_CONNECTIONS.aggregate([*stages, {"$count": "number"}], hint="v1_connection_pending")


def _get_number(found: Sequence[Document]) -> int:
    return sum([one["number"] for one in found])


def _build_document(connection: V1Connection) -> Document:
    values = {name: getattr(connection, name) for name in _FIELDS}
    document = {"_id": connection.account, **values, "routing_keys": list(connection.routing_keys)}
    return {name: value for name, value in document.items() if value is not None}


def _parse(document: Document) -> V1Connection:
    values = {name: document.get(name) for name in _FIELDS}
    return V1Connection(document["_id"], **values | {"routing_keys": tuple(document["routing_keys"])})


def _measure(connection: V1Connection) -> int:
    """Characters of a connection without its keys, all of which are short."""
    return sum(map(len, (connection.endpoint or "", connection.request_id, *connection.routing_keys)))
