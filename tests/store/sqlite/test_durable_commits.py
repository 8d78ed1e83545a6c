"""Where the SQLite store commits, and that it has synced the write-ahead log before it reports anything."""

from __future__ import annotations

import errno
import os
import struct
from contextlib import closing
from pathlib import Path
from shutil import copyfile
from typing import Any

from twisted.internet.defer import Deferred

from mediatord.errors import StoreUnavailable
from mediatord.store.interfaces.messages import QueueLimits
from mediatord.store.sqlite import connection as connections
from mediatord.store.sqlite import executor
from mediatord.store.sqlite.connection import StoreConnection, connect, connect_reader
from tests.store.builders import NOON, make_database_path
from tests.store.sqlite.commit_test_case import CommitTestCase, count_wal_commits


class DurableCommitTestCase(CommitTestCase):
    """Counts syncs, and reads what is committed through a connection of its own."""

    def setUp(self) -> None:
        super().setUp()
        self.patch(executor, "_MAX_SECONDS_AT_ONCE", 60.0)
        self.syncs = 0
        self.sync_error: OSError | None = None
        self.patch(os, "fdatasync", self.sync)
        self.reading = connect_reader(self.path)
        self.addCleanup(self.reading.close)
        self.finish(self.enqueue_ids("first"))  # the first commit after the start may write the log from its start
        self.syncs = 0

    def sync(self, descriptor: int) -> None:
        log = self.path.with_name(f"{self.path.name}-wal")
        self.assertEqual(os.fstat(descriptor).st_ino, log.stat().st_ino)
        if self.sync_error is not None:
            raise self.sync_error
        self.syncs += 1

    def list_committed(self) -> list[str]:
        return [id for (id,) in self.reading.execute("SELECT id FROM message ORDER BY seq")]

    def is_committed_at_once(self, submitted: Deferred[Any]) -> bool:
        """Whether operations that were just submitted are committed by the reactor's thread; finishes them."""
        before = count_wal_commits(self.path)
        self.writer.hold()
        self.run_iterations()
        self.assertNoResult(submitted)
        committed = count_wal_commits(self.path) - before
        self.writer.release()
        self.run_iterations()
        self.successResultOf(submitted)
        return bool(committed)


class SyncTests(DurableCommitTestCase):
    """One sync for a transaction, before its outcomes."""

    def test_fires_after_sync(self) -> None:
        """A Deferred fires when the log is synced, which is the only work of the thread."""
        calls = self.writer.calls
        self.writer.hold()
        enqueued = self.enqueue_ids("a")
        self.run_iterations()
        self.assertEqual((self.list_committed(), self.syncs), (["first", "a"], 0))
        self.assertNoResult(enqueued)
        self.writer.release()
        self.successResultOf(enqueued)
        self.assertEqual((self.syncs, self.writer.calls - calls), (1, 1))

    def test_one_sync_per_transaction(self) -> None:
        """However many operations it has, and whichever thread commits it."""
        for number in (1, 20, 200):
            deferreds = [self.enqueue_ids(f"m{number}-{place}") for place in range(number)]
            self.finish(deferreds[-1])
        self.assertEqual(self.syncs, 3)

    def test_no_sync_without_changes(self) -> None:
        """Operations that change nothing need no sync."""
        self.finish(self.store.acknowledge("did:example:alice", ["unknown"]))
        self.assertEqual(self.syncs, 0)

    def test_sqlite_syncs_the_rest(self) -> None:
        """SQLite itself syncs the log before a checkpoint, and its header, which it does not where syncs are off."""
        writes: Any = self.store._executor
        ((level,),) = writes._writes._connection.execute("PRAGMA synchronous").fetchall()
        self.assertEqual(level, 1)  # NORMAL


