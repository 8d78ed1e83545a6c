"""What identities say to everybody."""

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
    a_public_event,
    an_event,
)


class DecentrlPublicContract(DecentrlContract):
    """Promises about public events."""

    async def missing(self, id: str, publisher: str = ALICE) -> None:
        await self.refused(
            PublicEventNotFound, lambda guard: self.decentrl.unpublish(guard, publisher, id), self.guard(publisher)
        )

    async def test_as_given(self) -> None:
        """An event comes back as it was published: its texts, its tags in order and as often as they were given."""
        events = [
            PublicEvent(f"e{number}", text, (text, "x", text), -float(number), f"signature{text}", text)
            for number, text in enumerate(ODD_TEXTS)
        ]
        events.append(PublicEvent("all", "{}", tuple(reversed(ODD_TEXTS)), -1e9 - 1 / 3, ""))
        await self.publish(*events)
        found = await self.decentrl.public_events(ALICE, PublicEventFilter(), ALL)
        self.assertEqual((found.items, found.total), (tuple(events), len(events)))

    async def test_newest_first(self) -> None:
        """The newest comes first, and of those of one timestamp the one that was published last."""
        for id, at in (("d", 3.0), ("b", 1.5), ("z", 2.0), ("y", 2.0), ("a", -1.0), ("x", 2.0), ("c", 9e99)):
            await self.publish(a_public_event(id, at=at))
        self.assertEqual(await self.public(), ["c", "d", "x", "y", "z", "b", "a"])

    async def test_publishers_are_apart(self) -> None:
        """Everybody has its own channel, which has nothing of what it stores."""
        await self.publish(a_public_event("a", "tag"))
        await self.publish(a_public_event("b", "tag"), publisher=BOB)
        await self.save(an_event("c", "tag"))
        self.assertEqual(await self.public("tag"), ["a"])
        self.assertEqual(await self.public("tag", publisher=BOB), ["b"])
        self.assertEqual(await self.events("tag"), ["c"])
        for stranger in (CAROL, ALICE[:-1], "", "%"):
            self.assertEqual(await self.public(publisher=stranger), [])

    async def test_unpublish(self) -> None:
        """What its publisher takes back is gone, and then is not there to be taken back (reference 10.2)."""
        await self.publish(*(a_public_event(id, "tag", channel="blog") for id in "abc"))
        await self.decentrl.unpublish(self.guard(ALICE), ALICE, "b")
        self.assertEqual(await self.public(), ["c", "a"])
        self.assertEqual(await self.public("tag"), ["c", "a"])
        self.assertEqual(await self.public(channel_id="blog"), ["c", "a"])
        await self.missing("b")

    async def test_unpublish_foreign(self) -> None:
        """What is unknown, and what is somebody else's, is not there, nor is what is only stored."""
        await self.publish(a_public_event("a"))
        await self.save(an_event("b"))
        await self.missing("a", publisher=BOB)
        for id in ("unknown", "b", "A", ""):
            await self.missing(id)
        self.assertEqual((await self.public(), await self.events()), (["a"], ["b"]))

    async def test_published_again(self) -> None:
        """What comes again after it was taken back is the last that was published."""
        await self.publish(a_public_event("a", "x"), a_public_event("b", "x"))
        await self.decentrl.unpublish(self.guard(), ALICE, "a")
        await self.publish(a_public_event("a", "y"))
        self.assertEqual(await self.public(), ["a", "b"])
        self.assertEqual(await self.public("x"), ["b"])

    async def test_any_tag(self) -> None:
        """An event is found by any of its tags, once, and no tags are no filter (reference 10.3)."""
        await self.publish(
            a_public_event("a", "x", "y", "x"),
            a_public_event("b", "y", at=2),
            a_public_event("c"),
            a_public_event("d", "x"),
        )
        self.assertEqual(await self.public("x"), ["d", "a"])
        self.assertEqual(await self.public("x", "y", "x", "unknown"), ["b", "d", "a"])
        self.assertEqual(await self.public("unknown"), [])
        self.assertEqual(await self.public(), ["b", "d", "c", "a"])

    async def test_exact_tags_and_channels(self) -> None:
        """Tags and channels match exactly, and the empty ones are like any other."""
        for number, text in enumerate(ODD_TEXTS):
            await self.publish(a_public_event(f"e{number}", text, channel=text))
        await self.publish(a_public_event("none"))
        for number, text in enumerate(ODD_TEXTS):
            self.assertEqual(await self.public(text), [f"e{number}"])
            self.assertEqual(await self.public(channel_id=text), [f"e{number}"])

    async def test_bounds(self) -> None:
        """Both bounds are inclusive, and nought is a bound."""
        await self.publish(*(a_public_event(f"e{at}", at=at) for at in (-1, 0, 1, 1.5)))
        self.assertEqual(await self.public(after=0), ["e1.5", "e1", "e0"])
        self.assertEqual(await self.public(before=0), ["e0", "e-1"])
        self.assertEqual(await self.public(after=1, before=1), ["e1"])
        self.assertEqual(await self.public(after=1.25, before=1.75), ["e1.5"])
        self.assertEqual(await self.public(after=1, before=0), [])

    async def test_every_combination(self) -> None:
        """All that is asked for has to hold at once, and totals are of all that matches."""
        kept = [
            a_public_event(f"e{number}", *tags, at=at, channel=channel)
            for number, (tags, at, channel) in enumerate(
                product(((), ("x",), ("y", "x"), ("z",)), (2.0, 1.0, 3.0), (None, "blog", "news"))
            )
        ]
        await self.publish(*kept)
        ordered = sorted(reversed(kept), key=lambda event: -event.timestamp)
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

    async def test_slices(self) -> None:
        """Any slice can be asked for, however far beyond the end, and the total does not depend on it."""
        await self.publish(*(a_public_event(id, "xy"[number % 2]) for number, id in enumerate("abcde")))
        for tags, expected in (((), "edcba"), (("x",), "eca"), (("x", "y"), "edcba"), (("unknown",), "")):
            wanted = PublicEventFilter(tags)
            await self.slices(
                lambda part, wanted=wanted: self.decentrl.public_events(ALICE, wanted, part),  # type: ignore[misc]
                list(expected),
            )

    async def test_too_large(self) -> None:
        """Too much at once is refused, so that less can be asked for; tags and signatures do not count."""
        for number, text in enumerate(LARGE_TEXTS):
            await self.publish(a_public_event(f"e{number}", "tag", event=text, at=-number))
        await self.too_large(lambda part: self.decentrl.public_events(ALICE, PublicEventFilter(("tag",)), part))

    async def test_outlives_the_registration(self) -> None:
        """What was published stays readable when the registration of its publisher has lapsed (reference 10.3)."""
        await self.publish(a_public_event("a"))
        self.clock.advance(2 * HOUR)
        self.assertEqual(await self.public(), ["a"])
