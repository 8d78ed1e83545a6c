"""Contract for stored events and their queries."""

from __future__ import annotations

from itertools import product

from mediatord.errors import StoreUnavailable
from mediatord.store.interfaces.decentrl import EventFilter, PageRequest, StoredEvent
from tests.store.builders import ALICE, BOB, HOUR
from tests.store.contract.decentrl_base import ALL, CAROL, LARGE_TEXTS, ODD_TEXTS, DecentrlContract, make_event

DAVE = "did:example:dave"


class DecentrlEventContract(DecentrlContract):
    """Contract for saving events, and for finding them by one criterion."""

    async def test_stores_event_unchanged(self) -> None:
        """An event comes back as it was saved: its texts, and its tags in order with duplicates."""
        events = [
            StoredEvent(f"e{number}", f"{BOB}{text}", f"{CAROL}{text}", text, (text, "x", text), float(number), text)
            for number, text in enumerate(ODD_TEXTS)
        ]
        events.append(StoredEvent("all", ALICE, ALICE, "", tuple(reversed(ODD_TEXTS)), 1e9 + 1 / 3))
        events.append(StoredEvent("none", ALICE, ALICE, "x" * 100_000, (), 1.7e15))
        await self.save_events(*events)
        found = await self.decentrl.events(ALICE, EventFilter(), ALL)
        self.assertEqual((found.items, found.total), (tuple(events), len(events)))

    async def test_lists_by_timestamp(self) -> None:
        """Events are ordered by timestamp, and those of one timestamp in the order of saving."""
        await self.save_events(make_event("d", at=3), make_event("b", at=1.5), make_event("z", at=2))
        await self.save_events(make_event("y", at=2), make_event("a", at=-1))
        await self.save_events(make_event("x", at=2), make_event("c", at=1e300))
        self.assertEqual(await self.list_events(), ["a", "b", "z", "y", "x", "d", "c"])

    async def test_owners_are_separate(self) -> None:
        """An event belongs to its owner alone, whoever its participants are."""
        await self.save_events(make_event("a", "tag", sender=BOB, recipient=ALICE))
        await self.save_events(make_event("b", "tag", sender=BOB, recipient=ALICE), owner=BOB)
        self.assertEqual(await self.list_events("tag", participant=ALICE), ["a"])
        self.assertEqual(await self.list_events("tag", participant=ALICE, owner=BOB), ["b"])
        for other in (CAROL, ALICE[:-1], ""):
            self.assertEqual(await self.list_events(owner=other), [])

    async def test_saves_all_or_none(self) -> None:
        """If one event cannot be saved, none is."""
        await self.save_events(make_event("a", "tag"))
        for ids in ("bcab", "bcb"):
            with self.assertRaises(StoreUnavailable):
                await self.save_events(*(make_event(id, "tag") for id in ids))
            self.assertEqual(await self.list_events("tag"), ["a"])
        await self.save_events(*(make_event(id, "tag") for id in "bcd"))
        self.assertEqual(await self.list_events("tag"), ["a", "b", "c", "d"])

    async def test_no_tags_match_everything(self) -> None:
        """Without tags, or with processed events included, everything matches (reference 8)."""
        await self.save_events(make_event("a", "tag"), make_event("b", sender=ALICE))
        self.assertEqual(await self.list_events(), ["a", "b"])
        self.assertEqual(await self.list_events(unprocessed_only=False), ["a", "b"])

    async def test_finds_by_any_tag_once(self) -> None:
        """An event is found by any of its tags, once, however many match or are repeated."""
        await self.save_events(
            make_event("a", "x", "y", "x"),
            make_event("b", "y"),
            make_event("c", "z"),
            make_event("d"),
            make_event("e", "x"),
        )
        self.assertEqual(await self.list_events("x"), ["a", "e"])
        self.assertEqual(await self.list_events("x", "y"), ["a", "b", "e"])
        self.assertEqual(await self.list_events("z", "x", "z", "unknown", "y"), ["a", "b", "c", "e"])
        self.assertEqual(await self.list_events("unknown"), [])

    async def test_results_of_several_tags_are_ordered(self) -> None:
        """Events found by different tags are in order too."""
        await self.save_events(
            make_event("a", "x", at=3), make_event("b", "y", at=1), make_event("c", "x", "y", at=2)
        )
        await self.save_events(make_event("d", "y", at=3), make_event("e", "x", at=1))
        self.assertEqual(await self.list_events("x", "y"), ["b", "e", "c", "a", "d"])
        self.assertEqual(await self.list_events("y", "x"), ["b", "e", "c", "a", "d"])

    async def test_tags_match_exactly(self) -> None:
        """Tags match exactly and not as prefixes; the empty tag is a tag like any other."""
        await self.save_events(
            *(make_event(f"e{number}", text) for number, text in enumerate(ODD_TEXTS)), make_event("none")
        )
        for number, text in enumerate(ODD_TEXTS):
            self.assertEqual(await self.list_events(text), [f"e{number}"])

    async def test_accepts_a_thousand_tags(self) -> None:
        """An event may have a thousand tags, and a query too."""
        tags = [f"tag {number}" for number in range(1500)]
        await self.save_events(make_event("a", *tags), make_event("b", tags[7]))
        self.assertEqual(await self.list_events(tags[-1]), ["a"])
        self.assertEqual(await self.list_events(*tags), ["a", "b"])

    async def test_finds_by_participant(self) -> None:
        """A participant is the sender or the recipient, which the owner can be too; one who is both is found once."""
        await self.save_events(
            make_event("a", sender=BOB, recipient=ALICE),
            make_event("b", sender=ALICE, recipient=CAROL),
            make_event("c", sender=ALICE, recipient=ALICE),
            make_event("d", sender=BOB, recipient=CAROL),
        )
        self.assertEqual(await self.list_events(participant=ALICE), ["a", "b", "c"])
        self.assertEqual(await self.list_events(participant=BOB), ["a", "d"])
        self.assertEqual(await self.list_events(participant=CAROL), ["b", "d"])
        for other in (BOB[:-1], BOB.upper(), "", "%"):
            self.assertEqual(await self.list_events(participant=other), [])

    async def test_timestamp_bounds_are_inclusive(self) -> None:
        """Both bounds are inclusive, and fractions count."""
        await self.save_events(*(make_event(f"e{at}", at=at) for at in (1, 2, 2.5, 3)))
        self.assertEqual(await self.list_events(after=2), ["e2", "e2.5", "e3"])
        self.assertEqual(await self.list_events(before=2), ["e1", "e2"])
        self.assertEqual(await self.list_events(after=2, before=2), ["e2"])
        self.assertEqual(await self.list_events(after=2.1, before=2.9), ["e2.5"])
        self.assertEqual(await self.list_events(after=3, before=1), [])
        self.assertEqual(await self.list_events(after=-1e300, before=1e300), ["e1", "e2", "e2.5", "e3"])
        self.assertEqual(await self.list_events(before=0), [])

    async def test_zero_is_a_bound(self) -> None:
        """A bound of zero is a bound."""
        await self.save_events(*(make_event(f"e{at}", at=at) for at in (-1, 0, 1)))
        self.assertEqual(await self.list_events(after=0), ["e0", "e1"])
        self.assertEqual(await self.list_events(before=0), ["e-1", "e0"])

    async def test_unprocessed_excludes_sent_events(self) -> None:
        """Events that the owner sent are processed from the start, others are not (DCTRL-0004 8.9)."""
        await self.save_events(
            make_event("a", sender=BOB, recipient=ALICE),
            make_event("b", sender=ALICE, recipient=BOB),
            make_event("c", sender=BOB, recipient=BOB),
            make_event("d", sender=ALICE, recipient=ALICE),
        )
        self.assertEqual(await self.list_events(unprocessed_only=True), ["a", "c"])

    async def test_refuses_too_large_page(self) -> None:
        """A page of too many bytes is refused, so that a smaller one can be requested; tags do not count."""
        await self.save_events(
            *(make_event(f"e{number}", "tag", payload=text) for number, text in enumerate(LARGE_TEXTS))
        )
        await self.assert_page_is_limited(lambda part: self.decentrl.events(ALICE, EventFilter(("tag",)), part))

    async def test_readable_after_registration_lapsed(self) -> None:
        """Stored events stay readable when the registration has lapsed; refusing is not the store's task."""
        await self.save_events(make_event("a"))
        self.clock.advance(2 * HOUR)
        self.assertEqual(await self.list_events(), ["a"])


