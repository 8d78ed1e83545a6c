"""Readiness monitor behind GET /ready: schedules probe cycles and evaluates their results."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

from twisted.application.service import Service
from twisted.internet.defer import Deferred
from twisted.internet.defer import TimeoutError as DeferredTimeout
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.logger import Logger

from mediatord.observability.metrics import Metrics
from mediatord.probe.cycle import ProbeCycle, ProbeError
from mediatord.runtime.failure_logging import redact_failure
from mediatord.runtime.request_time import outside_request

_log = Logger()

# Timeout of a cycle, and how long the first request waits for one, in seconds.
PROBE_TIMEOUT_SECONDS = 3.0
FIRST_ANSWER_SECONDS = 5.0
# Cycles stop if nobody has asked for this many seconds.
IDLE_SECONDS = 60.0

STOPPING = "stopping"


@dataclass(frozen=True, slots=True)
class ReadinessVerdict:
    """
    Whether this process is ready.

    :param trouble: why not, in a few words; empty if ready.
    :param cycle: duration of the last successful cycle in seconds; None if there was none since cycles started.
    :param age: seconds since then.
    """

    trouble: str = ""
    cycle: float | None = None
    age: float | None = None


class ReadinessMonitor(Service):
    """
    Runs probe cycles while /ready is polled.

    :param interval: seconds between the end of a cycle and the start of the next.
    :param is_open: whether the daemon accepts requests.
    :param get_trouble: another reason not to be ready; empty if none.
    :param steady: monotonic time in seconds.
    """

    name = "readiness"

    def __init__(
        self,
        clock: IReactorTime,
        cycle: ProbeCycle,
        interval: float,
        metrics: Metrics,
        *,
        is_open: Callable[[], bool],
        get_trouble: Callable[[], str],
        steady: Callable[[], float],
    ) -> None:
        self._clock = clock
        self._cycle = cycle
        self._interval = interval
        self._metrics = metrics
        self._accepts_requests = is_open
        self._get_trouble = get_trouble
        self._steady = steady
        self._last_asked_at = 0.0
        self._failure: str | None = None
        self._last: tuple[float, float] | None = None
        self._last_logged = ""
        self._running: Deferred[None] | None = None
        self._next: IDelayedCall | None = None
        self._waiting: list[Deferred[None]] = []
        metrics.read_readiness = self._is_ready

    async def ask(self) -> ReadinessVerdict:
        """Readiness of the process; the first request waits for a cycle, later ones return immediately."""
        if not self._is_open():
            return self._verdict(STOPPING)
        self._last_asked_at = self._steady()
        if self._running is None and self._next is None:
            self._failure, self._last = None, None
            self._run()
        if self._failure is None:
            cycle_ended: Deferred[None] = Deferred()
            self._waiting.append(cycle_ended)
            with suppress(DeferredTimeout):
                await cycle_ended.addTimeout(FIRST_ANSWER_SECONDS, self._clock)
        return self.verdict()

    def verdict(self) -> ReadinessVerdict:
        """Readiness by the results so far."""
        if not self._is_open():
            return self._verdict(STOPPING)
        return self._verdict(self._get_trouble() or self._trouble())

    def stopService(self) -> None:
        """Stop probing and cancel a running cycle."""
        super().stopService()
        if self._next is not None:
            self._next.cancel()
            self._next = None
        if self._running is not None:
            self._running.cancel()
        self._notify_waiting()

    def _is_open(self) -> bool:
        return bool(self.running) and self._accepts_requests()

    def _verdict(self, trouble: str) -> ReadinessVerdict:
        if self._last is None:
            return ReadinessVerdict(trouble)
        at, took = self._last
        return ReadinessVerdict(trouble, took, max(0.0, self._steady() - at))

    def _trouble(self) -> str:
        if self._failure is None:
            return self._cycle.stage
        if self._failure or self._last is None:
            return self._failure
        # A timer this late means that the process is blocked.
        overdue = self._steady() - self._last[0] > 2 * self._interval + PROBE_TIMEOUT_SECONDS
        return self._cycle.stage if overdue else ""

    def _is_ready(self) -> bool | None:
        """Whether the process is ready; None if nobody asks."""
        if self._failure is None or not self.running:
            return None
        return not self.verdict().trouble

    def _run(self) -> None:
        self._next = None
        began = self._steady()
        with outside_request():
            running = self._running = Deferred.fromCoroutine(self._cycle.run())
        running.addTimeout(PROBE_TIMEOUT_SECONDS, self._clock)
        running.addCallbacks(lambda _: self._succeeded(began), self._failed)
        running.addErrback(lambda failure: _log.failure("a probe cycle failed", redact_failure(failure)))
        running.addBoth(lambda _: self._ended())

    def _succeeded(self, began: float) -> None:
        now = self._steady()
        self._last = now, now - began
        self._failure = ""
        self._metrics.probe_cycle_duration.observe(now - began)
        if self._last_logged:
            self._last_logged = ""
            _log.info("ready again")

    def _failed(self, failure: object) -> None:
        if not self.running:
            return
        error = getattr(failure, "value", None)
        self._failure = self._cycle.stage or "cycle"
        self._metrics.probe_failures.inc(self._failure)
        if self._last_logged != self._failure:
            self._last_logged = self._failure
            cause = error.cause if isinstance(error, ProbeError) else type(error).__name__
            _log.warn("not ready: the probe failed at {stage} ({cause})", stage=self._failure, cause=cause)

    def _ended(self) -> None:
        self._running = None
        self._notify_waiting()
        if not self.running:
            return
        if self._steady() - self._last_asked_at > IDLE_SECONDS:
            self._failure = None
        else:
            self._next = self._clock.callLater(self._interval, self._run)

    def _notify_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        for one in waiting:
            if not one.called:
                one.callback(None)


ReadinessCheck = Callable[[], Awaitable[ReadinessVerdict]]
