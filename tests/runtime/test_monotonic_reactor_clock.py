"""Reactor time while the wall clock is set."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from twisted.internet.selectreactor import SelectReactor
from twisted.internet.task import LoopingCall
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase

from mediatord.runtime.reactor_clock import (
    CLOCK_CHECK_INTERVAL,
    CLOCK_STEP_TOLERANCE,
    MonotonicReactorClock,
    install_monotonic_clock,
)

EPOCH = 1_700_000_000.0
STEP = 0.25


class MonotonicReactorClockTests(SynchronousTestCase):
    """A reactor with manual clocks."""

    def setUp(self) -> None:
        self.wall, self.steady = EPOCH, 5_000.0
        self.lag = 0.0
        self.reactor: Any = SelectReactor()
        self.addCleanup(self.reactor.waker.connectionLost, Failure(ConnectionError()))
        self.time = MonotonicReactorClock(self.reactor, self.read_wall, lambda: self.steady)
        self.reactor.seconds = self.time.seconds
        loop = LoopingCall(self.time.check_wall_clock)
        loop.clock = self.reactor
        loop.start(CLOCK_CHECK_INTERVAL, now=False)
        self.ran: list[tuple[str, float]] = []

    def read_wall(self) -> float:
        """Read the wall clock; the process may be delayed before it."""
        self.steady += self.lag
        return self.wall

    def advance(self, seconds: float) -> None:
        """Advance time in steps, and run due calls."""
        for _ in range(round(seconds / STEP)):
            self.wall += STEP
            self.steady += STEP
            self.run_due_calls()

    def run_due_calls(self) -> None:
        """Run due calls, and those that they schedule at once."""
        for _ in range(3):
            self.reactor.iterate(0)

    def record(self, what: str) -> Callable[[], None]:
        """Record a call with the elapsed time."""
        return lambda: self.ran.append((what, self.steady - 5_000.0))

    def test_wall_clock(self) -> None:
        """The reactor's time follows the wall clock after a step."""
        self.assertEqual(self.reactor.seconds(), EPOCH)
        for step in (-120.0, 3_600.0):
            self.advance(10.0)
            self.assertAlmostEqual(self.reactor.seconds(), self.wall, places=3)
            self.wall += step
            self.assertAlmostEqual(self.reactor.seconds(), self.wall - step, places=3)
            self.advance(CLOCK_CHECK_INTERVAL)
            self.assertAlmostEqual(self.reactor.seconds(), self.wall, places=3)

    def test_timers_keep_remaining_time(self) -> None:
        """Steps in either direction make no timer early or late."""
        for seconds in (1.5, 7.0, 3.0, 30.0):
            self.reactor.callLater(seconds, self.record(f"after {seconds}"))
        for step in (-120.0, 120.0, 86_400.0, -86_000.0):
            self.wall += step
            self.advance(2.0)
        self.advance(30.0)
        self.assertEqual(self.ran, [(f"after {seconds}", seconds) for seconds in (1.5, 3.0, 7.0, 30.0)])

    def test_due_timers(self) -> None:
        """In the iteration that detects a step back nothing else becomes due."""
        self.reactor.callLater(CLOCK_CHECK_INTERVAL, self.record("due"))
        self.reactor.callLater(60.0, self.record("later"))
        self.wall -= 120.0
        self.advance(CLOCK_CHECK_INTERVAL)
        self.assertEqual(self.ran, [("due", CLOCK_CHECK_INTERVAL)])
        self.advance(59.0)
        self.assertEqual(self.ran, [("due", CLOCK_CHECK_INTERVAL), ("later", 60.0)])

    def test_reset_and_cancelled_timers(self) -> None:
        """Cancelled timers stay cancelled without affecting the order; delayed and reset ones are kept."""
        calls = [self.reactor.callLater(5.0 + number, self.record(str(number))) for number in range(40)]
        self.run_due_calls()
        for call in calls[::2]:
            call.cancel()
        calls[1].delay(100.0)
        calls[3].reset(2.0)
        self.wall -= 120.0
        self.advance(CLOCK_CHECK_INTERVAL)
        calls[5].reset(2.0)
        self.assertAlmostEqual(calls[7].getTime(), self.wall + 11.0, places=3)
        self.advance(50.0)
        others = [(str(number), 5.0 + number) for number in range(7, 40, 2)]
        self.assertEqual(self.ran, [("3", 2.0), ("5", 3.0), *others])
        self.advance(60.0)
        self.assertEqual(self.ran[-1], ("1", 106.0))

    def test_new_timers(self) -> None:
        """A timer that the reactor has not sorted in yet is moved as well."""

        def begin() -> None:
            self.reactor.callLater(2.0, self.record("begun"))

        self.reactor.callLater(CLOCK_CHECK_INTERVAL - STEP, begin)
        self.advance(CLOCK_CHECK_INTERVAL - STEP)
        self.wall -= 120.0
        self.time.check_wall_clock()
        begin()
        self.advance(3.0)
        self.assertEqual(self.ran, [("begun", CLOCK_CHECK_INTERVAL - STEP + 2.0)] * 2)

    def test_looping_calls(self) -> None:
        """They neither stop nor burst; one call may be early, as they count from their start."""
        loop = LoopingCall(self.record("round"))
        loop.clock = self.reactor
        loop.start(5.0, now=False)
        for step in (-120.0, 118.0, 3_601.0):
            self.wall += step
            self.advance(20.0)
        at = [when for _, when in self.ran]
        apart = [later - earlier for earlier, later in zip([0.0, *at], at, strict=False)]
        self.assertLessEqual(max(apart), 5.0)
        self.assertEqual([item for item in apart if item != 5.0][3:], [])
        self.assertGreaterEqual(at[-1], 55.0)

    def test_clock_drift(self) -> None:
        """Small differences are ignored, and do not accumulate."""
        self.reactor.callLater(50.0, self.record("done"))
        for _ in range(200):
            self.wall += CLOCK_STEP_TOLERANCE / 4
            self.advance(STEP)
            self.assertLessEqual(abs(self.reactor.seconds() - self.wall), CLOCK_STEP_TOLERANCE * 2)
        self.assertEqual(self.ran, [("done", 50.0)])

    def test_suspended_process(self) -> None:
        """A process may be suspended between reading two clocks: that is no step."""
        self.lag = 3.0
        self.advance(CLOCK_CHECK_INTERVAL)
        self.lag = 0.0
        self.wall += 3.0
        self.assertAlmostEqual(self.reactor.seconds(), self.wall, places=3)
        self.advance(5.0)
        self.assertAlmostEqual(self.reactor.seconds(), self.wall, places=3)


class InstalledClockTests(SynchronousTestCase):
    def test_reactor(self) -> None:
        """The clock is checked periodically; nothing else changes, and no other reactor."""
        reactor: Any = SelectReactor()
        self.addCleanup(reactor.waker.connectionLost, Failure(ConnectionError()))
        before = SelectReactor.seconds
        install_monotonic_clock(reactor)
        self.assertIs(SelectReactor.seconds, before)
        earlier, now, later = before(), reactor.seconds(), before()
        self.assertTrue(earlier - 1.0 <= now <= later + 1.0, (earlier, now, later))
        (check_wall_clock,) = reactor.getDelayedCalls()
        self.assertLessEqual(check_wall_clock.getTime() - reactor.seconds(), CLOCK_CHECK_INTERVAL)
