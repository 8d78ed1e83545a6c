"""Test case that controls the iterations and threads of a SQLite store, and counts its commits."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import TypeVar

from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from mediatord.store.interfaces.messages import EnqueueResult, QueueLimits
from mediatord.store.sqlite import executor
from tests.store.builders import ALICE, NOON, HoldableRunner, make_database_path, make_payload, make_sqlite_store

T = TypeVar("T")

INBOX = "did:key:z6MkInbox"


def count_wal_commits(path: Path) -> int:
    """Number of transactions in the write-ahead log: the last frame of each has the database size."""
    log = path.with_name(path.name + "-wal").read_bytes()
    page_size, salt = struct.unpack_from(">8xI4x8s", log)
    frames = range(32, len(log) - page_size - 23, 24 + page_size)  # complete frames only: the last may be partial
    ends = [struct.unpack_from(">4xI8s", log, frame) for frame in frames]
    return sum(size > 0 and its_salt == salt for size, its_salt in ends)


class CommitTestCase(SynchronousTestCase):
    """A store whose reactor iterations the test ends, and whose threads it can hold."""

    limits = QueueLimits(max_messages=10_000)
    write_limits, read_limits = executor.WRITE_LIMITS, executor.READ_LIMITS

    def setUp(self) -> None:
        self.patch(executor, "WRITE_LIMITS", self.write_limits)
        self.patch(executor, "READ_LIMITS", self.read_limits)
        self.clock = Clock()
        self.clock.advance(NOON)
        self.writer = HoldableRunner()
        self.reader = HoldableRunner()
        self.path = make_database_path(self)
        self.observed: list[str] = []
        self.store = make_sqlite_store(
            self.clock,
            self.path,
            self.limits,
            write=self.writer,
            read=self.reader,
            observe=lambda operation, seconds: self.observed.append(operation),
        )
        self.successResultOf(self.store.open())
        self.addCleanup(self.close_store)  # trial removes the directory before it calls tearDown
        self.finish(self.store.grant(ALICE))
        self.finish(self.store.update_recipients(ALICE, [(INBOX, "add")], max_recipients=9))
        self.observed.clear()

    def close_store(self) -> None:
        """Finish held work and close the store."""
        self.writer.release()
        closed = self.store.close()
        self.run_iterations()
        self.successResultOf(closed)

    def run_iterations(self) -> None:
        """End this reactor iteration and the following ones."""
        self.clock.pump([0, 0, 0])

    def finish(self, deferred: Deferred[T]) -> T:
        self.run_iterations()
        return self.successResultOf(deferred)

    def enqueue_ids(self, *ids: str, to: str = INBOX, data: bytes | None = None) -> Deferred[EnqueueResult]:
        return self.store.enqueue(to, [make_payload(id, data) for id in ids], expires_at=NOON + 3600)

    def list_stored(self) -> list[str]:
        found = self.finish(self.store.fetch_messages(ALICE, None, limit=10_000, max_bytes=1 << 30))
        return [message.id for message in found]
