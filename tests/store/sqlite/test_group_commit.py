"""Group commit of the SQLite store."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from twisted.trial.unittest import SynchronousTestCase

from mediatord.errors import MediationNotGranted, ReplayCacheFull, StoreUnavailable, UnknownRecipient
from mediatord.store.interfaces.messages import (
    AcknowledgementRequest,
    AcknowledgementResult,
    EnqueueRequest,
    EnqueueResult,
)
from mediatord.store.interfaces.store import BatchLimits
from mediatord.store.sqlite.connection import StoreConnection
from mediatord.store.sqlite.database_file import open_database
from mediatord.store.sqlite.executor import write_ping
from tests.store.builders import ALICE, BOB, NOON, make_database_path, make_payload
from tests.store.sqlite.commit_test_case import INBOX, CommitTestCase, count_wal_commits


class GroupCommitTests(CommitTestCase):
    """One transaction for all waiting operations (reference 12)."""

    def test_one_commit_per_iteration(self) -> None:
        """Operations of one reactor iteration, of any kind, are committed once."""
        before = count_wal_commits(self.path)
        deferreds = [self.enqueue_ids(f"m{number}") for number in range(100)]
        granted = self.store.grant(BOB)
        claimed = self.store.claim_nonce(b"key", NOON + 60)
        self.run_iterations()
        for enqueued in deferreds:
            self.successResultOf(enqueued)
        self.successResultOf(granted)
        self.assertTrue(self.successResultOf(claimed))
        self.assertEqual(count_wal_commits(self.path) - before, 1)
        self.assertEqual(self.list_stored(), [f"m{number}" for number in range(100)])

    def test_waits_for_running_commit(self) -> None:
        """Operations that arrive during a transaction share the next one."""
        before = count_wal_commits(self.path)
        self.writer.hold()
        first = self.enqueue_ids("first")
        self.run_iterations()
        others = []
        for number in range(50):
            others.append(self.enqueue_ids(f"m{number}"))
            self.run_iterations()
        self.writer.release()
        self.run_iterations()
        for enqueued in (first, *others):
            self.successResultOf(enqueued)
        self.assertEqual(count_wal_commits(self.path) - before, 2)
        self.assertEqual(self.observed.count("commit"), 2)

    def test_fires_after_commit(self) -> None:
        """No Deferred fires before its operation is committed."""
        self.writer.hold()
        enqueued = self.enqueue_ids("a")
        self.run_iterations()
        self.assertNoResult(enqueued)
        self.assertEqual(self.list_stored(), [])
        self.writer.release()
        self.successResultOf(enqueued)
        self.assertEqual(self.list_stored(), ["a"])

    def test_reads_continue_during_write(self) -> None:
        """Reads continue while a write is blocked."""
        self.finish(self.enqueue_ids("a"))
        self.writer.hold()
        stuck = self.enqueue_ids("b")
        self.run_iterations()
        self.assertEqual(self.finish(self.store.find_owner(INBOX)), ALICE)
        self.assertEqual(self.finish(self.store.get_queue_status(ALICE, None)).message_count, 1)
        self.assertEqual(self.list_stored(), ["a"])
        self.assertNoResult(stuck)

    def test_reads_of_an_iteration_share_a_thread_call(self) -> None:
        """All lookups of an iteration take one call of the reading thread."""
        before = self.reader.calls
        deferreds = [self.store.find_owner(f"did:example:{number}") for number in range(100)]
        deferreds += [self.store.find_owner(INBOX), self.store.find_owner(INBOX)]
        self.run_iterations()
        self.assertEqual([self.successResultOf(owner) for owner in deferreds], [None] * 100 + [ALICE] * 2)
        self.assertEqual(self.reader.calls - before, 1)

    def test_owner_is_cached(self) -> None:
        """The owner of a DID is read once, and again when its registration may have changed."""
        self.finish(self.store.find_owner(INBOX))
        before = self.reader.calls
        self.assertEqual(self.successResultOf(self.store.find_owner(INBOX)), ALICE)
        self.assertEqual(self.reader.calls, before)
        self.finish(self.store.update_recipients(ALICE, [(INBOX, "remove")], max_recipients=9))
        self.assertIsNone(self.finish(self.store.find_owner(INBOX)))

    def test_stale_owner_is_not_cached(self) -> None:
        """A result that was pending while the registration changed is not cached."""
        self.reader.hold()
        lookup = self.store.find_owner(INBOX)
        self.run_iterations()
        self.finish(self.store.update_recipients(ALICE, [(INBOX, "remove"), (INBOX, "add")], max_recipients=9))
        self.reader.release()
        self.assertEqual(self.successResultOf(lookup), ALICE)
        before = self.reader.calls
        self.finish(self.store.find_owner(INBOX))
        self.assertEqual(self.reader.calls - before, 1)

    def test_refused_enqueue_fails_alone(self) -> None:
        """An enqueue to an unknown recipient fails alone, in one transaction with others."""
        before = count_wal_commits(self.path)
        deferreds = self.enqueue_ids("a"), self.enqueue_ids("b", to="did:example:nobody"), self.enqueue_ids("c")
        self.run_iterations()
        self.successResultOf(deferreds[0])
        self.failureResultOf(deferreds[1], UnknownRecipient)
        self.successResultOf(deferreds[2])
        self.assertEqual(self.list_stored(), ["a", "c"])
        self.assertEqual(count_wal_commits(self.path) - before, 1)

    def test_acknowledgements_share_commit(self) -> None:
        """Messages are removed and statuses are read in one transaction."""
        self.finish(self.enqueue_ids("a", "b", "c"))
        commits, reads = count_wal_commits(self.path), self.reader.calls
        requests = [AcknowledgementRequest(ALICE, [id], with_status=True) for id in ("a", "b")]
        for done in self.finish(self.store.acknowledge_each(requests)):
            assert isinstance(done, AcknowledgementResult) and done.status is not None
            self.assertEqual((len(done.removed), done.status.message_count), (1, 1))
        self.assertEqual((count_wal_commits(self.path) - commits, self.reader.calls - reads), (1, 0))

    def test_refused_claim_takes_no_extra_commits(self) -> None:
        """A claim beyond the capacity costs the others of its batch no commits of their own."""
        before = count_wal_commits(self.path)
        deferreds = self.enqueue_ids("a"), self.store.claim_nonce(b"key", NOON + 60, share=0.0), self.enqueue_ids("c")
        self.run_iterations()
        self.successResultOf(deferreds[0])
        self.failureResultOf(deferreds[1], ReplayCacheFull)
        self.successResultOf(deferreds[2])
        self.assertEqual(self.list_stored(), ["a", "c"])
        self.assertEqual(count_wal_commits(self.path) - before, 1)

    def test_failing_operation_is_undone_alone(self) -> None:
        """An operation that the database rejects fails and is undone alone."""
        deferreds = self.enqueue_ids("a"), self.enqueue_ids("b", "b"), self.enqueue_ids("c")
        self.run_iterations()
        self.successResultOf(deferreds[0])
        self.failureResultOf(deferreds[1], StoreUnavailable)
        self.successResultOf(deferreds[2])
        self.assertEqual(self.list_stored(), ["a", "c"])

    def test_close_finishes_pending_operations(self) -> None:
        """Closing waits for accepted operations, refuses later ones, and leaves no write-ahead log."""
        self.writer.hold()
        running = self.enqueue_ids("running")
        self.run_iterations()
        waiting = self.enqueue_ids("waiting")
        closed = self.store.close()
        self.failureResultOf(self.enqueue_ids("late"), StoreUnavailable)
        self.run_iterations()
        self.assertNoResult(closed)
        self.writer.release()
        self.run_iterations()
        self.successResultOf(running)
        self.successResultOf(waiting)
        self.successResultOf(closed)
        self.assertEqual([path.name for path in self.path.parent.iterdir()], [self.path.name])

    def test_observer_gets_operations_and_commits(self) -> None:
        """The observer is called for each operation and each commit."""
        self.finish(self.enqueue_ids("a"))
        self.finish(self.store.ping())
        self.assertEqual(self.observed, ["commit", "enqueue", "commit", "ping", "ping"])


class OutcomeTests(SynchronousTestCase):
    """Outcomes of works."""

    def setUp(self) -> None:
        self.connection = open_database(make_database_path(self))
        self.addCleanup(self.connection.close)

    def write_and_ping(self, answer: object) -> Callable[[StoreConnection], object]:
        """A work that writes and has this outcome."""

        def work(connection: StoreConnection) -> object:
            write_ping(connection)
            return answer

        return work

    def test_returned_refusal_keeps_writes(self) -> None:
        """A work that returns its refusal instead of raising it keeps its writes."""
        refusal = MediationNotGranted()
        outcomes = self.connection.commit_batch(
            [self.write_and_ping("first"), self.write_and_ping(refusal), self.write_and_ping("last")]
        )
        self.assertEqual(outcomes, ["first", refusal, "last"])
        self.assertFalse(self.connection.in_transaction)
        pings = self.connection.execute("SELECT value FROM counter WHERE name = 'pings'").fetchone()
        self.assertEqual(pings, (3,))


class BatchLimitTests(CommitTestCase):
    """Limits of a batch and of waiting operations."""

    write_limits = BatchLimits(batch=4, batch_bytes=100, waiting=6, waiting_bytes=250)
    read_limits = BatchLimits(batch_bytes=100, waiting_bytes=1 << 40)

    def test_limits_operations_per_batch(self) -> None:
        """A bounded number of operations shares a transaction."""
        before = count_wal_commits(self.path)
        deferreds = [self.store.claim_nonce(b"%d" % number, NOON + 9) for number in range(6)]
        self.run_iterations()
        self.assertEqual([self.successResultOf(claimed) for claimed in deferreds], [True] * 6)
        self.assertEqual(count_wal_commits(self.path) - before, 2)

    def test_reports_requests_with_their_batch(self) -> None:
        """Requests enqueued together that take several commits are each reported after their own."""
        before, reported = count_wal_commits(self.path), []
        deposits = [EnqueueRequest(INBOX, (make_payload(id, b"x"),), NOON + 9) for id in "abcdef"]

        def record_early(outcomes: Sequence[tuple[int, object]]) -> None:
            reported.append(
                ([position for position, _ in outcomes], count_wal_commits(self.path) - before, done.called)
            )

        done = self.store.enqueue_each(deposits, record_early)
        self.run_iterations()
        stored = self.successResultOf(done)
        self.assertEqual([item.messages[0].id for item in stored if isinstance(item, EnqueueResult)], list("abcdef"))
        self.assertEqual(reported, [([0, 1, 2, 3], 1, False)])

    def test_failing_listener_does_not_stop_store(self) -> None:
        """The store goes on if the listener raises an exception."""

        def record_early(outcomes: Sequence[tuple[int, object]]) -> None:
            raise ZeroDivisionError

        done = self.store.enqueue_each(
            [EnqueueRequest(INBOX, (make_payload(id, b"x"),), NOON + 9) for id in "abcdef"], record_early
        )
        self.run_iterations()
        self.assertEqual(len(self.successResultOf(done)), 6)
        self.finish(self.enqueue_ids("g"))

    def test_limits_bytes_per_batch(self) -> None:
        """A bounded number of bytes shares a transaction, but at least one operation."""
        before = count_wal_commits(self.path)
        deferreds = [
            self.enqueue_ids(id, data=b"x" * size) for id, size in (("a", 60), ("b", 60), ("c", 40), ("d", 10))
        ]
        self.finish(deferreds[-1])
        self.assertEqual(count_wal_commits(self.path) - before, 3)
        self.finish(self.enqueue_ids("e", data=b"x" * 200))
        self.assertEqual(self.list_stored(), ["a", "b", "c", "d", "e"])

    def test_limits_bytes_per_read_batch(self) -> None:
        """A read batch is bounded in bytes, though any number of reads may wait."""
        self.finish(self.enqueue_ids("a", data=b"x" * 30))
        before = self.reader.calls
        deferreds = [self.store.fetch_messages(ALICE, None, limit=9, max_bytes=50) for _ in range(6)]
        for _ in deferreds:
            self.run_iterations()
        self.assertEqual([len(self.successResultOf(fetched)) for fetched in deferreds], [1] * 6)
        self.assertEqual(self.reader.calls - before, 3)

    def test_limits_waiting_operations(self) -> None:
        """Beyond a number of waiting operations more fail at once, until some are done (back-pressure)."""
        deferreds = [self.enqueue_ids(f"m{number}") for number in range(6)]
        self.failureResultOf(self.enqueue_ids("refused"), StoreUnavailable)
        self.run_iterations()
        for enqueued in deferreds:
            self.successResultOf(enqueued)
        self.finish(self.enqueue_ids("next"))
        self.assertNotIn("refused", self.list_stored())

    def test_limits_waiting_bytes(self) -> None:
        """Beyond a number of waiting bytes more fail at once, until some are written (back-pressure)."""
        self.enqueue_ids("a", data=b"x" * 200)
        self.failureResultOf(self.enqueue_ids("refused", data=b"x" * 51), StoreUnavailable)
        self.enqueue_ids("b", data=b"x" * 50)
        self.run_iterations()
        self.finish(self.enqueue_ids("c", data=b"x" * 250))
        self.assertEqual(self.list_stored(), ["a", "b", "c"])
