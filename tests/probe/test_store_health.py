"""Background checks of the store, and the answers from them."""

from __future__ import annotations

from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from mediatord.errors import ShutdownInProgress, StoreUnavailable
from mediatord.probe.readiness import IDLE_SECONDS
from mediatord.probe.store_health import CHECK_INTERVAL, CHECK_TIMEOUT, StoreHealthMonitor


class StoreHealthMonitorTests(SynchronousTestCase):
    """A store whose answers the test gives."""

    def setUp(self) -> None:
        self.clock = Clock()
        self.pings: list[Deferred[None]] = []
        self.failures = 0
        self.is_open = True
        self.monitor = StoreHealthMonitor(
            self.clock,
            self.ping,
            is_open=lambda: self.is_open,
            failure_count=lambda: self.failures,
            steady=self.clock.seconds,
        )
        self.monitor.startService()

    async def ping(self) -> None:
        """A slow store."""
        self.pings.append(Deferred())
        await self.pings[-1]

    def ask(self) -> Deferred[None]:
        return Deferred.fromCoroutine(self.monitor.ask())

    def succeed_once(self) -> None:
        """The first check, which begins with the first question."""
        asked = self.ask()
        self.pings[-1].callback(None)
        self.successResultOf(asked)

    def test_first_callers_wait(self) -> None:
        """Those who ask first wait for the same check."""
        asked = [self.ask(), self.ask()]
        self.assertEqual(len(self.pings), 1)
        for one in asked:
            self.assertNoResult(one)
        self.pings[0].callback(None)
        for one in asked:
            self.successResultOf(one)

    def test_answers_during_check(self) -> None:
        """An answer does not wait for a check that is running, nor does it cause one."""
        self.succeed_once()
        for _ in range(5):
            self.clock.advance(CHECK_INTERVAL)
            number = len(self.pings)
            for _ in range(3):
                self.successResultOf(self.ask())
            self.clock.advance(CHECK_TIMEOUT - 0.1)
            self.successResultOf(self.ask())
            self.assertEqual(len(self.pings), number)
            self.pings[-1].callback(None)
        self.assertEqual(len(self.pings), 6)

    def test_notices_store_that_hangs(self) -> None:
        """A check that takes too long counts as failed, without another wait, until it ends."""
        self.succeed_once()
        self.clock.advance(CHECK_INTERVAL)
        self.clock.advance(CHECK_TIMEOUT)
        for _ in range(2):
            asked = self.ask()
            self.clock.advance(0)
            self.failureResultOf(asked, StoreUnavailable)
        self.assertEqual(len(self.pings), 2)
        self.pings[1].callback(None)
        self.successResultOf(self.ask())

    def test_first_caller_waits_for_hanging_store_no_longer_than_the_timeout(self) -> None:
        """Later callers wait for what is left of it."""
        asked = [self.ask()]
        self.clock.advance(CHECK_TIMEOUT - 1)
        asked.append(self.ask())
        self.clock.advance(1)
        for one in asked:
            self.failureResultOf(one, StoreUnavailable)

    def test_notices_failure_between_questions(self) -> None:
        """A failed check counts for the next question, which begins another one."""
        self.succeed_once()
        self.clock.advance(CHECK_INTERVAL)
        self.pings[1].errback(StoreUnavailable())
        asked = self.ask()
        self.pings[2].errback(StoreUnavailable())
        self.failureResultOf(asked, StoreUnavailable)
        asked = self.ask()
        self.pings[3].callback(None)
        self.successResultOf(asked)

    def test_failed_operation_invalidates_success(self) -> None:
        """After a failed operation no answer is given before the next check."""
        self.succeed_once()
        self.failures += 1
        asked = self.ask()
        self.assertNoResult(asked)
        self.pings[1].callback(None)
        self.successResultOf(asked)
        self.successResultOf(self.ask())
        self.assertEqual(len(self.pings), 2)

    def test_stops_when_nobody_asks(self) -> None:
        """A minute after the last question the store is left alone, and the next question waits."""
        self.succeed_once()
        for _ in range(round(2 * IDLE_SECONDS / CHECK_INTERVAL)):
            self.clock.advance(CHECK_INTERVAL)
            if not self.pings[-1].called:
                self.pings[-1].callback(None)
        number = len(self.pings)
        self.assertEqual(number, 1 + IDLE_SECONDS / CHECK_INTERVAL)
        self.assertEqual(self.clock.getDelayedCalls(), [])
        self.assertNoResult(self.ask())
        self.assertEqual(len(self.pings), number + 1)

    def test_stopping(self) -> None:
        """A daemon that stops says so at once, and checks no more."""
        self.succeed_once()
        self.is_open = False
        self.failureResultOf(self.ask(), ShutdownInProgress)
        self.monitor.stopService()
        self.assertEqual(self.clock.getDelayedCalls(), [])
