"""
Leases in the store: leadership of one node for a task, and exclusive use of a store by a single process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf
from typing import Any

from twisted.application.service import Service
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.interfaces import IReactorTime
from twisted.internet.task import deferLater
from twisted.logger import Logger

from mediatord.cluster.membership import STANDALONE_NODE_NAME, NodeHealth, describe_clock_difference, list_node_names
from mediatord.errors import StoreUnavailable
from mediatord.ratelimit.admission import RequestGate
from mediatord.runtime.failure_logging import redact_failure
from mediatord.store.interfaces.cluster_and_quotas import (
    ClockSkewError,
    ClusterJoinError,
    ClusterNode,
    ClusterSecretMismatch,
    IClusterStore,
    NodeNameTaken,
)
from mediatord.store.interfaces.store import IStore, StoreUnusable

HOUSEKEEPING = "housekeeping"

# Seconds: length of a leader lease, and the least time between renewals.
LEADER_LEASE = 10.0
LEADER_RENEWAL_INTERVAL = 3.0


class LeaderLease:
    """
    Lease on a task that one node at a time performs.

    A node that holds it keeps it by calling :meth:`is_leader`; :data:`LEADER_LEASE` seconds after the last call any
    node can have it.

    :param boot: of this node.
    :param is_member: whether this process may hold it at all.
    """

    def __init__(
        self,
        clock: IReactorTime,
        store: IClusterStore,
        boot: str,
        is_member: Callable[[], bool] = lambda: True,
    ) -> None:
        self._is_member = is_member
        self._clock = clock
        self._store = store
        self._boot = boot
        self._renewed_at = float("-inf")
        self._held_until = float("-inf")

    async def is_leader(self) -> bool:
        """
        Whether this node holds the lease.

        :raise StoreUnavailable: unknown.
        """
        if not self._is_member():
            return False
        asked_at = self._clock.seconds()
        if not 0 <= asked_at - self._renewed_at < LEADER_RENEWAL_INTERVAL:
            is_held = await self._store.acquire_lease(HOUSEKEEPING, self._boot, LEADER_LEASE)
            # The lease in the store began after this call, or later.
            self._held_until = asked_at + LEADER_LEASE if is_held else asked_at
            self._renewed_at = asked_at
        return self._clock.seconds() < self._held_until


_log = Logger()

# Seconds: length of the lease, interval of its renewal, and interval of checks whether another process still holds
# it.
EXCLUSIVE_LEASE = 3.0
EXCLUSIVE_RENEWAL_INTERVAL = 1.0
EXCLUSIVE_POLL_INTERVAL = 0.25
# Seconds for nodes to join again whose leases expired while the store was unavailable.
REJOIN_GRACE_PERIOD = 2.0


class ExclusiveStoreLease(Service):
    """
    Holds the store for this process, from when it is opened until the service stops.

    All such processes join under one name, and with a seal that no node of a cluster has. So the store refuses a
    second one, as well as one beside a cluster.

    :param gate: holds requests until it is known whether this process may serve them.
    :param node_health: is informed whether the clock of this host is right.
    :param give_up: ends the daemon with a line for the operator.
    """

    name = "exclusive store lease"

    def __init__(
        self,
        clock: IReactorTime,
        store: IStore,
        node: ClusterNode,
        gate: RequestGate,
        node_health: NodeHealth,
        give_up: Callable[[str], None],
    ) -> None:
        self._clock = clock
        self._store = store
        self._cluster: IClusterStore = store.cluster
        self._entry = ClusterNode(STANDALONE_NODE_NAME, node.boot, node.name, b"")
        self._gate = gate
        self._node_health = node_health
        self._give_up = give_up
        self._is_stopping = False
        self._renewal: Deferred[Any] | None = None

    def open(self) -> Deferred[None]:
        """
        Open the store, once no other process uses it.

        :raise StoreUnavailable: as :meth:`~mediatord.store.interfaces.store.IStore.open`.
        :raise StoreUnusable: other processes use it.
        """
        return Deferred.fromCoroutine(self._open())

    def stopService(self) -> Deferred[None]:
        """End the lease, so that the next process need not wait; what was pushed unacknowledged is pending again."""
        super().stopService()
        self._is_stopping = True
        if self._renewal is not None:
            self._renewal.cancel()
        return Deferred.fromCoroutine(self._release())

    async def _open(self) -> None:
        try:
            await self._store.open()
        except StoreUnavailable:
            # A lapsed node may also keep the store from opening.
            await self._drop_lapsed_nodes(after=REJOIN_GRACE_PERIOD)
            raise
        with _hold_requests(self._gate):
            if await self._list_lapsed_nodes():
                await deferLater(self._clock, REJOIN_GRACE_PERIOD)
            await self._acquire()
        await self._drop_lapsed_nodes()
        self._renewal = Deferred.fromCoroutine(self._keep_renewing())
        self._renewal.addErrback(lambda failure: failure.trap(CancelledError))

    async def _acquire(self) -> None:
        """Join as soon as the lease of a predecessor has expired."""
        until = self._clock.seconds() + EXCLUSIVE_LEASE + EXCLUSIVE_RENEWAL_INTERVAL
        while True:
            if self._is_stopping:
                raise StoreUnavailable  # it is about to be closed
            try:
                await self._cluster.join(self._entry, EXCLUSIVE_LEASE)
                return
            except NodeNameTaken as taken:
                if self._clock.seconds() > until:
                    raise StoreUnusable(describe_exclusive_holder(taken.holder)) from None
            except ClockSkewError as refused:
                raise StoreUnusable(describe_clock_difference(refused)) from None
            except ClusterSecretMismatch:
                raise StoreUnusable(await self._describe_cluster_conflict()) from None
            await deferLater(self._clock, EXCLUSIVE_POLL_INTERVAL)

    async def _keep_renewing(self) -> None:
        refusal = ""
        while not refusal:
            await deferLater(self._clock, EXCLUSIVE_RENEWAL_INTERVAL)
            try:
                refusal = await self._renew()
            except CancelledError:
                raise
            except StoreUnavailable:
                pass
            except Exception:
                _log.failure("renewing the store lease failed", redact_failure())
        self._give_up(refusal)

    async def _renew(self) -> str:
        """Why another process holds the store; empty if this one does."""
        try:
            if not await self._cluster.renew(self._entry.boot, EXCLUSIVE_LEASE):
                await self._cluster.join(self._entry, EXCLUSIVE_LEASE)
            self._node_health.joined()
        except ClockSkewError as refused:
            self._node_health.clock_differs(refused)
        except NodeNameTaken as taken:
            return describe_exclusive_holder(taken.holder)
        except ClusterJoinError:
            return await self._describe_cluster_conflict()
        return ""

    async def _describe_cluster_conflict(self) -> str:
        names = await list_node_names(self._cluster)
        return f"cluster.listen is null, but a cluster uses this database: {names}; set it, or stop these nodes"

    async def _drop_lapsed_nodes(self, *, after: float = 0.0) -> None:
        if after and await self._list_lapsed_nodes():
            await deferLater(self._clock, after)
        for boot in await self._list_lapsed_nodes():
            await self._cluster.drop(boot)

    async def _list_lapsed_nodes(self) -> list[str]:
        return [boot for boot in await self._cluster.list_lapsed_nodes() if boot != self._entry.boot]

    async def _release(self) -> None:
        if self._renewal is None:
            return
        try:
            await self._cluster.drop(self._entry.boot, until=inf)
        except StoreUnavailable:
            _log.warn(
                "could not release the store lease: the store was unavailable; the next process waits for its expiry"
            )


def open_shared_store(clock: IReactorTime, store: IStore, gate: RequestGate) -> Deferred[None]:
    """
    Open a store that several nodes share, once no process uses it exclusively.

    :param gate: as for :class:`ExclusiveStoreLease`.
    :raise StoreUnavailable: as :meth:`~mediatord.store.interfaces.store.IStore.open`.
    :raise StoreUnusable: a process does.
    """
    return Deferred.fromCoroutine(_open_when_not_exclusive(clock, store, gate))


async def _open_when_not_exclusive(clock: IReactorTime, store: IStore, gate: RequestGate) -> None:
    await store.open()
    until = clock.seconds() + EXCLUSIVE_LEASE + EXCLUSIVE_RENEWAL_INTERVAL
    with _hold_requests(gate):
        while exclusive := [one for one in await store.cluster.list_nodes() if one.name == STANDALONE_NODE_NAME]:
            if clock.seconds() > until:
                raise StoreUnusable(describe_exclusive_holder(exclusive[0]))
            await deferLater(clock, EXCLUSIVE_POLL_INTERVAL)


@contextmanager
def _hold_requests(gate: RequestGate) -> Iterator[None]:
    """Hold requests for the duration of the block; for good if the store is unusable, as this process will end."""
    gate.hold()
    try:
        yield
    except StoreUnusable:
        raise
    except BaseException:
        gate.release()
        raise
    gate.release()


def describe_exclusive_holder(exclusive: ClusterNode) -> str:
    """Why no other process may use the database, in one line."""
    return f"node {exclusive.address} uses this database exclusively; set cluster.listen on every node to share it"
