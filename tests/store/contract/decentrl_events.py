"""Events that an identity keeps for itself, and how they are found."""

from __future__ import annotations

from itertools import product

from mediatord.errors import StoreUnavailable
from mediatord.store.interfaces.decentrl import EventFilter, PageRequest, StoredEvent
from tests.store.builders import ALICE, BOB, HOUR
from tests.store.contract.decentrl_base import ALL, CAROL, LARGE_TEXTS, ODD_TEXTS, DecentrlContract, an_event

DAVE = "did:example:dave"


class DecentrlEventContract(DecentrlContract):
    """Promises about saving events, and about finding them by one thing."""

    async def test_as_given(self) -> None:
        """An event comes back as it was saved: its texts, its tags in order and as often as they were given."""
        events = [
            StoredEvent(f"e{number}", f"{BOB}{text}", f"{CAROL}{text}", text, (text, "x", text), float(number), text)
            for number, text in enumerate(ODD_TEXTS)
        ]
        events.append(StoredEvent("all", ALICE, ALICE, "", tuple(reversed(ODD_TEXTS)), 1e9 + 1 / 3))
        events.append(StoredEvent("none", ALICE, ALICE, "x" * 100_000, (), 1.7e15))
        await self.save(*events)
        found = await self.decentrl.events(ALICE, EventFilter(), ALL)
        self.assertEqual((found.items, found.total), (tuple(events), len(events)))

    async def test_by_timestamp(self) -> None:
        """Events come by timestamp, whenever they were saved, and those of one timestamp as they were saved."""
        await self.save(an_event("d", at=3), an_event("b", at=1.5), an_event("z", at=2))
        await self.save(an_event("y", at=2), an_event("a", at=-1))
        await self.save(an_event("x", at=2), an_event("c", at=1e300))
        self.assertEqual(await self.events(), ["a", "b", "z", "y", "x", "d", "c"])

    async def test_owners_are_apart(self) -> None:
        """An event is its owner's alone, whoever takes part in it."""
        await self.save(an_event("a", "tag", sender=BOB, recipient=ALICE))
        await self.save(an_event("b", "tag", sender=BOB, recipient=ALICE), owner=BOB)
        self.assertEqual(await self.events("tag", participant=ALICE), ["a"])
        self.assertEqual(await self.events("tag", participant=ALICE, owner=BOB), ["b"])
        for stranger in (CAROL, ALICE[:-1], ""):
            self.assertEqual(await self.events(owner=stranger), [])

    async def test_all_or_none(self) -> None:
        """Of several events none is kept if one cannot be."""
        await self.save(an_event("a", "tag"))
        for ids in ("bcab", "bcb"):
            with self.assertRaises(StoreUnavailable):
                await self.save(*(an_event(id, "tag") for id in ids))
            self.assertEqual(await self.events("tag"), ["a"])
        await self.save(*(an_event(id, "tag") for id in "bcd"))
        self.assertEqual(await self.events("tag"), ["a", "b", "c", "d"])

    async def test_no_filter(self) -> None:
        """No tags are no filter, and neither is that processed ones are wanted as well (reference 8)."""
        await self.save(an_event("a", "tag"), an_event("b", sender=ALICE))
        self.assertEqual(await self.events(), ["a", "b"])
        self.assertEqual(await self.events(unprocessed_only=False), ["a", "b"])

    async def test_any_tag(self) -> None:
        """An event is found by any of its tags, once, however many of them are wanted or how often it has one."""
        await self.save(
            an_event("a", "x", "y", "x"), an_event("b", "y"), an_event("c", "z"), an_event("d"), an_event("e", "x")
        )
        self.assertEqual(await self.events("x"), ["a", "e"])
        self.assertEqual(await self.events("x", "y"), ["a", "b", "e"])
        self.assertEqual(await self.events("z", "x", "z", "unknown", "y"), ["a", "b", "c", "e"])
        self.assertEqual(await self.events("unknown"), [])

    async def test_any_tag_is_in_order(self) -> None:
        """Events that are found by different tags are in order all the same."""
        await self.save(an_event("a", "x", at=3), an_event("b", "y", at=1), an_event("c", "x", "y", at=2))
        await self.save(an_event("d", "y", at=3), an_event("e", "x", at=1))
        self.assertEqual(await self.events("x", "y"), ["b", "e", "c", "a", "d"])
        self.assertEqual(await self.events("y", "x"), ["b", "e", "c", "a", "d"])

    async def test_exact_tags(self) -> None:
        """Tags match exactly, none is a part of another, and the empty one is a tag like any other."""
        await self.save(*(an_event(f"e{number}", text) for number, text in enumerate(ODD_TEXTS)), an_event("none"))
        for number, text in enumerate(ODD_TEXTS):
            self.assertEqual(await self.events(text), [f"e{number}"])

    async def test_many_tags(self) -> None:
        """An event may have a thousand tags, and a thousand may be wanted."""
        tags = [f"tag {number}" for number in range(1500)]
        await self.save(an_event("a", *tags), an_event("b", tags[7]))
        self.assertEqual(await self.events(tags[-1]), ["a"])
        self.assertEqual(await self.events(*tags), ["a", "b"])

    async def test_participant(self) -> None:
        """A participant is the sender or the recipient, the owner too, and who is both is found once."""
        await self.save(
            an_event("a", sender=BOB, recipient=ALICE),
            an_event("b", sender=ALICE, recipient=CAROL),
            an_event("c", sender=ALICE, recipient=ALICE),
            an_event("d", sender=BOB, recipient=CAROL),
        )
        self.assertEqual(await self.events(participant=ALICE), ["a", "b", "c"])
        self.assertEqual(await self.events(participant=BOB), ["a", "d"])
        self.assertEqual(await self.events(participant=CAROL), ["b", "d"])
        for stranger in (BOB[:-1], BOB.upper(), "", "%"):
            self.assertEqual(await self.events(participant=stranger), [])

    async def test_bounds(self) -> None:
        """Both bounds are inclusive, and fractions count."""
        await self.save(*(an_event(f"e{at}", at=at) for at in (1, 2, 2.5, 3)))
        self.assertEqual(await self.events(after=2), ["e2", "e2.5", "e3"])
        self.assertEqual(await self.events(before=2), ["e1", "e2"])
        self.assertEqual(await self.events(after=2, before=2), ["e2"])
        self.assertEqual(await self.events(after=2.1, before=2.9), ["e2.5"])
        self.assertEqual(await self.events(after=3, before=1), [])
        self.assertEqual(await self.events(after=-1e300, before=1e300), ["e1", "e2", "e2.5", "e3"])
        self.assertEqual(await self.events(before=0), [])

    async def test_zero_is_a_bound(self) -> None:
        """A bound of nought is a bound."""
        await self.save(*(an_event(f"e{at}", at=at) for at in (-1, 0, 1)))
        self.assertEqual(await self.events(after=0), ["e0", "e1"])
        self.assertEqual(await self.events(before=0), ["e-1", "e0"])

    async def test_unprocessed(self) -> None:
        """What its owner has sent is processed from the start, anything else is not (DCTRL-0004 8.9)."""
        await self.save(
            an_event("a", sender=BOB, recipient=ALICE),
            an_event("b", sender=ALICE, recipient=BOB),
            an_event("c", sender=BOB, recipient=BOB),
            an_event("d", sender=ALICE, recipient=ALICE),
        )
        self.assertEqual(await self.events(unprocessed_only=True), ["a", "c"])

    async def test_too_large(self) -> None:
        """Too much at once is refused, so that less can be asked for; tags do not count."""
        await self.save(*(an_event(f"e{number}", "tag", payload=text) for number, text in enumerate(LARGE_TEXTS)))
        await self.too_large(lambda part: self.decentrl.events(ALICE, EventFilter(("tag",)), part))

    async def test_outlives_the_registration(self) -> None:
        """What is kept can be read when the registration has lapsed; that is not the store's to refuse."""
        await self.save(an_event("a"))
        self.clock.advance(2 * HOUR)
        self.assertEqual(await self.events(), ["a"])


