"""Registrations, and the contracts that identities keep here."""

from __future__ import annotations

from dataclasses import replace

from mediatord.errors import QuotaExceeded
from mediatord.store.interfaces.decentrl import Contract, ContractFilter, DecentrlQuotas
from tests.store.builders import ALICE, BOB, HOUR, NOON
from tests.store.contract.decentrl_base import ALL, CAROL, ODD_TEXTS, DecentrlContract, a_contract


class DecentrlRegistrationContract(DecentrlContract):
    """Promises about contracts that the mediator owns."""

    caps = DecentrlQuotas(contracts=1, contracts_with_one=2)

    async def test_registered_until(self) -> None:
        """A DID is registered until its registration expires, exclusively (reference 6.5)."""
        self.assertIsNone(await self.decentrl.registered_until(CAROL))
        await self.enlist(CAROL, ttl=10)
        self.clock.advance(9.5)
        self.assertEqual(await self.decentrl.registered_until(CAROL), NOON + 10)
        self.clock.advance(0.5)
        self.assertIsNone(await self.decentrl.registered_until(CAROL))

    async def test_several(self) -> None:
        """The last registration to expire counts, in whichever order they came (reference 7.6)."""
        await self.enlist(CAROL, ttl=20)
        await self.enlist(CAROL, ttl=10)
        self.assertEqual(await self.decentrl.registered_until(CAROL), NOON + 20)
        self.clock.advance(15)
        self.assertEqual(await self.decentrl.registered_until(CAROL), NOON + 20)
        await self.enlist(CAROL, ttl=30)
        self.assertEqual(await self.decentrl.registered_until(CAROL), NOON + 45)
        self.clock.advance(30)
        self.assertIsNone(await self.decentrl.registered_until(CAROL))

    async def test_expired_from_the_start(self) -> None:
        """A registration that has expired when it comes registers nobody."""
        await self.enlist(CAROL, ttl=0)
        await self.enlist(CAROL, ttl=-10)
        self.assertIsNone(await self.decentrl.registered_until(CAROL))

    async def test_contracts_register_nobody(self) -> None:
        """What an identity saves is no registration, whoever its peer is; nor is a registration a contract of it."""
        await self.agree("a", owner=ALICE, peer=CAROL)
        await self.agree("b", owner=CAROL, peer=ALICE)
        self.assertIsNone(await self.decentrl.registered_until(CAROL))

    async def agree(self, *ids: str, owner: str = ALICE, peer: str = BOB, ttl: float = HOUR) -> None:
        for id in ids:
            await self.decentrl.save_contract(self.guard(), a_contract(id, owner, peer, until=NOON + ttl))

    async def test_not_among_contracts(self) -> None:
        """The mediator's registrations are in nobody's contracts (reference 7.6)."""
        for owner in (ALICE, BOB, "", "None"):
            self.assertEqual(await self.contracts(owner), [])

    async def test_exact(self) -> None:
        """Only exactly the DID that was registered is."""
        for did in (ALICE[:-1], ALICE.upper(), f"{ALICE} ", "", "%"):
            self.assertIsNone(await self.decentrl.registered_until(did))
        self.assertEqual(await self.decentrl.registered_until(ALICE), NOON + HOUR)

    async def test_cap(self) -> None:
        """Of too many registrations the one that expires first goes, be it the new one; nobody is ever refused."""
        for ttl in (20, 40, 30, 10, 50, 5):
            await self.enlist(CAROL, ttl=ttl)
        self.assertEqual(await self.decentrl.registered_until(CAROL), NOON + 50)
        self.clock.advance(45)
        self.assertEqual(await self.decentrl.registered_until(CAROL), NOON + 50)
        self.clock.advance(5)
        self.assertIsNone(await self.decentrl.registered_until(CAROL))

    async def test_cap_is_of_one(self) -> None:
        """How many are registered in all has no cap."""
        dids = [f"did:example:{number}" for number in range(5)]
        await self.enlist(*dids)
        for did in dids:
            self.assertEqual(await self.decentrl.registered_until(did), NOON + HOUR)

    async def test_same_registration(self) -> None:
        """The same registration is kept once, and is never one too many."""
        registration = a_contract("a", None, CAROL, until=NOON + 10, digest=b"same")
        for id in "abcd":
            await self.decentrl.save_contract(self.guard(), replace(registration, id=id))
        await self.enlist(CAROL, ttl=20)
        await self.decentrl.save_contract(self.guard(), replace(registration, id="e"))
        self.assertEqual(await self.decentrl.registered_until(CAROL), NOON + 20)

    async def test_lapsed_keeps_its_data(self) -> None:
        """A DID whose registration has lapsed finds everything again (reference 10.3)."""
        await self.decentrl.save_contract(self.guard(), a_contract("c", until=NOON + 9 * HOUR))
        await self.send("p")
        await self.request("r")
        self.clock.advance(2 * HOUR)
        self.assertIsNone(await self.decentrl.registered_until(ALICE))
        await self.enlist(ALICE)
        self.assertEqual(await self.contracts(), ["c"])
        self.assertEqual(await self.pending(), ["p"])
        self.assertEqual(await self.requests(), ["r"])


