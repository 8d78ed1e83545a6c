"""The file of the SQLite store: making it, opening it again, refusing it, checkpoints."""

from __future__ import annotations

import os
import re
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from stat import S_IMODE
from typing import cast

from twisted.logger import capturedLogs, formatEvent
from twisted.trial.unittest import SynchronousTestCase, TestCase

from mediatord.errors import MediationNotGranted, StoreUnavailable
from mediatord.store.disk_space import RESERVE_BYTES, SpaceLimits
from mediatord.store.factory import build_store
from mediatord.store.interfaces.messages import QueueLimits
from mediatord.store.interfaces.store import Account
from mediatord.store.sqlite import executor
from mediatord.store.sqlite.connection import connect
from mediatord.store.sqlite.database_file import DatabaseUnusable, migrate_schema, open_database, read_schema_steps
from mediatord.store.sqlite.executor import CHECKPOINT_INTERVAL_SECONDS, SQLiteExecutor
from mediatord.store.sqlite.sqlite_store import SQLiteStore
from tests.store.builders import ALICE, BOB, NOON, ImmediateClock, make_database_path, make_payload, make_sqlite_store

INBOX = "did:key:z6MkInbox"


class RestartTests(TestCase):
    """What is still there after a restart (reference 12)."""

    async def test_everything_stays(self) -> None:
        """Accounts, registrations, queues, delays, nonces and long forms outlive the process."""
        clock, path = ImmediateClock(), make_database_path(self)
        store = make_sqlite_store(clock, path)
        await store.open()
        await store.grant(ALICE)
        await store.grant("did:example:old")
        await store.move_account("did:example:old", BOB)
        await store.mark_draft03(BOB)
        await store.update_recipients(ALICE, [(INBOX, "add"), ("did:z", "add"), ("did:a", "add")], max_recipients=9)
        await store.enqueue(INBOX, [make_payload("a"), make_payload("b", b"\x00", "base64")], expires_at=NOON + 60)
        await store.enqueue("did:z", [make_payload("late")], expires_at=NOON + 60, due_at=NOON + 30)
        await store.claim_nonce(b"key", NOON + 60)
        await store.remember_did("short", "long")
        before = await store.fetch_messages(ALICE, None, limit=9, max_bytes=999)
        await store.close()

        store = make_sqlite_store(clock, path)
        await store.open()
        self.assertEqual(await store.fetch_messages(ALICE, None, limit=9, max_bytes=999), before)
        self.assertEqual(await store.get_account(BOB), Account(BOB, NOON, draft03=True))
        with self.assertRaises(MediationNotGranted):
            await store.grant("did:example:old")
        self.assertEqual(await store.list_recipients(ALICE, offset=0, limit=9), ([INBOX, "did:z", "did:a"], 3))
        self.assertEqual(await store.queue_sizes(9), ([(INBOX, 2), ("did:z", 1)], 0))
        self.assertEqual(await store.find_next_due(), NOON + 30)
        self.assertFalse(await store.claim_nonce(b"key", NOON + 60))
        self.assertEqual(await store.recall_did("short"), "long")
        await store.close()

    async def test_delivered_is_pending_again(self) -> None:
        """After a restart every `delivered` message is pending, and how often it was pushed is still known."""
        clock, path = ImmediateClock(), make_database_path(self)
        store = make_sqlite_store(clock, path)
        await store.open()
        await store.grant(ALICE)
        await store.update_recipients(ALICE, [(INBOX, "add")], max_recipients=9)
        await store.enqueue(INBOX, [make_payload("a")], expires_at=NOON + 60)
        await store.mark_delivered(["a"])
        await store.close()
        await store.open()
        self.assertEqual(
            [m.status for m in await store.fetch_messages(ALICE, None, limit=9, max_bytes=999)], ["pending"]
        )
        self.assertEqual(await store.mark_pending(["a"]), [])
        self.assertEqual([gone.pushes for gone in await store.acknowledge(ALICE, ["a"])], [1])
        await store.close()


