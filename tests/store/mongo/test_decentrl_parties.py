"""Pruning of registrations and parties on a real MongoDB server."""

from __future__ import annotations

from mediatord.store.interfaces.decentrl import ContractRequest, PublicEvent
from tests.store.builders import ALICE, BOB, HOUR, NOON
from tests.store.mongo.decentrl_test_case import MongoDecentrlTestCase

CAROL = "did:example:carol"


class PruneTests(MongoDecentrlTestCase):
    """What `prune` deletes."""

    async def prune(self, seconds: float = 0.0) -> tuple[int, list[str]]:
        """How many registrations were deleted, and the parties that are left."""
        self.clock.advance(seconds)
        dropped = await self.decentrl.drop_expired_registrations()
        return dropped, sorted(one["did"] for one in self.documents.parties.find())

    async def enrol(self, did: str, ttl: float) -> None:
        await self.decentrl.save_contract(self.guard(), self.a_contract(None, did, self.clock.seconds() + ttl))

    async def test_expired(self) -> None:
        """An expired registration is deleted, and its party with the last one."""
        await self.enrol(ALICE, 10)
        await self.enrol(ALICE, 20)
        await self.enrol(BOB, 20)
        self.assertEqual(await self.prune(9), (0, [ALICE, BOB]))
        self.assertEqual(await self.prune(1), (1, [ALICE, BOB]))
        self.assertEqual(await self.decentrl.registered_until(ALICE), NOON + 20)
        self.assertEqual(await self.prune(10), (2, []))
        self.assertEqual(await self.prune(HOUR), (0, []))

    async def test_kept_for(self) -> None:
        """A party with documents stays."""
        decentrl, guard = self.decentrl, self.guard
        dids = [f"did:example:{name}" for name in ("agreed", "asked", "mailed", "stored", "published")]
        agreed, asked, mailed, stored, published = dids
        pending, event = self.an_event(mailed), self.kept_event()
        await self.agree(agreed)
        await decentrl.request_contract(guard(), ContractRequest("request", BOB, asked, "", ""))
        await self.agree(mailed)
        await decentrl.enqueue_event(guard(), pending)
        await decentrl.save_events(guard(), stored, [event])
        await decentrl.publish(guard(), published, PublicEvent("public", "", (), 1.0, ""))
        await self.enrol(CAROL, 1)
        self.assertEqual(await self.prune(2), (1, sorted(dids)))
        await decentrl.acknowledge_requests(guard(), asked, ["request"])
        await decentrl.acknowledge_events(guard(), mailed, [pending.id])
        await decentrl.unpublish(guard(), published, "public")
        self.assertEqual(await self.prune(), (0, sorted([agreed, mailed, stored])))
        self.assertEqual(self.miscounted(), [])

    async def test_comes_again(self) -> None:
        """A party that was deleted can register again."""
        await self.enrol(ALICE, 1)
        self.assertEqual(await self.prune(2), (1, []))
        await self.enrol(ALICE, 1)
        await self.agree(ALICE)
        await self.decentrl.enqueue_event(self.guard(ALICE, ALICE), self.an_event())
        self.assertEqual(await self.prune(2), (1, [ALICE]))
        self.assertEqual(self.miscounted(), [])

    async def test_many(self) -> None:
        """Thousands are deleted in batches."""
        registrations = [{"_id": f"r{n}", "party": b"%016d" % n, "until": NOON - n} for n in range(2500)]
        self.documents.registrations.insert_many(registrations)
        await self.enrol(ALICE, 1)
        self.assertEqual(await self.prune(), (2500, [ALICE]))
        self.assertEqual(self.documents.registrations.count_documents({}), 1)