class DecentrlCommunicationContract(DecentrlContract):
    """Promises about contracts that identities own."""

    caps = DecentrlQuotas(contracts=5, contracts_with_one=3)

    async def test_as_given(self) -> None:
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
            await self.decentrl.save_contract(self.guard(), contract)
        found = await self.decentrl.contracts(ALICE, ContractFilter(), ALL)
        self.assertEqual(found.items, tuple(contracts))

    async def test_oldest_first(self) -> None:
        """Contracts come in the order in which they were saved, whenever they expire."""
        for id, ttl in (("b", 30.0), ("c", 10.0), ("a", 20.0)):
            await self.agree(id, ttl=ttl)
        self.assertEqual(await self.contracts(), ["b", "c", "a"])

    async def test_owners_are_apart(self) -> None:
        """Everybody has its own contracts, and both participants may keep the same one."""
        await self.agree("a", owner=ALICE, peer=BOB)
        same = a_contract("b", BOB, ALICE, until=NOON + HOUR, digest=b"a")
        await self.decentrl.save_contract(self.guard(BOB), same)
        self.assertEqual(await self.contracts(ALICE), ["a"])
        self.assertEqual(await self.contracts(BOB), ["b"])
        self.assertEqual(await self.contracts(CAROL), [])
        self.assertEqual(await self.contracts(ALICE[:-1]), [])

    async def test_same_contract(self) -> None:
        """The same contract is kept once, as it came first, and is never one too many (reference 8)."""
        first = a_contract("a", until=NOON + HOUR, digest=b"same")
        await self.decentrl.save_contract(self.guard(), first)
        for id in "bcdef":
            await self.decentrl.save_contract(self.guard(), replace(first, id=id, text=b"{ }"))
        found = await self.decentrl.contracts(ALICE, ContractFilter(), ALL)
        self.assertEqual((found.items, found.total), ((first,), 1))
        await self.agree("x", "y")
        await self.decentrl.save_contract(self.guard(), replace(first, id="g"))
        self.assertEqual(await self.contracts(), ["a", "x", "y"])

    async def test_same_id_again(self) -> None:
        """That a contract comes again under the id that it has is no fault."""
        await self.agree("a")
        await self.agree("a")
        self.assertEqual(await self.contracts(), ["a"])

    async def test_several_of_one_pair(self) -> None:
        """A newer contract of the same pair does not take the place of an older one (reference 7.7)."""
        await self.agree("old", ttl=10)
        await self.agree("new", ttl=20)
        self.assertEqual(await self.contracts(did=BOB), ["old", "new"])

    async def test_expired_ones_stay(self) -> None:
        """Contracts that have expired are found as well, and may expire before they come (reference 7.3, 8)."""
        await self.agree("a", ttl=10)
        await self.agree("b", ttl=-10)
        self.clock.advance(20)
        self.assertEqual(await self.contracts(), ["a", "b"])

    async def test_did_filter(self) -> None:
        """A DID is looked for in both roles: it is the peer, or the owner, who is in all of its contracts."""
        await self.agree("a", "b", peer=BOB)
        await self.agree("c", peer=CAROL)
        self.assertEqual(await self.contracts(did=BOB), ["a", "b"])
        self.assertEqual(await self.contracts(did=CAROL), ["c"])
        self.assertEqual(await self.contracts(did=ALICE), ["a", "b", "c"])
        for stranger in (BOB[:-1], BOB.upper(), "", "%"):
            self.assertEqual(await self.contracts(did=stranger), [])

    async def test_expiry_filter(self) -> None:
        """Both bounds are inclusive."""
        for ttl in (1, 2, 3):
            await self.agree(f"c{ttl}", ttl=ttl)
        self.assertEqual(await self.contracts(expires_before=NOON + 2), ["c1", "c2"])
        self.assertEqual(await self.contracts(expires_after=NOON + 2), ["c2", "c3"])
        self.assertEqual(await self.contracts(expires_after=NOON + 2, expires_before=NOON + 2), ["c2"])
        self.assertEqual(await self.contracts(expires_after=NOON + 2.5, expires_before=NOON + 2.75), [])
        self.assertEqual(await self.contracts(expires_after=NOON + 3, expires_before=NOON + 1), [])
        self.assertEqual(await self.contracts(expires_after=0), ["c1", "c2", "c3"])
        self.assertEqual(await self.contracts(expires_before=0), [])

    async def test_all_filters(self) -> None:
        """All that is asked for has to hold at once."""
        await self.agree("a", peer=BOB, ttl=1)
        await self.agree("b", peer=CAROL, ttl=2)
        await self.agree("c", peer=BOB, ttl=3)
        self.assertEqual(await self.contracts(did=BOB, expires_after=NOON + 2), ["c"])
        self.assertEqual(await self.contracts(did=ALICE, expires_before=NOON + 2), ["a", "b"])
        self.assertEqual(await self.contracts(did=CAROL, expires_after=NOON, expires_before=NOON + 1), [])

    async def test_slices(self) -> None:
        """Any slice can be asked for, however far beyond the end, and the total does not depend on it."""
        await self.agree("d", "a", "c", peer=BOB)
        await self.agree("b", peer=CAROL)
        await self.slices(lambda part: self.decentrl.contracts(ALICE, ContractFilter(), part), ["d", "a", "c", "b"])
        wanted = ContractFilter(BOB, expires_after=NOON)
        await self.slices(lambda part: self.decentrl.contracts(ALICE, wanted, part), ["d", "a", "c"])

    async def test_cap_with_one(self) -> None:
        """With one peer there are at most so many contracts; the oldest that has expired makes room for a new one."""
        await self.agree("a")
        await self.agree("b", "c", ttl=-10)
        await self.agree("d")
        self.assertEqual(await self.contracts(), ["a", "c", "d"])
        await self.agree("d2")
        self.assertEqual(await self.contracts(), ["a", "d", "d2"])
        one_more = a_contract("d3", until=NOON + HOUR)
        await self.refused(QuotaExceeded, lambda guard: self.decentrl.save_contract(guard, one_more))
        self.assertEqual(await self.contracts(), ["a", "d", "d2"])
        await self.agree("e", peer=CAROL)
        await self.agree("f", owner=BOB, peer=ALICE)

    async def test_made_room_and_came_again(self) -> None:
        """What has made room is as if it had never been there, and can be saved again."""
        await self.agree("a", "b", "c", ttl=-10)
        await self.agree("d")
        self.assertEqual(await self.contracts(), ["b", "c", "d"])
        await self.agree("a", ttl=-10)
        self.assertEqual(await self.contracts(), ["c", "d", "a"])

    async def test_cap(self) -> None:
        """One owner has at most so many contracts; those of others, and those it is the peer of, do not count."""
        for number in range(5):
            await self.agree(f"c{number}", peer=f"did:example:{number}")
        one_more = a_contract("d", until=NOON + HOUR)
        await self.refused(QuotaExceeded, lambda guard: self.decentrl.save_contract(guard, one_more))
        self.assertEqual(len(await self.contracts()), 5)
        self.clock.advance(HOUR)
        await self.enlist(ALICE, BOB)
        await self.agree("d2")
        self.assertEqual(await self.contracts(), ["c1", "c2", "c3", "c4", "d2"])
        await self.agree("e", owner=BOB, peer=ALICE)
        self.assertEqual(await self.contracts(BOB), ["e"])
