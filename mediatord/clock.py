"""
The time that all work on one request may take together, however often it asks the store.

What is done for a request finds in its context when that began: a coroutine keeps the context of whoever began it,
while what the reactor calls has none. What a request has begun and does not wait for is done on its own; what others
began earlier, or outlives it, is not the request's either.

How much of the time of a request went into what is computed, apart from what it waited for.

As in :mod:`mediatord.clock`, a coroutine finds the stopwatch of its request in its context.

The reactor's time where somebody may set the clock of the host.

Twisted's reactor has one time for everything: `seconds` is the wall clock, and timers go by it. A wall clock that is
set back by two minutes would stop every timer for two minutes, and one that is set forward, as after a suspend, would
have them all run at once. With this, `seconds` is the wall clock still, but it goes on by the monotonic clock. Once a
second it is looked whether the two have parted; if so, `seconds` follows the wall clock, and every pending timer is
moved along, so that it keeps the time that it has left.

What is left to those who keep a moment and not a timer: two readings of `seconds` may differ by such a step, and the
second may be the lower one.

Time for those who wait: that of the host goes back when somebody sets it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import wraps
from time import perf_counter
from typing import Any, ParamSpec, TypeVar

from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.internet.task import LoopingCall
from twisted.logger import Logger
from zope.interface import implementer

# Seconds from the beginning of a request, or of what belongs to none.
REQUEST_TIME_LIMIT = 2.5


@dataclass(slots=True)
class _RequestTimer:
    """:ivar began: None when it is over."""

    began: float | None


_current_request: ContextVar[_RequestTimer | None] = ContextVar("request", default=None)


class request_scope:  # noqa: N801  it is used as a function
    """All that is done inside is for one request, which begins now."""

    __slots__ = ("_before", "_request")

    def __init__(self, clock: IReactorTime) -> None:
        self._request = _RequestTimer(clock.seconds())

    def __enter__(self) -> None:
        self._before = _current_request.get()
        _current_request.set(self._request)

    def __exit__(self, *_: object) -> None:
        request = self._request
        request.began = None
        # A coroutine that nobody holds any more is ended in the context of somebody else.
        if _current_request.get() is request:
            _current_request.set(self._before)


@contextmanager
def outside_request() -> Iterator[None]:
    """What is begun inside is for no request, and has all its time."""
    token = _current_request.set(None)
    try:
        yield
    finally:
        _current_request.reset(token)


@contextmanager
def pause_deadline(clock: IReactorTime) -> Iterator[None]:
    """The time that passes inside is not the store's, and the request has so much more."""
    request, begun = _current_request.get(), clock.seconds()
    try:
        yield
    finally:
        if request is not None and request.began is not None:
            request.began += clock.seconds() - begun


def get_request_start(now: float) -> float:
    """When the request began that is being worked on; now if there is none, or if the clock was set back since."""
    request = _current_request.get()
    return now if request is None or request.began is None else min(request.began, now)


def get_time_left(clock: IReactorTime) -> float:
    """Seconds until the time is up, never less than 0."""
    now = clock.seconds()
    return max(get_request_start(now) + REQUEST_TIME_LIMIT - now, 0.0)


P = ParamSpec("P")
T = TypeVar("T")


@dataclass(slots=True)
class Stopwatch:
    """:ivar seconds: that were spent so far."""

    seconds: float = 0.0


_current_stopwatch: ContextVar[Stopwatch | None] = ContextVar("stopwatch", default=None)


def start_stopwatch() -> Stopwatch:
    """The stopwatch of the request that begins here."""
    watch = Stopwatch()
    _current_stopwatch.set(watch)
    return watch


def measure_time(function: Callable[P, T]) -> Callable[P, T]:
    """Count the time that a function takes for the request that calls it; such functions do not call each other."""

    @wraps(function)
    def measured(*args: P.args, **options: P.kwargs) -> T:
        watch = _current_stopwatch.get()
        if watch is None:
            return function(*args, **options)
        began = perf_counter()
        try:
            return function(*args, **options)
        finally:
            watch.seconds += perf_counter() - began

    return measured


_log = Logger()

# Seconds between looks, and by how much the clocks may differ.
CLOCK_CHECK_INTERVAL = 1.0
CLOCK_STEP_TOLERANCE = 0.1


class MonotonicReactorClock:
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
        self._monotonic = steady
        self._offset = wall() - steady()

    def seconds(self) -> float:
        """What the reactor's method of this name is to return."""
        return self._offset + self._monotonic()

    def check_wall_clock(self) -> None:
        """Follow the wall clock, if it was set."""
        if self._measure_step():
            # Not now: a reactor that is at its timers has read the time for all of them.
            self._reactor.callFromThread(self._apply_step)

    def _apply_step(self) -> None:
        step = self._measure_step()
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

    def _measure_step(self) -> float:
        """By how many seconds the wall clock is ahead; 0.0 when that is hardly anything or cannot be told."""
        before, wall, after = self._monotonic(), self._wall(), self._monotonic()
        step = wall - self._offset - before
        return step if abs(step) > CLOCK_STEP_TOLERANCE and after - before < CLOCK_STEP_TOLERANCE / 2 else 0.0


def install_monotonic_clock(reactor: Any) -> None:
    """
    Have a reactor's timers go on whatever happens to the clock of the host.

    :param reactor: the program's own, with nothing scheduled yet.
    """
    steady = MonotonicReactorClock(reactor)
    reactor.seconds = steady.seconds
    looks = LoopingCall(steady.check_wall_clock)
    looks.clock = reactor
    looks.start(CLOCK_CHECK_INTERVAL, now=False)


@implementer(IReactorTime)
class NonDecreasingClock:
    """
    The time of a reactor, but that it never goes back, and that it has passed once what was to be called later is
    called. So a deadline is never further away than it was, as long as its timers go on; see :mod:`mediatord.clock`.

    Delayed calls can be cancelled; they tell of the reactor's own time, so nobody may look at it or move them.
    """

    def __init__(self, reactor: IReactorTime) -> None:
        self._reactor = reactor
        self._ahead = 0.0
        self._latest = reactor.seconds()

    def seconds(self) -> float:
        """That of the reactor until it is set back for the first time."""
        return self._pass(self._latest)

    def callLater(  # noqa: N802  the interface's name
        self, delay: float, callable: Callable[..., object], *args: object, **kw: object
    ) -> IDelayedCall:
        """See :class:`IReactorTime`."""
        return self._reactor.callLater(delay, self._call, self.seconds() + delay, callable, args, kw)

    def getDelayedCalls(self) -> Any:  # noqa: N802  the interface's name
        """See :class:`IReactorTime`."""
        return self._reactor.getDelayedCalls()

    def _call(self, due: float, callable: Callable[..., object], args: Any, kw: Any) -> None:
        self._pass(due)
        callable(*args, **kw)

    def _pass(self, moment: float) -> float:
        """Now, which is no earlier than this."""
        now = self._reactor.seconds() + self._ahead
        if now < moment:
            self._ahead += moment - now
            now = moment
        self._latest = now
        return now
