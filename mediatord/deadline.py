"""
The time that all work on one request may take together, however often it asks the store.

What is done for a request finds in its context when that began: a coroutine keeps the context of whoever began it,
while what the reactor calls has none. What a request has begun and does not wait for is done on its own; what others
began earlier, or outlives it, is not the request's either.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from twisted.internet.interfaces import IReactorTime

# Seconds from the beginning of a request, or of what belongs to none.
PATIENCE = 2.5


@dataclass(slots=True)
class _Request:
    """:ivar began: None when it is over."""

    began: float | None


_current: ContextVar[_Request | None] = ContextVar("request", default=None)


class one_request:  # noqa: N801  it is used as a function
    """All that is done inside is for one request, which begins now."""

    __slots__ = ("_before", "_request")

    def __init__(self, clock: IReactorTime) -> None:
        self._request = _Request(clock.seconds())

    def __enter__(self) -> None:
        self._before = _current.get()
        _current.set(self._request)

    def __exit__(self, *_: object) -> None:
        request = self._request
        request.began = None
        # A coroutine that nobody holds any more is ended in the context of somebody else.
        if _current.get() is request:
            _current.set(self._before)


@contextmanager
def on_its_own() -> Iterator[None]:
    """What is begun inside is for no request, and has all its time."""
    token = _current.set(None)
    try:
        yield
    finally:
        _current.reset(token)


@contextmanager
def not_counted(clock: IReactorTime) -> Iterator[None]:
    """The time that passes inside is not the store's, and the request has so much more."""
    request, begun = _current.get(), clock.seconds()
    try:
        yield
    finally:
        if request is not None and request.began is not None:
            request.began += clock.seconds() - begun


def request_began(now: float) -> float:
    """When the request began that is being worked on; now if there is none, or if the clock was set back since."""
    request = _current.get()
    return now if request is None or request.began is None else min(request.began, now)


def time_left(clock: IReactorTime) -> float:
    """Seconds until the time is up, never less than 0."""
    now = clock.seconds()
    return max(request_began(now) + PATIENCE - now, 0.0)
