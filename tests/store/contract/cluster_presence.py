"""Who holds which sessions, and what becomes of what a node has delivered."""

from __future__ import annotations

from math import inf

from mediatord.store.interfaces.cluster_and_quotas import PresenceRecord
from tests.store.builders import ALICE
from tests.store.contract.cluster_base import LONG, ClusterStoreContract, a_node

X, Y, Z = "did:example:x", "did:example:y", "did:example:z"


class ClusterPresenceContract(ClusterStoreContract):
    """Promises of `IClusterStore` about presence."""

    async def where(self, *dids: str) -> list[tuple[str, str, bool]]:
        """DID, boot, and whether the node is live."""
        found = await self.neighbour.cluster.find_presence(dids)
        return sorted((one.did, one.boot, one.node is not None) for one in found)

    async def test_announce(self) -> None:
        """Every process knows which nodes hold sessions of a DID, and where those nodes are."""
        await self.join("a", "b")
        await self.cluster.add_presence("A", [X, Y])
        await self.cluster.add_presence("B", [Y])
        self.assertEqual(await self.where(X, Y, Z), [(X, "A", True), (Y, "A", True), (Y, "B", True)])
        self.assertEqual(await self.where(X), [(X, "A", True)])
        self.assertEqual(await self.neighbour.cluster.find_presence([X]), [PresenceRecord(X, "A", a_node("a"))])
        self.assertEqual(await self.where(), [])
        self.assertEqual(await self.where(X[:-1], Z, ""), [])

    async def test_announce_again(self) -> None:
        """What is announced or asked for twice is there once."""
        await self.join("a")
        await self.cluster.add_presence("A", [X, X, Y])
        await self.cluster.add_presence("A", [Y, Z])
        await self.cluster.add_presence("A", [])
        self.assertEqual(await self.where(X, Y, X, Z), [(did, "A", True) for did in (X, Y, Z)])

    async def test_withdraw(self) -> None:
        """What is withdrawn is gone for that node only; what was never announced is not missed."""
        await self.join("a", "b")
        await self.cluster.add_presence("A", [X, Y])
        await self.cluster.add_presence("B", [X])
        await self.cluster.remove_presence("A", [X, X, Z])
        await self.cluster.remove_presence("A", [])
        await self.cluster.remove_presence("unknown", [Y])
        self.assertEqual(await self.where(X, Y, Z), [(X, "B", True), (Y, "A", True)])
        await self.cluster.add_presence("A", [X])
        self.assertEqual(await self.where(X), [(X, "A", True), (X, "B", True)])

    async def test_pickups(self) -> None:
        """What one process has recorded as picked up every process knows, for as long as it counts."""
        await self.cluster.record_pickups(["a", "b", "a"], LONG)
        await self.cluster.record_pickups(["short", "b"], self.roomy)
        await self.cluster.record_pickups([], LONG)
        neighbour = self.neighbour.cluster
        self.assertEqual(await neighbour.find_picked_up(["a", "b", "c", "short", "a", ""]), {"a", "b", "short"})
        self.assertEqual(await neighbour.find_picked_up([]), frozenset())
        await self.pass_time(self.roomy)
        self.assertEqual(await neighbour.find_picked_up(["a", "b", "short"]), {"a"})
        await self.cluster.record_pickups(["b"], LONG)
        self.assertEqual(await neighbour.find_picked_up(["short", "b"]), {"b"})

    async def test_many_pickups(self) -> None:
        """Hundreds are no trouble."""
        ids = [f"m{number}" for number in range(1500)]
        await self.cluster.record_pickups(ids, LONG)
        self.assertEqual(await self.neighbour.cluster.find_picked_up([*ids, "x"]), frozenset(ids))

    async def test_stale(self) -> None:
        """Records of a node whose lease is over are found, but name no node; they come back with it."""
        await self.join("a", lease=self.short)
        await self.join("b")
        await self.cluster.add_presence("A", [X])
        await self.cluster.add_presence("B", [X])
        await self.outlive()
        self.assertEqual(await self.where(X), [(X, "A", False), (X, "B", True)])
        await self.join("a")
        self.assertEqual(await self.where(X), [(X, "A", True), (X, "B", True)])

    async def test_drop(self) -> None:
        """The records of a node that is dropped are gone, and only those; it begins with none when it joins again."""
        await self.join("a", "b")
        await self.cluster.add_presence("A", [X, Y])
        await self.cluster.add_presence("B", [Y])
        await self.cluster.drop("A", until=inf)
        self.assertEqual(await self.where(X, Y), [(Y, "B", True)])
        await self.join("a")
        self.assertEqual(await self.where(X, Y), [(Y, "B", True)])

    async def test_left_behind(self) -> None:
        """What is announced by no node is stale, and can be dropped."""
        await self.join("a")
        await self.cluster.add_presence("ghost", [X, Y])
        self.assertEqual(await self.where(X), [(X, "ghost", False)])
        self.assertEqual(await self.cluster.list_lapsed_nodes(), ["ghost"])
        self.assertEqual(await self.cluster.drop("ghost"), 0)
        self.assertEqual(await self.where(X, Y), [])
        self.assertEqual(await self.cluster.list_lapsed_nodes(), [])

    async def test_many(self) -> None:
        """Thousands at once are no trouble, and none is forgotten."""
        dids = [f"did:example:{number}" for number in range(2500)]
        await self.join("a", "b")
        await self.cluster.add_presence("A", dids)
        await self.cluster.add_presence("B", dids[::2])
        self.assertEqual(len(await self.where(*dids)), 3750)
        await self.cluster.remove_presence("A", dids[1:])
        self.assertEqual(len(await self.where(*dids)), 1251)
        await self.cluster.drop("B", until=inf)
        self.assertEqual(await self.where(*dids), [(dids[0], "A", True)])


