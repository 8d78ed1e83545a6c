"""Connections of DIDComm v1 in MongoDB: several nodes, races, former versions, and what the server reads."""

from __future__ import annotations

from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

from twisted.internet.defer import Deferred, gatherResults
from twisted.internet.task import deferLater

from mediatord.errors import StoreUnavailable
from mediatord.store.interfaces.v1_connections import V1Connection
from mediatord.store.mongo import v1_connections
from mediatord.store.mongo.store import MongoStore
from tests.store.mongo.mongo_test_case import CLOCK, MongoTestCase

MANY = 1_000
ROUNDS = 20


def make_connection(number: int, **more: Any) -> V1Connection:
    return V1Connection(f"did:key:z6MkWallet{number:03}", f"did:key:z6MkOwn{number:03}", "r", **more)


class V1ConnectionTestCase(MongoTestCase):
    async def open_stores(self) -> list[MongoStore]:
        return [await self.open_store() for _ in range(2)]

    def start(self, work: Coroutine[Any, Any, V1Connection]) -> Deferred[V1Connection]:
        return Deferred.fromCoroutine(work)

    async def put(self, store: MongoStore, connection: V1Connection, max_pending: int = MANY) -> V1Connection:
        return await store.v1_connections.put_connection(connection, max_pending=max_pending)

    def list_pending(self) -> list[str]:
        return [one["_id"] for one in self.documents["v1_connections"].find({"pending_since": {"$exists": True}})]


class NodeTests(V1ConnectionTestCase):
    """Several nodes."""

    async def test_connection_is_found_at_other_node(self) -> None:
        """A connection is found at another node at once, although that has just found nothing."""
        one, other = await self.open_stores()
        self.assertIsNone(await other.v1_connections.find_connection(make_connection(1).own_key))
        stored = await self.put(one, make_connection(1))
        self.assertEqual(await other.v1_connections.find_connection(stored.own_key), stored)

    async def test_changes_of_other_node_are_seen(self) -> None:
        """What another node has changed is seen at once by account, and after the lifetime of the cache by key."""
        self.patch(v1_connections, "_CACHE_LIFETIME", 0.2)
        one, other = await self.open_stores()
        stored = await self.put(one, make_connection(1))
        self.assertEqual(await other.v1_connections.find_connection(stored.own_key), stored)
        changed = await self.put(one, replace(stored, endpoint="https://wallet.example/", request_id="again"))
        self.assertEqual(await one.v1_connections.find_connection(stored.own_key), changed)
        self.assertEqual(await other.v1_connections.get_connection(stored.account), changed)
        await deferLater(CLOCK, 0.2)
        self.assertEqual(await other.v1_connections.find_connection(stored.own_key), changed)

    async def test_change_at_node_with_stale_connection(self) -> None:
        """A node that knows a connection as it was changes what it was told to, and does not restore the rest."""
        one, other = await self.open_stores()
        stored = await self.put(one, make_connection(1))
        self.assertEqual(await other.v1_connections.find_connection(stored.own_key), stored)
        changed = await self.put(one, replace(stored, endpoint="https://wallet.example/"))
        self.assertTrue(await other.v1_connections.change_connection(stored.account, implicit_pickup="raw"))
        expected = replace(changed, implicit_pickup="raw")
        self.assertEqual(await other.v1_connections.find_connection(stored.own_key), expected)
        self.assertTrue(await one.v1_connections.remove_connection(stored.account))
        self.assertFalse(await other.v1_connections.change_connection(stored.account, implicit_pickup="delivery"))
        self.assertEqual(await other.v1_connections.count_connections(), (0, 0))

    async def test_stale_connection_does_not_outlast_account(self) -> None:
        """A node that removes an account forgets its connection, which it has just found."""
        store = await self.open_store()
        stored = await self.put(store, make_connection(1))
        await store.grant(stored.account)
        self.assertEqual(await store.v1_connections.find_connection(stored.own_key), stored)
        self.assertTrue(await store.administration.remove_account(stored.account))
        self.assertIsNone(await store.v1_connections.find_connection(stored.own_key))


