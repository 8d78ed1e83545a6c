"""Health of this node: cluster membership, its clock, and whether the store answers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure

from mediatord.store.interfaces.cluster import ClockSkewError

_log = Logger()

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
            _log.warn(f"{refused}: nothing is accepted here, expired or pushed live until they agree")
        self._clock_problem = str(refused)

    def clock_agrees(self) -> None:
        """Record that the clock is accepted."""
        if self._clock_problem:
            _log.info("the clock of this host agrees with the MongoDB server's again")
        self._clock_problem = ""


# Seconds for which a success may be reported without waiting for the next check.
HEALTHY_RESULT_TTL = 1.0


class StoreHealthCheck:
    """
    Checks the store, once for all concurrent callers.

    A caller within a second of the last success does not wait, since a slow disk delays the check as much as any
    other operation. The check runs all the same, and its failure is reported to the next caller.

    :param check: queries the store; raises what is wrong.
    :param monotonic: seconds of a monotonic clock.
    :param failure_count: store failures of requests so far; the last success is not reused after another one.
    """

    def __init__(
        self, check: Callable[[], Awaitable[None]], monotonic: Callable[[], float], failure_count: Callable[[], int]
    ) -> None:
        self._check = check
        self._monotonic = monotonic
        self._failure_count = failure_count
        self._failures_seen = 0
        self._is_running = False
        self._healthy_until = -HEALTHY_RESULT_TTL
        self._waiters: list[Deferred[None]] = []

    async def __call__(self) -> None:
        """Return if the store answers; raise what is wrong otherwise."""
        waiter: Deferred[None] = Deferred()
        self._waiters.append(waiter)
        if not self._is_running:
            self._is_running = True
            Deferred.fromCoroutine(self._run_check()).addBoth(self._resolve_waiters)
        if (
            not waiter.called
            and self._monotonic() < self._healthy_until
            and self._failure_count() == self._failures_seen
        ):
            self._waiters.remove(waiter)
            return
        await waiter

    async def _run_check(self) -> None:
        await self._check()

    def _resolve_waiters(self, result: Failure | None) -> None:
        self._is_running = False
        self._healthy_until = (
            -HEALTHY_RESULT_TTL if isinstance(result, Failure) else self._monotonic() + HEALTHY_RESULT_TTL
        )
        self._failures_seen = self._failure_count()
        waiters, self._waiters = self._waiters, []
        for one in waiters:
            one.callback(result)  # a Failure becomes an errback
