"""State that processes share through the store: nodes, presence, leader leases, quotas and pickups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from twisted.internet.defer import Deferred
from zope.interface import Interface

# Seconds by which the clocks of processes that share a store, and that of its server, may differ.
MAX_CLOCK_SKEW = 60.0


@dataclass(frozen=True, slots=True)
class ClusterNode:
    """
    One process of a cluster.

    :param name: unique among live nodes.
    :param boot: a random id of this start.
    :param address: Twisted client endpoint string by which other nodes reach it.
    :param seal: derived from the cluster secret, so equal for all nodes that have it; it cannot be used to
        authenticate messages.
    :param identity: a digest of the mediator's identity, equal for all nodes of one mediator; empty if unknown.
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

    :param node: None when its lease has expired: the record is stale.
    """

    did: str
    boot: str
    node: ClusterNode | None


class ClusterJoinError(Exception):
    """A node cannot join the cluster; the text is one line for the operator."""


class NodeNameTaken(ClusterJoinError):
    """
    Another live node has the name.

    :param holder: that node.
    :param until: end of its lease, by the clock that leases are compared by, unless it is renewed.
    """

    def __init__(self, holder: ClusterNode, until: float) -> None:
        super().__init__(f"another live node is called {holder.name}")
        self.holder = holder
        self.until = until


class ClusterSecretMismatch(ClusterJoinError):
    """A live node has another cluster secret."""

    def __init__(self) -> None:
        super().__init__("the cluster secret differs from that of the live nodes")


class ClusterIdentityMismatch(ClusterJoinError):
    """A live node is another mediator: it has other keys, or another public URL."""

    def __init__(self) -> None:
        super().__init__("the live nodes have another identity")


class ClockSkewError(ClusterJoinError):
    """
    The clocks of this process and of the store's server differ too much.

    :param ahead: seconds that this process is ahead; negative if it is behind.
    """

    def __init__(self, ahead: float) -> None:
        way = "ahead of" if ahead > 0 else "behind"
        super().__init__(f"the clock of this host is {_format_duration(abs(ahead))} {way} the MongoDB server's")
        self.ahead = ahead


def _format_duration(seconds: float) -> str:
    """The two largest units of a duration."""
    left, parts = round(seconds), []
    for unit, name in ((86_400, "days"), (3_600, "h"), (60, "min"), (1, "s")):
        number, left = divmod(left, unit)
        if number:
            parts.append(f"{number} {name}")
    return " ".join(parts[:2])


# Time and amount of a use of a sliding-window quota; lists have the oldest first. Uses within a small part of the
# period are merged, as if all had happened at the end of it, so that their number is bounded.
QuotaUse = tuple[float, int]

QUOTA_WINDOW_SLOTS = 128


def get_quota_wait(lots: Sequence[QuotaUse], amount: int, *, limit: int, period: float, now: float) -> float:
    """
    Seconds until an amount is available; 0.0 when it is now, `period` when it is over the limit.

    :param lots: uses within the last period.
    """
    if amount > limit:
        return period
    excess = sum([taken for _, taken in lots]) + amount - limit
    if excess <= 0:
        return 0.0
    for at, taken in lots:
        excess -= taken
        if excess <= 0:
            return at + period - now
    return period


class IClusterStore(Interface):
    """
    Leases of nodes, and state that depends on them.

    Leases are compared by one clock, that of the store's server where there is one; operations that depend on time
    fail for processes whose clock differs by more than :data:`MAX_CLOCK_SKEW`. Presence, leader leases, quotas and
    pickups need not survive a crash of the store; nodes publish them again.
    """

    def join(node: ClusterNode, lease: float) -> Deferred[None]:
        """
        Become a live node for `lease` seconds. The lease of a boot that has joined is renewed, with the values given
        now.

        :raise ClockSkewError: checked first.
        :raise ClusterSecretMismatch: another live node has another seal; checked next.
        :raise ClusterIdentityMismatch: another live node has another identity, and both are known. A store that only
            workers of one daemon share, which have the same identity, need not keep it.
        :raise NodeNameTaken: another boot of the same name is live.
        """

    def renew(boot: str, lease: float) -> Deferred[bool]:
        """
        Extend the lease to `lease` seconds from now; fires with False, and changes nothing, when it has expired or
        the node was dropped: then it has to join again.

        :raise ClockSkewError: nothing was done.
        """

    def drop(boot: str, *, until: float = 0.0) -> Deferred[int]:
        """
        Remove a node with its lease, presence and leader leases; messages that it delivered and that are not
        acknowledged become pending. Fires with the number of those. Does nothing for a node that is live, even if it
        joins at the same time, nor for the empty boot.

        :param until: also remove a live node whose lease ends by then; `inf` for any.
        """

    def list_nodes() -> Deferred[list[ClusterNode]]:
        """Live nodes, by name."""

    def list_lapsed_nodes() -> Deferred[list[str]]:
        """
        Boots for which :meth:`drop` has something to do: those whose lease has expired, and those that are no nodes
        but left presence or delivered messages behind.
        """

    def add_presence(boot: str, dids: Sequence[str]) -> Deferred[None]:
        """
        Record that a node holds live sessions of these DIDs. Fires once every later :meth:`find_presence` sees it.
        """

    def remove_presence(boot: str, dids: Sequence[str]) -> Deferred[None]:
        """Record that a node holds no live sessions of these DIDs."""

    def find_presence(dids: Sequence[str]) -> Deferred[list[PresenceRecord]]:
        """Nodes that hold live sessions of these DIDs, stale records included, in any order."""

    def acquire_lease(lease_name: str, boot: str, lease: float) -> Deferred[bool]:
        """
        Acquire or renew a leader lease for `lease` seconds from now, or until the node is dropped; fires with False
        if another node holds it, or the clock of this node differs.
        """

    def take_quota(key: bytes, amount: int, *, limit: int, period: float) -> Deferred[float]:
        """
        Take from a quota of `limit` in any `period` seconds, atomically.

        Fires with 0.0 when it was taken; else with the seconds after which this amount is available (`period` when
        `amount` is over `limit`), and nothing was taken. An amount may count for a hundredth of the period longer.
        """

    def return_quota(key: bytes, amount: int) -> Deferred[None]:
        """Undo the latest uses of this quota, as far as there are any."""

    def record_pickups(ids: Sequence[str], period: float) -> Deferred[None]:
        """
        Record that messages or events were handed out to their recipients, for `period` seconds from now, whether or
        not they exist.
        """

    def find_picked_up(ids: Sequence[str]) -> Deferred[frozenset[str]]:
        """Those of these ids whose recorded pickup has not expired."""