class RaceTests(V1ConnectionTestCase):
    """Several processes that do the same at the same time."""

    async def test_same_wallet_connects_twice(self) -> None:
        """Of a wallet that connects at two nodes at the same time there is one connection."""
        stores = await self.open_stores()
        for number in range(ROUNDS):
            works = [self.put(store, make_connection(number, endpoint=f"{n}")) for n, store in enumerate(stores)]
            one, other = await gatherResults([self.start(work) for work in works])
            self.assertEqual(one.created_at, other.created_at)
            found = await stores[0].v1_connections.get_connection(one.account)
            self.assertIn(found, (one, other))
        self.assertEqual(await stores[0].v1_connections.count_connections(), (0, ROUNDS))

    async def test_connects_while_account_is_removed(self) -> None:
        """A connection that is made while its account is removed is pending, or removed with it."""
        stores = await self.open_stores()
        for number in range(ROUNDS):
            connection = make_connection(number)
            await stores[0].grant(connection.account)
            works: list[Deferred[Any]] = [self.start(self.put(stores[0], connection))]
            works.append(stores[1].administration.remove_account(connection.account))
            await gatherResults(works)
            found = await stores[0].v1_connections.get_connection(connection.account)
            self.assertEqual(found is not None, connection.account in self.list_pending())

    async def test_connects_while_account_is_granted(self) -> None:
        """A connection that is made while its account is granted is not pending."""
        stores = await self.open_stores()
        for number in range(ROUNDS):
            connection = make_connection(number)
            works: list[Deferred[Any]] = [self.start(self.put(stores[0], connection))]
            works.append(stores[1].grant(connection.account))
            await gatherResults(works)
        self.assertEqual(await stores[0].v1_connections.count_connections(), (ROUNDS, 0))

    async def test_pending_connections_are_bounded(self) -> None:
        """Calls at the same time all succeed, and exceed the bound by their number at most, until the next one."""
        stores = await self.open_stores()
        works = [self.start(self.put(stores[n % 2], make_connection(n), 5)) for n in range(10)]
        await gatherResults(works)
        self.assertGreaterEqual(len(self.list_pending()), 5)
        latest = await self.put(stores[0], make_connection(10), 5)
        pending = self.list_pending()
        self.assertEqual((len(pending), latest.account in pending), (5, True))


class FormerVersionTests(V1ConnectionTestCase):
    """What nodes leave behind that do not know connections."""

    async def test_granted_connections_do_not_expire(self) -> None:
        """
        Connections that another node has granted accounts without noting it stay, and do not keep others from
        expiring.
        """
        store = await self.open_store()
        connections = [await self.put(store, make_connection(number)) for number in range(6)]
        for one in connections[:4]:
            await store.grant(one.account)
        for connection in connections:
            change = {"$set": {"pending_since": connection.created_at}}
            self.documents["v1_connections"].update_one({"_id": connection.account}, change)
        self.assertEqual(await store.v1_connections.count_connections(), (0, 6))
        before = CLOCK.seconds() + 1.0
        expired = [await store.v1_connections.expire_connections(before, limit) for limit in (0, 1, 9, 9)]
        self.assertEqual(expired, [0, 1, 1, 0])
        self.assertEqual(await store.v1_connections.count_connections(), (4, 0))

    async def test_connection_left_behind_is_pending_again(self) -> None:
        """A connection whose account was removed without it is replaced by the next one, and can expire."""
        store = await self.open_store()
        stored = await self.put(store, make_connection(1))
        self.documents["v1_connections"].update_one({}, {"$unset": {"pending_since": 1}})
        self.assertEqual(await self.put(store, make_connection(1), 0), stored)
        self.assertEqual(self.list_pending(), [stored.account])


class FaultTests(V1ConnectionTestCase):
    """A server that does not reply."""

    async def test_nothing_is_found_without_server(self) -> None:
        """A store that is closed finds nothing, not even what it has found before."""
        store = await self.open_store()
        stored = await self.put(store, make_connection(1))
        await store.v1_connections.find_connection(stored.own_key)
        await store.close()
        await self.assertFailure(store.v1_connections.find_connection(stored.own_key), StoreUnavailable)

    async def test_commit_of_unknown_outcome_is_not_cached(self) -> None:
        """A connection whose commit was reported as failed is read anew."""
        store = await self.open_store()
        stored = await self.put(store, make_connection(1))
        await store.v1_connections.find_connection(stored.own_key)
        error = {"code": 91, "errmsg": "shutting down"}
        with self.with_short_time_limit(), self.servers.failpoint("commitTransaction", writeConcernError=error):
            with self.assertRaises(StoreUnavailable):
                await self.put(store, replace(stored, request_id="again"))
        found = await store.v1_connections.find_connection(stored.own_key)
        self.assertEqual(found, await store.v1_connections.get_connection(stored.account))
