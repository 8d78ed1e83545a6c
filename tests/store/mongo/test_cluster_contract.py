"""Contract tests of the cluster store on MongoDB."""

from __future__ import annotations

from math import inf
from typing import Any
from uuid import uuid4

from twisted.internet import reactor  # noqa: TID251  the server's time passes by itself
from twisted.internet.defer import CancelledError, Deferred, gatherResults
from twisted.internet.interfaces import IReactorTime
from twisted.internet.task import deferLater
from twisted.trial.unittest import TestCase

from mediatord.errors import StoreUnavailable
from mediatord.store.interfaces.decentrl import DecentrlQuotas
from mediatord.store.interfaces.messages import QueueLimits
from mediatord.store.interfaces.store import IStore, ignore_observation
from mediatord.store.mongo import cluster_and_quotas
from mediatord.store.mongo.driver.client import ReplicaSetClient
from mediatord.store.mongo.driver.transactions import Transaction
from mediatord.store.mongo.driver.uri import parse_mongo_uri
from mediatord.store.mongo.schema import LONG_FORM_DIDS
from mediatord.store.mongo.store import MongoStore
from tests.mongod import shared_replica_set
from tests.store import contract
from tests.store.contract.cluster_base import LONG, ClusterStoreContract, make_node
from tests.store.mongo.test_contract import MongoBackend


class SeparateSessionsClient(ReplicaSetClient):
    """
    Client that keeps the sessions of a boot apart from those of the same boot in another test; real boots differ.

    :ivar test: a value that no other test has.
    """

    test = ""

    def set_session_owner(self, owner: str) -> None:
        super().set_session_owner(f"{self.test} {owner}")

    async def end_sessions(self, owner: str) -> None:
        await super().end_sessions(f"{self.test} {owner}")


class MongoClusterBackend(MongoBackend):
    """Short leases are awaited in real time."""

    short = 0.4

    @property
    def long_lease(self) -> float:
        """Long enough for a busy machine as well."""
        return 5.0

    async def setUp(self) -> None:  # type: ignore[override]  # trial waits for it
        self.test = uuid4().hex
        await super().setUp()

    def make_store(self, clock: IReactorTime, limits: QueueLimits, caps: DecentrlQuotas, max_nonces: int) -> IStore:
        return MongoStore(self.make_second_client(), clock, limits, caps=caps, max_nonces=max_nonces)

    def make_second_client(self) -> ReplicaSetClient:
        address = parse_mongo_uri(shared_replica_set().uri(self.database))
        server = SeparateSessionsClient(
            address, IReactorTime(reactor), observe=ignore_observation, on_up=lambda up: None, connections=2
        )
        server.test = self.test
        return server

    def pass_time(self, seconds: float) -> Deferred[None]:
        return deferLater(IReactorTime(reactor), seconds)


class MongoClusterTests(MongoClusterBackend, contract.ClusterContract, TestCase): ...


class MongoClusterIdentityTests(MongoClusterBackend, contract.ClusterIdentityContract, TestCase): ...


class MongoLeaderLeaseTests(MongoClusterBackend, contract.LeaderLeaseContract, TestCase): ...


class MongoClusterPresenceTests(MongoClusterBackend, contract.ClusterPresenceContract, TestCase): ...


class MongoClusterDeliveryTests(MongoClusterBackend, contract.ClusterDeliveryContract, TestCase): ...


class MongoQuotaTests(MongoClusterBackend, contract.QuotaContract, TestCase):
    # Less than the difference of the waits that are compared.
    delta = 4.0


