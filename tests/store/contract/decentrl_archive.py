"""New tags for events that are kept, and how much may be kept."""

from __future__ import annotations

from mediatord.errors import QuotaExceeded
from mediatord.store.interfaces.decentrl import DecentrlQuotas, EventFilter, StoredEvent
from tests.store.builders import ALICE, BOB
from tests.store.contract.decentrl_base import ALL, CAROL, ODD_TEXTS, DecentrlContract, a_public_event, an_event


class DecentrlTagContract(DecentrlContract):
    """Promises about `update_tags`."""

    async def tags(self, owner: str = ALICE) -> dict[str, tuple[str, ...]]:
        """The tags of each event."""
        found = await self.decentrl.events(owner, EventFilter(), ALL)
        return {event.id: event.tags for event in found.items}

    async def test_replaces(self) -> None:
        """New tags take the place of all that were there, as they are given (DCTRL-0004 8.11)."""
        await self.save(an_event("a", "old", "kept"), an_event("b", "old"))
        await self.tag(("a", ("new", "kept", "new", *ODD_TEXTS)))
        self.assertEqual(await self.tags(), {"a": ("new", "kept", "new", *ODD_TEXTS), "b": ("old",)})
        self.assertEqual(await self.events("old"), ["b"])
        self.assertEqual(await self.events("new"), ["a"])
        self.assertEqual(await self.events("kept"), ["a"])
        self.assertEqual(await self.events("old", "new", "kept"), ["a", "b"])

    async def test_nothing_else_changes(self) -> None:
        """Apart from its tags an event stays as it was, in its place."""
        events = [
            StoredEvent(f"e{number}", BOB, ALICE, text, ("old",), 7.0, text) for number, text in enumerate("xyz")
        ]
        await self.save(*events)
        await self.tag(("e0", ("new",)))
        found = await self.decentrl.events(ALICE, EventFilter(), ALL)
        self.assertEqual(found.items, (StoredEvent("e0", BOB, ALICE, "x", ("new",), 7.0, "x"), *events[1:]))
        self.assertEqual(await self.events("new", "old"), ["e0", "e1", "e2"])

    async def test_no_tags(self) -> None:
        """All tags can be taken away, and come again."""
        await self.save(an_event("a", "x", "y"))
        await self.tag(("a", ()))
        self.assertEqual(await self.tags(), {"a": ()})
        self.assertEqual(await self.events("x", "y"), [])
        await self.tag(("a", ("x",)))
        self.assertEqual(await self.events("x", "y"), ["a"])

    async def test_processed(self) -> None:
        """Events with new tags are processed, even if the tags are the same, and stay so."""
        await self.save(an_event("a", "x"), an_event("b", "x"), an_event("c", "x", sender=ALICE))
        await self.tag(("a", ("x",)), ("c", ("x",)))
        self.assertEqual(await self.events(unprocessed_only=True), ["b"])
        await self.tag(("a", ("y",)))
        self.assertEqual(await self.events("x", "y", unprocessed_only=True), ["b"])

    async def test_idempotent(self) -> None:
        """The same update once more changes nothing."""
        await self.save(an_event("a", "x"), an_event("b", "y"))
        for _ in range(3):
            await self.tag(("a", ("y",)), ("b", ("x", "z")))
            self.assertEqual(await self.tags(), {"a": ("y",), "b": ("x", "z")})
            self.assertEqual(await self.events("x"), ["b"])

    async def test_foreign(self) -> None:
        """Ids that are unknown or somebody else's are skipped, and the others are not (DCTRL-0004 8.11)."""
        await self.save(an_event("a", "x"))
        await self.save(an_event("b", "x", sender=ALICE), owner=BOB)
        await self.tag(("unknown", ("y",)), ("b", ("y",)), ("a", ("y",)), ("", ()))
        self.assertEqual(await self.tags(), {"a": ("y",)})
        self.assertEqual(await self.tags(BOB), {"b": ("x",)})
        self.assertEqual(await self.events("x", unprocessed_only=True, owner=BOB), ["b"])
        self.assertEqual(await self.events("y", owner=BOB), [])

    async def test_last_counts(self) -> None:
        """Of an id that is there twice the last tags count."""
        await self.save(an_event("a", "x"), an_event("b", "x"))
        await self.tag(("a", ("first",)), ("b", ("y",)), ("a", ("last",)))
        self.assertEqual(await self.tags(), {"a": ("last",), "b": ("y",)})
        self.assertEqual(await self.events("first"), [])

    async def test_many(self) -> None:
        """A thousand updates are no more trouble than one."""
        await self.save(*(an_event(f"e{number}", "x") for number in range(10)))
        await self.tag(*((f"e{number}", (f"t{number}",)) for number in range(1500)))
        self.assertEqual(await self.events("x"), [])
        self.assertEqual(await self.events("t7"), ["e7"])


