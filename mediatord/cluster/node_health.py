"""
Whether wallets and senders should be sent to this process.

Asking the store whether it answers.
"""

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
    What is in the way, beside the store.

    :param patience: seconds for which a node of a cluster may be none after it was one: as long as others take it for
        one. None for a process that is no node.
    """

    def __init__(self, clock: IReactorTime, grace_period: float | None = None) -> None:
        self._clock = clock
        self._grace_period = grace_period
        self._is_member = grace_period is None
        self._parted_at = float("-inf")
        self._clock_differs = ""

    @property
    def trouble(self) -> str:
        """In a few words; empty when there is none."""
        if self._clock_differs:
            return self._clock_differs
        if self._is_member or self._grace_period is None:
            return ""
        # Who parted in the future has had the clock set back since.
        return "" if 0.0 <= self._clock.seconds() - self._parted_at <= self._grace_period else NOT_JOINED

    @property
    def is_member(self) -> bool:
        """Whether it is a node, or the only one."""
        return self._is_member

    def joined(self) -> None:
        """It is a node, or the only one."""
        self._is_member = True
        self.clock_agrees()

    def clock_agrees(self) -> None:
        """Whatever else may keep it from being one."""
        if self._clock_differs:
            _log.info("the clock of this host agrees with the MongoDB server's again")
        self._clock_differs = ""

    def parted(self) -> None:
        """It is none for the time being."""
        if self._is_member:
            self._is_member, self._parted_at = False, self._clock.seconds()

    def clock_differs(self, refused: ClockSkewError) -> None:
        """Nor can it be one; said once, until they agree."""
        if not self._clock_differs:
            _log.warn(f"{refused}: nothing is accepted here, expired or pushed live until they agree")
        self._clock_differs = str(refused)


# Seconds for which a good answer is good enough for who does not want to wait for the next.
HEALTHY_RESULT_TTL = 1.0


class StoreHealthCheck:
    """
    Asks, once for all who want to know at the same time.

    To be told that all is well nobody waits who asks within a second of the last good answer: where the disk takes
    long to do as it is told, an answer takes that long as well. It is asked all the same, and a bad answer counts for
    whoever comes next.

    :param ask: really asks; raises what is wrong.
    :param steady: seconds since any time, by a clock that nobody sets.
    :param failures: how often the store has failed anybody so far; after one more a good answer is good no longer.
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
        """Return if the store answers; raise what is wrong with it otherwise."""
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

    def _resolve_waiters(self, result: None | Failure) -> None:
        self._is_running = False
        self._healthy_until = (
            -HEALTHY_RESULT_TTL if isinstance(result, Failure) else self._monotonic() + HEALTHY_RESULT_TTL
        )
        self._failures_seen = self._failure_count()
        waiters, self._waiters = self._waiters, []
        for one in waiters:
            one.callback(result)  # a failure becomes that of the Deferred
