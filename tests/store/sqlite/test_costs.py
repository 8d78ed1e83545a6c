"""Costs of traffic in the SQLite store, counted in statements, pages and messages per transaction."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from hashlib import sha256
from sqlite3 import Connection
from typing import Any, TypeVar

from twisted.internet.defer import Deferred, execute
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from mediatord.protocol.canonical_did import compute_did_digest
from mediatord.store.fair_share import KnownSenders
from mediatord.store.interfaces.decentrl import DecentrlQuotas, PendingEvent
from mediatord.store.interfaces.messages import (
    EnqueueRequest,
    EnqueueResult,
    MessageLedger,
    QueueLimits,
)
from mediatord.store.interfaces.store import BatchLimits, ignore_observation
from mediatord.store.sqlite import (
    account_queries,
    executor,
    message_queries,
    message_writes,
    queue_statistics,
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
from mediatord.store.sqlite.sqlite_store import ACCOUNT_CACHE_SECONDS, SHARED_ACCOUNT_CACHE_SECONDS, SQLiteStore
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


class CostTestCase(SynchronousTestCase):
    """A writing connection, two accounts with recipients, and a trace of SQL."""

    def setUp(self) -> None:
        self.path = make_database_path(self)
        self.connection = open_database(self.path)
        self.addCleanup(self.connection.close)
        for account in (ALICE, BOB):
            account_queries.grant_account(self.connection, account, NOON)
        account_queries.update_recipients(self.connection, ALICE, [(did, "add") for did in DIDS], 99)
        self.number = 0

    def make_enqueues(self, number: int, size: int = 10, limits: QueueLimits = LIMITS) -> list[SQLOperation]:
        """So many enqueue operations, for the recipients in turn."""
        works: list[SQLOperation] = []
        for _ in range(number):
            self.number += 1
            payload = make_payload(f"{self.number:032d}", b"%d" % self.number + b"x" * size)
            request = EnqueueRequest(DIDS[self.number % len(DIDS)], (payload,), NOON + HOUR)
            works.append(EnqueueOperation(request, limits, NOON, len(payload.data)))
        return works

    def commit(self, works: Sequence[SQLOperation]) -> list[Any]:
        """Run works in one transaction; return their results."""
        outcomes = self.connection.commit_batch(works)
        self.assertEqual([outcome for outcome in outcomes if isinstance(outcome, Exception)], [])
        return outcomes

    def count_statements(self, works: Sequence[SQLOperation]) -> int:
        """Number of statements; SQLite traces those of triggers as comments."""
        statements: list[str] = []
        self.connection.set_trace_callback(statements.append)
        self.commit(works)
        self.connection.set_trace_callback(None)
        return len([statement for statement in statements if not statement.startswith("--")])


class StoredSizeTests(CostTestCase):
    """Size of stored data."""

    def read_database_size(self) -> int:
        """Bytes of the database."""
        ((pages,),) = self.connection.execute("PRAGMA page_count").fetchall()
        ((size,),) = self.connection.execute("PRAGMA page_size").fetchall()
        return int(pages * size)

    def test_long_did_is_stored_once(self) -> None:
        """The DID of an account or a recipient is stored once; all other rows about it are small."""
        dids = [f"did:example:{number:03d}{'x' * 7_900}" for number in range(100)]
        before = self.read_database_size()
        account_queries.update_recipients(self.connection, ALICE, [(did, "add") for did in dids], 999)
        registered = self.read_database_size()
        for did in dids:
            account_queries.grant_account(self.connection, did, NOON)
        for growth in (registered - before, self.read_database_size() - registered):
            self.assertLess(growth, 1.1 * sum(map(len, dids)))


class StatementTests(CostTestCase):
    """Each statement may cost a switch of the interpreter lock to the reactor and back."""

    def test_enqueue_to_cached_queues(self) -> None:
        """A batch for cached queues takes: begin, check of the cache, insert, counters, ledger, commit."""
        self.commit(self.make_enqueues(32))
        self.assertEqual(self.count_statements(self.make_enqueues(32)), 6)
        self.assertEqual(self.count_statements(self.make_enqueues(64)), 6)

    def test_enqueue_to_unknown_queues(self) -> None:
        """Unknown queues are looked up in one statement; one more marks their account as used, once."""
        self.assertEqual(self.count_statements(self.make_enqueues(32)), 8)
        self.connection.clear_cache()
        self.assertEqual(self.count_statements(self.make_enqueues(32)), 7)

    def test_enqueue_after_a_commit_of_another_process(self) -> None:
        """The queues are looked up again, in one statement; digests of DIDs are not computed again."""
        self.commit(self.make_enqueues(32))
        with closing(connect(self.path)) as other:
            other.commit_batch(self.make_enqueues(1))
        computed: list[str] = []
        self.patch(message_writes, "compute_did_digest", computed.append)
        self.assertEqual(self.count_statements(self.make_enqueues(32)), 7)
        self.assertEqual(computed, [])

    def test_digests_of_unknown_and_long_dids_are_not_kept(self) -> None:
        """Senders whom nobody knows cannot fill the cache; it is bounded in bytes, and in DIDs."""
        long, most = f"did:example:{'x' * message_writes.CACHED_DIGEST_CHARACTERS}", len(DIDS) - 1
        self.patch(message_writes, "CACHED_DIGESTS", most)
        account_queries.update_recipients(self.connection, ALICE, [(long, "add")], 99)
        cache = QueueCache()
        for did in ("did:example:nobody", long, f"{DIDS[0]}#key", *DIDS):
            self.assertEqual(len(cache.find(self.connection, [did])), did != "did:example:nobody")
        computed: list[str] = []

        def compute(did: str) -> bytes:
            computed.append(did)
            return compute_did_digest(did)

        self.patch(message_writes, "compute_did_digest", compute)
        cache.clear()
        self.assertEqual(len(cache.find(self.connection, [long, *DIDS])), 1 + len(DIDS))
        self.assertEqual(computed, [long, DIDS[0]])
        self.assertLess(set(cache._digests), set(DIDS))

    def test_removals(self) -> None:
        """A batch of acknowledgements takes the same, with a lookup of the messages and a delete."""
        ids = [f"{number:032d}" for number in range(1, 65)]
        self.commit(self.make_enqueues(65))
        self.assertEqual(self.count_statements([RemoveOperation([id], ALICE, NOON) for id in ids[:32]]), 7)
        # All recipients but one have no messages left.
        self.assertEqual(self.count_statements([RemoveOperation([id], ALICE, NOON) for id in ids[32:]]), 8)

    def test_removals_from_known_senders(self) -> None:
        """Recording acknowledged senders takes one read and one write per batch, none for known ones."""
        for number, (more, now) in enumerate(((2, NOON), (0, NOON + HOUR / 2), (1, NOON + HOUR), (0, NOON + HOUR))):
            works = self.make_enqueues(32)
            for work in works:
                assert isinstance(work, EnqueueOperation)
                work.request.origin = 5 << 32 | 7
            self.commit(works)
            ids = [f"{32 * number + position:032d}" for position in range(1, 33)]
            self.assertEqual(
                self.count_statements([RemoveOperation([id], ALICE, now) for id in ids]), 8 + more, number
            )

    def test_mixed_batch(self) -> None:
        """Alternating enqueues, acknowledgements and delivery marks share statements."""
        self.commit(self.make_enqueues(96))
        works: list[SQLOperation] = []
        for position, enqueue in enumerate(self.make_enqueues(32)):
            works += [
                enqueue,
                RemoveOperation([f"{position + 1:032d}"], ALICE, NOON),
                MarkDeliveredOperation([f"{position + 60:032d}"], ""),
            ]
        self.assertEqual(self.count_statements(works), 9)
        (count,) = self.connection.execute(
            "SELECT count(*) FROM message WHERE delivered = 1 AND pushes = 1"
        ).fetchone()
        self.assertEqual(count, 32)

    def test_expiry(self) -> None:
        """Any number of expired messages share statements."""
        self.commit(self.make_enqueues(64))
        works = [lambda c: message_writes.expire_messages(c, 60, NOON + HOUR, 60, 1 << 30)]
        self.assertEqual(self.count_statements(works), 8)

    def test_one_ledger_write_per_batch(self) -> None:
        """The counts of a batch, of operations of any kind, are written once for both protocols."""
        self.commit(self.make_enqueues(64))
        operations = SQLiteOperations(DecentrlQuotas())
        self.commit(operations.prepare_parties())
        works: list[SQLOperation] = [lambda c: message_writes.expire_messages(c, 1, NOON + HOUR, 1, 1 << 30)]
        for position, enqueue in enumerate(self.make_enqueues(8)):
            event = PendingEvent(f"e{position}", ALICE, BOB, "", NOON)
            works += [
                enqueue,
                operations.deliver_event(event),
                RemoveOperation([f"{position + 40:032d}"], ALICE, NOON),
            ]
            works.append(operations.acknowledge_events(ALICE, [f"e{position}"]))
        statements: list[str] = []
        self.connection.set_trace_callback(statements.append)
        self.commit(works)
        self.connection.set_trace_callback(None)
        self.assertEqual(len([statement for statement in statements if "INTO ledger" in statement]), 1)
        ledger = queue_statistics.read_ledger(self.connection)
        self.assertEqual(ledger.didcomm, MessageLedger(accepted=72, acknowledged=8, expired=1, waiting=63))
        self.assertEqual(ledger.decentrl, MessageLedger(accepted=8, acknowledged=8))


class PageTests(CostTestCase):
    """A commit writes the pages that it has changed."""

    def count_pages(self, works: Sequence[SQLOperation]) -> int:
        """Number of pages written."""
        self.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        self.commit(works)
        return (self.path.with_name(self.path.name + "-wal").stat().st_size - 32) // (4096 + 24)

    def test_enqueue_writes_few_pages(self) -> None:
        """Two messages of 1900 bytes fit on a page; a few more pages are for indexes and counters."""
        self.commit(self.make_enqueues(32))
        self.assertLessEqual(self.count_pages(self.make_enqueues(32, size=1_880)), 16 + 10)

    def test_pages_do_not_grow_with_queues(self) -> None:
        """With four times as many messages queued, only the depth of the trees adds pages."""
        found = []
        for batches in (24, 72):
            for _ in range(batches):
                self.commit(self.make_enqueues(100, size=100))
            found.append(self.count_pages(self.make_enqueues(32, size=1_880)))
        self.assertLessEqual(found[1], found[0] + 4)


class QueueCacheTests(CostTestCase):
    """The cache of queues in a connection is never stale."""

    limits = QueueLimits(max_messages=2, max_bytes=1 << 40)

    def test_sees_removal_by_other_process(self) -> None:
        """Messages removed by another process make room."""
        (first,) = self.commit(self.make_enqueues(1))
        self.number += len(DIDS) - 1
        self.commit(self.make_enqueues(1))
        other = connect(self.path)
        self.addCleanup(other.close)
        other.execute("BEGIN IMMEDIATE")
        self.assertEqual(len(message_writes.purge_messages(other, [first.messages[0].id])), 1)
        other.execute("COMMIT")
        self.number += len(DIDS) - 1
        (third,) = self.commit(self.make_enqueues(1, limits=self.limits))
        self.assertEqual(third.evicted, ())
        self.number += len(DIDS) - 1
        (fourth,) = self.commit(self.make_enqueues(1, limits=self.limits))
        self.assertEqual(len(fourth.evicted), 1)

    def test_sees_change_of_account(self) -> None:
        """A DID registered by another account gets a new queue."""
        self.commit(self.make_enqueues(8))

        def change_owner(connection: StoreConnection) -> None:
            account_queries.update_recipients(connection, ALICE, [(did, "remove") for did in DIDS], 99)
            account_queries.update_recipients(connection, BOB, [(did, "add") for did in DIDS], 99)

        self.commit([change_owner])
        enqueued = self.commit(self.make_enqueues(8))
        self.assertEqual({message.account for result in enqueued for message in result.messages}, {BOB})
        queues = self.connection.execute("SELECT account_id, sum(messages) FROM queue GROUP BY 1").fetchall()
        self.assertEqual(queues, [(1, 8), (2, 8)])

    def test_rollback_clears_cache(self) -> None:
        """Rolled back changes are not cached."""
        self.commit(self.make_enqueues(8))

        def fail(_connection: Connection) -> None:
            raise RuntimeError

        outcomes = self.connection.commit_batch([*self.make_enqueues(8), fail])
        self.assertEqual([isinstance(outcome, EnqueueResult) for outcome in outcomes], [True] * 8 + [False])
        self.commit(self.make_enqueues(8))
        cache = self.connection._cache
        assert cache is not None
        found = cache.find(self.connection, DIDS)
        self.assertEqual([queue.messages for queue in found.values()], [3] * 8)

    def test_bounds_cached_sender_usage(self) -> None:
        """Sender usage is cached for a few queues, those used last."""
        self.patch(message_writes, "CACHED_EVICTION_STATES", 2)
        limits = QueueLimits(max_messages=1, max_bytes=1 << 40, share=0.5, reserved=0.1)
        self.commit(self.make_enqueues(len(DIDS)))
        for number, position in enumerate((0, 1, 0, 2)):
            self.number = position - 1
            (work,) = self.make_enqueues(1, limits=limits)
            assert isinstance(work, EnqueueOperation)
            work.request.payloads = (make_payload(f"{number} full"),)
            self.commit([work])
        cache = self.connection._cache
        assert cache is not None
        queues = cache.find(self.connection, [DIDS[0], DIDS[2]])
        self.assertEqual(list(cache.eviction_states), [queue.recipient_id for queue in queues.values()])

    def test_eviction_leaves_no_garbage(self) -> None:
        """Data read for an eviction is freed at once, without a garbage collection."""
        limits = QueueLimits(max_messages=1, share=0.5, reserved=0.1)
        self.commit(self.make_enqueues(len(DIDS)))
        gc.collect()  # garbage of other tests
        gc.disable()
        self.addCleanup(gc.enable)
        self.commit(self.make_enqueues(len(DIDS), limits=limits))
        self.assertEqual([obj for obj in gc.get_objects() if type(obj) is message_writes._EvictionScan], [])

    def test_bounds_cached_known_senders(self) -> None:
        """Known senders are cached for a few queues and read from the database for others."""
        self.patch(message_writes, "CACHED_SENDER_SETS", 3)
        for more, now in (0, NOON), (len(DIDS), NOON + HOUR):
            works = self.make_enqueues(len(DIDS))
            for work in works:
                assert isinstance(work, EnqueueOperation)
                work.request.origin = 5 << 32 | 7
            self.commit(works)
            # The first recipient is used last.
            positions = [*range(2, len(DIDS) + 1), 1]
            self.commit([RemoveOperation([f"{more + position:032d}"], ALICE, now) for position in positions])
            cache = self.connection._cache
            assert cache is not None
            queues = cache.find(self.connection, [DIDS[position % len(DIDS)] for position in positions]).values()
            self.assertEqual([queue.recipient_id in cache.senders for queue in queues], [False] * 5 + [True] * 3)
        texts = self.connection.execute("SELECT senders FROM recipient WHERE registered IS NOT NULL").fetchall()
        self.assertEqual([KnownSenders(text).known for (text,) in texts], [{7}] * len(DIDS))

    def test_bounds_cached_queues(self) -> None:
        """A bounded number of queues is cached, those used last."""
        cache = QueueCache(capacity=3)
        for did in DIDS:
            cache.find(self.connection, [did])
            cache.find(self.connection, DIDS[:1])
        statements: list[str] = []
        self.connection.set_trace_callback(statements.append)
        cache.find(self.connection, [DIDS[0], DIDS[-1]])
        self.assertEqual(statements, [])
        cache.find(self.connection, [DIDS[1]])
        self.assertEqual(len(statements), 1)


class BatchSizeTests(CommitTestCase):
    """Long transactions are split, as nobody else can write meanwhile."""

    def test_digests_are_compared_in_parts(self) -> None:
        """Digests of an account are compared for a few recipients at a time."""
        self.patch(message_queries, "COMPARED_AT_A_TIME", 1)
        self.finish(self.store.update_recipients(ALICE, [(did, "add") for did in DIDS], max_recipients=99))
        for position, did in enumerate(DIDS):
            self.finish(self.enqueue_ids(f"m{position}", to=did))
        wanted = [sha256(make_payload(f"m{position}").data).hexdigest() for position in (6, 1)]
        before = self.reader.calls
        acknowledged = self.store.acknowledge(ALICE, wanted)
        for _ in range(9):
            self.run_iterations()
        self.assertEqual([item.id for item in self.successResultOf(acknowledged)], ["m1", "m6"])
        self.assertEqual(self.reader.calls - before, len(DIDS))


class ManualRunner:
    """Runner whose work ends when the test says so."""

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
    """Clock with iterations: calls without a delay are made in the next one."""

    def run_iteration(self, seconds: float = 0.0) -> None:
        """Run one iteration, so long after the last."""
        self.rightNow += seconds
        due = [call for call in self.calls if call.getTime() <= self.rightNow]
        for call in due:
            self.calls.remove(call)
            call.called = 1
            call.func(*call.args, **call.kw)


class GroupCommitDelayTests(SynchronousTestCase):
    """On a slow disk one sync has to serve as many operations as possible."""

    def setUp(self) -> None:
        self.clock = IterationClock()
        self.runner = ManualRunner()
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

    def submit(self, number: int) -> None:
        for _ in range(number):
            self.batches.submit("x", [(lambda connection: None, 0)])

    def finish_commit(self, seconds: float) -> None:
        """The running commit ends so long after the last iteration."""
        self.clock.run_iteration(seconds)
        self.runner.finish()

    def run_first_batch(self, number: int, seconds: float) -> None:
        """A batch of one operation that takes so long, while operations of the next batch arrive."""
        self.submit(1)
        self.clock.run_iteration()
        self.clock.run_iteration()
        self.submit(number)
        self.finish_commit(seconds)

    def test_waits_for_clients_of_last_commit(self) -> None:
        """Clients answered by a slow commit join the next one with those already waiting."""
        self.run_first_batch(16, 0.05)
        for _ in range(4):
            self.submit(4)
            self.clock.run_iteration(0.001)
        self.clock.run_iteration()
        self.runner.finish()
        self.assertEqual(self.sizes, [1, 32])

    def test_waits_half_of_last_commit(self) -> None:
        """The delay is at most half of the last commit, however many operations arrive."""
        self.run_first_batch(2, 0.004)
        for _ in range(9):
            self.submit(1)
            self.clock.run_iteration(0.0011)
        self.runner.finish()
        self.assertEqual(self.sizes, [1, 4])

    def test_starts_when_nothing_arrives(self) -> None:
        """The commit starts when an iteration has brought no operation."""
        self.run_first_batch(2, 0.05)
        self.clock.run_iteration()
        self.assertEqual(len(self.runner.waiting), 0)
        self.clock.run_iteration()
        self.assertEqual(len(self.runner.waiting), 1)

    def test_one_client_does_not_wait(self) -> None:
        """An operation that comes alone after one that was alone waits for no iteration; after several it waits."""
        self.run_first_batch(0, 0.05)
        self.submit(1)
        self.clock.run_iteration()
        self.assertEqual(len(self.runner.waiting), 1)
        self.submit(2)
        self.finish_commit(0.05)
        self.clock.run_iteration()
        self.clock.run_iteration()
        self.finish_commit(0.05)
        self.submit(1)
        self.clock.run_iteration()
        self.assertEqual(len(self.runner.waiting), 0)
        self.clock.run_iteration()
        self.assertEqual(len(self.runner.waiting), 1)


class FollowUpRunner:
    """Runner that works synchronously and calls a function afterwards."""

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


class WriteAheadLogReuseTests(SynchronousTestCase):
    """The write-ahead log is reused from its start under continuous load."""

    def test_log_does_not_grow(self) -> None:
        """The log does not grow although something is committed after every checkpoint."""
        self.patch(executor, "WAL_REUSE_BYTES", 100_000)
        clock, path, survey = ImmediateClock(), make_database_path(self), FollowUpRunner()
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


class AccountCacheTests(SynchronousTestCase):
    """An account is looked up once, and again when it may have changed."""

    def setUp(self) -> None:
        self.lookups: list[str] = []

    def make_store(self, *, shared: bool = False) -> SQLiteStore:
        """A store with Alice and Bob that records its lookups."""
        store = make_sqlite_store(
            ImmediateClock(), make_database_path(self), LIMITS, shared=shared, observe=self.record_lookup
        )
        self.successResultOf(store.open())
        self.addCleanup(store.close)
        for did in (ALICE, BOB):
            self.successResultOf(store.grant(did))
        return store

    def record_lookup(self, operation: str, _: float) -> None:
        """Record the names of lookups."""
        if operation == "account":
            self.lookups.append(operation)

    def test_looks_up_once(self) -> None:
        """An account is looked up once, and again after a while, which is shorter if other processes use the file."""
        for shared, seconds in ((False, ACCOUNT_CACHE_SECONDS), (True, SHARED_ACCOUNT_CACHE_SECONDS)):
            store = self.make_store(shared=shared)
            now = store._clock.seconds()
            self.lookups = []
            for later, lookups in ((0.0, 1), (seconds - 0.1, 1), (seconds, 2)):
                self.patch(store._accounts, "_now", lambda now=now + later: now)
                for _ in range(2):
                    account = self.successResultOf(store.get_account(ALICE))
                    self.assertEqual(account and account.did, ALICE)
                self.assertEqual(len(self.lookups), lookups)

    def test_changes_are_visible_at_once(self) -> None:
        """Changes through the store are visible at once; absent accounts are not cached."""
        store = self.make_store()
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
