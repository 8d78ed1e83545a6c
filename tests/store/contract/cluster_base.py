"""Base of the cluster contract."""

from __future__ import annotations

from twisted.internet.defer import Deferred

from mediatord.store.interfaces.cluster_and_quotas import ClusterNode, IClusterStore
from mediatord.store.interfaces.store import IStore
from tests.store.contract.base import StoreContract

SEAL = b"seal"
LONG = 600.0


class ClusterStoreContract(StoreContract):
    """
    An open store without nodes, and a second one as another process has it.

    :ivar short: seconds that a lease takes to be over while a test waits; all other leases outlive it.
    """

    short = 10.0
    cluster: IClusterStore

    async def setUp(self) -> None:  # type: ignore[override]  # trial waits for it
        await super().setUp()
        self.cluster = self.store.cluster
        self.second_store: IStore = self.make_second_store()
        await self.second_store.open()

    async def tearDown(self) -> None:  # type: ignore[override]  # trial waits for it
        await self.second_store.close()
        await super().tearDown()

    @property
    def long_lease(self) -> float:
        """A lease that does not end during a test, even on a real clock."""
        return 5 * self.short

    async def join_nodes(self, *names: str, lease: float = LONG) -> None:
        """Join nodes that stay live during the test unless a lease is given."""
        for name in names:
            await self.cluster.join(make_node(name), lease)

    async def list_live_boots(self) -> list[str]:
        """Boots of the live nodes."""
        return [node.boot for node in await self.second_store.cluster.list_nodes()]

    def outlive_lease(self) -> Deferred[None]:
        """Let a short lease end."""
        return self.pass_time(self.short)


def make_node(
    name: str, boot: str | None = None, seal: bytes = SEAL, address: str | None = None, identity: bytes = b""
) -> ClusterNode:
    """A node whose boot is its name in capitals unless it is given."""
    return ClusterNode(name, boot or name.upper(), address or f"tcp:host={name}:port=7070", seal, identity)
