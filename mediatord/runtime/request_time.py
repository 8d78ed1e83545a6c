"""
The deadline of a request, and its computing time.

Both are kept in context variables: a coroutine keeps the context of its caller, and what the reactor calls has an
empty one. Work that a request starts without awaiting it has no deadline once the request is over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import wraps
from time import perf_counter
from typing import ParamSpec, TypeVar

from twisted.internet.interfaces import IReactorTime

# Seconds that all store operations of one request may take together.
REQUEST_TIME_LIMIT = 2.5

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(slots=True)
class _RequestTimer:
    """:ivar began: None once the request is over."""

    began: float | None


_current_request: ContextVar[_RequestTimer | None] = ContextVar("request", default=None)


@dataclass(slots=True)
class request_deadline:  # noqa: N801  it is used as a function
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
