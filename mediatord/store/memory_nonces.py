"""The nonces of the memory store."""

from __future__ import annotations

from collections import OrderedDict

from mediatord.interfaces import KEPT_BEYOND
from mediatord.store.deadlines import Deadlines


class Nonces:
    """What was received before, at most so many; the oldest goes first."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._claims: OrderedDict[bytes, float] = OrderedDict()
        self._deadlines: Deadlines[bytes] = Deadlines()

    def holds(self, key: bytes, now: float) -> bool:
        """Whether it is claimed now."""
        return self._claims.get(key, now) > now

    def claim(self, key: bytes, until: float, now: float) -> bool:
        if self.holds(key, now):
            return False
        self.release(key)
        self._claims[key] = until
        self._deadlines.add(key, until)
        if len(self._claims) > self._capacity:
            oldest, _ = self._claims.popitem(last=False)
            self._deadlines.discard(oldest)
        return True

    def release(self, key: bytes) -> None:
        self._claims.pop(key, None)
        self._deadlines.discard(key)

    def prune(self, now: float) -> int:
        pruned = 0
        while (key := self._deadlines.take(now - KEPT_BEYOND)) is not None:
            del self._claims[key]
            pruned += 1
        return pruned
