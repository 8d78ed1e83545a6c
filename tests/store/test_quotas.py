"""Arithmetic of quota windows."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from mediatord.store.interfaces.cluster_and_quotas import QUOTA_WINDOW_SLOTS, QuotaUse, get_quota_wait
from mediatord.store.sqlite.coordination_queries import add_quota_use, drop_expired_uses, remove_latest_use

PERIOD = 64.0
LIMIT = 50


class QuotaWindowTests(SynchronousTestCase):
    """A sliding window with few slots."""

    def use_quota(self, slots: list[QuotaUse], amount: int, now: float) -> tuple[list[QuotaUse], float]:
        slots = drop_expired_uses(slots, PERIOD, now)
        wait = get_quota_wait(slots, amount, limit=LIMIT, period=PERIOD, now=now)
        return (slots if wait else add_quota_use(slots, amount, period=PERIOD, now=now)), wait

    @given(st.lists(st.tuples(st.floats(0, 9), st.integers(1, LIMIT)), max_size=60))
    @settings(max_examples=100, deadline=None)
    def test_never_exceeds_limit(self, uses: list[tuple[float, int]]) -> None:
        """No period exceeds the limit; after the wait, and not long before, a refused amount is granted."""
        slots: list[QuotaUse] = []
        granted: list[QuotaUse] = []
        now = 1_800_000_000.0
        for pause, amount in uses:
            now += pause
            slots, wait = self.use_quota(slots, amount, now)
            if not wait:
                granted.append((now, amount))
                self.assertLessEqual(sum(some for at, some in granted if at > now - PERIOD), LIMIT)
                continue
            self.assertEqual(self.use_quota(slots, amount, now + wait)[1], 0.0)
            earlier = now + wait - PERIOD / QUOTA_WINDOW_SLOTS - 1e-3
            counting = sum(some for at, some in granted if earlier - PERIOD < at)
            self.assertTrue(earlier <= now or counting + amount > LIMIT)

    def test_number_of_slots_is_bounded(self) -> None:
        """Any number of small uses are kept in few slots."""
        slots: list[QuotaUse] = []
        for number in range(20_000):
            now = 1_800_000_000.0 + number * PERIOD / 10_000
            slots = add_quota_use(drop_expired_uses(slots, PERIOD, now), 1, period=PERIOD, now=now)
            self.assertLessEqual(len(slots), QUOTA_WINDOW_SLOTS + 1)
        self.assertLess(abs(sum(granted for _, granted in slots) - 10_000), 10_000 / 100)

    def test_removes_latest_use(self) -> None:
        """A return reduces the latest uses first, and part of a use may remain."""
        slots = [(1.0, 5), (2.0, 5), (3.0, 1)]
        for amount, remaining in ((0, slots), (1, slots[:2]), (3, [(1.0, 5), (2.0, 3)]), (7, [(1.0, 4)]), (99, [])):
            self.assertEqual(remove_latest_use(slots, amount), remaining)
