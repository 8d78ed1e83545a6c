"""What has to hold before a command is carried out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from twisted.internet.defer import DeferredList

from mediatord.errors import (
    ContractNotFound,
    DuplicateNonce,
    PublicEventNotFound,
    QuotaExceeded,
    RecipientNotRegistered,
    StoreUnavailable,
    UnauthorizedCommand,
)
from mediatord.store.interfaces.decentrl import CommandGuard, DecentrlQuotas, PendingEvent
from mediatord.store.interfaces.store import NONCE_GRACE_SECONDS
from tests.store.builders import ALICE, BOB, HOUR, NOON
from tests.store.contract.decentrl_base import (
    CAROL,
    DecentrlContract,
    a_contract,
    a_public_event,
    a_request,
    an_event,
)


class DecentrlGuardContract(DecentrlContract):
    """Promises of `CommandGuard`, and of `IDecentrlStore.check_guard`."""

    caps = DecentrlQuotas(requests=2, requests_of_one=1, contracts=2, contracts_with_one=1, pending=1, stored=1)

    async def test_admit(self) -> None:
        """Who is registered is admitted, and anybody where nobody has to be."""
        for guard in (self.guard(), self.guard(ALICE), self.guard(None, BOB), self.guard(ALICE, BOB)):
            await self.decentrl.check_guard(guard)
            self.assertFalse(await self.store.claim_nonce(guard.nonce, guard.until))

    async def test_order(self) -> None:
        """A nonce that was there before is the first reason to refuse, the sender the next, then the recipient."""
        guard = self.guard(CAROL, CAROL)
        await self.refused(UnauthorizedCommand, self.decentrl.check_guard, guard)
        await self.refused(DuplicateNonce, self.decentrl.check_guard, guard)
        await self.refused(RecipientNotRegistered, self.decentrl.check_guard, self.guard(ALICE, CAROL))
        await self.refused(RecipientNotRegistered, self.decentrl.check_guard, self.guard(None, CAROL))

    async def test_nonce_once(self) -> None:
        """Of commands with the same nonce one is carried out, however they come (DCTRL-0004 5.2)."""
        guard = self.guard(ALICE)
        begun = [self.decentrl.check_guard(guard) for _ in range(3)]
        begun.append(self.decentrl.save_events(guard, ALICE, [an_event("a")]))
        outcomes = await DeferredList(begun, consumeErrors=True)
        self.assertEqual([done for done, _ in outcomes], [True, False, False, False])
        refusals: list[Any] = [refusal for _, refusal in outcomes[1:]]
        self.assertEqual({refusal.type for refusal in refusals}, {DuplicateNonce})
        self.assertEqual(await self.events(), [])

    async def test_nonces_are_shared(self) -> None:
        """What was claimed elsewhere is a duplicate here, and what was released is not."""
        guard = self.guard()
        self.assertTrue(await self.store.claim_nonce(guard.nonce, guard.until))
        await self.refused(DuplicateNonce, self.decentrl.check_guard, guard)
        await self.store.release_nonce(guard.nonce)
        await self.decentrl.check_guard(guard)

    async def test_nonce_until(self) -> None:
        """A nonce may be used again when its time has come, and not before (reference 6.1)."""
        guard = CommandGuard(b"nonce", NOON + 10)
        await self.decentrl.check_guard(guard)
        self.clock.advance(9)
        await self.refused(DuplicateNonce, self.decentrl.check_guard, guard)
        self.clock.advance(1)
        await self.decentrl.check_guard(guard)
        self.clock.advance(NONCE_GRACE_SECONDS)
        self.assertEqual(await self.store.prune_nonces(), 1)
        await self.decentrl.check_guard(guard)

    async def test_registration_lapses(self) -> None:
        """From the second in which a registration expires nobody is registered by it (reference 6.5)."""
        await self.enlist(CAROL, ttl=10)
        self.clock.advance(9.5)
        await self.decentrl.check_guard(self.guard(CAROL, CAROL))
        self.clock.advance(0.5)
        await self.refused(UnauthorizedCommand, self.decentrl.check_guard, self.guard(CAROL))
        await self.refused(RecipientNotRegistered, self.decentrl.check_guard, self.guard(ALICE, CAROL))
        await self.enlist(CAROL)
        await self.decentrl.check_guard(self.guard(CAROL, CAROL))

    async def test_exact_dids(self) -> None:
        """A DID that merely resembles a registered one is not registered (reference 1)."""
        for did in (ALICE.upper(), ALICE[:-1], ALICE + "x", ALICE + "#signing", f" {ALICE}", "", "%"):
            await self.refused(UnauthorizedCommand, self.decentrl.check_guard, self.guard(did))

    async def test_every_write_is_guarded(self) -> None:
        """No write is carried out for who is not registered, nor twice, nor does either leave anything."""
        await self.agree("contract")
        await self.send("pending")
        await self.request("request")
        await self.save(an_event("event", "tag", sender=ALICE))
        one, another = a_contract("c", peer=CAROL, until=NOON + HOUR), a_request("r", CAROL)
        event = PendingEvent("p", ALICE, BOB, "", NOON)
        for write in (
            lambda guard: self.decentrl.save_contract(guard, one),
            lambda guard: self.decentrl.request_contract(guard, another),
            lambda guard: self.decentrl.acknowledge_requests(guard, ALICE, ["request"]),
            lambda guard: self.decentrl.enqueue_event(guard, event),
            lambda guard: self.decentrl.acknowledge_events(guard, ALICE, ["pending"]),
            lambda guard: self.decentrl.save_events(guard, ALICE, [an_event("e")]),
            lambda guard: self.decentrl.update_tags(guard, ALICE, [("event", ("other",))]),
            lambda guard: self.decentrl.publish(guard, ALICE, a_public_event("x")),
            lambda guard: self.decentrl.unpublish(guard, ALICE, "x"),
        ):
            guard = self.guard(CAROL)
            await self.refused(UnauthorizedCommand, write, guard)
            await self.refused(DuplicateNonce, write, replace(guard, sender=ALICE))
        self.assertEqual(await self.contracts(), ["contract"])
        self.assertEqual(await self.requests(), ["request"])
        self.assertEqual(await self.pending(), ["pending"])
        self.assertEqual(await self.events("tag"), ["event"])
        self.assertEqual(await self.public(), [])

    async def test_refusals_keep_the_nonce(self) -> None:
        """A command that is refused for what is kept cannot be sent again either (reference 6.1)."""
        event = PendingEvent("p", ALICE, BOB, "", NOON)
        await self.refused(ContractNotFound, lambda guard: self.decentrl.enqueue_event(guard, event))
        await self.refused(PublicEventNotFound, lambda guard: self.decentrl.unpublish(guard, ALICE, "x"))
        await self.agree("contract")
        await self.send("pending")
        await self.request("request")
        await self.save(an_event("event"))
        again = a_contract("again", until=NOON + HOUR)
        await self.refused(QuotaExceeded, lambda guard: self.decentrl.save_contract(guard, again))
        await self.refused(QuotaExceeded, lambda guard: self.decentrl.request_contract(guard, a_request("r")))
        await self.refused(QuotaExceeded, lambda guard: self.decentrl.enqueue_event(guard, event))
        await self.refused(QuotaExceeded, lambda guard: self.decentrl.save_events(guard, ALICE, [an_event("e")]))
        await self.refused(QuotaExceeded, lambda guard: self.decentrl.publish(guard, ALICE, a_public_event("x")))

    async def test_done_keeps_the_nonce(self) -> None:
        """Every write claims the nonce, also one that finds nothing to do."""
        for write in (
            lambda guard: self.decentrl.save_contract(guard, a_contract("c", until=NOON)),
            lambda guard: self.decentrl.save_contract(guard, a_contract("c", until=NOON)),
            lambda guard: self.decentrl.request_contract(guard, a_request("r")),
            lambda guard: self.decentrl.acknowledge_requests(guard, ALICE, []),
            lambda guard: self.decentrl.acknowledge_events(guard, ALICE, []),
            lambda guard: self.decentrl.save_events(guard, ALICE, []),
            lambda guard: self.decentrl.update_tags(guard, ALICE, []),
            lambda guard: self.decentrl.publish(guard, ALICE, a_public_event("x")),
            lambda guard: self.decentrl.unpublish(guard, ALICE, "x"),
        ):
            guard = self.guard(ALICE)
            await write(guard)
            self.assertFalse(await self.store.claim_nonce(guard.nonce, guard.until))

    async def test_failure_keeps_nothing(self) -> None:
        """
        When the store fails nothing is kept, the nonce neither, so that the command can be sent again. It fails for
        an id that is there already, whoever has it.
        """
        await self.agree("contract")
        await self.enlist(CAROL)
        await self.agree("contract of bob", owner=BOB, peer=CAROL)
        await self.send("pending")
        await self.request("request")
        await self.save(an_event("event"))
        await self.publish(a_public_event("public"), publisher=BOB)
        event = PendingEvent("pending", BOB, CAROL, "", NOON)
        for write in (
            lambda guard: self.decentrl.save_contract(
                guard, a_contract("contract", CAROL, until=NOON + HOUR, digest=b"other")
            ),
            lambda guard: self.decentrl.request_contract(guard, a_request("request", CAROL, BOB)),
            lambda guard: self.decentrl.enqueue_event(guard, event),
            lambda guard: self.decentrl.save_events(guard, CAROL, [an_event("event")]),
            lambda guard: self.decentrl.publish(guard, CAROL, a_public_event("public")),
        ):
            guard = self.guard(CAROL)
            with self.assertRaises(StoreUnavailable):
                await write(guard)
            self.assertTrue(await self.store.claim_nonce(guard.nonce, guard.until))
        self.assertEqual(await self.contracts(CAROL), [])
        self.assertEqual(await self.requests(BOB), [])
        self.assertEqual(await self.pending(BOB), [])
        self.assertEqual(await self.events(owner=CAROL), [])
        self.assertEqual(await self.public(publisher=CAROL), [])
