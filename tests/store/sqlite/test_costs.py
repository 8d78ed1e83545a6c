"""What traffic costs the SQLite store, counted: statements, pages, messages in a transaction."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from functools import partial
from hashlib import sha256
from sqlite3 import Connection
from typing import Any, TypeVar

from twisted.internet.defer import Deferred, execute
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from mediatord.store.fair_share import KnownSenders
from mediatord.store.interfaces.decentrl import DecentrlQuotas, PendingEvent
from mediatord.store.interfaces.messages import (
    EnqueueRequest,
    EnqueueResult,
    MessageLedger,
    QueueLimits,
    RemovedMessage,
)
from mediatord.store.interfaces.store import BatchLimits, ignore_observation
from mediatord.store.sqlite import (
    account_queries,
    executor,
    message_queries,
    message_writes,
    queue_statistics,
    sqlite_store,
)
from mediatord.store.sqlite.connection import SQLOperation, StoreConnection, connect
from mediatord.store.sqlite.database_file import open_database
from mediatord.store.sqlite.executor import OperationBatcher
from mediatord.store.sqlite.message_writes import (
    EnqueueOperation,
    MarkDeliveredOperation,
    QueueCache,
    RemoveOperation,
)
from mediatord.store.sqlite.sqlite_store import SQLiteStore
from tests.store.builders import (
    ALICE,
    BOB,
    HOUR,
    NOON,
    ImmediateClock,
    make_database_path,
    make_payload,
    make_sqlite_store,
)
from tests.store.sqlite.commit_test_case import CommitTestCase
from tests.store.sqlite.operations import SQLiteOperations

T = TypeVar("T")

LIMITS = QueueLimits(max_messages=1_000_000, max_bytes=1 << 40)
DIDS = [f"did:example:{number}" for number in range(8)]


class CostCase(SynchronousTestCase):
    """A connection that writes, two accounts with some recipients, and what it is told by SQL."""

    def setUp(self) -> None:
        self.path = make_database_path(self)
        self.connection = open_database(self.path)
        self.addCleanup(self.connection.close)
        for account in (ALICE, BOB):
            account_queries.grant_account(self.connection, account, NOON)
        account_queries.update_recipients(self.connection, ALICE, [(did, "add") for did in DIDS], 99)
        self.number = 0

    def deposits(self, number: int, size: int = 10, limits: QueueLimits = LIMITS) -> list[SQLOperation]:
        """So many, for the recipients in turn."""
        works: list[SQLOperation] = []
        for _ in range(number):
            self.number += 1
            payload = make_payload(f"{self.number:032d}", b"%d" % self.number + b"x" * size)
            request = EnqueueRequest(DIDS[self.number % len(DIDS)], (payload,), NOON + HOUR)
            works.append(EnqueueOperation(request, limits, NOON, len(payload.data)))
        return works

    def commit(self, works: Sequence[SQLOperation]) -> list[Any]:
        """What they answer."""
        outcomes = self.connection.commit_batch(works)
        self.assertEqual([outcome for outcome in outcomes if isinstance(outcome, Exception)], [])
        return outcomes

    def statements(self, works: Sequence[SQLOperation]) -> int:
        """How many it takes; what a trigger does is told as a comment."""
        told: list[str] = []
        self.connection.set_trace_callback(told.append)
        self.commit(works)
        self.connection.set_trace_callback(None)
        return len([statement for statement in told if not statement.startswith("--")])


class SizeTests(CostCase):
    """What is stored for good."""

    def pages(self) -> int:
        """Bytes of the database."""
        ((pages,),) = self.connection.execute("PRAGMA page_count").fetchall()
        ((size,),) = self.connection.execute("PRAGMA page_size").fetchall()
        return int(pages * size)

    def test_long_dids(self) -> None:
        """A DID is stored once, of an account and of a recipient; all else about it is small."""
        dids = [f"did:example:{number:03d}{'x' * 7_900}" for number in range(100)]
        before = self.pages()
        account_queries.update_recipients(self.connection, ALICE, [(did, "add") for did in dids], 999)
        registered = self.pages()
        for did in dids:
            account_queries.grant_account(self.connection, did, NOON)
        for taken in (registered - before, self.pages() - registered):
            self.assertLess(taken, 1.1 * sum(map(len, dids)))


class StatementTests(CostCase):
    """Each statement is two chances for the reactor to keep the interpreter's lock."""

    def test_deposits(self) -> None:
        """A batch of deposits to queues that are known: begin, is it as we knew it, insert, count, ledger, commit."""
        self.commit(self.deposits(32))
        self.assertEqual(self.statements(self.deposits(32)), 6)
        self.assertEqual(self.statements(self.deposits(64)), 6)

    def test_unknown_queues(self) -> None:
        """Those that are not known are looked up together; one more says, once, that their account is used."""
        self.assertEqual(self.statements(self.deposits(32)), 8)
        self.connection.clear_cache()
        self.assertEqual(self.statements(self.deposits(32)), 7)

    def test_removals(self) -> None:
        """A batch of acknowledgements: the same, with a look for the messages and a delete."""
        ids = [f"{number:032d}" for number in range(1, 65)]
        self.commit(self.deposits(65))
        self.assertEqual(self.statements([RemoveOperation([id], ALICE, NOON) for id in ids[:32]]), 7)
        # All but one recipient have nothing left.
        self.assertEqual(self.statements([RemoveOperation([id], ALICE, NOON) for id in ids[32:]]), 8)

    def test_removals_from_known_senders(self) -> None:
        """Whom it is an acknowledgement of takes one look and one write a batch, and nothing when it is known."""
        for number, (more, now) in enumerate(((2, NOON), (0, NOON + HOUR / 2), (1, NOON + HOUR), (0, NOON + HOUR))):
            works = self.deposits(32)
            for work in works:
                assert isinstance(work, EnqueueOperation)
                work.request.origin = 5 << 32 | 7
            self.commit(works)
            ids = [f"{32 * number + place:032d}" for place in range(1, 33)]
            self.assertEqual(self.statements([RemoveOperation([id], ALICE, now) for id in ids]), 8 + more, number)

    def test_mixed(self) -> None:
        """Deposits, acknowledgements and marks that take turns share their statements."""
        self.commit(self.deposits(96))
        works: list[SQLOperation] = []
        for place, enqueue in enumerate(self.deposits(32)):
            works += [
                enqueue,
                RemoveOperation([f"{place + 1:032d}"], ALICE, NOON),
                MarkDeliveredOperation([f"{place + 60:032d}"], ""),
            ]
        self.assertEqual(self.statements(works), 9)
        (count,) = self.connection.execute(
            "SELECT count(*) FROM message WHERE delivered = 1 AND pushes = 1"
        ).fetchone()
        self.assertEqual(count, 32)

    def test_expiry(self) -> None:
        """So does what expires, however much of it there is."""
        self.commit(self.deposits(64))
        asked = [lambda c: message_writes.expire_messages(c, NOON + HOUR, 60, 1 << 30)]
        self.assertEqual(self.statements(asked), 8)

    def test_one_ledger(self) -> None:
        """However many kinds of operations a batch has, what they count is written once for both protocols."""
        self.commit(self.deposits(64))
        orders = SQLiteOperations(DecentrlQuotas())
        self.commit(orders.settled())
        works: list[SQLOperation] = [lambda c: message_writes.expire_messages(c, NOON + HOUR, 1, 1 << 30)]
        for place, enqueue in enumerate(self.deposits(8)):
            event = PendingEvent(f"e{place}", ALICE, BOB, "", NOON)
            works += [enqueue, orders.deliver(event), RemoveOperation([f"{place + 40:032d}"], ALICE, NOON)]
            works.append(orders.acknowledge(ALICE, [f"e{place}"]))
        told: list[str] = []
        self.connection.set_trace_callback(told.append)
        self.commit(works)
        self.connection.set_trace_callback(None)
        self.assertEqual(len([statement for statement in told if "INTO ledger" in statement]), 1)
        books = queue_statistics.read_ledger(self.connection)
        self.assertEqual(books.didcomm, MessageLedger(accepted=72, acknowledged=8, expired=1, waiting=63))
        self.assertEqual(books.decentrl, MessageLedger(accepted=8, acknowledged=8))