class DecentrlFilterContract(DecentrlContract):
    """Promises about finding events by several things at once, and about slices."""

    async def setUp(self) -> None:  # type: ignore[override]  # trial waits for it
        await super().setUp()
        self.kept: list[tuple[StoredEvent, bool]] = []
        people = ((ALICE, BOB), (BOB, ALICE), (CAROL, ALICE), (ALICE, CAROL), (CAROL, DAVE))
        tags = ((), ("x",), ("y", "x"), ("z", "z"), ("y",))
        number = 0
        for (sender, recipient), own_tags, at in product(people, tags, (2.0, 1.0)):
            number += 1
            event = an_event(f"e{number:02}", *own_tags, at=at, sender=sender, recipient=recipient)
            self.kept.append((event, sender != ALICE))
        await self.save(*(event for event, _ in self.kept[:17]))
        await self.save(*(event for event, _ in self.kept[17:]))
        await self.save(an_event("foreign", "x", "y", "z"), owner=BOB)

    def expected(self, wanted: EventFilter) -> list[str]:
        """What the docstring of the filter says, word by word."""
        found = [event for event, unprocessed in self.kept if self.matches(event, unprocessed, wanted)]
        return [event.id for event in sorted(found, key=lambda event: event.timestamp)]

    @staticmethod
    def matches(event: StoredEvent, unprocessed: bool, wanted: EventFilter) -> bool:
        return (
            (not wanted.tags or bool(set(wanted.tags) & set(event.tags)))
            and wanted.participant in (None, event.sender_did, event.recipient_did)
            and (wanted.after is None or event.timestamp >= wanted.after)
            and (wanted.before is None or event.timestamp <= wanted.before)
            and (unprocessed or not wanted.unprocessed_only)
        )

    async def test_every_combination(self) -> None:
        """All that is asked for has to hold at once, and totals are of all that matches."""
        combinations = product(
            ((), ("x",), ("y", "z"), ("y", "x", "unknown")),
            (None, ALICE, CAROL),
            (None, 2.0),
            (None, 1.0),
            (False, True),
        )
        for combination in combinations:
            wanted = EventFilter(*combination)
            expected = self.expected(wanted)
            found = await self.decentrl.events(ALICE, wanted, ALL)
            self.assertEqual(([event.id for event in found.items], found.total), (expected, len(expected)))
            some = await self.decentrl.events(ALICE, wanted, PageRequest(2, 3))
            self.assertEqual(([event.id for event in some.items], some.total), (expected[2:5], len(expected)))

    async def test_slices(self) -> None:
        """Any slice can be asked for, however far beyond the end, and the total does not depend on it."""
        for wanted in (
            EventFilter(),
            EventFilter(("x",)),
            EventFilter(("y", "x"), ALICE, unprocessed_only=True),
            EventFilter(("unknown",)),
            EventFilter(participant=CAROL, before=1),
        ):
            await self.slices(
                lambda part, wanted=wanted: self.decentrl.events(ALICE, wanted, part),  # type: ignore[misc]
                self.expected(wanted),
            )

    async def test_pages_meet(self) -> None:
        """Page after page gives each event once."""
        pages = [
            await self.decentrl.events(ALICE, EventFilter(("x", "y")), PageRequest(page * 7, 7)) for page in range(5)
        ]
        ids = [event.id for page in pages for event in page.items]
        self.assertEqual(ids, self.expected(EventFilter(("x", "y"))))
