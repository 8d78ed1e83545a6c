"""What was received before, when there is no room for more."""

from __future__ import annotations

from typing import Any

from twisted.internet.defer import DeferredList, gatherResults

from mediatord.errors import DuplicateNonce, MediatorError, ReplayCacheFull, StoreUnavailable
from mediatord.store.interfaces.decentrl import CommandGuard
from mediatord.store.interfaces.store import NONCE_GRACE_SECONDS
from tests.store.builders import ALICE, NOON
from tests.store.contract.base import StoreContract

CAPACITY = 5


class NonceCapacityContract(StoreContract):
    """`INonceCache` and `CommandGuard` of a store whose capacity is :data:`CAPACITY` nonces."""

    max_nonces = CAPACITY

    async def claims(self, *keys: bytes, ttl: float = 60, share: float = 1.0) -> list[bool]:
        until = self.clock.seconds() + ttl
        return await gatherResults([self.store.claim_nonce(key, until, share) for key in keys])

    async def refused(self, *keys: bytes, share: float = 1.0) -> None:
        """Each is, by itself and at the same time as the others."""
        outcomes: list[Any] = await DeferredList(
            [self.store.claim_nonce(key, NOON + 99, share) for key in keys], consumeErrors=True
        )
        for done, outcome in outcomes:
            self.assertFalse(done)
            self.assertIsInstance(outcome.value, ReplayCacheFull)

    async def test_full(self) -> None:
        """What has no room is refused, which does not say whether it came before; nothing is forgotten for it."""
        await self.claims(b"1", b"2", b"3", b"4", b"5")
        await self.refused(b"6", b"7")
        await self.refused(b"8")
        await self.put("a")
        with self.assertRaises(ReplayCacheFull):
            await self.store.acknowledge_once(ALICE, ["a"], b"9", NOON + 99)
        self.assertEqual(await self.waiting(), ["a"])
        self.assertEqual(await self.claims(b"1", b"2", b"3", b"4", b"5"), [False] * 5)
        self.assertTrue(issubclass(ReplayCacheFull, StoreUnavailable))

    async def test_as_many_as_fit(self) -> None:
        """Of those that come at the same time, the first are claimed, as if they had come one by one."""
        keys = [b"1", b"2", b"3", b"3", b"4", b"5", b"6", b"1", b"7"]
        outcomes: list[Any] = await DeferredList(
            [self.store.claim_nonce(key, NOON + 60) for key in keys], consumeErrors=True
        )
        told = [outcome if done else type(outcome.value) for done, outcome in outcomes]
        full = ReplayCacheFull
        self.assertEqual(told, [True, True, True, False, True, True, full, False, full])

    async def test_share(self) -> None:
        """A claim that may only have a share is refused once more is taken, by whomever; the rest is for others."""
        self.assertEqual(await self.claims(b"1", b"2", share=0.4), [True, True])
        await self.refused(b"3", share=0.4)
        await self.refused(b"3", share=0.5)
        self.assertEqual(await self.claims(b"3", share=0.6), [True])
        self.assertEqual(await self.claims(b"4", b"5"), [True, True])
        self.assertEqual(await self.claims(b"1", share=0.4), [False])
        for key in (b"3", b"4", b"5"):
            await self.store.release_nonce(key)
        await self.refused(b"6", share=0.4)
        await self.store.release_nonce(b"2")
        self.assertEqual(await self.claims(b"6", share=0.4), [True])

    async def test_room_again(self) -> None:
        """What is released or pruned makes room; what is over and not pruned yet makes it for itself alone."""
        await self.claims(b"1", b"2", ttl=5)
        await self.claims(b"3", b"4", b"5", ttl=1000)
        await self.store.release_nonce(b"3")
        self.assertEqual(await self.claims(b"6", ttl=1000), [True])
        self.clock.advance(5)
        await self.refused(b"7")
        self.assertEqual(await self.claims(b"1", ttl=1000), [True])
        self.clock.advance(NONCE_GRACE_SECONDS)
        self.assertEqual(await self.store.prune_nonces(), 1)
        self.assertEqual(await self.claims(b"7", ttl=1000), [True])
        await self.refused(b"8")

    async def test_command(self) -> None:
        """A command whose nonce has no room is not carried out; one that came before is told so all the same."""

        def guard(nonce: bytes) -> CommandGuard:
            return CommandGuard(nonce, NOON + 60)

        await self.claims(b"1", b"2", b"3", b"4")
        with self.assertRaises(ReplayCacheFull):
            await self.store.decentrl.check_guard(CommandGuard(b"5", NOON + 60, share=0.8))
        await self.store.decentrl.check_guard(guard(b"5"))
        for nonce, refusal in ((b"6", ReplayCacheFull), (b"5", DuplicateNonce), (b"1", DuplicateNonce)):
            with self.assertRaises(MediatorError) as caught:
                await self.store.decentrl.check_guard(guard(nonce))
            self.assertIs(type(caught.exception), refusal)
        await self.store.release_nonce(b"1")
        await self.store.decentrl.check_guard(guard(b"6"))
