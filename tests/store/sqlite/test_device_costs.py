"""Costs of devices and wake-ups in the SQLite store, counted in statements and plans."""

from __future__ import annotations

import re
import sqlite3
from contextlib import closing
from itertools import count
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from mediatord.store.interfaces.devices import Device, FinishedWakeup, WakeupClaim, WakeupPolicy, WakeupRequest
from mediatord.store.interfaces.messages import EnqueueRequest, QueueLimits
from mediatord.store.sqlite import account_queries, device_queries, message_writes
from mediatord.store.sqlite.connection import StoreConnection
from mediatord.store.sqlite.database_file import open_database
from tests.store.builders import NOON, make_database_path, make_payload

POLICY = WakeupPolicy(20.0, 10.0, max_message_ids=3)
DEVICE_TABLES = {"device", "wakeup"}


class DeviceCostTests(SynchronousTestCase):
    """A writing connection with some accounts, each with a recipient of the same name and a message."""

    accounts = 40

    def setUp(self) -> None:
        self.numbers = count()
        self.connection = self.enterContext(closing(open_database(make_database_path(self))))
        self.dids = [f"did:example:{number}" for number in range(self.accounts)]
        for did in self.dids:
            account_queries.grant_account(self.connection, did, NOON)
            account_queries.update_recipients(self.connection, did, [(did, "add")], 9)
            self.enqueue(did)

    def enqueue(self, did: str, due_at: float | None = None, number: int = 1) -> None:
        payloads = tuple(make_payload(f"m{next(self.numbers)}") for _ in range(number))
        request = EnqueueRequest(did, payloads, NOON + 3600.0, due_at)
        size = sum(len(payload.data) for payload in payloads)
        operation = message_writes.EnqueueOperation(request, QueueLimits(max_messages=10_000), NOON, size)
        (outcome,) = self.connection.run_operations([operation])
        self.assertNotIsInstance(outcome, Exception)

    def set_device(self, did: str) -> None:
        device = Device(did[-16:].encode(), "fcm", b"sealed", NOON + 60.0)
        device_queries.set_device(self.connection, NOON, did, device, 10)

    def trace(self, work: Any, *args: Any, **more: Any) -> tuple[Any, list[str]]:
        """The result of some work, and its statements."""
        statements: list[str] = []
        self.connection.set_trace_callback(statements.append)
        result = work(self.connection, *args, **more)
        self.connection.set_trace_callback(None)
        return result, [one for one in statements if not one.startswith("--")]

    def test_messages_touch_no_devices(self) -> None:
        """Accepting, delivering and acknowledging a message neither reads nor writes devices."""
        touched: set[str | None] = set()

        def authorize(action: int, table: str | None, *_: object) -> int:
            if action in (sqlite3.SQLITE_READ, sqlite3.SQLITE_INSERT, sqlite3.SQLITE_UPDATE, sqlite3.SQLITE_DELETE):
                touched.add(table)
            return sqlite3.SQLITE_OK

        self.set_device(self.dids[0])
        self.connection.set_authorizer(authorize)
        self.enqueue(self.dids[0])
        self.connection.run_operations([message_writes.MarkDeliveredOperation(["m0"], "")])
        message_writes.mark_pending(self.connection, ["m0"])
        removal = message_writes.RemoveOperation(["m0"], self.dids[0], NOON)
        self.assertEqual(len(self.connection.run_operations([removal])[0].removed), 1)
        self.assertIn("message", touched)
        self.assertEqual(touched & DEVICE_TABLES, set())
        device_queries.count_devices(self.connection)
        self.assertIn("device", touched)

    def test_statements_use_indexes(self) -> None:
        """Each statement finds its rows by an index, except for the number of all devices."""
        statements: list[str] = []
        self.connection.set_trace_callback(statements.append)
        self.run_all_operations(self.connection)
        self.connection.set_trace_callback(None)
        plans = set()
        for statement in statements:
            if re.match(r"\s*(SELECT|UPDATE|DELETE|WITH)", statement) and "SELECT service, count(*)" not in statement:
                plans |= {detail for *_, detail in self.connection.execute(f"EXPLAIN QUERY PLAN {statement}")}
        tables = "account|party|message|pending_event|queue|party_usage|device|wakeup|contract|[mheq]"
        self.assertEqual([plan for plan in plans if re.match(rf"SCAN ({tables})\b(?! USING PRIMARY)", plan)], [])
        self.assertEqual([plan for plan in plans if "USING TEMP B-TREE FOR ORDER BY" in plan], [])
        self.assertIn("SEARCH device USING COVERING INDEX device_of_owner (owner=?)", plans)

    def run_all_operations(self, connection: StoreConnection) -> None:
        owners = [*self.dids[:3], "did:decentrl:a"]
        self.set_device(self.dids[0])
        self.set_device(self.dids[0])
        device_queries.list_devices(connection, NOON, self.dids[0])
        device_queries.record_polls(connection, NOON - 60.0, dict.fromkeys(owners, 0.0))
        requests = [WakeupRequest(owner) for owner in owners]
        claims = device_queries.claim_wakeups(connection, NOON, requests, POLICY)
        self.assertIsInstance(claims[0], WakeupClaim)
        device_queries.finish_wakeups(connection, NOON, [FinishedWakeup(owner, NOON) for owner in owners])
        device_queries.finish_wakeups(connection, NOON, [FinishedWakeup(self.dids[0], NOON, 9.0)])
        for after in ("", "decentrl:0"):
            device_queries.find_owed_wakeups(connection, NOON + 30.0, after, 9, POLICY)
        (device,) = device_queries.scan_devices(connection, b"", 9)
        device_queries.reseal_devices(connection, [(device, b"new")])
        device_queries.remove_devices(connection, self.dids[0], "apns")
        device_queries.forget_devices(connection, [b"x"])
        device_queries.expire_devices(connection, NOON, 9)
        device_queries.count_devices(connection)

    def test_claims_take_few_statements(self) -> None:
        """The number of statements does not grow with that of the owners, of whom most have no device."""
        counts = []
        for number in (1, self.accounts):
            requests = [WakeupRequest(did) for did in self.dids[:number]]
            decisions, statements = self.trace(device_queries.claim_wakeups, NOON, requests, POLICY)
            self.assertEqual(set(decisions), {None})
            counts.append(len(statements))
        self.assertEqual(counts, [2, 2])
        for did in self.dids:
            self.set_device(did)
        decisions, statements = self.trace(device_queries.claim_wakeups, NOON, requests, POLICY)
        self.assertEqual({type(one) for one in decisions}, {WakeupClaim})
        self.assertLessEqual(len(statements), 7)
        device_queries.finish_wakeups(self.connection, NOON, [FinishedWakeup(did, NOON) for did in self.dids])
        decisions, statements = self.trace(device_queries.claim_wakeups, NOON + 1.0, requests, POLICY)
        self.assertEqual((set(decisions), len(statements)), ({None}, 3))

    def test_search_for_pending_messages_is_bounded(self) -> None:
        """Among many delayed messages some are examined, and one behind them is taken to be pending."""
        did, steps = self.dids[0], 0
        self.set_device(did)
        costs = []

        def count_steps() -> int:
            nonlocal steps
            steps += 1
            return 0

        for number in (100, 2_000):
            self.enqueue(did, NOON + 600.0, number)
            self.connection.set_progress_handler(count_steps, 10)
            steps = 0
            (claim,) = device_queries.claim_wakeups(self.connection, NOON, [WakeupRequest(did)], POLICY)
            self.connection.set_progress_handler(None, 0)
            self.assertIsInstance(claim, WakeupClaim)
            costs.append(steps)
            device_queries.finish_wakeups(self.connection, NOON, [FinishedWakeup(did, NOON, 0.0)])
        self.assertLess(costs[1], 2 * costs[0])
