"""Being one of the nodes: joining, staying, and coming back after having been away."""

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

from mediatord.cluster.naming import Naming, names_of, running
from mediatord.errors import StoreUnavailable
from mediatord.faults import Rarely, without_text
from mediatord.interfaces import (
    CLOCKS_APART,
    ClockDiffers,
    ClusterIdentityDiffers,
    ClusterRefused,
    IClusterStore,
    Node,
    NodeNameTaken,
)

_log = Logger()

# Seconds: how long a node counts as live after it was last heard of, how often it says that it is, and when it tries
# again what the store did not take.
LEASE = 10.0
RENEWAL = 3.0
RETRY = 1.0

SECRET_DIFFERS = "cluster.secret_file: the nodes that are running have another secret"  # nosec B105 # a text about it
IDENTITY_DIFFERS = (
    "identity.keys: the nodes that are running have other DIDs; copy keys.jwks of one of them to this host, "
    "and give all the same public_url"
)
BESIDE_WORKERS = "workers: others than the workers of this daemon work on this database"


class Followers(Protocol):
    """Who has to know how things stand between this node and the cluster."""

    def joined(self) -> None:
        """It is one of the nodes now; nobody knows of its sockets."""

    def parted(self) -> None:
        """Its lease is over, or may be for all it knows; it tries to join again."""

    def clock_differs(self, refused: ClockDiffers) -> None:
        """It cannot join, or stay."""

    def clock_agrees(self) -> None:
        """It cannot join for another reason."""

    def nodes(self, live: Collection[Node]) -> None:
        """These are the live ones, this one among them."""


@dataclass(frozen=True, slots=True)
class Means:
    """
    What becoming a member takes.

    :param probe: the boot that answers where a node said it is; None when none does.
    :param give_up: ends the daemon with a line for the operator.
    :param fall_silent: has nothing more said to the store about sockets; fires when that is sure.
    :param sole: whether this is a worker: our address was never that of anybody but earlier processes in our place,
        which are gone, and our secret is that of the workers of one daemon.
    """

    probe: Callable[[Node], Awaitable[str | None]]
    give_up: Callable[[str], None]
    fall_silent: Callable[[], Awaitable[None]]
    sole: bool = False


class Membership(Service):
    """
    Keeps this node among the live ones, from when the store is open until it stops.

    :param node: ours.
    """

    name = "membership"

    def __init__(
        self, clock: IReactorTime, store: IClusterStore, node: Node, means: Means, followers: Followers
    ) -> None:
        self._clock = clock
        self._store = store
        self._node = node
        self._means = means
        self._followers = followers
        self._naming = Naming(clock, store, node, means.probe, sole=means.sole)
        self._warning = Rarely(clock)
        self._has_joined = False
        self._open = False
        self._life: Deferred[Any] | None = None
        self._since: float | None = None

    def startService(self) -> None:
        """Join, if the store is open already."""
        super().startService()
        self._look()

    def store_opened(self) -> None:
        """Join, now or when this is started."""
        self._open = True
        self._look()

    def _look(self) -> None:
        if self.running and self._open and self._life is None:
            self._life = Deferred.fromCoroutine(self._live())
            self._life.addErrback(lambda failure: failure.trap(CancelledError))

    @property
    def settled(self) -> bool:
        """Whether this node has been a member for so long that all others that are live have come back as well."""
        return self._since is not None and not 0.0 <= self._clock.seconds() - self._since < RENEWAL

    def stopService(self) -> Deferred[None]:
        """Leave, so that nobody has to wait until the lease is over; fires when that is done or the store is away."""
        super().stopService()
        if self._life is not None:
            self._life.cancel()
        return Deferred.fromCoroutine(self._leave())

    async def _live(self) -> None:
        while True:
            try:
                if not await self._join():
                    return
                await self._be_a_member()
            except CancelledError:
                raise
            except Exception:
                _log.failure("membership failed", without_text())
                self._part()
                await self._pause(RETRY)

    async def _be_a_member(self) -> None:
        _log.info("node {name} has joined the cluster", name=self._node.name)
        self._since = self._clock.seconds()
        self._followers.joined()
        # A timer, as the clock may be set.
        over = self._clock.callLater(LEASE, self._lose)
        try:
            await self._stay(over)
            self._lose()
        except ClockDiffers as refused:
            self._followers.clock_differs(refused)
            self._part()
            await self._drop()
        finally:
            if over.active():
                over.cancel()

    def _lose(self) -> None:
        if self._since is not None:
            _log.warn("the lease of node {name} is over; it joins again as soon as it can", name=self._node.name)
            self._part()

    def _part(self) -> None:
        """Once for each time that it was a member."""
        if self._since is not None:
            self._since = None
            self._followers.parted()

    async def _join(self) -> bool:
        """Whether that was possible at all."""
        while True:
            asked = self._clock.seconds()
            try:
                await self._store.join(self._node, LEASE)
                self._naming.forget()
                self._has_joined = True
                return True
            except StoreUnavailable:
                self._naming.forget()
                await self._pause(RETRY)
            except ClusterRefused as refused:
                refusal = await self._refused(refused, asked)
                if refusal:
                    self._means.give_up(refusal)
                    return False

    async def _refused(self, refused: ClusterRefused, asked: float) -> str:
        """
        Why this node has to give up; empty when it may ask again.

        One that was there before drops nobody, and stays, with the sockets that it has, where it may come back.
        """
        if isinstance(refused, NodeNameTaken):
            return running(refused.holder) if self._has_joined else await self._naming.contest(refused, asked)
        why = await self._why(refused)
        if not self._has_joined:
            return why
        if isinstance(refused, ClockDiffers):
            self._followers.clock_differs(refused)
        else:
            self._followers.clock_agrees()
            if self._warning.count():
                _log.warn(f"{why}; this one tries to join them again, until it has")
        await self._pause(RETRY)
        return ""

    async def _why(self, refused: ClusterRefused) -> str:
        if isinstance(refused, ClockDiffers):
            return too_far_apart(refused)
        if isinstance(refused, ClusterIdentityDiffers):
            return IDENTITY_DIFFERS
        return f"{BESIDE_WORKERS}: {await names_of(self._store)}" if self._means.sole else SECRET_DIFFERS

    async def _stay(self, over: IDelayedCall) -> None:
        """
        Until the store says that the lease is lost, or answers after it was given up.

        :param over: gives it up when nobody knows any more whether others take us for live.
        """
        pause = 0.0
        while True:
            await self._pause(pause)
            began = self._clock.seconds()
            try:
                if not await self._store.renew(self._node.boot, LEASE) or not over.active():
                    return
                over.reset(LEASE)
                self._followers.nodes(await self._store.nodes())
                # As often as that, however long it takes: who sees no renewal takes us for dead. Meanwhile the clock
                # may have been set back.
                pause = min(max(0.0, began + RENEWAL - self._clock.seconds()), RENEWAL)
            except StoreUnavailable:
                pause = RETRY

    async def _leave(self) -> None:
        await self._means.fall_silent()
        if self._life is not None:
            await self._drop()

    async def _drop(self) -> None:
        """Be no node any more, at once: what was pushed is pending again, and turns are those of others."""
        try:
            await self._store.drop(self._node.boot, until=inf)
        except StoreUnavailable:
            _log.warn("the store was not available for ending the lease of this node; others wait until it is over")

    def _pause(self, seconds: float) -> Deferred[None]:
        return deferLater(self._clock, seconds, lambda: None)


def too_far_apart(refused: ClockDiffers) -> str:
    """Why nobody can begin here."""
    return f"{refused}; they may be {CLOCKS_APART:.0f} s apart"
