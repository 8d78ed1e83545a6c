"""Contract for command guards."""

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
    make_contract,
    make_event,
    make_public_event,
    make_request,
)


class DecentrlGuardContract(DecentrlContract):
    """Contract of `CommandGuard` and `IDecentrlStore.check_guard`."""

    caps = DecentrlQuotas(requests=2, requests_of_one=1, contracts=2, contracts_with_one=1, pending=1, stored=1)

    async def test_admits_registered_parties(self) -> None:
        """Registered DIDs are admitted, and any DID where the guard requires none."""
        for guard in (
            self.make_guard(),
            self.make_guard(ALICE),
            self.make_guard(None, BOB),
            self.make_guard(ALICE, BOB),
        ):
            await self.decentrl.check_guard(guard)
            self.assertFalse(await self.store.claim_nonce(guard.nonce, guard.until))

    async def test_order_of_checks(self) -> None:
        """A used nonce is the first reason to refuse, the sender the second, the recipient the third."""
        guard = self.make_guard(CAROL, CAROL)
        await self.assert_refused(UnauthorizedCommand, self.decentrl.check_guard, guard)
        await self.assert_refused(DuplicateNonce, self.decentrl.check_guard, guard)
        await self.assert_refused(RecipientNotRegistered, self.decentrl.check_guard, self.make_guard(ALICE, CAROL))
        await self.assert_refused(RecipientNotRegistered, self.decentrl.check_guard, self.make_guard(None, CAROL))

    async def test_nonce_admits_one_command(self) -> None:
        """Of commands with the same nonce one is executed, however they come (DCTRL-0004 5.2)."""
        guard = self.make_guard(ALICE)
        deferreds = [self.decentrl.check_guard(guard) for _ in range(3)]
        deferreds.append(self.decentrl.save_events(guard, ALICE, [make_event("a")]))
        outcomes = await DeferredList(deferreds, consumeErrors=True)
        self.assertEqual([done for done, _ in outcomes], [True, False, False, False])
        refusals: list[Any] = [refusal for _, refusal in outcomes[1:]]
        self.assertEqual({refusal.type for refusal in refusals}, {DuplicateNonce})
        self.assertEqual(await self.list_events(), [])

    async def test_nonces_are_shared_with_cache(self) -> None:
        """A nonce claimed through the cache is a duplicate for guards; a released one is not."""
        guard = self.make_guard()
        self.assertTrue(await self.store.claim_nonce(guard.nonce, guard.until))
        await self.assert_refused(DuplicateNonce, self.decentrl.check_guard, guard)
        await self.store.release_nonce(guard.nonce)
        await self.decentrl.check_guard(guard)

    async def test_nonce_expires(self) -> None:
        """A nonce may be used again once it has expired, and not before (reference 6.1)."""
        guard = CommandGuard(b"nonce", NOON + 10)
        await self.decentrl.check_guard(guard)
        self.clock.advance(9)
        await self.assert_refused(DuplicateNonce, self.decentrl.check_guard, guard)
        self.clock.advance(1)
        await self.decentrl.check_guard(guard)
        self.clock.advance(NONCE_GRACE_SECONDS)
        self.assertEqual(await self.store.prune_nonces(), 1)
        await self.decentrl.check_guard(guard)

    async def test_refuses_lapsed_registration(self) -> None:
        """A registration is invalid from the second in which it expires (reference 6.5)."""
        await self.register_dids(CAROL, ttl=10)
        self.clock.advance(9.5)
        await self.decentrl.check_guard(self.make_guard(CAROL, CAROL))
        self.clock.advance(0.5)
        await self.assert_refused(UnauthorizedCommand, self.decentrl.check_guard, self.make_guard(CAROL))
        await self.assert_refused(RecipientNotRegistered, self.decentrl.check_guard, self.make_guard(ALICE, CAROL))
        await self.register_dids(CAROL)
        await self.decentrl.check_guard(self.make_guard(CAROL, CAROL))

    async def test_dids_must_match_exactly(self) -> None:
        """A DID that merely resembles a registered one is not registered (reference 1)."""
        for did in (ALICE.upper(), ALICE[:-1], ALICE + "x", ALICE + "#signing", f" {ALICE}", "", "%"):
            await self.assert_refused(UnauthorizedCommand, self.decentrl.check_guard, self.make_guard(did))

    async def test_every_write_is_guarded(self) -> None:
        """No write is executed for an unregistered sender, or twice; refusals leave no traces."""
        await self.save_contracts("contract")
        await self.deliver_events("pending")
        await self.add_requests("request")
        await self.save_events(make_event("event", "tag", sender=ALICE))
        one, another = make_contract("c", peer=CAROL, until=NOON + HOUR), make_request("r", CAROL)
        event = PendingEvent("p", ALICE, BOB, "", NOON)
        for write in (
            lambda guard: self.decentrl.save_contract(guard, one),
            lambda guard: self.decentrl.request_contract(guard, another),
            lambda guard: self.decentrl.acknowledge_requests(guard, ALICE, ["request"]),
            lambda guard: self.decentrl.enqueue_event(guard, event),
            lambda guard: self.decentrl.acknowledge_events(guard, ALICE, ["pending"]),
            lambda guard: self.decentrl.save_events(guard, ALICE, [make_event("e")]),
            lambda guard: self.decentrl.update_tags(guard, ALICE, [("event", ("other",))]),
            lambda guard: self.decentrl.publish(guard, ALICE, make_public_event("x")),
            lambda guard: self.decentrl.unpublish(guard, ALICE, "x"),
        ):
            guard = self.make_guard(CAROL)
            await self.assert_refused(UnauthorizedCommand, write, guard)
            await self.assert_refused(DuplicateNonce, write, replace(guard, sender=ALICE))
        self.assertEqual(await self.list_contracts(), ["contract"])
        self.assertEqual(await self.list_requests(), ["request"])
        self.assertEqual(await self.list_pending(), ["pending"])
        self.assertEqual(await self.list_events("tag"), ["event"])
        self.assertEqual(await self.list_public(), [])

    async def test_refusal_keeps_nonce_claimed(self) -> None:
        """A command that is refused for what is stored cannot be sent again (reference 6.1)."""
        event = PendingEvent("p", ALICE, BOB, "", NOON)
        await self.assert_refused(ContractNotFound, lambda guard: self.decentrl.enqueue_event(guard, event))
        await self.assert_refused(PublicEventNotFound, lambda guard: self.decentrl.unpublish(guard, ALICE, "x"))
        await self.save_contracts("contract")
        await self.deliver_events("pending")
        await self.add_requests("request")
        await self.save_events(make_event("event"))
        contract = make_contract("again", until=NOON + HOUR)
        await self.assert_refused(QuotaExceeded, lambda guard: self.decentrl.save_contract(guard, contract))
        await self.assert_refused(
            QuotaExceeded, lambda guard: self.decentrl.request_contract(guard, make_request("r"))
        )
        await self.assert_refused(QuotaExceeded, lambda guard: self.decentrl.enqueue_event(guard, event))
        await self.assert_refused(
            QuotaExceeded, lambda guard: self.decentrl.save_events(guard, ALICE, [make_event("e")])
        )
        await self.assert_refused(
            QuotaExceeded, lambda guard: self.decentrl.publish(guard, ALICE, make_public_event("x"))
        )

    async def test_write_without_effect_claims_nonce(self) -> None:
        """Every write claims the nonce, also one that changes nothing."""
        for write in (
            lambda guard: self.decentrl.save_contract(guard, make_contract("c", until=NOON)),
            lambda guard: self.decentrl.save_contract(guard, make_contract("c", until=NOON)),
            lambda guard: self.decentrl.request_contract(guard, make_request("r")),
            lambda guard: self.decentrl.acknowledge_requests(guard, ALICE, []),
            lambda guard: self.decentrl.acknowledge_events(guard, ALICE, []),
            lambda guard: self.decentrl.save_events(guard, ALICE, []),
            lambda guard: self.decentrl.update_tags(guard, ALICE, []),
            lambda guard: self.decentrl.publish(guard, ALICE, make_public_event("x")),
            lambda guard: self.decentrl.unpublish(guard, ALICE, "x"),
        ):
            guard = self.make_guard(ALICE)
            await write(guard)
            self.assertFalse(await self.store.claim_nonce(guard.nonce, guard.until))

    async def test_store_failure_releases_nonce(self) -> None:
        """
        When the store fails nothing is stored, not even the nonce, so that the command can be sent again.

        The failure here is an id that exists already, whoever owns it.
        """
        await self.save_contracts("contract")
        await self.register_dids(CAROL)
        await self.save_contracts("contract of bob", owner=BOB, peer=CAROL)
        await self.deliver_events("pending")
        await self.add_requests("request")
        await self.save_events(make_event("event"))
        await self.publish_events(make_public_event("public"), publisher=BOB)
        event = PendingEvent("pending", BOB, CAROL, "", NOON)
        for write in (
            lambda guard: self.decentrl.save_contract(
                guard, make_contract("contract", CAROL, until=NOON + HOUR, digest=b"other")
            ),
            lambda guard: self.decentrl.request_contract(guard, make_request("request", CAROL, BOB)),
            lambda guard: self.decentrl.enqueue_event(guard, event),
            lambda guard: self.decentrl.save_events(guard, CAROL, [make_event("event")]),
            lambda guard: self.decentrl.publish(guard, CAROL, make_public_event("public")),
        ):
            guard = self.make_guard(CAROL)
            with self.assertRaises(StoreUnavailable):
                await write(guard)
            self.assertTrue(await self.store.claim_nonce(guard.nonce, guard.until))
        self.assertEqual(await self.list_contracts(CAROL), [])
        self.assertEqual(await self.list_requests(BOB), [])
        self.assertEqual(await self.list_pending(BOB), [])
        self.assertEqual(await self.list_events(owner=CAROL), [])
        self.assertEqual(await self.list_public(publisher=CAROL), [])
