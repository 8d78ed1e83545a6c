"""Keys and documents that the MongoDB server examines for Decentrl."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from twisted.internet.defer import Deferred, gatherResults

from mediatord.errors import PayloadTooLarge
from mediatord.store.interfaces.decentrl import (
    MAX_PAGE_BYTES,
    ContractFilter,
    ContractRequest,
    DecentrlQuotas,
    EventFilter,
    PageRequest,
    PendingEvent,
    PublicEvent,
    PublicEventFilter,
    StoredEvent,
)
from mediatord.store.interfaces.messages import ArrivalWindow
from tests.store.builders import ALICE, BOB, HOUR, NOON
from tests.store.mongo.decentrl_test_case import MongoDecentrlTestCase

# Number of other parties, and of documents of each kind that each of them and ALICE has.
OTHER_PARTIES = 12
ITEMS_OF_EACH_KIND = 6

# What may be examined for two items, with their party, its counters, and the bounds of a search.
KEYS, DOCUMENTS = 16, 9
# Tags of one search, more than are read side by side and merged.
TAGS = tuple([f"tag {number}" for number in range(400)])

PEER = "did:peer:1"
CAROL = "did:example:carol"
PAGE = PageRequest(1, 2)

Ask = Callable[[], Deferred[Any]]


class PlanTestCase(MongoDecentrlTestCase):
    """The server's profiler."""

    async def profile(self, operation: Ask) -> list[dict[str, Any]]:
        """Operations with their costs."""
        database = self.documents
        database.command("profile", 2)
        try:
            await operation()
        finally:
            database.command("profile", 0)
        profiled = list(database["system.profile"].find({"ns": {"$ne": f"{self.database}.system.profile"}}))
        database["system.profile"].drop()
        self.assertTrue(profiled)
        for entry in profiled:
            self.assertNotIn("COLLSCAN", entry.get("planSummary", ""), entry["ns"])
        return profiled

    async def measure_examined(self, operation: Ask) -> tuple[int, int]:
        """Examined keys and documents."""
        profiled = await self.profile(operation)
        return sum(entry.get("keysExamined", 0) for entry in profiled), sum(
            entry.get("docsExamined", 0) for entry in profiled
        )

    async def assert_examines_little(
        self, operations: dict[str, Ask], keys: int = KEYS, documents: int = DOCUMENTS
    ) -> None:
        for name, operation in operations.items():
            looked_at = await self.measure_examined(operation)
            self.assertLessEqual(looked_at[0], keys, name)
            self.assertLessEqual(looked_at[1], documents, name)


