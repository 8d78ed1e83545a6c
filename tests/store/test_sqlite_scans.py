"""How SQLite finds what the DIDComm half and the cluster ask for."""

from __future__ import annotations

import re
import sqlite3
from contextlib import closing
from hashlib import sha256

from twisted.trial.unittest import SynchronousTestCase

from mediatord.errors import QueueFull
from mediatord.interfaces import Node, QueueLimits, Window
from mediatord.store import (
    sql_accounts,
    sql_allowances,
    sql_arrivals,
    sql_backlog,
    sql_cluster,
    sql_deposits,
    sql_digests,
    sql_ledger,
    sql_messages,
    sql_nonces,
    sql_queues,
)
from mediatord.store.database import open_database
from tests.store.builders import ALICE, BOB, NOON, a_path, a_payload

INBOX = "did:key:z6MkInbox"


class PlanTests(SynchronousTestCase):
    """That no statement grows with the number of messages, accounts or DIDs."""

    def test_no_scans(self) -> None:
        """Each statement finds its rows by an index; but for a few with reasons."""
        statements: list[str] = []
        with closing(open_database(a_path(self))) as connection:
            connection.set_trace_callback(statements.append)
            self.use_everything(connection)
            connection.set_trace_callback(None)
            plans, changes = set(), set()
            for statement in statements:
                if re.match(r"\s*(SELECT|UPDATE|DELETE|WITH)", statement):
                    found = {detail for *_, detail in connection.execute(f"EXPLAIN QUERY PLAN {statement}")}
                    plans |= found
                    if re.search("UPDATE|DELETE", statement):
                        changes |= found
        # What the triggers do is traced as a comment and cannot be explained apart.
        scans = {detail.replace(" COVERING", "") for detail in plans if detail.startswith("SCAN")}
        allowed = {
            # queue_sizes and waiting
            "SCAN queue",
            "SCAN longest",
            "SCAN c",
            "SCAN recipient USING INDEX recipient_left_over",
            # as many messages of one age as are counted
            "SCAN (subquery-1)",
            # as many as the ledger counts, out of everybody's way
            "SCAN message USING INDEX message_of_recipient",
            "SCAN pending_event USING INDEX pending_event_of_recipient",
            # as many as expire together, or make room together
            "SCAN some",
            # as many as a statement names
            "SCAN one",
            # in order, up to a limit
            "SCAN nonce",
            "SCAN allowance",
            # as many as there are processes, as they have turns, and as they have sockets: when one is gone
            "SCAN node",
            "SCAN node USING INDEX sqlite_autoindex_node_1",
            "SCAN turn",
            "SCAN presence",
            # How much waits for whom, of all there are, out of everybody's way.
            "SCAN holding",
            "SCAN h",
            "SCAN amount",
            "SCAN fullest",
            "SCAN CONSTANT ROW",
        }
        self.assertEqual(scans - allowed, set())
        # While something is changed nobody else can write.
        self.assertNotIn("SCAN queue", changes)
        self.assertIn("SEARCH queue USING PRIMARY KEY (account_id=? AND recipient_id=?)", changes)
        self.assertIn("SEARCH message USING COVERING INDEX sqlite_autoindex_message_1 (id>? AND id<?)", plans)
        self.assertIn("SEARCH q USING PRIMARY KEY (account_id=?)", plans)
        self.assertIn("SEARCH m USING INDEX message_of_recipient (recipient_id=?)", plans)
        # What came lately, or was handed out lately; everything else may wait as long as it likes.
        self.assertIn("SEARCH m USING INDEX message_of_recipient (recipient_id=? AND seq>?)", plans)
        self.assertIn("SEARCH m USING INDEX message_delayed (account_id=? AND due_at>? AND due_at<?)", plans)

    def use_everything(self, connection: sqlite3.Connection) -> None:
        sql_accounts.grant(connection, ALICE, NOON)
        sql_accounts.mark_draft03(connection, ALICE)
        sql_accounts.update(connection, ALICE, [(INBOX, "add"), ("did:b", "add"), ("did:b", "remove")], 9)
        sql_accounts.owner(connection, INBOX)
        sql_accounts.recipients(connection, ALICE, 0, 9)
        sql_accounts.remember_did(connection, "short", "long")
        sql_accounts.recall_did(connection, "short")
        evicting, refusing = QueueLimits(3, share=0.5), QueueLimits(4, when_full="refuse", share=0.9)
        for id in "abcd":
            sql_messages.deposit(connection, evicting, self.an_order(id))
        with self.assertRaises(QueueFull):
            sql_messages.deposit(connection, refusing, self.an_order("e"))
        sql_messages.mark_delivered(connection, ["b"])
        sql_messages.mark_pending(connection, ["b"])
        for did in (None, INBOX):
            sql_queues.fetch(connection, ALICE, did, NOON + 10, 9, 999)
            sql_queues.status(connection, ALICE, did, NOON + 10)
        sql_queues.next_due(connection, NOON)
        sql_queues.take_due(connection, NOON + 10, 9)
        sql_queues.queue_sizes(connection, 9)
        sql_queues.waiting(connection)
        sql_backlog.backlog(connection, [NOON, NOON - 5], 9)
        sql_digests.find(connection, ALICE, [sha256(b"x").digest()], -1)
        sql_deposits.Removing(["b"], ALICE, NOON)(connection)
        sql_messages.purge(connection, ["c"])
        sql_ledger.ledger(connection)
        sql_messages.expire(connection, NOON + 60, 9, 999)
        sql_accounts.move(connection, ALICE, BOB)
        sql_nonces.claim_all(connection, [sql_nonces.Claim(key, NOON + 9, NOON) for key in (b"a", b"a", b"b")], 1)
        sql_nonces.release(connection, b"b")
        sql_nonces.prune(connection, NOON + 60, 0)
        sql_nonces.ping(connection)
        sql_nonces.pong(connection)
        self.use_cluster(connection)

    def an_order(self, id: str) -> sql_messages.Deposit:
        return sql_messages.Deposit(INBOX, [a_payload(id)], NOON, NOON + 60, NOON + 5, 0x0002_0001)

    def use_cluster(self, connection: sqlite3.Connection) -> None:
        sql_cluster.release_lost(connection, NOON)
        sql_cluster.join(connection, Node("a", "A", "", b""), NOON + 9, NOON)
        sql_cluster.renew(connection, "A", NOON + 9, NOON)
        sql_cluster.nodes(connection, NOON)
        sql_cluster.lapsed(connection, NOON)
        sql_cluster.announce(connection, "A", [ALICE])
        sql_cluster.whereabouts(connection, [ALICE], NOON)
        sql_cluster.withdraw(connection, "A", [ALICE])
        sql_cluster.hold(connection, "turn", "A", NOON + 9, NOON)
        sql_cluster.drop(connection, "A", NOON + 9)
        sql_allowances.take(connection, b"key", 1, 2, 60.0, NOON)
        sql_allowances.put_back(connection, b"key", 1)
        sql_allowances.prune(connection, NOON, None)
        window = Window(NOON, NOON + 9)
        sql_arrivals.find(connection, ["a"], NOON)
        sql_arrivals.find_pending(connection, ["a"])
        sql_arrivals.arrived(connection, [ALICE], window, 9)
        sql_arrivals.arrived_pending(connection, [ALICE], window, 9)
