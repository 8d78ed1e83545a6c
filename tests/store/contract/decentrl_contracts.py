"""Contract for registrations and communication contracts."""

from __future__ import annotations

from dataclasses import replace

from mediatord.errors import QuotaExceeded
from mediatord.store.interfaces.decentrl import Contract, ContractFilter, DecentrlQuotas
from tests.store.builders import ALICE, BOB, HOUR, NOON
from tests.store.contract.decentrl_base import ALL, CAROL, ODD_TEXTS, DecentrlContract, make_contract


class DecentrlRegistrationContract(DecentrlContract):
    """Contract for registrations: contracts that the mediator owns."""

    caps = DecentrlQuotas(contracts=1, contracts_with_one=2)

    async def test_registered_until_expiry(self) -> None:
        """A DID is registered until its registration expires, exclusively (reference 6.5)."""
        self.assertIsNone(await self.decentrl.registered_until(CAROL))
        await self.register_dids(CAROL, ttl=10)
        self.clock.advance(9.5)
        self.assertEqual(await self.decentrl.registered_until(CAROL), NOON + 10)
        self.clock.advance(0.5)
        self.assertIsNone(await self.decentrl.registered_until(CAROL))

    async def test_latest_expiry_counts(self) -> None:
        """The registration that expires last counts, in whichever order they came (reference 7.6)."""
        await self.register_dids(CAROL, ttl=20)
        await self.register_dids(CAROL, ttl=10)
        self.assertEqual(await self.decentrl.registered_until(CAROL), NOON + 20)
        self.clock.advance(15)
        self.assertEqual(await self.decentrl.registered_until(CAROL), NOON + 20)
        await self.register_dids(CAROL, ttl=30)
        self.assertEqual(await self.decentrl.registered_until(CAROL), NOON + 45)
        self.clock.advance(30)
        self.assertIsNone(await self.decentrl.registered_until(CAROL))

    async def test_expired_registration_is_ineffective(self) -> None:
        """A registration that has expired on arrival registers nobody."""
        await self.register_dids(CAROL, ttl=0)
        await self.register_dids(CAROL, ttl=-10)
        self.assertIsNone(await self.decentrl.registered_until(CAROL))

    async def test_contracts_and_registrations_are_separate(self) -> None:
        """A saved contract registers nobody, whoever its peer is, and a registration is no saved contract."""
        await self.save_contracts("a", owner=ALICE, peer=CAROL)
        await self.save_contracts("b", owner=CAROL, peer=ALICE)
        self.assertIsNone(await self.decentrl.registered_until(CAROL))

    async def save_contracts(self, *ids: str, owner: str = ALICE, peer: str = BOB, ttl: float = HOUR) -> None:
        for id in ids:
            await self.decentrl.save_contract(self.make_guard(), make_contract(id, owner, peer, until=NOON + ttl))

    async def test_registrations_are_not_listed(self) -> None:
        """Registrations with the mediator are in no identity's list of contracts (reference 7.6)."""
        for owner in (ALICE, BOB, "", "None"):
            self.assertEqual(await self.list_contracts(owner), [])

    async def test_registered_did_must_match_exactly(self) -> None:
        """Only exactly the registered DID is registered."""
        for did in (ALICE[:-1], ALICE.upper(), f"{ALICE} ", "", "%"):
            self.assertIsNone(await self.decentrl.registered_until(did))
        self.assertEqual(await self.decentrl.registered_until(ALICE), NOON + HOUR)

    async def test_full_quota_drops_earliest_expiry(self) -> None:
        """Beyond the quota the registration that expires first goes, even if it is the new one; none is refused."""
        for ttl in (20, 40, 30, 10, 50, 5):
            await self.register_dids(CAROL, ttl=ttl)
        self.assertEqual(await self.decentrl.registered_until(CAROL), NOON + 50)
        self.clock.advance(45)
        self.assertEqual(await self.decentrl.registered_until(CAROL), NOON + 50)
        self.clock.advance(5)
        self.assertIsNone(await self.decentrl.registered_until(CAROL))

    async def test_quota_is_per_identity(self) -> None:
        """The number of registrations of all identities has no limit."""
        dids = [f"did:example:{number}" for number in range(5)]
        await self.register_dids(*dids)
        for did in dids:
            self.assertEqual(await self.decentrl.registered_until(did), NOON + HOUR)

    async def test_same_registration_is_stored_once(self) -> None:
        """A repeated registration is stored once and never exceeds the quota."""
        registration = make_contract("a", None, CAROL, until=NOON + 10, digest=b"same")
        for id in "abcd":
            await self.decentrl.save_contract(self.make_guard(), replace(registration, id=id))
        await self.register_dids(CAROL, ttl=20)
        await self.decentrl.save_contract(self.make_guard(), replace(registration, id="e"))
        self.assertEqual(await self.decentrl.registered_until(CAROL), NOON + 20)

    async def test_renewed_registration_restores_data(self) -> None:
        """An identity whose registration has lapsed finds all its data when it registers again (reference 10.3)."""
        await self.decentrl.save_contract(self.make_guard(), make_contract("c", until=NOON + 9 * HOUR))
        await self.deliver_events("p")
        await self.add_requests("r")
        self.clock.advance(2 * HOUR)
        self.assertIsNone(await self.decentrl.registered_until(ALICE))
        await self.register_dids(ALICE)
        self.assertEqual(await self.list_contracts(), ["c"])
        self.assertEqual(await self.list_pending(), ["p"])
        self.assertEqual(await self.list_requests(), ["r"])


