"""What is said again until it was heard: how much of it, how often."""

from __future__ import annotations

from collections.abc import Collection

from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from mediatord.cluster import remote_delivery
from mediatord.cluster.remote_delivery import MAX_RETRY_DELAY, MIN_RETRY_DELAY, RETRY_BATCH, ContractChangeRetryQueue


class RetryQueueTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = Clock()
        self.said: list[str] = []
        self.told: list[Collection[str]] = []
        self.deaf: set[str] = set()
        self.dropped = 0
        self.reminders = ContractChangeRetryQueue(self.clock, self.remind, self.drop)

    def remind(self, did: str, told: Collection[str]) -> None:
        """Heard at once, or not."""
        self.said.append(did)
        self.told.append(told)
        if did in self.deaf:
            self.reminders.add_failed(did, told)
        else:
            self.reminders.record_success()

    def drop(self) -> None:
        """Counted."""
        self.dropped += 1

    def after(self, seconds: float) -> list[str]:
        """What is said in so many seconds."""
        self.said.clear()
        self.clock.pump([0.5] * int(seconds * 2))
        return list(self.said)

    def test_some_at_a_time(self) -> None:
        """Many do not come all at once; while they are heard they do not have to wait for long."""
        names = [f"{number:03}" for number in range(2 * RETRY_BATCH + 1)]
        for name in names:
            self.reminders.add(name, ())
        self.assertEqual(self.after(MIN_RETRY_DELAY), names[:RETRY_BATCH])
        self.assertEqual(self.after(MIN_RETRY_DELAY), names[RETRY_BATCH : 2 * RETRY_BATCH])
        self.assertEqual(self.after(MIN_RETRY_DELAY), names[2 * RETRY_BATCH :])
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_nobody_in_the_way(self) -> None:
        """Those who hear nothing come after those who have not been tried since."""
        self.deaf = {str(number) for number in range(RETRY_BATCH)}
        for name in (*sorted(self.deaf), "hears"):
            self.reminders.add(name, ())
        self.assertNotIn("hears", self.after(MIN_RETRY_DELAY))
        self.assertIn("hears", self.after(MIN_RETRY_DELAY))

    def test_again_soon(self) -> None:
        """When one was heard after a long time, others may be as well."""
        self.deaf = {"a", "b"}
        self.reminders.add("a", ())
        self.reminders.add("b", ())
        self.after(10 * MAX_RETRY_DELAY)
        self.deaf = {"b"}
        self.assertEqual(self.after(MAX_RETRY_DELAY)[:2], ["a", "b"])
        self.deaf = set()
        self.assertEqual(self.after(3 * MIN_RETRY_DELAY), ["b"])

    def test_limit(self) -> None:
        """The oldest is dropped, and counted."""
        self.patch(remote_delivery, "MAX_RETRY_DIDS", 2)
        for name in "abac":
            self.reminders.add(name, ())
        self.assertEqual((len(self.reminders), self.dropped), (2, 1))
        self.assertEqual(self.after(MIN_RETRY_DELAY), ["a", "c"])

    def test_limit_of_those_that_failed(self) -> None:
        """They are dropped before those that were never tried."""
        self.patch(remote_delivery, "MAX_RETRY_DIDS", 3)
        self.deaf = {"a", "b"}
        self.reminders.add("a", ())
        self.reminders.add("b", ())
        self.after(MIN_RETRY_DELAY)
        for name in "cde":
            self.reminders.add(name, ())
        self.assertEqual((len(self.reminders), self.dropped), (3, 2))
        self.assertEqual(self.after(MIN_RETRY_DELAY), ["c", "d", "e"])

    def test_new_ones_do_not_wait_for_those_that_failed(self) -> None:
        """However many there are, and however long the pauses between their lots have become."""
        self.deaf = {str(number) for number in range(20 * RETRY_BATCH)}
        for name in self.deaf:
            self.reminders.add(name, ())
        self.after(10 * MAX_RETRY_DELAY)
        self.reminders.add("new", ())
        self.assertIn("new", self.after(MIN_RETRY_DELAY))

    def test_failed_ones_come_again(self) -> None:
        """The one that was tried last comes last, even while others are heard all the time."""
        self.deaf = {f"{number:03}" for number in range(2 * RETRY_BATCH)}
        for name in sorted(self.deaf):
            self.reminders.add(name, ())
        self.after(2 * MIN_RETRY_DELAY)
        tried: list[str] = []
        for _ in range(10):
            self.reminders.record_success()
            tried += self.after(MIN_RETRY_DELAY / 2)
        self.assertEqual(tried[: 2 * RETRY_BATCH], sorted(self.deaf))

    def test_changed_again(self) -> None:
        """What has failed and changes once more is new, and there once."""
        self.deaf = {"a"}
        self.reminders.add("a", ["x", "y"])
        self.after(4 * MAX_RETRY_DELAY)
        self.reminders.add("a", ["y", "z"])
        self.assertEqual(len(self.reminders), 1)
        self.told.clear()
        self.assertEqual((self.after(MIN_RETRY_DELAY), self.told), (["a"], [{"y"}]))

    def test_changed_while_reminding(self) -> None:
        """The newer change counts: it is not behind because the older one could not be told."""
        self.deaf = {"b"}
        self.reminders.add("b", ())
        self.after(4 * MAX_RETRY_DELAY + 5)
        self.told.clear()
        self.reminders.add("a", ["x", "y"])
        self.reminders.add_failed("a", ["y"])
        self.assertEqual((len(self.reminders), self.after(MIN_RETRY_DELAY), self.told), (2, ["a"], [{"y"}]))

    def test_who_was_told(self) -> None:
        """Of two changes, only those who were told of both need not be told."""
        self.reminders.add("a", ["x", "y"])
        self.reminders.add("a", ["y", "z"])
        self.after(MIN_RETRY_DELAY)
        self.assertEqual(self.told, [{"y"}])

    def test_end(self) -> None:
        """No timer is left, and none comes."""
        self.reminders.add("a", ())
        self.reminders.end()
        self.reminders.add("b", ())
        self.reminders.record_success()
        self.assertEqual(self.clock.getDelayedCalls(), [])
