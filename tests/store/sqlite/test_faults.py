"""What the SQLite store does when SQLite or the disk does not."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable
from resource import RLIMIT_FSIZE, getrlimit, setrlimit
from typing import Any

from twisted.internet.task import Clock
from twisted.logger import capturedLogs, formatEvent
from twisted.trial.unittest import SynchronousTestCase

from mediatord.errors import MediationNotGranted, MediatorError, StoreUnavailable
from mediatord.store.interfaces.store import Account
from mediatord.store.sqlite.account_queries import get_account, grant_account
from mediatord.store.sqlite.connection import StoreConnection, connect, connect_reader
from mediatord.store.sqlite.database_file import open_database
from mediatord.store.sqlite.memory_store import InlineExecutor
from tests.store.builders import ALICE, BOB, NOON, ImmediateClock, make_database_path, make_payload, make_sqlite_store

INBOX = "did:key:z6MkInbox"
CANARY = "canary-7f3a"

Grant = Callable[[StoreConnection], Account]


def granting(did: str) -> Grant:
    return lambda connection: grant_account(connection, did, NOON)


def failing_after_a_write(error: Exception) -> Callable[[StoreConnection], None]:
    def work(connection: StoreConnection) -> None:
        grant_account(connection, "did:example:half-done", NOON)
        raise error

    return work


class TransactionTests(SynchronousTestCase):
    """Several works in one transaction, when one of them fails."""

    def setUp(self) -> None:
        self.path = make_database_path(self)
        self.connection = open_database(self.path)
        self.addCleanup(self.connection.close)

    def granted(self) -> set[str]:
        with_reader = connect_reader(self.path)
        try:
            return {did for (did,) in with_reader.execute("SELECT did FROM account")}
        finally:
            with_reader.close()

    def errors(self, outcomes: list[Any]) -> list[type[MediatorError] | None]:
        return [type(outcome) if isinstance(outcome, MediatorError) else None for outcome in outcomes]

    def test_refusal_after_a_write(self) -> None:
        """What a work wrote before it refused is undone, and what the others wrote is kept."""
        works = [granting(ALICE), failing_after_a_write(MediationNotGranted()), granting(BOB)]
        outcomes = self.connection.commit_batch(works)
        self.assertEqual(self.errors(outcomes), [None, MediationNotGranted, None])
        self.assertEqual(self.granted(), {ALICE, BOB})
        self.assertEqual(outcomes[2], Account(BOB, NOON))

    def test_mistake_of_ours(self) -> None:
        """A programming error fails its own operation only, and leaves nothing behind."""
        works = [granting(ALICE), failing_after_a_write(ZeroDivisionError()), granting(BOB)]
        outcomes = self.connection.commit_batch(works)
        self.assertEqual(self.errors(outcomes), [None, StoreUnavailable, None])
        self.assertIsInstance(outcomes[1].__cause__, ZeroDivisionError)
        self.assertEqual(self.granted(), {ALICE, BOB})

    def test_full(self) -> None:
        """When no page can be added (SQLITE_FULL) nothing is stored; when that is over, everything is."""

        def big(connection: StoreConnection) -> None:
            connection.execute("INSERT INTO did_document VALUES ('short', ?)", ("x" * 100_000,))

        (pages,) = self.connection.execute("PRAGMA page_count").fetchone()
        self.connection.execute(f"PRAGMA max_page_count = {pages}")
        outcomes = self.connection.commit_batch([granting(ALICE), big, granting(BOB)])
        # The small ones still fit on the pages that are there.
        self.assertEqual(self.errors(outcomes), [None, StoreUnavailable, None])
        self.assertEqual(getattr(outcomes[1].__cause__, "sqlite_errorname", None), "SQLITE_FULL")
        self.connection.execute("PRAGMA max_page_count = 100000")
        self.assertEqual(self.errors(self.connection.commit_batch([big])), [None])

    def test_read_only(self) -> None:
        """When the database cannot be written (SQLITE_READONLY) every write fails, and none after that is over."""
        self.connection.execute("PRAGMA query_only = ON")
        outcomes = self.connection.commit_batch([granting(ALICE), granting(BOB)])
        self.assertEqual(self.errors(outcomes), [StoreUnavailable] * 2)
        self.assertEqual(getattr(outcomes[0].__cause__, "sqlite_errorname", None), "SQLITE_READONLY")
        self.connection.execute("PRAGMA query_only = OFF")
        self.assertEqual(self.errors(self.connection.commit_batch([granting(ALICE)])), [None])

    def test_full_at_first(self) -> None:
        """Without a daemon too, a write that finds no space is tried again with the log written from its start."""
        executor = InlineExecutor(Clock(), lambda: self.connection)
        self.successResultOf(executor.open())
        (pages,) = self.connection.execute("PRAGMA page_count").fetchone()
        self.connection.execute(f"PRAGMA max_page_count = {pages}")
        begun: list[str] = []
        self.connection.set_trace_callback(begun.append)
        big = ("INSERT INTO did_document VALUES ('short', ?)", ("x" * 100_000,))
        self.failureResultOf(executor.write("big", lambda connection: connection.execute(*big)), StoreUnavailable)
        self.assertEqual(begun.count("BEGIN IMMEDIATE"), 2)
        self.assertIn("PRAGMA wal_checkpoint(RESTART)", begun)

    def test_waits_for_others(self) -> None:
        """Without a daemon too, a write waits for a process that holds the lock for a moment."""
        other = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False)
        self.addCleanup(other.close)
        other.execute("BEGIN IMMEDIATE")
        release = threading.Timer(0.1, other.execute, ["ROLLBACK"])
        release.start()
        self.addCleanup(release.join)
        executor = InlineExecutor(Clock(), lambda: self.connection, patience=60.0)
        self.successResultOf(executor.open())

    def test_locked_out(self) -> None:
        """When another process holds the lock all works fail after one wait for it, not one each."""
        other = connect(self.path)
        self.addCleanup(other.close)
        self.connection.execute("PRAGMA busy_timeout = 0")
        other.execute("BEGIN IMMEDIATE")
        begun: list[str] = []
        self.connection.set_trace_callback(begun.append)
        outcomes = self.connection.commit_batch([granting(ALICE), granting(BOB)])
        self.assertEqual(self.errors(outcomes), [StoreUnavailable] * 2)
        self.assertEqual(begun, ["BEGIN IMMEDIATE"])
        other.execute("ROLLBACK")
        self.assertEqual(self.errors(self.connection.commit_batch([granting(ALICE)])), [None])

    def test_locked_out_in_between(self) -> None:
        """Nor does each wait when the lock goes while operations are tried one by one."""
        other = connect(self.path)
        self.addCleanup(other.close)
        self.connection.execute("PRAGMA busy_timeout = 0")
        begun: list[str] = []

        def trace(statement: str) -> None:
            if begun.count("ROLLBACK") == 1 and statement == "BEGIN IMMEDIATE" and not other.in_transaction:
                other.execute("BEGIN IMMEDIATE")
            begun.append(statement)

        self.connection.set_trace_callback(trace)
        works = [failing_after_a_write(ZeroDivisionError()), granting(ALICE), granting(BOB)]
        outcomes = self.connection.commit_batch(works)
        self.connection.set_trace_callback(None)
        self.assertEqual(self.errors(outcomes), [StoreUnavailable] * 3)
        self.assertEqual(begun.count("BEGIN IMMEDIATE"), 2)

    def test_reading_fault(self) -> None:
        """A read that fails does not disturb the others of its batch."""
        self.connection.commit_batch([granting(ALICE)])

        def broken(connection: StoreConnection) -> Any:
            return connection.execute("SELECT * FROM nowhere")

        reader = connect_reader(self.path)
        self.addCleanup(reader.close)
        outcomes = reader.read_batch([broken, lambda connection: get_account(connection, ALICE)])
        self.assertEqual(self.errors(outcomes), [StoreUnavailable, None])
        self.assertEqual(outcomes[1], Account(ALICE, NOON))

    def test_reader_cannot_write(self) -> None:
        """The reading connection refuses to write, whoever asks."""
        reader = connect_reader(self.path)
        self.addCleanup(reader.close)
        (outcome,) = reader.read_batch([granting(ALICE)])
        self.assertIsInstance(outcome.__cause__, sqlite3.OperationalError)


class DiskTests(SynchronousTestCase):
    """The whole store on a disk that does not take more."""

    def setUp(self) -> None:
        self.clock = ImmediateClock()
        self.path = make_database_path(self)
        self.store = make_sqlite_store(self.clock, self.path)
        self.successResultOf(self.store.open())
        self.successResultOf(self.store.grant(ALICE))
        self.successResultOf(self.store.update_recipients(ALICE, [(INBOX, "add")], max_recipients=9))
        self.addCleanup(lambda: self.successResultOf(self.store.close()))

    def fill_disk(self) -> Callable[[], None]:
        """Let no file grow beyond what the write-ahead log has now; returns what ends that."""
        before = getrlimit(RLIMIT_FSIZE)
        size = self.path.with_name(self.path.name + "-wal").stat().st_size
        setrlimit(RLIMIT_FSIZE, (size, before[1]))
        self.addCleanup(setrlimit, RLIMIT_FSIZE, before)
        return lambda: setrlimit(RLIMIT_FSIZE, before)

    def test_disk_fails_and_recovers(self) -> None:
        """While the disk takes nothing, operations and ping fail; after that all is as it was (reference 11)."""
        payloads = [make_payload("a", CANARY.encode() * 10_000)]
        free_disk = self.fill_disk()
        self.failureResultOf(self.store.enqueue(INBOX, payloads, expires_at=NOON + 9), StoreUnavailable)
        self.failureResultOf(self.store.ping(), StoreUnavailable)
        self.assertEqual(self.successResultOf(self.store.get_queue_status(ALICE, None)).message_count, 0)
        free_disk()
        self.successResultOf(self.store.enqueue(INBOX, payloads, expires_at=NOON + 9))
        self.successResultOf(self.store.ping())
        found = self.successResultOf(self.store.fetch_messages(ALICE, None, limit=9, max_bytes=1))
        self.assertEqual([message.payload for message in found], [payloads[0].data])

    def test_faults_do_not_flood_the_log(self) -> None:
        """A fault that lasts is logged once a second at most, and how many there were is not lost."""
        free_disk = self.fill_disk()
        with capturedLogs() as events:
            for _ in range(5):
                self.failureResultOf(self.store.ping(), StoreUnavailable)
            self.clock.advance(1)
            self.failureResultOf(self.store.ping(), StoreUnavailable)
        free_disk()
        logged = [event["what"] for event in events if event.get("event") == "store.failed"]
        self.assertEqual(
            [what for what in logged if "checkpoint" not in what],
            ["store operations failed (1)", "store operations failed (5)"],
        )

    def test_log_of_a_fault(self) -> None:
        """A fault is logged by its kind: nothing that was to be stored is in it."""
        free_disk = self.fill_disk()
        with capturedLogs() as events:
            asked = self.store.enqueue(INBOX, [make_payload(CANARY, CANARY.encode() * 1000)], expires_at=NOON + 9)
        free_disk()
        self.failureResultOf(asked, StoreUnavailable)
        (event,) = (event for event in events if event.get("event") == "store.failed")
        self.assertRegex(formatEvent(event), "OperationalError SQLITE_(FULL|IOERR)")
        self.assertNotIn(CANARY, repr(events))
        self.assertNotIn(INBOX, repr(events))
