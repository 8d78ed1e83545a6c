"""How deposits that are committed together make room."""

from __future__ import annotations

from twisted.internet.defer import Deferred

from mediatord.errors import StoreUnavailable
from mediatord.store.interfaces.messages import EnqueueResult, QueueLimits
from tests.store.builders import ALICE, NOON, make_payload
from tests.store.sqlite.commit_test_case import INBOX, CommitTestCase, count_wal_commits


class QueueCapacityTests(CommitTestCase):
    """Deposits that are committed together make room as if they had come one by one (UC-021 AF-4)."""

    limits = QueueLimits(max_messages=3, max_bytes=100)

    def together(self, *asked: Deferred[EnqueueResult]) -> list[list[tuple[str, str | None]]]:
        """What each of them evicted, once they are done in a single commit."""
        before = count_wal_commits(self.path)
        self.turn()
        evicted = [self.successResultOf(enqueued).evicted for enqueued in asked]
        self.assertEqual(count_wal_commits(self.path) - before, 1)
        return [[(removed.id, removed.reason) for removed in some] for some in evicted]

    def test_by_count(self) -> None:
        """Each deposit evicts what was the oldest when its turn came, also of those that came along with it."""
        evicted = self.together(*[self.put(id, data=b"") for id in "abcdef"])
        self.assertEqual(evicted, [[], [], [], [("a", "fifo_count")], [("b", "fifo_count")], [("c", "fifo_count")]])
        self.assertEqual(self.stored(), ["d", "e", "f"])

    def test_by_bytes(self) -> None:
        """So it is with bytes, and with a message that is too large for any queue."""
        evicted = self.together(
            *[self.put(id, data=b"x" * size) for id, size in (("a", 60), ("b", 30), ("big", 101), ("c", 50))]
        )
        self.assertEqual(evicted, [[], [], [("big", "fifo_bytes")], [("a", "fifo_bytes")]])
        self.assertEqual(self.stored(), ["b", "c"])

    def test_several_at_a_time(self) -> None:
        """Each finds the queue as the one before has left it, however much that had brought and evicted."""
        evicted = self.together(*[self.put(*ids, data=b"") for ids in ("a", "b", "cde", "f", "ghij", "k")])
        self.assertEqual(
            [[id for id, _ in some] for some in evicted], [[], [], ["a", "b"], ["c"], list("def"), list("gh")]
        )
        self.assertEqual(self.stored(), ["i", "j", "k"])

    def test_several_queues(self) -> None:
        """A full queue among others disturbs neither their order nor their room."""
        self.done(self.store.update_recipients(ALICE, [("did:z", "add")], max_recipients=9))
        asked = [self.put(f"m{number}", to=INBOX if number % 2 else "did:z", data=b"") for number in range(9)]
        evicted = self.together(*asked)
        self.assertEqual([[id for id, _ in some] for some in evicted[6:]], [["m0"], ["m1"], ["m2"]])
        self.assertEqual(self.stored(), ["m3", "m4", "m5", "m6", "m7", "m8"])

    def test_bad_apple_at_a_full_queue(self) -> None:
        """A deposit that cannot be stored evicts nothing, and the others are as if it had not been there."""
        asked = [self.put("a"), self.put("b"), self.put("c", "c", "d"), self.put("e"), self.put("f")]
        self.turn()
        self.failureResultOf(asked.pop(2), StoreUnavailable)
        evicted = [self.successResultOf(enqueued).evicted for enqueued in asked]
        self.assertEqual([[removed.id for removed in some] for some in evicted], [[], [], [], ["a"]])
        self.assertEqual(self.stored(), ["b", "e", "f"])


class LongQueueTests(CommitTestCase):
    """A queue may have more messages than a JSON document of a peer may have values."""

    limits = QueueLimits(max_messages=20_000, share=0.5)

    def test_full(self) -> None:
        """When it is full, the usage of all of its senders is read."""
        for start in range(0, 20_000, 500):
            self.done(self.put(*[f"m{number}" for number in range(start, start + 500)]))
        enqueued = self.done(self.store.enqueue(INBOX, [make_payload("last")], expires_at=NOON + 9, origin=7))
        self.assertEqual([one.id for one in enqueued.evicted], ["m0"])
