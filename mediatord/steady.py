"""
The reactor's time where somebody may set the clock of the host.

Twisted's reactor has one time for everything: `seconds` is the wall clock, and timers go by it. A wall clock that is
set back by two minutes would stop every timer for two minutes, and one that is set forward, as after a suspend, would
have them all run at once. With this, `seconds` is the wall clock still, but it goes on by the monotonic clock. Once a
second it is looked whether the two have parted; if so, `seconds` follows the wall clock, and every pending timer is
moved along, so that it keeps the time that it has left.

What is left to those who keep a moment and not a timer: two readings of `seconds` may differ by such a step, and the
second may be the lower one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from twisted.internet.task import LoopingCall
from twisted.logger import Logger

_log = Logger()

# Seconds between looks, and by how much the clocks may differ.
LOOK = 1.0
TOLERANCE = 0.1


class SteadyTime:
    """
    The time of one reactor.

    :param reactor: one of Twisted's own.
    :param wall: seconds since the epoch.
    :param steady: seconds since any time, which nobody can set.
    """

    def __init__(
        self,
        reactor: Any,
        wall: Callable[[], float] = time.time,  # noqa: TID251  it is what the reactor's own time is
        steady: Callable[[], float] = time.monotonic,
    ) -> None:
        self._reactor = reactor
        self._wall = wall
        self._steady = steady
        self._offset = wall() - steady()

    def seconds(self) -> float:
        """What the reactor's method of this name is to return."""
        return self._offset + self._steady()

    def look(self) -> None:
        """Follow the wall clock, if it was set."""
        if self._step():
            # Not now: a reactor that is at its timers has read the time for all of them.
            self._reactor.callFromThread(self._follow)

    def _follow(self) -> None:
        step = self._step()
        if not step:
            return
        self._offset += step
        # DelayedCall.delay would look for each of them in the whole heap: with 20 000 timers that takes two minutes.
        # The same step for all of them, those that were cancelled too, leaves the heap in order.
        for call in (*self._reactor._pendingTimedCalls, *self._reactor._newTimedCalls):
            call.time += step
        _log.info(
            "the clock of this host was set {way} by {seconds:.1f} s",
            way="forward" if step > 0 else "back",
            seconds=abs(step),
        )

    def _step(self) -> float:
        """By how many seconds the wall clock is ahead; 0.0 when that is hardly anything or cannot be told."""
        before, wall, after = self._steady(), self._wall(), self._steady()
        step = wall - self._offset - before
        return step if abs(step) > TOLERANCE and after - before < TOLERANCE / 2 else 0.0


def keep_steady(reactor: Any) -> None:
    """
    Have a reactor's timers go on whatever happens to the clock of the host.

    :param reactor: the program's own, with nothing scheduled yet.
    """
    steady = SteadyTime(reactor)
    reactor.seconds = steady.seconds
    looks = LoopingCall(steady.look)
    looks.clock = reactor
    looks.start(LOOK, now=False)
