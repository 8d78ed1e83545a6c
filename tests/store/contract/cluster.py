"""Contract for nodes, node leases and leader leases."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

from twisted.internet.defer import Deferred, gatherResults

from mediatord.errors import StoreUnavailable
from mediatord.store.interfaces.cluster_and_quotas import (
    ClusterIdentityMismatch,
    ClusterJoinError,
    ClusterNode,
    ClusterSecretMismatch,
    NodeNameTaken,
)
from tests.store.contract.cluster_base import LONG, ClusterStoreContract, make_node


class ClusterContract(ClusterStoreContract):
    """Contract of `IClusterStore` for nodes."""

    async def test_lists_joined_nodes_by_name(self) -> None:
        """A joined node is live for every process; nodes are listed by name, with all their fields."""
        self.assertEqual(await self.cluster.list_nodes(), [])
        await self.cluster.join(make_node("b", address="unix:/run/b.sock"), LONG)
        await self.second_store.cluster.join(make_node("a"), LONG)
        expected = [
            ClusterNode("a", "A", "tcp:host=a:port=7070", b"seal"),
            ClusterNode("b", "B", "unix:/run/b.sock", b"seal"),
        ]
        for store in (self.store, self.second_store):
            self.assertEqual(await store.cluster.list_nodes(), expected)
            self.assertEqual(await store.cluster.list_lapsed_nodes(), [])

    async def test_joining_again_updates_node(self) -> None:
        """A boot that joins again gets a new lease and its new fields, and is still one node."""
        await self.join_nodes("a", lease=self.short)
        moved = make_node("renamed", boot="A", address="tcp:host=elsewhere:port=1")
        await self.cluster.join(moved, LONG)
        await self.outlive_lease()
        self.assertEqual(await self.cluster.list_nodes(), [moved])
        self.assertEqual(await self.cluster.list_lapsed_nodes(), [])

    async def test_node_lapses_after_lease(self) -> None:
        """A node whose lease has ended is not live, can be dropped, and cannot be renewed but may join again."""
        await self.join_nodes("a", lease=self.short)
        await self.join_nodes("b")
        await self.outlive_lease()
        self.assertEqual(await self.list_live_boots(), ["B"])
        self.assertEqual(await self.second_store.cluster.list_lapsed_nodes(), ["A"])
        self.assertIs(await self.cluster.renew("A", LONG), False)
        self.assertEqual(await self.list_live_boots(), ["B"])
        await self.join_nodes("a")
        self.assertEqual(await self.list_live_boots(), ["A", "B"])
        self.assertEqual(await self.second_store.cluster.list_lapsed_nodes(), [])

    async def test_renewal_counts_from_now(self) -> None:
        """A renewed lease counts from the renewal, whether longer or shorter than before."""
        await self.join_nodes("a", "b")
        self.assertIs(await self.cluster.renew("A", 2 * LONG), True)
        self.assertIs(await self.cluster.renew("B", self.short), True)
        await self.outlive_lease()
        self.assertEqual(await self.list_live_boots(), ["A"])

    async def test_refuses_renewal_of_unknown_node(self) -> None:
        """A node that never joined or was dropped cannot renew its lease."""
        await self.join_nodes("a")
        await self.second_store.cluster.drop("A", until=inf)
        for boot in ("A", "B", ""):
            self.assertIs(await self.cluster.renew(boot, LONG), False)
        self.assertEqual(await self.list_live_boots(), [])
        await self.join_nodes("a")
        self.assertEqual(await self.list_live_boots(), ["A"])

    async def test_refuses_name_of_live_node(self) -> None:
        """A name belongs to one live node; a second claimant is told which, and changes nothing."""
        await self.join_nodes("a")
        with self.assertRaises(NodeNameTaken) as caught:
            await self.second_store.cluster.join(make_node("a", boot="A2", address="tcp:host=x:port=1"), LONG)
        self.assertEqual(caught.exception.holder, make_node("a"))
        self.assertEqual(await self.read_name_expiry("a"), caught.exception.until)
        self.assertNotIn("\n", str(caught.exception))
        self.assertEqual(await self.cluster.list_nodes(), [make_node("a")])
        self.assertEqual(await self.cluster.list_lapsed_nodes(), [])

    async def read_name_expiry(self, name: str) -> float:
        """End of the lease of the live node of this name, as reported to a second claimant."""
        with self.assertRaises(NodeNameTaken) as caught:
            await self.second_store.cluster.join(make_node(name, boot="other"), LONG)
        until: float = caught.exception.until
        return until

    async def test_name_of_lapsed_node_is_free(self) -> None:
        """The name of a lapsed or dropped node is free; dropping the old node leaves the new one."""
        await self.join_nodes("a", lease=self.short)
        await self.join_nodes("b")
        await self.cluster.drop("B", until=inf)
        await self.outlive_lease()
        for name in ("a", "b"):
            await self.cluster.join(make_node(name, boot=f"{name}2"), LONG)
        self.assertEqual(await self.list_live_boots(), ["a2", "b2"])
        self.assertEqual(await self.cluster.list_lapsed_nodes(), ["A"])
        await self.cluster.drop("A")
        self.assertEqual(await self.list_live_boots(), ["a2", "b2"])
        self.assertEqual(await self.cluster.list_lapsed_nodes(), [])

    async def test_returning_node_does_not_regain_name(self) -> None:
        """A node whose name was taken while its lease had lapsed does not get it back."""
        await self.join_nodes("a", lease=self.short)
        await self.outlive_lease()
        await self.cluster.join(make_node("a", boot="A2"), LONG)
        with self.assertRaises(NodeNameTaken):
            await self.join_nodes("a")
        self.assertEqual(await self.list_live_boots(), ["A2"])

    async def test_refuses_different_secret(self) -> None:
        """A node with another secret than a live node is refused, whatever its name; no text has the secret."""
        await self.join_nodes("a")
        for name in ("a", "b"):
            with self.assertRaises(ClusterSecretMismatch) as caught:
                await self.second_store.cluster.join(make_node(name, boot="X", seal=b"other"), LONG)
            self.assertNotIn("other", str(caught.exception))
        self.assertEqual(await self.list_live_boots(), ["A"])
        self.assertNotIn("seal", repr(await self.cluster.list_nodes()))

    async def test_accepts_new_secret_without_other_nodes(self) -> None:
        """Another secret is accepted when no other node is live."""
        await self.join_nodes("a", lease=self.short)
        await self.outlive_lease()
        await self.cluster.join(make_node("b", seal=b"other"), LONG)
        await self.cluster.join(make_node("b", seal=b"third"), LONG)
        self.assertEqual(await self.cluster.list_nodes(), [make_node("b", seal=b"third")])

    async def collect_refusals(self, deferreds: Iterable[Deferred[None]]) -> list[type[ClusterJoinError]]:
        """The errors of those calls that failed."""
        errors = []
        for joined in deferreds:
            try:
                await joined
            except ClusterJoinError as error:
                errors.append(type(error))
        return errors

    async def test_concurrent_joins_with_one_name(self) -> None:
        """Of concurrent joins with one name one succeeds; with different names all do."""
        stores = (self.store, self.second_store)
        deferreds = [
            stores[number % 2].cluster.join(make_node(name, boot=f"{name}{number}"), LONG)
            for number in range(6)
            for name in ("a", "b")
        ]
        self.assertEqual(await self.collect_refusals(deferreds), [NodeNameTaken] * 10)
        self.assertEqual([node.name for node in await self.cluster.list_nodes()], ["a", "b"])

    async def test_concurrent_joins_with_different_secrets(self) -> None:
        """Of nodes with different secrets that start concurrently only those with one of them join."""
        stores = (self.store, self.second_store)
        deferreds = [
            stores[number % 2].cluster.join(make_node(f"n{number}", seal=b"%d" % (number % 2)), LONG)
            for number in range(6)
        ]
        self.assertEqual(await self.collect_refusals(deferreds), [ClusterSecretMismatch] * 3)
        self.assertEqual(len({node.seal for node in await self.cluster.list_nodes()}), 1)

    async def test_drop_removes_node(self) -> None:
        """A dropped node is neither live nor lapsed; dropping an unknown node does nothing."""
        await self.join_nodes("a", "b")
        self.assertEqual(await self.second_store.cluster.drop("A", until=inf), 0)
        self.assertEqual(await self.list_live_boots(), ["B"])
        self.assertEqual(await self.cluster.list_lapsed_nodes(), [])
        for boot in ("A", "unknown", ""):
            self.assertEqual(await self.cluster.drop(boot, until=inf), 0)
        self.assertEqual(await self.list_live_boots(), ["B"])

    async def test_drop_spares_live_node(self) -> None:
        """A live node is not dropped by a process that thinks it has lapsed, and keeps all its records."""
        await self.join_nodes("a", lease=self.short)
        await self.join_nodes("b")
        await self.cluster.add_presence("A", ["did:x"])
        self.assertIs(await self.cluster.acquire_lease("turn", "A", LONG), True)
        await self.enqueue_ids("m")
        await self.store.mark_delivered(["m"], node="A")
        await self.outlive_lease()
        self.assertEqual(await self.second_store.cluster.list_lapsed_nodes(), ["A"])
        await self.join_nodes("a")
        self.assertEqual(await self.second_store.cluster.drop("A"), 0)
        self.assertEqual(await self.list_live_boots(), ["A", "B"])
        self.assertEqual([record.boot for record in await self.cluster.find_presence(["did:x"])], ["A"])
        self.assertIs(await self.cluster.acquire_lease("turn", "B", LONG), False)
        self.assertEqual(await self.store.mark_pending(["m"]), ["m"])

    async def test_drops_live_node_by_its_lease(self) -> None:
        """A live node can be dropped by its lease unless that was renewed."""
        await self.join_nodes("a", "b")
        expiry = await self.read_name_expiry("a")
        self.assertEqual(await self.read_name_expiry("a"), expiry)
        await self.pass_time(self.short / 10)
        self.assertIs(await self.cluster.renew("A", LONG), True)
        self.assertGreater(await self.read_name_expiry("a"), expiry)
        await self.second_store.cluster.drop("A", until=expiry)
        self.assertEqual(await self.list_live_boots(), ["A", "B"])
        await self.second_store.cluster.drop("A", until=await self.read_name_expiry("a"))
        self.assertEqual(await self.list_live_boots(), ["B"])

    async def test_concurrent_drop_and_join(self) -> None:
        """In either order, a node that has joined again is live, with what it announces afterwards."""
        for iteration in range(5):
            boot = f"boot{iteration}"
            await self.cluster.join(make_node("a", boot=boot), self.short)
            await self.cluster.add_presence(boot, ["did:x", "did:y"])
            await self.outlive_lease()
            dropped = [self.second_store.cluster.drop(boot) for _ in range(2)]
            await self.cluster.join(make_node("a", boot=boot), LONG)
            await self.cluster.add_presence(boot, ["did:x"])
            await gatherResults(dropped)
            self.assertEqual(await self.list_live_boots(), [boot])
            self.assertEqual([record.boot for record in await self.cluster.find_presence(["did:x"])], [boot])
            await self.cluster.drop(boot, until=inf)

    async def test_fails_before_open_and_after_close(self) -> None:
        """All operations fail before open and after close."""
        await self.second_store.close()
        await self.store.close()
        await self.assert_every_call_fails()
        self.cluster = self.make_test_store().cluster
        await self.assert_every_call_fails()

    async def assert_every_call_fails(self) -> None:
        cluster = self.cluster
        for deferreds in (
            cluster.join(make_node("a"), LONG),
            cluster.renew("A", LONG),
            cluster.drop("A"),
            cluster.list_nodes(),
            cluster.list_lapsed_nodes(),
            cluster.add_presence("A", ["did:x"]),
            cluster.remove_presence("A", ["did:x"]),
            cluster.find_presence(["did:x"]),
            cluster.acquire_lease("turn", "A", LONG),
            cluster.take_quota(b"key", 1, limit=2, period=60.0),
            cluster.return_quota(b"key", 1),
        ):
            with self.assertRaises(StoreUnavailable):
                await deferreds


class ClusterIdentityContract(ClusterStoreContract):
    """Contract of `IClusterStore` for the mediator's identity, where nodes need not be workers of one daemon."""

    async def test_refuses_different_identity(self) -> None:
        """A node of another mediator is refused, whatever its name; a wrong secret takes precedence."""
        await self.cluster.join(make_node("a", identity=b"one"), LONG)
        for name in ("a", "b"):
            with self.assertRaises(ClusterIdentityMismatch):
                await self.second_store.cluster.join(make_node(name, boot="X", identity=b"two"), LONG)
        with self.assertRaises(ClusterSecretMismatch):
            await self.second_store.cluster.join(make_node("b", seal=b"other", identity=b"two"), LONG)
        await self.second_store.cluster.join(make_node("b", identity=b"one"), LONG)
        self.assertEqual([node.identity for node in await self.cluster.list_nodes()], [b"one", b"one"])

    async def test_accepts_node_without_identity(self) -> None:
        """A node that states no identity may join, and keeps no other node from joining."""
        await self.cluster.join(make_node("a"), LONG)
        await self.second_store.cluster.join(make_node("b", identity=b"one"), LONG)
        await self.cluster.join(make_node("c"), LONG)
        self.assertEqual([node.identity for node in await self.cluster.list_nodes()], [b"", b"one", b""])

    async def test_accepts_new_identity_without_other_nodes(self) -> None:
        """Another identity is accepted when no other node is live."""
        await self.cluster.join(make_node("a", identity=b"one"), self.short)
        await self.outlive_lease()
        await self.cluster.join(make_node("b", identity=b"two"), LONG)
        await self.cluster.join(make_node("b", identity=b"three"), LONG)
        self.assertEqual([node.identity for node in await self.cluster.list_nodes()], [b"three"])


