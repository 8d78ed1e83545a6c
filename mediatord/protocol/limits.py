"""Rate limits that admit exactly N in any minute (reference section 12); the time is an argument."""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from hashlib import blake2b

_LONGEST_KEY = 64


class SlidingWindow:
    """
    At most `limit` admissions for one key in any `period` seconds; a refused one costs nothing.

    Memory is bounded: keys whose admissions are all older than the period are forgotten, and beyond `max_keys` the
    one that was admitted longest ago.
    """

    def __init__(self, limit: int, period: float = 60.0, max_keys: int = 100_000) -> None:
        self.limit = limit
        self.period = period
        self._max_keys = max_keys
        self._admitted: OrderedDict[str | bytes, deque[float]] = OrderedDict()

    def wait(self, key: str, now: float, cost: int = 1) -> int:
        """Whole seconds after which so many admissions of `key` may be had; 0 when they may be had now."""
        times = self._admitted.get(_short(key))
        if times is None:
            return 0 if cost <= self.limit else math.ceil(self.period)
        # A clock set back must not shut anybody out for longer than a period.
        while times and not now - self.period < times[0] <= now:
            times.popleft()
        too_many = len(times) + cost - self.limit
        if too_many <= 0:
            return 0
        if too_many > len(times):
            return math.ceil(self.period)
        return max(1, math.ceil(times[too_many - 1] + self.period - now))

    def admit(self, key: str, now: float, cost: int = 1) -> int:
        """Admit `key` so many times and return 0, or not once and return the whole seconds it has to wait."""
        wait = self.wait(key, now, cost)
        if wait:
            return wait
        short = _short(key)
        times = self._admitted.get(short)
        if times is None:
            self._forget(now)
            times = self._admitted[short] = deque(maxlen=self.limit)
        else:
            self._admitted.move_to_end(short)
        times.extend([now] * cost)
        return 0

    def give_back(self, key: str, cost: int = 1) -> None:
        """Take back the latest admissions of `key`, as far as there are any."""
        times = self._admitted.get(_short(key), deque())
        for _ in range(min(cost, len(times))):
            times.pop()

    def _forget(self, now: float) -> None:
        """Make room for one more key; two old ones at a time, so that no call is slow and all of them go."""
        for _ in range(2):
            if not self._admitted:
                return
            oldest = next(iter(self._admitted.values()))
            if len(self._admitted) < self._max_keys and oldest and oldest[-1] > now - self.period:
                return
            self._admitted.popitem(last=False)


def _short(key: str) -> str | bytes:
    """What a key is kept as: a stranger chooses how long some of them are."""
    if len(key) <= _LONGEST_KEY:
        return key
    return blake2b(key.encode("utf-8", "surrogatepass"), digest_size=16).digest()
