"""
How much of the time of a request went into what is computed, apart from what it waited for.

As in :mod:`mediatord.deadline`, a coroutine finds the stopwatch of its request in its context.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from functools import wraps
from time import perf_counter
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(slots=True)
class Stopwatch:
    """:ivar seconds: that were spent so far."""

    seconds: float = 0.0


_current: ContextVar[Stopwatch | None] = ContextVar("stopwatch", default=None)


def begin_timing() -> Stopwatch:
    """The stopwatch of the request that begins here."""
    watch = Stopwatch()
    _current.set(watch)
    return watch


def timed(function: Callable[P, T]) -> Callable[P, T]:
    """Count the time that a function takes for the request that calls it; such functions do not call each other."""

    @wraps(function)
    def measured(*args: P.args, **options: P.kwargs) -> T:
        watch = _current.get()
        if watch is None:
            return function(*args, **options)
        began = perf_counter()
        try:
            return function(*args, **options)
        finally:
            watch.seconds += perf_counter() - began

    return measured
