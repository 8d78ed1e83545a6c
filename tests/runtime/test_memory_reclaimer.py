"""Freed bytes trigger garbage collection, and return of memory to the system."""

from __future__ import annotations

from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from mediatord.runtime.memory_reclaimer import (
    COLLECT_BYTES,
    RETRIM_SECONDS,
    TRIM_BYTES,
    TRIM_SECONDS,
    MemoryReclaimer,
    limit_malloc_mmap_threshold,
    trim_malloc_heap,
)

MIB = 1_048_576


class MemoryReclaimerTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = Clock()
        self.done: list[object] = []
        self.took = 0.0
        self.reclaimer = MemoryReclaimer(self.clock, self.collect, lambda: self.done.append("trim"), self.steady)

    def collect(self, generation: int) -> None:
        self.done.append(generation)

    def steady(self) -> float:
        """A clock that advances at each reading."""
        self.took += 0.1
        return self.clock.seconds() + self.took

    def release(self, size: int) -> None:
        for _ in range(size // MIB):
            self.reclaimer.released(MIB)

    def test_few_bytes(self) -> None:
        """No collection and no timer."""
        self.release(TRIM_BYTES - MIB)
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_trim(self) -> None:
        """Memory is trimmed a while after large buffers were freed, and once more for those in use then."""
        self.release(TRIM_BYTES)
        self.assertEqual(self.done, [])
        self.clock.advance(TRIM_SECONDS)
        self.assertEqual(self.done, ["trim"])
        self.clock.advance(RETRIM_SECONDS)
        self.assertEqual(self.done, ["trim", "trim"])
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_within_ten_seconds(self) -> None:
        """The last freed bytes are trimmed soon, however long freeing went on."""
        for _ in range(40):
            self.release(TRIM_BYTES)
            self.clock.advance(0.5)
        before = len(self.done)
        self.clock.pump([1.0] * 9)
        self.assertEqual(self.done[before:].count("trim"), 2)

    def test_collector(self) -> None:
        """Young objects are collected at once after some bytes, all objects later and less often."""
        self.release(COLLECT_BYTES)
        self.assertEqual(self.done, [1])
        self.clock.advance(TRIM_SECONDS)
        self.assertEqual(self.done, [1, 2, "trim"])
        self.release(COLLECT_BYTES)
        self.clock.advance(RETRIM_SECONDS)
        self.assertEqual(self.done, [1, 2, "trim", 1, 2, "trim"])

    def test_slow_collector(self) -> None:
        """A slow full collection is run rarely."""
        self.reclaimer = MemoryReclaimer(self.clock, self.slow_collect, lambda: None, self.steady)
        for _ in range(20):
            self.release(COLLECT_BYTES)
            self.clock.advance(RETRIM_SECONDS)
        self.assertEqual(self.done.count(2), 1)
        self.clock.advance(200)
        self.assertEqual(self.done.count(2), 2)

    def slow_collect(self, generation: int) -> None:
        self.done.append(generation)
        self.took += 3.0 if generation == 2 else 0.0

    def test_allocator(self) -> None:
        """Trimming works or is skipped on this system."""
        limit_malloc_mmap_threshold()
        trim_malloc_heap()
