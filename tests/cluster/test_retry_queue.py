"""The queue of contract changes to retry: size and frequency."""

from __future__ import annotations

from collections.abc import Collection

from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from mediatord.cluster import remote_delivery
from mediatord.cluster.remote_delivery import MAX_RETRY_DELAY, MIN_RETRY_DELAY, RETRY_BATCH, ContractChangeRetryQueue


class RetryQueueTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = Clock()
        self.retried: list[str] = []
        self.accepted: list[Collection[str]] = []
        self.deaf: set[str] = set()
        self.dropped = 0
        self.reminders = ContractChangeRetryQueue(self.clock, self.retry, self.record_drop)

    def retry(self, did: str, accepted: Collection[str]) -> None:
        """Accepted at once, or not."""
        self.retried.append(did)
        self.accepted.append(accepted)
        if did in self.deaf:
            self.reminders.add_failed(did, accepted)
        else:
            self.reminders.record_success()

    def record_drop(self) -> None:
        """Counted."""
        self.dropped += 1

    def retried_after(self, seconds: float) -> list[str]:
        """Retries within so many seconds."""
        self.retried.clear()
        self.clock.pump([0.5] * int(seconds * 2))
        return list(self.retried)

    def test_retries_a_few_at_a_time(self) -> None:
        """Many retries are spread out; successful ones do not wait long."""
        names = [f"{number:03}" for number in range(2 * RETRY_BATCH + 1)]
        for name in names:
            self.reminders.add(name, ())
        self.assertEqual(self.retried_after(MIN_RETRY_DELAY), names[:RETRY_BATCH])
        self.assertEqual(self.retried_after(MIN_RETRY_DELAY), names[RETRY_BATCH : 2 * RETRY_BATCH])
        self.assertEqual(self.retried_after(MIN_RETRY_DELAY), names[2 * RETRY_BATCH :])
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_failing_dids_do_not_block_others(self) -> None:
        """DIDs that fail come after those not tried since."""
        self.deaf = {str(number) for number in range(RETRY_BATCH)}
        for name in (*sorted(self.deaf), "hears"):
            self.reminders.add(name, ())
        self.assertNotIn("hears", self.retried_after(MIN_RETRY_DELAY))
        self.assertIn("hears", self.retried_after(MIN_RETRY_DELAY))

    def test_success_speeds_up_others(self) -> None:
        """After a late success others are retried soon."""
        self.deaf = {"a", "b"}
        self.reminders.add("a", ())
        self.reminders.add("b", ())
        self.retried_after(10 * MAX_RETRY_DELAY)
        self.deaf = {"b"}
        self.assertEqual(self.retried_after(MAX_RETRY_DELAY)[:2], ["a", "b"])
        self.deaf = set()
        self.assertEqual(self.retried_after(3 * MIN_RETRY_DELAY), ["b"])

    def test_limit(self) -> None:
        """The oldest is dropped and counted."""
        self.patch(remote_delivery, "MAX_RETRY_DIDS", 2)
        for name in "abac":
            self.reminders.add(name, ())
        self.assertEqual((len(self.reminders), self.dropped), (2, 1))
        self.assertEqual(self.retried_after(MIN_RETRY_DELAY), ["a", "c"])

    def test_failed_entries_are_dropped_first(self) -> None:
        """Failed entries are dropped before untried ones."""
        self.patch(remote_delivery, "MAX_RETRY_DIDS", 3)
        self.deaf = {"a", "b"}
        self.reminders.add("a", ())
        self.reminders.add("b", ())
        self.retried_after(MIN_RETRY_DELAY)
        for name in "cde":
            self.reminders.add(name, ())
        self.assertEqual((len(self.reminders), self.dropped), (3, 2))
        self.assertEqual(self.retried_after(MIN_RETRY_DELAY), ["c", "d", "e"])

    def test_new_entries_do_not_wait_for_failed_ones(self) -> None:
        """However many have failed and however long the pauses have become."""
        self.deaf = {str(number) for number in range(20 * RETRY_BATCH)}
        for name in self.deaf:
            self.reminders.add(name, ())
        self.retried_after(10 * MAX_RETRY_DELAY)
        self.reminders.add("new", ())
        self.assertIn("new", self.retried_after(MIN_RETRY_DELAY))

    def test_failed_entries_are_retried_in_turn(self) -> None:
        """The last tried comes last, even while others succeed."""
        self.deaf = {f"{number:03}" for number in range(2 * RETRY_BATCH)}
        for name in sorted(self.deaf):
            self.reminders.add(name, ())
        self.retried_after(2 * MIN_RETRY_DELAY)
        tried: list[str] = []
        for _ in range(10):
            self.reminders.record_success()
            tried += self.retried_after(MIN_RETRY_DELAY / 2)
        self.assertEqual(tried[: 2 * RETRY_BATCH], sorted(self.deaf))

    def test_changed_again(self) -> None:
        """A failed entry that changes again is new, and queued once."""
        self.deaf = {"a"}
        self.reminders.add("a", ["x", "y"])
        self.retried_after(4 * MAX_RETRY_DELAY)
        self.reminders.add("a", ["y", "z"])
        self.assertEqual(len(self.reminders), 1)
        self.accepted.clear()
        self.assertEqual((self.retried_after(MIN_RETRY_DELAY), self.accepted), (["a"], [{"y"}]))

    def test_changed_during_retry(self) -> None:
        """The newer change counts: it is not behind because the older one failed."""
        self.deaf = {"b"}
        self.reminders.add("b", ())
        self.retried_after(4 * MAX_RETRY_DELAY + 5)
        self.accepted.clear()
        self.reminders.add("a", ["x", "y"])
        self.reminders.add_failed("a", ["y"])
        self.assertEqual(
            (len(self.reminders), self.retried_after(MIN_RETRY_DELAY), self.accepted), (2, ["a"], [{"y"}])
        )

    def test_nodes_told_of_both_changes(self) -> None:
        """Of two changes, only nodes that accepted both are not retried."""
        self.reminders.add("a", ["x", "y"])
        self.reminders.add("a", ["y", "z"])
        self.retried_after(MIN_RETRY_DELAY)
        self.assertEqual(self.accepted, [{"y"}])

    def test_stop(self) -> None:
        """No timer is left."""
        self.reminders.add("a", ())
        self.reminders.end()
        self.reminders.add("b", ())
        self.reminders.record_success()
        self.assertEqual(self.clock.getDelayedCalls(), [])