class OpeningTests(SynchronousTestCase):
    """Which files are made, taken and refused."""

    def setUp(self) -> None:
        self.path = make_database_path(self)

    def refusal(self, path: Path) -> str:
        """The one line that is logged when this file is refused."""
        with capturedLogs() as events:
            self.failureResultOf(make_sqlite_store(ImmediateClock(), path).open(), StoreUnavailable)
        (event,) = (event for event in events if event.get("event") == "store.refused")
        text = formatEvent(event)
        self.assertNotIn("\n", text)
        return text

    def test_private(self) -> None:
        """Only the owner can read the database and the files beside it, whatever the umask."""
        self.addCleanup(os.umask, os.umask(0))
        store = make_sqlite_store(ImmediateClock(), self.path)
        self.successResultOf(store.open())
        modes = {path.name: S_IMODE(path.stat().st_mode) for path in self.path.parent.iterdir()}
        self.successResultOf(store.close())
        self.assertEqual(modes, {self.path.name + end: 0o600 for end in ("", "-wal", "-shm")})

    def test_empty_file(self) -> None:
        """An empty file, such as a crash while it was made leaves, is filled."""
        self.path.touch()
        store = make_sqlite_store(ImmediateClock(), self.path)
        self.successResultOf(store.open())
        self.successResultOf(store.ping())
        self.successResultOf(store.close())

    def test_newer_schema(self) -> None:
        """A database of a newer mediatord is refused and stays as it is."""
        with closing(open_database(self.path)) as connection:
            connection.execute("PRAGMA user_version = 99")
        before = self.path.read_bytes()
        self.assertEqual(
            self.refusal(self.path),
            "cannot open the store: its schema version is 99, "
            f"at most {len(read_schema_steps())} is supported; upgrade mediatord",
        )
        self.assertEqual(self.path.read_bytes(), before)

    def test_foreign_database(self) -> None:
        """The database of another program is refused and stays as it is."""
        with closing(sqlite3.connect(self.path)) as connection:
            connection.execute("CREATE TABLE account (name TEXT)")
        before = self.path.read_bytes()
        self.assertEqual(self.refusal(self.path), "cannot open the store: the file is a database of another program")
        self.assertEqual(self.path.read_bytes(), before)

    def test_no_database(self) -> None:
        """A file that is no database is refused and stays as it is."""
        self.path.write_text("Dear diary, " * 100)
        self.assertEqual(self.refusal(self.path), "cannot open the store: file is not a database")
        self.assertEqual(self.path.read_text(), "Dear diary, " * 100)

    def test_no_directory(self) -> None:
        """A file in a directory that does not exist is refused."""
        self.assertIn("No such file or directory", self.refusal(self.path / "deeper"))

    def test_opens_after_refusal(self) -> None:
        """The same store opens once the cause is gone."""
        self.path.write_text("Dear diary, " * 100)
        store = make_sqlite_store(ImmediateClock(), self.path)
        self.failureResultOf(store.open(), StoreUnavailable)
        self.failureResultOf(store.ping(), StoreUnavailable)
        self.path.unlink()
        self.successResultOf(store.open())
        self.successResultOf(store.ping())
        self.successResultOf(store.close())

    def test_upgrade(self) -> None:
        """An older database gets just the steps that it lacks, and a step that fails leaves it as it was."""
        latest = len(read_schema_steps())
        further = "CREATE TABLE extra (x TEXT); INSERT INTO extra VALUES ('a;b');"
        with closing(open_database(self.path)) as connection:
            with self.assertRaises(sqlite3.OperationalError):
                migrate_schema(connection, [*read_schema_steps(), further, "CREATE TABLE extra (y TEXT);"])
            self.assertEqual(connection.execute("PRAGMA user_version").fetchone(), (latest,))
            migrate_schema(connection, [*read_schema_steps(), further])
            migrate_schema(connection, [*read_schema_steps(), further])
            self.assertEqual(connection.execute("PRAGMA user_version").fetchone(), (latest + 1,))
            self.assertEqual(connection.execute("SELECT x FROM extra").fetchall(), [("a;b",)])
            with self.assertRaises(DatabaseUnusable):
                migrate_schema(connection, read_schema_steps())

    def test_concurrent_upgrade(self) -> None:
        """Of several connections that upgrade at the same time, one runs the missing steps."""
        steps = [*read_schema_steps(), "CREATE TABLE extra (x TEXT); INSERT INTO extra VALUES ('a');"]
        open_database(self.path).close()
        connections = [connect(self.path) for _ in range(3)]
        with ThreadPoolExecutor(len(connections)) as threads:
            list(threads.map(lambda connection: migrate_schema(connection, steps), connections))
        for connection in connections:
            self.assertEqual(connection.execute("PRAGMA user_version").fetchone(), (len(steps),))
            self.assertEqual(connection.execute("SELECT x FROM extra").fetchall(), [("a",)])
            connection.close()