class PlaceTests(DurableCommitTestCase):
    """Which transactions the reactor's thread commits."""

    limits = QueueLimits(max_messages=1_500, when_full="oldest")

    def test_small_ones(self) -> None:
        """Enqueues, acknowledgements, delivery marks and nonces, as far as they are few."""
        self.assertTrue(self.is_committed_at_once(self.enqueue_ids("a", "b")))
        self.assertTrue(self.is_committed_at_once(self.store.mark_delivered(["a"])))
        self.assertTrue(self.is_committed_at_once(self.store.claim_nonce(b"key", NOON + 60)))
        self.assertTrue(self.is_committed_at_once(self.store.acknowledge("did:example:alice", ["a"])))
        self.assertFalse(self.is_committed_at_once(self.store.grant("did:example:bob")))
        self.assertFalse(self.is_committed_at_once(self.enqueue_ids(*[f"m{number}" for number in range(33)])))
        self.assertFalse(self.is_committed_at_once(self.enqueue_ids("large", data=b"x" * 200_000)))
        self.assertTrue(self.is_committed_at_once(self.enqueue_ids("last")))

    def test_not_evictions_from_long_queues(self) -> None:
        """An enqueue that turns out to read a long queue is begun again by the thread."""
        for first in range(0, 1_500, 500):
            self.finish(self.enqueue_ids(*[f"m{number}" for number in range(first, first + 500)]))
        self.assertFalse(self.is_committed_at_once(self.enqueue_ids("one-more")))
        self.assertEqual(self.list_committed()[-1], "one-more")
        self.assertEqual(len(self.list_committed()), 1_500)

    def test_not_while_others_write(self) -> None:
        """The reactor does not wait for a lock: the thread does."""
        with closing(connect(self.path)) as other:
            other.execute("BEGIN IMMEDIATE")
            self.writer.hold()
            enqueued = self.enqueue_ids("a")
            self.run_iterations()
            self.assertEqual((self.writer.calls, self.list_committed()), (self.writer.calls, ["first"]))
            other.execute("ROLLBACK")
        self.writer.release()
        self.successResultOf(enqueued)
        self.assertEqual(self.list_committed(), ["first", "a"])

    def test_not_while_thread_uses_connection(self) -> None:
        """A connection is used by one thread at a time."""
        self.writer.hold()
        job = self.store._executor._writes.run(lambda connection: None)  # type: ignore[union-attr]
        enqueued = self.enqueue_ids("a")
        self.run_iterations()
        self.assertEqual(self.list_committed(), ["first"])
        self.writer.release()
        self.successResultOf(job)
        self.successResultOf(enqueued)

    def test_not_after_checkpoint(self) -> None:
        """The first commit after a checkpoint may write the log from its start, which syncs the header."""
        self.clock.advance(executor.CHECKPOINT_INTERVAL_SECONDS)
        self.assertFalse(self.is_committed_at_once(self.enqueue_ids("a")))
        self.assertTrue(self.is_committed_at_once(self.enqueue_ids("b")))

    def test_not_after_slow_one(self) -> None:
        """When a transaction has held the reactor, as pages came from the disk, the thread commits for a while."""
        self.patch(executor, "_MAX_SECONDS_AT_ONCE", 0.0)
        self.assertTrue(self.is_committed_at_once(self.enqueue_ids("a")))
        self.assertFalse(self.is_committed_at_once(self.enqueue_ids("b")))
        self.clock.advance(executor._SLOW_SECONDS)
        self.finish(self.enqueue_ids("c"))  # the first after a checkpoint
        self.assertTrue(self.is_committed_at_once(self.enqueue_ids("d")))

    def test_failing_ones_again(self) -> None:
        """A transaction that fails is begun again by the thread, each operation alone."""
        deferreds = self.enqueue_ids("a"), self.enqueue_ids("b", "b"), self.enqueue_ids("c")
        self.run_iterations()
        self.successResultOf(deferreds[0])
        self.failureResultOf(deferreds[1], StoreUnavailable)
        self.successResultOf(deferreds[2])
        self.assertEqual(self.list_committed(), ["first", "a", "c"])


class LostPagesDisk:
    """
    What the disk has of the write-ahead log, on a system that regards pages as written after a failed sync.

    :param log: the log as programs see it.
    """

    def __init__(self, log: Path) -> None:
        self._log = log
        self.content = log.read_bytes()
        self._lost: tuple[int, bytes] = 0, b""

    def sync(self) -> None:
        seen = bytearray(self._log.read_bytes())
        start, lost = self._lost
        if seen[start : start + len(lost)] == lost:
            # Not written again since then.
            kept = self.content[start : start + len(lost)]
            seen[start : start + len(lost)] = kept.ljust(len(lost), b"\0")
        self.content = bytes(seen)

    def fail(self) -> None:
        seen = self._log.read_bytes()
        start = len(os.path.commonprefix([seen, self.content]))
        self._lost = start, seen[start:]


