"""Concurrent commands on the SQLite store."""

from __future__ import annotations

from contextlib import closing
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.internet.defer import Deferred
from twisted.trial.unittest import SynchronousTestCase

from mediatord.errors import (
    ContractNotFound,
    DuplicateNonce,
    QuotaExceeded,
    RecipientNotRegistered,
    StoreUnavailable,
    UnauthorizedCommand,
)
from mediatord.store.caches import PageCursorCache
from mediatord.store.interfaces.decentrl import (
    CommandGuard,
    ContractRequest,
    DecentrlQuotas,
    EventFilter,
    PageRequest,
    PendingEvent,
    PublicEvent,
    StoredEvent,
)
from mediatord.store.sqlite import decentrl_queries, event_archive_queries
from mediatord.store.sqlite.connection import SQLOperation
from mediatord.store.sqlite.event_archive_queries import PageReadOptions
from tests.store.builders import ALICE, BOB, HOUR, NOON
from tests.store.random_commands import RandomCommands
from tests.store.sqlite.commit_test_case import CommitTestCase, count_wal_commits
from tests.store.sqlite.operations import (
    CAROL,
    SQLiteOperations,
    create_memory_database,
    find_miscounts,
    make_contract,
    read_all_rows,
    resolve_results,
)

UNREGISTERED = "did:example:stranger"
ALL = PageRequest(0, 1000)
SMALL = DecentrlQuotas(
    requests=3,
    requests_of_one=2,
    contracts=4,
    contracts_with_one=2,
    pending=3,
    pending_bytes=30,
    stored=5,
    stored_bytes=60,
)
MAX_NONCES = 14


