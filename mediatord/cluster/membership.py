"""
A name that another boot holds: it may be an earlier start of this node, which was killed, or a node that lives.

Being one of the nodes: joining, staying, and coming back after having been away.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from math import inf
from typing import Any, Protocol

from twisted.application.service import Service
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.internet.task import deferLater
from twisted.logger import Logger

from mediatord.errors import StoreUnavailable
from mediatord.failure_logging import LogThrottle, redact_failure
from mediatord.store.interfaces.cluster import (
    MAX_CLOCK_SKEW,
    ClockSkewError,
    ClusterIdentityMismatch,
    ClusterJoinError,
    ClusterNode,
    IClusterStore,
    NodeNameTaken,
)

_log = Logger()

# Seconds between two looks at a lease, and after which one that was not renewed is nobody's: a second more than a
# node takes to renew it.
LEASE_POLL_INTERVAL = 1.0
UNRENEWED_LEASE_AGE = 4.0
# In place of a name, of whichever works alone: no node of a cluster can have it. Its own name is said as its address.
STANDALONE_NODE_NAME = "(alone)"


@dataclass(frozen=True, slots=True)
class _LeaseObservation:
    boot: str
    until: float
    at: float


class NodeNameClaim:
    """
    Finds out whose a name is. Nothing but its lease says that a node lives: that nobody can be reached at its address
    may as well be due to a packet filter, or to our looking for it on a host or in a directory that is not its own.

    :param node: ours.
    :param probe: the boot that answers at the address of a node, if any does.
    :param sole: whether nobody but an earlier process in our place, which is gone, can have our address.
    """

    def __init__(
        self,
        clock: IReactorTime,
        store: IClusterStore,
        node: ClusterNode,
        probe: Callable[[ClusterNode], Awaitable[str | None]],
        *,
        is_worker: bool,
    ) -> None:
        self._clock = clock
        self._store = store
        self._node = node
        self._probe = probe
        self._is_worker = is_worker
        self._first_observation: _LeaseObservation | None = None

    def forget(self) -> None:
        """What was seen counts no more: who cannot reach the store renews no lease, but lives."""
        self._first_observation = None

    async def resolve_conflict(self, taken: NodeNameTaken, asked: float) -> str:
        """
        See to it that the name may be asked for again; else why it is not ours, in a line for the operator.

        :param asked: when the store was asked for the name.
        """
        holder, first = taken.holder, self._first_observation
        if self._is_worker and holder.address == self._node.address:
            await self._take_over(taken)
            return ""
        if first is None or first.boot != holder.boot:
            self._first_observation = first = _LeaseObservation(holder.boot, taken.until, self._clock.seconds())
        elif asked - first.at >= UNRENEWED_LEASE_AGE and taken.until == first.until:
            await self._take_over(taken)
            return ""
        answering = await self._probe(holder)
        if answering == holder.boot:
            return describe_running_node(holder)
        if taken.until != first.until:
            return (
                _describe_address_conflict(holder) if answering == self._node.boot else describe_running_node(holder)
            )
        await deferLater(self._clock, LEASE_POLL_INTERVAL)
        return ""

    async def _take_over(self, taken: NodeNameTaken) -> None:
        """End the holder, unless it has renewed its lease."""
        self.forget()
        _log.info("an earlier node {name} is gone; this one takes its place", name=taken.holder.name)
        try:
            await self._store.drop(taken.holder.boot, until=taken.until)
        except StoreUnavailable:
            await deferLater(self._clock, LEASE_POLL_INTERVAL)


def describe_running_node(holder: ClusterNode) -> str:
    """Why we cannot have the name of a node that lives."""
    return f"node: {holder.name} is running already, at {holder.address}; every node needs a name of its own"


def _describe_address_conflict(holder: ClusterNode) -> str:
    return (
        f"node: {holder.name} is running already, said to be at {holder.address}, where this node itself answers; "
        "every node needs a name and an address of its own"
    )


async def list_node_names(store: IClusterStore) -> str:
    """Of the live nodes, for the operator."""
    try:
        return ", ".join(
            one.address if one.name == STANDALONE_NODE_NAME else one.name for one in await store.list_nodes()
        )
    except StoreUnavailable:
        return "unknown"


# Seconds: how long a node counts as live after it was last heard of, how often it says that it is, and when it tries
# again what the store did not take.
NODE_LEASE = 10.0
RENEWAL_INTERVAL = 3.0
JOIN_RETRY_DELAY = 1.0

SECRET_DIFFERS = "cluster.secret_file: the nodes that are running have another secret"  # nosec B105 # a text about it
IDENTITY_DIFFERS = (
    "identity.keys: the nodes that are running have other DIDs; copy keys.jwks of one of them to this host, "
    "and give all the same public_url"
)
FOREIGN_NODES = "workers: others than the workers of this daemon work on this database"


class MembershipListener(Protocol):
    """Who has to know how things stand between this node and the cluster."""

    def joined(self) -> None:
        """It is one of the nodes now; nobody knows of its sockets."""

    def parted(self) -> None:
        """Its lease is over, or may be for all it knows; it tries to join again."""

    def clock_differs(self, refused: ClockSkewError) -> None:
        """It cannot join, or stay."""

    def clock_agrees(self) -> None:
        """It cannot join for another reason."""

    def nodes(self, live: Collection[ClusterNode]) -> None:
        """These are the live ones, this one among them."""


@dataclass(frozen=True, slots=True)
class MembershipCallbacks:
    """
    What becoming a member takes.

    :param probe: the boot that answers where a node said it is; None when none does.
    :param give_up: ends the daemon with a line for the operator.
    :param fall_silent: has nothing more said to the store about sockets; fires when that is sure.
    :param sole: whether this is a worker: our address was never that of anybody but earlier processes in our place,
        which are gone, and our secret is that of the workers of one daemon.
    """

    probe: Callable[[ClusterNode], Awaitable[str | None]]
    give_up: Callable[[str], None]
    stop_publishing: Callable[[], Awaitable[None]]
    is_worker: bool = False


class Membership(Service):
    """
    Keeps this node among the live ones, from when the store is open until it stops.

    :param node: ours.
    """

    name = "membership"

    def __init__(
        self,
        clock: IReactorTime,
        store: IClusterStore,
        node: ClusterNode,
        callbacks: MembershipCallbacks,
        listener: MembershipListener,
    ) -> None:
        self._clock = clock
        self._store = store
        self._node = node
        self._callbacks = callbacks
        self._listener = listener
        self._name_claim = NodeNameClaim(clock, store, node, callbacks.probe, is_worker=callbacks.is_worker)
        self._warning = LogThrottle(clock)
        self._has_joined = False
        self._is_store_open = False
        self._task: Deferred[Any] | None = None
        self._joined_at: float | None = None

    def startService(self) -> None:
        """Join, if the store is open already."""
        super().startService()
        self._start_if_ready()

    def store_opened(self) -> None:
        """Join, now or when this is started."""
        self._is_store_open = True
        self._start_if_ready()

    def _start_if_ready(self) -> None:
        if self.running and self._is_store_open and self._task is None:
            self._task = Deferred.fromCoroutine(self._run())
            self._task.addErrback(lambda failure: failure.trap(CancelledError))

    @property
    def is_settled(self) -> bool:
        """Whether this node has been a member for so long that all others that are live have come back as well."""
        return self._joined_at is not None and not 0.0 <= self._clock.seconds() - self._joined_at < RENEWAL_INTERVAL

    def stopService(self) -> Deferred[None]:
        """Leave, so that nobody has to wait until the lease is over; fires when that is done or the store is away."""
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
                _log.failure("membership failed", redact_failure())
                self._leave_cluster()
                await self._sleep(JOIN_RETRY_DELAY)

    async def _run_as_member(self) -> None:
        _log.info("node {name} has joined the cluster", name=self._node.name)
        self._joined_at = self._clock.seconds()
        self._listener.joined()
        # A timer, as the clock may be set.
        expiry_timer = self._clock.callLater(NODE_LEASE, self._expire)
        try:
            await self._renew_until_lost(expiry_timer)
            self._expire()
        except ClockSkewError as refused:
            self._listener.clock_differs(refused)
            self._leave_cluster()
            await self._drop_lease()
        finally:
            if expiry_timer.active():
                expiry_timer.cancel()

    def _expire(self) -> None:
        if self._joined_at is not None:
            _log.warn("the lease of node {name} is over; it joins again as soon as it can", name=self._node.name)
            self._leave_cluster()

    def _leave_cluster(self) -> None:
        """Once for each time that it was a member."""
        if self._joined_at is not None:
            self._joined_at = None
            self._listener.parted()

    async def _join(self) -> bool:
        """Whether that was possible at all."""
        while True:
            asked = self._clock.seconds()
            try:
                await self._store.join(self._node, NODE_LEASE)
                self._name_claim.forget()
                self._has_joined = True
                return True
            except StoreUnavailable:
                self._name_claim.forget()
                await self._sleep(JOIN_RETRY_DELAY)
            except ClusterJoinError as refused:
                refusal = await self._handle_refusal(refused, asked)
                if refusal:
                    self._callbacks.give_up(refusal)
                    return False

    async def _handle_refusal(self, refused: ClusterJoinError, asked: float) -> str:
        """
        Why this node has to give up; empty when it may ask again.

        One that was there before drops nobody, and stays, with the sockets that it has, where it may come back.
        """
        if isinstance(refused, NodeNameTaken):
            return (
                describe_running_node(refused.holder)
                if self._has_joined
                else await self._name_claim.resolve_conflict(refused, asked)
            )
        why = await self._explain_refusal(refused)
        if not self._has_joined:
            return why
        if isinstance(refused, ClockSkewError):
            self._listener.clock_differs(refused)
        else:
            self._listener.clock_agrees()
            if self._warning.count_occurrence():
                _log.warn(f"{why}; this one tries to join them again, until it has")
        await self._sleep(JOIN_RETRY_DELAY)
        return ""

    async def _explain_refusal(self, refused: ClusterJoinError) -> str:
        if isinstance(refused, ClockSkewError):
            return describe_clock_difference(refused)
        if isinstance(refused, ClusterIdentityMismatch):
            return IDENTITY_DIFFERS
        return (
            f"{FOREIGN_NODES}: {await list_node_names(self._store)}" if self._callbacks.is_worker else SECRET_DIFFERS
        )

    async def _renew_until_lost(self, expiry_timer: IDelayedCall) -> None:
        """
        Until the store says that the lease is lost, or answers after it was given up.

        :param over: gives it up when nobody knows any more whether others take us for live.
        """
        pause = 0.0
        while True:
            await self._sleep(pause)
            began = self._clock.seconds()
            try:
                if not await self._store.renew(self._node.boot, NODE_LEASE) or not expiry_timer.active():
                    return
                expiry_timer.reset(NODE_LEASE)
                self._listener.nodes(await self._store.list_nodes())
                # As often as that, however long it takes: who sees no renewal takes us for dead. Meanwhile the clock
                # may have been set back.
                pause = min(max(0.0, began + RENEWAL_INTERVAL - self._clock.seconds()), RENEWAL_INTERVAL)
            except StoreUnavailable:
                pause = JOIN_RETRY_DELAY

    async def _stop(self) -> None:
        await self._callbacks.stop_publishing()
        if self._task is not None:
            await self._drop_lease()

    async def _drop_lease(self) -> None:
        """Be no node any more, at once: what was pushed is pending again, and turns are those of others."""
        try:
            await self._store.drop(self._node.boot, until=inf)
        except StoreUnavailable:
            _log.warn("the store was not available for ending the lease of this node; others wait until it is over")

    def _sleep(self, seconds: float) -> Deferred[None]:
        return deferLater(self._clock, seconds, lambda: None)


def describe_clock_difference(refused: ClockSkewError) -> str:
    """Why nobody can begin here."""
    return f"{refused}; they may be {MAX_CLOCK_SKEW:.0f} s apart"
