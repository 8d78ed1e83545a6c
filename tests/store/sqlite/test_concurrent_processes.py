"""Concurrent processes on one database."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from twisted.internet.defer import Deferred
from twisted.trial.unittest import SynchronousTestCase, TestCase

from mediatord.errors import ReplayCacheFull, StoreUnavailable
from mediatord.store.interfaces.decentrl import EventFilter, PageRequest
from mediatord.store.interfaces.devices import Device
from mediatord.store.sqlite.account_queries import grant_account, update_recipients
from mediatord.store.sqlite.connection import connect
from mediatord.store.sqlite.database_file import open_database
from mediatord.store.sqlite.sqlite_store import SQLiteStore
from tests.store.builders import (
    ALICE,
    BOB,
    HOUR,
    NOON,
    HoldableRunner,
    ImmediateClock,
    make_database_path,
    make_payload,
    make_sqlite_store,
)
from tests.store.contract.decentrl_base import make_event
from tests.store.sqlite import stress_process
from tests.store.sqlite.operations import SQLiteOperations, find_miscounts, resolve_results
from tests.store.sqlite.stress_process import INBOX

PROCESSES = ("a", "b", "c")
LOCK_TIMEOUT = 0.05


@pytest.mark.system
class StressTests(SynchronousTestCase):
    """Real processes that compete for the same resources."""

    def prepare_database(self) -> Path:
        """Create a database with accounts, and a DID that accepts contract requests."""
        path = make_database_path(self)
        operations = SQLiteOperations(stress_process.CAPS)
        with closing(open_database(path, None)) as connection:
            connection.execute("BEGIN")
            for did in (ALICE, BOB):
                grant_account(connection, did, NOON)
            update_recipients(connection, ALICE, [(INBOX, "add")], 1)
            connection.execute("COMMIT")
            outcomes = connection.commit_batch(operations.prepare_parties())
            self.assertEqual(set(resolve_results(outcomes)), {None})
        store = make_sqlite_store(ImmediateClock(), path)
        self.successResultOf(store.open())
        for number in range(stress_process.SLEEPERS):
            did, device = stress_process.get_sleeper(number), Device(b"%d" % number, "fcm", b"sealed")
            self.successResultOf(store.grant(did))
            self.successResultOf(store.update_recipients(did, [(did, "add")], max_recipients=1))
            self.successResultOf(store.devices.set_device(did, device, 10))
            self.successResultOf(store.enqueue(did, [make_payload(f"sleeper {number}")], expires_at=1e10))
        self.successResultOf(store.close())
        return path

    def run_workers(self, path: Path) -> Counter[tuple[str, Any]]:
        """Outcomes reported by all processes, with their counts."""
        command = [sys.executable, "-m", "tests.store.sqlite.stress_process", str(path)]
        children = [
            subprocess.Popen([*command, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            for name in PROCESSES
        ]
        for child in children:
            self.addCleanup(child.kill)
        for child in children:
            assert child.stdin is not None
            child.stdin.write("\n")
            child.stdin.flush()
        outcomes = [json.loads(child.communicate(timeout=400)[0]) for child in children]
        self.assertEqual([child.returncode for child in children], [0] * len(children))
        return Counter((what, item) for outcome in outcomes for what, items in outcome.items() for item in items)

    def test_outcomes_reconcile(self) -> None:
        """No message is lost or stored twice, and no limit is exceeded."""
        path = self.prepare_database()
        done = self.run_workers(path)
        with closing(open_database(path)) as connection:
            remaining = [id for (id,) in connection.execute("SELECT id FROM message WHERE id NOT LIKE 's%'")]
            self.assertEqual(find_miscounts(connection), [])
            self.assertEqual(connection.execute("PRAGMA integrity_check").fetchall(), [("ok",)])
            self.assertEqual(connection.execute("PRAGMA foreign_key_check").fetchall(), [])
            counted = connection.execute("SELECT sum(messages) FROM queue").fetchone()
            pending = connection.execute("SELECT count(*) FROM v1_connection WHERE has_account = 0").fetchall()
            self.assertEqual(counted[0] - stress_process.SLEEPERS, len(remaining))

        def count_reported(what: str) -> list[Any]:
            return sorted(item for kind, item in done.elements() if kind == what)

        self.assertEqual(len(count_reported("deposited")), 3 * stress_process.ROUNDS * len(PROCESSES))
        self.assertEqual(
            count_reported("deposited"),
            sorted([*count_reported("evicted"), *count_reported("acknowledged"), *remaining]),
        )
        self.assertLessEqual(max(count_reported("waiting")), stress_process.LIMITS.max_messages)
        self.assertEqual(count_reported("claimed"), list(range(stress_process.NONCES)))
        self.assertEqual(len(count_reported("registered")), stress_process.MAX_RECIPIENTS)
        self.assertEqual(len(count_reported("requested")), stress_process.CAPS.requests)
        self.assertEqual(len(count_reported("taken")), stress_process.MAX_TAKEN)
        self.assertGreater(len(count_reported("connected")), stress_process.MAX_PENDING_CONNECTIONS)
        self.assertEqual(pending, [(stress_process.MAX_PENDING_CONNECTIONS,)])
        granted = len(PROCESSES) * len(range(0, stress_process.ROUNDS, 3))
        self.assertEqual(len(count_reported("connected with account")), granted)
        self.assertEqual(len(count_reported("joined")), 1)
        sleepers = [stress_process.get_sleeper(number) for number in range(stress_process.SLEEPERS)]
        self.assertEqual(count_reported("woken"), sorted(sleepers))


class SharedDatabaseTests(TestCase):
    """Changes by one process are visible to another at once."""

    async def setUp(self) -> None:  # type: ignore[override]  # trial waits for it
        self.clock, self.path = ImmediateClock(), make_database_path(self)
        self.stores = [make_sqlite_store(self.clock, self.path, shared=True, max_nonces=5) for _ in range(2)]
        for store in self.stores:
            await store.open()
        await self.stores[0].grant(ALICE)
        await self.stores[1].grant(BOB)

    async def tearDown(self) -> None:  # type: ignore[override]  # trial waits for it
        for store in self.stores:
            await store.close()

    async def test_sees_registrations_of_other_process(self) -> None:
        """Registrations are visible in all processes, whatever they have cached."""
        first, second = self.stores
        await first.update_recipients(ALICE, [(INBOX, "add")], max_recipients=9)
        for store in self.stores:
            self.assertEqual(await store.find_owner(INBOX), ALICE)
        await second.update_recipients(ALICE, [(INBOX, "remove")], max_recipients=9)
        self.assertIsNone(await first.find_owner(INBOX))
        await second.update_recipients(BOB, [(INBOX, "add")], max_recipients=9)
        self.assertEqual(await first.find_owner(INBOX), BOB)
        await second.move_account(BOB, "did:example:carol")
        self.assertEqual(await first.find_owner(INBOX), "did:example:carol")

    async def test_pages_follow_changes_of_other_process(self) -> None:
        """Pages start correctly after another process has changed the list."""
        own_store, second = self.stores
        operations = SQLiteOperations(stress_process.CAPS)
        events = [make_event(f"e{number}", at=float(number)) for number in range(40)]
        await second.decentrl.save_events(operations.make_guard(), ALICE, events[1:])

        async def pages() -> list[str]:
            found = [
                await own_store.decentrl.events(ALICE, EventFilter(), PageRequest(offset, 7))
                for offset in range(0, 42, 7)
            ]
            self.assertEqual({page.total for page in found}, {len(events)})
            return [event.id for page in found for event in page.items]

        first, *events = events
        self.assertEqual(await pages(), [event.id for event in events])
        events = [first, *events]
        await second.decentrl.save_events(operations.make_guard(), ALICE, [first])
        self.assertEqual(await pages(), [event.id for event in events])
        await second.decentrl.update_tags(operations.make_guard(), ALICE, [("e3", ("x",))])
        found = await own_store.decentrl.events(ALICE, EventFilter(tags=("x",)), PageRequest(0, 9))
        self.assertEqual([event.id for event in found.items], ["e3"])
        self.assertEqual(await pages(), [event.id for event in events])

    async def test_number_of_nonces_is_bounded(self) -> None:
        """All processes together keep no more nonces than one would; both refuse beyond the capacity."""
        for number in range(5):
            self.assertTrue(await self.stores[number % 2].claim_nonce(b"%d" % number, NOON + HOUR))
        for store in self.stores:
            with self.assertRaises(ReplayCacheFull):
                await store.claim_nonce(b"5", NOON + HOUR)
        for number in range(5):
            self.assertFalse(await self.stores[1 - number % 2].claim_nonce(b"%d" % number, NOON + HOUR))

    async def test_order_of_arrival(self) -> None:
        """Messages have one order, whichever process accepted them."""
        await self.stores[0].update_recipients(ALICE, [(INBOX, "add")], max_recipients=9)
        for number in range(6):
            await self.stores[number % 2].enqueue(INBOX, [make_payload(f"m{number}")], expires_at=NOON + HOUR)
        for store in self.stores:
            found = await store.fetch_messages(ALICE, None, limit=9, max_bytes=9999)
            self.assertEqual([message.id for message in found], [f"m{number}" for number in range(6)])


class WriteLockTests(SynchronousTestCase):
    """Waiting for the write lock of another process."""

    def setUp(self) -> None:
        self.clock, self.path, self.writer = ImmediateClock(), make_database_path(self), HoldableRunner()
        self.store = self.make_store()
        self.successResultOf(self.store.open())
        self.addCleanup(lambda: self.successResultOf(self.store.close()))
        self.other = connect(self.path)
        self.addCleanup(self.other.close)

    def make_store(self) -> SQLiteStore:
        return make_sqlite_store(self.clock, self.path, shared=True, write=self.writer, patience=LOCK_TIMEOUT)

    def assert_unavailable(self, *deferreds: Deferred[Any]) -> None:
        for deferred in deferreds:
            self.failureResultOf(deferred, StoreUnavailable)

    def test_waits_for_lock(self) -> None:
        """A write is done if the other process ends its transaction in time."""
        self.other.execute("BEGIN IMMEDIATE")
        steps: list[str] = []
        self.other.set_trace_callback(steps.append)
        self.writer.hold()
        claimed = self.store.claim_nonce(b"a", NOON + 9)
        self.other.execute("COMMIT")
        self.writer.release()
        self.assertTrue(self.successResultOf(claimed))
        self.assertEqual(steps, ["COMMIT"])

    def test_waiting_writes_fail_together(self) -> None:
        """Writes queued behind one that timed out fail with it, without a timeout of their own."""
        self.other.execute("BEGIN IMMEDIATE")
        self.writer.hold()
        deferreds = [self.store.claim_nonce(b"%d" % number, NOON + 9) for number in range(5)]
        before = self.writer.calls
        self.writer.release()
        self.assert_unavailable(*deferreds)
        self.assertEqual(self.writer.calls, before)
        self.other.execute("ROLLBACK")
        self.assertTrue(self.successResultOf(self.store.claim_nonce(b"0", NOON + 9)))

    def test_reads_do_not_wait(self) -> None:
        """Everything can be read while another process writes."""
        self.successResultOf(self.store.grant(ALICE))
        self.other.execute("BEGIN IMMEDIATE")
        self.assertEqual(self.successResultOf(self.store.list_recipients(ALICE, offset=0, limit=9)), ([], 0))
        self.other.execute("ROLLBACK")
