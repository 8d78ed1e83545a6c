"""The database file of the SQLite store: creation, reopening, refusal, checkpoints."""

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
from mediatord.store.interfaces.devices import Device
from mediatord.store.interfaces.messages import QueueLimits
from mediatord.store.interfaces.store import Account
from mediatord.store.interfaces.v1_connections import V1Connection
from mediatord.store.sqlite import executor
from mediatord.store.sqlite.connection import connect, hash_did
from mediatord.store.sqlite.database_file import DatabaseUnusable, migrate_schema, open_database, read_schema_steps
from mediatord.store.sqlite.executor import CHECKPOINT_INTERVAL_SECONDS, SQLiteExecutor
from mediatord.store.sqlite.sqlite_store import SQLiteStore
from tests.store.builders import ALICE, BOB, NOON, ImmediateClock, make_database_path, make_payload, make_sqlite_store

INBOX = "did:key:z6MkInbox"


class RestartTests(TestCase):
    """Data that survives a restart (reference 12)."""

    async def test_data_survives_restart(self) -> None:
        """Accounts, registrations, queues, delays, nonces and long forms survive a restart."""
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

    async def test_delivered_messages_are_requeued(self) -> None:
        """After a restart every `delivered` message is pending, with its number of pushes."""
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
        self.assertEqual([message.pushes for message in await store.acknowledge(ALICE, ["a"])], [1])
        await store.close()


class OpeningTests(SynchronousTestCase):
    """Files that are created, opened and refused."""

    def setUp(self) -> None:
        self.path = make_database_path(self)

    def read_refusal(self, path: Path) -> str:
        """The line that is logged when this file is refused."""
        with capturedLogs() as events:
            self.failureResultOf(make_sqlite_store(ImmediateClock(), path).open(), StoreUnavailable)
        (event,) = (event for event in events if event.get("event") == "store.refused")
        text = formatEvent(event)
        self.assertNotIn("\n", text)
        return text

    def test_files_are_private(self) -> None:
        """Only the owner can read the database and the files beside it, whatever the umask."""
        self.addCleanup(os.umask, os.umask(0))
        store = make_sqlite_store(ImmediateClock(), self.path)
        self.successResultOf(store.open())
        modes = {path.name: S_IMODE(path.stat().st_mode) for path in self.path.parent.iterdir()}
        self.successResultOf(store.close())
        self.assertEqual(modes, {self.path.name + end: 0o600 for end in ("", "-wal", "-shm")})

    def test_fills_empty_file(self) -> None:
        """An empty file, as a crash during creation leaves it, is initialised."""
        self.path.touch()
        store = make_sqlite_store(ImmediateClock(), self.path)
        self.successResultOf(store.open())
        self.successResultOf(store.ping())
        self.successResultOf(store.close())

    def test_refuses_newer_schema(self) -> None:
        """A database of a newer mediatord is refused and unchanged."""
        with closing(open_database(self.path)) as connection:
            connection.execute("PRAGMA user_version = 99")
        before = self.path.read_bytes()
        self.assertEqual(
            self.read_refusal(self.path),
            "cannot open the store: its schema version is 99, "
            f"but this release supports at most {len(read_schema_steps())}; upgrade mediatord",
        )
        self.assertEqual(self.path.read_bytes(), before)

    def test_refuses_foreign_database(self) -> None:
        """The database of another program is refused and unchanged."""
        with closing(sqlite3.connect(self.path)) as connection:
            connection.execute("CREATE TABLE account (name TEXT)")
        before = self.path.read_bytes()
        self.assertEqual(
            self.read_refusal(self.path), "cannot open the store: the file is a database of another program"
        )
        self.assertEqual(self.path.read_bytes(), before)

    def test_refuses_other_file(self) -> None:
        """A file that is no database is refused and unchanged."""
        self.path.write_text("Dear diary, " * 100)
        self.assertEqual(self.read_refusal(self.path), "cannot open the store: file is not a database")
        self.assertEqual(self.path.read_text(), "Dear diary, " * 100)

    def test_refuses_missing_directory(self) -> None:
        """A file in a missing directory is refused."""
        self.assertIn("No such file or directory", self.read_refusal(self.path / "deeper"))

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

    def test_runs_missing_migrations(self) -> None:
        """An older database gets the missing migrations; one that fails leaves it unchanged."""
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

    def test_upgrades_database_without_devices(self) -> None:
        """A database of version 1 keeps its content, and has devices from its next start on."""
        self.path.touch()
        with closing(connect(self.path)) as connection:
            migrate_schema(connection, read_schema_steps()[:1])
            self.assertEqual(connection.execute("PRAGMA user_version").fetchone(), (1,))
            connection.execute(
                "INSERT INTO account (did, did_key, created_at) VALUES (?, ?, 0.0)", (ALICE, hash_did(ALICE))
            )
        store = make_sqlite_store(ImmediateClock(), self.path)
        self.successResultOf(store.open())
        device = Device(b"id", "fcm", b"sealed")
        self.successResultOf(store.devices.set_device(ALICE, device, 10))
        self.assertEqual(self.successResultOf(store.devices.list_devices(ALICE)), [device])
        self.assertTrue(self.successResultOf(store.administration.remove_account(ALICE)))
        self.assertEqual(self.successResultOf(store.devices.count_devices()), {})
        self.successResultOf(store.close())

    def test_upgrades_database_without_v1_connections(self) -> None:
        """A database of version 2 keeps its content, and its accounts have connections from its next start on."""
        self.path.touch()
        with closing(connect(self.path)) as connection:
            migrate_schema(connection, read_schema_steps()[:2])
            self.assertEqual(connection.execute("PRAGMA user_version").fetchone(), (2,))
            connection.execute(
                "INSERT INTO account (did, did_key, created_at) VALUES (?, ?, 0.0)", (ALICE, hash_did(ALICE))
            )
        store = make_sqlite_store(ImmediateClock(), self.path)
        self.successResultOf(store.open())
        for wallet in (ALICE, BOB):
            connection_of_wallet = V1Connection(wallet, f"own key of {wallet}", "request")
            self.successResultOf(store.v1_connections.put_connection(connection_of_wallet, max_pending=1))
        self.assertEqual(self.successResultOf(store.v1_connections.count_connections()), (1, 1))
        self.assertTrue(self.successResultOf(store.administration.remove_account(ALICE)))
        self.assertEqual(self.successResultOf(store.v1_connections.count_connections()), (0, 1))
        self.successResultOf(store.close())

    def test_concurrent_migration(self) -> None:
        """Of several connections that migrate concurrently one runs the missing migrations."""
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
    """Choice of the backend (contract section 4)."""

    def test_refuses_unavailable_backend(self) -> None:
        """An unavailable backend is refused with a sentence for the operator."""
        for backend, text in (
            ("mongodb", "storage.mongodb.uri: expected a mongodb:// URI"),
            ("oracle", "unknown storage.backend 'oracle': expected memory, sqlite or mongodb"),
            ("sqlite", "storage.backend sqlite requires storage.sqlite.path"),
        ):
            with self.assertRaisesRegex(ValueError, f"^{re.escape(text)}$"):
                build_store(backend, ImmediateClock(), QueueLimits())

    def test_memory_backend(self) -> None:
        """The memory backend needs only a clock."""
        store = build_store("memory", ImmediateClock(), QueueLimits())
        self.successResultOf(store.open())
        self.successResultOf(store.ping())


