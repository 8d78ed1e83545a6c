"""Behaviour of the SQLite store when SQLite or the disk fails."""

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


def make_grant(did: str) -> Grant:
    return lambda connection: grant_account(connection, did, NOON)


def make_failing_write(error: Exception) -> Callable[[StoreConnection], None]:
    def work(connection: StoreConnection) -> None:
        grant_account(connection, "did:example:half-done", NOON)
        raise error

    return work


class TransactionTests(SynchronousTestCase):
    """Several works in one transaction, of which one fails."""

    def setUp(self) -> None:
        self.path = make_database_path(self)
        self.connection = open_database(self.path)
        self.addCleanup(self.connection.close)

    def list_accounts(self) -> set[str]:
        with_reader = connect_reader(self.path)
        try:
            return {did for (did,) in with_reader.execute("SELECT did FROM account")}
        finally:
            with_reader.close()

    def list_errors(self, outcomes: list[Any]) -> list[type[MediatorError] | None]:
        return [type(outcome) if isinstance(outcome, MediatorError) else None for outcome in outcomes]

    def test_refusal_undoes_own_writes(self) -> None:
        """The writes of a work that is refused are undone, those of the others are kept."""
        works = [make_grant(ALICE), make_failing_write(MediationNotGranted()), make_grant(BOB)]
        outcomes = self.connection.commit_batch(works)
        self.assertEqual(self.list_errors(outcomes), [None, MediationNotGranted, None])
        self.assertEqual(self.list_accounts(), {ALICE, BOB})
        self.assertEqual(outcomes[2], Account(BOB, NOON))

    def test_programming_error_fails_alone(self) -> None:
        """A programming error fails its own operation only and leaves nothing behind."""
        works = [make_grant(ALICE), make_failing_write(ZeroDivisionError()), make_grant(BOB)]
        outcomes = self.connection.commit_batch(works)
        self.assertEqual(self.list_errors(outcomes), [None, StoreUnavailable, None])
        self.assertIsInstance(outcomes[1].__cause__, ZeroDivisionError)
        self.assertEqual(self.list_accounts(), {ALICE, BOB})

    def test_full_database(self) -> None:
        """When no page can be added (SQLITE_FULL) nothing is stored; afterwards everything is."""

        def write_large_row(connection: StoreConnection) -> None:
            connection.execute("INSERT INTO did_document VALUES ('short', ?)", ("x" * 100_000,))

        (pages,) = self.connection.execute("PRAGMA page_count").fetchone()
        self.connection.execute(f"PRAGMA max_page_count = {pages}")
        outcomes = self.connection.commit_batch([make_grant(ALICE), write_large_row, make_grant(BOB)])
        # The small ones still fit on existing pages.
        self.assertEqual(self.list_errors(outcomes), [None, StoreUnavailable, None])
        self.assertEqual(getattr(outcomes[1].__cause__, "sqlite_errorname", None), "SQLITE_FULL")
        self.connection.execute("PRAGMA max_page_count = 100000")
        self.assertEqual(self.list_errors(self.connection.commit_batch([write_large_row])), [None])

    def test_read_only_database(self) -> None:
        """When the database cannot be written (SQLITE_READONLY) every write fails; none is left half done."""
        self.connection.execute("PRAGMA query_only = ON")
        outcomes = self.connection.commit_batch([make_grant(ALICE), make_grant(BOB)])
        self.assertEqual(self.list_errors(outcomes), [StoreUnavailable] * 2)
        self.assertEqual(getattr(outcomes[0].__cause__, "sqlite_errorname", None), "SQLITE_READONLY")
        self.connection.execute("PRAGMA query_only = OFF")
        self.assertEqual(self.list_errors(self.connection.commit_batch([make_grant(ALICE)])), [None])

    def test_full_write_is_retried_with_reset_log(self) -> None:
        """A write that finds no space is retried with a restarted log, without a daemon too."""
        executor = InlineExecutor(Clock(), lambda: self.connection)
        self.successResultOf(executor.open())
        (pages,) = self.connection.execute("PRAGMA page_count").fetchone()
        self.connection.execute(f"PRAGMA max_page_count = {pages}")
        statements: list[str] = []
        self.connection.set_trace_callback(statements.append)
        insert_large_row = ("INSERT INTO did_document VALUES ('short', ?)", ("x" * 100_000,))
        self.failureResultOf(
            executor.write("big", lambda connection: connection.execute(*insert_large_row)), StoreUnavailable
        )
        self.assertEqual(statements.count("BEGIN IMMEDIATE"), 2)
        self.assertIn("PRAGMA wal_checkpoint(RESTART)", statements)

    def test_waits_for_lock(self) -> None:
        """A write waits for a process that holds the lock for a moment, without a daemon too."""
        other = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False)
        self.addCleanup(other.close)
        other.execute("BEGIN IMMEDIATE")
        release = threading.Timer(0.1, other.execute, ["ROLLBACK"])
        release.start()
        self.addCleanup(release.join)
        executor = InlineExecutor(Clock(), lambda: self.connection, patience=60.0)
        self.successResultOf(executor.open())

    def test_lock_timeout_fails_all_works_at_once(self) -> None:
        """When another process holds the lock all works fail after one timeout, not one each."""
        other = connect(self.path)
        self.addCleanup(other.close)
        self.connection.execute("PRAGMA busy_timeout = 0")
        other.execute("BEGIN IMMEDIATE")
        statements: list[str] = []
        self.connection.set_trace_callback(statements.append)
        outcomes = self.connection.commit_batch([make_grant(ALICE), make_grant(BOB)])
        self.assertEqual(self.list_errors(outcomes), [StoreUnavailable] * 2)
        self.assertEqual(statements, ["BEGIN IMMEDIATE"])
        other.execute("ROLLBACK")
        self.assertEqual(self.list_errors(self.connection.commit_batch([make_grant(ALICE)])), [None])

    def test_lock_lost_between_single_retries(self) -> None:
        """Nor does each wait if the lock is lost while works are retried singly."""
        other = connect(self.path)
        self.addCleanup(other.close)
        self.connection.execute("PRAGMA busy_timeout = 0")
        statements: list[str] = []

        def trace(statement: str) -> None:
            if statements.count("ROLLBACK") == 1 and statement == "BEGIN IMMEDIATE" and not other.in_transaction:
                other.execute("BEGIN IMMEDIATE")
            statements.append(statement)

        self.connection.set_trace_callback(trace)
        works = [make_failing_write(ZeroDivisionError()), make_grant(ALICE), make_grant(BOB)]
        outcomes = self.connection.commit_batch(works)
        self.connection.set_trace_callback(None)
        self.assertEqual(self.list_errors(outcomes), [StoreUnavailable] * 3)
        self.assertEqual(statements.count("BEGIN IMMEDIATE"), 2)

    def test_failing_read_fails_alone(self) -> None:
        """A read that fails does not affect the others of its batch."""
        self.connection.commit_batch([make_grant(ALICE)])

        def read_missing_table(connection: StoreConnection) -> Any:
            return connection.execute("SELECT * FROM nowhere")

        reader = connect_reader(self.path)
        self.addCleanup(reader.close)
        outcomes = reader.read_batch([read_missing_table, lambda connection: get_account(connection, ALICE)])
        self.assertEqual(self.list_errors(outcomes), [StoreUnavailable, None])
        self.assertEqual(outcomes[1], Account(ALICE, NOON))

    def test_reader_cannot_write(self) -> None:
        """The reading connection rejects writes."""
        reader = connect_reader(self.path)
        self.addCleanup(reader.close)
        (outcome,) = reader.read_batch([make_grant(ALICE)])
        self.assertIsInstance(outcome.__cause__, sqlite3.OperationalError)