class BatchTests(SynchronousTestCase):
    """Many commands in one transaction."""

    @settings(max_examples=120, deadline=None)
    @given(data=st.data())
    def test_batch_equals_single_commands(self, data: st.DataObject) -> None:
        """Commands have the same outcomes and the same data, one by one or in one batch."""
        operations = SQLiteOperations(SMALL, MAX_NONCES)
        draw = RandomCommands(data, operations)
        commands = [draw.draw_command() for _ in range(data.draw(st.integers(2, 14)))]
        with closing(create_memory_database()) as alone, closing(create_memory_database()) as together:
            settled = operations.prepare_parties()
            for connection in (alone, together):
                self.assertEqual(resolve_results(connection.commit_batch(settled)), [None] * len(settled))
            one_by_one = [alone.commit_batch([command])[0] for command in commands]
            self.assertEqual(resolve_results(together.commit_batch(commands)), resolve_results(one_by_one))
            self.assertEqual(read_all_rows(together), read_all_rows(alone))
            self.assertEqual(find_miscounts(together), [])

    def test_batch_of_deliveries(self) -> None:
        """Each delivery of a batch has its own outcome, and a quota can be reached within it."""
        operations = SQLiteOperations(SMALL)

        def deliver_event(
            id: str, to: str = ALICE, sender: str = BOB, size: int = 0, guard: CommandGuard | None = None
        ) -> SQLOperation:
            return operations.deliver_event(PendingEvent(id, to, sender, "x" * size, NOON), guard)

        with closing(create_memory_database()) as connection:
            connection.commit_batch(operations.prepare_parties())
            outcomes = connection.commit_batch(
                [
                    deliver_event("a", size=25, guard=operations.make_guard(nonce=b"same")),
                    deliver_event("b", guard=operations.make_guard(nonce=b"same")),
                    deliver_event("c", sender=UNREGISTERED),
                    deliver_event("d", to=BOB, sender=CAROL, guard=operations.make_guard(None, BOB)),
                    deliver_event("e", to=CAROL, guard=operations.make_guard(None, CAROL)),
                    deliver_event("f", size=6),
                    deliver_event("g", size=5),
                    deliver_event("h", sender=CAROL),
                    deliver_event("i"),
                    deliver_event("j", to=BOB, sender=ALICE),
                    deliver_event("k", sender=CAROL, to=CAROL, guard=operations.make_guard(None, BOB)),
                ],
            )
            self.assertEqual(
                resolve_results(outcomes),
                [
                    None,
                    DuplicateNonce,
                    ContractNotFound,
                    None,
                    RecipientNotRegistered,
                    QuotaExceeded,
                    None,
                    None,
                    QuotaExceeded,
                    None,
                    ContractNotFound,
                ],
            )
            stored_ids = connection.execute("SELECT id FROM pending_event ORDER BY seq").fetchall()
            self.assertEqual([id for (id,) in stored_ids], ["a", "d", "g", "h", "j"])

    def test_registration_counts_for_later_commands(self) -> None:
        """A registration counts for later commands of the same batch, not for earlier ones."""
        operations = SQLiteOperations(SMALL)
        with closing(create_memory_database()) as connection:
            outcomes = connection.commit_batch(
                [
                    operations.check_guard(operations.make_guard(CAROL)),
                    operations.save_contract(make_contract("r", None, CAROL)),
                    operations.check_guard(operations.make_guard(CAROL, CAROL)),
                ],
            )
            self.assertEqual(resolve_results(outcomes), [UnauthorizedCommand, None, None])

    def test_contract_counts_for_later_commands(self) -> None:
        """So does a contract, among commands of other kinds."""
        operations = SQLiteOperations(SMALL)
        with closing(create_memory_database()) as connection:
            outcomes = connection.commit_batch(
                [
                    operations.deliver_event(PendingEvent("a", ALICE, BOB, "", NOON)),
                    operations.save_events(ALICE, []),
                    operations.save_contract(make_contract("c", ALICE, BOB)),
                    operations.save_events(ALICE, []),
                    operations.deliver_event(PendingEvent("b", ALICE, BOB, "", NOON)),
                ],
            )
            self.assertEqual(resolve_results(outcomes), [ContractNotFound, None, None, None, None])

    def test_runs_in_order(self) -> None:
        """Commands on the same items run in order, whatever is between them."""
        operations = SQLiteOperations(SMALL)
        waiting = PendingEvent("p", ALICE, BOB, "", NOON)
        event, public = StoredEvent("e", BOB, ALICE, "", ("old",), 1.0), PublicEvent("x", "", (), 1.0, "")
        with closing(create_memory_database()) as connection:
            connection.commit_batch(operations.prepare_parties())
            outcomes = connection.commit_batch(
                [
                    operations.acknowledge_requests(ALICE, ["q"]),
                    operations.update_tags(ALICE, [("e", ("early",))]),
                    operations.add_request(ContractRequest("q", UNREGISTERED, ALICE, "", "")),
                    operations.save_events(ALICE, [event]),
                    operations.publish_event(ALICE, public),
                    operations.acknowledge_events(ALICE, ["p"]),
                    operations.deliver_event(waiting),
                    operations.update_tags(ALICE, [("e", ("new",))]),
                    operations.acknowledge_requests(ALICE, ["q"]),
                    operations.unpublish_event(ALICE, "x"),
                    operations.acknowledge_events(ALICE, ["p"]),
                    operations.publish_event(ALICE, public),
                    operations.unpublish_event(ALICE, "x"),
                ],
            )
            self.assertEqual([isinstance(outcome, Exception) for outcome in outcomes], [False] * 13)
            self.assertEqual([len(outcomes[position]) for position in (5, 10)], [0, 1])
            for table, number in (("contract_request", 0), ("pending_event", 0), ("public_event", 0)):
                self.assertEqual(connection.execute(f"SELECT count(*) FROM {table}").fetchone(), (number,))
            labels = connection.execute("SELECT text FROM label WHERE kind = 3").fetchall()
            self.assertEqual(labels, [("new",)])

    def test_batch_exceeds_statement_limit(self) -> None:
        """A batch may have more commands than fit in one statement."""
        operations = SQLiteOperations(DecentrlQuotas())
        dids = [f"did:example:{number}" for number in range(150)]
        with closing(create_memory_database()) as connection:
            connection.commit_batch([operations.save_contract(make_contract(f"r{did}", None, did)) for did in dids])
            connection.commit_batch([operations.save_contract(make_contract(f"c{did}", did, ALICE)) for did in dids])
            deliveries = [
                operations.deliver_event(
                    PendingEvent(f"p{did}", did, ALICE, did, NOON), operations.make_guard(None, did)
                )
                for did in dids
            ]
            self.assertEqual(resolve_results(connection.commit_batch(deliveries)), [None] * 150)
            saved = [
                operations.save_events(
                    did, [StoredEvent(f"e{did}", did, ALICE, did, (did,), 1.0)], operations.make_guard(did)
                )
                for did in dids
            ]
            self.assertEqual(resolve_results(connection.commit_batch(saved)), [None] * 150)
            for did in dids:
                found = decentrl_queries.find_pending_page(connection, did, ALICE, ALL)
                self.assertEqual([event.payload for event in found.items], [did])
                stored = event_archive_queries.find_stored_events(
                    connection, did, EventFilter((did,)), PageReadOptions(ALL, PageCursorCache())
                )
                assert stored is not None
                self.assertEqual([event.payload for event in stored.items], [did])


