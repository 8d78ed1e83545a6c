"""What becomes of commands that the SQLite store is given at the same time."""

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

STRANGER = "did:example:stranger"
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
MOST_NONCES = 14


class BatchTests(SynchronousTestCase):
    """Many commands in one transaction."""

    @settings(max_examples=120, deadline=None)
    @given(data=st.data())
    def test_together_as_one_by_one(self, data: st.DataObject) -> None:
        """What becomes of commands, and what is kept, is the same whether they come one by one or all at once."""
        orders = SQLiteOperations(SMALL, MOST_NONCES)
        draw = RandomCommands(data, orders)
        commands = [draw.command() for _ in range(data.draw(st.integers(2, 14)))]
        with closing(create_memory_database()) as alone, closing(create_memory_database()) as together:
            settled = orders.settled()
            for connection in (alone, together):
                self.assertEqual(resolve_results(connection.commit_batch(settled)), [None] * len(settled))
            one_by_one = [alone.commit_batch([command])[0] for command in commands]
            self.assertEqual(resolve_results(together.commit_batch(commands)), resolve_results(one_by_one))
            self.assertEqual(read_all_rows(together), read_all_rows(alone))
            self.assertEqual(find_miscounts(together), [])

    def test_deliveries(self) -> None:
        """In a run of deliveries each has its own outcome, and a cap is reached in the middle of it."""
        orders = SQLiteOperations(SMALL)

        def deliver(
            id: str, to: str = ALICE, sender: str = BOB, size: int = 0, guard: CommandGuard | None = None
        ) -> SQLOperation:
            return orders.deliver(PendingEvent(id, to, sender, "x" * size, NOON), guard)

        with closing(create_memory_database()) as connection:
            connection.commit_batch(orders.settled())
            outcomes = connection.commit_batch(
                [
                    deliver("a", size=25, guard=orders.guard(nonce=b"same")),
                    deliver("b", guard=orders.guard(nonce=b"same")),
                    deliver("c", sender=STRANGER),
                    deliver("d", to=BOB, sender=CAROL, guard=orders.guard(None, BOB)),
                    deliver("e", to=CAROL, guard=orders.guard(None, CAROL)),
                    deliver("f", size=6),
                    deliver("g", size=5),
                    deliver("h", sender=CAROL),
                    deliver("i"),
                    deliver("j", to=BOB, sender=ALICE),
                    deliver("k", sender=CAROL, to=CAROL, guard=orders.guard(None, BOB)),
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
            kept = connection.execute("SELECT id FROM pending_event ORDER BY seq").fetchall()
            self.assertEqual([id for (id,) in kept], ["a", "d", "g", "h", "j"])

    def test_registered_on_the_way(self) -> None:
        """A registration counts for the commands after it in the same batch, and not for those before."""
        orders = SQLiteOperations(SMALL)
        with closing(create_memory_database()) as connection:
            outcomes = connection.commit_batch(
                [
                    orders.admit(orders.guard(CAROL)),
                    orders.contract(make_contract("r", None, CAROL)),
                    orders.admit(orders.guard(CAROL, CAROL)),
                ],
            )
            self.assertEqual(resolve_results(outcomes), [UnauthorizedCommand, None, None])

    def test_contract_on_the_way(self) -> None:
        """So does a contract, among commands of other kinds."""
        orders = SQLiteOperations(SMALL)
        with closing(create_memory_database()) as connection:
            outcomes = connection.commit_batch(
                [
                    orders.deliver(PendingEvent("a", ALICE, BOB, "", NOON)),
                    orders.save(ALICE, []),
                    orders.contract(make_contract("c", ALICE, BOB)),
                    orders.save(ALICE, []),
                    orders.deliver(PendingEvent("b", ALICE, BOB, "", NOON)),
                ],
            )
            self.assertEqual(resolve_results(outcomes), [ContractNotFound, None, None, None, None])

    def test_order(self) -> None:
        """What commands do to the same things they do in their order, whatever stands between them."""
        orders = SQLiteOperations(SMALL)
        waiting = PendingEvent("p", ALICE, BOB, "", NOON)
        kept, public = StoredEvent("e", BOB, ALICE, "", ("old",), 1.0), PublicEvent("x", "", (), 1.0, "")
        with closing(create_memory_database()) as connection:
            connection.commit_batch(orders.settled())
            outcomes = connection.commit_batch(
                [
                    orders.acknowledge_requests(ALICE, ["q"]),
                    orders.tag(ALICE, [("e", ("early",))]),
                    orders.request(ContractRequest("q", STRANGER, ALICE, "", "")),
                    orders.save(ALICE, [kept]),
                    orders.publish(ALICE, public),
                    orders.acknowledge(ALICE, ["p"]),
                    orders.deliver(waiting),
                    orders.tag(ALICE, [("e", ("new",))]),
                    orders.acknowledge_requests(ALICE, ["q"]),
                    orders.unpublish(ALICE, "x"),
                    orders.acknowledge(ALICE, ["p"]),
                    orders.publish(ALICE, public),
                    orders.unpublish(ALICE, "x"),
                ],
            )
            self.assertEqual([isinstance(outcome, Exception) for outcome in outcomes], [False] * 13)
            self.assertEqual([len(outcomes[place]) for place in (5, 10)], [0, 1])
            for table, number in (("contract_request", 0), ("pending_event", 0), ("public_event", 0)):
                self.assertEqual(connection.execute(f"SELECT count(*) FROM {table}").fetchone(), (number,))
            labels = connection.execute("SELECT text FROM label WHERE kind = 3").fetchall()
            self.assertEqual(labels, [("new",)])

    def test_large_batch(self) -> None:
        """More commands than fit in one statement are no fewer."""
        orders = SQLiteOperations(DecentrlQuotas())
        people = [f"did:example:{number}" for number in range(150)]
        with closing(create_memory_database()) as connection:
            connection.commit_batch([orders.contract(make_contract(f"r{did}", None, did)) for did in people])
            connection.commit_batch([orders.contract(make_contract(f"c{did}", did, ALICE)) for did in people])
            deliveries = [
                orders.deliver(PendingEvent(f"p{did}", did, ALICE, did, NOON), orders.guard(None, did))
                for did in people
            ]
            self.assertEqual(resolve_results(connection.commit_batch(deliveries)), [None] * 150)
            saved = [
                orders.save(did, [StoredEvent(f"e{did}", did, ALICE, did, (did,), 1.0)], orders.guard(did))
                for did in people
            ]
            self.assertEqual(resolve_results(connection.commit_batch(saved)), [None] * 150)
            for did in people:
                found = decentrl_queries.find_pending_page(connection, did, ALICE, ALL)
                self.assertEqual([event.payload for event in found.items], [did])
                stored = event_archive_queries.find_stored_events(
                    connection, did, EventFilter((did,)), PageReadOptions(ALL, PageCursorCache())
                )
                assert stored is not None
                self.assertEqual([event.payload for event in stored.items], [did])


class CommandCommitTests(CommitTestCase):
    """Commands of the whole store."""

    def guard(self, nonce: bytes, sender: str | None = None) -> CommandGuard:
        return CommandGuard(nonce, NOON + HOUR, sender)

    def test_one_commit(self) -> None:
        """Commands of one turn share a commit with each other and with the other protocol, the refused ones too."""
        decentrl, before = self.store.decentrl, count_wal_commits(self.path)
        asked: list[Deferred[Any]] = [
            decentrl.save_contract(self.guard(b"1"), make_contract("r", None, ALICE)),
            decentrl.save_contract(self.guard(b"2", ALICE), make_contract("c", ALICE, BOB)),
            decentrl.enqueue_event(self.guard(b"3"), PendingEvent("p", ALICE, BOB, "payload", NOON)),
            decentrl.check_guard(self.guard(b"4", ALICE)),
            self.put("m"),
        ]
        refused = decentrl.enqueue_event(self.guard(b"5"), PendingEvent("q", BOB, ALICE, "payload", NOON))
        again = decentrl.check_guard(self.guard(b"5"))
        self.turn()
        for one in asked:
            self.successResultOf(one)
        self.failureResultOf(refused, ContractNotFound)
        self.failureResultOf(again, DuplicateNonce)
        self.assertEqual(count_wal_commits(self.path) - before, 1)

    def test_refusal_is_durable(self) -> None:
        """That a command was refused is committed before it is told, so that its nonce stays claimed."""
        before = count_wal_commits(self.path)
        self.writer.hold()
        refused = self.store.decentrl.check_guard(self.guard(b"1", ALICE))
        self.turn()
        self.assertNoResult(refused)
        self.writer.let_go()
        self.failureResultOf(refused, UnauthorizedCommand)
        self.assertEqual(count_wal_commits(self.path) - before, 1)

    def test_bad_apple(self) -> None:
        """A command that the database refuses fails alone and claims no nonce; the others do not notice."""
        decentrl = self.store.decentrl
        self.done(decentrl.save_contract(self.guard(b"1"), make_contract("c", ALICE, BOB)))
        ids = ["a", "b", "a", "c"]
        asked = [
            decentrl.enqueue_event(self.guard(b"n%d" % number), PendingEvent(id, ALICE, BOB, "", NOON))
            for number, id in enumerate(ids)
        ]
        self.turn()
        self.failureResultOf(asked.pop(2), StoreUnavailable)
        for one in asked:
            self.successResultOf(one)
        self.assertTrue(self.done(self.store.claim_nonce(b"n2", NOON + 1)))
        self.assertFalse(self.done(self.store.claim_nonce(b"n3", NOON + 1)))
        found = self.done(decentrl.pending_events(ALICE, None, ALL))
        self.assertEqual([event.id for event in found.items], ["a", "b", "c"])

    def test_pages_in_memory(self) -> None:
        """Small pages are read together, of the largest ones no two (so that they are not in memory together)."""
        for limit, hops in ((10, 1), (1000, 5)):
            before = self.reader.hops
            asked = [self.store.decentrl.events(ALICE, EventFilter(), PageRequest(0, limit)) for _ in range(5)]
            for _ in asked:
                self.turn()
            for one in asked:
                self.successResultOf(one)
            self.assertEqual(self.reader.hops - before, hops)

    def test_too_much_waiting(self) -> None:
        """What commands hold in memory counts as long as they wait (back-pressure)."""
        self.writer.hold()
        self.done_later(self.store.ping())
        large = "x" * 30_000_000
        event = StoredEvent("e", ALICE, ALICE, large, (), 1.0)
        asked = [self.store.decentrl.save_events(self.guard(b"%d" % number), ALICE, [event]) for number in range(4)]
        for one in asked:
            self.assertNoResult(one)
        public = PublicEvent("x", large, (), 1.0, "")
        self.failureResultOf(self.store.decentrl.publish(self.guard(b"9"), ALICE, public), StoreUnavailable)
        for one in asked:
            one.addErrback(lambda failure: None)

    def done_later(self, asked: Deferred[Any]) -> None:
        self.turn()
        asked.addErrback(lambda failure: None)