class PlanTests(PlanTestCase):
    """No query scans a collection, or depends on documents of others."""

    async def setUp(self) -> None:  # type: ignore[override]  # trial waits for it
        await super().setUp()
        dids = [*(f"did:example:{number}" for number in range(OTHER_PARTIES)), ALICE]
        await gatherResults([Deferred.fromCoroutine(self.fill_party(did)) for did in dids])

    async def fill_party(self, did: str) -> None:
        """Store documents of all kinds."""
        decentrl, events = self.decentrl, []
        await self.register_dids(did)
        for number in range(ITEMS_OF_EACH_KIND):
            peer, tags = f"did:peer:{number % 3}", ("x", f"tag {number}")
            await self.save_contract(did, peer)
            await decentrl.request_contract(
                self.make_guard(), ContractRequest(f"request {did} {number}", peer, did, "", "")
            )
            pending = PendingEvent(f"pending {did} {number}", did, peer, "", NOON + number)
            await decentrl.enqueue_event(self.make_guard(), pending)
            public = PublicEvent(f"public {did} {number}", "", tags, number, "", f"channel {number % 2}")
            await decentrl.publish(self.make_guard(), did, public)
            events.append(StoredEvent(f"event {did} {number}", peer, did, "", tags, number))
        await decentrl.save_events(self.make_guard(), did, events)

    async def test_contracts_requests_and_pending_events(self) -> None:
        """Pages of contracts, requests and pending events are ranges of an index."""
        decentrl = self.decentrl
        pending_ids = [f"pending {ALICE} {number}" for number in (1, 3)]
        await self.assert_examines_little(
            {
                "registered_until": lambda: decentrl.registered_until(ALICE),
                "contracts": lambda: decentrl.contracts(ALICE, ContractFilter(), PAGE),
                "of a pair": lambda: decentrl.contracts(ALICE, ContractFilter(PEER), PAGE),
                "between times": lambda: decentrl.contracts(ALICE, ContractFilter(None, NOON + 2 * HOUR, NOON), PAGE),
                "both": lambda: decentrl.contracts(ALICE, ContractFilter(PEER, NOON + 2 * HOUR, NOON), PAGE),
                "contract_requests": lambda: decentrl.contract_requests(ALICE, PAGE),
                "pending_events": lambda: decentrl.pending_events(ALICE, None, PAGE),
                "of one sender": lambda: decentrl.pending_events(ALICE, PEER, PAGE),
                "find_pending": lambda: decentrl.find_pending(pending_ids),
            }
        )
        for window in (ArrivalWindow(NOON, NOON + 2), ArrivalWindow(NOON, NOON + 2, "a")):
            arrived = partial(decentrl.find_pending_arrivals, [ALICE], window, limit=10)
            await self.assert_examines_little({"arrived_pending": arrived}, documents=0)

    async def test_stored_events(self) -> None:
        """Pages of stored events are ranges of an index, for any search."""
        decentrl = self.decentrl
        await self.assert_examines_little(
            {
                str(wanted): lambda wanted=wanted: decentrl.events(ALICE, wanted, PAGE)  # type: ignore[misc]
                for wanted in (
                    EventFilter(),
                    EventFilter(("x",)),
                    EventFilter(("tag 1", "tag 2")),
                    EventFilter(participant=PEER),
                    EventFilter(unprocessed_only=True),
                    EventFilter(after=1, before=3),
                    EventFilter(("x",), PEER),
                    EventFilter(("x",), PEER, 0, 3, unprocessed_only=True),
                )
            }
        )
        many = EventFilter(TAGS)
        await self.assert_examines_little(
            {"many tags": lambda: decentrl.events(ALICE, many, PAGE)}, keys=3 * len(TAGS)
        )

    async def test_public_events(self) -> None:
        """Pages of public events are ranges of an index."""
        decentrl = self.decentrl
        await self.assert_examines_little(
            {
                str(wanted): lambda wanted=wanted: decentrl.public_events(ALICE, wanted, PAGE)  # type: ignore[misc]
                for wanted in (
                    PublicEventFilter(),
                    PublicEventFilter(("x",)),
                    PublicEventFilter(channel_id="channel 1"),
                    PublicEventFilter(("x",), channel_id="channel 1"),
                    PublicEventFilter(after=1, before=3),
                )
            }
        )

    async def test_commands_examine_what_they_change(self) -> None:
        """A command examines only what it changes."""
        decentrl, pending, event = self.decentrl, f"pending {ALICE} 1", f"event {ALICE} 1"
        await self.assert_examines_little(
            {
                "admit": lambda: decentrl.check_guard(self.make_guard(ALICE, "did:example:3")),
                "register": lambda: decentrl.save_contract(self.make_guard(), self.make_contract(None, ALICE)),
                "agree": lambda: decentrl.save_contract(self.make_guard(ALICE), self.make_contract(ALICE, PEER)),
                "request": lambda: decentrl.request_contract(
                    self.make_guard(), ContractRequest("r", PEER, ALICE, "", "")
                ),
                "acknowledge_requests": lambda: decentrl.acknowledge_requests(self.make_guard(), ALICE, ["r"]),
                "deliver": lambda: decentrl.enqueue_event(
                    self.make_guard(None, ALICE), self.make_pending_event(ALICE, PEER)
                ),
                "acknowledge_events": lambda: decentrl.acknowledge_events(self.make_guard(), ALICE, [pending]),
                "save_events": lambda: decentrl.save_events(
                    self.make_guard(), ALICE, [self.make_stored_event("x", "y")]
                ),
                "update_tags": lambda: decentrl.update_tags(self.make_guard(), ALICE, [(event, ("z",))]),
                "publish": lambda: decentrl.publish(self.make_guard(), ALICE, PublicEvent("p", "", ("x",), 1, "")),
                "unpublish": lambda: decentrl.unpublish(self.make_guard(), ALICE, "p"),
                "prune": decentrl.drop_expired_registrations,
            }
        )
        self.assertEqual(self.find_miscounted(), [])


