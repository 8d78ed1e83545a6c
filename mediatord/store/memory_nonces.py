"""The nonces of the memory store."""

from __future__ import annotations

from mediatord.errors import ReplayMemoryFull
from mediatord.interfaces import KEPT_BEYOND
from mediatord.store.deadlines import Deadlines


class Nonces:
    """What was received before, at most so many."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._claims: dict[bytes, float] = {}
        self._deadlines: Deadlines[bytes] = Deadlines()

    def holds(self, key: bytes, now: float) -> bool:
        """Whether it is claimed now."""
        return self._claims.get(key, now) > now

    def claim(self, key: bytes, until: float, now: float, share: float = 1.0) -> bool:
        """:raise ReplayMemoryFull: there is no room for it."""
        if self.holds(key, now):
            return False
        self.refuse_full(key, share)
        self.release(key)
        self._claims[key] = until
        self._deadlines.add(key, until)
        return True

    def refuse_full(self, key: bytes, share: float = 1.0) -> None:
        """:raise ReplayMemoryFull: there is no room for a claim that is none, or none any more."""
        if key not in self._claims and len(self._claims) >= int(share * self._capacity):
            raise ReplayMemoryFull

    def release(self, key: bytes) -> None:
        self._claims.pop(key, None)
        self._deadlines.discard(key)

    def prune(self, now: float) -> int:
        pruned = 0
        while (key := self._deadlines.take(now - KEPT_BEYOND)) is not None:
            del self._claims[key]
            pruned += 1
        return pruned
