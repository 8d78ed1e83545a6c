"""
Rate limits that admit exactly N in any minute (reference section 12), and what one process holds of a limit that
several share; the time is an argument.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from hashlib import blake2b

_LONGEST_KEY = 64
# Seconds; much less would be lost in a time of today.
_SHORTEST_REFUSAL = 0.001


class SlidingWindow:
    """
    At most `limit` admissions for one key in any `period` seconds; a refused one costs nothing.

    Memory is bounded: keys whose admissions are all older than the period are forgotten, and beyond `max_keys` the
    one that was admitted longest ago.

    :ivar limit: may be another one from any time on.
    """

    def __init__(self, limit: int, period: float = 60.0, max_keys: int = 100_000) -> None:
        self.limit = limit
        self.period = period
        self._max_keys = max_keys
        self._admitted: OrderedDict[str | bytes, deque[float]] = OrderedDict()

    def __len__(self) -> int:
        """How many keys are remembered."""
        return len(self._admitted)

    def wait(self, key: str, now: float, cost: int = 1, limit: int | None = None) -> int:
        """
        Whole seconds after which so many admissions of `key` may be had; 0 when they may be had now.

        :param limit: a lower one than usual.
        """
        if limit is None:
            limit = self.limit
        times = self._admitted.get(short_key(key))
        if times is None:
            return 0 if cost <= limit else math.ceil(self.period)
        # A clock set back must not shut anybody out for longer than a period.
        while times and not now - self.period < times[0] <= now:
            times.popleft()
        too_many = len(times) + cost - limit
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
        short = short_key(key)
        times = self._admitted.get(short)
        if times is None:
            self._forget(now)
            times = self._admitted[short] = deque()
        else:
            self._admitted.move_to_end(short)
        times.extend([now] * cost)
        return 0

    def give_back(self, key: str, cost: int = 1) -> None:
        """Take back the latest admissions of `key`, as far as there are any."""
        times = self._admitted.get(short_key(key), deque())
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


class Lot:
    """
    What one process holds of an allowance that several share: what it took and did not use yet, or used and did not
    take yet, and what it was refused. All of that is over after `period` seconds.
    """

    __slots__ = ("_left", "_period", "_refused", "_refused_until", "_until")

    def __init__(self, period: float) -> None:
        self._period = period
        self._left = 0
        self._until = 0.0
        self._refused = 0
        self._refused_until = 0.0

    def left(self, now: float) -> int:
        """How much may be used; below zero, how much is owed."""
        if not self._in_force(self._until, now):
            self._left = 0
        return self._left

    def took(self, amount: int, asked_at: float, now: float) -> None:
        """So much was taken: when is not known, but not before it was asked for."""
        self._left = self.left(now) + amount
        self._until = asked_at + self._period

    def use(self, amount: int, now: float) -> bool:
        """Use so much of what is left, if there is."""
        if self.left(now) < amount:
            return False
        self._left -= amount
        return True

    def owe(self, amount: int, now: float) -> None:
        """Use so much, whether or not it is left."""
        if self.left(now) < amount:
            self._until = now + self._period
        self._left -= amount

    def return_(self, amount: int, now: float) -> None:
        """So much was used for nothing. What was used longer than a period ago is no use to anybody."""
        if self._in_force(self._until, now):
            self._left += amount

    def keep(self, most: int, now: float) -> int:
        """Let go of what is left beyond `most`, and say how much that was."""
        excess = self.left(now) - most
        if excess <= 0:
            return 0
        self._left = most
        return excess

    def refused(self, amount: int, wait: float, now: float) -> None:
        """So much was not to be had, and will not be for so many seconds."""
        self._refused = amount
        self._refused_until = now + min(max(wait, _SHORTEST_REFUSAL), self._period)

    def ask_again(self) -> None:
        """What was refused may be had again."""
        self._refused_until = 0.0

    def wait(self, amount: int, now: float) -> float:
        """Seconds for which there is no point in asking for what is missing to use so much."""
        missing = amount - self.left(now)
        if missing <= 0 or missing < self._refused or not self._in_force(self._refused_until, now):
            return 0.0
        return self._refused_until - now

    def worth_asking(self, wanted: int, needed: int, now: float) -> int:
        """How much to ask for: what is wanted, but a quarter of what was refused lately, and not less than needed."""
        if self._in_force(self._refused_until, now):
            wanted = min(wanted, self._refused // 4)
        return max(wanted, needed)

    def over(self, now: float) -> bool:
        """Nothing is left, owed or refused."""
        return not self.left(now) and not self._in_force(self._refused_until, now)

    def _in_force(self, until: float, now: float) -> bool:
        # A clock set back must not shut anybody out for much longer than a period.
        return 0 < until - now < self._period + 1


def short_key(key: str) -> str | bytes:
    """What a key is kept as: a stranger chooses how long some of them are."""
    if len(key) <= _LONGEST_KEY:
        return key
    return blake2b(key.encode("utf-8", "surrogatepass"), digest_size=16).digest()
