"""The cluster side of a daemon: what both protocol halves use of it, and its services."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from mediatord.admission import Allowances
from mediatord.cluster.announcing import Announcer
from mediatord.cluster.calling import Calling
from mediatord.cluster.elsewhere import Elsewhere, Whereabouts
from mediatord.cluster.peers import Peers
from mediatord.cluster.sealing import Sealing
from mediatord.cluster.secret import ClusterKeys, derive, read_secret
from mediatord.config import Config
from mediatord.interfaces import IStore, Node
from mediatord.metrics import Metrics
from mediatord.private_file import PrivateFileError
from mediatord.service import StartupError
from mediatord.turns import Turn
from mediatord.workers import WorkerPlace


@dataclass(frozen=True, slots=True)
class Place:
    """
    Where a process is in its cluster.

    :param listen: endpoint string of its node-to-node listener.
    :param address: that of a client, for other nodes.
    :param sole: whether only processes that are gone by now had that address before.
    """

    listen: str
    address: str
    keys: ClusterKeys = field(repr=False)
    sole: bool = False


def place_of(config: Config, worker: WorkerPlace | None = None) -> Place | None:
    """
    The place that the configuration gives this process, or its supervisor; None when it is alone.

    :raise StartupError: the secret cannot be used.
    """
    if worker is not None:
        # Its directory was made by the supervisor, which replaces nobody who is still there.
        return Place(worker.address, worker.address, derive(worker.secret), sole=True)
    listen, address, secret = config.cluster.listen, config.cluster.address, config.cluster.secret_file
    if listen is None or address is None or secret is None:
        return None
    try:
        return Place(listen, address, read_secret(secret))
    except PrivateFileError as error:
        raise StartupError(str(error)) from None


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
    """

    def __init__(self, reactor: Any, store: IStore, metrics: Metrics, node: Node, place: Place) -> None:
        self.node = node
        self.listen = place.listen
        self.sole = place.sole
        self.tell_joined: Callable[[], None] = lambda: None
        self.sealing = Sealing(reactor, place.keys)
        self.calling = Calling(reactor, node.boot, self.sealing)
        self._metrics = metrics
        self._live = 1
        self._peers = Peers(reactor, self.calling.ask, metrics)
        self.announcer = Announcer(reactor, store.cluster, node.boot)
        self.elsewhere = Elsewhere(node.boot, Whereabouts(reactor, store.cluster), self._peers, metrics)
        self.turn = Turn(reactor, store.cluster, node.boot)
        self.allowances = Allowances(reactor, store.cluster, lambda: self._live, secret=place.keys.allowances)

    def joined(self) -> None:
        """This node is one of the cluster; see :class:`~mediatord.cluster.membership.Followers`."""
        self.announcer.joined()
        tell, self.tell_joined = self.tell_joined, lambda: None
        tell()

    def parted(self) -> None:
        """Its lease is over."""
        self.announcer.parted()

    def nodes(self, live: Collection[Node]) -> None:
        """These are live."""
        self._live = len(live)
        self._metrics.cluster_nodes(len(live))
        self._peers.keep({node.boot for node in live})

    async def stop(self) -> None:
        """Send no more hints; what has not been answered waits in the store."""
        self._peers.end()
        await self.calling.close()
