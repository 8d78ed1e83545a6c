"""
Flow control of connections: round-robin scheduling, a budget of unread responses, and return of memory to the system
after large requests.

Everything in a receive buffer could be served in one iteration, while other connections wait: a connection serves a
quantum at a time instead. A client may open many connections and read none of its responses: their bodies are bounded
per client and in total.
"""

from __future__ import annotations

import ctypes
import gc
from collections import Counter
from collections.abc import Callable
from time import perf_counter
from typing import Any

from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.logger import Logger

from mediatord.runtime.log_redaction_and_throttle import redact_failure

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


# Smaller buffers are not counted: the allocator reuses them.
LARGE_BUFFER_BYTES = 16_384
# Freed bytes that trigger a trim, and seconds until it runs.
TRIM_BYTES = 8_388_608
TRIM_SECONDS = 2.0
# A second trim follows for memory that was still in use: a request may take 10 seconds, but few do.
RETRIM_SECONDS = 5.0
# Freed bytes that trigger a garbage collection, however few objects there are.
COLLECT_BYTES = 33_554_432
# Maximum share of time for full collections.
_MAX_COLLECTION_TIME_SHARE = 0.02

# glibc's mallopt: larger blocks are mapped one by one, and returned when they are freed. By default glibc raises the
# threshold up to 32 MiB, and keeps such blocks in its heap below any small block.
_M_MMAP_THRESHOLD, _MMAP_BYTES = -3, 262_144


def tune_garbage_collector() -> None:
    """
    Exclude imported objects from garbage collection, and collect less often.

    A message creates many short-lived objects and hardly a cycle; the defaults cost about a tenth of the throughput.
    The thresholds count objects; :class:`MemoryReclaimer` bounds the bytes.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


def limit_malloc_mmap_threshold() -> None:
    """Make glibc return large blocks as soon as they are freed."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES)


def trim_malloc_heap() -> None:
    """Make glibc return free memory to the system."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)


class MemoryReclaimer:
    """
    Returns memory to the system some seconds after large buffers were freed.

    :param collect: collects a generation and those below.
    """

    def __init__(
        self,
        clock: IReactorTime,
        collect: Callable[[int], object] = gc.collect,
        trim: Callable[[], None] = trim_malloc_heap,
        steady: Callable[[], float] = perf_counter,
    ) -> None:
        self._clock = clock
        self._collect = collect
        self._trim = trim
        self._monotonic = steady
        self._to_trim = self._to_collect = self._to_collect_all = 0
        self._next_full = 0.0
        self._timer: IDelayedCall | None = None

    def released(self, size: int) -> None:
        """Count a freed buffer; those below :data:`LARGE_BUFFER_BYTES` need not be counted."""
        self._to_trim += size
        self._to_collect += size
        if self._to_collect >= COLLECT_BYTES:
            self._to_collect_all += self._to_collect
            self._to_collect = 0
            self._collect(1)
        if self._to_trim >= TRIM_BYTES and self._timer is None:
            self._timer = self._clock.callLater(TRIM_SECONDS, self._reclaim)

    def _reclaim(self) -> None:
        self._timer = None
        begun = self._monotonic()
        if self._to_collect_all and begun >= self._next_full:
            self._to_collect_all = 0
            self._collect(2)
            ended = self._monotonic()
            self._next_full = ended + (ended - begun) / _MAX_COLLECTION_TIME_SHARE
        more, self._to_trim = self._to_trim >= TRIM_BYTES, 0
        self._trim()
        if more or self._to_collect_all:
            self._timer = self._clock.callLater(RETRIM_SECONDS, self._reclaim)
