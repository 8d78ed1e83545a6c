"""Contract for tags and quotas of stored events."""

from __future__ import annotations

from mediatord.errors import QuotaExceeded
from mediatord.store.interfaces.decentrl import DecentrlQuotas, EventFilter, StoredEvent
from tests.store.builders import ALICE, BOB
from tests.store.contract.decentrl_base import ALL, CAROL, ODD_TEXTS, DecentrlContract, make_event, make_public_event


class DecentrlTagContract(DecentrlContract):
    """Contract of `update_tags`."""

    async def read_tags(self, owner: str = ALICE) -> dict[str, tuple[str, ...]]:
        """The tags of each event."""
        found = await self.decentrl.events(owner, EventFilter(), ALL)
        return {event.id: event.tags for event in found.items}

    async def test_replaces_all_tags(self) -> None:
        """New tags replace all earlier ones, in the order given (DCTRL-0004 8.11)."""
        await self.save_events(make_event("a", "old", "kept"), make_event("b", "old"))
        await self.update_tags(("a", ("new", "kept", "new", *ODD_TEXTS)))
        self.assertEqual(await self.read_tags(), {"a": ("new", "kept", "new", *ODD_TEXTS), "b": ("old",)})
        self.assertEqual(await self.list_events("old"), ["b"])
        self.assertEqual(await self.list_events("new"), ["a"])
        self.assertEqual(await self.list_events("kept"), ["a"])
        self.assertEqual(await self.list_events("old", "new", "kept"), ["a", "b"])

    async def test_changes_only_tags(self) -> None:
        """An event keeps everything but its tags, and its place."""
        events = [
            StoredEvent(f"e{number}", BOB, ALICE, text, ("old",), 7.0, text) for number, text in enumerate("xyz")
        ]
        await self.save_events(*events)
        await self.update_tags(("e0", ("new",)))
        found = await self.decentrl.events(ALICE, EventFilter(), ALL)
        self.assertEqual(found.items, (StoredEvent("e0", BOB, ALICE, "x", ("new",), 7.0, "x"), *events[1:]))
        self.assertEqual(await self.list_events("new", "old"), ["e0", "e1", "e2"])

    async def test_removes_and_adds_tags(self) -> None:
        """All tags can be removed and added again."""
        await self.save_events(make_event("a", "x", "y"))
        await self.update_tags(("a", ()))
        self.assertEqual(await self.read_tags(), {"a": ()})
        self.assertEqual(await self.list_events("x", "y"), [])
        await self.update_tags(("a", ("x",)))
        self.assertEqual(await self.list_events("x", "y"), ["a"])

    async def test_tagged_event_is_processed(self) -> None:
        """An event whose tags were updated is processed, even if they are the same, and stays so."""
        await self.save_events(make_event("a", "x"), make_event("b", "x"), make_event("c", "x", sender=ALICE))
        await self.update_tags(("a", ("x",)), ("c", ("x",)))
        self.assertEqual(await self.list_events(unprocessed_only=True), ["b"])
        await self.update_tags(("a", ("y",)))
        self.assertEqual(await self.list_events("x", "y", unprocessed_only=True), ["b"])

    async def test_repeated_update_changes_nothing(self) -> None:
        """Repeating an update changes nothing."""
        await self.save_events(make_event("a", "x"), make_event("b", "y"))
        for _ in range(3):
            await self.update_tags(("a", ("y",)), ("b", ("x", "z")))
            self.assertEqual(await self.read_tags(), {"a": ("y",), "b": ("x", "z")})
            self.assertEqual(await self.list_events("x"), ["b"])

    async def test_skips_foreign_and_unknown_events(self) -> None:
        """Unknown ids and those of other owners are skipped, the others are not (DCTRL-0004 8.11)."""
        await self.save_events(make_event("a", "x"))
        await self.save_events(make_event("b", "x", sender=ALICE), owner=BOB)
        await self.update_tags(("unknown", ("y",)), ("b", ("y",)), ("a", ("y",)), ("", ()))
        self.assertEqual(await self.read_tags(), {"a": ("y",)})
        self.assertEqual(await self.read_tags(BOB), {"b": ("x",)})
        self.assertEqual(await self.list_events("x", unprocessed_only=True, owner=BOB), ["b"])
        self.assertEqual(await self.list_events("y", owner=BOB), [])

    async def test_last_tags_of_repeated_id_win(self) -> None:
        """If an id occurs twice its last tags win."""
        await self.save_events(make_event("a", "x"), make_event("b", "x"))
        await self.update_tags(("a", ("first",)), ("b", ("y",)), ("a", ("last",)))
        self.assertEqual(await self.read_tags(), {"a": ("last",), "b": ("y",)})
        self.assertEqual(await self.list_events("first"), [])

    async def test_accepts_a_thousand_updates(self) -> None:
        """A thousand updates fit into one call."""
        await self.save_events(*(make_event(f"e{number}", "x") for number in range(10)))
        await self.update_tags(*((f"e{number}", (f"t{number}",)) for number in range(1500)))
        self.assertEqual(await self.list_events("x"), [])
        self.assertEqual(await self.list_events("t7"), ["e7"])


