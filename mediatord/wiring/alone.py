"""A process that works alone on a store which others could share: it keeps others away, and is kept away by them."""

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

from mediatord.cluster.membership import too_far_apart
from mediatord.cluster.naming import ALONE, names_of
from mediatord.cluster.standing import Standing
from mediatord.errors import StoreUnavailable
from mediatord.faults import without_text
from mediatord.gate import Gate
from mediatord.interfaces import (
    ClockDiffers,
    ClusterRefused,
    ClusterSecretDiffers,
    IClusterStore,
    IStore,
    Node,
    NodeNameTaken,
    StoreRefused,
)

_log = Logger()

# Seconds: how long it counts as live after it was last heard of, and how often it says that it is. Who finds another
# one looks so often whether it still is.
LEASE = 3.0
RENEWAL = 1.0
LOOK = 0.25
# Seconds in which those whose leases ended while nobody could reach the store have come back.
RETURN = 2.0


class Alone(Service):
    """
    Notes that this process works on the store, from when it is opened until this stops.

    All that work alone have the same name in the store, and no node of a cluster has their seal: so the store itself
    lets none of them in beside another or beside a cluster, whoever is first.

    :param node: this process.
    :param gate: where requests wait until it is known whether this process may serve them.
    :param standing: told whether its clock can be relied on.
    :param give_up: ends the daemon with a line for the operator.
    """

    name = "lone node"

    def __init__(
        self,
        clock: IReactorTime,
        store: IStore,
        node: Node,
        gate: Gate,
        standing: Standing,
        give_up: Callable[[str], None],
    ) -> None:
        self._clock = clock
        self._store = store
        self._cluster: IClusterStore = store.cluster
        self._entry = Node(ALONE, node.boot, node.name, b"")
        self._gate = gate
        self._standing = standing
        self._give_up = give_up
        self._leaving = False
        self._life: Deferred[Any] | None = None

    def open(self) -> Deferred[None]:
        """
        Open the store, once nobody else works on it.

        :raise StoreUnavailable: as :meth:`~mediatord.interfaces.IStore.open`.
        :raise StoreRefused: others work on it.
        """
        return Deferred.fromCoroutine(self._open())

    def stopService(self) -> Deferred[None]:
        """Leave, so that the next one need not wait; what was pushed and not acknowledged is pending again."""
        super().stopService()
        self._leaving = True
        if self._life is not None:
            self._life.cancel()
        return Deferred.fromCoroutine(self._leave())

    async def _open(self) -> None:
        try:
            await self._store.open()
        except StoreUnavailable:
            # What was begun and never ended may be in the way of opening as well.
            await self._end_earlier(after=RETURN)
            raise
        with _held(self._gate):
            if await self._lapsed():
                await self._pause(RETURN)
            await self._enter()
        await self._end_earlier()
        self._life = Deferred.fromCoroutine(self._stay())
        self._life.addErrback(lambda failure: failure.trap(CancelledError))

    async def _enter(self) -> None:
        """Join as soon as whoever is there proves to be gone: one whose lease ends was not renewed."""
        until = self._clock.seconds() + LEASE + RENEWAL
        while True:
            if self._leaving:
                raise StoreUnavailable  # or will be, in a moment
            try:
                await self._cluster.join(self._entry, LEASE)
                return
            except NodeNameTaken as taken:
                if self._clock.seconds() > until:
                    raise StoreRefused(taken_by(taken.holder)) from None
            except ClockDiffers as refused:
                raise StoreRefused(too_far_apart(refused)) from None
            except ClusterSecretDiffers:
                raise StoreRefused(await self._beside()) from None
            await self._pause(LOOK)

    async def _stay(self) -> None:
        while True:
            await self._pause(RENEWAL)
            try:
                refusal = await self._renew()
            except StoreUnavailable:
                continue
            except CancelledError:
                raise
            except Exception:
                _log.failure("renewing the lease failed", without_text())
                continue
            if refusal:
                self._give_up(refusal)
                return

    async def _renew(self) -> str:
        """Why others have its place; empty when it has."""
        try:
            if not await self._cluster.renew(self._entry.boot, LEASE):
                await self._cluster.join(self._entry, LEASE)
            self._standing.joined()
        except ClockDiffers as refused:
            self._standing.clock_differs(refused)
        except NodeNameTaken as taken:
            return taken_by(taken.holder)
        except ClusterRefused:
            return await self._beside()
        return ""

    async def _beside(self) -> str:
        names = await names_of(self._cluster)
        return f"cluster.listen: null, but nodes of a cluster work on this database: {names}"

    async def _end_earlier(self, *, after: float = 0.0) -> None:
        if after and await self._lapsed():
            await self._pause(after)
        for boot in await self._lapsed():
            await self._cluster.drop(boot)

    async def _lapsed(self) -> list[str]:
        return [boot for boot in await self._cluster.lapsed() if boot != self._entry.boot]

    async def _leave(self) -> None:
        if self._life is None:
            return
        try:
            await self._cluster.drop(self._entry.boot, until=inf)
        except StoreUnavailable:
            _log.warn("the store was not available for leaving it; who comes next waits until the lease is over")

    def _pause(self, seconds: float) -> Deferred[None]:
        return deferLater(self._clock, seconds, lambda: None)


def open_among(clock: IReactorTime, store: IStore, gate: Gate) -> Deferred[None]:
    """
    Open a store for one of several, once nobody works on it alone.

    :param gate: as for :class:`Alone`.
    :raise StoreUnavailable: as :meth:`~mediatord.interfaces.IStore.open`.
    :raise StoreRefused: somebody does.
    """
    return Deferred.fromCoroutine(_open_among(clock, store, gate))


async def _open_among(clock: IReactorTime, store: IStore, gate: Gate) -> None:
    await store.open()
    until = clock.seconds() + LEASE + RENEWAL
    with _held(gate):
        while lone := [one for one in await store.cluster.nodes() if one.name == ALONE]:
            if clock.seconds() > until:
                raise StoreRefused(taken_by(lone[0]))
            await deferLater(clock, LOOK, lambda: None)


@contextmanager
def _held(gate: Gate) -> Iterator[None]:
    """Requests wait; unless others work on the store, which is when they wait for the end of this process."""
    gate.hold()
    try:
        yield
    except StoreRefused:
        raise
    except BaseException:
        gate.release()
        raise
    gate.release()


def taken_by(lone: Node) -> str:
    """Why nobody else may work on its database, in a line."""
    return f"node {lone.address} works on this database alone: nodes can share it if each has a cluster.listen"
