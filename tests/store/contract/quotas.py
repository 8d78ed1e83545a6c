"""Contract for quotas that nodes share."""

from __future__ import annotations

from twisted.internet.defer import gatherResults

from tests.store.contract.cluster_base import LONG, ClusterStoreContract


class QuotaContract(ClusterStoreContract):
    """
    Contract of `IClusterStore` for quotas.

    :ivar delta: seconds by which a wait may be off where time passes by itself.
    """

    delta = 0.0

    async def use_quota(self, amount: int, *, limit: int = 10, period: float = LONG, key: bytes = b"key") -> float:
        return await self.cluster.take_quota(key, amount, limit=limit, period=period)

    def assert_wait(self, wait: float, expected: float, period: float = LONG) -> None:
        self.assertLessEqual(abs(wait - expected), self.delta + period / 100)
        self.assertGreater(wait, 0.0)

    async def test_counts_up_to_limit(self) -> None:
        """Uses add up to the limit; a refusal uses nothing."""
        self.assertEqual(await self.use_quota(4), 0.0)
        self.assertEqual(await self.second_store.cluster.take_quota(b"key", 4, limit=10, period=LONG), 0.0)
        self.assert_wait(await self.use_quota(3), LONG)
        self.assertEqual(await self.use_quota(2), 0.0)
        self.assert_wait(await self.use_quota(1), LONG)
        self.assertEqual(await self.use_quota(0), 0.0)

    async def test_amount_above_limit_waits_a_period(self) -> None:
        """The wait for an amount above the limit is a whole period."""
        self.assertEqual(await self.use_quota(11), LONG)
        self.assertEqual(await self.use_quota(10), 0.0)

    async def test_keys_are_separate(self) -> None:
        """Each key has its own quota; any bytes are a key."""
        keys = (b"", b"\x00", b"\x00\x00", b"\xff" * 32, b"key")
        for key in keys:
            self.assertEqual(await self.use_quota(10, key=key), 0.0)
        for key in keys:
            self.assert_wait(await self.use_quota(1, key=key), LONG)

    async def test_waits_until_enough_expires(self) -> None:
        """A use counts for a period; the wait is until enough of them have expired."""
        half = self.long_lease
        period = 2 * half
        self.assertEqual(await self.use_quota(6, period=period), 0.0)
        await self.pass_time(half)
        self.assertEqual(await self.use_quota(4, period=period), 0.0)
        self.assert_wait(await self.use_quota(1, period=period), half, period)
        self.assert_wait(await self.use_quota(6, period=period), half, period)
        self.assert_wait(await self.use_quota(7, period=period), period, period)
        await self.pass_time(half + period / 100)
        self.assertEqual(await self.use_quota(6, period=period), 0.0)
        self.assertGreater(await self.use_quota(1, period=period), 0.0)

    async def test_returned_quota_can_be_used(self) -> None:
        """A returned amount can be used again, up to the amount used."""
        await self.use_quota(3)
        await self.use_quota(4)
        await self.cluster.return_quota(b"key", 5)
        self.assertGreater(await self.use_quota(9), 0.0)
        self.assertEqual(await self.use_quota(8), 0.0)
        await self.cluster.return_quota(b"key", 1000)
        await self.cluster.return_quota(b"key", 1)
        await self.cluster.return_quota(b"unknown", 1)
        for key in (b"key", b"unknown"):
            self.assertGreater(await self.use_quota(11, key=key), 0.0)
            self.assertEqual(await self.use_quota(10, key=key), 0.0)

    async def test_return_undoes_latest_use(self) -> None:
        """A return undoes the latest uses, so that the remaining ones expire first."""
        period = 2 * self.short
        await self.use_quota(5, period=period)
        await self.pass_time(self.short)
        await self.use_quota(5, period=period)
        await self.cluster.return_quota(b"key", 6)
        self.assertEqual(await self.use_quota(6, period=period), 0.0)
        await self.pass_time(self.short + period / 100)
        self.assertEqual(await self.use_quota(4, period=period), 0.0)

    async def test_many_small_uses_expire_on_time(self) -> None:
        """Any number of small uses expire neither early nor much late."""
        for _ in range(40):
            uses = [self.cluster.take_quota(b"key", 1, limit=1000, period=LONG) for _ in range(25)]
            self.assertEqual(await gatherResults(uses), [0.0] * 25)
            self.clock.advance(LONG / 80)
        self.assertGreater(await self.use_quota(1, limit=1000), 0.0)

    async def test_concurrent_uses_stay_within_limit(self) -> None:
        """Concurrent uses of all processes get exactly the limit."""
        stores = (self.store, self.second_store)
        deferreds = [stores[number % 2].cluster.take_quota(b"key", 1, limit=25, period=LONG) for number in range(60)]
        self.assertEqual((await gatherResults(deferreds)).count(0.0), 25)
        deferreds = [stores[number % 2].cluster.take_quota(b"lots", 4, limit=25, period=LONG) for number in range(20)]
        self.assertEqual((await gatherResults(deferreds)).count(0.0), 6)