class BackendTests(SynchronousTestCase):
    """Choosing a backend (contract section 4)."""

    def test_unavailable(self) -> None:
        """A backend that is not there is refused with a sentence for the operator."""
        for backend, text in (
            ("mongodb", "storage.mongodb.uri: expected a mongodb:// URI"),
            ("oracle", "unknown storage.backend 'oracle': expected memory, sqlite or mongodb"),
            ("sqlite", "storage.backend sqlite requires storage.sqlite.path"),
        ):
            with self.assertRaisesRegex(ValueError, f"^{re.escape(text)}$"):
                build_store(backend, ImmediateClock(), QueueLimits())

    def test_memory(self) -> None:
        """The memory backend needs nothing but a clock."""
        store = build_store("memory", ImmediateClock(), QueueLimits())
        self.successResultOf(store.open())
        self.successResultOf(store.ping())


class CheckpointTests(SynchronousTestCase):
    """Emptying the write-ahead log."""

    def setUp(self) -> None:
        self.clock = ImmediateClock()
        self.path = make_database_path(self)
        self.log = self.path.with_name(self.path.name + "-wal")
        self.observed: list[str] = []

    def open(self) -> SQLiteStore:
        store = make_sqlite_store(
            self.clock, self.path, observe=lambda operation, seconds: self.observed.append(operation)
        )
        self.successResultOf(store.open())
        self.addCleanup(lambda: self.successResultOf(store.close()))
        return store

    def in_database(self) -> list[str]:
        """What is in the database itself, without its log."""
        copy = self.path.with_name("copy")
        copy.write_bytes(self.path.read_bytes())
        with closing(sqlite3.connect(copy)) as connection:
            return [short for (short,) in connection.execute("SELECT short FROM did_document")]

    def test_soon_after_a_commit(self) -> None:
        """Half a second after a commit it is in the database; without a commit nothing is done."""
        store = self.open()
        self.successResultOf(store.remember_did("a", "long"))
        self.assertEqual(self.in_database(), [])
        self.clock.advance(0.5)
        self.assertEqual(self.in_database(), ["a"])
        self.clock.advance(60)
        self.assertEqual(self.observed.count("checkpoint"), 1)
        self.successResultOf(store.remember_did("b", "long"))
        self.clock.advance(0.5)
        self.assertEqual(self.in_database(), ["a", "b"])

    def test_the_reserve_outlives_a_checkpoint(self) -> None:
        """A checkpoint truncates the file, which frees the blocks beyond its end; they are allocated again."""
        store = self.open()
        if not self.has_reserve():
            self.skipTest("the file system of the temporary directory has too little space, or cannot preallocate")
        self.successResultOf(store.remember_did("a", "long"))
        self.clock.advance(CHECKPOINT_INTERVAL_SECONDS)
        self.assertEqual(self.in_database(), ["a"])
        self.assertTrue(self.has_reserve())

    def test_the_reserve_outlives_a_checkpoint_of_the_writer(self) -> None:
        """Nor is it lost in the second checkpoint, which lets the writer begin the log anew."""
        self.patch(executor, "WAL_REUSE_BYTES", 0)
        self.test_the_reserve_outlives_a_checkpoint()

    def test_the_reserve_is_kept_when_there_is_little_space(self) -> None:
        """Blocks that the database has are not given away, even where it would not be allowed to take them."""
        store = self.open()
        if not self.has_reserve():
            self.skipTest("the file system of the temporary directory has too little space, or cannot preallocate")
        self.patch(cast(SQLiteExecutor, store._executor)._space, "_limits", SpaceLimits(min_free_bytes=1 << 60))
        self.successResultOf(store.remember_did("a", "long"))
        self.clock.advance(CHECKPOINT_INTERVAL_SECONDS)
        self.assertTrue(self.has_reserve())

    def has_reserve(self) -> bool:
        """Whether the database has blocks beyond its end."""
        found = self.path.stat()
        return found.st_blocks * 512 >= found.st_size + RESERVE_BYTES // 2

    def test_log_is_capped(self) -> None:
        """A log that a reader kept from being reused is emptied once it is over the cap and nobody reads."""
        self.patch(executor, "MAX_WAL_BYTES", 100_000)
        store = self.open()
        with closing(connect(self.path)) as reader:
            reader.execute("BEGIN")
            reader.execute("SELECT * FROM did_document").fetchall()
            self.successResultOf(store.remember_did("a", "x" * 60_000))
            self.clock.advance(0.5)
            self.successResultOf(store.remember_did("b", "x" * 60_000))
        self.assertGreater(self.log.stat().st_size, 120_000)
        self.successResultOf(store.remember_did("c", "x" * 60_000))
        self.clock.advance(0.5)
        self.assertEqual(self.log.stat().st_size, 0)
        self.assertEqual(self.in_database(), ["a", "b", "c"])