class DecentrlCommunicationContract(DecentrlContract):
    """Contract for communication contracts that identities own."""

    caps = DecentrlQuotas(contracts=5, contracts_with_one=3)

    async def test_stores_contract_unchanged(self) -> None:
        """A contract comes back as it was saved."""
        contracts = [
            Contract(
                f"c{number}",
                ALICE,
                BOB + text,
                NOON + number / 3,
                bytes([number, 0, 255]),
                text.encode() + bytes(range(256)),
            )
            for number, text in enumerate(ODD_TEXTS[:5])
        ]
        for contract in contracts:
            await self.decentrl.save_contract(self.make_guard(), contract)
        found = await self.decentrl.contracts(ALICE, ContractFilter(), ALL)
        self.assertEqual(found.items, tuple(contracts))

    async def test_lists_in_order_of_saving(self) -> None:
        """Contracts are listed in the order in which they were saved, whenever they expire."""
        for id, ttl in (("b", 30.0), ("c", 10.0), ("a", 20.0)):
            await self.save_contracts(id, ttl=ttl)
        self.assertEqual(await self.list_contracts(), ["b", "c", "a"])

    async def test_owners_are_separate(self) -> None:
        """Every owner has its own contracts, and both participants may save the same one."""
        await self.save_contracts("a", owner=ALICE, peer=BOB)
        same = make_contract("b", BOB, ALICE, until=NOON + HOUR, digest=b"a")
        await self.decentrl.save_contract(self.make_guard(BOB), same)
        self.assertEqual(await self.list_contracts(ALICE), ["a"])
        self.assertEqual(await self.list_contracts(BOB), ["b"])
        self.assertEqual(await self.list_contracts(CAROL), [])
        self.assertEqual(await self.list_contracts(ALICE[:-1]), [])

    async def test_same_contract_is_stored_once(self) -> None:
        """A repeated contract is stored once, as it came first, and never exceeds the quota (reference 8)."""
        first = make_contract("a", until=NOON + HOUR, digest=b"same")
        await self.decentrl.save_contract(self.make_guard(), first)
        for id in "bcdef":
            await self.decentrl.save_contract(self.make_guard(), replace(first, id=id, text=b"{ }"))
        found = await self.decentrl.contracts(ALICE, ContractFilter(), ALL)
        self.assertEqual((found.items, found.total), ((first,), 1))
        await self.save_contracts("x", "y")
        await self.decentrl.save_contract(self.make_guard(), replace(first, id="g"))
        self.assertEqual(await self.list_contracts(), ["a", "x", "y"])

    async def test_accepts_repeated_id(self) -> None:
        """Saving a contract again under its own id succeeds."""
        await self.save_contracts("a")
        await self.save_contracts("a")
        self.assertEqual(await self.list_contracts(), ["a"])

    async def test_keeps_several_contracts_of_a_pair(self) -> None:
        """A newer contract does not replace an older one of the same pair (reference 7.7)."""
        await self.save_contracts("old", ttl=10)
        await self.save_contracts("new", ttl=20)
        self.assertEqual(await self.list_contracts(did=BOB), ["old", "new"])

    async def test_keeps_expired_contracts(self) -> None:
        """Expired contracts are found too, and may have expired before they come (reference 7.3, 8)."""
        await self.save_contracts("a", ttl=10)
        await self.save_contracts("b", ttl=-10)
        self.clock.advance(20)
        self.assertEqual(await self.list_contracts(), ["a", "b"])

    async def test_did_filter_matches_both_roles(self) -> None:
        """A DID is matched in both roles: as peer, and as owner, who is in all of its contracts."""
        await self.save_contracts("a", "b", peer=BOB)
        await self.save_contracts("c", peer=CAROL)
        self.assertEqual(await self.list_contracts(did=BOB), ["a", "b"])
        self.assertEqual(await self.list_contracts(did=CAROL), ["c"])
        self.assertEqual(await self.list_contracts(did=ALICE), ["a", "b", "c"])
        for other in (BOB[:-1], BOB.upper(), "", "%"):
            self.assertEqual(await self.list_contracts(did=other), [])

    async def test_expiry_bounds_are_inclusive(self) -> None:
        """Both bounds are inclusive."""
        for ttl in (1, 2, 3):
            await self.save_contracts(f"c{ttl}", ttl=ttl)
        self.assertEqual(await self.list_contracts(expires_before=NOON + 2), ["c1", "c2"])
        self.assertEqual(await self.list_contracts(expires_after=NOON + 2), ["c2", "c3"])
        self.assertEqual(await self.list_contracts(expires_after=NOON + 2, expires_before=NOON + 2), ["c2"])
        self.assertEqual(await self.list_contracts(expires_after=NOON + 2.5, expires_before=NOON + 2.75), [])
        self.assertEqual(await self.list_contracts(expires_after=NOON + 3, expires_before=NOON + 1), [])
        self.assertEqual(await self.list_contracts(expires_after=0), ["c1", "c2", "c3"])
        self.assertEqual(await self.list_contracts(expires_before=0), [])

    async def test_combines_all_filters(self) -> None:
        """All filters must match."""
        await self.save_contracts("a", peer=BOB, ttl=1)
        await self.save_contracts("b", peer=CAROL, ttl=2)
        await self.save_contracts("c", peer=BOB, ttl=3)
        self.assertEqual(await self.list_contracts(did=BOB, expires_after=NOON + 2), ["c"])
        self.assertEqual(await self.list_contracts(did=ALICE, expires_before=NOON + 2), ["a", "b"])
        self.assertEqual(await self.list_contracts(did=CAROL, expires_after=NOON, expires_before=NOON + 1), [])

    async def test_pages_and_totals(self) -> None:
        """Any page can be read, even beyond the end, and the total does not depend on it."""
        await self.save_contracts("d", "a", "c", peer=BOB)
        await self.save_contracts("b", peer=CAROL)
        await self.assert_pages(
            lambda part: self.decentrl.contracts(ALICE, ContractFilter(), part), ["d", "a", "c", "b"]
        )
        wanted = ContractFilter(BOB, expires_after=NOON)
        await self.assert_pages(lambda part: self.decentrl.contracts(ALICE, wanted, part), ["d", "a", "c"])

    async def test_quota_per_peer_replaces_expired(self) -> None:
        """Contracts with one peer are limited; the oldest expired one makes room for a new one."""
        await self.save_contracts("a")
        await self.save_contracts("b", "c", ttl=-10)
        await self.save_contracts("d")
        self.assertEqual(await self.list_contracts(), ["a", "c", "d"])
        await self.save_contracts("d2")
        self.assertEqual(await self.list_contracts(), ["a", "d", "d2"])
        one_more = make_contract("d3", until=NOON + HOUR)
        await self.assert_refused(QuotaExceeded, lambda guard: self.decentrl.save_contract(guard, one_more))
        self.assertEqual(await self.list_contracts(), ["a", "d", "d2"])
        await self.save_contracts("e", peer=CAROL)
        await self.save_contracts("f", owner=BOB, peer=ALICE)

    async def test_replaced_contract_can_be_saved_again(self) -> None:
        """A contract that was removed to make room can be saved again."""
        await self.save_contracts("a", "b", "c", ttl=-10)
        await self.save_contracts("d")
        self.assertEqual(await self.list_contracts(), ["b", "c", "d"])
        await self.save_contracts("a", ttl=-10)
        self.assertEqual(await self.list_contracts(), ["c", "d", "a"])

    async def test_quota_per_owner(self) -> None:
        """Contracts of one owner are limited; those it is only the peer of do not count."""
        for number in range(5):
            await self.save_contracts(f"c{number}", peer=f"did:example:{number}")
        one_more = make_contract("d", until=NOON + HOUR)
        await self.assert_refused(QuotaExceeded, lambda guard: self.decentrl.save_contract(guard, one_more))
        self.assertEqual(len(await self.list_contracts()), 5)
        self.clock.advance(HOUR)
        await self.register_dids(ALICE, BOB)
        await self.save_contracts("d2")
        self.assertEqual(await self.list_contracts(), ["c1", "c2", "c3", "c4", "d2"])
        await self.save_contracts("e", owner=BOB, peer=ALICE)
        self.assertEqual(await self.list_contracts(BOB), ["e"])