class ClusterDeliveryContract(ClusterStoreContract):
    """Promises of `IClusterStore` and `IStore.open` about what nodes have delivered."""

    async def setUp(self) -> None:  # type: ignore[override]  # trial waits for it
        await super().setUp()
        await self.put("m", "n", "o")

    async def delivered(self) -> list[str]:
        """Ids of what is delivered."""
        found = await self.neighbour.fetch_messages(ALICE, None, limit=9, max_bytes=9999)
        return [message.id for message in found if message.status == "delivered"]

    async def open_another(self) -> None:
        """As when a further process starts."""
        another = self.a_neighbour()
        await another.open()
        await another.close()

    async def test_drop(self) -> None:
        """What a node has delivered is pending again when it is dropped; how often it was pushed is still known."""
        await self.join("a", "b")
        await self.store.mark_delivered(["m", "o"], node="A")
        await self.store.mark_delivered(["n"], node="B")
        self.assertEqual(await self.neighbour.cluster.drop("A", until=inf), 2)
        self.assertEqual(await self.delivered(), ["n"])
        self.assertEqual(await self.cluster.drop("A", until=inf), 0)
        gone = await self.store.acknowledge(ALICE, ["m", "n", "o"])
        self.assertEqual([one.pushes for one in gone], [1, 1, 1])

    async def test_last_one_counts(self) -> None:
        """What several nodes have pushed hangs on the last of them."""
        await self.join("a", "b")
        await self.store.mark_delivered(["m"], node="A")
        await self.neighbour.mark_delivered(["m"], node="B")
        self.assertEqual(await self.cluster.drop("A", until=inf), 0)
        self.assertEqual(await self.delivered(), ["m"])
        self.assertEqual(await self.cluster.drop("B", until=inf), 1)
        self.assertEqual([one.pushes for one in await self.store.acknowledge(ALICE, ["m"])], [2])

    async def test_no_longer_delivered(self) -> None:
        """What is pending again, acknowledged or removed by then does not count."""
        await self.join("a")
        await self.store.mark_delivered(["m", "n", "o"], node="A")
        await self.store.mark_pending(["m"])
        await self.store.acknowledge(ALICE, ["n"])
        await self.store.remove_messages(["o"])
        self.assertEqual(await self.cluster.drop("A", until=inf), 0)

    async def test_open(self) -> None:
        """When a process starts, all is pending but what live nodes have delivered."""
        await self.join("a")
        await self.join("b", lease=self.roomy)
        await self.store.mark_delivered(["m"], node="A")
        await self.store.mark_delivered(["n"], node="B")
        await self.store.mark_delivered(["o"])
        await self.open_another()
        self.assertEqual(await self.delivered(), ["m", "n"])
        await self.pass_time(self.roomy)
        await self.open_another()
        self.assertEqual(await self.delivered(), ["m"])
        self.assertEqual(await self.store.mark_pending(["m", "n", "o"]), ["m"])

    async def test_delivered_by_no_node(self) -> None:
        """What a node marks after it was dropped can be found and is pending again when it is dropped once more."""
        await self.join("a")
        await self.cluster.drop("A", until=inf)
        await self.store.mark_delivered(["m"], node="A")
        await self.store.mark_delivered(["n"])
        self.assertEqual(await self.cluster.list_lapsed_nodes(), ["A"])
        self.assertEqual(await self.cluster.drop("A", until=inf), 1)
        self.assertEqual(await self.cluster.drop(""), 0)
        self.assertEqual(await self.delivered(), ["n"])
        self.assertEqual(await self.cluster.list_lapsed_nodes(), [])
