"""Requests for contracts, until they are acknowledged."""

from __future__ import annotations

from mediatord.errors import QuotaExceeded
from mediatord.store.interfaces.decentrl import ContractRequest, DecentrlQuotas
from tests.store.builders import ALICE, BOB
from tests.store.contract.decentrl_base import ALL, CAROL, ODD_TEXTS, DecentrlContract, a_request


class DecentrlRequestContract(DecentrlContract):
    """Promises about contract requests."""

    caps = DecentrlQuotas(requests=4, requests_of_one=2)

    async def acknowledge(self, *ids: str, recipient: str = ALICE) -> None:
        await self.decentrl.acknowledge_requests(self.guard(recipient), recipient, ids)

    async def test_as_given(self) -> None:
        """A request comes back as it was given."""
        for number, text in enumerate(ODD_TEXTS):
            request = ContractRequest(f"r{number}", f"{CAROL}{text}", ALICE, text, f"{text} key")
            await self.decentrl.request_contract(self.guard(), request)
            found = await self.decentrl.contract_requests(ALICE, ALL)
            self.assertEqual(found.items, (request,))
            await self.acknowledge(request.id)

    async def test_oldest_first(self) -> None:
        """Requests wait in order of arrival, whoever they are from."""
        await self.request("c", sender=CAROL)
        await self.request("a", sender=BOB)
        await self.request("b", sender=CAROL)
        self.assertEqual(await self.requests(), ["c", "a", "b"])

    async def test_recipients_are_apart(self) -> None:
        """What waits for one waits for nobody else, its sender included."""
        await self.request("a", sender=BOB, to=ALICE)
        self.assertEqual(await self.requests(BOB), [])
        self.assertEqual(await self.requests(ALICE[:-1]), [])
        self.assertEqual(await self.requests(ALICE), ["a"])

    async def test_the_same_again(self) -> None:
        """Who asks twice has asked twice."""
        for id in "ab":
            await self.decentrl.request_contract(self.guard(), ContractRequest(id, CAROL, ALICE, "same", "same"))
        self.assertEqual(await self.requests(), ["a", "b"])

    async def test_acknowledge(self) -> None:
        """What its recipient acknowledges is gone; unknown ids, and those acknowledged before, are ignored."""
        await self.request("a", "b")
        await self.request("c", sender=CAROL)
        await self.acknowledge("a", "unknown", "c", "a", "")
        self.assertEqual(await self.requests(), ["b"])
        await self.acknowledge("a")
        await self.acknowledge()
        self.assertEqual(await self.requests(), ["b"])

    async def test_acknowledge_foreign(self) -> None:
        """Nobody acknowledges what waits for somebody else, not even its sender (DCTRL-0004 8.4)."""
        await self.request("a", sender=BOB, to=ALICE)
        await self.acknowledge("a", recipient=BOB)
        self.assertEqual(await self.requests(), ["a"])

    async def test_acknowledge_many(self) -> None:
        """A thousand ids are no more trouble than one."""
        await self.request("a", "b")
        await self.acknowledge("b", *(f"unknown {number}" for number in range(1500)))
        self.assertEqual(await self.requests(), ["a"])

    async def test_cap_of_one(self) -> None:
        """At most so many requests of one sender wait for one DID; to another DID it may send as many again."""
        await self.request("a", "b", sender=CAROL)
        await self.refused(QuotaExceeded, lambda guard: self.decentrl.request_contract(guard, a_request("c", CAROL)))
        await self.request("d", sender=BOB)
        await self.request("e", "f", sender=CAROL, to=BOB)
        self.assertEqual(await self.requests(), ["a", "b", "d"])

    async def test_cap(self) -> None:
        """At most so many requests wait for one DID, whoever they are from."""
        await self.request("a", "b", sender=CAROL)
        await self.request("c", "d", sender=BOB)
        one_more = a_request("e", "did:example:dave")
        await self.refused(QuotaExceeded, lambda guard: self.decentrl.request_contract(guard, one_more))
        self.assertEqual(await self.requests(), ["a", "b", "c", "d"])
        await self.request("f", sender="did:example:dave", to=BOB)

    async def test_acknowledged_makes_room(self) -> None:
        """What is acknowledged counts no more, for its sender neither."""
        await self.request("a", "b", sender=CAROL)
        await self.request("c", "d", sender=BOB)
        await self.acknowledge("b")
        await self.request("e", sender=CAROL)
        self.assertEqual(await self.requests(), ["a", "c", "d", "e"])
        await self.refused(QuotaExceeded, lambda guard: self.decentrl.request_contract(guard, a_request("f", CAROL)))

    async def test_slices(self) -> None:
        """Any slice can be asked for, however far beyond the end, and the total does not depend on it."""
        await self.request("z", "a")
        await self.request("y", "b", sender=CAROL)
        await self.slices(lambda part: self.decentrl.contract_requests(ALICE, part), ["z", "a", "y", "b"])
        await self.slices(lambda part: self.decentrl.contract_requests(CAROL, part), [])
