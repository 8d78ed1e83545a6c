"""
Time: a reactor clock that survives steps of the wall clock, the deadline of a request, and its computing time.

`MonotonicReactorClock` replaces the `seconds` of the program's reactor. Twisted schedules timers by `seconds`, which
is the wall clock: setting that back by two minutes stops every timer for two minutes, and setting it forward, as
after a suspend, runs all of them at once. The replacement starts at the wall clock and advances with the monotonic
clock. Once a second both are compared; after a step, `seconds` follows the wall clock and all pending timers are
moved along, so that each keeps its remaining time. Two readings of `seconds` may therefore differ by such a step, and
the second may be the lower one; `NonDecreasingClock` is for code that cannot take that.

The deadline and the stopwatch of a request are kept in context variables: a coroutine keeps the context of its
caller, and what the reactor calls has an empty one. Work that a request starts without awaiting it has no deadline
once the request is over.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import wraps
from itertools import repeat
from operator import add
from time import perf_counter
from typing import Any, ParamSpec, TypeVar

from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.internet.task import LoopingCall
from twisted.logger import Logger
from zope.interface import implementer

# Seconds that all store operations of one request may take together.
REQUEST_TIME_LIMIT = 2.5
# Seconds between comparisons of the clocks, and the difference that is tolerated.
CLOCK_CHECK_INTERVAL = 1.0
CLOCK_STEP_TOLERANCE = 0.1

P = ParamSpec("P")
T = TypeVar("T")

_log = Logger()


@dataclass(slots=True)
class _RequestTimer:
    """:ivar began: None once the request is over."""

    began: float | None


_current_request: ContextVar[_RequestTimer | None] = ContextVar("request", default=None)


@dataclass(slots=True)
class request_scope:  # noqa: N801  it is used as a function
    """Context manager: the body is work on one request, which begins now."""

    clock: IReactorTime
    _request: _RequestTimer = field(init=False)
    _before: _RequestTimer | None = field(init=False)

    def __enter__(self) -> None:
        self._request = _RequestTimer(self.clock.seconds())
        self._before = _current_request.get()
        _current_request.set(self._request)

    def __exit__(self, *_: object) -> None:
        request = self._request
        request.began = None
        # A coroutine that is garbage-collected ends in an unrelated context.
        if _current_request.get() is request:
            _current_request.set(self._before)


@contextmanager
def outside_request() -> Iterator[None]:
    """Work that is started in the body belongs to no request and has the full time."""
    token = _current_request.set(None)
    try:
        yield
    finally:
        _current_request.reset(token)


@contextmanager
def pause_deadline(clock: IReactorTime) -> Iterator[None]:
    """Extend the deadline of the current request by the time that the body takes."""
    request, begun = _current_request.get(), clock.seconds()
    try:
        yield
    finally:
        if request is not None and request.began is not None:
            request.began += clock.seconds() - begun


def get_request_start(now: float) -> float:
    """Start of the current request; `now` if there is none, or if the clock was set back since."""
    request = _current_request.get()
    return now if request is None or request.began is None else min(request.began, now)


def get_time_left(clock: IReactorTime) -> float:
    """Seconds until the deadline of the current request, never less than 0."""
    now = clock.seconds()
    return max(get_request_start(now) + REQUEST_TIME_LIMIT - now, 0.0)


@dataclass(slots=True)
class Stopwatch:
    """:ivar seconds: measured so far."""

    seconds: float = 0.0


_current_stopwatch: ContextVar[Stopwatch | None] = ContextVar("stopwatch", default=None)


def start_stopwatch() -> Stopwatch:
    """Make a stopwatch and let it be that of the current context."""
    watch = Stopwatch()
    _current_stopwatch.set(watch)
    return watch


def measure_time(function: Callable[P, T]) -> Callable[P, T]:
    """Decorator: add a function's run time to the current stopwatch. Such functions must not call each other."""

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
            "the clock of this host was set {way} by {seconds:.1f} s",
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
