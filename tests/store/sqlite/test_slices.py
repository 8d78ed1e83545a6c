"""Slices of long work: expiry and pruning, between which others write."""

from __future__ import annotations

from contextlib import closing
from functools import partial
from sqlite3 import OperationalError
from typing import Any
from unittest import mock

from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from mediatord.errors import StoreUnavailable
from mediatord.store.interfaces.messages import QueueLimits, RemovedMessage
from mediatord.store.interfaces.store import NONCE_GRACE_SECONDS
from mediatord.store.sqlite import account_queries, coordination_queries, executor, sqlite_store
from mediatord.store.sqlite.connection import StoreConnection, connect
from mediatord.store.sqlite.database_file import open_database
from mediatord.store.sqlite.executor import SLICE_PATIENCE, SLICE_SECONDS, SLICES_PER_CHECKPOINT, SliceSize
from mediatord.store.sqlite.sqlite_store import EXPIRY_SLICE_BYTES, EXPIRY_SLICE_ROWS
from tests.store.builders import HOUR, NOON, HoldableRunner, ImmediateClock, make_database_path, make_sqlite_store
from tests.store.sqlite.commit_test_case import CommitTestCase, count_wal_commits

DAY = 24 * HOUR
MOST_ROWS = EXPIRY_SLICE_ROWS[1]


class SliceTestCase(CommitTestCase):
    """Expired messages, which are removed in slices of the largest size."""

    def setUp(self) -> None:
        self.patch(sqlite_store, "EXPIRY_SLICE_ROWS", (MOST_ROWS, MOST_ROWS))
        super().setUp()

    def add_expired(self, number: int, size: int = 10) -> None:
        """So many expired messages."""
        for first in range(0, number, 100):
            names = [f"m{position:05d}" for position in range(first, min(first + 100, number))]
            self.finish(self.enqueue_ids(*names, data=b"x" * size))
        self.clock.advance(HOUR)
        self.run_iterations()
        self.observed.clear()

    def expire(self, limit: int) -> Deferred[list[RemovedMessage]]:
        return self.store.expire_messages(limit)

    def list_operations(self) -> list[str]:
        return [name for name in self.observed if name not in ("commit", "checkpoint")]


