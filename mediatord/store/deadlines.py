"""What falls due when, in memory."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

K = TypeVar("K", int, bytes)


class Deadlines(Generic[K]):
    """
    Keys with a time each; the earliest is found in logarithmic time.

    A key that is taken out leaves its entry in the heap until it surfaces, or until such entries outnumber the
    others; so memory stays proportional to the number of keys.
    """

    def __init__(self) -> None:
        self._times: dict[K, float] = {}
        self._heap: list[tuple[float, K]] = []

    def add(self, key: K, at: float) -> None:
        """Set or move the time of a key."""
        self._times[key] = at
        heappush(self._heap, (at, key))
        self._compact()

    def discard(self, key: K) -> None:
        """Take a key out, if it is in."""
        self._times.pop(key, None)
        self._compact()

    def earliest(self) -> tuple[float, K] | None:
        """The earliest time with its key; ties go to the smaller key."""
        while self._heap:
            at, key = self._heap[0]
            if self._times.get(key) == at:
                return at, key
            heappop(self._heap)
        return None

    def take(self, now: float) -> K | None:
        """Take out and return the key with the earliest time, if that is not after `now`."""
        first = self.earliest()
        if first is None or first[0] > now:
            return None
        heappop(self._heap)
        del self._times[first[1]]
        return first[1]

    def _compact(self) -> None:
        if len(self._heap) > 2 * len(self._times) + 64:
            self._heap = [(at, key) for key, at in self._times.items()]
            heapify(self._heap)
