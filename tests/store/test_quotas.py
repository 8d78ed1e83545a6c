"""What is left of an allowance."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from mediatord.store.interfaces.cluster_and_quotas import QUOTA_WINDOW_SLOTS, QuotaUse, get_quota_wait
from mediatord.store.sqlite.coordination_queries import add_quota_use, drop_expired_uses, remove_latest_use

PERIOD = 64.0
LIMIT = 50


class AllowanceTests(SynchronousTestCase):
    """A sliding window made of few lots."""

    def take(self, lots: list[QuotaUse], amount: int, now: float) -> tuple[list[QuotaUse], float]:
        lots = drop_expired_uses(lots, PERIOD, now)
        wait = get_quota_wait(lots, amount, limit=LIMIT, period=PERIOD, now=now)
        return (lots if wait else add_quota_use(lots, amount, period=PERIOD, now=now)), wait

    @given(st.lists(st.tuples(st.floats(0, 9), st.integers(1, LIMIT)), max_size=60))
    @settings(max_examples=100, deadline=None)
    def test_never_more_than_the_limit(self, takings: list[tuple[float, int]]) -> None:
        """In no period more is taken than the limit; what was refused can be had after the wait, not long before."""
        lots: list[QuotaUse] = []
        taken: list[QuotaUse] = []
        now = 1_800_000_000.0
        for pause, amount in takings:
            now += pause
            lots, wait = self.take(lots, amount, now)
            if not wait:
                taken.append((now, amount))
                self.assertLessEqual(sum(some for at, some in taken if at > now - PERIOD), LIMIT)
                continue
            self.assertEqual(self.take(lots, amount, now + wait)[1], 0.0)
            early = now + wait - PERIOD / QUOTA_WINDOW_SLOTS - 1e-3
            counting = sum(some for at, some in taken if early - PERIOD < at)
            self.assertTrue(early <= now or counting + amount > LIMIT)

    def test_lots_are_few(self) -> None:
        """However many small takings there are, few lots are kept of them."""
        lots: list[QuotaUse] = []
        for number in range(20_000):
            now = 1_800_000_000.0 + number * PERIOD / 10_000
            lots = add_quota_use(drop_expired_uses(lots, PERIOD, now), 1, period=PERIOD, now=now)
            self.assertLessEqual(len(lots), QUOTA_WINDOW_SLOTS + 1)
        self.assertLess(abs(sum(taken for _, taken in lots) - 10_000), 10_000 / 100)

    def test_latest_is_undone(self) -> None:
        """What is put back comes off the end, and part of a lot may stay."""
        lots = [(1.0, 5), (2.0, 5), (3.0, 1)]
        for amount, left in ((0, lots), (1, lots[:2]), (3, [(1.0, 5), (2.0, 3)]), (7, [(1.0, 4)]), (99, [])):
            self.assertEqual(remove_latest_use(lots, amount), left)