class MongoClusterServerTests(MongoClusterBackend, ClusterStoreContract, TestCase):
    """Effects of the server and of its failures."""

    def list_documents(self, collection: str) -> list[dict[str, Any]]:
        return list(shared_replica_set().client[self.database][collection].find())

    async def test_quota_record_is_bounded(self) -> None:
        """The record of a quota has at most some hundred uses."""
        for _ in range(30):
            takings = [self.cluster.take_quota(b"key", 1, limit=10_000, period=0.64) for _ in range(20)]
            self.assertEqual(await gatherResults(takings), [0.0] * 20)
        (found,) = self.list_documents("quotas")
        self.assertLessEqual(len(found["lots"]), 129)
        self.assertLess(sum(slot["n"] for slot in found["lots"]), 601)
        self.assertEqual({round(slot["at"]) % 5 for slot in found["lots"]}, {0})

    async def test_unused_quota_record_expires(self) -> None:
        """The server may delete the record of a quota that was never taken."""
        self.assertGreater(await self.cluster.take_quota(b"key", 5, limit=3, period=60.0), 0)
        (found,) = self.list_documents("quotas")
        self.assertIn("until", found)

    async def test_node_without_identity_joins(self) -> None:
        """A node whose record does not have its identity works beside any other."""
        await self.cluster.join(make_node("a", identity=b"one"), LONG)
        nodes = shared_replica_set().client[self.database]["nodes"]
        nodes.update_one({"_id": "A"}, {"$set": {"identity": b""}})
        await self.second_store.cluster.join(make_node("b", identity=b"two"), LONG)
        self.assertEqual([node.identity for node in await self.cluster.list_nodes()], [b"", b"two"])

    async def test_lease_renewal_writes_one_document(self) -> None:
        """Renewing a lease writes one document, and no presence record."""
        await self.join_nodes("a")
        await self.cluster.add_presence("A", [f"did:example:{number}" for number in range(50)])
        before = self.list_documents("presence")
        self.assertEqual({tuple(sorted(one)) for one in before}, {("_id", "boot", "did")})
        await self.cluster.renew("A", LONG)
        self.assertEqual(self.list_documents("presence"), before)
        self.assertEqual(len(self.list_documents("nodes")), 2)

    async def test_node_joining_during_search_is_not_lapsed(self) -> None:
        """A node that joins during a search for lapsed nodes is not taken for one."""
        server = self.get_client(self.store)
        query, joined = server.query, False

        async def meanwhile(name: str, *args: Any, **more: Any) -> Any:
            nonlocal joined
            found = await query(name, *args, **more)
            if name == "lapsed" and not joined:
                joined = True
                await self.second_store.cluster.join(make_node("a"), LONG)
                await self.second_store.cluster.add_presence("A", ["did:x"])
            return found

        self.patch(server, "query", meanwhile)
        self.assertEqual(await self.cluster.list_lapsed_nodes(), [])
        self.assertTrue(joined)

    async def test_deletes_records_in_batches(self) -> None:
        """The records of a node are deleted in batches, and no more once the node is back."""
        self.patch(cluster_and_quotas, "_PRESENCE_DELETE_BATCH", 3)
        await self.second_store.cluster.join(make_node("a"), self.short)
        await self.second_store.cluster.add_presence("A", [f"did:example:{number}" for number in range(10)])
        await self.outlive_lease()
        server = self.get_client(self.store)
        transact, batches = server.transact, 0

        async def meanwhile(name: str, work: Any) -> Any:
            nonlocal batches
            batches += 1
            if batches == 3:
                await self.second_store.cluster.join(make_node("a"), LONG)
            return await transact(name, work)

        self.patch(server, "transact", meanwhile)
        self.assertEqual(await self.cluster.drop("A"), 0)
        self.assertEqual((batches, await self.list_live_boots(), len(self.list_documents("presence"))), (3, ["A"], 4))
        await self.cluster.drop("A", until=inf)
        self.assertEqual((batches, await self.list_live_boots(), len(self.list_documents("presence"))), (5, [], 0))

    def get_client(self, store: Any) -> Any:
        """The client of its cluster store."""
        return store.cluster._client

    async def test_lost_reply_changes_no_result(self) -> None:
        """A connection that is lost during a reply changes no result."""
        await self.join_nodes("a")
        servers = shared_replica_set()
        with servers.failpoint("findAndModify", times=1, closeConnection=True):
            self.assertIs(await self.cluster.acquire_lease("turn", "A", LONG), True)
        with servers.failpoint("update", times=1, closeConnection=True):
            self.assertIs(await self.cluster.renew("A", LONG), True)
        with servers.failpoint("aggregate", times=1, closeConnection=True):
            self.assertEqual(await self.cluster.find_presence(["did:x"]), [])
        with servers.failpoint("update", times=1, closeConnection=True):
            await self.cluster.add_presence("A", ["did:x"])
        self.assertEqual([record.boot for record in await self.cluster.find_presence(["did:x"])], ["A"])

    async def test_dropped_node_holds_no_locks(self) -> None:
        """A node's open transactions hold no locks once it is dropped."""
        dead_client = self.make_second_client()
        await dead_client.open()
        dead_client.set_session_owner("A")
        started: Deferred[None] = Deferred()

        async def die(transaction: Transaction) -> None:
            await transaction.write(LONG_FORM_DIDS.update({"_id": "short"}, {"long": "theirs"}, upsert=True))
            started.callback(None)
            await Deferred()

        dying = Deferred.fromCoroutine(dead_client.transact("die", die))
        await started
        await self.cluster.drop("A")
        await self.store.remember_did("short", "ours")
        self.assertEqual(await self.store.recall_did("short"), "ours")
        dying.addErrback(lambda failure: failure.trap(CancelledError, StoreUnavailable))
        dying.cancel()
        await dying
        await dead_client.close()
