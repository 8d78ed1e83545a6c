"""What is shared out among nodes."""

from __future__ import annotations

from twisted.internet.defer import gatherResults

from tests.store.contract.cluster_base import LONG, ClusterStoreContract


class QuotaContract(ClusterStoreContract):
    """
    Promises of `IClusterStore` about allowances.

    :ivar delta: seconds by which a wait may be off where time passes by itself.
    """

    delta = 0.0

    async def take(self, amount: int, *, limit: int = 10, period: float = LONG, key: bytes = b"key") -> float:
        return await self.cluster.take_quota(key, amount, limit=limit, period=period)

    def assert_wait(self, wait: float, expected: float, period: float = LONG) -> None:
        self.assertLessEqual(abs(wait - expected), self.delta + period / 100)
        self.assertGreater(wait, 0.0)

    async def test_limit(self) -> None:
        """Takings are counted together until the limit is reached, and a refusal takes nothing."""
        self.assertEqual(await self.take(4), 0.0)
        self.assertEqual(await self.neighbour.cluster.take_quota(b"key", 4, limit=10, period=LONG), 0.0)
        self.assert_wait(await self.take(3), LONG)
        self.assertEqual(await self.take(2), 0.0)
        self.assert_wait(await self.take(1), LONG)
        self.assertEqual(await self.take(0), 0.0)

    async def test_more_than_the_limit(self) -> None:
        """What can never be had has to be waited for as long as a whole period."""
        self.assertEqual(await self.take(11), LONG)
        self.assertEqual(await self.take(10), 0.0)

    async def test_keys_are_apart(self) -> None:
        """Each key has its own allowance; any bytes are a key."""
        keys = (b"", b"\x00", b"\x00\x00", b"\xff" * 32, b"key")
        for key in keys:
            self.assertEqual(await self.take(10, key=key), 0.0)
        for key in keys:
            self.assert_wait(await self.take(1, key=key), LONG)

    async def test_window(self) -> None:
        """What was taken counts for a period, and the wait is for as much of it as is needed."""
        half = self.roomy
        period = 2 * half
        self.assertEqual(await self.take(6, period=period), 0.0)
        await self.pass_time(half)
        self.assertEqual(await self.take(4, period=period), 0.0)
        self.assert_wait(await self.take(1, period=period), half, period)
        self.assert_wait(await self.take(6, period=period), half, period)
        self.assert_wait(await self.take(7, period=period), period, period)
        await self.pass_time(half + period / 100)
        self.assertEqual(await self.take(6, period=period), 0.0)
        self.assertGreater(await self.take(1, period=period), 0.0)

    async def test_put_back(self) -> None:
        """What is put back can be had again, as far as it was taken."""
        await self.take(3)
        await self.take(4)
        await self.cluster.return_quota(b"key", 5)
        self.assertGreater(await self.take(9), 0.0)
        self.assertEqual(await self.take(8), 0.0)
        await self.cluster.return_quota(b"key", 1000)
        await self.cluster.return_quota(b"key", 1)
        await self.cluster.return_quota(b"unknown", 1)
        for key in (b"key", b"unknown"):
            self.assertGreater(await self.take(11, key=key), 0.0)
            self.assertEqual(await self.take(10, key=key), 0.0)

    async def test_latest_is_put_back(self) -> None:
        """It is the latest takings that are undone, so that what is left is over first."""
        period = 2 * self.short
        await self.take(5, period=period)
        await self.pass_time(self.short)
        await self.take(5, period=period)
        await self.cluster.return_quota(b"key", 6)
        self.assertEqual(await self.take(6, period=period), 0.0)
        await self.pass_time(self.short + period / 100)
        self.assertEqual(await self.take(4, period=period), 0.0)

    async def test_many_takings(self) -> None:
        """However many small takings there are, they count until they are over, not much longer and not shorter."""
        for _ in range(40):
            taken = [self.cluster.take_quota(b"key", 1, limit=1000, period=LONG) for _ in range(25)]
            self.assertEqual(await gatherResults(taken), [0.0] * 25)
            self.clock.advance(LONG / 80)
        self.assertGreater(await self.take(1, limit=1000), 0.0)

    async def test_at_the_same_time(self) -> None:
        """However many ask at the same time, wherever, together they get the limit and not one more."""
        stores = (self.store, self.neighbour)
        asked = [stores[number % 2].cluster.take_quota(b"key", 1, limit=25, period=LONG) for number in range(60)]
        self.assertEqual((await gatherResults(asked)).count(0.0), 25)
        asked = [stores[number % 2].cluster.take_quota(b"lots", 4, limit=25, period=LONG) for number in range(20)]
        self.assertEqual((await gatherResults(asked)).count(0.0), 6)