class PageTests(CostCase):
    """A commit writes the pages that it has changed."""

    def pages(self, works: Sequence[SQLOperation]) -> int:
        """How many that are."""
        self.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        self.commit(works)
        return (self.path.with_name(self.path.name + "-wal").stat().st_size - 32) // (4096 + 24)

    def test_a_deposit(self) -> None:
        """Two of 1900 bytes fit on a page; beside those there are a few for indexes and counters."""
        self.commit(self.deposits(32))
        self.assertLessEqual(self.pages(self.deposits(32, size=1_880)), 16 + 10)

    def test_does_not_grow(self) -> None:
        """With four times as many messages in the queues it is no more but what the shape of the trees makes."""
        found = []
        for batches in (24, 72):
            for _ in range(batches):
                self.commit(self.deposits(100, size=100))
            found.append(self.pages(self.deposits(32, size=1_880)))
        self.assertLessEqual(found[1], found[0] + 4)


class KnownQueueTests(CostCase):
    """What the connection remembers is never wrong."""

    limits = QueueLimits(max_messages=2, max_bytes=1 << 40)

    def test_another_process_removes(self) -> None:
        """What somebody else has removed makes room."""
        (first,) = self.commit(self.deposits(1))
        self.number += len(DIDS) - 1
        self.commit(self.deposits(1))
        other = connect(self.path)
        self.addCleanup(other.close)
        other.execute("BEGIN IMMEDIATE")
        self.assertEqual(len(message_writes.purge_messages(other, [first.messages[0].id])), 1)
        other.execute("COMMIT")
        self.number += len(DIDS) - 1
        (third,) = self.commit(self.deposits(1, limits=self.limits))
        self.assertEqual(third.evicted, ())
        self.number += len(DIDS) - 1
        (fourth,) = self.commit(self.deposits(1, limits=self.limits))
        self.assertEqual(len(fourth.evicted), 1)

    def test_another_account(self) -> None:
        """A DID that has changed hands gets a queue of its own."""
        self.commit(self.deposits(8))

        def hand_over(connection: StoreConnection) -> None:
            account_queries.update_recipients(connection, ALICE, [(did, "remove") for did in DIDS], 99)
            account_queries.update_recipients(connection, BOB, [(did, "add") for did in DIDS], 99)

        self.commit([hand_over])
        enqueued = self.commit(self.deposits(8))
        self.assertEqual({message.account for one in enqueued for message in one.messages}, {BOB})
        queues = self.connection.execute("SELECT account_id, sum(messages) FROM queue GROUP BY 1").fetchall()
        self.assertEqual(queues, [(1, 8), (2, 8)])

    def test_undone(self) -> None:
        """What was undone is not remembered."""
        self.commit(self.deposits(8))

        def fail(_connection: Connection) -> None:
            raise RuntimeError

        outcomes = self.connection.commit_batch([*self.deposits(8), fail])
        self.assertEqual([isinstance(outcome, EnqueueResult) for outcome in outcomes], [True] * 8 + [False])
        self.commit(self.deposits(8))
        known = self.connection._cache
        assert known is not None
        found = known.find(self.connection, DIDS)
        self.assertEqual([queue.messages for queue in found.values()], [3] * 8)

    def test_few_standings(self) -> None:
        """Of few queues it is remembered who has how much, and what was asked for last stays."""
        self.patch(message_writes, "CACHED_EVICTION_STATES", 2)
        limits = QueueLimits(max_messages=1, max_bytes=1 << 40, share=0.5, reserved=0.1)
        self.commit(self.deposits(len(DIDS)))
        for number, place in enumerate((0, 1, 0, 2)):
            self.number = place - 1
            (work,) = self.deposits(1, limits=limits)
            assert isinstance(work, EnqueueOperation)
            work.request.payloads = (make_payload(f"{number} full"),)
            self.commit([work])
        known = self.connection._cache
        assert known is not None
        queues = known.find(self.connection, [DIDS[0], DIDS[2]])
        self.assertEqual(list(known.eviction_states), [queue.recipient_id for queue in queues.values()])

    def test_nothing_of_an_eviction_stays(self) -> None:
        """What was read to make room is freed at once, without a garbage collection."""
        limits = QueueLimits(max_messages=1, share=0.5, reserved=0.1)
        self.commit(self.deposits(len(DIDS)))
        gc.disable()
        self.addCleanup(gc.enable)
        self.commit(self.deposits(len(DIDS), limits=limits))
        self.assertEqual([one for one in gc.get_objects() if type(one) is message_writes._EvictionScan], [])

    def test_few_senders(self) -> None:
        """Of few queues it stays in memory whom they have acknowledged; of the others it is in the database."""
        self.patch(message_writes, "CACHED_SENDER_SETS", 3)
        for more, now in (0, NOON), (len(DIDS), NOON + HOUR):
            works = self.deposits(len(DIDS))
            for work in works:
                assert isinstance(work, EnqueueOperation)
                work.request.origin = 5 << 32 | 7
            self.commit(works)
            # The first recipient is asked for last.
            places = [*range(2, len(DIDS) + 1), 1]
            self.commit([RemoveOperation([f"{more + place:032d}"], ALICE, now) for place in places])
            known = self.connection._cache
            assert known is not None
            queues = known.find(self.connection, [DIDS[place % len(DIDS)] for place in places]).values()
            self.assertEqual([queue.recipient_id in known.senders for queue in queues], [False] * 5 + [True] * 3)
        texts = self.connection.execute("SELECT senders FROM recipient WHERE registered IS NOT NULL").fetchall()
        self.assertEqual([KnownSenders(text).known for (text,) in texts], [{7}] * len(DIDS))

    def test_bounded(self) -> None:
        """So many are remembered; who is asked for stays."""
        known = QueueCache(capacity=3)
        for did in DIDS:
            known.find(self.connection, [did])
            known.find(self.connection, DIDS[:1])
        told: list[str] = []
        self.connection.set_trace_callback(told.append)
        known.find(self.connection, [DIDS[0], DIDS[-1]])
        self.assertEqual(told, [])
        known.find(self.connection, [DIDS[1]])
        self.assertEqual(len(told), 1)


