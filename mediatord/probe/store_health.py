"""Health of the store behind GET /health: it is checked in the background while anybody asks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from math import inf

from twisted.application.service import Service
from twisted.internet.defer import Deferred
from twisted.internet.defer import TimeoutError as DeferredTimeout
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.python.failure import Failure

from mediatord.errors import ShutdownInProgress, StoreUnavailable
from mediatord.probe.readiness import IDLE_SECONDS
from mediatord.runtime.request_time import outside_request

# Seconds between a successful check and the next one, and after which a check counts as failed. A success counts for
# both together, so that no answer waits as long as the store works, and a store that hangs is noticed by then.
CHECK_INTERVAL = 2.0
CHECK_TIMEOUT = 3.0


class StoreHealthMonitor(Service):
    """
    Checks the store, for all who ask and for a minute after that.

    A check waits as long as any other operation, which is why the answer does not, unless there is no recent success,
    or an operation has failed since.

    :param check: writes to the store and reads; raises what is wrong.
    :param is_open: whether the daemon accepts requests.
    :param failure_count: store failures of requests so far.
    :param steady: monotonic time in seconds.
    """

    name = "store health"

    def __init__(
        self,
        clock: IReactorTime,
        check: Callable[[], Awaitable[None]],
        *,
        is_open: Callable[[], bool],
        failure_count: Callable[[], int],
        steady: Callable[[], float],
    ) -> None:
        self._clock = clock
        self._check = check
        self._is_open = is_open
        self._failure_count = failure_count
        self._steady = steady
        self._failures_seen = 0
        self._asked_at = -inf
        self._succeeded_at = -inf
        # When the check that is running began; None if there is none.
        self._began_at: float | None = None
        self._next: IDelayedCall | None = None
        self._waiters: list[Deferred[None]] = []

    def stopService(self) -> None:
        """Check no more."""
        super().stopService()
        self._cancel_next()

    async def ask(self) -> None:
        """
        Return if the store works.

        :raise StoreUnavailable: it does not.
        :raise ShutdownInProgress: the daemon is stopping.
        """
        if not self._is_open():
            raise ShutdownInProgress()
        self._asked_at = now = self._steady()
        is_checked = self._next is not None or self._began_at is not None
        is_recent = now - self._succeeded_at < CHECK_INTERVAL + CHECK_TIMEOUT
        if is_checked and is_recent and self._failure_count() == self._failures_seen:
            return
        result: Deferred[None] = Deferred()
        self._waiters.append(result)
        if self._began_at is None:
            self._run_check()
        left = CHECK_TIMEOUT if self._began_at is None else self._began_at + CHECK_TIMEOUT - now
        try:
            await result.addTimeout(max(0.0, left), self._clock)
        except DeferredTimeout:
            raise StoreUnavailable() from None
        finally:
            if result in self._waiters:
                self._waiters.remove(result)

    def _run_check(self) -> None:
        self._cancel_next()
        self._began_at = self._steady()
        with outside_request():
            Deferred.fromCoroutine(self._perform_check()).addBoth(self._finish)

    async def _perform_check(self) -> None:
        await self._check()

    def _finish(self, result: Failure | None) -> None:
        now = self._steady()
        self._began_at = None
        self._failures_seen = self._failure_count()
        self._succeeded_at = -inf if isinstance(result, Failure) else now
        if self.running and self._is_open() and now - self._asked_at < IDLE_SECONDS:
            self._next = self._clock.callLater(CHECK_INTERVAL, self._run_check)
        waiters, self._waiters = self._waiters, []
        for one in waiters:
            if not one.called:
                one.callback(result)  # a Failure becomes an errback

    def _cancel_next(self) -> None:
        if self._next is not None and self._next.active():
            self._next.cancel()
        self._next = None
