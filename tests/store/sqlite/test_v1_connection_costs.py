"""Costs of connections of DIDComm v1 in the SQLite store, counted in statements, plans and steps."""

from __future__ import annotations

import re
import sqlite3
from contextlib import closing
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from mediatord.store.interfaces.messages import EnqueueRequest, QueueLimits
from mediatord.store.interfaces.v1_connections import V1Connection
from mediatord.store.sqlite import account_queries, message_writes, v1_connections
from mediatord.store.sqlite.database_file import open_database
from tests.store.builders import ALICE, NOON, ImmediateClock, make_database_path, make_payload, make_sqlite_store

MANY = 2_000


def make_connection(number: int) -> V1Connection:
    return V1Connection(f"did:key:z{number}", f"did:key:own{number}", "request")


class V1ConnectionCostTests(SynchronousTestCase):
    """A writing connection."""

    def setUp(self) -> None:
        self.connection = self.enterContext(closing(open_database(make_database_path(self))))

    def put(self, number: int) -> None:
        v1_connections.put_connection(self.connection, NOON + number, make_connection(number), MANY + 9)

    def count_steps(self, work: Any, *args: Any) -> int:
        """Tens of steps of SQLite's virtual machine that some work takes."""
        steps = 0

        def count() -> int:
            nonlocal steps
            steps += 1
            return 0

        self.connection.set_progress_handler(count, 10)
        work(*args)
        self.connection.set_progress_handler(None, 0)
        return steps

    def test_messages_touch_no_connections(self) -> None:
        """Accepting, delivering and acknowledging a message neither reads nor writes connections."""
        touched: set[str | None] = set()

        def authorize(action: int, table: str | None, *_: object) -> int:
            if action in (sqlite3.SQLITE_READ, sqlite3.SQLITE_INSERT, sqlite3.SQLITE_UPDATE, sqlite3.SQLITE_DELETE):
                touched.add(table)
            return sqlite3.SQLITE_OK

        account_queries.grant_account(self.connection, ALICE, NOON)
        account_queries.update_recipients(self.connection, ALICE, [(ALICE, "add")], 9)
        self.put(1)
        payload = make_payload("m0")
        request = EnqueueRequest(ALICE, (payload,), NOON + 3600.0, None)
        self.connection.set_authorizer(authorize)
        self.connection.run_operations(
            [message_writes.EnqueueOperation(request, QueueLimits(), NOON, len(payload.data))]
        )
        account_queries.find_owner(self.connection, ALICE)
        self.connection.run_operations([message_writes.MarkDeliveredOperation(["m0"], "")])
        removal = message_writes.RemoveOperation(["m0"], ALICE, NOON)
        self.assertEqual(len(self.connection.run_operations([removal])[0].removed), 1)
        self.assertIn("message", touched)
        self.assertNotIn("v1_connection", touched)
        v1_connections.find_connection(self.connection, "did:key:own1")
        self.assertIn("v1_connection", touched)

    def test_statements_use_indexes(self) -> None:
        """Each statement finds its rows by an index, and none sorts."""
        statements: list[str] = []
        for number in range(3):
            self.put(number)
        self.connection.set_trace_callback(statements.append)
        self.put(3)
        self.put(3)
        v1_connections.find_connection(self.connection, "did:key:own1")
        v1_connections.get_connection(self.connection, "did:key:z1")
        v1_connections.scan_connections(self.connection, "did:key:z0", 2)
        v1_connections.count_connections(self.connection)
        v1_connections.remove_connection(self.connection, "did:key:z0")
        self.assertEqual(len(v1_connections.expire_connections(self.connection, 8, NOON + 2.5, 9)), 2)
        self.connection.set_trace_callback(None)
        plans = set()
        for statement in statements:
            if re.match(r"\s*(SELECT|UPDATE|DELETE|WITH)", statement):
                plans |= {detail for *_, detail in self.connection.execute(f"EXPLAIN QUERY PLAN {statement}")}
        self.assertEqual([plan for plan in plans if plan.startswith("SCAN") or "TEMP B-TREE" in plan], [])
        self.assertIn("SEARCH v1_connection USING INDEX sqlite_autoindex_v1_connection_2 (own_key=?)", plans)
        self.assertIn("SEARCH v1_connection USING INDEX v1_connection_pending (created_at<?)", plans)

    def test_costs_do_not_grow_with_pending_connections(self) -> None:
        """A new connection, a new account and an expiry cost as much among thousands of pending connections."""

        def measure(number: int) -> list[int]:
            return [
                self.count_steps(self.put, number),
                self.count_steps(account_queries.grant_account, self.connection, f"did:key:z{number}", NOON),
                self.count_steps(account_queries.remove_account, self.connection, f"did:key:z{number}"),
                self.count_steps(v1_connections.expire_connections, self.connection, 8, NOON + 1e6, 1),
            ]

        for number in range(10):
            self.put(number)
        before = measure(MANY)
        for number in range(10, MANY):
            self.put(number)
        after = measure(MANY)
        for few, many in zip(before, after, strict=True):
            self.assertLessEqual(many, 1.5 * few + 3, (before, after))

    def test_caches_found_connection(self) -> None:
        """A connection that was found by its key is not read again until it changes; one that is unknown is."""
        observed: list[str] = []
        store = make_sqlite_store(
            ImmediateClock(), make_database_path(self), observe=lambda operation, seconds: observed.append(operation)
        )
        self.successResultOf(store.open())
        connections = store.v1_connections
        for number in (1, 2):
            self.successResultOf(connections.put_connection(make_connection(number), max_pending=9))
        for _ in range(3):
            for number in (1, 2, 3):
                self.successResultOf(connections.find_connection(f"did:key:own{number}"))
        self.assertEqual(observed.count("find_v1_connection"), 2 + 3)
        self.successResultOf(connections.put_connection(make_connection(1), max_pending=9))
        for number in (1, 2):
            self.successResultOf(connections.find_connection(f"did:key:own{number}"))
        self.assertEqual(observed.count("find_v1_connection"), 2 + 3 + 1)
        self.successResultOf(store.close())
