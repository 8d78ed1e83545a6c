"""The cluster side of a daemon: what both protocol halves use of it, and its services."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from twisted.internet.interfaces import IReactorTime

from mediatord.admission import Allowances
from mediatord.cluster.announcing import Announcer
from mediatord.cluster.calling import Calling
from mediatord.cluster.elsewhere import Elsewhere
from mediatord.cluster.membership import LEASE
from mediatord.cluster.peers import Peers
from mediatord.cluster.quiet import Arrivals
from mediatord.cluster.sealing import Sealing
from mediatord.cluster.secret import ClusterKeys, derive, read_secret
from mediatord.cluster.standing import Standing
from mediatord.cluster.whereabouts import Whereabouts
from mediatord.config import Config
from mediatord.interfaces import ClockDiffers, IClusterStore, IStore, Node
from mediatord.metrics import Metrics
from mediatord.private_file import PrivateFileError
from mediatord.service import StartupError
from mediatord.turns import Turn
from mediatord.workers import SharedArrivals, WorkerPlace

# Boots whose names are known after they are gone.
_KNOWN = 1000


@dataclass(frozen=True, slots=True)
class Place:
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
    sole: bool = False
    arrivals: Arrivals | None = None


def place_of(config: Config, worker: WorkerPlace | None = None) -> Place | None:
    """
    The place that the configuration gives this process, or its supervisor; None when it is alone.

    :raise StartupError: the secret cannot be used.
    """
    if worker is not None:
        # Its directory was made by the supervisor, which replaces nobody who is still there.
        arrivals = SharedArrivals.of(Path(worker.path))
        return Place(worker.address, worker.address, derive(worker.secret), sole=True, arrivals=arrivals)
    listen, address, secret = config.cluster.listen, config.cluster.address, config.cluster.secret_file
    if listen is None or address is None or secret is None:
        return None
    try:
        return Place(listen, address, read_secret(secret))
    except PrivateFileError as error:
        raise StartupError(str(error)) from None


class _TurnOfMembers(Turn):
    """Who is no node leaves it to those that are."""

    def __init__(self, clock: IReactorTime, store: IClusterStore, boot: str, standing: Standing) -> None:
        super().__init__(clock, store, boot)
        self._standing = standing

    async def is_mine(self) -> bool:
        return self._standing.is_member and await super().is_mine()


class ClusterSide:
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

    def __init__(self, reactor: Any, store: IStore, metrics: Metrics, node: Node, place: Place) -> None:
        self.node = node
        self.listen = place.listen
        self.sole = place.sole
        self.tell_joined: Callable[[], None] = lambda: None
        self.sealing = Sealing(reactor, place.keys)
        self.calling = Calling(reactor, node.boot, self.sealing)
        self._metrics = metrics
        self.standing = Standing(reactor, LEASE)
        self._live = 1
        self._names: dict[str, str] = {}
        self._peers = Peers(reactor, self.calling.ask, metrics)
        self.announcer = Announcer(reactor, store.cluster, node.boot, place.arrivals)
        whereabouts = Whereabouts(reactor, store.cluster)
        metrics.watch("cluster_hints", lambda: self._peers.held)
        self.elsewhere = Elsewhere(reactor, node.boot, whereabouts, self._peers, metrics, place.arrivals)
        metrics.watch("presence_lookups", lambda: self.elsewhere.held)
        self.turn = _TurnOfMembers(reactor, store.cluster, node.boot, self.standing)
        self.allowances = Allowances(reactor, store.cluster, lambda: self._live, secret=place.keys.allowances)

    def joined(self) -> None:
        """This node is one of the cluster; see :class:`~mediatord.cluster.membership.Followers`."""
        self.standing.joined()
        self.announcer.joined()
        tell, self.tell_joined = self.tell_joined, lambda: None
        tell()

    def parted(self) -> None:
        """Its lease is over."""
        self.standing.parted()
        self.announcer.parted()

    def clock_differs(self, refused: ClockDiffers) -> None:
        """It can be no node."""
        self.standing.clock_differs(refused)

    def clock_agrees(self) -> None:
        """That is not why it is none."""
        self.standing.clock_agrees()

    def nodes(self, live: Collection[Node]) -> None:
        """These are live."""
        self._live = len(live)
        self._metrics.cluster_nodes(len(live))
        for node in live:
            self._names.pop(node.boot, None)
            self._names[node.boot] = node.name
        for boot in list(self._names)[:-_KNOWN]:
            del self._names[boot]
        boots = {node.boot for node in live}
        self._peers.keep(boots)
        self.elsewhere.keep(boots)

    def name_of(self, boot: str) -> str:
        """Of a node that is or was here."""
        return self._names.get(boot, "of an unknown name")

    async def stop(self) -> None:
        """Send no more hints; what has not been answered waits in the store."""
        self.elsewhere.end()
        self._peers.end()
        await self.calling.close()