class FailedSyncTests(DurableCommitTestCase):
    """A sync that fails."""

    def fail_enqueue(self, error: OSError) -> None:
        self.sync_error = error
        enqueued = self.enqueue_ids("failed")
        self.run_iterations()
        self.failureResultOf(enqueued, StoreUnavailable)
        self.sync_error = None

    def read_salt(self) -> bytes:
        salt: bytes = struct.unpack_from(">16x8s", self.path.with_name(f"{self.path.name}-wal").read_bytes())[0]
        return salt

    def test_log_is_written_from_its_start(self) -> None:
        """Nothing is appended to a log of which parts may be lost: all of it is moved into the database first."""
        before = self.read_salt()
        self.fail_enqueue(OSError(errno.EIO, "Input/output error"))
        self.finish(self.enqueue_ids("next"))
        self.assertNotEqual(self.read_salt(), before)
        before = self.read_salt()
        self.assertTrue(self.is_committed_at_once(self.enqueue_ids("a")))
        self.assertEqual(self.read_salt(), before)

    def test_nothing_is_written_until_then(self) -> None:
        """While a reader keeps the log from being moved, writes fail, and ping."""
        self.patch(self.store._executor, "_patience", 0.0)
        self.fail_enqueue(OSError(errno.EIO, "Input/output error"))
        self.reading.execute("BEGIN")
        self.list_committed()
        refused = self.enqueue_ids("refused")
        self.run_iterations()
        self.failureResultOf(refused, StoreUnavailable)
        ping = self.store.ping()
        self.run_iterations()
        self.failureResultOf(ping, StoreUnavailable)
        self.reading.execute("ROLLBACK")
        self.finish(self.enqueue_ids("next"))
        self.assertNotIn("refused", self.list_committed())

    def test_power_failure_after_failed_sync(self) -> None:
        """What was accepted after a failed sync is there after a power failure, though the failed pages are not."""
        disk = LostPagesDisk(self.path.with_name(f"{self.path.name}-wal"))
        self.patch(os, "fdatasync", lambda descriptor: disk.sync())

        def fail(descriptor: int) -> None:
            disk.fail()
            raise OSError(errno.EIO, "Input/output error")

        self.finish(self.enqueue_ids("before"))
        self.patch(os, "fdatasync", fail)
        self.fail_enqueue(OSError(errno.EIO, "Input/output error"))
        self.patch(os, "fdatasync", lambda descriptor: disk.sync())
        self.finish(self.enqueue_ids("after"))
        after_failure = make_database_path(self)
        copyfile(self.path, after_failure)
        after_failure.with_name(f"{after_failure.name}-wal").write_bytes(disk.content)
        with closing(connect(after_failure)) as recovered:
            ids = [id for (id,) in recovered.execute("SELECT id FROM message ORDER BY seq")]
            self.assertEqual(recovered.execute("PRAGMA integrity_check").fetchall(), [("ok",)])
        self.assertEqual([id for id in ids if id != "failed"], ["first", "before", "after"])

    def test_full_disk(self) -> None:
        """A disk that turns out to be full at the sync is reported as such."""
        self.fail_enqueue(OSError(errno.ENOSPC, "No space left on device"))
        self.assertTrue(connections.is_disk_full_error(OSError(errno.ENOSPC, "No space left on device")))
        self.finish(self.store.acknowledge("did:example:alice", ["first"]))


class TransactionAtOnceTests(DurableCommitTestCase):
    """The connection's part of it."""

    def test_changes_nothing_when_it_takes_long(self) -> None:
        """An operation that announces much work is undone, with all that precede it."""

        def announce(connection: StoreConnection) -> None:
            executor.write_ping(connection)
            connection.announce_work(connections.ROWS_AT_ONCE + 1)

        connection = connect(self.path)
        self.addCleanup(connection.close)
        before = count_wal_commits(self.path)
        self.assertIsNone(connection.commit_at_once([executor.write_ping, announce]))
        self.assertEqual(count_wal_commits(self.path), before)
        self.assertEqual(connection.commit_batch([executor.write_ping, announce]), [None, None])
