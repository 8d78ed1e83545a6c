"""Databases that are gone, damaged, or may not grow: nothing is promised that could not be kept, and it is said."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

from twisted.internet.defer import Deferred
from twisted.trial.unittest import SynchronousTestCase

from mediatord.errors import StoreUnavailable
from mediatord.store.disk_space import SpaceLimits
from mediatord.store.sqlite.connection import connect_reader
from mediatord.store.sqlite.database_file import (
    TableSizeEstimator,
    check_integrity,
    check_store,
    check_structure,
    create_database,
)
from mediatord.store.sqlite.executor import FILE_CHECK_INTERVAL
from mediatord.store.sqlite.sqlite_store import SQLiteStore
from tests.store.builders import ALICE, BOB, NOON, ImmediateClock, make_database_path, make_payload, make_sqlite_store

INBOX = "did:key:z6MkInbox"
GARBAGE = 65_536


class FileCase(SynchronousTestCase):
    """A store with some mail in it."""

    space_limits = SpaceLimits(min_free_bytes=1)

    def setUp(self) -> None:
        self.clock = ImmediateClock()
        self.path = make_database_path(self)
        self.faults: list[tuple[str, bool]] = []
        self.store = self.opened()
        self.successResultOf(self.store.grant(ALICE))
        self.successResultOf(self.store.update_recipients(ALICE, [(INBOX, "add")], max_recipients=9))
        self.successResultOf(self.put("first"))

    def opened(self) -> SQLiteStore:
        store = make_sqlite_store(
            self.clock,
            self.path,
            space_limits=self.space_limits,
            on_fault=lambda fault, present: self.faults.append((fault, present)),
        )
        self.successResultOf(store.open())
        self.addCleanup(lambda: self.successResultOf(store.close()))
        return store

    def close(self) -> None:
        self.successResultOf(self.store.close())

    def beside(self, suffix: str) -> Path:
        return self.path.with_name(self.path.name + suffix)

    def put(self, *ids: str, size: int = 20) -> Deferred[Any]:
        payloads = [make_payload(id, id.encode().ljust(size, b".")) for id in ids]
        return self.store.enqueue(INBOX, payloads, expires_at=NOON + 99_999)

    def fetched(self) -> list[str]:
        messages = self.successResultOf(self.store.fetch_messages(ALICE, None, limit=999, max_bytes=1 << 30))
        return [message.id for message in messages]

    def look(self) -> None:
        """A second goes by."""
        self.clock.advance(FILE_CHECK_INTERVAL)

    def unavailable(self, *asked: Deferred[Any]) -> None:
        for one in asked:
            self.failureResultOf(one, StoreUnavailable)


class MissingTests(FileCase):
    """Files that are taken away while the store is open."""

    def gone(self) -> None:
        self.look()
        self.assertIn("removed, renamed or replaced", self.store.fault_description)
        self.assertEqual(self.faults, [("missing", True)])
        self.unavailable(
            self.put("b"),
            self.store.ping(),
            self.store.find_owner(INBOX),
            self.store.get_account(ALICE),
            self.store.fetch_messages(ALICE, None, limit=9, max_bytes=99),
            self.store.queue_sizes(9),
            self.store.acknowledge(ALICE, ["first"]),
        )

    def test_removed(self) -> None:
        """What is written when the database has been removed is not said to be stored, not even in that second."""
        self.path.unlink()
        self.unavailable(self.put("a"))
        self.gone()

    def test_log_removed(self) -> None:
        """The same without the write-ahead log, which has what was written last."""
        self.beside("-wal").unlink()
        self.unavailable(self.put("a"))
        self.gone()

    def test_shared_memory_removed(self) -> None:
        """And without the index of that, in place of which another process would make one of its own."""
        self.beside("-shm").unlink()
        self.gone()

    def test_replaced(self) -> None:
        """Another database in its place is not the one."""
        other = make_database_path(self)
        create_database(other)
        other.rename(self.path)
        self.unavailable(self.put("a"))
        self.gone()

    def test_put_back(self) -> None:
        """A file that is renamed and gets its name back is used again, and has all that was stored."""
        aside = self.beside(".aside")
        self.path.rename(aside)
        self.unavailable(self.put("lost or not"))
        self.gone()
        aside.rename(self.path)
        self.look()
        self.assertEqual((self.store.fault_description, self.faults), ("", [("missing", True), ("missing", False)]))
        self.successResultOf(self.put("b"))
        self.successResultOf(self.store.ping())
        self.assertLessEqual({"first", "b"}, set(self.fetched()))

    def test_no_new_one(self) -> None:
        """A store that is not to make its file does not when it is opened anew."""
        self.close()
        for end in ("", "-wal", "-shm"):
            self.beside(end).unlink(missing_ok=True)
        store = make_sqlite_store(self.clock, self.path, create=False)
        self.unavailable(store.open())
        self.assertFalse(self.path.exists())


class DamageTests(FileCase):
    """Content that is not what was written."""

    def fill(self) -> int:
        """Enough for damage to be somewhere. :return: the size of the file."""
        for number in range(60):
            self.successResultOf(self.put(f"m{number}", size=9000))
        self.close()
        return self.path.stat().st_size

    def refused(self) -> str:
        with self.assertRaises(ValueError) as caught:
            check_store("sqlite", self.path)
        return str(caught.exception)

    def overwrite(self, start: int) -> None:
        with self.path.open("r+b") as file:
            file.seek(start)
            file.write(b"\xa5" * GARBAGE)

    def test_garbage(self) -> None:
        """Garbage in its middle, at its end or at its beginning is found at the start, which says what to do."""
        size = self.fill()
        whole = self.path.read_bytes()
        check_store("sqlite", self.path)
        for start in (size // 2, size // 4, size - GARBAGE, 0):
            self.overwrite(start)
            self.assertRegex(self.refused(), "(it is damaged|file is not a database).*; restore a backup")
            self.path.write_bytes(whole)
        check_store("sqlite", self.path)

    def test_cut_off(self) -> None:
        """So is a file that has lost its end, with a write-ahead log beside it or without."""
        size = self.fill()
        whole = self.path.read_bytes()
        for left in (size // 2, size - 4096, 4096, 100):
            self.path.write_bytes(whole[:left])
            self.assertRegex(self.refused(), "(it is damaged|file is not a database).*; restore a backup")
        self.path.write_bytes(whole)
        self.store = self.opened()
        self.successResultOf(self.put("in the log"))
        log = self.beside("-wal").read_bytes()
        self.close()
        self.path.write_bytes(whole[: size // 2])
        self.beside("-wal").write_bytes(log)
        self.assertIn("restore a backup", self.refused())
        self.assertEqual(self.beside("-wal").read_bytes(), log)
        self.assertEqual(self.path.read_bytes(), whole[: size // 2])

    def test_log_without_database(self) -> None:
        """An empty or missing database beside its write-ahead log is not begun anew, and the log stays."""
        self.successResultOf(self.put("in the log"))
        log, content = self.beside("-wal"), self.beside("-wal").read_bytes()
        self.close()
        for make in (self.path.unlink, self.path.touch):
            make()
            log.write_bytes(content)
            self.assertRegex(self.refused(), "it is (empty|gone).*put (it|the database) back")
            self.unavailable(make_sqlite_store(self.clock, self.path).open())
            self.assertEqual(log.read_bytes(), content)

    def test_found_while_running(self) -> None:
        """Damage that a read finds is a fault from then on; nothing is written to such a file, nor is all well."""
        size = self.fill()
        self.overwrite(size // 2)
        self.store = self.opened()
        self.unavailable(self.store.fetch_messages(ALICE, None, limit=999, max_bytes=1 << 30))
        self.assertEqual(self.faults, [("damaged", True)])
        self.assertIn("damaged", self.store.fault_description)
        before = self.beside("-wal").stat().st_size
        self.unavailable(self.put("b"), self.store.ping(), self.store.acknowledge(ALICE, ["first"]))
        self.assertEqual(self.beside("-wal").stat().st_size, before)
        self.look()
        self.assertIn("damaged", self.store.fault_description)
        self.assertIsNotNone(self.successResultOf(self.store.get_account(ALICE)))

    def test_cut_off_while_running(self) -> None:
        """A file that becomes shorter while it is open is damaged, before anybody has read what is not there."""
        size = self.fill()
        self.store = self.opened()
        with self.path.open("r+b") as file:
            file.truncate(size // 2)
        self.look()
        self.assertEqual(self.faults, [("damaged", True)])
        self.unavailable(self.put("b"), self.store.ping())

    def test_shorter_by_a_vacuum(self) -> None:
        """A whole file that another program has made shorter is none that is damaged, and is looked at once."""
        size = self.fill()
        self.store = self.opened()
        self.successResultOf(self.store.acknowledge(ALICE, self.fetched()[1:]))
        with closing(sqlite3.connect(self.path)) as connection:
            connection.execute("VACUUM")
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        self.assertLess(self.path.stat().st_size, size // 2)
        for _ in range(3):
            self.look()
        self.successResultOf(self.put("b"))
        self.assertEqual((self.store.fault_description, self.faults, self.fetched()), ("", [], ["first", "b"]))

    def test_checks(self) -> None:
        """A whole file has no problem in either check; an index that lacks a row is one for the deep check."""
        self.fill()
        with closing(connect_reader(self.path)) as connection:
            self.assertEqual((check_structure(connection), check_integrity(connection)), ([], []))
        with closing(sqlite3.connect(self.path)) as connection:
            connection.execute("PRAGMA writable_schema = ON")
            name = "message_expiry"
            connection.execute("DELETE FROM sqlite_schema WHERE name = ?", (name,))
            connection.execute("DELETE FROM message WHERE id = 'first'")
            connection.commit()
        with closing(connect_reader(self.path)) as connection:
            self.assertNotEqual(check_integrity(connection), [])

    def test_bounded(self) -> None:
        """A check that takes too long ends without a finding."""
        self.fill()
        with closing(connect_reader(self.path)) as connection:
            connection.set_trace_callback(lambda statement: connection.interrupt())
            self.assertEqual(check_structure(connection, 60), [])


class FirstStartTests(SynchronousTestCase):
    """When a database is made, and when it is missed."""

    def setUp(self) -> None:
        self.path = make_database_path(self)
        self.logs = self.path.parent / "log"

    def check(self) -> None:
        check_store("sqlite", self.path, self.logs)

    def refused(self) -> str:
        with self.assertRaises(ValueError) as caught:
            self.check()
        self.assertFalse(self.path.exists() and self.path.stat().st_size)
        return str(caught.exception)

    def lose(self, *ends: str) -> None:
        for end in ("", "-wal", "-shm", *ends):
            self.path.with_name(self.path.name + end).unlink(missing_ok=True)

    def test_made_once(self) -> None:
        """The first start makes it; once it was there, a start without it is refused, whatever else is left."""
        self.check()
        self.check()
        self.lose()
        self.assertIn("restore a backup", self.refused())
        self.path.touch()
        self.assertIn("it is empty", self.refused())

    def test_logs_of_before(self) -> None:
        """A log of events says as well that there was one, also that of a worker."""
        for place in (self.logs, self.logs / "m-1"):
            place.mkdir(parents=True)
            log = place / "events.jsonl"
            log.touch()
            self.assertRegex(
                self.refused(), f"may have been one.*{self.logs}.*storage.backend.*mediatord store create"
            )
            log.rename(place / "events-20260101T000000Z-m-0-1.jsonl.gz")
            self.assertIn(str(self.logs), self.refused())
            (place / "events-20260101T000000Z-m-0-1.jsonl.gz").unlink()
        self.check()

    def test_on_purpose(self) -> None:
        """Who wants a new one says so; one that is there is not made anew, nor is a log thrown away."""
        self.check()
        with self.assertRaisesRegex(ValueError, "it already exists"):
            create_database(self.path)
        self.lose()
        create_database(self.path)
        self.check()
        self.lose()
        self.path.with_name(self.path.name + "-wal").write_bytes(b"x")
        with self.assertRaisesRegex(ValueError, "its write-ahead log"):
            create_database(self.path)


class QuotaTests(FileCase):
    """A store that may take so many bytes."""

    space_limits = SpaceLimits(max_bytes=2_000_000, min_free_bytes=1)

    def fill(self) -> int:
        """Put in what it takes. :return: how many messages that was."""
        for number in range(1000):
            if self.store.fault_description:
                return number
            self.successResultOf(self.put(f"m{number}", size=20_000))
            self.look()
        self.fail("it takes everything")

    def test_full(self) -> None:
        """Beyond that mail and registrations are refused, and what is there is read and deleted as before."""
        number = self.fill()
        self.assertGreater(number, 10)
        self.assertEqual((self.store.fault_description[:10], self.faults), ("store full", [("full", True)]))
        self.unavailable(
            self.put("one more"),
            self.store.grant(BOB),
            self.store.move_account(ALICE, BOB),
            self.store.update_recipients(ALICE, [("did:example:more", "add")], max_recipients=9),
            self.store.ping(),
        )
        self.assertEqual(self.fetched()[0], "first")
        self.assertTrue(self.successResultOf(self.store.claim_nonce(b"nonce", NOON + 9)))
        self.successResultOf(self.store.mark_delivered(["first"]))
        self.assertEqual(len(self.successResultOf(self.store.acknowledge(ALICE, ["first"]))), 1)
        self.successResultOf(self.store.update_recipients(ALICE, [(INBOX, "remove")], max_recipients=9))

    def test_room_again(self) -> None:
        """Once enough was deleted, by whomever, it goes on without a restart."""
        self.fill()
        self.successResultOf(self.store.acknowledge(ALICE, self.fetched()))
        self.look()
        self.look()
        self.successResultOf(self.put("one more"))
        self.successResultOf(self.store.ping())
        self.assertEqual((self.store.fault_description, self.faults), ("", [("full", True), ("full", False)]))

    def test_steady(self) -> None:
        """What was deleted leaves a file as large as before; the fault is over once, and a restart knows as well."""
        self.fill()
        ids = self.fetched()
        self.successResultOf(self.store.acknowledge(ALICE, ids[: len(ids) // 2]))
        for _ in range(20):
            self.look()
        self.assertEqual(self.faults, [("full", True), ("full", False)])
        self.close()
        self.store = self.opened()
        for number in range(5):
            self.successResultOf(self.put(f"after {number}"))
            self.look()
        self.assertEqual(self.faults, [("full", True), ("full", False)])

    def test_little_room_again(self) -> None:
        """A message less is not enough for more to be taken, or it would be full again at the next one."""
        self.fill()
        self.successResultOf(self.store.acknowledge(ALICE, self.fetched()[1:2]))
        for _ in range(5):
            self.look()
        self.assertEqual(self.faults, [("full", True)])
        self.unavailable(self.put("one more"))


class SizeTests(FileCase):
    """How large each table is, looked at a little at a time."""

    def test_known_in_time(self) -> None:
        """What is measured adds up to the file; a table that takes too long has what is left of that."""
        for number in range(300):
            self.successResultOf(self.put(f"m{number}", size=9000))
        self.close()
        with closing(connect_reader(self.path)) as connection:
            whole = TableSizeEstimator(lambda: 0.0).measure(connection)
            self.assertEqual(sum(whole.values()), self.path.stat().st_size)
            self.assertEqual(max(whole, key=whole.__getitem__), "message")
            now = [0.0]

            def trace(statement: str) -> None:
                if "'message'" in statement:
                    now[0] += 60.0

            slow = TableSizeEstimator(lambda: now[0])
            connection.set_trace_callback(trace)
            first = slow.measure(connection)
            self.assertNotIn("message", first)
            self.assertLess(len(first), len(whole))
            for _ in range(3):
                last = slow.measure(connection)
            self.assertEqual(last, whole)