class SliceTests(CommitTestCase):
    """Nobody can write while a transaction is under way, so a long one is made of short ones."""

    def expire(self, number: int, size: int, limit: int) -> tuple[list[RemovedMessage], int]:
        """What expires, and in how many transactions."""
        for first in range(0, number, 100):
            names = [f"m{place}" for place in range(first, min(first + 100, number))]
            self.done(self.put(*names, data=b"x" * size))
        self.clock.advance(HOUR)
        self.observed.clear()
        expired = self.done(self.store.expire_messages(limit))
        return expired, self.observed.count("commit")

    def test_by_number(self) -> None:
        """So many messages in one transaction, whatever was asked for."""
        removed, commits = self.expire(500, 10, 500)
        self.assertEqual([one.id for one in removed], [f"m{place}" for place in range(500)])
        self.assertEqual(commits, -(-500 // sqlite_store.EXPIRY_BATCH_MESSAGES))
        self.assertLessEqual(sqlite_store.EXPIRY_BATCH_MESSAGES, 64)

    def test_by_bytes(self) -> None:
        """And so many bytes, but always one message."""
        removed, commits = self.expire(4, sqlite_store.EXPIRY_BATCH_BYTES // 2 + 1, 3)
        self.assertEqual((len(removed), commits), (3, 3))

    def test_others_write_between(self) -> None:
        """What is asked for meanwhile does not wait for the end."""
        self.done(self.put(*[f"m{place}" for place in range(300)]))
        self.clock.advance(HOUR)
        self.observed.clear()
        self.writer.hold()
        expired = self.store.expire_messages(300)
        self.turn()
        self.store.claim_nonce(b"key", NOON + 9 * HOUR)
        self.writer.let_go()
        self.turn()
        self.assertEqual(len(self.successResultOf(expired)), 300)
        operations = [operation for operation in self.observed if operation != "commit"]
        self.assertEqual(operations[:3], ["expire", "claim", "expire"])

    def test_digests(self) -> None:
        """Digests of an account are compared a few recipients at a time."""
        self.patch(message_queries, "COMPARED_AT_A_TIME", 1)
        self.done(self.store.update_recipients(ALICE, [(did, "add") for did in DIDS], max_recipients=99))
        for place, did in enumerate(DIDS):
            self.done(self.put(f"m{place}", to=did))
        wanted = [sha256(make_payload(f"m{place}").data).hexdigest() for place in (6, 1)]
        before = self.reader.hops
        acknowledged = self.store.acknowledge(ALICE, wanted)
        for _ in range(9):
            self.turn()
        self.assertEqual([one.id for one in self.successResultOf(acknowledged)], ["m1", "m6"])
        self.assertEqual(self.reader.hops - before, len(DIDS))


class Slow:
    """A runner whose work is done when the test says so."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Callable[[], Any], Deferred[Any]]] = []

    def start(self) -> None:
        """Nothing to start."""

    def stop(self) -> None:
        """Nothing to stop."""

    def __call__(self, work: Callable[..., T], *args: Any) -> Deferred[T]:
        done: Deferred[T] = Deferred()
        self.waiting.append((partial(work, *args), done))
        return done

    def finish(self) -> None:
        (work, done) = self.waiting.pop(0)
        done.callback(work())


class IterationClock(Clock):
    """A clock whose turns end: what is to be called without delay is called in the next one."""

    def turn(self, seconds: float = 0.0) -> None:
        """One turn, so long after the last."""
        self.rightNow += seconds
        due = [call for call in self.calls if call.getTime() <= self.rightNow]
        for call in due:
            self.calls.remove(call)
            call.called = 1
            call.func(*call.args, **call.kw)


class GroupCommitDelayTests(SynchronousTestCase):
    """Where the disk is slow, one wait for it is to do for as many as possible."""

    def setUp(self) -> None:
        self.clock = IterationClock()
        self.runner = Slow()
        self.sizes: list[int] = []
        self.batches = OperationBatcher(
            self.runner, self.perform, self.clock, ignore_observation, BatchLimits(), max_delay=0.01
        )
        self.batches.open(lambda: open_database(make_database_path(self)))
        self.runner.finish()
        self.batches.is_accepting = True

    def perform(self, connection: Connection, works: Sequence[SQLOperation]) -> list[Any]:
        self.sizes.append(len(works))
        return [None for _ in works]

    def ask(self, number: int) -> None:
        for _ in range(number):
            self.batches.submit("x", [(lambda connection: None, 0)])

    def commit(self, seconds: float) -> None:
        """What is under way ends so long after the last turn."""
        self.clock.turn(seconds)
        self.runner.finish()

    def first(self, number: int, seconds: float) -> None:
        """A batch of one that takes so long, while so many come that the next one is for."""
        self.ask(1)
        self.clock.turn()
        self.clock.turn()
        self.ask(number)
        self.commit(seconds)

    def test_they_come_back_together(self) -> None:
        """Those who were answered by a slow commit go into the next one with those who wait."""
        self.first(16, 0.05)
        for _ in range(4):
            self.ask(4)
            self.clock.turn(0.001)
        self.clock.turn()
        self.runner.finish()
        self.assertEqual(self.sizes, [1, 32])

    def test_not_for_long(self) -> None:
        """An eighth of what the last one took, however many come."""
        self.first(1, 0.016)
        for _ in range(9):
            self.ask(1)
            self.clock.turn(0.0011)
        self.runner.finish()
        self.assertEqual(self.sizes, [1, 3])

    def test_not_without_reason(self) -> None:
        """When a turn has brought nothing more it is begun."""
        self.first(1, 0.05)
        self.clock.turn()
        self.assertEqual(len(self.runner.waiting), 0)
        self.clock.turn()
        self.assertEqual(len(self.runner.waiting), 1)


class Afterwards:
    """A runner that does the work in place, and then something else."""

    then: Callable[[], object] | None = None

    def start(self) -> None:
        """Nothing to start."""

    def stop(self) -> None:
        """Nothing to stop."""

    def __call__(self, work: Callable[..., T], *args: Any) -> Deferred[T]:
        done: Deferred[T] = execute(work, *args)
        if self.then is not None:
            self.then()
        return done


class ReuseTests(SynchronousTestCase):
    """The write-ahead log is written from its start again while there is one transaction after the other."""

    def test_reuse(self) -> None:
        """Something is committed behind every checkpoint, and the log does not grow all the same."""
        self.patch(executor, "WAL_REUSE_BYTES", 100_000)
        clock, path, survey = ImmediateClock(), make_database_path(self), Afterwards()
        store = make_sqlite_store(clock, path, background=survey)
        self.successResultOf(store.open())
        survey.then = lambda: store.remember_did("b", "y" * 10_000)
        log = path.with_name(path.name + "-wal")
        sizes = []
        for _ in range(4):
            self.successResultOf(store.remember_did("a", "x" * 200_000))
            clock.advance(0.5)
            sizes.append(log.stat().st_size)
        self.assertLess(sizes[-1], 2 * sizes[0])
        survey.then = None
        self.successResultOf(store.close())


class KnownAccountTests(SynchronousTestCase):
    """Who has an account is looked up once, and again when that may have changed."""

    def setUp(self) -> None:
        self.asked: list[str] = []

    def store(self, *, shared: bool = False) -> SQLiteStore:
        """With Alice and Bob; what it looks up is noted."""
        store = make_sqlite_store(
            ImmediateClock(), make_database_path(self), LIMITS, shared=shared, observe=self.note
        )
        self.successResultOf(store.open())
        self.addCleanup(store.close)
        for did in (ALICE, BOB):
            self.successResultOf(store.grant(did))
        return store

    def note(self, operation: str, _: float) -> None:
        """Keep the names of lookups."""
        if operation == "account":
            self.asked.append(operation)

    def test_once(self) -> None:
        """Where no other process works on the file."""
        for shared, lookups in ((False, 1), (True, 3)):
            store = self.store(shared=shared)
            self.asked = []
            for _ in range(3):
                account = self.successResultOf(store.get_account(ALICE))
                self.assertEqual(account and account.did, ALICE)
            self.assertEqual(len(self.asked), lookups)

    def test_changes(self) -> None:
        """What the store is told to change shows at once; nobody is remembered not to be there."""
        store = self.store()
        self.assertIsNone(self.successResultOf(store.get_account("did:example:late")))
        self.successResultOf(store.grant("did:example:late"))
        self.assertIsNotNone(self.successResultOf(store.get_account("did:example:late")))
        self.successResultOf(store.get_account(ALICE))
        self.successResultOf(store.mark_draft03(ALICE))
        account = self.successResultOf(store.get_account(ALICE))
        self.assertIs(account and account.draft03, True)
        self.successResultOf(store.move_account(ALICE, "did:example:new"))
        self.assertIsNone(self.successResultOf(store.get_account(ALICE)))
        self.assertIsNotNone(self.successResultOf(store.get_account("did:example:new")))