class MemoryTests(PlanTestCase):
    """Memory is bounded by the size of a reply."""

    caps = DecentrlQuotas(pending_bytes=4 * MAX_PAGE_BYTES)

    async def setUp(self) -> None:  # type: ignore[override]  # trial waits for it
        await super().setUp()
        await self.save_contract(ALICE, PEER)
        self.events = [self.make_pending_event(ALICE, PEER, "x" * (MAX_PAGE_BYTES // 2 - 1_000)) for _ in range(5)]
        for event in self.events:
            await self.decentrl.enqueue_event(self.make_guard(), event)

    async def measure_sent(self, operation: Ask) -> int:
        """Bytes that the server has sent."""
        return sum([entry.get("responseLength", 0) for entry in await self.profile(operation)])

    async def test_find_pending_reads_one_extra_batch(self) -> None:
        """Of events that exceed a page, those that fit and one more batch are read."""
        ids = [event.id for event in self.events]
        sent = await self.measure_sent(lambda: self.decentrl.find_pending(ids))
        self.assertLess(sent, 2.1 * MAX_PAGE_BYTES)
        found = await self.decentrl.find_pending(ids)
        self.assertEqual([event.id for event in found], ids[:2])

    async def test_too_large_page_is_not_read(self) -> None:
        """Documents that are rejected for their size are not read."""
        part = PageRequest(0, 5)
        sent = await self.measure_sent(
            lambda: self.assertFailure(self.decentrl.pending_events(ALICE, None, part), PayloadTooLarge)
        )
        self.assertLess(sent, 10_000)


class LongListPlanTests(PlanTestCase):
    """Of a long list that was scanned once, at most a step and a page are examined."""

    step = 16

    async def setUp(self) -> None:  # type: ignore[override]  # trial waits for it
        await super().setUp()
        events = [self.make_stored_event("x", "yz"[number % 2], at=number) for number in range(400)]
        await self.decentrl.save_events(self.make_guard(), ALICE, events)

    async def test_searches_with_one_and_several_criteria(self) -> None:
        """Searches with one criterion and with several examine a step and a page."""
        for wanted, total in (
            (EventFilter(), 400),
            (EventFilter(("x",)), 400),
            (EventFilter(("y", "z")), 400),
            (EventFilter(("z",), BOB), 200),
            (EventFilter(("x",), ALICE, after=100), 300),
        ):
            walked, _ = await self.measure_examined(self.read_page(wanted, total - 2))
            self.assertGreater(walked, total)
            offsets = (150, 0, total - 2, total // 2, total // 2 + 2, 152)
            operations = {f"{wanted} {offset}": self.read_page(wanted, offset) for offset in offsets}
            await self.assert_examines_little(operations, keys=5 * self.step, documents=3 * self.step)

    async def test_looks_up_rarest_label(self) -> None:
        """Of several labels the rarest is looked up, even the first time."""
        rare = [self.make_stored_event("x", at=number, sender=CAROL) for number in range(0, 400, 40)]
        await self.decentrl.save_events(self.make_guard(), ALICE, rare)
        _, documents = await self.measure_examined(self.read_page(EventFilter(("x",), CAROL), 5))
        self.assertLessEqual(documents, 3 * len(rare))

    def read_page(self, wanted: EventFilter, offset: int) -> Ask:
        return lambda: self.decentrl.events(ALICE, wanted, PageRequest(offset, 2))