class DecentrlFilterContract(DecentrlContract):
    """Contract for finding events by several criteria, and for pages."""

    async def setUp(self) -> None:  # type: ignore[override]  # trial waits for it
        await super().setUp()
        self.saved: list[tuple[StoredEvent, bool]] = []
        participants = ((ALICE, BOB), (BOB, ALICE), (CAROL, ALICE), (ALICE, CAROL), (CAROL, DAVE))
        tags = ((), ("x",), ("y", "x"), ("z", "z"), ("y",))
        number = 0
        for (sender, recipient), own_tags, at in product(participants, tags, (2.0, 1.0)):
            number += 1
            event = make_event(f"e{number:02}", *own_tags, at=at, sender=sender, recipient=recipient)
            self.saved.append((event, sender != ALICE))
        await self.save_events(*(event for event, _ in self.saved[:17]))
        await self.save_events(*(event for event, _ in self.saved[17:]))
        await self.save_events(make_event("foreign", "x", "y", "z"), owner=BOB)

    def filter_expected(self, wanted: EventFilter) -> list[str]:
        """What the docstring of the filter specifies."""
        found = [event for event, unprocessed in self.saved if self.matches_filter(event, unprocessed, wanted)]
        return [event.id for event in sorted(found, key=lambda event: event.timestamp)]

    @staticmethod
    def matches_filter(event: StoredEvent, unprocessed: bool, wanted: EventFilter) -> bool:
        return (
            (not wanted.tags or bool(set(wanted.tags) & set(event.tags)))
            and wanted.participant in (None, event.sender_did, event.recipient_did)
            and (wanted.after is None or event.timestamp >= wanted.after)
            and (wanted.before is None or event.timestamp <= wanted.before)
            and (unprocessed or not wanted.unprocessed_only)
        )

    async def test_combines_all_filters(self) -> None:
        """All filters must match, and totals count all matches."""
        combinations = product(
            ((), ("x",), ("y", "z"), ("y", "x", "unknown")),
            (None, ALICE, CAROL),
            (None, 2.0),
            (None, 1.0),
            (False, True),
        )
        for combination in combinations:
            wanted = EventFilter(*combination)
            expected = self.filter_expected(wanted)
            found = await self.decentrl.events(ALICE, wanted, ALL)
            self.assertEqual(([event.id for event in found.items], found.total), (expected, len(expected)))
            some = await self.decentrl.events(ALICE, wanted, PageRequest(2, 3))
            self.assertEqual(([event.id for event in some.items], some.total), (expected[2:5], len(expected)))

    async def test_pages_and_totals(self) -> None:
        """Any page can be read, even beyond the end, and the total does not depend on it."""
        for wanted in (
            EventFilter(),
            EventFilter(("x",)),
            EventFilter(("y", "x"), ALICE, unprocessed_only=True),
            EventFilter(("unknown",)),
            EventFilter(participant=CAROL, before=1),
        ):
            await self.assert_pages(
                lambda part, wanted=wanted: self.decentrl.events(ALICE, wanted, part),  # type: ignore[misc]
                self.filter_expected(wanted),
            )

    async def test_pages_cover_every_event_once(self) -> None:
        """Reading page by page gives each event once."""
        pages = [
            await self.decentrl.events(ALICE, EventFilter(("x", "y")), PageRequest(page * 7, 7)) for page in range(5)
        ]
        ids = [event.id for page in pages for event in page.items]
        self.assertEqual(ids, self.filter_expected(EventFilter(("x", "y"))))
