"""Query plans of the DIDComm and cluster parts of the SQLite store."""

from __future__ import annotations

import re
from contextlib import closing
from hashlib import sha256

from twisted.trial.unittest import SynchronousTestCase

from mediatord.errors import QueueFull
from mediatord.store.interfaces.cluster_and_quotas import ClusterNode
from mediatord.store.interfaces.messages import ArrivalWindow, EnqueueRequest, QueueLimits
from mediatord.store.sqlite import (
    account_queries,
    arrival_queries,
    coordination_queries,
    executor,
    message_queries,
    message_writes,
    queue_statistics,
)
from mediatord.store.sqlite.connection import StoreConnection
from mediatord.store.sqlite.database_file import open_database
from tests.store.builders import ALICE, BOB, NOON, make_database_path, make_payload

INBOX = "did:key:z6MkInbox"


class QueryPlanTests(SynchronousTestCase):
    """Costs do not grow with the number of messages, accounts or DIDs."""

    def test_statements_use_indexes(self) -> None:
        """Each statement finds its rows by an index, with few exceptions for stated reasons."""
        statements: list[str] = []
        with closing(open_database(make_database_path(self))) as connection:
            connection.set_trace_callback(statements.append)
            self.run_all_operations(connection)
            connection.set_trace_callback(None)
            plans, changes = set(), set()
            for statement in statements:
                if re.match(r"\s*(SELECT|UPDATE|DELETE|WITH)", statement):
                    found = {detail for *_, detail in connection.execute(f"EXPLAIN QUERY PLAN {statement}")}
                    plans |= found
                    if re.search("UPDATE|DELETE", statement):
                        changes |= found
        # Statements of triggers are traced as comments and cannot be explained separately.
        scans = {detail.replace(" COVERING", "") for detail in plans if detail.startswith("SCAN")}
        allowed = {
            # queue_sizes and waiting
            "SCAN queue",
            "SCAN longest",
            "SCAN c",
            "SCAN recipient USING INDEX recipient_left_over",
            # bounded number of messages of one age
            "SCAN (subquery-1)",
            # bounded count for the ledger, in the background
            "SCAN message USING INDEX message_of_recipient",
            "SCAN pending_event USING INDEX pending_event_of_recipient",
            # bounded number that expires or is evicted together
            "SCAN some",
            # bounded number named in a statement
            "SCAN one",
            # queues of an account, with its expired and delayed messages, and the ends of those
            "SCAN counted",
            "SCAN ends",
            # in order, up to a limit
            "SCAN nonce",
            "SCAN quota",
            # as many as there are processes, as they have leases, and as they have sockets: when a node is gone
            "SCAN node",
            "SCAN node USING INDEX sqlite_autoindex_node_1",
            "SCAN lease",
            "SCAN presence",
            # Queue sizes of all recipients, in the background.
            "SCAN party_usage",
            "SCAN h",
            "SCAN amount",
            "SCAN fullest",
            "SCAN CONSTANT ROW",
        }
        self.assertEqual(scans - allowed, set())
        # No other process can write during a change.
        self.assertNotIn("SCAN queue", changes)
        self.assertIn("SEARCH queue USING PRIMARY KEY (account_id=? AND recipient_id=?)", changes)
        self.assertIn("SEARCH message USING COVERING INDEX sqlite_autoindex_message_1 (id>? AND id<?)", plans)
        self.assertIn("SEARCH q USING PRIMARY KEY (account_id=?)", plans)
        self.assertIn("SEARCH m USING INDEX message_of_recipient (recipient_id=?)", plans)
        # Recent arrivals, and those recently taken as due; older ones are not read.
        self.assertIn("SEARCH m USING INDEX message_of_recipient (recipient_id=? AND seq>?)", plans)
        self.assertIn("SEARCH m USING INDEX message_delayed (account_id=? AND due_at>? AND due_at<?)", plans)

    def run_all_operations(self, connection: StoreConnection) -> None:
        account_queries.grant_account(connection, ALICE, NOON)
        account_queries.mark_draft03(connection, ALICE)
        account_queries.update_recipients(
            connection, ALICE, [(INBOX, "add"), ("did:b", "add"), ("did:b", "remove")], 9
        )
        account_queries.find_owner(connection, INBOX)
        account_queries.list_recipients(connection, ALICE, 0, 9)
        account_queries.remember_did(connection, "short", "long")
        account_queries.recall_did(connection, "short")
        evicting, refusing = QueueLimits(3, share=0.5), QueueLimits(4, when_full="refuse", share=0.9)
        for id in "abcd":
            message_writes.enqueue_all(connection, [self.make_operation(id, evicting)])
        with self.assertRaises(QueueFull):
            message_writes.enqueue_all(connection, [self.make_operation("e", refusing)])
        connection.run_operations([message_writes.MarkDeliveredOperation(["b"], "")])
        message_writes.mark_pending(connection, ["b"])
        for did in (None, INBOX):
            message_queries.fetch_messages(connection, NOON + 10, ALICE, did, 9, 999)
            message_queries.get_queue_status(connection, NOON + 10, ALICE, did)
        message_queries.find_next_due(connection, NOON)
        message_queries.take_due_messages(connection, NOON + 10, 9)
        queue_statistics.find_largest_queues(connection, 9)
        queue_statistics.sum_queues(connection)
        queue_statistics.collect_backlog(connection, [NOON, NOON - 5], 9)
        message_queries.find_by_digest(connection, ALICE, [sha256(b"x").digest()], -1)
        connection.run_operations([message_writes.RemoveOperation(["b"], ALICE, NOON)])
        message_writes.purge_messages(connection, ["c"])
        queue_statistics.read_ledger(connection)
        message_writes.expire_messages(connection, 9, NOON + 60, 9, 999)
        account_queries.move_account(connection, ALICE, BOB)
        coordination_queries.claim_nonces(
            connection,
            [coordination_queries.NonceClaim(key, NOON + 9, NOON, capacity=1) for key in (b"a", b"a", b"b")],
        )
        coordination_queries.release_nonce(connection, b"b")
        coordination_queries.prune_nonces(connection, 9, NOON + 60, 0)
        executor.write_ping(connection)
        executor.read_ping(connection)
        self.run_cluster_operations(connection)

    def make_operation(self, id: str, limits: QueueLimits) -> message_writes.EnqueueOperation:
        payload = make_payload(id)
        request = EnqueueRequest(INBOX, (payload,), NOON + 60, NOON + 5, 0x0002_0001)
        return message_writes.EnqueueOperation(request, limits, NOON, len(payload.data))

    def run_cluster_operations(self, connection: StoreConnection) -> None:
        coordination_queries.release_lost_deliveries(connection, NOON)
        coordination_queries.join_node(connection, NOON, ClusterNode("a", "A", "", b""), 9)
        coordination_queries.renew_node(connection, NOON, "A", 9)
        coordination_queries.list_nodes(connection, NOON)
        coordination_queries.list_lapsed_nodes(connection, NOON)
        coordination_queries.add_presence(connection, "A", [ALICE])
        coordination_queries.find_presence(connection, NOON, [ALICE])
        coordination_queries.remove_presence(connection, "A", [ALICE])
        coordination_queries.acquire_lease(connection, NOON, "turn", "A", 9)
        coordination_queries.drop_node(connection, NOON, "A", until=NOON + 9)
        coordination_queries.take_quota(connection, NOON, b"key", 1, limit=2, period=60.0)
        coordination_queries.return_quota(connection, b"key", 1)
        coordination_queries.prune_quotas(connection, 9, NOON, b"")
        window = ArrivalWindow(NOON, NOON + 9)
        arrival_queries.find_messages(connection, NOON, ["a"])
        arrival_queries.find_pending_events(connection, ["a"])
        arrival_queries.find_arrivals(connection, [ALICE], window, 9)
        arrival_queries.find_pending_arrivals(connection, [ALICE], window, 9)