class DecentrlArchiveCapContract(DecentrlContract):
    """Contract for quotas of stored and public events."""

    caps = DecentrlQuotas(stored=4, stored_bytes=20)

    async def assert_save_exceeds_quota(self, *events: StoredEvent) -> None:
        await self.assert_refused(QuotaExceeded, lambda guard: self.decentrl.save_events(guard, ALICE, events))

    async def assert_publish_exceeds_quota(self, event: str = "", *tags: str) -> None:
        public = make_public_event("one too many", *tags, event=event)
        await self.assert_refused(QuotaExceeded, lambda guard: self.decentrl.publish(guard, ALICE, public))

    async def assert_tags_exceed_quota(self, *tags: tuple[str, tuple[str, ...]]) -> None:
        await self.assert_refused(QuotaExceeded, lambda guard: self.decentrl.update_tags(guard, ALICE, tags))

    async def test_limits_number_of_events(self) -> None:
        """An owner has a maximum of events; of a batch that exceeds it nothing is stored."""
        await self.save_events(make_event("a"), make_event("b"))
        await self.assert_save_exceeds_quota(make_event("c"), make_event("d"), make_event("e"))
        self.assertEqual(await self.list_events(), ["a", "b"])
        await self.save_events(make_event("c"), make_event("d"))
        await self.assert_save_exceeds_quota(make_event("e"))
        await self.save_events()
        await self.save_events(*(make_event(id) for id in "wxyz"), owner=BOB)
        self.assertEqual(await self.list_events(), ["a", "b", "c", "d"])

    async def test_limits_bytes(self) -> None:
        """Payloads and tags have a maximum of bytes in UTF-8; a tag counts each time it is used."""
        await self.save_events(make_event("a", "\u20ac", "x", "x", payload="12345"))
        await self.assert_save_exceeds_quota(make_event("b", payload="x" * 11))
        await self.assert_save_exceeds_quota(make_event("b", "x", payload="x" * 10))
        await self.assert_save_exceeds_quota(make_event("b", "xxxxx", "xxxxx", "x"))
        await self.assert_save_exceeds_quota(make_event("b", payload="\u20ac\u20ac\u20ac\u20ac"))
        await self.assert_save_exceeds_quota(make_event("b", payload="x" * 6), make_event("c", payload="x" * 5))
        await self.save_events(make_event("b", "xxx", payload="\u20ac\u20ac!"))
        await self.assert_save_exceeds_quota(make_event("c", payload="x"))
        await self.save_events(make_event("c"))
        self.assertEqual(await self.list_events(), ["a", "b", "c"])

    async def test_number_includes_public_events(self) -> None:
        """Public events count together with stored ones."""
        await self.save_events(make_event("a"), make_event("b"))
        await self.publish_events(make_public_event("c"), make_public_event("d"))
        await self.assert_publish_exceeds_quota()
        await self.assert_save_exceeds_quota(make_event("e"))
        await self.decentrl.unpublish(self.make_guard(), ALICE, "c")
        await self.save_events(make_event("e"))
        await self.assert_publish_exceeds_quota()
        self.assertEqual((await self.list_events(), await self.list_public()), (["a", "b", "e"], ["d"]))

    async def test_bytes_include_public_events(self) -> None:
        """Bytes of public events and their tags count too, those of signatures and channels do not."""
        await self.save_events(make_event("a", payload="x" * 8))
        await self.publish_events(make_public_event("b", "x", "\u20ac", event="x" * 6, channel="x" * 100))
        await self.assert_publish_exceeds_quota("xxx")
        await self.assert_publish_exceeds_quota("x", "xx")
        await self.assert_save_exceeds_quota(make_event("c", "xxx"))
        await self.publish_events(make_public_event("c", "x", event="x"))
        await self.assert_publish_exceeds_quota("x")
        await self.decentrl.unpublish(self.make_guard(), ALICE, "b")
        await self.save_events(make_event("d", payload="x" * 10))
        await self.assert_save_exceeds_quota(make_event("e", payload="x"))

    async def test_quota_is_per_owner(self) -> None:
        """Events of one owner count against no other quota, not even a participant's."""
        await self.save_events(make_event("a", payload="x" * 20, sender=BOB, recipient=CAROL))
        await self.save_events(make_event("b", payload="x" * 20), owner=BOB)
        await self.assert_save_exceeds_quota(make_event("c", payload="x"))

    async def test_new_tags_replace_old_in_quota(self) -> None:
        """New tags count in place of the old ones; if they exceed the quota nothing is changed."""
        await self.save_events(make_event("a", "xxxxx", payload="12345"), make_event("b", "xxxxx", "x"))
        await self.assert_tags_exceed_quota(("a", ("x" * 10,)))
        await self.assert_tags_exceed_quota(("b", ("x",)), ("a", ("x" * 15,)))
        await self.assert_tags_exceed_quota(("a", ("\u20ac\u20ac\u20ac", "x")))
        self.assertEqual(await self.list_events("xxxxx", unprocessed_only=True), ["a", "b"])
        await self.update_tags(("a", ("x" * 9,)))
        await self.assert_tags_exceed_quota(("b", ("x" * 7,)))
        await self.update_tags(("b", ("xxx", "xxx")))
        await self.update_tags(("b", ()))
        await self.update_tags(("a", ("x" * 15,)))
        await self.assert_tags_exceed_quota(("b", ("x",)))
        await self.update_tags(("a", ()))
        await self.save_events(make_event("c", payload="x" * 15))
        await self.assert_save_exceeds_quota(make_event("d", payload="x"))

    async def test_quota_applies_to_sum_of_updates(self) -> None:
        """The sum of all updates counts, without those skipped or overridden."""
        await self.save_events(make_event("a", "x" * 10), make_event("b", "x" * 10))
        await self.save_events(make_event("foreign"), owner=BOB)
        await self.update_tags(("a", ("x" * 19,)), ("b", ("x",)))
        await self.update_tags(("unknown", ("x" * 100,)), ("foreign", ("x" * 100,)), ("b", ("y",)))
        await self.update_tags(("a", ("x" * 100,)), ("a", ("x" * 5,)), ("b", ("y" * 15,)))
        await self.assert_tags_exceed_quota(("a", ("x" * 6,)), ("unknown", ()))
        await self.assert_tags_exceed_quota(("b", ()), ("b", ("y" * 16,)))
        self.assertEqual(await self.list_events("y" * 15), ["b"])
