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
        return dropped, sorted(document["did"] for document in self.documents.parties.find())

    async def register_did(self, did: str, ttl: float) -> None:
        await self.decentrl.save_contract(
            self.make_guard(), self.make_contract(None, did, self.clock.seconds() + ttl)
        )

    async def test_deletes_expired_registration(self) -> None:
        """An expired registration is deleted, and its party with the last one."""
        await self.register_did(ALICE, 10)
        await self.register_did(ALICE, 20)
        await self.register_did(BOB, 20)
        self.assertEqual(await self.prune(9), (0, [ALICE, BOB]))
        self.assertEqual(await self.prune(1), (1, [ALICE, BOB]))
        self.assertEqual(await self.decentrl.registered_until(ALICE), NOON + 20)
        self.assertEqual(await self.prune(10), (2, []))
        self.assertEqual(await self.prune(HOUR), (0, []))

    async def test_keeps_party_with_documents(self) -> None:
        """A party with documents stays."""
        decentrl, guard = self.decentrl, self.make_guard
        dids = [f"did:example:{name}" for name in ("agreed", "asked", "mailed", "stored", "published")]
        agreed, requested, mailed, stored, published = dids
        pending, event = self.make_pending_event(mailed), self.make_stored_event()
        await self.save_contract(agreed)
        await decentrl.request_contract(guard(), ContractRequest("request", BOB, requested, "", ""))
        await self.save_contract(mailed)
        await decentrl.enqueue_event(guard(), pending)
        await decentrl.save_events(guard(), stored, [event])
        await decentrl.publish(guard(), published, PublicEvent("public", "", (), 1.0, ""))
        await self.register_did(CAROL, 1)
        self.assertEqual(await self.prune(2), (1, sorted(dids)))
        await decentrl.acknowledge_requests(guard(), requested, ["request"])
        await decentrl.acknowledge_events(guard(), mailed, [pending.id])
        await decentrl.unpublish(guard(), published, "public")
        self.assertEqual(await self.prune(), (0, sorted([agreed, mailed, stored])))
        self.assertEqual(self.find_miscounted(), [])

    async def test_deleted_party_can_register_again(self) -> None:
        """A party that was deleted can register again."""
        await self.register_did(ALICE, 1)
        self.assertEqual(await self.prune(2), (1, []))
        await self.register_did(ALICE, 1)
        await self.save_contract(ALICE)
        await self.decentrl.enqueue_event(self.make_guard(ALICE, ALICE), self.make_pending_event())
        self.assertEqual(await self.prune(2), (1, [ALICE]))
        self.assertEqual(self.find_miscounted(), [])

    async def test_deletes_in_batches(self) -> None:
        """Thousands are deleted in batches."""
        registrations = [{"_id": f"r{n}", "party": b"%016d" % n, "until": NOON - n} for n in range(2500)]
        self.documents.registrations.insert_many(registrations)
        await self.register_did(ALICE, 1)
        self.assertEqual(await self.prune(), (2500, [ALICE]))
        self.assertEqual(self.documents.registrations.count_documents({}), 1)