class CheckpointTests(SynchronousTestCase):
    """Checkpoints of the write-ahead log."""

    def setUp(self) -> None:
        self.clock = ImmediateClock()
        self.path = make_database_path(self)
        self.log = self.path.with_name(self.path.name + "-wal")
        self.observed: list[str] = []

    def open_store(self) -> SQLiteStore:
        store = make_sqlite_store(
            self.clock, self.path, observe=lambda operation, seconds: self.observed.append(operation)
        )
        self.successResultOf(store.open())
        self.addCleanup(lambda: self.successResultOf(store.close()))
        return store

    def read_database(self) -> list[str]:
        """Rows in the database itself, without the log."""
        copy = self.path.with_name("copy")
        copy.write_bytes(self.path.read_bytes())
        with closing(sqlite3.connect(copy)) as connection:
            return [short for (short,) in connection.execute("SELECT short FROM did_document")]

    def test_checkpoint_follows_commit(self) -> None:
        """Half a second after a commit it is in the database; without a commit there is no checkpoint."""
        store = self.open_store()
        self.successResultOf(store.remember_did("a", "long"))
        self.assertEqual(self.read_database(), [])
        self.clock.advance(0.5)
        self.assertEqual(self.read_database(), ["a"])
        self.clock.advance(60)
        self.assertEqual(self.observed.count("checkpoint"), 1)
        self.successResultOf(store.remember_did("b", "long"))
        self.clock.advance(0.5)
        self.assertEqual(self.read_database(), ["a", "b"])

    def test_checkpoint_keeps_reserve(self) -> None:
        """A checkpoint truncates the file, which frees the blocks beyond its end; they are allocated again."""
        store = self.open_store()
        if not self.has_reserve():
            self.skipTest("the file system of the temporary directory has too little space, or cannot preallocate")
        self.successResultOf(store.remember_did("a", "long"))
        self.clock.advance(CHECKPOINT_INTERVAL_SECONDS)
        self.assertEqual(self.read_database(), ["a"])
        self.assertTrue(self.has_reserve())

    def test_checkpoint_of_writer_keeps_reserve(self) -> None:
        """The reserve survives the second checkpoint, after which the writer restarts the log."""
        self.patch(executor, "WAL_REUSE_BYTES", 0)
        self.test_checkpoint_keeps_reserve()

    def test_reserve_is_kept_on_full_disk(self) -> None:
        """Reserved blocks are kept, even where the space limit would not let the store allocate them."""
        store = self.open_store()
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

    def test_log_size_is_limited(self) -> None:
        """A log that a reader kept from being reused is truncated once it exceeds the limit and nobody reads."""
        self.patch(executor, "MAX_WAL_BYTES", 100_000)
        store = self.open_store()
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
        self.assertEqual(self.read_database(), ["a", "b", "c"])
