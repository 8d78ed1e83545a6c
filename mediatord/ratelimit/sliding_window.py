"""
Rate limits that admit exactly N in any minute (reference section 12), and what one process holds of a limit that
several share; the time is an argument.
"""

from __future__ import annotations

import math
from array import array
from collections import OrderedDict
from hashlib import blake2b

_MAX_KEY_LENGTH = 64
# Seconds; much less would be lost in a time of today.
_MIN_REFUSAL_SECONDS = 0.001
# Keys for which there is no room share so many allowances.
_SHARED_GROUPS = 4096
# Parts of a period, within which the admissions of a key count as one turn, once it has had more turns than that.
_FINE_PARTS = 600
# The same for all keys while there is no room for turns.
_COARSE_PARTS = 4


class SlidingWindowLimiter:
    """
    At most `limit` admissions for one key in any `period` seconds; a refused one costs nothing.

    Memory is bounded, and a key that was admitted within the period is never forgotten to make room, so that nobody
    gains anything by coming under many names. Beyond `max_keys`, further keys share :data:`_SHARED_GROUPS` allowances, by a
    hash that is secret to this process. Admissions at one time are one turn: beyond `max_turns` of all keys together,
    those of one key within a quarter of the period count as of the last of them, and within a 600th, if the key has
    more than 600. So a bound that is reached makes somebody wait for longer, and never admits anybody too often.

    :ivar limit: may be another one from any time on.
    """

    def __init__(self, limit: int, period: float = 60.0, max_keys: int = 20_000, max_turns: int = 65_536) -> None:
        self.limit = limit
        self.period = period
        self._max_keys = max_keys
        self._max_turns = max_turns
        self._turns = 0
        self._own: OrderedDict[int, array[float]] = OrderedDict()
        self._shared: dict[int, array[float]] = {}
        self._shared_at = -math.inf

    def __len__(self) -> int:
        """How many keys are remembered, those without an allowance of their own counted by groups."""
        return len(self._own) + len(self._shared)

    def wait(self, key: str, now: float, cost: int = 1, limit: int | None = None) -> int:
        """
        Whole seconds after which so many admissions of `key` may be had; 0 when they may be had now.

        :param limit: another one than usual.
        """
        name = hash(key)
        turns = self._own.get(name) or self._shared.get(name % _SHARED_GROUPS)
        return self._wait(turns, now, cost, self.limit if limit is None else limit)

    def admit(self, key: str, now: float, cost: int = 1, limit: int | None = None) -> int:
        """
        Admit `key` so many times and return 0, or not once and return the whole seconds it has to wait.

        :param limit: another one than usual.
        """
        name = hash(key)
        if limit is None:
            limit = self.limit
        turns = self._own.get(name)
        if turns is None:
            wait = self._wait(self._shared.get(name % _SHARED_GROUPS), now, cost, limit)
            if not wait:
                self._add(self._begin(name, now), now, cost)
            return wait
        wait = self._wait(turns, now, cost, limit)
        if not wait:
            self._own.move_to_end(name)
            self._add(turns, now, cost)
        return wait

    def refund(self, key: str, cost: int = 1) -> None:
        """Take back the latest admissions of `key`, as far as there are any."""
        name = hash(key)
        turns = self._own.get(name) or self._shared.get(name % _SHARED_GROUPS)
        while turns is not None and len(turns) > 1 and cost:
            some = min(cost, int(turns[-1]))
            cost -= some
            turns[0] -= some
            turns[-1] -= some
            if not turns[-1]:
                del turns[-2:]
                self._turns -= 1

    def _wait(self, turns: array[float] | None, now: float, cost: int, limit: int) -> int:
        if turns is None:
            return 0 if cost <= limit else math.ceil(self.period)
        # A clock set back must not shut anybody out for longer than a period.
        if len(turns) > 1 and not now - self.period < turns[1] <= now:
            self._let_go(turns, now)
        too_many = turns[0] + cost - limit
        if too_many <= 0:
            return 0
        for at in range(1, len(turns), 2):
            too_many -= turns[at + 1]
            if too_many <= 0:
                return max(1, math.ceil(turns[at] + self.period - now))
        return math.ceil(self.period)

    def _let_go(self, turns: array[float], now: float) -> None:
        """Of what is over."""
        oldest, at = now - self.period, 1
        while at < len(turns) and not oldest < turns[at] <= now:
            turns[0] -= turns[at + 1]
            at += 2
        del turns[1:at]
        self._turns -= at // 2

    def _add(self, turns: array[float], now: float, cost: int) -> None:
        turns[0] += cost
        size = len(turns)
        if size > 1:
            last = turns[-2]
            parts = _COARSE_PARTS if self._turns >= self._max_turns else _FINE_PARTS if size > 2 * _FINE_PARTS else 0
            if last == now or (parts and self._is_one_part(last, now, parts)):
                turns[-2] = now
                turns[-1] += cost
                return
        turns.append(now)
        turns.append(cost)
        self._turns += 1

    def _is_one_part(self, last: float, now: float, parts: int) -> bool:
        step = self.period / parts
        return last < now and last // step == now // step

    def _begin(self, name: int, now: float) -> array[float]:
        """Where admissions of a key are noted that has no allowance of its own yet."""
        self._forget(now)
        shared = self._shared.get(name % _SHARED_GROUPS)
        if len(self._own) < self._max_keys:
            turns = self._own[name] = self._copied(shared)
            return turns
        self._shared_at = now
        if shared is None:
            shared = self._shared[name % _SHARED_GROUPS] = array("d", (0.0,))
        return shared

    def _copied(self, shared: array[float] | None) -> array[float]:
        """What those had together whom a key shared with: as much as it can have had itself, and more."""
        if shared is None or len(shared) == 1:
            return array("d", (0.0,))
        turns = array("d", shared)
        if self._turns >= self._max_turns:
            turns = array("d", (shared[0], shared[-2], shared[0]))
        self._turns += len(turns) // 2
        return turns

    def _forget(self, now: float) -> None:
        """Make room for one more, if any is over; two at a time, so that no call is slow and all of them go."""
        for _ in range(2):
            if not self._own:
                break
            turns = next(iter(self._own.values()))
            if len(turns) > 1 and self._is_recent(turns[-2], now):
                break
            self._turns -= len(turns) // 2
            self._own.popitem(last=False)
        if self._shared and not self._is_recent(self._shared_at, now):
            self._turns -= sum(len(turns) // 2 for turns in self._shared.values())
            self._shared.clear()

    def _is_recent(self, moment: float, now: float) -> bool:
        return now - self.period < moment <= now


class QuotaLease:
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

    def remaining(self, now: float) -> int:
        """How much may be used; below zero, how much is owed."""
        if not self._in_force(self._until, now):
            self._left = 0
        return self._left

    def add_granted(self, amount: int, asked_at: float, now: float) -> None:
        """So much was taken: when is not known, but not before it was asked for."""
        self._left = self.remaining(now) + amount
        self._until = asked_at + self._period

    def try_use(self, amount: int, now: float) -> bool:
        """Use so much of what is left, if there is."""
        if self.remaining(now) < amount:
            return False
        self._left -= amount
        return True

    def charge_deferred(self, amount: int, now: float) -> None:
        """Use so much, whether or not it is left."""
        if self.remaining(now) < amount:
            self._until = now + self._period
        self._left -= amount

    def refund(self, amount: int, now: float) -> None:
        """So much was used for nothing. What was used longer than a period ago is no use to anybody."""
        if self._in_force(self._until, now):
            self._left += amount

    def trim(self, most: int, now: float) -> int:
        """Let go of what is left beyond `most`, and say how much that was."""
        excess = self.remaining(now) - most
        if excess <= 0:
            return 0
        self._left = most
        return excess

    def note_refusal(self, amount: int, wait: float, now: float) -> None:
        """So much was not to be had, and will not be for so many seconds."""
        self._refused = amount
        self._refused_until = now + min(max(wait, _MIN_REFUSAL_SECONDS), self._period)

    def clear_refusal(self) -> None:
        """What was refused may be had again."""
        self._refused_until = 0.0

    def wait(self, amount: int, now: float) -> float:
        """Seconds for which there is no point in asking for what is missing to use so much."""
        missing = amount - self.remaining(now)
        if missing <= 0 or missing < self._refused or not self._in_force(self._refused_until, now):
            return 0.0
        return self._refused_until - now

    def limit_request(self, wanted: int, needed: int, now: float) -> int:
        """How much to ask for: what is wanted, but a quarter of what was refused lately, and not less than needed."""
        if self._in_force(self._refused_until, now):
            wanted = min(wanted, self._refused // 4)
        return max(wanted, needed)

    def is_idle(self, now: float) -> bool:
        """Nothing is left, owed or refused."""
        return not self.remaining(now) and not self._in_force(self._refused_until, now)

    def _in_force(self, until: float, now: float) -> bool:
        # A clock set back must not shut anybody out for much longer than a period.
        return 0 < until - now < self._period + 1


def shorten_key(key: str) -> str | bytes:
    """What a key is kept as: a stranger chooses how long some of them are."""
    if len(key) <= _MAX_KEY_LENGTH:
        return key
    return blake2b(key.encode("utf-8", "surrogatepass"), digest_size=16).digest()
