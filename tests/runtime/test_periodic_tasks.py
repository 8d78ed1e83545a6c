"""Periodic tasks of the daemon."""

from __future__ import annotations

from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.logger import capturedLogs, formatEvent
from twisted.trial.unittest import SynchronousTestCase

from mediatord.errors import StoreUnavailable
from mediatord.runtime.periodic_tasks import PeriodicTasks


class PeriodicTasksTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = Clock()
        self.fault: Exception | None = None
        self.held: Deferred[None] | None = None
        self.done = 0
        self.tasks = PeriodicTasks(self.clock, [(self.work, 5.0)], "a look at it")
        self.tasks.startService()

    async def work(self) -> None:
        """Count the call."""
        self.done += 1
        if self.fault is not None:
            raise self.fault
        if self.held is not None:
            await self.held

    def test_interval(self) -> None:
        """First after one interval, whatever happens to a run."""
        self.assertEqual(self.done, 0)
        self.clock.pump([5] * 2)
        self.fault = RuntimeError("boom")
        self.clock.advance(5)
        self.assertEqual(len(self.flushLoggedErrors(RuntimeError)), 1)
        self.fault = None
        self.clock.advance(5)
        self.assertEqual(self.done, 4)
        self.successResultOf(self.tasks.stopService())
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_unavailable_store(self) -> None:
        """It is logged once a minute."""
        self.fault = StoreUnavailable()
        with capturedLogs() as events:
            self.clock.pump([5] * 11)
        self.assertEqual(self.done, 11)
        self.assertEqual(list(map(formatEvent, events)), ["could not run a look at it: the store was unavailable"])

    def test_runs_do_not_overlap(self) -> None:
        """A long run delays the next one, and the stop."""
        self.held = Deferred()
        self.clock.pump([5] * 3)
        self.assertEqual(self.done, 1)
        stopped = self.tasks.stopService()
        self.assertNoResult(stopped)
        self.held.callback(None)
        self.successResultOf(stopped)
        self.assertEqual((self.done, self.clock.getDelayedCalls()), (1, []))
