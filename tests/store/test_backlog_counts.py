"""Limits of the counts in a queue backlog."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from mediatord.store.interfaces.messages import AgeBucket, new_stored_message_id
from mediatord.store.interfaces.store import IStore
from mediatord.store.queue_backlog import complete_buckets, get_id_ranges, sum_buckets
from mediatord.store.sqlite import queue_statistics
from tests.store.builders import (
    ALICE,
    HOUR,
    NOON,
    ImmediateClock,
    InlineRunner,
    make_database_path,
    make_payload,
    make_sqlite_store,
)

INBOX = "did:key:z6MkInbox"


class BacklogCountTests(SynchronousTestCase):
    """Counts beyond the limit."""

    def make_aged_store(self, store: IStore, clock: ImmediateClock) -> IStore:
        """An open store with five messages each from now, five seconds ago and ten seconds ago."""
        self.successResultOf(store.open())
        self.successResultOf(store.grant(ALICE))
        self.successResultOf(store.update_recipients(ALICE, [(INBOX, "add")], max_recipients=1))
        self.addCleanup(store.close)
        for number in range(3):
            payloads = [make_payload(new_stored_message_id(clock.seconds()), b"x") for _ in range(5)]
            self.successResultOf(store.enqueue(INBOX, payloads, expires_at=NOON + HOUR))
            clock.advance(5 * (number < 2))
        return store

    def read_buckets(self, store: IStore, *bounds: float) -> tuple[AgeBucket, ...]:
        return self.successResultOf(store.read_backlog(bounds, 0)).buckets

    def test_sqlite_counts_up_to_limit(self) -> None:
        """Messages of each age are counted up to the limit, and their bytes summed below it; the total is exact."""
        self.patch(queue_statistics, "_BUCKET_SIZE_LIMIT", 5)
        self.patch(queue_statistics, "_BUCKET_COUNT_LIMIT", 5)
        clock, runner = ImmediateClock(), InlineRunner()
        store = self.make_aged_store(
            make_sqlite_store(clock, make_database_path(self), write=runner, read=runner), clock
        )
        backlog = self.successResultOf(store.read_backlog([NOON + 10], 0))
        self.assertEqual(backlog.buckets, (AgeBucket(5, None, exact=False),) * 2)
        self.assertEqual((backlog.messages, backlog.bytes), (15, 15))
        self.patch(queue_statistics, "_BUCKET_SIZE_LIMIT", 6)
        self.patch(queue_statistics, "_BUCKET_COUNT_LIMIT", 6)
        self.assertEqual(self.read_buckets(store, NOON + 10), (AgeBucket(5, 5), AgeBucket(10, 10)))
        self.assertEqual(self.read_buckets(store, NOON + 10, NOON + 5), (AgeBucket(5, 5),) * 3)

    def test_bounds_before_epoch(self) -> None:
        """Bounds before the epoch are accepted."""
        self.assertEqual(get_id_ranges([-5.0]), [("0" * 12, None), (None, "0" * 12)])


class BacklogArithmeticTests(SynchronousTestCase):
    """Arithmetic shared by the backends."""

    def test_incomplete_bucket_is_the_remainder(self) -> None:
        """A bucket that was not counted to its end is the remainder, and never less than was counted."""
        some = AgeBucket(2, 20), AgeBucket(5, 50, exact=False)
        self.assertEqual(complete_buckets(some, 100, 1000), [AgeBucket(2, 20), AgeBucket(98, 980)])
        self.assertEqual(complete_buckets(some, 100, None), [AgeBucket(2, 20), AgeBucket(98, None)])
        self.assertEqual(complete_buckets(some, 6, None), [AgeBucket(2, 20), AgeBucket(5, None)])
        unknown = [AgeBucket(5, None, exact=False)] * 2
        self.assertEqual(complete_buckets(unknown, 100, None), unknown)

    def test_unknown_plus_known_is_unknown(self) -> None:
        """A sum with an unknown part is unknown."""
        self.assertEqual(sum_buckets([AgeBucket(1, 2)], [AgeBucket(3, 4)]), (AgeBucket(4, 6),))
        self.assertEqual(
            sum_buckets([AgeBucket(1, None)], [AgeBucket(3, 4, exact=False)]), (AgeBucket(4, None, exact=False),)
        )
