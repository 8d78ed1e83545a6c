"""Evictions by requests that are committed together."""

from __future__ import annotations

from twisted.internet.defer import Deferred

from mediatord.errors import StoreUnavailable
from mediatord.store.interfaces.messages import EnqueueResult, QueueLimits
from tests.store.builders import ALICE, NOON, make_payload
from tests.store.sqlite.commit_test_case import INBOX, CommitTestCase, count_wal_commits


class QueueCapacityTests(CommitTestCase):
    """Requests committed together evict as if they had come one by one (UC-021 AF-4)."""

    limits = QueueLimits(max_messages=3, max_bytes=100)

    def enqueue_together(self, *deferreds: Deferred[EnqueueResult]) -> list[list[tuple[str, str | None]]]:
        """The messages that each request evicted, after a single commit of all."""
        before = count_wal_commits(self.path)
        self.run_iterations()
        evicted = [self.successResultOf(enqueued).evicted for enqueued in deferreds]
        self.assertEqual(count_wal_commits(self.path) - before, 1)
        return [[(removed.id, removed.reason) for removed in some] for some in evicted]

    def test_evicts_by_count(self) -> None:
        """Each request evicts the oldest message at its turn, also one of the same batch."""
        evicted = self.enqueue_together(*[self.enqueue_ids(id, data=b"") for id in "abcdef"])
        self.assertEqual(evicted, [[], [], [], [("a", "fifo_count")], [("b", "fifo_count")], [("c", "fifo_count")]])
        self.assertEqual(self.list_stored(), ["d", "e", "f"])

    def test_evicts_by_bytes(self) -> None:
        """The same holds for bytes, and for oversized messages."""
        evicted = self.enqueue_together(
            *[self.enqueue_ids(id, data=b"x" * size) for id, size in (("a", 60), ("b", 30), ("big", 101), ("c", 50))]
        )
        self.assertEqual(evicted, [[], [], [("big", "fifo_bytes")], [("a", "fifo_bytes")]])
        self.assertEqual(self.list_stored(), ["b", "c"])

    def test_requests_with_several_messages(self) -> None:
        """Each request finds the queue as the one before has left it, whatever that stored and evicted."""
        evicted = self.enqueue_together(
            *[self.enqueue_ids(*ids, data=b"") for ids in ("a", "b", "cde", "f", "ghij", "k")]
        )
        self.assertEqual(
            [[id for id, _ in some] for some in evicted], [[], [], ["a", "b"], ["c"], list("def"), list("gh")]
        )
        self.assertEqual(self.list_stored(), ["i", "j", "k"])

    def test_several_queues(self) -> None:
        """A full queue among others changes neither their order nor their capacity."""
        self.finish(self.store.update_recipients(ALICE, [("did:z", "add")], max_recipients=9))
        deferreds = [
            self.enqueue_ids(f"m{number}", to=INBOX if number % 2 else "did:z", data=b"") for number in range(9)
        ]
        evicted = self.enqueue_together(*deferreds)
        self.assertEqual([[id for id, _ in some] for some in evicted[6:]], [["m0"], ["m1"], ["m2"]])
        self.assertEqual(self.list_stored(), ["m3", "m4", "m5", "m6", "m7", "m8"])

    def test_failing_request_evicts_nothing(self) -> None:
        """A request that cannot be stored evicts nothing and does not affect the others."""
        deferreds = [
            self.enqueue_ids("a"),
            self.enqueue_ids("b"),
            self.enqueue_ids("c", "c", "d"),
            self.enqueue_ids("e"),
            self.enqueue_ids("f"),
        ]
        self.run_iterations()
        self.failureResultOf(deferreds.pop(2), StoreUnavailable)
        evicted = [self.successResultOf(enqueued).evicted for enqueued in deferreds]
        self.assertEqual([[removed.id for removed in some] for some in evicted], [[], [], [], ["a"]])
        self.assertEqual(self.list_stored(), ["b", "e", "f"])


class LongQueueTests(CommitTestCase):
    """A queue may have more messages than a peer's JSON document may have values."""

    limits = QueueLimits(max_messages=20_000, share=0.5)

    def test_usage_of_long_queue(self) -> None:
        """When a long queue is full, the usage of all of its senders is read."""
        for start in range(0, 20_000, 500):
            self.finish(self.enqueue_ids(*[f"m{number}" for number in range(start, start + 500)]))
        enqueued = self.finish(self.store.enqueue(INBOX, [make_payload("last")], expires_at=NOON + 9, origin=7))
        self.assertEqual([message.id for message in enqueued.evicted], ["m0"])