class LeaderLeaseContract(ClusterStoreContract):
    """Contract of `IClusterStore` for leader leases."""

    async def acquire(self, boot: str, lease_name: str = "sweep", lease: float = LONG) -> bool:
        return await self.cluster.acquire_lease(lease_name, boot, lease)

    async def test_one_holder_at_a_time(self) -> None:
        """A lease has one holder, which may acquire it again; leases of other names are independent."""
        self.assertIs(await self.acquire("A"), True)
        self.assertIs(await self.second_store.cluster.acquire_lease("sweep", "B", LONG), False)
        self.assertIs(await self.acquire("A"), True)
        self.assertIs(await self.acquire("B", "other"), True)
        self.assertIs(await self.acquire("A", "other"), False)

    async def test_lapsed_lease_goes_to_next_claimant(self) -> None:
        """A lapsed lease goes to the first node that tries to acquire it."""
        await self.acquire("A", lease=self.short)
        await self.outlive_lease()
        self.assertIs(await self.acquire("B"), True)
        self.assertIs(await self.acquire("A"), False)

    async def test_renewal_counts_from_now(self) -> None:
        """A renewed lease counts from the renewal, whether longer or shorter than before."""
        await self.acquire("A")
        await self.acquire("A", lease=self.short)
        await self.acquire("B", "other", lease=self.short)
        await self.acquire("B", "other")
        await self.outlive_lease()
        self.assertIs(await self.acquire("B"), True)
        self.assertIs(await self.acquire("A", "other"), False)

    async def test_refused_attempt_does_not_extend_lease(self) -> None:
        """A refused attempt does not change when the holder's lease ends."""
        await self.acquire("A", lease=self.long_lease)
        await self.acquire("B")
        await self.pass_time(self.long_lease)
        self.assertIs(await self.acquire("C"), True)

    async def test_drop_releases_leases(self) -> None:
        """Dropping a node ends its leases, and no others."""
        await self.join_nodes("a", "b")
        await self.acquire("A")
        await self.acquire("B", "other")
        await self.cluster.drop("A", until=inf)
        self.assertIs(await self.acquire("C"), True)
        self.assertIs(await self.acquire("C", "other"), False)

    async def test_concurrent_claims_have_one_winner(self) -> None:
        """Of concurrent claims one succeeds, also when an earlier lease has lapsed."""
        await self.acquire("gone", lease=self.short)
        await self.outlive_lease()
        stores = (self.store, self.second_store)
        deferreds = [stores[number % 2].cluster.acquire_lease("sweep", f"B{number}", LONG) for number in range(8)]
        self.assertEqual(sorted(await gatherResults(deferreds)), [False] * 7 + [True])
