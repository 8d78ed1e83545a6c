"""
Databases that are missing, damaged or full: the store accepts nothing that it could lose, and reports the fault.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any, cast

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
from mediatord.store.sqlite.executor import FILE_CHECK_INTERVAL, SQLiteExecutor
from mediatord.store.sqlite.sqlite_store import SQLiteStore
from tests.store.builders import ALICE, BOB, NOON, ImmediateClock, make_database_path, make_payload, make_sqlite_store

INBOX = "did:key:z6MkInbox"
GARBAGE = 65_536


class FileTestCase(SynchronousTestCase):
    """A store with some messages."""

    space_limits = SpaceLimits(min_free_bytes=1)

    def setUp(self) -> None:
        self.clock = ImmediateClock()
        self.path = make_database_path(self)
        self.faults: list[tuple[str, bool]] = []
        self.store = self.open_store()
        self.successResultOf(self.store.grant(ALICE))
        self.successResultOf(self.store.update_recipients(ALICE, [(INBOX, "add")], max_recipients=9))
        self.successResultOf(self.enqueue_ids("first"))

    def open_store(self) -> SQLiteStore:
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

    def get_sibling(self, suffix: str) -> Path:
        return self.path.with_name(self.path.name + suffix)

    def enqueue_ids(self, *ids: str, size: int = 20) -> Deferred[Any]:
        payloads = [make_payload(id, id.encode().ljust(size, b".")) for id in ids]
        return self.store.enqueue(INBOX, payloads, expires_at=NOON + 99_999)

    def list_ids(self) -> list[str]:
        messages = self.successResultOf(self.store.fetch_messages(ALICE, None, limit=999, max_bytes=1 << 30))
        return [message.id for message in messages]

    def check_after_a_second(self) -> None:
        """Advance the clock by a second."""
        self.clock.advance(FILE_CHECK_INTERVAL)

    def assert_unavailable(self, *deferreds: Deferred[Any]) -> None:
        for deferred in deferreds:
            self.failureResultOf(deferred, StoreUnavailable)


class MissingFileTests(FileTestCase):
    """Files that are deleted while the store is open."""

    def assert_missing(self) -> None:
        self.check_after_a_second()
        self.assertIn("removed, renamed or replaced", self.store.fault_description)
        self.assertEqual(self.faults, [("missing", True)])
        self.assert_unavailable(
            self.enqueue_ids("b"),
            self.store.ping(),
            self.store.find_owner(INBOX),
            self.store.get_account(ALICE),
            self.store.fetch_messages(ALICE, None, limit=9, max_bytes=99),
            self.store.queue_sizes(9),
            self.store.acknowledge(ALICE, ["first"]),
        )

    def test_removed_database(self) -> None:
        """Nothing is accepted once the database was deleted, not even within that second."""
        self.path.unlink()
        self.assert_unavailable(self.enqueue_ids("a"))
        self.assert_missing()

    def test_removed_log(self) -> None:
        """The same for the write-ahead log, which has the latest writes."""
        self.get_sibling("-wal").unlink()
        self.assert_unavailable(self.enqueue_ids("a"))
        self.assert_missing()

    def test_removed_shared_memory(self) -> None:
        """The same for the shared-memory index of the log, which another process would create anew."""
        self.get_sibling("-shm").unlink()
        self.assert_missing()

    def test_replaced_database(self) -> None:
        """Another database in its place is not accepted."""
        other = make_database_path(self)
        create_database(other)
        other.rename(self.path)
        self.assert_unavailable(self.enqueue_ids("a"))
        self.assert_missing()

    def test_restored_name(self) -> None:
        """A file that is renamed and gets its name back is used again, with all its data."""
        aside = self.get_sibling(".aside")
        self.path.rename(aside)
        self.assert_unavailable(self.enqueue_ids("lost or not"))
        self.assert_missing()
        aside.rename(self.path)
        self.check_after_a_second()
        self.assertEqual((self.store.fault_description, self.faults), ("", [("missing", True), ("missing", False)]))
        self.successResultOf(self.enqueue_ids("b"))
        self.successResultOf(self.store.ping())
        self.assertLessEqual({"first", "b"}, set(self.list_ids()))

    def test_does_not_create_file_when_reopened(self) -> None:
        """A store that must not create its file does not do so when it is reopened."""
        self.close()
        for end in ("", "-wal", "-shm"):
            self.get_sibling(end).unlink(missing_ok=True)
        store = make_sqlite_store(self.clock, self.path, create=False)
        self.assert_unavailable(store.open())
        self.assertFalse(self.path.exists())


class DamageTests(FileTestCase):
    """Files with wrong content."""

    def fill_database(self) -> int:
        """Store enough for damage to hit something. :return: the size of the file."""
        for number in range(60):
            self.successResultOf(self.enqueue_ids(f"m{number}", size=9000))
        self.close()
        return self.path.stat().st_size

    def read_refusal(self) -> str:
        with self.assertRaises(ValueError) as caught:
            check_store("sqlite", self.path)
        return str(caught.exception)

    def overwrite_page(self, start: int) -> None:
        with self.path.open("r+b") as file:
            file.seek(start)
            file.write(b"\xa5" * GARBAGE)

    def test_garbage_is_found_at_start(self) -> None:
        """Garbage in the middle, at the end or at the beginning is found at the start, which says what to do."""
        size = self.fill_database()
        content = self.path.read_bytes()
        check_store("sqlite", self.path)
        for start in (size // 2, size // 4, size - GARBAGE, 0):
            self.overwrite_page(start)
            self.assertRegex(self.read_refusal(), "(it is damaged|file is not a database).*; restore a backup")
            self.path.write_bytes(content)
        check_store("sqlite", self.path)

    def test_truncated_file(self) -> None:
        """A truncated file is found at the start, with or without a write-ahead log."""
        size = self.fill_database()
        content = self.path.read_bytes()
        for length in (size // 2, size - 4096, 4096, 100):
            self.path.write_bytes(content[:length])
            self.assertRegex(self.read_refusal(), "(it is damaged|file is not a database).*; restore a backup")
        self.path.write_bytes(content)
        self.store = self.open_store()
        self.successResultOf(self.enqueue_ids("in the log"))
        log = self.get_sibling("-wal").read_bytes()
        self.close()
        self.path.write_bytes(content[: size // 2])
        self.get_sibling("-wal").write_bytes(log)
        self.assertIn("restore a backup", self.read_refusal())
        self.assertEqual(self.get_sibling("-wal").read_bytes(), log)
        self.assertEqual(self.path.read_bytes(), content[: size // 2])

    def test_log_without_database(self) -> None:
        """An empty or missing database beside its write-ahead log is not initialised, and the log stays."""
        self.successResultOf(self.enqueue_ids("in the log"))
        log, content = self.get_sibling("-wal"), self.get_sibling("-wal").read_bytes()
        self.close()
        for make in (self.path.unlink, self.path.touch):
            make()
            log.write_bytes(content)
            self.assertRegex(self.read_refusal(), "the file (is empty|does not exist).*put (it|the database) back")
            self.assert_unavailable(make_sqlite_store(self.clock, self.path).open())
            self.assertEqual(log.read_bytes(), content)

    def test_unusable_database_is_unchanged(self) -> None:
        """A database of a newer version or of another program is refused at the start, and stays as it is."""
        self.close()
        for pragma, reason in (
            ("user_version = 99", "its schema version is 99, but this release supports at most"),
            ("application_id = 1", "the file is a database of another program$"),
        ):
            with closing(sqlite3.connect(self.path)) as connection:
                connection.execute(f"PRAGMA {pragma}")
            before = self.path.read_bytes()
            self.assertRegex(self.read_refusal(), f"^cannot use the database {self.path}: {reason}")
            self.assertEqual(self.path.read_bytes(), before)

    def test_damage_found_by_read(self) -> None:
        """Damage found by a read is a fault from then on; nothing is written to the file."""
        size = self.fill_database()
        self.overwrite_page(size // 2)
        self.store = self.open_store()
        self.assert_unavailable(self.store.fetch_messages(ALICE, None, limit=999, max_bytes=1 << 30))
        self.assertEqual(self.faults, [("damaged", True)])
        self.assertIn("damaged", self.store.fault_description)
        before = self.get_sibling("-wal").stat().st_size
        self.assert_unavailable(self.enqueue_ids("b"), self.store.ping(), self.store.acknowledge(ALICE, ["first"]))
        self.assertEqual(self.get_sibling("-wal").stat().st_size, before)
        self.check_after_a_second()
        self.assertIn("damaged", self.store.fault_description)
        self.assertIsNotNone(self.successResultOf(self.store.get_account(ALICE)))

    def test_file_truncated_while_open(self) -> None:
        """A file truncated while it is open is damaged before anybody reads the missing part."""
        size = self.fill_database()
        self.store = self.open_store()
        with self.path.open("r+b") as file:
            file.truncate(size // 2)
        self.check_after_a_second()
        self.assertEqual(self.faults, [("damaged", True)])
        self.assert_unavailable(self.enqueue_ids("b"), self.store.ping())

    def test_vacuum_by_another_program(self) -> None:
        """An intact file that another program has shortened is not damaged, and is checked once."""
        size = self.fill_database()
        self.store = self.open_store()
        self.successResultOf(self.store.acknowledge(ALICE, self.list_ids()[1:]))
        with closing(sqlite3.connect(self.path)) as connection:
            connection.execute("VACUUM")
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        self.assertLess(self.path.stat().st_size, size // 2)
        for _ in range(3):
            self.check_after_a_second()
        self.successResultOf(self.enqueue_ids("b"))
        self.assertEqual((self.store.fault_description, self.faults, self.list_ids()), ("", [], ["first", "b"]))

    def test_quick_and_deep_check(self) -> None:
        """An intact file passes both checks; an index without one of its rows fails the deep one."""
        self.fill_database()
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

    def test_check_is_limited_in_time(self) -> None:
        """A check that takes too long ends without a finding."""
        self.fill_database()
        with closing(connect_reader(self.path)) as connection:
            connection.set_trace_callback(lambda statement: connection.interrupt())
            self.assertEqual(check_structure(connection, 60), [])


class FirstStartTests(SynchronousTestCase):
    """Creation of the database, and detection of a missing one."""

    def setUp(self) -> None:
        self.path = make_database_path(self)
        self.logs = self.path.parent / "log"

    def check(self) -> None:
        check_store("sqlite", self.path, self.logs)

    def read_refusal(self) -> str:
        with self.assertRaises(ValueError) as caught:
            self.check()
        self.assertFalse(self.path.exists() and self.path.stat().st_size)
        return str(caught.exception)

    def delete_files(self, *ends: str) -> None:
        for end in ("", "-wal", "-shm", *ends):
            self.path.with_name(self.path.name + end).unlink(missing_ok=True)

    def test_created_once(self) -> None:
        """The first start creates the database; later a start without it is refused, whatever files remain."""
        self.check()
        self.check()
        self.delete_files()
        self.assertIn("restore a backup", self.read_refusal())
        self.path.touch()
        self.assertIn("the file is empty", self.read_refusal())

    def test_event_log_proves_earlier_database(self) -> None:
        """An event log, also that of a worker, shows that there was a database."""
        for directory in (self.logs, self.logs / "m-1"):
            directory.mkdir(parents=True)
            log = directory / "events.jsonl"
            log.touch()
            self.assertRegex(
                self.read_refusal(),
                f"{self.logs} suggests that a database existed.*storage.backend.*mediatord store create",
            )
            log.rename(directory / "events-20260101T000000Z-m-0-1.jsonl.gz")
            self.assertIn(str(self.logs), self.read_refusal())
            (directory / "events-20260101T000000Z-m-0-1.jsonl.gz").unlink()
        self.check()

    def test_created_on_request(self) -> None:
        """A new database can be requested; an existing one is not replaced, nor is a log deleted."""
        self.check()
        with self.assertRaisesRegex(ValueError, "it already exists"):
            create_database(self.path)
        self.delete_files()
        create_database(self.path)
        self.check()
        self.delete_files()
        self.path.with_name(self.path.name + "-wal").write_bytes(b"x")
        with self.assertRaisesRegex(ValueError, "its write-ahead log"):
            create_database(self.path)


class FullDiskTests(FileTestCase):
    """A disk on which SQLite finds no space, although the limits leave some."""

    def limit_pages(self, count: int) -> None:
        """Let SQLite find no space beyond a number of pages, at least the present one."""
        executor = cast(SQLiteExecutor, self.store._executor)
        pragma = f"PRAGMA max_page_count={count}"
        self.successResultOf(
            executor.write("limit", lambda connection: connection.execute(pragma).fetchall(), shrinking=True)
        )

    def test_failed_write_is_refused_and_reported(self) -> None:
        """The message is refused, and the store counts as full until there is space again."""
        space = cast(SQLiteExecutor, self.store._executor)._space
        free = 1 << 20
        self.patch(space, "_disk", lambda: (free, 1 << 40))
        self.limit_pages(1)
        self.assert_unavailable(self.enqueue_ids("large", size=200_000))
        self.assertEqual(self.faults, [("full", True)])
        self.assertEqual(self.list_ids(), ["first"])
        self.limit_pages(1 << 30)
        free = 1 << 39
        self.check_after_a_second()
        self.assertEqual(self.faults, [("full", True), ("full", False)])
        self.successResultOf(self.enqueue_ids("large", size=200_000))


class SpaceLimitTests(FileTestCase):
    """A store with a limit in bytes."""

    space_limits = SpaceLimits(max_bytes=2_000_000, min_free_bytes=1)

    def fill_to_limit(self) -> int:
        """Enqueue messages up to the limit. :return: their number."""
        for number in range(1000):
            if self.store.fault_description:
                return number
            self.successResultOf(self.enqueue_ids(f"m{number}", size=20_000))
            self.check_after_a_second()
        self.fail("it takes everything")

    def test_rejects_writes_beyond_limit(self) -> None:
        """Beyond the limit messages and registrations are refused; reads and deletes go on."""
        number = self.fill_to_limit()
        self.assertGreater(number, 10)
        self.assertEqual((self.store.fault_description[:10], self.faults), ("store full", [("full", True)]))
        self.assert_unavailable(
            self.enqueue_ids("one more"),
            self.store.grant(BOB),
            self.store.move_account(ALICE, BOB),
            self.store.update_recipients(ALICE, [("did:example:more", "add")], max_recipients=9),
            self.store.ping(),
        )
        self.assertEqual(self.list_ids()[0], "first")
        self.assertTrue(self.successResultOf(self.store.claim_nonce(b"nonce", NOON + 9)))
        self.successResultOf(self.store.mark_delivered(["first"]))
        self.assertEqual(len(self.successResultOf(self.store.acknowledge(ALICE, ["first"]))), 1)
        self.successResultOf(self.store.update_recipients(ALICE, [(INBOX, "remove")], max_recipients=9))

    def test_resumes_after_deletions(self) -> None:
        """Once enough was deleted, by any process, the store goes on without a restart."""
        self.fill_to_limit()
        self.successResultOf(self.store.acknowledge(ALICE, self.list_ids()))
        self.check_after_a_second()
        self.check_after_a_second()
        self.successResultOf(self.enqueue_ids("one more"))
        self.successResultOf(self.store.ping())
        self.assertEqual((self.store.fault_description, self.faults), ("", [("full", True), ("full", False)]))

    def test_deleted_space_is_reused(self) -> None:
        """Deletions leave the file as large as it was; the fault ends once, also for a restarted store."""
        self.fill_to_limit()
        ids = self.list_ids()
        self.successResultOf(self.store.acknowledge(ALICE, ids[: len(ids) // 2]))
        for _ in range(20):
            self.check_after_a_second()
        self.assertEqual(self.faults, [("full", True), ("full", False)])
        self.close()
        self.store = self.open_store()
        for number in range(5):
            self.successResultOf(self.enqueue_ids(f"after {number}"))
            self.check_after_a_second()
        self.assertEqual(self.faults, [("full", True), ("full", False)])

    def test_resumes_with_hysteresis(self) -> None:
        """Deleting one message is not enough to accept more, or the store would be full again at once."""
        self.fill_to_limit()
        self.successResultOf(self.store.acknowledge(ALICE, self.list_ids()[1:2]))
        for _ in range(5):
            self.check_after_a_second()
        self.assertEqual(self.faults, [("full", True)])
        self.assert_unavailable(self.enqueue_ids("one more"))


class TableSizeTests(FileTestCase):
    """Sizes of tables, measured in small steps."""

    def test_measurement_is_limited_in_time(self) -> None:
        """The sizes add up to the file; a table that takes too long gets the remainder."""
        for number in range(300):
            self.successResultOf(self.enqueue_ids(f"m{number}", size=9000))
        self.close()
        with closing(connect_reader(self.path)) as connection:
            sizes = TableSizeEstimator(lambda: 0.0).measure(connection)
            self.assertEqual(sum(sizes.values()), self.path.stat().st_size)
            self.assertEqual(max(sizes, key=sizes.__getitem__), "message")
            now = [0.0]

            def trace(statement: str) -> None:
                if "'message'" in statement:
                    now[0] += 60.0

            slow = TableSizeEstimator(lambda: now[0])
            connection.set_trace_callback(trace)
            first = slow.measure(connection)
            self.assertNotIn("message", first)
            self.assertLess(len(first), len(sizes))
            for _ in range(3):
                last = slow.measure(connection)
            self.assertEqual(last, sizes)
