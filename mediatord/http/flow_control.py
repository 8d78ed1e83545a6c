"""
Flow control of connections: round-robin scheduling, and a budget of unread responses.

Everything in a receive buffer could be served in one iteration, while other connections wait: a connection serves a
quantum at a time instead. A client may open many connections and read none of its responses: their bodies are bounded
per client and in total.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from time import perf_counter
from typing import Any

from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger

from mediatord.runtime.failure_logging import redact_failure

_log = Logger()

# Quanta in one iteration of the reactor, and seconds after which no further quantum begins.
MAX_QUANTA = 64
MAX_ITERATION_SECONDS = 0.005


class RoundRobinScheduler:
    """
    Runs one quantum of each queued connection in turn, by its method `run_quantum`, which may add it again.

    :param steady: monotonic clock.
    """

    def __init__(self, clock: IReactorTime, steady: Callable[[], float] = perf_counter) -> None:
        self._clock = clock
        self._steady = steady
        self._waiting: dict[Any, None] = {}
        self._is_due = False

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, connection: Any) -> None:
        """Queue a connection, unless it is queued."""
        self._waiting.setdefault(connection)
        if not self._is_due:
            self._is_due = True  # also while it runs
            self._clock.callLater(0, self._run)

    def discard(self, connection: Any) -> None:
        """Remove a closed connection."""
        self._waiting.pop(connection, None)

    def _run(self) -> None:
        until = self._steady() + MAX_ITERATION_SECONDS
        for _ in range(MAX_QUANTA):
            if not self._waiting:
                break
            connection = next(iter(self._waiting))
            del self._waiting[connection]
            try:
                connection.run_quantum()
            except Exception:
                _log.failure("serving a connection failed", redact_failure())
            if self._steady() >= until:
                break
        self._is_due = bool(self._waiting)
        if self._is_due:
            self._clock.callLater(0, self._run)


MAX_UNREAD_PER_CLIENT = 33_554_432
MAX_UNREAD_TOTAL = 268_435_456
# What a transport buffers before it pauses its producer; every connection may have that, whatever the budget.
SMALL_RESPONSE_BYTES = 65_536


class ResponseBudget:
    """
    Bounds the bytes of responses that clients have not read.

    :param per_client: bytes for one rate limit key.
    :param total_limit: bytes for all clients.
    :param released: called with the size of a response that is no longer buffered.
    :ivar total: current bytes.
    """

    def __init__(
        self,
        per_client: int = MAX_UNREAD_PER_CLIENT,
        total_limit: int = MAX_UNREAD_TOTAL,
        released: Callable[[int], None] = lambda size: None,
    ) -> None:
        self._released = released
        self._per_client = per_client
        self._total_limit = total_limit
        self._waiting: Counter[str] = Counter()
        self.total = 0

    def limit(self, total_limit: int) -> None:
        """Change the total limit; one client may use an eighth of it."""
        self._total_limit, self._per_client = total_limit, total_limit // 8

    @property
    def held(self) -> tuple[int, int]:
        """Number of clients with unread responses, and the bytes of those."""
        return len(self._waiting), self.total

    def of(self, rate_limit_key: str) -> int:
        """Unread bytes of one client."""
        return self._waiting[rate_limit_key]

    def has_room(self, rate_limit_key: str, size: int) -> bool:
        """Whether a response of this size is within the budget; small ones are not subject to it."""
        return self.of(rate_limit_key) + size <= self._per_client and self.total + size <= self._total_limit

    def add(self, rate_limit_key: str, size: int) -> None:
        """Count a response that was not read at once."""
        self._waiting[rate_limit_key] += size
        self.total += size

    def remove(self, rate_limit_key: str, size: int) -> None:
        """Count a response out that was read, or never will be."""
        self._waiting[rate_limit_key] -= size
        if self._waiting[rate_limit_key] <= 0:
            del self._waiting[rate_limit_key]
        self.total -= size
        self._released(size)
