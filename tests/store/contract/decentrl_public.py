"""Contract for public events."""

from __future__ import annotations

from itertools import product

from mediatord.errors import PublicEventNotFound
from mediatord.store.interfaces.decentrl import PageRequest, PublicEvent, PublicEventFilter
from tests.store.builders import ALICE, BOB, HOUR
from tests.store.contract.decentrl_base import (
    ALL,
    CAROL,
    LARGE_TEXTS,
    ODD_TEXTS,
    DecentrlContract,
    make_event,
    make_public_event,
)


class DecentrlPublicContract(DecentrlContract):
    """Contract for public events."""

    async def assert_missing(self, id: str, publisher: str = ALICE) -> None:
        await self.assert_refused(
            PublicEventNotFound,
            lambda guard: self.decentrl.unpublish(guard, publisher, id),
            self.make_guard(publisher),
        )

    async def test_stores_event_unchanged(self) -> None:
        """An event comes back as it was published: its texts, and its tags in order with duplicates."""
        events = [
            PublicEvent(f"e{number}", text, (text, "x", text), -float(number), f"signature{text}", text)
            for number, text in enumerate(ODD_TEXTS)
        ]
        events.append(PublicEvent("all", "{}", tuple(reversed(ODD_TEXTS)), -1e9 - 1 / 3, ""))
        await self.publish_events(*events)
        found = await self.decentrl.public_events(ALICE, PublicEventFilter(), ALL)
        self.assertEqual((found.items, found.total), (tuple(events), len(events)))

    async def test_newest_come_first(self) -> None:
        """The newest comes first, and of those of one timestamp the last published."""
        for id, at in (("d", 3.0), ("b", 1.5), ("z", 2.0), ("y", 2.0), ("a", -1.0), ("x", 2.0), ("c", 9e99)):
            await self.publish_events(make_public_event(id, at=at))
        self.assertEqual(await self.list_public(), ["c", "d", "x", "y", "z", "b", "a"])

    async def test_publishers_are_separate(self) -> None:
        """Every publisher has its own public events, separate from stored ones."""
        await self.publish_events(make_public_event("a", "tag"))
        await self.publish_events(make_public_event("b", "tag"), publisher=BOB)
        await self.save_events(make_event("c", "tag"))
        self.assertEqual(await self.list_public("tag"), ["a"])
        self.assertEqual(await self.list_public("tag", publisher=BOB), ["b"])
        self.assertEqual(await self.list_events("tag"), ["c"])
        for other in (CAROL, ALICE[:-1], "", "%"):
            self.assertEqual(await self.list_public(publisher=other), [])

    async def test_unpublish_removes_event(self) -> None:
        """An unpublished event is gone, and cannot be unpublished again (reference 10.2)."""
        await self.publish_events(*(make_public_event(id, "tag", channel="blog") for id in "abc"))
        await self.decentrl.unpublish(self.make_guard(ALICE), ALICE, "b")
        self.assertEqual(await self.list_public(), ["c", "a"])
        self.assertEqual(await self.list_public("tag"), ["c", "a"])
        self.assertEqual(await self.list_public(channel_id="blog"), ["c", "a"])
        await self.assert_missing("b")

    async def test_refuses_to_unpublish_foreign_events(self) -> None:
        """Unknown events, those of others and those only stored cannot be unpublished."""
        await self.publish_events(make_public_event("a"))
        await self.save_events(make_event("b"))
        await self.assert_missing("a", publisher=BOB)
        for id in ("unknown", "b", "A", ""):
            await self.assert_missing(id)
        self.assertEqual((await self.list_public(), await self.list_events()), (["a"], ["b"]))

    async def test_published_again_counts_as_new(self) -> None:
        """An event published again after it was unpublished is the last published."""
        await self.publish_events(make_public_event("a", "x"), make_public_event("b", "x"))
        await self.decentrl.unpublish(self.make_guard(), ALICE, "a")
        await self.publish_events(make_public_event("a", "y"))
        self.assertEqual(await self.list_public(), ["a", "b"])
        self.assertEqual(await self.list_public("x"), ["b"])

    async def test_finds_by_any_tag_once(self) -> None:
        """An event is found by any of its tags, once; no tags match everything (reference 10.3)."""
        await self.publish_events(
            make_public_event("a", "x", "y", "x"),
            make_public_event("b", "y", at=2),
            make_public_event("c"),
            make_public_event("d", "x"),
        )
        self.assertEqual(await self.list_public("x"), ["d", "a"])
        self.assertEqual(await self.list_public("x", "y", "x", "unknown"), ["b", "d", "a"])
        self.assertEqual(await self.list_public("unknown"), [])
        self.assertEqual(await self.list_public(), ["b", "d", "c", "a"])

    async def test_tags_and_channels_match_exactly(self) -> None:
        """Tags and channels match exactly; the empty ones are like any other."""
        for number, text in enumerate(ODD_TEXTS):
            await self.publish_events(make_public_event(f"e{number}", text, channel=text))
        await self.publish_events(make_public_event("none"))
        for number, text in enumerate(ODD_TEXTS):
            self.assertEqual(await self.list_public(text), [f"e{number}"])
            self.assertEqual(await self.list_public(channel_id=text), [f"e{number}"])

    async def test_timestamp_bounds_are_inclusive(self) -> None:
        """Both bounds are inclusive, and zero is a bound."""
        await self.publish_events(*(make_public_event(f"e{at}", at=at) for at in (-1, 0, 1, 1.5)))
        self.assertEqual(await self.list_public(after=0), ["e1.5", "e1", "e0"])
        self.assertEqual(await self.list_public(before=0), ["e0", "e-1"])
        self.assertEqual(await self.list_public(after=1, before=1), ["e1"])
        self.assertEqual(await self.list_public(after=1.25, before=1.75), ["e1.5"])
        self.assertEqual(await self.list_public(after=1, before=0), [])

    async def test_combines_all_filters(self) -> None:
        """All filters must match, and totals count all matches."""
        published = [
            make_public_event(f"e{number}", *tags, at=at, channel=channel)
            for number, (tags, at, channel) in enumerate(
                product(((), ("x",), ("y", "x"), ("z",)), (2.0, 1.0, 3.0), (None, "blog", "news"))
            )
        ]
        await self.publish_events(*published)
        ordered = sorted(reversed(published), key=lambda event: -event.timestamp)
        for tags, after, before, channel in product(
            ((), ("x",), ("y", "z", "unknown")), (None, 2.0), (None, 2.0), (None, "blog", "unknown")
        ):
            wanted = PublicEventFilter(tags, after, before, channel)
            expected = [
                event.id
                for event in ordered
                if (not tags or set(tags) & set(event.tags))
                and (after is None or event.timestamp >= after)
                and (before is None or event.timestamp <= before)
                and (channel is None or event.channel_id == channel)
            ]
            found = await self.decentrl.public_events(ALICE, wanted, ALL)
            self.assertEqual(([event.id for event in found.items], found.total), (expected, len(expected)))
            some = await self.decentrl.public_events(ALICE, wanted, PageRequest(1, 3))
            self.assertEqual(([event.id for event in some.items], some.total), (expected[1:4], len(expected)))

    async def test_pages_and_totals(self) -> None:
        """Any page can be read, even beyond the end, and the total does not depend on it."""
        await self.publish_events(*(make_public_event(id, "xy"[number % 2]) for number, id in enumerate("abcde")))
        for tags, expected in (((), "edcba"), (("x",), "eca"), (("x", "y"), "edcba"), (("unknown",), "")):
            wanted = PublicEventFilter(tags)
            await self.assert_pages(
                lambda part, wanted=wanted: self.decentrl.public_events(ALICE, wanted, part),  # type: ignore[misc]
                list(expected),
            )

    async def test_refuses_too_large_page(self) -> None:
        """
        A page of too many bytes is refused, so that a smaller one can be requested; tags and signatures do not count.
        """
        for number, text in enumerate(LARGE_TEXTS):
            await self.publish_events(make_public_event(f"e{number}", "tag", event=text, at=-number))
        await self.assert_page_is_limited(
            lambda part: self.decentrl.public_events(ALICE, PublicEventFilter(("tag",)), part)
        )

    async def test_readable_after_registration_lapsed(self) -> None:
        """Public events stay readable when their publisher's registration has lapsed (reference 10.3)."""
        await self.publish_events(make_public_event("a"))
        self.clock.advance(2 * HOUR)
        self.assertEqual(await self.list_public(), ["a"])
