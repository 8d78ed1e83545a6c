"""Rate limits that admit exactly N in any minute (reference section 12); the time is an argument."""

from __future__ import annotations

import math
from collections import OrderedDict, deque


class SlidingWindow:
    """
    At most `limit` admissions for one key in any `period` seconds; a refused one costs nothing.

    Memory is bounded: beyond `max_keys` the key that was admitted longest ago is forgotten.
    """

    def __init__(self, limit: int, period: float = 60.0, max_keys: int = 100_000) -> None:
        self.limit = limit
        self.period = period
        self._max_keys = max_keys
        self._admitted: OrderedDict[str, deque[float]] = OrderedDict()

    def wait(self, key: str, now: float) -> int:
        """Whole seconds after which `key` is admitted again; 0 when it would be admitted now."""
        times = self._admitted.get(key)
        if times is None:
            return 0
        # A clock set back must not shut anybody out for longer than a period.
        while times and not now - self.period < times[0] <= now:
            times.popleft()
        if len(times) < self.limit:
            return 0
        return max(1, math.ceil(times[0] + self.period - now))

    def admit(self, key: str, now: float) -> int:
        """Admit `key` and return 0, or return the whole seconds it has to wait."""
        wait = self.wait(key, now)
        if wait:
            return wait
        times = self._admitted.get(key)
        if times is None:
            times = self._admitted[key] = deque(maxlen=self.limit)
            if len(self._admitted) > self._max_keys:
                self._admitted.popitem(last=False)
        else:
            self._admitted.move_to_end(key)
        times.append(now)
        return 0