class FullDiskTests(SynchronousTestCase):
    """The whole store on a full disk."""

    def setUp(self) -> None:
        self.clock = ImmediateClock()
        self.path = make_database_path(self)
        self.store = make_sqlite_store(self.clock, self.path)
        self.successResultOf(self.store.open())
        self.successResultOf(self.store.grant(ALICE))
        self.successResultOf(self.store.update_recipients(ALICE, [(INBOX, "add")], max_recipients=9))
        self.addCleanup(lambda: self.successResultOf(self.store.close()))

    def fill_disk(self) -> Callable[[], None]:
        """Limit files to the current size of the write-ahead log; return a function that lifts the limit."""
        before = getrlimit(RLIMIT_FSIZE)
        size = self.path.with_name(self.path.name + "-wal").stat().st_size
        setrlimit(RLIMIT_FSIZE, (size, before[1]))
        self.addCleanup(setrlimit, RLIMIT_FSIZE, before)
        return lambda: setrlimit(RLIMIT_FSIZE, before)

    def test_disk_fails_and_recovers(self) -> None:
        """While the disk is full operations and ping fail; afterwards everything works (reference 11)."""
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

    def test_lasting_fault_is_throttled_in_log(self) -> None:
        """A lasting fault is logged at most once a second, with the number of occurrences."""
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

    def test_log_has_no_contents(self) -> None:
        """A fault is logged by its kind, without data."""
        free_disk = self.fill_disk()
        with capturedLogs() as events:
            deferred = self.store.enqueue(INBOX, [make_payload(CANARY, CANARY.encode() * 1000)], expires_at=NOON + 9)
        free_disk()
        self.failureResultOf(deferred, StoreUnavailable)
        (event,) = (event for event in events if event.get("event") == "store.failed")
        self.assertRegex(formatEvent(event), "OperationalError SQLITE_(FULL|IOERR)")
        self.assertNotIn(CANARY, repr(events))
        self.assertNotIn(INBOX, repr(events))
