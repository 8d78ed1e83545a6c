"""Contract for nonces."""

from __future__ import annotations

from mediatord.store.interfaces.cluster_and_quotas import MAX_CLOCK_SKEW
from mediatord.store.interfaces.store import NONCE_GRACE_SECONDS
from tests.store.builders import NOON
from tests.store.contract.nonce_capacity import NonceCapacityContract


class NonceContract(NonceCapacityContract):
    """Contract of `INonceCache`."""

    async def test_key_is_claimed_once(self) -> None:
        """A key can be claimed once, also by concurrent calls (reference 11)."""
        self.assertEqual(await self.claim(b"a", b"a", b"b", b""), [True, False, True, True])
        self.assertEqual(await self.claim(b"a", b"b", b"", b"c"), [False, False, False, True])

    async def test_released_key_can_be_claimed(self) -> None:
        """A released key can be claimed again; releasing an unknown one does nothing."""
        await self.claim(b"a", b"b")
        await self.store.release_nonce(b"a")
        await self.store.release_nonce(b"unknown")
        self.assertEqual(await self.claim(b"a", b"b"), [True, False])

    async def test_claim_expires(self) -> None:
        """A claim holds until its expiry."""
        await self.claim(b"a", ttl=10)
        self.clock.advance(9)
        self.assertEqual(await self.claim(b"a", ttl=99), [False])
        self.clock.advance(1)
        self.assertEqual(await self.claim(b"a", b"a"), [True, False])

    async def test_prune_removes_and_counts_expired(self) -> None:
        """Pruning removes and counts expired claims only."""
        await self.claim(b"a", b"b", ttl=10)
        await self.claim(b"c", ttl=20)
        self.clock.advance(9 + NONCE_GRACE_SECONDS)
        self.assertEqual(await self.store.prune_nonces(), 0)
        self.clock.advance(1)
        self.assertEqual(await self.store.prune_nonces(), 2)
        self.assertEqual(await self.store.prune_nonces(), 0)
        self.clock.advance(-NONCE_GRACE_SECONDS)
        self.assertEqual(await self.claim(b"c", b"a"), [False, True])

    async def test_prune_tolerates_clock_skew(self) -> None:
        """A claim pruned by a fast clock is not free too early for a process with a slow one."""
        await self.claim(b"a", ttl=300)
        self.clock.advance(299 + 2 * MAX_CLOCK_SKEW)
        self.assertEqual(await self.store.prune_nonces(), 0)
        self.clock.advance(-2 * MAX_CLOCK_SKEW)
        self.assertEqual(await self.claim(b"a"), [False])

    async def test_released_and_pruned_claims_free_capacity(self) -> None:
        """Released and pruned claims occupy no capacity."""
        await self.claim(b"1", b"2", b"3", ttl=1000)
        await self.claim(b"4", b"5", ttl=5)
        await self.store.release_nonce(b"3")
        self.clock.advance(5 + NONCE_GRACE_SECONDS)
        self.assertEqual(await self.store.prune_nonces(), 2)
        await self.claim(b"6", b"7", b"8")
        self.assertEqual(await self.claim(b"1", b"2", b"6", b"7", b"8"), [False] * 5)

    async def test_renewed_claim_counts_once(self) -> None:
        """A claim renewed after its expiry counts once."""
        await self.store.claim_nonce(b"1", NOON + 1)
        await self.claim(b"2", b"3", b"4", b"5")
        self.clock.advance(2)
        self.assertEqual(await self.claim(b"1"), [True])
        self.assertEqual(await self.claim(b"1", b"2", b"3", b"4", b"5"), [False] * 5)
