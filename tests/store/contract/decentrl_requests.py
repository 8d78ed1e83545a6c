"""Contract for contract requests."""

from __future__ import annotations

from mediatord.errors import QuotaExceeded
from mediatord.store.interfaces.decentrl import ContractRequest, DecentrlQuotas
from tests.store.builders import ALICE, BOB
from tests.store.contract.decentrl_base import ALL, CAROL, ODD_TEXTS, DecentrlContract, make_request


class DecentrlRequestContract(DecentrlContract):
    """Contract for queued contract requests."""

    caps = DecentrlQuotas(requests=4, requests_of_one=2)

    async def acknowledge_requests(self, *ids: str, recipient: str = ALICE) -> None:
        await self.decentrl.acknowledge_requests(self.make_guard(recipient), recipient, ids)

    async def test_stores_request_unchanged(self) -> None:
        """A request comes back as it was added."""
        for number, text in enumerate(ODD_TEXTS):
            request = ContractRequest(f"r{number}", f"{CAROL}{text}", ALICE, text, f"{text} key")
            await self.decentrl.request_contract(self.make_guard(), request)
            found = await self.decentrl.contract_requests(ALICE, ALL)
            self.assertEqual(found.items, (request,))
            await self.acknowledge_requests(request.id)

    async def test_oldest_come_first(self) -> None:
        """Requests are listed in order of arrival, whoever the sender is."""
        await self.add_requests("c", sender=CAROL)
        await self.add_requests("a", sender=BOB)
        await self.add_requests("b", sender=CAROL)
        self.assertEqual(await self.list_requests(), ["c", "a", "b"])

    async def test_recipients_are_separate(self) -> None:
        """Requests are listed for their recipient only, not even for their sender."""
        await self.add_requests("a", sender=BOB, to=ALICE)
        self.assertEqual(await self.list_requests(BOB), [])
        self.assertEqual(await self.list_requests(ALICE[:-1]), [])
        self.assertEqual(await self.list_requests(ALICE), ["a"])

    async def test_repeated_request_is_stored_twice(self) -> None:
        """A request that is sent twice is stored twice."""
        for id in "ab":
            await self.decentrl.request_contract(self.make_guard(), ContractRequest(id, CAROL, ALICE, "same", "same"))
        self.assertEqual(await self.list_requests(), ["a", "b"])

    async def test_acknowledge_removes_requests(self) -> None:
        """Acknowledged requests are removed; unknown ids and repeated acknowledgements are ignored."""
        await self.add_requests("a", "b")
        await self.add_requests("c", sender=CAROL)
        await self.acknowledge_requests("a", "unknown", "c", "a", "")
        self.assertEqual(await self.list_requests(), ["b"])
        await self.acknowledge_requests("a")
        await self.acknowledge_requests()
        self.assertEqual(await self.list_requests(), ["b"])

    async def test_acknowledge_ignores_foreign_requests(self) -> None:
        """Requests of another recipient cannot be acknowledged, not even by their sender (DCTRL-0004 8.4)."""
        await self.add_requests("a", sender=BOB, to=ALICE)
        await self.acknowledge_requests("a", recipient=BOB)
        self.assertEqual(await self.list_requests(), ["a"])

    async def test_acknowledges_a_thousand_ids(self) -> None:
        """A thousand ids fit into one call."""
        await self.add_requests("a", "b")
        await self.acknowledge_requests("b", *(f"unknown {number}" for number in range(1500)))
        self.assertEqual(await self.list_requests(), ["a"])

    async def test_quota_per_sender(self) -> None:
        """At most so many requests of one sender are queued for one DID; other DIDs do not count."""
        await self.add_requests("a", "b", sender=CAROL)
        await self.assert_refused(
            QuotaExceeded, lambda guard: self.decentrl.request_contract(guard, make_request("c", CAROL))
        )
        await self.add_requests("d", sender=BOB)
        await self.add_requests("e", "f", sender=CAROL, to=BOB)
        self.assertEqual(await self.list_requests(), ["a", "b", "d"])

    async def test_quota_per_recipient(self) -> None:
        """At most so many requests are queued for one DID, from all senders."""
        await self.add_requests("a", "b", sender=CAROL)
        await self.add_requests("c", "d", sender=BOB)
        one_more = make_request("e", "did:example:dave")
        await self.assert_refused(QuotaExceeded, lambda guard: self.decentrl.request_contract(guard, one_more))
        self.assertEqual(await self.list_requests(), ["a", "b", "c", "d"])
        await self.add_requests("f", sender="did:example:dave", to=BOB)

    async def test_acknowledgement_frees_quota(self) -> None:
        """Acknowledged requests count no more, nor for their sender."""
        await self.add_requests("a", "b", sender=CAROL)
        await self.add_requests("c", "d", sender=BOB)
        await self.acknowledge_requests("b")
        await self.add_requests("e", sender=CAROL)
        self.assertEqual(await self.list_requests(), ["a", "c", "d", "e"])
        await self.assert_refused(
            QuotaExceeded, lambda guard: self.decentrl.request_contract(guard, make_request("f", CAROL))
        )

    async def test_pages_and_totals(self) -> None:
        """Any page can be read, even beyond the end, and the total does not depend on it."""
        await self.add_requests("z", "a")
        await self.add_requests("y", "b", sender=CAROL)
        await self.assert_pages(lambda part: self.decentrl.contract_requests(ALICE, part), ["z", "a", "y", "b"])
        await self.assert_pages(lambda part: self.decentrl.contract_requests(CAROL, part), [])
