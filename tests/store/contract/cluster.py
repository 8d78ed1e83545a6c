"""Nodes, their leases and their turns."""

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
from tests.store.contract.cluster_base import LONG, ClusterStoreContract, a_node


class ClusterContract(ClusterStoreContract):
    """Promises of `IClusterStore` about nodes."""

    async def test_join(self) -> None:
        """Who has joined is live for every process, in order of names, with all that was said of it."""
        self.assertEqual(await self.cluster.list_nodes(), [])
        await self.cluster.join(a_node("b", address="unix:/run/b.sock"), LONG)
        await self.neighbour.cluster.join(a_node("a"), LONG)
        expected = [
            ClusterNode("a", "A", "tcp:host=a:port=7070", b"seal"),
            ClusterNode("b", "B", "unix:/run/b.sock", b"seal"),
        ]
        for store in (self.store, self.neighbour):
            self.assertEqual(await store.cluster.list_nodes(), expected)
            self.assertEqual(await store.cluster.list_lapsed_nodes(), [])

    async def test_join_again(self) -> None:
        """A boot that joins again is renewed with what it says now, and is still one node."""
        await self.join("a", lease=self.short)
        moved = a_node("renamed", boot="A", address="tcp:host=elsewhere:port=1")
        await self.cluster.join(moved, LONG)
        await self.outlive()
        self.assertEqual(await self.cluster.list_nodes(), [moved])
        self.assertEqual(await self.cluster.list_lapsed_nodes(), [])

    async def test_lease_ends(self) -> None:
        """A node whose lease is over is not live, waits to be dropped, and cannot be renewed, only join again."""
        await self.join("a", lease=self.short)
        await self.join("b")
        await self.outlive()
        self.assertEqual(await self.live(), ["B"])
        self.assertEqual(await self.neighbour.cluster.list_lapsed_nodes(), ["A"])
        self.assertIs(await self.cluster.renew("A", LONG), False)
        self.assertEqual(await self.live(), ["B"])
        await self.join("a")
        self.assertEqual(await self.live(), ["A", "B"])
        self.assertEqual(await self.neighbour.cluster.list_lapsed_nodes(), [])

    async def test_renew(self) -> None:
        """A lease that is renewed counts from then, be it longer or shorter than before."""
        await self.join("a", "b")
        self.assertIs(await self.cluster.renew("A", 2 * LONG), True)
        self.assertIs(await self.cluster.renew("B", self.short), True)
        await self.outlive()
        self.assertEqual(await self.live(), ["A"])

    async def test_renew_unknown(self) -> None:
        """Nobody is renewed who never joined or was dropped."""
        await self.join("a")
        await self.neighbour.cluster.drop("A", until=inf)
        for boot in ("A", "B", ""):
            self.assertIs(await self.cluster.renew(boot, LONG), False)
        self.assertEqual(await self.live(), [])
        await self.join("a")
        self.assertEqual(await self.live(), ["A"])

    async def test_name_taken(self) -> None:
        """A name belongs to one live node; who wants it as well is told who that is, and changes nothing."""
        await self.join("a")
        with self.assertRaises(NodeNameTaken) as caught:
            await self.neighbour.cluster.join(a_node("a", boot="A2", address="tcp:host=x:port=1"), LONG)
        self.assertEqual(caught.exception.holder, a_node("a"))
        self.assertEqual(await self.until("a"), caught.exception.until)
        self.assertNotIn("\n", str(caught.exception))
        self.assertEqual(await self.cluster.list_nodes(), [a_node("a")])
        self.assertEqual(await self.cluster.list_lapsed_nodes(), [])

    async def until(self, name: str) -> float:
        """When the lease of the live node of this name is over, as who wants the name is told."""
        with self.assertRaises(NodeNameTaken) as caught:
            await self.neighbour.cluster.join(a_node(name, boot="other"), LONG)
        until: float = caught.exception.until
        return until

    async def test_name_of_one_that_is_gone(self) -> None:
        """The name of a node that is not live or was dropped is free; dropping the old one leaves the new one."""
        await self.join("a", lease=self.short)
        await self.join("b")
        await self.cluster.drop("B", until=inf)
        await self.outlive()
        for name in ("a", "b"):
            await self.cluster.join(a_node(name, boot=f"{name}2"), LONG)
        self.assertEqual(await self.live(), ["a2", "b2"])
        self.assertEqual(await self.cluster.list_lapsed_nodes(), ["A"])
        await self.cluster.drop("A")
        self.assertEqual(await self.live(), ["a2", "b2"])
        self.assertEqual(await self.cluster.list_lapsed_nodes(), [])

    async def test_name_is_taken_from_one_that_comes_back(self) -> None:
        """A node that was away while another one took its name does not get it back."""
        await self.join("a", lease=self.short)
        await self.outlive()
        await self.cluster.join(a_node("a", boot="A2"), LONG)
        with self.assertRaises(NodeNameTaken):
            await self.join("a")
        self.assertEqual(await self.live(), ["A2"])

    async def test_secret_differs(self) -> None:
        """Who has another secret than a live node is refused, whatever its name; the secret is in no text."""
        await self.join("a")
        for name in ("a", "b"):
            with self.assertRaises(ClusterSecretMismatch) as caught:
                await self.neighbour.cluster.join(a_node(name, boot="X", seal=b"other"), LONG)
            self.assertNotIn("other", str(caught.exception))
        self.assertEqual(await self.live(), ["A"])
        self.assertNotIn("seal", repr(await self.cluster.list_nodes()))

    async def test_new_secret(self) -> None:
        """When no node is live, or only oneself, there may be another secret."""
        await self.join("a", lease=self.short)
        await self.outlive()
        await self.cluster.join(a_node("b", seal=b"other"), LONG)
        await self.cluster.join(a_node("b", seal=b"third"), LONG)
        self.assertEqual(await self.cluster.list_nodes(), [a_node("b", seal=b"third")])

    async def refusals(self, asked: Iterable[Deferred[None]]) -> list[type[ClusterJoinError]]:
        """How those were refused that were."""
        refused = []
        for joined in asked:
            try:
                await joined
            except ClusterJoinError as error:
                refused.append(type(error))
        return refused

    async def test_join_at_the_same_time(self) -> None:
        """Of several that want a name at the same time one gets it, and all get different ones."""
        stores = (self.store, self.neighbour)
        asked = [
            stores[number % 2].cluster.join(a_node(name, boot=f"{name}{number}"), LONG)
            for number in range(6)
            for name in ("a", "b")
        ]
        self.assertEqual(await self.refusals(asked), [NodeNameTaken] * 10)
        self.assertEqual([node.name for node in await self.cluster.list_nodes()], ["a", "b"])

    async def test_secrets_at_the_same_time(self) -> None:
        """Of nodes with different secrets that start at the same time only those with one of them come up."""
        stores = (self.store, self.neighbour)
        asked = [
            stores[number % 2].cluster.join(a_node(f"n{number}", seal=b"%d" % (number % 2)), LONG)
            for number in range(6)
        ]
        self.assertEqual(await self.refusals(asked), [ClusterSecretMismatch] * 3)
        self.assertEqual(len({node.seal for node in await self.cluster.list_nodes()}), 1)

    async def test_drop(self) -> None:
        """Who is dropped is gone at once, and neither live nor lapsed; dropping nobody is nothing."""
        await self.join("a", "b")
        self.assertEqual(await self.neighbour.cluster.drop("A", until=inf), 0)
        self.assertEqual(await self.live(), ["B"])
        self.assertEqual(await self.cluster.list_lapsed_nodes(), [])
        for boot in ("A", "unknown", ""):
            self.assertEqual(await self.cluster.drop(boot, until=inf), 0)
        self.assertEqual(await self.live(), ["B"])

    async def test_drop_of_the_living(self) -> None:
        """Who is live is not dropped by somebody who thinks that it is not, and keeps all it has."""
        await self.join("a", lease=self.short)
        await self.join("b")
        await self.cluster.add_presence("A", ["did:x"])
        self.assertIs(await self.cluster.acquire_lease("turn", "A", LONG), True)
        await self.put("m")
        await self.store.mark_delivered(["m"], node="A")
        await self.outlive()
        self.assertEqual(await self.neighbour.cluster.list_lapsed_nodes(), ["A"])
        await self.join("a")
        self.assertEqual(await self.neighbour.cluster.drop("A"), 0)
        self.assertEqual(await self.live(), ["A", "B"])
        self.assertEqual([place.boot for place in await self.cluster.find_presence(["did:x"])], ["A"])
        self.assertIs(await self.cluster.acquire_lease("turn", "B", LONG), False)
        self.assertEqual(await self.store.mark_pending(["m"]), ["m"])

    async def test_drop_of_a_lease(self) -> None:
        """A live node is dropped by its lease, as long as that was not renewed."""
        await self.join("a", "b")
        seen = await self.until("a")
        self.assertEqual(await self.until("a"), seen)
        await self.pass_time(self.short / 10)
        self.assertIs(await self.cluster.renew("A", LONG), True)
        self.assertGreater(await self.until("a"), seen)
        await self.neighbour.cluster.drop("A", until=seen)
        self.assertEqual(await self.live(), ["A", "B"])
        await self.neighbour.cluster.drop("A", until=await self.until("a"))
        self.assertEqual(await self.live(), ["B"])

    async def test_drop_while_it_comes_back(self) -> None:
        """Whichever is first: what a node announces after it has joined is there, and so is the node."""
        for turn in range(5):
            boot = f"boot{turn}"
            await self.cluster.join(a_node("a", boot=boot), self.short)
            await self.cluster.add_presence(boot, ["did:x", "did:y"])
            await self.outlive()
            dropped = [self.neighbour.cluster.drop(boot) for _ in range(2)]
            await self.cluster.join(a_node("a", boot=boot), LONG)
            await self.cluster.add_presence(boot, ["did:x"])
            await gatherResults(dropped)
            self.assertEqual(await self.live(), [boot])
            self.assertEqual([place.boot for place in await self.cluster.find_presence(["did:x"])], [boot])
            await self.cluster.drop(boot, until=inf)

    async def test_closed(self) -> None:
        """Nothing works before open, nor after close."""
        await self.neighbour.close()
        await self.store.close()
        await self.every_call_fails()
        self.cluster = self.a_store().cluster
        await self.every_call_fails()

    async def every_call_fails(self) -> None:
        cluster = self.cluster
        for asked in (
            cluster.join(a_node("a"), LONG),
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
                await asked


class ClusterIdentityContract(ClusterStoreContract):
    """Promises of `IClusterStore` about who the mediator is, where others than workers of one daemon can be nodes."""

    async def test_identity_differs(self) -> None:
        """Who is another mediator than a live node is refused, whatever its name; a wrong secret is worse."""
        await self.cluster.join(a_node("a", identity=b"one"), LONG)
        for name in ("a", "b"):
            with self.assertRaises(ClusterIdentityMismatch):
                await self.neighbour.cluster.join(a_node(name, boot="X", identity=b"two"), LONG)
        with self.assertRaises(ClusterSecretMismatch):
            await self.neighbour.cluster.join(a_node("b", seal=b"other", identity=b"two"), LONG)
        await self.neighbour.cluster.join(a_node("b", identity=b"one"), LONG)
        self.assertEqual([node.identity for node in await self.cluster.list_nodes()], [b"one", b"one"])

    async def test_one_that_does_not_say(self) -> None:
        """It is let in, and in nobody's way."""
        await self.cluster.join(a_node("a"), LONG)
        await self.neighbour.cluster.join(a_node("b", identity=b"one"), LONG)
        await self.cluster.join(a_node("c"), LONG)
        self.assertEqual([node.identity for node in await self.cluster.list_nodes()], [b"", b"one", b""])

    async def test_new_identity(self) -> None:
        """When no node is live, or only oneself, there may be another."""
        await self.cluster.join(a_node("a", identity=b"one"), self.short)
        await self.outlive()
        await self.cluster.join(a_node("b", identity=b"two"), LONG)
        await self.cluster.join(a_node("b", identity=b"three"), LONG)
        self.assertEqual([node.identity for node in await self.cluster.list_nodes()], [b"three"])


class LeaderLeaseContract(ClusterStoreContract):
    """Promises of `IClusterStore` about turns."""

    async def hold(self, boot: str, turn: str = "sweep", lease: float = LONG) -> bool:
        return await self.cluster.acquire_lease(turn, boot, lease)

    async def test_one_at_a_time(self) -> None:
        """It is one node's turn, as often as it asks, and nobody else's; other turns are apart."""
        self.assertIs(await self.hold("A"), True)
        self.assertIs(await self.neighbour.cluster.acquire_lease("sweep", "B", LONG), False)
        self.assertIs(await self.hold("A"), True)
        self.assertIs(await self.hold("B", "other"), True)
        self.assertIs(await self.hold("A", "other"), False)

    async def test_lease_ends(self) -> None:
        """When nobody held it for long enough it is the turn of who asks first."""
        await self.hold("A", lease=self.short)
        await self.outlive()
        self.assertIs(await self.hold("B"), True)
        self.assertIs(await self.hold("A"), False)

    async def test_held_again(self) -> None:
        """A turn that is held again counts from then, be it for longer or shorter than before."""
        await self.hold("A")
        await self.hold("A", lease=self.short)
        await self.hold("B", "other", lease=self.short)
        await self.hold("B", "other")
        await self.outlive()
        self.assertIs(await self.hold("B"), True)
        self.assertIs(await self.hold("A", "other"), False)

    async def test_refusal_takes_nothing(self) -> None:
        """Who is refused does not keep the holder from losing its turn in time."""
        await self.hold("A", lease=self.roomy)
        await self.hold("B")
        await self.pass_time(self.roomy)
        self.assertIs(await self.hold("C"), True)

    async def test_drop(self) -> None:
        """The turns of a node that is dropped are over, and only those."""
        await self.join("a", "b")
        await self.hold("A")
        await self.hold("B", "other")
        await self.cluster.drop("A", until=inf)
        self.assertIs(await self.hold("C"), True)
        self.assertIs(await self.hold("C", "other"), False)

    async def test_at_the_same_time(self) -> None:
        """Of several that ask at the same time it is the turn of one, also when an earlier one is over."""
        await self.hold("gone", lease=self.short)
        await self.outlive()
        stores = (self.store, self.neighbour)
        asked = [stores[number % 2].cluster.acquire_lease("sweep", f"B{number}", LONG) for number in range(8)]
        self.assertEqual(sorted(await gatherResults(asked)), [False] * 7 + [True])
