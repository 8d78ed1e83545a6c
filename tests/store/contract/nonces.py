"""What was received before."""

from __future__ import annotations

from mediatord.store.interfaces.cluster_and_quotas import MAX_CLOCK_SKEW
from mediatord.store.interfaces.store import NONCE_GRACE_SECONDS
from tests.store.builders import NOON
from tests.store.contract.nonce_capacity import NonceCapacityContract


class NonceContract(NonceCapacityContract):
    """Promises of `INonceCache`."""

    async def test_claim_once(self) -> None:
        """A key is new the first time only, whoever asks at the same time (reference 11)."""
        self.assertEqual(await self.claims(b"a", b"a", b"b", b""), [True, False, True, True])
        self.assertEqual(await self.claims(b"a", b"b", b"", b"c"), [False, False, False, True])

    async def test_release(self) -> None:
        """A released key is new again; releasing an unknown one is nothing."""
        await self.claims(b"a", b"b")
        await self.store.release_nonce(b"a")
        await self.store.release_nonce(b"unknown")
        self.assertEqual(await self.claims(b"a", b"b"), [True, False])

    async def test_until(self) -> None:
        """A claim holds until its time has come, and then is as good as forgotten."""
        await self.claims(b"a", ttl=10)
        self.clock.advance(9)
        self.assertEqual(await self.claims(b"a", ttl=99), [False])
        self.clock.advance(1)
        self.assertEqual(await self.claims(b"a", b"a"), [True, False])

    async def test_prune(self) -> None:
        """What may be forgotten is forgotten and counted; the rest stays."""
        await self.claims(b"a", b"b", ttl=10)
        await self.claims(b"c", ttl=20)
        self.clock.advance(9 + NONCE_GRACE_SECONDS)
        self.assertEqual(await self.store.prune_nonces(), 0)
        self.clock.advance(1)
        self.assertEqual(await self.store.prune_nonces(), 2)
        self.assertEqual(await self.store.prune_nonces(), 0)
        self.clock.advance(-NONCE_GRACE_SECONDS)
        self.assertEqual(await self.claims(b"c", b"a"), [False, True])

    async def test_pruned_by_another_clock(self) -> None:
        """What is pruned by a clock that is ahead, and asked for by one that is behind, is not new too early."""
        await self.claims(b"a", ttl=300)
        self.clock.advance(299 + 2 * MAX_CLOCK_SKEW)
        self.assertEqual(await self.store.prune_nonces(), 0)
        self.clock.advance(-2 * MAX_CLOCK_SKEW)
        self.assertEqual(await self.claims(b"a"), [False])

    async def test_released_and_pruned_make_room(self) -> None:
        """What is not there any more takes no room."""
        await self.claims(b"1", b"2", b"3", ttl=1000)
        await self.claims(b"4", b"5", ttl=5)
        await self.store.release_nonce(b"3")
        self.clock.advance(5 + NONCE_GRACE_SECONDS)
        self.assertEqual(await self.store.prune_nonces(), 2)
        await self.claims(b"6", b"7", b"8")
        self.assertEqual(await self.claims(b"1", b"2", b"6", b"7", b"8"), [False] * 5)

    async def test_claimed_again_takes_no_more_room(self) -> None:
        """A claim that is renewed after its time is one."""
        await self.store.claim_nonce(b"1", NOON + 1)
        await self.claims(b"2", b"3", b"4", b"5")
        self.clock.advance(2)
        self.assertEqual(await self.claims(b"1"), [True])
        self.assertEqual(await self.claims(b"1", b"2", b"3", b"4", b"5"), [False] * 5)
