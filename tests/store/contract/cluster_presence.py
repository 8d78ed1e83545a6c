"""Contract for presence records and for messages that nodes have delivered."""

from __future__ import annotations

from math import inf

from mediatord.store.interfaces.cluster_and_quotas import PresenceRecord
from tests.store.builders import ALICE
from tests.store.contract.cluster_base import LONG, ClusterStoreContract, make_node

X, Y, Z = "did:example:x", "did:example:y", "did:example:z"


class ClusterPresenceContract(ClusterStoreContract):
    """Contract of `IClusterStore` for presence."""

    async def look_up_presence(self, *dids: str) -> list[tuple[str, str, bool]]:
        """DID, boot, and whether the node is live."""
        found = await self.second_store.cluster.find_presence(dids)
        return sorted((item.did, item.boot, item.node is not None) for item in found)

    async def test_announced_presence_is_shared(self) -> None:
        """Every process finds the nodes that hold sessions of a DID, and their addresses."""
        await self.join_nodes("a", "b")
        await self.cluster.add_presence("A", [X, Y])
        await self.cluster.add_presence("B", [Y])
        self.assertEqual(await self.look_up_presence(X, Y, Z), [(X, "A", True), (Y, "A", True), (Y, "B", True)])
        self.assertEqual(await self.look_up_presence(X), [(X, "A", True)])
        self.assertEqual(await self.second_store.cluster.find_presence([X]), [PresenceRecord(X, "A", make_node("a"))])
        self.assertEqual(await self.look_up_presence(), [])
        self.assertEqual(await self.look_up_presence(X[:-1], Z, ""), [])

    async def test_announcing_twice_is_idempotent(self) -> None:
        """A DID announced or looked up twice has one record."""
        await self.join_nodes("a")
        await self.cluster.add_presence("A", [X, X, Y])
        await self.cluster.add_presence("A", [Y, Z])
        await self.cluster.add_presence("A", [])
        self.assertEqual(await self.look_up_presence(X, Y, X, Z), [(did, "A", True) for did in (X, Y, Z)])

    async def test_withdraws_presence_of_one_node(self) -> None:
        """Withdrawing removes the record of that node only; withdrawing an unknown record does nothing."""
        await self.join_nodes("a", "b")
        await self.cluster.add_presence("A", [X, Y])
        await self.cluster.add_presence("B", [X])
        await self.cluster.remove_presence("A", [X, X, Z])
        await self.cluster.remove_presence("A", [])
        await self.cluster.remove_presence("unknown", [Y])
        self.assertEqual(await self.look_up_presence(X, Y, Z), [(X, "B", True), (Y, "A", True)])
        await self.cluster.add_presence("A", [X])
        self.assertEqual(await self.look_up_presence(X), [(X, "A", True), (X, "B", True)])

    async def test_pickups_are_shared(self) -> None:
        """A pickup that one process records is known to every process until it expires."""
        await self.cluster.record_pickups(["a", "b", "a"], LONG)
        await self.cluster.record_pickups(["short", "b"], self.long_lease)
        await self.cluster.record_pickups([], LONG)
        second_cluster = self.second_store.cluster
        self.assertEqual(await second_cluster.find_picked_up(["a", "b", "c", "short", "a", ""]), {"a", "b", "short"})
        self.assertEqual(await second_cluster.find_picked_up([]), frozenset())
        await self.pass_time(self.long_lease)
        self.assertEqual(await second_cluster.find_picked_up(["a", "b", "short"]), {"a"})
        await self.cluster.record_pickups(["b"], LONG)
        self.assertEqual(await second_cluster.find_picked_up(["short", "b"]), {"b"})

    async def test_records_hundreds_of_pickups(self) -> None:
        """Hundreds of pickups can be recorded at once."""
        ids = [f"m{number}" for number in range(1500)]
        await self.cluster.record_pickups(ids, LONG)
        self.assertEqual(await self.second_store.cluster.find_picked_up([*ids, "x"]), frozenset(ids))

    async def test_lapsed_node_has_stale_records(self) -> None:
        """Records of a lapsed node are found without a node; they are live again when it renews."""
        await self.join_nodes("a", lease=self.short)
        await self.join_nodes("b")
        await self.cluster.add_presence("A", [X])
        await self.cluster.add_presence("B", [X])
        await self.outlive_lease()
        self.assertEqual(await self.look_up_presence(X), [(X, "A", False), (X, "B", True)])
        await self.join_nodes("a")
        self.assertEqual(await self.look_up_presence(X), [(X, "A", True), (X, "B", True)])

    async def test_drop_removes_records(self) -> None:
        """Dropping a node removes its records and no others; it starts without records when it joins again."""
        await self.join_nodes("a", "b")
        await self.cluster.add_presence("A", [X, Y])
        await self.cluster.add_presence("B", [Y])
        await self.cluster.drop("A", until=inf)
        self.assertEqual(await self.look_up_presence(X, Y), [(Y, "B", True)])
        await self.join_nodes("a")
        self.assertEqual(await self.look_up_presence(X, Y), [(Y, "B", True)])

    async def test_records_of_unknown_node_are_stale(self) -> None:
        """A record announced for an unknown node is stale and can be dropped."""
        await self.join_nodes("a")
        await self.cluster.add_presence("ghost", [X, Y])
        self.assertEqual(await self.look_up_presence(X), [(X, "ghost", False)])
        self.assertEqual(await self.cluster.list_lapsed_nodes(), ["ghost"])
        self.assertEqual(await self.cluster.drop("ghost"), 0)
        self.assertEqual(await self.look_up_presence(X, Y), [])
        self.assertEqual(await self.cluster.list_lapsed_nodes(), [])

    async def test_announces_thousands(self) -> None:
        """Thousands of records can be announced and looked up at once."""
        dids = [f"did:example:{number}" for number in range(2500)]
        await self.join_nodes("a", "b")
        await self.cluster.add_presence("A", dids)
        await self.cluster.add_presence("B", dids[::2])
        self.assertEqual(len(await self.look_up_presence(*dids)), 3750)
        await self.cluster.remove_presence("A", dids[1:])
        self.assertEqual(len(await self.look_up_presence(*dids)), 1251)
        await self.cluster.drop("B", until=inf)
        self.assertEqual(await self.look_up_presence(*dids), [(dids[0], "A", True)])


