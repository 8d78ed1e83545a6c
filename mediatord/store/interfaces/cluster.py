"""What processes that share a store know of each other: nodes, presence, turns, allowances and pickups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from twisted.internet.defer import Deferred
from zope.interface import Interface

# Seconds that the clocks of processes that share a store may be apart, from each other and from that of its server.
MAX_CLOCK_SKEW = 60.0


@dataclass(frozen=True, slots=True)
class ClusterNode:
    """
    One process of a cluster.

    :param name: unique among live nodes.
    :param boot: a random id of this start.
    :param address: where other nodes reach it: a Twisted client endpoint string.
    :param seal: made from the cluster secret, the same for all who know it, and of no use to make messages with.
    :param identity: a digest of who the mediator is, the same for all that are the same; empty if it does not say.
    """

    name: str
    boot: str
    address: str
    seal: bytes = field(repr=False)
    identity: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, slots=True)
class PresenceRecord:
    """
    A node that holds live sessions of a DID.

    :param node: None when its lease is over: the record is stale.
    """

    did: str
    boot: str
    node: ClusterNode | None


class ClusterJoinError(Exception):
    """A node cannot be part of the cluster; the text is one line for the operator."""


class NodeNameTaken(ClusterJoinError):
    """
    :param holder: the live node of that name.
    :param until: when its lease is over, by the clock that leases are compared by; another one once it is renewed.
    """

    def __init__(self, holder: ClusterNode, until: float) -> None:
        super().__init__(f"another live node is called {holder.name}")
        self.holder = holder
        self.until = until


class ClusterSecretMismatch(ClusterJoinError):
    """A live node was given another cluster secret."""

    def __init__(self) -> None:
        super().__init__("the cluster secret differs from that of the live nodes")


class ClusterIdentityMismatch(ClusterJoinError):
    """A live node is another mediator: it has other keys, or another public URL."""

    def __init__(self) -> None:
        super().__init__("the live nodes have another identity")


class ClockSkewError(ClusterJoinError):
    """
    The clock of this process cannot be relied on, or else that of the store's server.

    :param ahead: seconds that ours is ahead; below 0 if it is behind.
    """

    def __init__(self, ahead: float) -> None:
        way = "ahead of" if ahead > 0 else "behind"
        super().__init__(f"the clock of this host is {_format_duration(abs(ahead))} {way} the MongoDB server's")
        self.ahead = ahead


def _format_duration(seconds: float) -> str:
    """The two largest units."""
    left, parts = round(seconds), []
    for unit, name in ((86_400, "days"), (3_600, "h"), (60, "min"), (1, "s")):
        number, left = divmod(left, unit)
        if number:
            parts.append(f"{number} {name}")
    return " ".join(parts[:2])


class IClusterStore(Interface):
    """
    Leases of nodes and what hangs on them. Leases are compared by one clock, that of the store's server where there
    is one; who has another time than that, by more than :data:`MAX_CLOCK_SKEW`, can do nothing that hangs on time.
    Presence, turns, allowances and pickups need not survive a crash of the store; nodes take them up again.
    """

    def join(node: ClusterNode, lease: float) -> Deferred[None]:
        """
        Become a live node for `lease` seconds. A boot that joined already is renewed, with what is given now.

        :raise ClockDiffers: looked at first.
        :raise ClusterSecretDiffers: another live node has another seal; looked at next.
        :raise ClusterIdentityDiffers: another one has another identity, and both say which. Where only workers of one
            daemon can be nodes, who have the identity that they were told, it need not be kept.
        :raise NodeNameTaken: another boot of the same name is live.
        """

    def renew(boot: str, lease: float) -> Deferred[bool]:
        """
        Live for `lease` seconds from now; False, and nothing done, when it was over or dropped: join again.

        :raise ClockDiffers: nothing was done.
        """

    def drop(boot: str, *, until: float = 0.0) -> Deferred[int]:
        """
        End a node: its lease, its presence, its turns; what was delivered by it and not acknowledged is pending
        again. Fires with how many messages those were. Nothing is done for one that is live, even if it joins at the
        very same time, nor for the empty one, which is nobody.

        :param until: ends also a live one whose lease is over then, or before; `inf` for whichever.
        """

    def list_nodes() -> Deferred[list[ClusterNode]]:
        """The live ones, by name."""

    def list_lapsed_nodes() -> Deferred[list[str]]:
        """
        Boots whose lease is over and that were not dropped yet, and those that are no nodes but left presence or
        delivered messages behind: all that :meth:`drop` has something to do for.
        """

    def add_presence(boot: str, dids: Sequence[str]) -> Deferred[None]:
        """
        A node holds live sessions of these DIDs, from now on if it did not before. Fires once every later
        :meth:`whereabouts` knows.
        """

    def remove_presence(boot: str, dids: Sequence[str]) -> Deferred[None]:
        """It holds none of these any more."""

    def find_presence(dids: Sequence[str]) -> Deferred[list[PresenceRecord]]:
        """All nodes that hold sessions of these DIDs, stale records included, in any order."""

    def acquire_lease(lease_name: str, boot: str, lease: float) -> Deferred[bool]:
        """
        Whether it is this node's turn: then nobody else holds it, and it is held for `lease` seconds from now, or
        until the node is dropped. It is nobody's whose clock differs.
        """

    def take_quota(key: bytes, amount: int, *, limit: int, period: float) -> Deferred[float]:
        """
        Take from an allowance of `limit` in any `period` seconds, atomically.

        Fires with 0.0 when it was taken; else with the seconds after which so much may be had (`period` when
        `amount` is over `limit`), and nothing was taken. What is taken may count for a hundredth of the period more.
        """

    def return_quota(key: bytes, amount: int) -> Deferred[None]:
        """Undo the latest takings of this key, as far as there are any."""

    def record_pickups(ids: Sequence[str], period: float) -> Deferred[None]:
        """
        The recipients of these messages or events have asked for them and got them. That counts for `period` seconds
        from now, whatever was recorded before; whether there are such messages is not looked at.
        """

    def find_picked_up(ids: Sequence[str]) -> Deferred[frozenset[str]]:
        """Those of these ids whose recorded pickup still counts."""
