"""The reactor's time while the clock of the host is set."""

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
    """A reactor of its own, whose clocks are set by hand."""

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
        """It may take the process a while to come to it."""
        self.steady += self.lag
        return self.wall

    def pass_(self, seconds: float) -> None:
        """Time goes by, in steps, and the reactor does what is due."""
        for _ in range(round(seconds / STEP)):
            self.wall += STEP
            self.steady += STEP
            self.turn()

    def turn(self) -> None:
        """What is due now, with what follows from that at once."""
        for _ in range(3):
            self.reactor.iterate(0)

    def note(self, what: str) -> Callable[[], None]:
        """Has that written down, with the time that has passed really."""
        return lambda: self.ran.append((what, self.steady - 5_000.0))

    def test_the_wall_clock(self) -> None:
        """It is what the time is, before and after it is set, a look later."""
        self.assertEqual(self.reactor.seconds(), EPOCH)
        for step in (-120.0, 3_600.0):
            self.pass_(10.0)
            self.assertAlmostEqual(self.reactor.seconds(), self.wall, places=3)
            self.wall += step
            self.assertAlmostEqual(self.reactor.seconds(), self.wall - step, places=3)
            self.pass_(CLOCK_CHECK_INTERVAL)
            self.assertAlmostEqual(self.reactor.seconds(), self.wall, places=3)

    def test_timers_keep_what_is_left(self) -> None:
        """Whichever way and however often the clock is set: none is early, none is late."""
        for seconds in (1.5, 7.0, 3.0, 30.0):
            self.reactor.callLater(seconds, self.note(f"after {seconds}"))
        for step in (-120.0, 120.0, 86_400.0, -86_000.0):
            self.wall += step
            self.pass_(2.0)
        self.pass_(30.0)
        self.assertEqual(self.ran, [(f"after {seconds}", seconds) for seconds in (1.5, 3.0, 7.0, 30.0)])

    def test_timers_that_are_due(self) -> None:
        """In the very turn in which it is seen that the clock was set back, nothing else is taken for due."""
        self.reactor.callLater(CLOCK_CHECK_INTERVAL, self.note("due"))
        self.reactor.callLater(60.0, self.note("later"))
        self.wall -= 120.0
        self.pass_(CLOCK_CHECK_INTERVAL)
        self.assertEqual(self.ran, [("due", CLOCK_CHECK_INTERVAL)])
        self.pass_(59.0)
        self.assertEqual(self.ran, [("due", CLOCK_CHECK_INTERVAL), ("later", 60.0)])

    def test_timers_that_were_moved_or_cancelled(self) -> None:
        """Those that are cancelled stay so and leave the others in order; those put off or brought forward are so."""
        calls = [self.reactor.callLater(5.0 + number, self.note(str(number))) for number in range(40)]
        self.turn()
        for call in calls[::2]:
            call.cancel()
        calls[1].delay(100.0)
        calls[3].reset(2.0)
        self.wall -= 120.0
        self.pass_(CLOCK_CHECK_INTERVAL)
        calls[5].reset(2.0)
        self.assertAlmostEqual(calls[7].getTime(), self.wall + 11.0, places=3)
        self.pass_(50.0)
        others = [(str(number), 5.0 + number) for number in range(7, 40, 2)]
        self.assertEqual(self.ran, [("3", 2.0), ("5", 3.0), *others])
        self.pass_(60.0)
        self.assertEqual(self.ran[-1], ("1", 106.0))

    def test_timers_that_were_just_begun(self) -> None:
        """One that the reactor has not sorted in yet is moved as well."""

        def begin() -> None:
            self.reactor.callLater(2.0, self.note("begun"))

        self.reactor.callLater(CLOCK_CHECK_INTERVAL - STEP, begin)
        self.pass_(CLOCK_CHECK_INTERVAL - STEP)
        self.wall -= 120.0
        self.time.check_wall_clock()
        begin()
        self.pass_(3.0)
        self.assertEqual(self.ran, [("begun", CLOCK_CHECK_INTERVAL - STEP + 2.0)] * 2)

    def test_loops(self) -> None:
        """They neither stop nor run in a burst; one round may come early, for they count from their beginning."""
        loop = LoopingCall(self.note("round"))
        loop.clock = self.reactor
        loop.start(5.0, now=False)
        for step in (-120.0, 118.0, 3_601.0):
            self.wall += step
            self.pass_(20.0)
        at = [when for _, when in self.ran]
        apart = [later - earlier for earlier, later in zip([0.0, *at], at, strict=False)]
        self.assertLessEqual(max(apart), 5.0)
        self.assertEqual([one for one in apart if one != 5.0][3:], [])
        self.assertGreaterEqual(at[-1], 55.0)

    def test_clocks_that_drift(self) -> None:
        """Hardly anything is nothing, but it does not add up."""
        self.reactor.callLater(50.0, self.note("done"))
        for _ in range(200):
            self.wall += CLOCK_STEP_TOLERANCE / 4
            self.pass_(STEP)
            self.assertLessEqual(abs(self.reactor.seconds() - self.wall), CLOCK_STEP_TOLERANCE * 2)
        self.assertEqual(self.ran, [("done", 50.0)])

    def test_a_process_that_is_held_up(self) -> None:
        """Between two clocks it may be for long: that is not a step."""
        self.lag = 3.0
        self.pass_(CLOCK_CHECK_INTERVAL)
        self.lag = 0.0
        self.wall += 3.0
        self.assertAlmostEqual(self.reactor.seconds(), self.wall, places=3)
        self.pass_(5.0)
        self.assertAlmostEqual(self.reactor.seconds(), self.wall, places=3)


class InstalledClockTests(SynchronousTestCase):
    def test_a_reactor(self) -> None:
        """Looks now and then, and is otherwise what it was; no other reactor is touched."""
        reactor: Any = SelectReactor()
        self.addCleanup(reactor.waker.connectionLost, Failure(ConnectionError()))
        before = SelectReactor.seconds
        install_monotonic_clock(reactor)
        self.assertIs(SelectReactor.seconds, before)
        earlier, now, later = before(), reactor.seconds(), before()
        self.assertTrue(earlier - 1.0 <= now <= later + 1.0, (earlier, now, later))
        (check_wall_clock,) = reactor.getDelayedCalls()
        self.assertLessEqual(check_wall_clock.getTime() - reactor.seconds(), CLOCK_CHECK_INTERVAL)
