"""Builds the cluster subsystem: what a daemon that is one of several nodes or workers has in addition."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twisted.application.service import Service

from mediatord.app.lifecycle import ShutdownStep
from mediatord.cluster.anti_entropy import ANTI_ENTROPY_INTERVAL, SWEEP_INTERVAL, AntiEntropy, LapsedNodeSweeper
from mediatord.cluster.leases import LeaderLease
from mediatord.cluster.membership import NODE_LEASE, Membership, NodeHealth
from mediatord.cluster.peer_connection import (
    ClusterKeys,
    PeerClient,
    PeerServer,
    derive_cluster_keys,
    read_cluster_keys,
)
from mediatord.cluster.peer_notifications import NotificationReceiver, PeerNotificationDelivery, PeerQueues
from mediatord.cluster.presence import PresenceLookup, PresencePublisher
from mediatord.cluster.remote_delivery import RemoteDelivery
from mediatord.config.settings import Config
from mediatord.errors import StartupError
from mediatord.net.listeners import Listener
from mediatord.observability.metrics import Metrics
from mediatord.ratelimit.distributed_limiter import QuotaStore
from mediatord.runtime.periodic_tasks import PeriodicTasks
from mediatord.runtime.secret_files import SecretFileError
from mediatord.store.interfaces.cluster_and_quotas import ClusterNode
from mediatord.store.interfaces.store import IStore
from mediatord.workers.live_did_counters import LiveDIDCounters
from mediatord.workers.sibling_channel import SiblingDelivery, SiblingListener, SiblingServer, get_worker_number
from mediatord.workers.supervised_worker import WorkerSpec

if TYPE_CHECKING:
    from mediatord.app.core_services import CoreServices
    from mediatord.app.protocol_services import DecentrlServices, DIDCommServices

# Boots whose names are remembered after their nodes are gone.
_MAX_KNOWN_NODES = 1000


@dataclass(frozen=True, slots=True)
class NodeSettings:
    """
    How a process takes part in its cluster.

    :param listen: endpoint string of its node-to-node listener.
    :param address: client endpoint string for other nodes.
    :param worker_socket: where a worker listens for the other workers of its daemon; None for a node.
    """

    listen: str
    address: str
    keys: ClusterKeys = field(repr=False)
    worker_socket: Path | None = None


def resolve_node_settings(config: Config, worker: WorkerSpec | None = None) -> NodeSettings | None:
    """
    The node settings from the supervisor or the configuration; None for a single process.

    :raise StartupError: the cluster secret cannot be used.
    """
    if worker is not None:
        keys = derive_cluster_keys(worker.secret)
        return NodeSettings(worker.address, worker.address, keys, Path(worker.node_socket))
    listen, address, secret = config.cluster.listen, config.cluster.address, config.cluster.secret_file
    if listen is None or address is None or secret is None:
        return None
    try:
        return NodeSettings(listen, address, read_cluster_keys(secret))
    except SecretFileError as error:
        raise StartupError(str(error)) from None


class NodeLinks:
    """
    Pushes between the nodes of a cluster: each publishes its presence in the store, and notifies the others.

    :ivar remote_delivery: notifies other nodes of what is accepted here.
    """

    def __init__(
        self, reactor: Any, store: IStore, metrics: Metrics, node: ClusterNode, settings: NodeSettings
    ) -> None:
        self._store = store
        self._node = node
        self._settings = settings
        self._metrics = metrics
        self._client = PeerClient(reactor, settings.keys)
        self._queues = PeerQueues(reactor, self._client.call, metrics)
        self.publisher = PresencePublisher(reactor, store.cluster, node.boot)
        self.remote_delivery = RemoteDelivery(
            reactor, node.boot, PresenceLookup(reactor, store.cluster), self._queues, metrics
        )
        self.probe = self._client.probe
        metrics.register_buffer("cluster_hints", lambda: self._queues.pending)
        metrics.register_buffer("presence_lookups", lambda: self.remote_delivery.pending)

    def set_live_nodes(self, boots: Collection[str]) -> None:
        """Notify only these nodes from now on."""
        self._queues.set_live_nodes(boots)
        self.remote_delivery.set_live_nodes(boots)

    def build_listener(
        self, clock: Any, receiver: NotificationReceiver, resolve_push: Callable[[str], bool]
    ) -> Service:
        """Build the node-to-node listener."""
        refused = self._metrics.refused_peer_requests.inc
        server = PeerServer(clock, self._settings.keys, self._node.boot, receiver.receive, refused)
        return Listener(self._settings.listen, server, clock)

    def end(self) -> None:
        """Send nothing more."""
        self.remote_delivery.end()
        self._queues.end()
        self._client.close()


class SiblingLinks:
    """
    Pushes between the workers of a daemon.

    :ivar publisher: counts live DIDs in memory that all workers map.
    :ivar remote_delivery: pushes to sockets at other workers.
    """

    def __init__(self, reactor: Any, metrics: Metrics, path: Path) -> None:
        self._path = path
        self._metrics = metrics
        number = get_worker_number(path)
        self.publisher = LiveDIDCounters(path.parent, number)
        self.remote_delivery = SiblingDelivery(reactor, self.publisher, path.parent, number, metrics)
        metrics.register_buffer("cluster_hints", lambda: self.remote_delivery.pending)

    async def probe(self, node: ClusterNode) -> str | None:
        """None: what holds the name of a worker that has ended shows in its lease alone."""
        return None

    def set_live_nodes(self, boots: Collection[str]) -> None:
        """Whether other workers answer shows on their connections."""

    def build_listener(
        self, clock: Any, receiver: NotificationReceiver, resolve_push: Callable[[str], bool]
    ) -> Service:
        """Build the service that listens for other workers, and connects to them."""
        server = SiblingServer(clock, receiver, resolve_push, lambda number: self.remote_delivery.connect([number]))
        self._metrics.register_buffer("late_pushes", lambda: (server.late, None))
        return SiblingListener(clock, self._path, server, self.remote_delivery)

    def end(self) -> None:
        """Push nothing more."""
        self.remote_delivery.end()


class ClusterSubsystem:
    """
    The cluster side of one process.

    :ivar node: this process.
    :ivar links: to other nodes, or to the other workers of this daemon.
    :ivar leader_lease: elects the node that does the housekeeping.
    :ivar quotas: rate limits shared by all nodes.
    """

    def __init__(
        self, reactor: Any, store: IStore, metrics: Metrics, node: ClusterNode, settings: NodeSettings
    ) -> None:
        self._reactor = reactor
        self._store = store
        self.node = node
        self.node_health = NodeHealth(reactor, NODE_LEASE)
        self.siblings: SiblingLinks | None = None
        self.links: NodeLinks | SiblingLinks
        if settings.worker_socket is None:
            self.links = NodeLinks(reactor, store, metrics, node, settings)
        else:
            self.links = self.siblings = SiblingLinks(reactor, metrics, settings.worker_socket)
        self.leader_lease = LeaderLease(
            reactor, store.cluster, node.boot, is_member=lambda: self.node_health.is_member
        )
        self.quotas = QuotaStore(reactor, store.cluster, lambda: self._live_count, secret=settings.keys.allowances)
        self._metrics = metrics
        self._live_count = 1
        self._node_names: dict[str, str] = {}

    def build_membership(self, give_up: Callable[[str], None], on_first_join: Callable[[], None]) -> Membership:
        """Build the service that joins the cluster and leaves it."""
        return Membership(
            self._reactor,
            self._store.cluster,
            self.node,
            self.node_health,
            self.links.publisher if isinstance(self.links, NodeLinks) else None,
            probe=self.links.probe,
            give_up=give_up,
            on_first_join=on_first_join,
            set_live_nodes=self.set_live_nodes,
            is_worker=self.siblings is not None,
        )

    def set_live_nodes(self, live: Collection[ClusterNode]) -> None:
        self._live_count = len(live)
        self._metrics.cluster_nodes.set(len(live))
        for node in live:
            self._node_names.pop(node.boot, None)
            self._node_names[node.boot] = node.name
        for boot in list(self._node_names)[:-_MAX_KNOWN_NODES]:
            del self._node_names[boot]
        self.links.set_live_nodes({node.boot for node in live})

    def name_of(self, boot: str) -> str:
        """The name of a node that is or was live."""
        return self._node_names.get(boot, "unknown")

    async def stop(self) -> None:
        """Send no more notifications; what was not acknowledged stays in the store."""
        self.links.end()


def build_cluster_services(
    core: CoreServices,
    cluster: ClusterSubsystem,
    didcomm: DIDCommServices,
    decentrl: DecentrlServices,
    membership: Membership,
) -> list[Service]:
    """Build the node-to-node listener and the periodic tasks, in their start order."""
    clock, store, boot = core.reactor, core.store, cluster.node.boot

    async def filter_registered(dids: Collection[str]) -> Collection[str]:
        """Those whose registration has not expired since their event was accepted."""
        return {did for did in dids if await store.decentrl.registered_until(did) is not None}

    messages = PeerNotificationDelivery(
        core.connections,
        didcomm.live,
        store.find_messages,
        store.find_arrivals,
        store.cluster,
        is_wanted=lambda recipient: recipient is not None,
    )
    events = PeerNotificationDelivery(
        core.connections,
        decentrl.event_pusher,
        store.decentrl.find_pending,
        store.decentrl.find_pending_arrivals,
        store.cluster,
        is_wanted=lambda recipient: recipient is None,
        filter_served=filter_registered,
    )
    receiver = NotificationReceiver(messages, events, filter_registered, decentrl.event_pusher.push_contracts_updated)
    anti_entropy = AntiEntropy(clock, (messages, events), core.connections.backlogs.forget)
    sweeper = LapsedNodeSweeper(
        clock,
        store.cluster,
        boot,
        cluster.leader_lease.is_leader,
        core.recorder.record_remote_push_failures,
        cluster.name_of,
        core.push.scheduler.recover if core.push else lambda: None,
    )

    async def scan() -> None:
        if membership.is_settled:
            await anti_entropy.scan()

    async def sweep() -> None:
        if membership.is_settled:
            await sweeper.sweep()

    tasks = PeriodicTasks(clock, [(scan, ANTI_ENTROPY_INTERVAL), (sweep, SWEEP_INTERVAL)], "a periodic cluster task")
    tasks.setName("cluster tasks")
    return [
        tasks,
        ShutdownStep("notifications", cluster.stop),
        cluster.links.build_listener(clock, receiver, didcomm.live.resolve_push),
    ]