class SliceBoundTests(SliceTestCase):
    """A slice is bounded in rows and in bytes."""

    def test_rows(self) -> None:
        """A transaction removes a bounded number of messages, whatever the limit of the call."""
        self.add_expired(500)
        removed = self.finish(self.expire(500))
        self.assertEqual([one.id for one in removed], [f"m{position:05d}" for position in range(500)])
        self.assertEqual(self.observed.count("commit"), -(-500 // MOST_ROWS))
        self.assertLessEqual(MOST_ROWS, 64)

    def test_bytes(self) -> None:
        """A transaction removes a bounded number of bytes, but at least one message."""
        self.add_expired(4, EXPIRY_SLICE_BYTES // 2 + 1)
        self.assertEqual(len(self.finish(self.expire(3))), 3)
        self.assertEqual(self.observed.count("commit"), 3)

    def test_accounts_with_their_names(self) -> None:
        """A slice of expired accounts counts their registered names as well, and removes at least one account."""
        with closing(open_database(make_database_path(self))) as connection:
            for account, names in enumerate((30, 3, 3, 0, 0)):
                did = f"did:example:{account}"
                account_queries.grant_account(connection, did, NOON + account)
                account_queries.update_recipients(connection, did, [(f"{did}-{n}", "add") for n in range(names)], 99)
            numbers = [len(account_queries.expire_accounts(connection, 8, 64, NOON + DAY, None)) for _ in range(3)]
        self.assertEqual(numbers, [1, 2, 2])

    def test_nonces(self) -> None:
        """A slice deletes a bounded number of nonces and reads more; one that deletes none writes nothing."""
        path = make_database_path(self)
        with closing(open_database(path)) as connection:
            claims = [
                coordination_queries.NonceClaim(b"%d" % number, NOON + (number >= 500) * DAY, NOON)
                for number in range(1_000)
            ]
            connection.commit_batch(claims)
            commits, now, deleted = count_wal_commits(path), NOON + HOUR, list[int]()
            place: int | None = 0
            while place is not None:
                prune = partial(coordination_queries.prune_nonces, rows=50, now=now, after=place)
                ((number, place),) = connection.commit_batch([prune])
                deleted.append(number)
            commits = count_wal_commits(path) - commits
        self.assertGreater(HOUR, NONCE_GRACE_SECONDS)
        self.assertEqual(deleted, [50] * 10 + [0] * 2)
        self.assertEqual(commits, 10)


class SliceOrderTests(SliceTestCase):
    """Others go first."""

    def test_slices_are_withdrawn_before_batch_begins(self) -> None:
        """A batch that was begun for a slice alone is dropped when a checkpoint begins in the same iteration."""
        self.add_expired(1)
        writes: Any = self.store._executor
        batcher, calls = writes._writes, self.writer.calls
        expired = self.expire(1)
        batcher.permit_slices(0)
        self.run_iterations()
        self.assertNoResult(expired)
        self.assertEqual((batcher.is_busy, self.writer.calls), (False, calls))
        batcher.permit_slices(SLICES_PER_CHECKPOINT)
        self.assertEqual(len(self.finish(expired)), 1)

    def test_forward_during_slice_precedes_next_slice(self) -> None:
        """A forward that arrives during a slice is committed before the next one, in a transaction of its own."""
        self.add_expired(3 * MOST_ROWS)
        self.writer.hold()
        expired = self.expire(3 * MOST_ROWS)
        self.run_iterations()
        forward = self.enqueue_ids("late")
        order: list[str] = []
        forward.addCallback(lambda _: order.append(f"late, {len(self.list_operations())} operations"))
        self.run_iterations()
        self.writer.release()
        self.run_iterations()
        self.assertEqual(len(self.successResultOf(expired)), 3 * MOST_ROWS)
        self.assertEqual(self.list_operations(), ["expire", "enqueue", "expire", "expire"])
        self.assertEqual(order, ["late, 2 operations"])
        self.assertEqual(self.observed.count("commit"), 4)

    def test_slice_joins_busy_writer(self) -> None:
        """Under continuous load a slice joins a batch after a short time, and no batch has two."""
        self.add_expired(9 * MOST_ROWS)
        self.writer.hold()
        forwards = [self.enqueue_ids("first")]
        self.run_iterations()
        expired = [self.expire(MOST_ROWS) for _ in range(2)]
        for position in range(5):
            forwards.append(self.enqueue_ids(f"busy{position}"))
            self.clock.advance(SLICE_PATIENCE / 4)
            self.writer.release()
            self.writer.hold()
            self.clock.advance(0)
        operations = self.list_operations()
        self.assertEqual(operations, ["enqueue"] * 4 + ["expire", "enqueue"])
        forwards.append(self.enqueue_ids("last"))
        self.writer.release()
        self.run_iterations()
        self.assertEqual(self.list_operations()[6:], ["expire", "enqueue", "enqueue"])
        for forward in forwards:
            self.successResultOf(forward)
        for one in expired:
            self.successResultOf(one)

    def test_close_finishes_accepted_slices(self) -> None:
        """Closing waits for a slice that was accepted."""
        self.add_expired(2)
        self.writer.hold()
        running = self.enqueue_ids("running")
        self.run_iterations()
        expired = self.expire(2)
        closed = self.store.close()
        self.writer.release()
        self.run_iterations()
        self.successResultOf(running)
        self.assertEqual(len(self.successResultOf(expired)), 2)
        self.successResultOf(closed)


class SliceDurabilityTests(CommitTestCase):
    """Nobody waits for a slice to be on disk, so it does not keep others from syncing."""

    def write_slice(self) -> Deferred[Any]:
        return self.store._executor.write_slice("slice", SliceSize(1, 1), read_synchronous)

    def test_slice_alone_is_not_synced(self) -> None:
        """A transaction with nothing but a slice does not wait for the disk; the next one of others does."""
        for _ in range(2):
            self.assertEqual(self.finish(self.write_slice()), NORMAL)
            self.assertEqual(self.finish(self.store._executor.write("other", read_synchronous)), FULL)

    def test_commit_after_a_failed_slice_is_synced(self) -> None:
        """Also after a slice that has changed something and is rolled back."""

        def fail(connection: StoreConnection, rows: int) -> None:
            write_something(connection, rows)
            raise ZeroDivisionError

        failed = self.store._executor.write_slice("slice", SliceSize(1, 1), fail)
        self.run_iterations()
        self.failureResultOf(failed, StoreUnavailable)
        self.assertEqual(self.finish(self.store._executor.write("other", read_synchronous)), FULL)

    def test_commit_after_a_failed_change_of_syncs_is_synced(self) -> None:
        """If syncs cannot be switched on again, nothing is written; the next try does."""
        self.assertEqual(self.finish(self.write_slice()), NORMAL)
        with mock.patch.object(StoreConnection, "set_durable", side_effect=OperationalError("interrupted")):
            refused = self.store._executor.write("other", read_synchronous)
            self.run_iterations()
        self.failureResultOf(refused, StoreUnavailable)
        self.assertEqual(self.finish(self.store._executor.write("other", read_synchronous)), FULL)

    def test_slice_with_others_is_synced(self) -> None:
        """A transaction of others waits for the disk, also if a slice has joined it."""
        self.writer.hold()
        self.store._executor.write("first", read_synchronous)
        self.run_iterations()
        slice_ = self.write_slice()
        other = self.store._executor.write("other", read_synchronous)
        self.clock.advance(2 * SLICE_PATIENCE)
        self.writer.release()
        self.run_iterations()
        self.assertEqual((self.successResultOf(slice_), self.successResultOf(other)), (FULL, FULL))
        self.assertEqual(self.observed.count("commit"), 2)


# Values of `PRAGMA synchronous`.
NORMAL, FULL = 1, 2


def read_synchronous(connection: StoreConnection, rows: int = 1) -> int:
    return int(connection.select_value("PRAGMA synchronous"))


class SliceCheckpointTests(SynchronousTestCase):
    """Slices wait for checkpoints, so that each has little to move."""

    def setUp(self) -> None:
        self.clock = Clock()
        self.writer, self.background = HoldableRunner(), HoldableRunner()
        self.observed: list[str] = []
        self.path = make_database_path(self)
        self.store = make_sqlite_store(
            self.clock,
            self.path,
            QueueLimits(),
            write=self.writer,
            background=self.background,
            observe=lambda name, _: self.observed.append(name),
        )
        self.successResultOf(self.store.open())
        self.addCleanup(self.close_store)

    def close_store(self) -> None:
        self.background.release()
        closed = self.store.close()
        self.clock.pump([0, 0, 0])
        self.successResultOf(closed)

    def write_slices(self, number: int) -> list[Deferred[Any]]:
        size = SliceSize(1, 1)
        done = [self.store._executor.write_slice("slice", size, write_something) for _ in range(number)]
        self.clock.pump([0] * 3 * number)
        return done

    def test_checkpoint_after_few_slices(self) -> None:
        """After a few slices there is a checkpoint, for which others wait and forwards do not."""
        self.background.hold()
        done = self.write_slices(SLICES_PER_CHECKPOINT + 2)
        self.assertEqual([one.called for one in done], [True] * SLICES_PER_CHECKPOINT + [False] * 2)
        granted = self.store.grant("did:example:a")
        self.clock.pump([0, 0])
        self.successResultOf(granted)
        self.assertNotIn("checkpoint", self.observed)
        self.background.release()
        self.clock.pump([0] * 6)
        self.assertEqual([one.called for one in done], [True] * len(done))
        self.assertEqual(self.observed.count("checkpoint"), 1)

    def test_checkpoint_that_is_due_at_once_leaves_no_timer(self) -> None:
        """The store closes after the checkpoint of slices that were written before and after it was reopened."""
        store = make_sqlite_store(ImmediateClock(), self.path.with_name("other"))
        for number in (SLICES_PER_CHECKPOINT - 1, 1):
            self.successResultOf(store.open())
            for _ in range(number):
                self.successResultOf(store._executor.write_slice("slice", SliceSize(1, 1), write_something))
            self.successResultOf(store.close())

    def test_failed_checkpoint_holds_no_slice(self) -> None:
        """Slices go on after a checkpoint that failed."""
        self.patch(executor, "_checkpoint", lambda connection: 1 // 0)
        for one in self.write_slices(2 * SLICES_PER_CHECKPOINT + 1):
            self.successResultOf(one)
        self.flushLoggedErrors()

    def test_idle_writer_is_not_asked(self) -> None:
        """A log that was moved completely needs nothing of the thread that writes, if nothing else is written."""
        self.patch(executor, "WAL_REUSE_BYTES", 0)
        self.successResultOf(self.write_slices(1)[0])
        before = self.writer.calls
        self.clock.advance(executor.CHECKPOINT_INTERVAL_SECONDS)
        self.assertEqual(self.observed.count("checkpoint"), 1)
        self.assertEqual(self.writer.calls, before)
        with closing(connect(self.path)) as connection:
            _, pages, moved = connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        self.assertEqual(pages, moved)


def write_something(connection: StoreConnection, rows: int) -> None:
    connection.execute("UPDATE counter SET value = value + ? WHERE name = 'pings'", (rows,))


class SliceSizeTests(SynchronousTestCase):
    """The size of slices follows their duration."""

    def setUp(self) -> None:
        self.now = 0.0
        self.size = SliceSize(4, 64, lambda: self.now)

    def perform(self, seconds_per_row: float) -> int:
        """Perform a slice; returns its rows."""

        def work(connection: Any, rows: int) -> int:
            self.now += rows * seconds_per_row
            return rows

        return self.size.perform(work, None)  # type: ignore[arg-type]

    def test_grows_to_the_most(self) -> None:
        """It begins with the least, and doubles while slices are short."""
        self.assertEqual([self.perform(0.0) for _ in range(6)], [4, 8, 16, 32, 64, 64])

    def test_takes_as_long_as_wanted(self) -> None:
        """It converges to the wanted duration, within a factor of two, whatever the cost of a row is."""
        for seconds in (SLICE_SECONDS / 40, SLICE_SECONDS / 10, SLICE_SECONDS / 25):
            for _ in range(6):
                rows = self.perform(seconds)
            self.assertLessEqual(rows * seconds, SLICE_SECONDS * 1.01)
            self.assertGreater(rows * seconds, SLICE_SECONDS / 2)

    def test_shrinks_to_the_least(self) -> None:
        """A slice that took long is followed by one of the least size, so that the work proceeds."""
        for _ in range(5):
            self.perform(0.0)
        self.perform(1.0)
        self.assertEqual([self.perform(1.0) for _ in range(2)], [4, 4])
