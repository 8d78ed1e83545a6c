"""
Garbage collection and malloc: settings for a server, reference cycles of exceptions, and return of memory to the
system after large requests.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from time import perf_counter

from twisted.internet.interfaces import IDelayedCall, IReactorTime

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

# Loaded once: every further CDLL leaves reference cycles with classes of its own.
_libc = ctypes.CDLL(None)


def release_traceback(error: BaseException) -> None:
    """
    Drop the traceback and the chained exceptions of a handled exception.

    A frame that holds the exception in a variable forms a reference cycle with everything in its frames, such as the
    refused request, which only the garbage collector would free.
    """
    error.__traceback__ = error.__context__ = error.__cause__ = None


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
    mallopt = getattr(_libc, "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES)


def trim_malloc_heap() -> None:
    """Make glibc return free memory to the system."""
    malloc_trim = getattr(_libc, "malloc_trim", None)
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
