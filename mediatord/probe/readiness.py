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

from mediatord.clock import outside_request
from mediatord.failure_logging import redact_failure
from mediatord.observability.metrics import Metrics
from mediatord.probe.cycle import ProbeError

_log = Logger()

# Seconds that a cycle may take, and that whoever asks first waits for it.
PROBE_TIMEOUT_SECONDS = 3.0
FIRST_ANSWER_SECONDS = 5.0
# Seconds after which nobody is thought to ask any more.
IDLE_SECONDS = 60.0

STOPPING = "stopping"


class ProbeRunner(Protocol):
    """
    Something that is done again and again.

    :ivar stage: where it is, or was when it ended.
    """

    stage: str

    async def run(self) -> None:
        """Once; raises Failed."""


@dataclass(frozen=True, slots=True)
class ReadinessVerdict:
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
class ReadinessContext:
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


class ReadinessMonitor(Service):
    """
    Runs cycles as long as somebody asks.

    :param interval: seconds from the end of a cycle to the beginning of the next.
    """

    name = "readiness"

    def __init__(self, clock: IReactorTime, cycle: ProbeRunner, around: ReadinessContext, interval: float) -> None:
        self._clock = clock
        self._cycle = cycle
        self._context = around
        self._interval = interval
        self._asked = 0.0
        self._failure: str | None = None
        self._last: tuple[float, float] | None = None
        self._told = ""
        self._running: Deferred[None] | None = None
        self._next: IDelayedCall | None = None
        self._waiting: list[Deferred[None]] = []
        around.metrics.read_readiness = self._now

    async def ask(self) -> ReadinessVerdict:
        """How this process is; the first time that takes a cycle, and from then on nothing."""
        if not self._is_open():
            return self._verdict(STOPPING)
        self._asked = self._context.steady()
        self._begin()
        if self._failure is None:
            await self._first()
        return self.verdict()

    def verdict(self) -> ReadinessVerdict:
        """What is known."""
        if not self._is_open():
            return self._verdict(STOPPING)
        return self._verdict(self._context.trouble() or self._trouble())

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
        return bool(self.running) and self._context.is_open()

    def _verdict(self, trouble: str) -> ReadinessVerdict:
        if self._last is None:
            return ReadinessVerdict(trouble)
        at, took = self._last
        return ReadinessVerdict(trouble, took, max(0.0, self._context.steady() - at))

    def _trouble(self) -> str:
        if self._failure is None:
            return self._cycle.stage
        if self._failure or self._last is None:
            return self._failure
        # A timer that is late by so much is one of a process that does not get to its work.
        overdue = self._context.steady() - self._last[0] > 2 * self._interval + PROBE_TIMEOUT_SECONDS
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
            await told.addTimeout(FIRST_ANSWER_SECONDS, self._clock)

    def _begin(self) -> None:
        if self._running is None and self._next is None:
            self._failure, self._last = None, None
            self._run()

    def _run(self) -> None:
        self._next = None
        began = self._context.steady()
        with outside_request():
            running = self._running = Deferred.fromCoroutine(self._cycle.run())
        running.addTimeout(PROBE_TIMEOUT_SECONDS, self._clock)
        running.addCallbacks(lambda _: self._succeeded(began), self._failed)
        running.addErrback(lambda failure: _log.failure("a readiness cycle failed", redact_failure(failure)))
        running.addBoth(lambda _: self._ended())

    def _succeeded(self, began: float) -> None:
        now = self._context.steady()
        self._last = now, now - began
        self._failure = ""
        self._context.metrics.observe_probe_cycle(now - began)
        if self._told:
            self._told = ""
            _log.info("ready again")

    def _failed(self, failure: object) -> None:
        if not self.running:
            return
        error = getattr(failure, "value", None)
        self._failure = self._cycle.stage or "cycle"
        self._context.metrics.count_probe_failure(self._failure)
        if self._told != self._failure:
            self._told = self._failure
            cause = error.cause if isinstance(error, ProbeError) else type(error).__name__
            _log.warn("not ready: {stage} ({cause})", stage=self._failure, cause=cause)

    def _ended(self) -> None:
        self._running = None
        self._tell_all()
        if not self.running:
            return
        if self._context.steady() - self._asked > IDLE_SECONDS:
            self._failure = None
        else:
            self._next = self._clock.callLater(self._interval, self._run)

    def _tell_all(self) -> None:
        waiting, self._waiting = self._waiting, []
        for one in waiting:
            if not one.called:
                one.callback(None)


ReadinessCheck = Callable[[], Awaitable[ReadinessVerdict]]
