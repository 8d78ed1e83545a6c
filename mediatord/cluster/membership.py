"""
Cluster membership: a node joins under its name, renews its lease, and joins again after losing it. Its health is that
membership and its clock.

A name whose lease another boot holds may belong to a killed predecessor of this node, or to a node that is running.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from math import inf
from typing import Any

from twisted.application.service import Service
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.internet.task import deferLater
from twisted.logger import Logger

from mediatord.cluster.presence import PresencePublisher
from mediatord.errors import StoreUnavailable
from mediatord.runtime.failure_logging import LogThrottle, redact_failure
from mediatord.store.interfaces.cluster_and_quotas import (
    MAX_CLOCK_SKEW,
    ClockSkewError,
    ClusterIdentityMismatch,
    ClusterJoinError,
    ClusterNode,
    IClusterStore,
    NodeNameTaken,
)

_log = Logger()

# Seconds between two checks of a lease, and after which an unrenewed one is abandoned: a second more than a node
# takes to renew it.
LEASE_POLL_INTERVAL = 1.0
UNRENEWED_LEASE_AGE = 4.0
# Name in the store of a process that uses it exclusively, which no node of a cluster can have. Its own name is stored
# as its address.
STANDALONE_NODE_NAME = "(alone)"


def describe_running_node(holder: ClusterNode) -> str:
    """Why this node cannot have the name of one that is running, in one line."""
    return f"node: the name {holder.name} is in use by the node at {holder.address}; give every node its own name"


async def list_node_names(store: IClusterStore) -> str:
    """The names of the live nodes, for a message."""
    try:
        return ", ".join(
            one.address if one.name == STANDALONE_NODE_NAME else one.name for one in await store.list_nodes()
        )
    except StoreUnavailable:
        return "unknown"


# Seconds: length of a lease, interval of its renewal, and delay after the store was unavailable.
NODE_LEASE = 10.0
RENEWAL_INTERVAL = 3.0
JOIN_RETRY_DELAY = 1.0

SECRET_DIFFERS = "cluster.secret_file: the running nodes have a different secret; copy theirs"  # nosec B105 # a text
IDENTITY_DIFFERS = (
    "identity.keys: the running nodes have different DIDs; copy keys.jwks from one of them to this host, "
    "and set the same public_url on all"
)
FOREIGN_NODES = "workers: processes other than the workers of this daemon use this database"


class Membership(Service):
    """
    Keeps this node a live member, from when the store is open until the service stops.

    :param health: is informed about membership and clock.
    :param presence: publishes while this node is a member; None for a worker.
    :param probe: the boot that answers at the address of a node, if any does.
    :param give_up: ends the daemon with a line for the operator.
    :param on_first_join: called when this node has joined for the first time.
    :param set_live_nodes: called with the live nodes, including this one, whenever they were queried.
    :param is_worker: whether this is a worker: only its predecessors, which have ended, can have had its address, and
        only workers of the same daemon have its secret.
    """

    name = "membership"

    def __init__(
        self,
        clock: IReactorTime,
        store: IClusterStore,
        node: ClusterNode,
        health: NodeHealth,
        presence: PresencePublisher | None,
        *,
        probe: Callable[[ClusterNode], Awaitable[str | None]],
        give_up: Callable[[str], None],
        on_first_join: Callable[[], None],
        set_live_nodes: Callable[[Collection[ClusterNode]], None],
        is_worker: bool = False,
    ) -> None:
        self._clock = clock
        self._store = store
        self._node = node
        self._health = health
        self._presence = presence
        self._probe = probe
        self._give_up = give_up
        self._on_first_join = on_first_join
        self._set_live_nodes = set_live_nodes
        self._is_worker = is_worker
        self._warning = LogThrottle(clock)
        self._has_joined = False
        self._is_store_open = False
        self._task: Deferred[Any] | None = None
        self._joined_at: float | None = None
        # The node that had the name when it was first refused: its boot, the end of its lease, and when that was.
        self._first_holder: tuple[str, float, float] | None = None

    def startService(self) -> None:
        """Join if the store is open already."""
        super().startService()
        self._start_if_ready()

    def store_opened(self) -> None:
        """Join, now or when the service starts."""
        self._is_store_open = True
        self._start_if_ready()

    def _start_if_ready(self) -> None:
        if self.running and self._is_store_open and self._task is None:
            self._task = Deferred.fromCoroutine(self._run())
            self._task.addErrback(lambda failure: failure.trap(CancelledError))

    @property
    def is_settled(self) -> bool:
        """Whether this node has been a member for long enough for all other live nodes to have joined as well."""
        return self._joined_at is not None and not 0.0 <= self._clock.seconds() - self._joined_at < RENEWAL_INTERVAL

    def stopService(self) -> Deferred[None]:
        """Leave, so that others need not wait for the lease to expire; fires when that is done or has failed."""
        super().stopService()
        if self._task is not None:
            self._task.cancel()
        return Deferred.fromCoroutine(self._stop())

    async def _run(self) -> None:
        while True:
            try:
                if not await self._join():
                    return
                await self._run_as_member()
            except CancelledError:
                raise
            except Exception:
                _log.failure("cluster membership failed", redact_failure())
                self._leave_cluster()
                await deferLater(self._clock, JOIN_RETRY_DELAY)

    async def _run_as_member(self) -> None:
        _log.info("node {name} has joined the cluster", name=self._node.name)
        self._joined_at = self._clock.seconds()
        self._health.joined()
        if self._presence is not None:
            self._presence.joined()
        on_first_join, self._on_first_join = self._on_first_join, lambda: None
        on_first_join()
        # A timer is not affected when the clock is set.
        expiry_timer = self._clock.callLater(NODE_LEASE, self._expire)
        try:
            await self._renew_until_lost(expiry_timer)
            self._expire()
        except ClockSkewError as refused:
            self._health.clock_differs(refused)
            self._leave_cluster()
            await self._drop_lease()
        finally:
            if expiry_timer.active():
                expiry_timer.cancel()

    def _expire(self) -> None:
        if self._joined_at is not None:
            _log.warn("the lease of node {name} has expired; rejoining", name=self._node.name)
            self._leave_cluster()

    def _leave_cluster(self) -> None:
        if self._joined_at is not None:
            self._joined_at = None
            self._health.parted()
            if self._presence is not None:
                self._presence.parted()

    async def _join(self) -> bool:
        """Join, however long it takes; False if the daemon had to give up."""
        while True:
            asked = self._clock.seconds()
            try:
                await self._store.join(self._node, NODE_LEASE)
                self._first_holder = None
                self._has_joined = True
                return True
            except StoreUnavailable:
                self._first_holder = None
                await deferLater(self._clock, JOIN_RETRY_DELAY)
            except ClusterJoinError as refused:
                refusal = await self._handle_refusal(refused, asked)
                if refusal:
                    self._give_up(refusal)
                    return False

    async def _handle_refusal(self, refused: ClusterJoinError, asked: float) -> str:
        """
        Why this node has to give up; empty if it may try again.

        A node that has been a member before drops no other node, and keeps trying, as it still has sockets.
        """
        if isinstance(refused, NodeNameTaken):
            return (
                describe_running_node(refused.holder)
                if self._has_joined
                else await self._resolve_name_conflict(refused, asked)
            )
        why = await self._explain_refusal(refused)
        if not self._has_joined:
            return why
        if isinstance(refused, ClockSkewError):
            self._health.clock_differs(refused)
        else:
            self._health.clock_agrees()
            if self._warning.count_occurrence():
                _log.warn(f"{why}; retrying to join")
        await deferLater(self._clock, JOIN_RETRY_DELAY)
        return ""

    async def _resolve_name_conflict(self, taken: NodeNameTaken, asked: float) -> str:
        """
        Wait until the name may be requested again; returns why it cannot be had, or an empty string.

        Only a renewed lease proves that the other node is running. That nothing answers at its address may be due to
        a packet filter, or to an address that means something else on this host. While the store is unavailable,
        running nodes renew no leases either.

        :param asked: when the name was requested from the store.
        """
        holder = taken.holder
        if self._is_worker and holder.address == self._node.address:
            return await self._take_over(taken)
        if self._first_holder is None or self._first_holder[0] != holder.boot:
            self._first_holder = holder.boot, taken.until, self._clock.seconds()
        _, until, observed = self._first_holder
        if asked - observed >= UNRENEWED_LEASE_AGE and taken.until == until:
            return await self._take_over(taken)
        responder = await self._probe(holder)
        if responder == self._node.boot and taken.until != until:
            return (
                f"node: the name {holder.name} is in use by another node that advertises {holder.address}, as this "
                "node does; give every node its own name and address"
            )
        if responder == holder.boot or taken.until != until:
            return describe_running_node(holder)
        await deferLater(self._clock, LEASE_POLL_INTERVAL)
        return ""

    async def _take_over(self, taken: NodeNameTaken) -> str:
        """Drop the holder of the name, unless it has renewed its lease."""
        self._first_holder = None
        _log.info("taking over the name {name} from a node that is no longer running", name=taken.holder.name)
        try:
            await self._store.drop(taken.holder.boot, until=taken.until)
        except StoreUnavailable:
            await deferLater(self._clock, LEASE_POLL_INTERVAL)
        return ""

    async def _explain_refusal(self, refused: ClusterJoinError) -> str:
        if isinstance(refused, ClockSkewError):
            return describe_clock_difference(refused)
        if isinstance(refused, ClusterIdentityMismatch):
            return IDENTITY_DIFFERS
        return f"{FOREIGN_NODES}: {await list_node_names(self._store)}" if self._is_worker else SECRET_DIFFERS

    async def _renew_until_lost(self, expiry_timer: IDelayedCall) -> None:
        """
        Renew the lease until the store reports it lost, or answers after the timer has expired.

        :param expiry_timer: expires when other nodes may consider this one dead.
        """
        pause = 0.0
        while True:
            await deferLater(self._clock, pause)
            began = self._clock.seconds()
            try:
                if not await self._store.renew(self._node.boot, NODE_LEASE) or not expiry_timer.active():
                    return
                expiry_timer.reset(NODE_LEASE)
                self._set_live_nodes(await self._store.list_nodes())
                # The interval includes the duration of the renewal, and bounds the pause if the clock was set back.
                pause = min(max(0.0, began + RENEWAL_INTERVAL - self._clock.seconds()), RENEWAL_INTERVAL)
            except StoreUnavailable:
                pause = JOIN_RETRY_DELAY

    async def _stop(self) -> None:
        if self._presence is not None:
            await self._presence.stop()
        if self._task is not None:
            await self._drop_lease()

    async def _drop_lease(self) -> None:
        """End the lease at once: what was pushed is pending again, and other nodes may take over leader leases."""
        try:
            await self._store.drop(self._node.boot, until=inf)
        except StoreUnavailable:
            _log.warn("could not release the node lease: the store was unavailable; other nodes wait for its expiry")


def describe_clock_difference(refused: ClockSkewError) -> str:
    """Why this process cannot start, in one line."""
    return f"{refused}; at most {MAX_CLOCK_SKEW:.0f} s are allowed"


NOT_JOINED = "cluster: not joined"


class NodeHealth:
    """
    Whether clients should be sent to this process, as far as membership and its clock decide that.

    :param grace_period: seconds after the loss of membership for which other nodes still count this one as live. None
        for a process outside a cluster.
    """

    def __init__(self, clock: IReactorTime, grace_period: float | None = None) -> None:
        self._clock = clock
        self._grace_period = grace_period
        self._is_member = grace_period is None
        self._parted_at = float("-inf")
        self._clock_problem = ""

    @property
    def trouble(self) -> str:
        """The problem in a few words; empty if there is none."""
        if self._clock_problem:
            return self._clock_problem
        if self._is_member or self._grace_period is None:
            return ""
        # The lower bound matters when the clock was set back.
        return "" if 0.0 <= self._clock.seconds() - self._parted_at <= self._grace_period else NOT_JOINED

    @property
    def is_member(self) -> bool:
        """Whether this is a live node, or the only process."""
        return self._is_member

    def joined(self) -> None:
        """Record that this is a live node."""
        self._is_member = True
        self.clock_agrees()

    def parted(self) -> None:
        """Record that this node has lost its membership."""
        if self._is_member:
            self._is_member, self._parted_at = False, self._clock.seconds()

    def clock_differs(self, refused: ClockSkewError) -> None:
        """Record that the store refuses this host's clock; logged once until it is accepted."""
        if not self._clock_problem:
            _log.warn(f"{refused}: this node does not accept, expire or push messages until the clocks agree")
        self._clock_problem = str(refused)

    def clock_agrees(self) -> None:
        """Record that the clock is accepted."""
        if self._clock_problem:
            _log.info("the clocks of this host and of the MongoDB server agree again")
        self._clock_problem = ""
