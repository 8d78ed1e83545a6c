"""
Sliding-window rate limits that admit exactly N requests in any period (reference section 12), and leases of a limit
that several processes share.

The time is a parameter.
"""

from __future__ import annotations

import math
from array import array
from collections import OrderedDict
from hashlib import blake2b

_MAX_KEY_LENGTH = 64
# In seconds; smaller values would be lost in a float of the current time.
_MIN_REFUSAL_SECONDS = 0.001
# Number of groups in which keys beyond `max_keys` share their allowance.
_SHARED_GROUPS = 4096
# A key with more entries than this merges admissions within this fraction of a period into one entry.
_FINE_PARTS = 600
# Likewise for all keys while `max_entries` is reached.
_COARSE_PARTS = 4


class SlidingWindowLimiter:
    """
    At most `limit` admissions per key in any `period` seconds; refused requests cost nothing.

    Memory is bounded, and a key with recent admissions is never evicted, so using many keys gains nothing. Keys
    beyond `max_keys` share :data:`_SHARED_GROUPS` allowances by a hash that is secret to the process. Admissions at
    the same time form one entry; beyond `max_entries` in total, the admissions of a key within a quarter of the
    period are counted at the latest of them, and within a 600th if the key has more than 600. Reaching a bound only
    delays clients; it never admits more than the limit.

    :ivar limit: may be changed at any time.
    """

    def __init__(self, limit: int, period: float = 60.0, max_keys: int = 20_000, max_entries: int = 65_536) -> None:
        self.limit = limit
        self.period = period
        self._max_keys = max_keys
        self._max_entries = max_entries
        self._entry_count = 0
        self._entries: OrderedDict[int, array[float]] = OrderedDict()
        self._shared_entries: dict[int, array[float]] = {}
        self._shared_at = -math.inf

    def __len__(self) -> int:
        """Number of keys; shared groups count as one each."""
        return len(self._entries) + len(self._shared_entries)

    def wait(self, key: str, now: float, cost: int = 1, limit: int | None = None) -> int:
        """
        Whole seconds until `cost` admissions are possible; 0 if they are now.

        :param limit: overrides the usual one.
        """
        name = hash(key)
        entries = self._entries.get(name) or self._shared_entries.get(name % _SHARED_GROUPS)
        return self._wait(entries, now, cost, self.limit if limit is None else limit)

    def admit(self, key: str, now: float, cost: int = 1, limit: int | None = None) -> int:
        """
        Admit `cost` times and return 0, or not at all and return the whole seconds to wait.

        :param limit: overrides the usual one.
        """
        name = hash(key)
        if limit is None:
            limit = self.limit
        entries = self._entries.get(name)
        if entries is None:
            wait = self._wait(self._shared_entries.get(name % _SHARED_GROUPS), now, cost, limit)
            if not wait:
                self._add(self._open_entries(name, now), now, cost)
            return wait
        wait = self._wait(entries, now, cost, limit)
        if not wait:
            self._entries.move_to_end(name)
            self._add(entries, now, cost)
        return wait

    def refund(self, key: str, cost: int = 1) -> None:
        """Undo the latest admissions, as far as there are any."""
        name = hash(key)
        entries = self._entries.get(name) or self._shared_entries.get(name % _SHARED_GROUPS)
        while entries is not None and len(entries) > 1 and cost:
            amount = min(cost, int(entries[-1]))
            cost -= amount
            entries[0] -= amount
            entries[-1] -= amount
            if not entries[-1]:
                del entries[-2:]
                self._entry_count -= 1

    def _wait(self, entries: array[float] | None, now: float, cost: int, limit: int) -> int:
        if entries is None:
            return 0 if cost <= limit else math.ceil(self.period)
        # A clock set back must not shut anybody out for longer than a period.
        if len(entries) > 1 and not now - self.period < entries[1] <= now:
            self._drop_expired(entries, now)
        too_many = entries[0] + cost - limit
        if too_many <= 0:
            return 0
        for at in range(1, len(entries), 2):
            too_many -= entries[at + 1]
            if too_many <= 0:
                return max(1, math.ceil(entries[at] + self.period - now))
        return math.ceil(self.period)

    def _drop_expired(self, entries: array[float], now: float) -> None:
        """Drop entries that are older than a period."""
        oldest, at = now - self.period, 1
        while at < len(entries) and not oldest < entries[at] <= now:
            entries[0] -= entries[at + 1]
            at += 2
        del entries[1:at]
        self._entry_count -= at // 2

    def _add(self, entries: array[float], now: float, cost: int) -> None:
        entries[0] += cost
        size = len(entries)
        if size > 1:
            last = entries[-2]
            parts = (
                _COARSE_PARTS
                if self._entry_count >= self._max_entries
                else _FINE_PARTS
                if size > 2 * _FINE_PARTS
                else 0
            )
            if last == now or (parts and self._is_one_part(last, now, parts)):
                entries[-2] = now
                entries[-1] += cost
                return
        entries.append(now)
        entries.append(cost)
        self._entry_count += 1

    def _is_one_part(self, last: float, now: float, parts: int) -> bool:
        step = self.period / parts
        return last < now and last // step == now // step

    def _open_entries(self, name: int, now: float) -> array[float]:
        """The entries of a key that has none of its own yet."""
        self._forget(now)
        shared = self._shared_entries.get(name % _SHARED_GROUPS)
        if len(self._entries) < self._max_keys:
            entries = self._entries[name] = self._copied(shared)
            return entries
        self._shared_at = now
        if shared is None:
            shared = self._shared_entries[name % _SHARED_GROUPS] = array("d", (0.0,))
        return shared

    def _copied(self, shared: array[float] | None) -> array[float]:
        """Initial entries of a key that used a shared group: those of the group, an upper bound of its own."""
        if shared is None or len(shared) == 1:
            return array("d", (0.0,))
        entries = array("d", shared)
        if self._entry_count >= self._max_entries:
            entries = array("d", (shared[0], shared[-2], shared[0]))
        self._entry_count += len(entries) // 2
        return entries

    def _forget(self, now: float) -> None:
        """Drop up to two expired keys, so that the table shrinks without any slow call."""
        for _ in range(2):
            if not self._entries:
                break
            entries = next(iter(self._entries.values()))
            if len(entries) > 1 and self._is_recent(entries[-2], now):
                break
            self._entry_count -= len(entries) // 2
            self._entries.popitem(last=False)
        if self._shared_entries and not self._is_recent(self._shared_at, now):
            self._entry_count -= sum(len(entries) // 2 for entries in self._shared_entries.values())
            self._shared_entries.clear()

    def _is_recent(self, moment: float, now: float) -> bool:
        return now - self.period < moment <= now


class QuotaLease:
    """
    The part of a shared limit that one process holds: acquired but unused, used but not yet acquired (debt), and
    refused amounts. Everything lapses after `period` seconds.
    """

    __slots__ = ("_left", "_period", "_refused", "_refused_until", "_until")

    def __init__(self, period: float) -> None:
        self._period = period
        self._left = 0
        self._until = 0.0
        self._refused = 0
        self._refused_until = 0.0

    def remaining(self, now: float) -> int:
        """Amount that may be used; negative if there is debt."""
        if not self._in_force(self._until, now):
            self._left = 0
        return self._left

    def add_granted(self, amount: int, asked_at: float, now: float) -> None:
        """Add an acquired amount. It counts from the time of the request, the earliest possible time of the grant."""
        self._left = self.remaining(now) + amount
        self._until = asked_at + self._period

    def try_use(self, amount: int, now: float) -> bool:
        """Use an amount if it is available."""
        if self.remaining(now) < amount:
            return False
        self._left -= amount
        return True

    def charge_deferred(self, amount: int, now: float) -> None:
        """Use an amount, incurring debt if necessary."""
        if self.remaining(now) < amount:
            self._until = now + self._period
        self._left -= amount

    def refund(self, amount: int, now: float) -> None:
        """Undo a use. Amounts used more than a period ago are ignored."""
        if self._in_force(self._until, now):
            self._left += amount

    def trim(self, most: int, now: float) -> int:
        """Give up what exceeds `most`; returns that amount."""
        excess = self.remaining(now) - most
        if excess <= 0:
            return 0
        self._left = most
        return excess

    def note_refusal(self, amount: int, wait: float, now: float) -> None:
        """Record that an amount was refused, and for how many seconds."""
        self._refused = amount
        self._refused_until = now + min(max(wait, _MIN_REFUSAL_SECONDS), self._period)

    def clear_refusal(self) -> None:
        """Forget the refusal."""
        self._refused_until = 0.0

    def wait(self, amount: int, now: float) -> float:
        """Seconds during which it is pointless to request what is missing for `amount`."""
        missing = amount - self.remaining(now)
        if missing <= 0 or missing < self._refused or not self._in_force(self._refused_until, now):
            return 0.0
        return self._refused_until - now

    def limit_request(self, wanted: int, needed: int, now: float) -> int:
        """Amount to request: `wanted`, but a quarter of a recent refusal at most, and `needed` at least."""
        if self._in_force(self._refused_until, now):
            wanted = min(wanted, self._refused // 4)
        return max(wanted, needed)

    def is_idle(self, now: float) -> bool:
        """Whether there is neither amount, debt nor refusal."""
        return not self.remaining(now) and not self._in_force(self._refused_until, now)

    def _in_force(self, until: float, now: float) -> bool:
        # A clock that was set back must not block anybody for much longer than a period.
        return 0 < until - now < self._period + 1


def shorten_key(key: str) -> str | bytes:
    """The form in which a key is stored; clients determine the length of amount keys."""
    if len(key) <= _MAX_KEY_LENGTH:
        return key
    return blake2b(key.encode("utf-8", "surrogatepass"), digest_size=16).digest()
