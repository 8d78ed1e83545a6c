"""A clock that never goes back."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from mediatord.runtime.reactor_clock import NonDecreasingClock
from tests.in_memory_mediator import InMemoryReactor


class NonDecreasingClockTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.wall = InMemoryReactor()
        self.wall.advance(1_000.0)
        self.clock = NonDecreasingClock(self.wall)

    def test_follows_reactor(self) -> None:
        """It is the reactor's time, also after a step forward."""
        for step in (0.0, 2.5, 60.0):
            self.wall.step_wall_clock(step)
            self.assertEqual(self.clock.seconds(), self.wall.seconds())

    def test_step_back(self) -> None:
        """It stands still for a moment, and continues."""
        for _ in range(2):
            before = self.clock.seconds()
            self.wall.step_wall_clock(-100.0)
            self.assertEqual(self.clock.seconds(), before)
            self.wall.advance(3.0)
            self.assertEqual(self.clock.seconds(), before + 3.0)

    def test_scheduled_calls(self) -> None:
        """When a call runs, its time has come, whatever steps there were."""
        called: list[tuple[float, str]] = []
        begun = self.clock.seconds()
        self.clock.callLater(2.0, lambda what, how: called.append((self.clock.seconds(), what + how)), "th", how="is")
        self.clock.callLater(1.0, called.clear).cancel()
        self.wall.step_wall_clock(-100.0)
        self.wall.advance(2.0)
        self.assertEqual(called, [(begun + 2.0, "this")])
        self.assertEqual(self.clock.getDelayedCalls(), [])