class ClusterDeliveryContract(ClusterStoreContract):
    """Contract of `IClusterStore` and `IStore.open` for messages that nodes have delivered."""

    async def setUp(self) -> None:  # type: ignore[override]  # trial waits for it
        await super().setUp()
        await self.enqueue_ids("m", "n", "o")

    async def list_delivered(self) -> list[str]:
        """Ids of delivered messages."""
        found = await self.second_store.fetch_messages(ALICE, None, limit=9, max_bytes=9999)
        return [message.id for message in found if message.status == "delivered"]

    async def open_another_store(self) -> None:
        """Open a store as another process does when it starts."""
        another = self.make_second_store()
        await another.open()
        await another.close()

    async def test_drop_requeues_deliveries(self) -> None:
        """Messages that a dropped node has delivered are pending again; their push counts stay."""
        await self.join_nodes("a", "b")
        await self.store.mark_delivered(["m", "o"], node="A")
        await self.store.mark_delivered(["n"], node="B")
        self.assertEqual(await self.second_store.cluster.drop("A", until=inf), 2)
        self.assertEqual(await self.list_delivered(), ["n"])
        self.assertEqual(await self.cluster.drop("A", until=inf), 0)
        removed = await self.store.acknowledge(ALICE, ["m", "n", "o"])
        self.assertEqual([item.pushes for item in removed], [1, 1, 1])

    async def test_last_push_decides(self) -> None:
        """A message pushed by several nodes is requeued when the last of them is dropped."""
        await self.join_nodes("a", "b")
        await self.store.mark_delivered(["m"], node="A")
        await self.second_store.mark_delivered(["m"], node="B")
        self.assertEqual(await self.cluster.drop("A", until=inf), 0)
        self.assertEqual(await self.list_delivered(), ["m"])
        self.assertEqual(await self.cluster.drop("B", until=inf), 1)
        self.assertEqual([message.pushes for message in await self.store.acknowledge(ALICE, ["m"])], [2])

    async def test_drop_ignores_resolved_messages(self) -> None:
        """Messages that were requeued, acknowledged or removed before do not count."""
        await self.join_nodes("a")
        await self.store.mark_delivered(["m", "n", "o"], node="A")
        await self.store.mark_pending(["m"])
        await self.store.acknowledge(ALICE, ["n"])
        await self.store.remove_messages(["o"])
        self.assertEqual(await self.cluster.drop("A", until=inf), 0)

    async def test_open_requeues_deliveries_of_lapsed_nodes(self) -> None:
        """When a process starts, all messages are requeued but those that live nodes have delivered."""
        await self.join_nodes("a")
        await self.join_nodes("b", lease=self.long_lease)
        await self.store.mark_delivered(["m"], node="A")
        await self.store.mark_delivered(["n"], node="B")
        await self.store.mark_delivered(["o"])
        await self.open_another_store()
        self.assertEqual(await self.list_delivered(), ["m", "n"])
        await self.pass_time(self.long_lease)
        await self.open_another_store()
        self.assertEqual(await self.list_delivered(), ["m"])
        self.assertEqual(await self.store.mark_pending(["m", "n", "o"]), ["m"])

    async def test_requeues_deliveries_of_dropped_node(self) -> None:
        """A message that a node marks after it was dropped is requeued when the node is dropped again."""
        await self.join_nodes("a")
        await self.cluster.drop("A", until=inf)
        await self.store.mark_delivered(["m"], node="A")
        await self.store.mark_delivered(["n"])
        self.assertEqual(await self.cluster.list_lapsed_nodes(), ["A"])
        self.assertEqual(await self.cluster.drop("A", until=inf), 1)
        self.assertEqual(await self.cluster.drop(""), 0)
        self.assertEqual(await self.list_delivered(), ["n"])
        self.assertEqual(await self.cluster.list_lapsed_nodes(), [])