class CommandCommitTests(CommitTestCase):
    """Commits of commands through the whole store."""

    def make_guard(self, nonce: bytes, sender: str | None = None) -> CommandGuard:
        return CommandGuard(nonce, NOON + HOUR, sender)

    def test_one_commit_per_iteration(self) -> None:
        """Commands of one iteration share a commit with each other and the other protocol, refused ones too."""
        decentrl, before = self.store.decentrl, count_wal_commits(self.path)
        deferreds: list[Deferred[Any]] = [
            decentrl.save_contract(self.make_guard(b"1"), make_contract("r", None, ALICE)),
            decentrl.save_contract(self.make_guard(b"2", ALICE), make_contract("c", ALICE, BOB)),
            decentrl.enqueue_event(self.make_guard(b"3"), PendingEvent("p", ALICE, BOB, "payload", NOON)),
            decentrl.check_guard(self.make_guard(b"4", ALICE)),
            self.enqueue_ids("m"),
        ]
        refused_event = decentrl.enqueue_event(self.make_guard(b"5"), PendingEvent("q", BOB, ALICE, "payload", NOON))
        replay = decentrl.check_guard(self.make_guard(b"5"))
        self.run_iterations()
        for deferred in deferreds:
            self.successResultOf(deferred)
        self.failureResultOf(refused_event, ContractNotFound)
        self.failureResultOf(replay, DuplicateNonce)
        self.assertEqual(count_wal_commits(self.path) - before, 1)

    def test_refusal_is_durable(self) -> None:
        """A refusal is committed before it is reported, so that the nonce stays claimed."""
        before = count_wal_commits(self.path)
        self.writer.hold()
        refused = self.store.decentrl.check_guard(self.make_guard(b"1", ALICE))
        self.run_iterations()
        self.assertNoResult(refused)
        self.writer.release()
        self.failureResultOf(refused, UnauthorizedCommand)
        self.assertEqual(count_wal_commits(self.path) - before, 1)

    def test_failing_command_fails_alone(self) -> None:
        """A command that the database rejects fails alone and claims no nonce."""
        decentrl = self.store.decentrl
        self.finish(decentrl.save_contract(self.make_guard(b"1"), make_contract("c", ALICE, BOB)))
        ids = ["a", "b", "a", "c"]
        deferreds = [
            decentrl.enqueue_event(self.make_guard(b"n%d" % number), PendingEvent(id, ALICE, BOB, "", NOON))
            for number, id in enumerate(ids)
        ]
        self.run_iterations()
        self.failureResultOf(deferreds.pop(2), StoreUnavailable)
        for deferred in deferreds:
            self.successResultOf(deferred)
        self.assertTrue(self.finish(self.store.claim_nonce(b"n2", NOON + 1)))
        self.assertFalse(self.finish(self.store.claim_nonce(b"n3", NOON + 1)))
        found = self.finish(decentrl.pending_events(ALICE, None, ALL))
        self.assertEqual([event.id for event in found.items], ["a", "b", "c"])

    def test_page_reads_are_bounded_in_memory(self) -> None:
        """Small pages are read in one batch, the largest ones one at a time to bound memory."""
        for limit, calls in ((10, 1), (1000, 5)):
            before = self.reader.calls
            deferreds = [self.store.decentrl.events(ALICE, EventFilter(), PageRequest(0, limit)) for _ in range(5)]
            for _ in deferreds:
                self.run_iterations()
            for deferred in deferreds:
                self.successResultOf(deferred)
            self.assertEqual(self.reader.calls - before, calls)

    def test_waiting_commands_are_bounded_in_memory(self) -> None:
        """The memory of waiting commands is bounded (back-pressure)."""
        self.writer.hold()
        self.finish_ignoring_failure(self.store.ping())
        large = "x" * 30_000_000
        event = StoredEvent("e", ALICE, ALICE, large, (), 1.0)
        deferreds = [
            self.store.decentrl.save_events(self.make_guard(b"%d" % number), ALICE, [event]) for number in range(4)
        ]
        for deferred in deferreds:
            self.assertNoResult(deferred)
        public = PublicEvent("x", large, (), 1.0, "")
        self.failureResultOf(self.store.decentrl.publish(self.make_guard(b"9"), ALICE, public), StoreUnavailable)
        for deferred in deferreds:
            deferred.addErrback(lambda failure: None)

    def finish_ignoring_failure(self, deferreds: Deferred[Any]) -> None:
        self.run_iterations()
        deferreds.addErrback(lambda failure: None)
