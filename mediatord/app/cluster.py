"""The cluster side of a daemon: what both protocol halves use of it, and its services."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from twisted.internet.interfaces import IReactorTime

from mediatord.cluster.leases import LeaderLease
from mediatord.cluster.membership import NODE_LEASE
from mediatord.cluster.message_authenticator import (
    ClusterKeys,
    MessageAuthenticator,
    derive_cluster_keys,
    read_cluster_keys,
)
from mediatord.cluster.node_health import NodeHealth
from mediatord.cluster.peer_client import PeerClient
from mediatord.cluster.peer_queues import PeerQueues
from mediatord.cluster.presence import PresenceEpochs, PresenceLookup, PresencePublisher, SharedPresenceCounters
from mediatord.cluster.remote_delivery import RemoteDelivery
from mediatord.config.settings import Config
from mediatord.errors import StartupError
from mediatord.observability.metrics import Metrics
from mediatord.private_file import PrivateFileError
from mediatord.ratelimit.distributed_limiter import QuotaStore
from mediatord.store.interfaces.cluster import ClockSkewError, ClusterNode, IClusterStore
from mediatord.store.interfaces.store import IStore
from mediatord.workers.worker_process import WorkerResources

# Boots whose names are known after they are gone.
_MAX_KNOWN_NODES = 1000


@dataclass(frozen=True, slots=True)
class NodeSettings:
    """
    Where a process is in its cluster.

    :param listen: endpoint string of its node-to-node listener.
    :param address: that of a client, for other nodes.
    :param sole: whether only processes that are gone by now had that address before.
    :param arrivals: what it shares with other workers; None where there is nothing but the store.
    """

    listen: str
    address: str
    keys: ClusterKeys = field(repr=False)
    is_worker: bool = False
    presence_epochs: PresenceEpochs | None = None


def resolve_node_settings(config: Config, worker: WorkerResources | None = None) -> NodeSettings | None:
    """
    The place that the configuration gives this process, or its supervisor; None when it is alone.

    :raise StartupError: the secret cannot be used.
    """
    if worker is not None:
        # Its directory was made by the supervisor, which replaces nobody who is still there.
        presence_epochs = SharedPresenceCounters.of(Path(worker.path))
        return NodeSettings(
            worker.address,
            worker.address,
            derive_cluster_keys(worker.secret),
            is_worker=True,
            presence_epochs=presence_epochs,
        )
    listen, address, secret = config.cluster.listen, config.cluster.address, config.cluster.secret_file
    if listen is None or address is None or secret is None:
        return None
    try:
        return NodeSettings(listen, address, read_cluster_keys(secret))
    except PrivateFileError as error:
        raise StartupError(str(error)) from None


class _MemberLeaderLease(LeaderLease):
    """Who is no node leaves it to those that are."""

    def __init__(self, clock: IReactorTime, store: IClusterStore, boot: str, node_health: NodeHealth) -> None:
        super().__init__(clock, store, boot)
        self._node_health = node_health

    async def is_leader(self) -> bool:
        return self._node_health.is_member and await super().is_leader()


class ClusterSubsystem:
    """
    What a daemon knows of other nodes and tells them.

    :ivar node: this process.
    :ivar listen: endpoint string of its node-to-node listener.
    :ivar sole: as of its place.
    :ivar announcer: tells them of our sockets.
    :ivar tell_joined: called when this node has joined for the first time.
    :ivar elsewhere: has other nodes push what is accepted here.
    :ivar turn: whose it is to keep house.
    :ivar allowances: what rate limits have in common.
    :ivar standing: how things stand between them and us.
    """

    def __init__(self, reactor: Any, store: IStore, metrics: Metrics, node: ClusterNode, place: NodeSettings) -> None:
        self.node = node
        self.listen = place.listen
        self.is_worker = place.is_worker
        self.on_first_join: Callable[[], None] = lambda: None
        self.authenticator = MessageAuthenticator(reactor, place.keys)
        self.peer_client = PeerClient(reactor, node.boot, self.authenticator)
        self._metrics = metrics
        self.node_health = NodeHealth(reactor, NODE_LEASE)
        self._live_count = 1
        self._node_names: dict[str, str] = {}
        self._peer_queues = PeerQueues(reactor, self.peer_client.call, metrics)
        self.presence_publisher = PresencePublisher(reactor, store.cluster, node.boot, place.presence_epochs)
        presence_lookup = PresenceLookup(reactor, store.cluster)
        metrics.register_buffer("cluster_hints", lambda: self._peer_queues.held)
        self.remote_delivery = RemoteDelivery(
            reactor, node.boot, presence_lookup, self._peer_queues, metrics, place.presence_epochs
        )
        metrics.register_buffer("presence_lookups", lambda: self.remote_delivery.held)
        self.leader_lease = _MemberLeaderLease(reactor, store.cluster, node.boot, self.node_health)
        self.allowances = QuotaStore(reactor, store.cluster, lambda: self._live_count, secret=place.keys.allowances)

    def joined(self) -> None:
        """This node is one of the cluster; see :class:`~mediatord.cluster.membership.MembershipListener`."""
        self.node_health.joined()
        self.presence_publisher.joined()
        tell, self.on_first_join = self.on_first_join, lambda: None
        tell()

    def parted(self) -> None:
        """Its lease is over."""
        self.node_health.parted()
        self.presence_publisher.parted()

    def clock_differs(self, refused: ClockSkewError) -> None:
        """It can be no node."""
        self.node_health.clock_differs(refused)

    def clock_agrees(self) -> None:
        """That is not why it is none."""
        self.node_health.clock_agrees()

    def nodes(self, live: Collection[ClusterNode]) -> None:
        """These are live."""
        self._live_count = len(live)
        self._metrics.set_cluster_nodes(len(live))
        for node in live:
            self._node_names.pop(node.boot, None)
            self._node_names[node.boot] = node.name
        for boot in list(self._node_names)[:-_MAX_KNOWN_NODES]:
            del self._node_names[boot]
        boots = {node.boot for node in live}
        self._peer_queues.set_live_nodes(boots)
        self.remote_delivery.set_live_nodes(boots)

    def name_of(self, boot: str) -> str:
        """Of a node that is or was here."""
        return self._node_names.get(boot, "of an unknown name")

    async def stop(self) -> None:
        """Send no more hints; what has not been answered waits in the store."""
        self.remote_delivery.end()
        self._peer_queues.end()
        await self.peer_client.close()
