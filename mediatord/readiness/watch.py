"""When cycles run, and what they say about this process."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from twisted.application.service import Service
from twisted.internet.defer import Deferred
from twisted.internet.defer import TimeoutError as DeferredTimeout
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.logger import Logger

from mediatord.deadline import on_its_own
from mediatord.faults import without_text
from mediatord.metrics import Metrics
from mediatord.readiness.cycle import Failed

_log = Logger()

# Seconds that a cycle may take, and that whoever asks first waits for it.
PATIENCE = 3.0
FIRST = 5.0
# Seconds after which nobody is thought to ask any more.
FORGOTTEN = 60.0

STOPPING = "stopping"


class Runs(Protocol):
    """
    Something that is done again and again.

    :ivar stage: where it is, or was when it ended.
    """

    stage: str

    async def run(self) -> None:
        """Once; raises Failed."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """
    Whether this process is ready, and how that is known.

    :param trouble: why it is not, in a few words; empty if it is.
    :param cycle: seconds that the last successful cycle took; None if there was none since it was asked for.
    :param age: seconds since then.
    """

    trouble: str = ""
    cycle: float | None = None
    age: float | None = None


@dataclass(frozen=True, slots=True)
class Surroundings:
    """
    What is asked about the rest of the daemon.

    :param is_open: whether it takes work.
    :param trouble: why nobody should be sent here even so; empty if there is nothing.
    :param steady: seconds since any time, by a clock that nobody sets.
    """

    is_open: Callable[[], bool]
    trouble: Callable[[], str]
    steady: Callable[[], float]
    metrics: Metrics


class Readiness(Service):
    """
    Runs cycles as long as somebody asks.

    :param interval: seconds from the end of a cycle to the beginning of the next.
    """

    name = "readiness"

    def __init__(self, clock: IReactorTime, cycle: Runs, around: Surroundings, interval: float) -> None:
        self._clock = clock
        self._cycle = cycle
        self._around = around
        self._interval = interval
        self._asked = 0.0
        self._failure: str | None = None
        self._last: tuple[float, float] | None = None
        self._told = ""
        self._running: Deferred[None] | None = None
        self._next: IDelayedCall | None = None
        self._waiting: list[Deferred[None]] = []
        around.metrics.ready_now = self._now

    async def ask(self) -> Verdict:
        """How this process is; the first time that takes a cycle, and from then on nothing."""
        if not self._is_open():
            return self._verdict(STOPPING)
        self._asked = self._around.steady()
        self._begin()
        if self._failure is None:
            await self._first()
        return self.verdict()

    def verdict(self) -> Verdict:
        """What is known."""
        if not self._is_open():
            return self._verdict(STOPPING)
        return self._verdict(self._around.trouble() or self._trouble())

    def stopService(self) -> None:
        """Run no more; what is under way ends at once."""
        super().stopService()
        if self._next is not None:
            self._next.cancel()
            self._next = None
        if self._running is not None:
            self._running.cancel()
        self._tell_all()

    def _is_open(self) -> bool:
        return bool(self.running) and self._around.is_open()

    def _verdict(self, trouble: str) -> Verdict:
        if self._last is None:
            return Verdict(trouble)
        at, took = self._last
        return Verdict(trouble, took, max(0.0, self._around.steady() - at))

    def _trouble(self) -> str:
        if self._failure is None:
            return self._cycle.stage
        if self._failure or self._last is None:
            return self._failure
        # A timer that is late by so much is one of a process that does not get to its work.
        overdue = self._around.steady() - self._last[0] > 2 * self._interval + PATIENCE
        return self._cycle.stage if overdue else ""

    def _now(self) -> bool | None:
        """Whether it is ready; None when nobody asks."""
        if self._failure is None or not self.running:
            return None
        return not self.verdict().trouble

    async def _first(self) -> None:
        """Wait for what the first cycle says, but not for ever."""
        told: Deferred[None] = Deferred()
        self._waiting.append(told)
        with suppress(DeferredTimeout):
            await told.addTimeout(FIRST, self._clock)

    def _begin(self) -> None:
        if self._running is None and self._next is None:
            self._failure, self._last = None, None
            self._run()

    def _run(self) -> None:
        self._next = None
        began = self._around.steady()
        with on_its_own():
            running = self._running = Deferred.fromCoroutine(self._cycle.run())
        running.addTimeout(PATIENCE, self._clock)
        running.addCallbacks(lambda _: self._succeeded(began), self._failed)
        running.addErrback(lambda failure: _log.failure("a readiness cycle failed", without_text(failure)))
        running.addBoth(lambda _: self._ended())

    def _succeeded(self, began: float) -> None:
        now = self._around.steady()
        self._last = now, now - began
        self._failure = ""
        self._around.metrics.cycle_took(now - began)
        if self._told:
            self._told = ""
            _log.info("ready again")

    def _failed(self, failure: object) -> None:
        if not self.running:
            return
        error = getattr(failure, "value", None)
        self._failure = self._cycle.stage or "cycle"
        self._around.metrics.cycle_failed(self._failure)
        if self._told != self._failure:
            self._told = self._failure
            cause = error.cause if isinstance(error, Failed) else type(error).__name__
            _log.warn("not ready: {stage} ({cause})", stage=self._failure, cause=cause)

    def _ended(self) -> None:
        self._running = None
        self._tell_all()
        if not self.running:
            return
        if self._around.steady() - self._asked > FORGOTTEN:
            self._failure = None
        else:
            self._next = self._clock.callLater(self._interval, self._run)

    def _tell_all(self) -> None:
        waiting, self._waiting = self._waiting, []
        for one in waiting:
            if not one.called:
                one.callback(None)


Ask = Callable[[], Awaitable[Verdict]]
