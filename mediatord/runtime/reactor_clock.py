"""
Reactor clocks that survive steps of the wall clock.

`MonotonicReactorClock` replaces the `seconds` of the program's reactor. Twisted schedules timers by `seconds`, which
is the wall clock: setting that back by two minutes stops every timer for two minutes, and setting it forward, as
after a suspend, runs all of them at once. The replacement starts at the wall clock and advances with the monotonic
clock. Once a second both are compared; after a step, `seconds` follows the wall clock and all pending timers are
moved along, so that each keeps its remaining time. Two readings of `seconds` may therefore differ by such a step, and
the second may be the lower one; `NonDecreasingClock` is for code that cannot take that.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import repeat
from operator import add
from typing import Any

from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.internet.task import LoopingCall
from twisted.logger import Logger
from zope.interface import implementer

# Seconds between comparisons of the clocks, and the difference that is tolerated.
CLOCK_CHECK_INTERVAL = 1.0
CLOCK_STEP_TOLERANCE = 0.1

_log = Logger()


class MonotonicReactorClock:
    """
    The time of one reactor; see the module's documentation.

    :param reactor: one of Twisted's own.
    :param wall: seconds since the epoch.
    :param steady: seconds since an arbitrary time, which cannot be set.
    :ivar seconds: replacement for the reactor's method of this name. Read some twenty times a message, so it is put
        together of built-ins, and reading it runs no Python code.
    """

    def __init__(
        self,
        reactor: Any,
        wall: Callable[[], float] = time.time,  # noqa: TID251  it is what the reactor's own time is
        steady: Callable[[], float] = time.monotonic,
    ) -> None:
        self._reactor = reactor
        self._wall = wall
        self._monotonic = steady
        self._offset = [wall() - steady()]  # in a list, which `seconds` looks into each time
        offsets = map(self._offset.__getitem__, repeat(0))
        self.seconds: Callable[[], float] = map(add, offsets, iter(steady, None)).__next__

    def check_wall_clock(self) -> None:
        """Follow the wall clock, if it was set."""
        if self._measure_step():
            # Not now: a reactor that is running its timers has read the time for all of them.
            self._reactor.callFromThread(self._apply_step)

    def _apply_step(self) -> None:
        step = self._measure_step()
        if not step:
            return
        self._offset[0] += step
        # DelayedCall.delay would search the whole heap for each of them: two minutes with 20 000 timers. The same
        # step for all of them, cancelled ones included, leaves the heap in order.
        for call in (*self._reactor._pendingTimedCalls, *self._reactor._newTimedCalls):
            call.time += step
        _log.info(
            "the system clock was set {way} by {seconds:.1f} s",
            way="forward" if step > 0 else "back",
            seconds=abs(step),
        )

    def _measure_step(self) -> float:
        """Seconds that the wall clock is ahead; 0.0 when within the tolerance or not measurable."""
        before, wall, after = self._monotonic(), self._wall(), self._monotonic()
        step = wall - self._offset[0] - before
        return step if abs(step) > CLOCK_STEP_TOLERANCE and after - before < CLOCK_STEP_TOLERANCE / 2 else 0.0


def install_monotonic_clock(reactor: Any) -> None:
    """
    Make a reactor's timers independent of steps of the wall clock.

    :param reactor: the program's own, with nothing scheduled yet.
    """
    clock = MonotonicReactorClock(reactor)
    reactor.seconds = clock.seconds
    loop = LoopingCall(clock.check_wall_clock)
    loop.clock = reactor
    loop.start(CLOCK_CHECK_INTERVAL, now=False)


@implementer(IReactorTime)
class NonDecreasingClock:
    """
    A reactor clock that never goes back and that has reached a delayed call's time when the call runs: a deadline is
    never further away than it was, as long as the reactor's timers run.

    Delayed calls can be cancelled; their times are the reactor's own and must be neither read nor changed.
    """

    def __init__(self, reactor: IReactorTime) -> None:
        self._reactor = reactor
        self._ahead = 0.0
        self._latest = reactor.seconds()

    def seconds(self) -> float:
        """The reactor's time until it is set back for the first time."""
        return self._advance_to(self._latest)

    def callLater(  # noqa: N802  the interface's name
        self, delay: float, callable: Callable[..., object], *args: object, **kw: object
    ) -> IDelayedCall:
        """See :class:`IReactorTime`."""
        return self._reactor.callLater(delay, self._call, self.seconds() + delay, callable, args, kw)

    def getDelayedCalls(self) -> Any:  # noqa: N802  the interface's name
        """See :class:`IReactorTime`."""
        return self._reactor.getDelayedCalls()

    def _call(self, due: float, callable: Callable[..., object], args: Any, kw: Any) -> None:
        self._advance_to(due)
        callable(*args, **kw)

    def _advance_to(self, moment: float) -> float:
        """The present time, which is at least `moment`."""
        now = self._reactor.seconds() + self._ahead
        if now < moment:
            self._ahead += moment - now
            now = moment
        self._latest = now
        return now
