"""
Round-robin scheduling of connections that have received more than is served at once.

Whatever lies in a buffer could be served in one iteration of the reactor, and everybody else would wait for it. A
connection serves a little of it and queues up for a quantum; reading from it is paused until nothing is left.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Protocol

from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger

from mediatord.faults import without_text

_log = Logger()

# In one iteration of the reactor: quanta of all connections, and seconds after which no further one begins.
MAX_QUANTA = 64
MAX_SECONDS = 0.005


class Schedulable(Protocol):
    """A connection."""

    def run_quantum(self) -> None:
        """Serve a little of what was received; queue up again if more is left."""

    def __hash__(self) -> int: ...


class RoundRobinScheduler:
    """
    Gives each connection that queues up one quantum after the other, in turn.

    :param steady: seconds since any time, by a clock that nobody sets.
    """

    def __init__(self, clock: IReactorTime, steady: Callable[[], float] = perf_counter) -> None:
        self._clock = clock
        self._steady = steady
        self._waiting: dict[Schedulable, None] = {}
        self._is_due = False

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, connection: Schedulable) -> None:
        """Queue it up, unless it is in the queue."""
        self._waiting.setdefault(connection)
        if not self._is_due:
            self._is_due = True  # also while it runs
            self._clock.callLater(0, self._run)

    def discard(self, connection: Schedulable) -> None:
        """It is gone."""
        self._waiting.pop(connection, None)

    def _run(self) -> None:
        until = self._steady() + MAX_SECONDS
        for _ in range(MAX_QUANTA):
            if not self._waiting:
                break
            connection = next(iter(self._waiting))
            del self._waiting[connection]
            try:
                connection.run_quantum()
            except Exception:
                _log.failure("serving a connection failed", without_text())
            if self._steady() >= until:
                break
        self._is_due = bool(self._waiting)
        if self._is_due:
            self._clock.callLater(0, self._run)
