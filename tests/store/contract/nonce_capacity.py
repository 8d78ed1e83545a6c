"""Contract for nonces at the capacity limit."""

from __future__ import annotations

from typing import Any

from twisted.internet.defer import DeferredList, gatherResults

from mediatord.errors import DuplicateNonce, MediatorError, ReplayCacheFull, StoreUnavailable
from mediatord.store.interfaces.decentrl import CommandGuard
from mediatord.store.interfaces.store import NONCE_GRACE_SECONDS
from tests.store.builders import NOON
from tests.store.contract.base import StoreContract

CAPACITY = 5


class NonceCapacityContract(StoreContract):
    """Contract of `INonceCache` and `CommandGuard` with a capacity of :data:`CAPACITY` nonces."""

    max_nonces = CAPACITY

    async def claim(self, *keys: bytes, ttl: float = 60, share: float = 1.0) -> list[bool]:
        until = self.clock.seconds() + ttl
        return await gatherResults([self.store.claim_nonce(key, until, share) for key in keys])

    async def assert_refused(self, *keys: bytes, share: float = 1.0) -> None:
        """Each claim is refused, by itself and concurrently with the others."""
        outcomes: list[Any] = await DeferredList(
            [self.store.claim_nonce(key, NOON + 99, share) for key in keys], consumeErrors=True
        )
        for done, outcome in outcomes:
            self.assertFalse(done)
            self.assertIsInstance(outcome.value, ReplayCacheFull)

    async def test_full_store_refuses_claims(self) -> None:
        """A claim without room is refused, whether the key was claimed before or not; no claim is dropped for it."""
        await self.claim(b"1", b"2", b"3", b"4", b"5")
        await self.assert_refused(b"6", b"7")
        await self.assert_refused(b"8")
        self.assertEqual(await self.claim(b"1", b"2", b"3", b"4", b"5"), [False] * 5)
        self.assertTrue(issubclass(ReplayCacheFull, StoreUnavailable))

    async def test_concurrent_claims_fill_capacity(self) -> None:
        """Of concurrent claims the first ones that fit succeed, as if they had come one by one."""
        keys = [b"1", b"2", b"3", b"3", b"4", b"5", b"6", b"1", b"7"]
        outcomes: list[Any] = await DeferredList(
            [self.store.claim_nonce(key, NOON + 60) for key in keys], consumeErrors=True
        )
        results = [outcome if done else type(outcome.value) for done, outcome in outcomes]
        full = ReplayCacheFull
        self.assertEqual(results, [True, True, True, False, True, True, full, False, full])

    async def test_share_limits_claims(self) -> None:
        """A claim limited to a share is refused beyond it, whoever holds the others; the rest serves other claims."""
        self.assertEqual(await self.claim(b"1", b"2", share=0.4), [True, True])
        await self.assert_refused(b"3", share=0.4)
        await self.assert_refused(b"3", share=0.5)
        self.assertEqual(await self.claim(b"3", share=0.6), [True])
        self.assertEqual(await self.claim(b"4", b"5"), [True, True])
        self.assertEqual(await self.claim(b"1", share=0.4), [False])
        for key in (b"3", b"4", b"5"):
            await self.store.release_nonce(key)
        await self.assert_refused(b"6", share=0.4)
        await self.store.release_nonce(b"2")
        self.assertEqual(await self.claim(b"6", share=0.4), [True])

    async def test_released_claims_make_room(self) -> None:
        """Released and pruned claims make room; an expired one that is not pruned makes room for its own key only."""
        await self.claim(b"1", b"2", ttl=5)
        await self.claim(b"3", b"4", b"5", ttl=1000)
        await self.store.release_nonce(b"3")
        self.assertEqual(await self.claim(b"6", ttl=1000), [True])
        self.clock.advance(5)
        await self.assert_refused(b"7")
        self.assertEqual(await self.claim(b"1", ttl=1000), [True])
        self.clock.advance(NONCE_GRACE_SECONDS)
        self.assertEqual(await self.store.prune_nonces(), 1)
        self.assertEqual(await self.claim(b"7", ttl=1000), [True])
        await self.assert_refused(b"8")

    async def test_command_without_room_is_refused(self) -> None:
        """A command whose nonce has no room is not executed; a replayed one is still reported as a duplicate."""

        def make_guard(nonce: bytes) -> CommandGuard:
            return CommandGuard(nonce, NOON + 60)

        await self.claim(b"1", b"2", b"3", b"4")
        with self.assertRaises(ReplayCacheFull):
            await self.store.decentrl.check_guard(CommandGuard(b"5", NOON + 60, share=0.8))
        await self.store.decentrl.check_guard(make_guard(b"5"))
        for nonce, refusal in ((b"6", ReplayCacheFull), (b"5", DuplicateNonce), (b"1", DuplicateNonce)):
            with self.assertRaises(MediatorError) as caught:
                await self.store.decentrl.check_guard(make_guard(nonce))
            self.assertIs(type(caught.exception), refusal)
        await self.store.release_nonce(b"1")
        await self.store.decentrl.check_guard(make_guard(b"6"))
