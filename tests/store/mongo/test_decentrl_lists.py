"""Long lists of events on a real MongoDB server."""

from __future__ import annotations

import random
from typing import Any

from twisted.internet.defer import DeferredList

from mediatord.errors import RateLimitExceeded
from mediatord.store.interfaces.decentrl import EventFilter, PageRequest, PublicEvent, PublicEventFilter, StoredEvent
from tests.store.builders import ALICE, BOB
from tests.store.mongo.decentrl_test_case import MongoDecentrlTestCase

CAROL = "did:example:carol"
SCAN_STEP = 7
LENGTH = 120


class LongListTests(MongoDecentrlTestCase):
    """Lists of many steps, whose events often have the same time."""

    step = SCAN_STEP
    nodes = 2

    async def setUp(self) -> None:  # type: ignore[override]  # trial waits for it
        await super().setUp()
        # The same every time.
        self.draw = random.Random(1)  # noqa: S311  nothing that is to be secret
        self.held = [self.make_random_event() for _ in range(LENGTH)]
        await self.decentrl.save_events(self.make_guard(), ALICE, self.held)
        self.held.sort(key=lambda event: event.timestamp)

    def make_random_event(self) -> StoredEvent:
        sender = self.draw.choice([ALICE, BOB, CAROL])
        tags = self.draw.sample(["x", "y", "z"], self.draw.randrange(3))
        # For a while, the clock stands still.
        return self.make_stored_event(*tags, at=max(float(self.draw.randrange(40)), 12.0), sender=sender)

    def filter_expected(self, wanted: EventFilter) -> list[str]:
        return [
            event.id
            for event in self.held
            if (not wanted.tags or set(wanted.tags) & set(event.tags))
            and wanted.participant in (None, event.sender_did, event.recipient_did)
            and (wanted.after is None or event.timestamp >= wanted.after)
            and (wanted.before is None or event.timestamp <= wanted.before)
            and not (wanted.unprocessed_only and event.sender_did == ALICE)
        ]

    async def list_ids(self, wanted: EventFilter, part: PageRequest, node: int = 0) -> tuple[list[str], int]:
        found = await self.node_stores[node].events(ALICE, wanted, part)
        return [event.id for event in found.items], found.total

    async def test_any_page(self) -> None:
        """Any page is right, in any order of requests."""
        filters = (
            EventFilter(),
            EventFilter(("x",)),
            EventFilter(("x", "y")),
            EventFilter(participant=BOB),
            EventFilter(unprocessed_only=True, after=12.0),
            EventFilter(("x", "z"), CAROL),
            EventFilter(("y",), BOB, 5.0, 30.0, unprocessed_only=True),
            EventFilter(("z",), ALICE, before=25.0),
        )
        for wanted in filters:
            expected = self.filter_expected(wanted)
            self.assertGreater(len(expected), SCAN_STEP, wanted)
            for _ in range(12):
                part = PageRequest(
                    self.draw.randrange(len(expected) + 5), self.draw.choice([1, 3, SCAN_STEP, 20, 200])
                )
                found = await self.list_ids(wanted, part)
                self.assertEqual(found, (expected[part.offset :][: part.limit], len(expected)), (wanted, part))

    async def test_page_by_page(self) -> None:
        """Reading page by page gives each event once, from either end."""
        wanted = EventFilter(("x", "y"))
        expected = self.filter_expected(wanted)
        pages = [await self.list_ids(wanted, PageRequest(offset, 5)) for offset in range(0, len(expected), 5)]
        self.assertEqual([id for ids, _ in pages for id in ids], expected)
        for offset in reversed(range(0, len(expected), 5)):
            self.assertEqual((await self.list_ids(wanted, PageRequest(offset, 5)))[0], expected[offset:][:5])

    async def test_public_events_newest_first(self) -> None:
        """Public events are read page by page too, in the other direction."""
        events = [
            PublicEvent(f"public {number}", "", ("odd",) if number % 2 else (), float(number // 6), "")
            for number in range(60)
        ]
        for event in events:
            await self.decentrl.publish(self.make_guard(), ALICE, event)
        expected = [event.id for event in sorted(reversed(events), key=lambda event: -event.timestamp)]
        for wanted, ids in (
            (PublicEventFilter(), expected),
            (PublicEventFilter(("odd",)), [id for id in expected if int(id.split()[1]) % 2]),
            (PublicEventFilter(after=2, before=7), expected[12:48]),
        ):
            for part in (
                PageRequest(0, 3),
                PageRequest(25, 4),
                PageRequest(17, 99),
                PageRequest(3, 20),
                PageRequest(99, 9),
            ):
                found = await self.decentrl.public_events(ALICE, wanted, part)
                self.assertEqual([event.id for event in found.items], ids[part.offset :][: part.limit])
                self.assertEqual(found.total, len(ids))

    async def test_sees_changes_of_other_node(self) -> None:
        """Changes by another node are seen at once."""
        wanted = EventFilter(("x",))
        expected = self.filter_expected(wanted)
        self.assertEqual(await self.list_ids(wanted, PageRequest(10, 5)), (expected[10:15], len(expected)))
        first = self.make_stored_event("x", at=-1.0)
        await self.node_stores[1].save_events(self.make_guard(), ALICE, [first])
        expected.insert(0, first.id)
        self.assertEqual(await self.list_ids(wanted, PageRequest(10, 5)), (expected[10:15], len(expected)))
        await self.node_stores[1].update_tags(self.make_guard(), ALICE, [(expected[3], ())])
        del expected[3]
        self.assertEqual(await self.list_ids(wanted, PageRequest(10, 5)), (expected[10:15], len(expected)))

    async def test_scans_are_bounded(self) -> None:
        """The scans of an owner are bounded; cached positions need none."""
        labels = [EventFilter(("x",), after=float(number)) for number in range(8)]
        deferreds = [self.decentrl.events(ALICE, wanted, PageRequest(20, 5)) for wanted in labels]
        results: list[Any] = await DeferredList(deferreds, consumeErrors=True)
        cached = next(wanted for wanted, (done, _) in zip(labels, results, strict=True) if done)
        refusals = [result for done, result in results if not done]
        self.assertIn(len(refusals), range(1, 5))
        self.assertEqual({(item.type, item.value.retry_after) for item in refusals}, {(RateLimitExceeded, 1)})
        deferreds = [self.decentrl.events(ALICE, cached, PageRequest(20, 5)) for _ in range(8)]
        self.assertEqual([done for done, _ in await DeferredList(deferreds, consumeErrors=True)], [True] * 8)
        for wanted in labels:
            expected = self.filter_expected(wanted)
            self.assertEqual(await self.list_ids(wanted, PageRequest(20, 5)), (expected[20:25], len(expected)))
