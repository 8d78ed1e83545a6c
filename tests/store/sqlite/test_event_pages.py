"""Pages of long event lists in the SQLite store."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from itertools import count
from math import isfinite

from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.internet.defer import Deferred
from twisted.trial.unittest import TestCase

from mediatord.store.caches import PageCursorCache
from mediatord.store.interfaces.decentrl import (
    CommandGuard,
    DecentrlQuotas,
    EventFilter,
    PageRequest,
    PendingEvent,
    PublicEvent,
    PublicEventFilter,
    StoredEvent,
)
from mediatord.store.sqlite import decentrl_queries, decentrl_store, event_archive_queries
from mediatord.store.sqlite.connection import BYTES_PER_READ, connect
from mediatord.store.sqlite.event_archive_queries import PageReadOptions
from mediatord.store.sqlite.sqlite_store import SQLiteStore
from tests.store.builders import ALICE, BOB, HOUR, NOON, ImmediateClock, make_database_path, make_sqlite_store
from tests.store.sqlite.operations import SQLiteOperations, create_memory_database, make_contract, resolve_results

ALL = PageRequest(0, 1000)


class EventPageTests(TestCase):
    """Long lists of events, page after page."""

    async def setUp(self) -> None:  # type: ignore[override]  # trial waits for it
        self.clock = ImmediateClock()
        self.path = make_database_path(self)
        self.observed: list[str] = []
        self.store = await self.open_store()
        self.numbers = count()
        await self.save_events(*(self.make_event(number) for number in range(300)))

    async def open_store(self) -> SQLiteStore:
        """Open the store of another process on the same file."""
        store = make_sqlite_store(
            self.clock, self.path, observe=lambda operation, seconds: self.observed.append(operation)
        )
        await store.open()
        self.addCleanup(store.close)
        return store

    def make_guard(self) -> CommandGuard:
        return CommandGuard(b"nonce %d" % next(self.numbers), NOON + HOUR)

    def make_event(self, number: int) -> StoredEvent:
        """Every second event is tagged `even`, every third `third`."""
        tags = tuple(tag for tag, step in (("even", 2), ("third", 3)) if number % step == 0)
        return StoredEvent(f"e{number}", BOB, ALICE, f"payload {number}", tags, float(number // 7))

    async def save_events(self, *events: StoredEvent, store: SQLiteStore | None = None) -> None:
        await (store or self.store).decentrl.save_events(self.make_guard(), ALICE, events)

    async def list_ids(
        self, wanted: EventFilter, offset: int, limit: int, store: SQLiteStore | None = None
    ) -> list[str]:
        found = await (store or self.store).decentrl.events(ALICE, wanted, PageRequest(offset, limit))
        return [event.id for event in found.items]

    def read_edition(self) -> int:
        with closing(connect(self.path)) as connection:
            ((edition,),) = connection.execute("SELECT edition FROM party_usage").fetchall()
        return int(edition)

    async def test_pages_cover_the_list(self) -> None:
        """Pages in any order, of any size and from either end, are slices of the whole list."""
        for wanted in (
            EventFilter(),
            EventFilter(("third",)),
            EventFilter(("even", "third")),
            EventFilter(("even",), after=5.0, before=30.0),
            EventFilter(("even",), participant=BOB, unprocessed_only=True, after=3.0),
        ):
            everything = await self.list_ids(wanted, 0, 1000)
            for offset in (*range(0, 300, 13), 299, 7, 150, *range(280, 0, -31), 0):
                for limit in (1, 13, 300):
                    self.assertEqual(await self.list_ids(wanted, offset, limit), everything[offset : offset + limit])

    async def test_pages_of_public_events(self) -> None:
        """Pages of public events, newest first, are slices of the whole list."""
        for number in range(100):
            event = PublicEvent(f"x{number}", "", ("even",) if number % 2 == 0 else (), float(number // 7), "")
            await self.store.decentrl.publish(self.make_guard(), ALICE, event)
        for wanted in (PublicEventFilter(), PublicEventFilter(("even",)), PublicEventFilter(after=3.0, before=11.0)):
            found = await self.store.decentrl.public_events(ALICE, wanted, ALL)
            everything = [event.id for event in found.items]
            for offset in (*range(0, 100, 9), 99, 50, 0):
                part = await self.store.decentrl.public_events(ALICE, wanted, PageRequest(offset, 9))
                self.assertEqual([event.id for event in part.items], everything[offset : offset + 9])

    async def test_pages_follow_changes(self) -> None:
        """A page is one of the current list, whatever was read before and whichever process changed it."""
        other = await self.open_store()
        wanted = EventFilter(("even", "third"), after=1.0)
        before = await self.list_ids(wanted, 0, 1000)
        for offset in range(0, 100, 10):
            await self.list_ids(wanted, offset, 10)
        early_events = [StoredEvent(f"early {number}", BOB, ALICE, "", ("third",), 1.0) for number in range(5)]
        await self.save_events(*early_events, store=other)
        await other.decentrl.update_tags(self.make_guard(), ALICE, [("e12", ()), ("e25", ("even",))])
        for store in (other, self.store):
            after = await self.list_ids(wanted, 0, 1000, store)
            self.assertEqual(len(after), len(before) + 5)
            for offset in range(0, 200, 10):
                self.assertEqual(await self.list_ids(wanted, offset, 10, store), after[offset : offset + 10])
        found = await self.store.decentrl.events(ALICE, wanted, PageRequest(0, 1))
        self.assertEqual(found.total, len(before) + 5)

    async def test_sees_every_kind_of_change(self) -> None:
        """Each kind of change by another process changes a total and starts a new edition."""
        other = await self.open_store()
        wanted, public = EventFilter(after=1.0, before=2.0), PublicEventFilter(after=1.0, before=2.0)
        tagged = EventFilter(("even", "third"), after=1.0)

        async def read_totals() -> list[int]:
            decentrl = self.store.decentrl
            stored = [(await decentrl.events(ALICE, one, PageRequest(0, 1))).total for one in (wanted, tagged)]
            return [*stored, (await decentrl.public_events(ALICE, public, PageRequest(0, 1))).total]

        async def assert_change(write: Callable[[CommandGuard], Deferred[None]], *differences: int) -> None:
            before, edition = await read_totals(), self.read_edition()
            await write(self.make_guard())
            self.assertEqual(await read_totals(), [a + b for a, b in zip(before, differences, strict=True)])
            self.assertNotEqual(self.read_edition(), edition)

        event = StoredEvent("new", BOB, ALICE, "", ("even",), 1.5)
        for id in "xy":
            published = PublicEvent(id, "", (), 1.0, "")
            await assert_change(lambda guard, one=published: other.decentrl.publish(guard, ALICE, one), 0, 0, 1)  # type: ignore[misc]
        await assert_change(lambda guard: other.decentrl.save_events(guard, ALICE, [event]), 1, 1, 0)
        await assert_change(lambda guard: other.decentrl.update_tags(guard, ALICE, [("new", ())]), 0, -1, 0)
        # As many as before are tagged, but others.
        swapped = [("e20", ()), ("new", ("even",))]
        await assert_change(lambda guard: other.decentrl.update_tags(guard, ALICE, swapped), 0, 0, 0)
        self.assertIn("new", await self.list_ids(tagged, 0, 1000))
        await assert_change(lambda guard: other.decentrl.unpublish(guard, ALICE, "x"), 0, 0, -1)
        await assert_change(
            lambda guard: other.decentrl.save_events(guard, ALICE, [replace(event, id="newer")]), 1, 1, 0
        )

    async def test_continues_from_the_end(self) -> None:
        """The page after one read from the end is the next one."""
        with closing(connect(self.path)) as connection:
            for wanted in (EventFilter(), EventFilter(("even", "third")), EventFilter(after=1.0, before=40.0)):
                everything = await self.list_ids(wanted, 0, 1000)
                for offset in range(0, len(everything), 7):
                    page_cursors = PageCursorCache()
                    for part in (PageRequest(offset, 9), PageRequest(offset + 9, 5), PageRequest(offset + 14, 5)):
                        found = event_archive_queries.find_stored_events(
                            connection, ALICE, wanted, PageReadOptions(part, page_cursors)
                        )
                        assert found is not None
                        expected = everything[part.offset : part.offset + part.limit]
                        self.assertEqual([event.id for event in found.items], expected)

    async def test_replaced_file(self) -> None:
        """The content of another file of the same name does not matter, however similar."""
        wanted = EventFilter(after=5.0, before=10.0)
        before = await self.store.decentrl.events(ALICE, wanted, PageRequest(30, 5))
        await self.store.close()
        self.path.unlink()
        await self.store.open()
        await self.save_events(*(replace(self.make_event(number), timestamp=float(number)) for number in range(300)))
        found = await self.store.decentrl.events(ALICE, wanted, PageRequest(0, 5))
        self.assertEqual((before.total, found.total), (42, 6))
        self.assertEqual([event.id for event in found.items], ["e5", "e6", "e7", "e8", "e9"])

    async def test_sequential_pages_do_not_rescan(self) -> None:
        """Sequential pages do not scan everything before each page."""
        statements: list[str] = []
        with closing(connect(self.path)) as connection:
            connection.set_trace_callback(statements.append)
            page_cursors = PageCursorCache()
            for offset in (0, 10, 20, 30, 40):
                event_archive_queries.find_stored_events(
                    connection,
                    ALICE,
                    EventFilter(("even", "third")),
                    PageReadOptions(PageRequest(offset, 10), page_cursors),
                )
        skipped = [re.search(r"LIMIT (\d+) OFFSET (\d+)", statement) for statement in statements]
        self.assertEqual([found.groups() for found in skipped if found], [("10", "0")] * 5)
        self.assertEqual(len([statement for statement in statements if "count(*)" in statement]), 1)

    async def test_long_counts_run_in_background(self) -> None:
        """Only a count that takes long runs in the background thread."""
        with closing(connect(self.path)) as connection:
            ((owner,),) = connection.execute("SELECT id FROM party").fetchall()
            labels = dict(connection.execute("SELECT text, id FROM label WHERE kind = 3").fetchall())
            ((everything,),) = connection.execute("SELECT id FROM label WHERE kind = 0").fetchall()
            # As if there were many more events, which no page of this test reaches.
            for label in (everything, *labels.values()):
                connection.execute(
                    "WITH RECURSIVE n (i) AS (SELECT 1000 UNION ALL SELECT i + 1 FROM n WHERE i < 40000)"
                    " INSERT INTO labelled SELECT ?, 1e6 + i, i FROM n",
                    (label,),
                )
            connection.execute(
                "UPDATE label SET items = (SELECT count(*) FROM labelled WHERE label_id = id) WHERE owner_id = ?",
                (owner,),
            )
            connection.execute("UPDATE label SET items = items + 1 WHERE id = ?", (everything,))
            connection.execute("UPDATE party_usage SET edition = edition + 1")
        self.observed.clear()
        for wanted, total, long in (
            (EventFilter(("even",)), 39_151, False),
            (EventFilter(("even",), before=1e5), 150, False),
            (EventFilter(("even",), after=1e5), 39_001, False),
            (EventFilter(("even",), after=1e5, before=1e6 + 39_900), 38_901, False),
            (EventFilter(("even",), participant=BOB), 150, False),
            (EventFilter(("even", "third")), 39_201, True),
            (EventFilter(("even",), after=1e6 + 20_000), 20_001, True),
        ):
            for repeated in (False, True):
                found = await self.store.decentrl.events(ALICE, wanted, PageRequest(0, 0))
                self.assertEqual(found.total, total)
                self.assertEqual("events_patiently" in self.observed, long and not repeated, wanted)
                self.observed.clear()

    async def test_long_skips_run_in_background(self) -> None:
        """A page far from either end and from what was read runs in the background thread; those after it do not."""
        self.patch(decentrl_store, "_QUICK_SEARCH_ENTRIES", 60)
        everything = await self.list_ids(EventFilter(), 0, 1000)
        await self.save_events(self.make_event(300))  # nothing is known of the new edition
        everything.append("e300")
        for offset, long in ((60, False), (240, False), (150, True), (150, False), (159, False), (0, False)):
            self.observed.clear()
            self.assertEqual(await self.list_ids(EventFilter(), offset, 9), everything[offset : offset + 9])
            self.assertEqual("events_patiently" in self.observed, long, offset)

    async def test_page_larger_than_read_chunk(self) -> None:
        """A page larger than the read chunk is read in parts and returned complete."""
        sizes = [BYTES_PER_READ + 1, 10, BYTES_PER_READ // 2, BYTES_PER_READ // 2, 10, 0]
        large = [
            StoredEvent(f"large {number}", ALICE, ALICE, chr(97 + number) * size, (), 1e6)
            for number, size in enumerate(sizes)
        ]
        await self.save_events(*large)
        statements: list[str] = []
        with closing(connect(self.path)) as connection:
            connection.set_trace_callback(statements.append)
            found = event_archive_queries.find_stored_events(
                connection, ALICE, EventFilter(after=1e6), PageReadOptions(ALL, PageCursorCache())
            )
        assert found is not None
        self.assertEqual(found.items, tuple(large))
        self.assertEqual(len([statement for statement in statements if "group_concat(payload" in statement]), 3)

    @given(time=st.floats(allow_nan=False, allow_infinity=False))
    @settings(max_examples=200, deadline=None)
    def test_timestamps_are_exact(self, time: float) -> None:
        """Timestamps are stored to the last bit."""
        with closing(create_memory_database()) as connection:
            operations = SQLiteOperations(DecentrlQuotas())
            commands = [
                operations.save_contract(make_contract("c", ALICE, BOB)),
                operations.deliver_event(PendingEvent("p", ALICE, BOB, "", time)),
                operations.save_events(ALICE, [StoredEvent("e", ALICE, BOB, "", (), time)]),
                operations.publish_event(ALICE, PublicEvent("x", "", (), time, "")),
            ]
            self.assertEqual(resolve_results(connection.commit_batch(commands)), [None] * 4)
            reading = PageReadOptions(ALL, PageCursorCache())
            stored = event_archive_queries.find_stored_events(
                connection, ALICE, EventFilter(after=time, before=time), reading
            )
            public = event_archive_queries.find_public_events(
                connection, ALICE, PublicEventFilter(after=time, before=time), reading
            )
            pending = decentrl_queries.find_pending_page(connection, ALICE, None, ALL)
            assert stored is not None and public is not None
            times = [stored.items[0].timestamp, public.items[0].timestamp, pending.items[0].received_at]
            self.assertEqual(times, [time] * 3)
            self.assertTrue(all(map(isfinite, times)))
            (removed,) = decentrl_queries.acknowledge_events(connection, ALICE, ["p"])
            self.assertEqual(removed.received_at, time)