class DecentrlArchiveCapContract(DecentrlContract):
    """Promises about how much is kept for its owner and for the public."""

    caps = DecentrlQuotas(stored=4, stored_bytes=20)

    async def over_quota(self, *events: StoredEvent) -> None:
        await self.refused(QuotaExceeded, lambda guard: self.decentrl.save_events(guard, ALICE, events))

    async def unpublishable(self, event: str = "", *tags: str) -> None:
        public = a_public_event("one too many", *tags, event=event)
        await self.refused(QuotaExceeded, lambda guard: self.decentrl.publish(guard, ALICE, public))

    async def untaggable(self, *tags: tuple[str, tuple[str, ...]]) -> None:
        await self.refused(QuotaExceeded, lambda guard: self.decentrl.update_tags(guard, ALICE, tags))

    async def test_cap(self) -> None:
        """An owner keeps at most so many events, and of those that would be too many none."""
        await self.save(an_event("a"), an_event("b"))
        await self.over_quota(an_event("c"), an_event("d"), an_event("e"))
        self.assertEqual(await self.events(), ["a", "b"])
        await self.save(an_event("c"), an_event("d"))
        await self.over_quota(an_event("e"))
        await self.save()
        await self.save(*(an_event(id) for id in "wxyz"), owner=BOB)
        self.assertEqual(await self.events(), ["a", "b", "c", "d"])

    async def test_byte_cap(self) -> None:
        """Payloads and tags have at most so many bytes together, as UTF-8; a tag counts as often as it is there."""
        await self.save(an_event("a", "\u20ac", "x", "x", payload="12345"))
        await self.over_quota(an_event("b", payload="x" * 11))
        await self.over_quota(an_event("b", "x", payload="x" * 10))
        await self.over_quota(an_event("b", "xxxxx", "xxxxx", "x"))
        await self.over_quota(an_event("b", payload="\u20ac\u20ac\u20ac\u20ac"))
        await self.over_quota(an_event("b", payload="x" * 6), an_event("c", payload="x" * 5))
        await self.save(an_event("b", "xxx", payload="\u20ac\u20ac!"))
        await self.over_quota(an_event("c", payload="x"))
        await self.save(an_event("c"))
        self.assertEqual(await self.events(), ["a", "b", "c"])

    async def test_together_with_public(self) -> None:
        """What is published counts together with what is stored."""
        await self.save(an_event("a"), an_event("b"))
        await self.publish(a_public_event("c"), a_public_event("d"))
        await self.unpublishable()
        await self.over_quota(an_event("e"))
        await self.decentrl.unpublish(self.guard(), ALICE, "c")
        await self.save(an_event("e"))
        await self.unpublishable()
        self.assertEqual((await self.events(), await self.public()), (["a", "b", "e"], ["d"]))

    async def test_bytes_together_with_public(self) -> None:
        """So do the bytes of public events and their tags, but not those of signatures and channels."""
        await self.save(an_event("a", payload="x" * 8))
        await self.publish(a_public_event("b", "x", "\u20ac", event="x" * 6, channel="x" * 100))
        await self.unpublishable("xxx")
        await self.unpublishable("x", "xx")
        await self.over_quota(an_event("c", "xxx"))
        await self.publish(a_public_event("c", "x", event="x"))
        await self.unpublishable("x")
        await self.decentrl.unpublish(self.guard(), ALICE, "b")
        await self.save(an_event("d", payload="x" * 10))
        await self.over_quota(an_event("e", payload="x"))

    async def test_owners_have_their_own(self) -> None:
        """What one keeps takes no room from another, not from a participant either."""
        await self.save(an_event("a", payload="x" * 20, sender=BOB, recipient=CAROL))
        await self.save(an_event("b", payload="x" * 20), owner=BOB)
        await self.over_quota(an_event("c", payload="x"))

    async def test_new_tags(self) -> None:
        """New tags count instead of the old ones; if they are too much nothing is changed."""
        await self.save(an_event("a", "xxxxx", payload="12345"), an_event("b", "xxxxx", "x"))
        await self.untaggable(("a", ("x" * 10,)))
        await self.untaggable(("b", ("x",)), ("a", ("x" * 15,)))
        await self.untaggable(("a", ("\u20ac\u20ac\u20ac", "x")))
        self.assertEqual(await self.events("xxxxx", unprocessed_only=True), ["a", "b"])
        await self.tag(("a", ("x" * 9,)))
        await self.untaggable(("b", ("x" * 7,)))
        await self.tag(("b", ("xxx", "xxx")))
        await self.tag(("b", ()))
        await self.tag(("a", ("x" * 15,)))
        await self.untaggable(("b", ("x",)))
        await self.tag(("a", ()))
        await self.save(an_event("c", payload="x" * 15))
        await self.over_quota(an_event("d", payload="x"))

    async def test_together(self) -> None:
        """Of several updates the sum counts, in which what is skipped or overridden has no part."""
        await self.save(an_event("a", "x" * 10), an_event("b", "x" * 10))
        await self.save(an_event("foreign"), owner=BOB)
        await self.tag(("a", ("x" * 19,)), ("b", ("x",)))
        await self.tag(("unknown", ("x" * 100,)), ("foreign", ("x" * 100,)), ("b", ("y",)))
        await self.tag(("a", ("x" * 100,)), ("a", ("x" * 5,)), ("b", ("y" * 15,)))
        await self.untaggable(("a", ("x" * 6,)), ("unknown", ()))
        await self.untaggable(("b", ()), ("b", ("y" * 16,)))
        self.assertEqual(await self.events("y" * 15), ["b"])
