"""What is remembered of what waited when a socket subscribed."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from mediatord.delivery import connections
from mediatord.delivery.connections import SubscriptionBacklogs

PHONE, LAPTOP = "did:example:phone", "did:example:laptop"


class SubscriptionBacklogsTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.backlogs = SubscriptionBacklogs()

    def test_of_a_subscription(self) -> None:
        """It is of one DID and one socket, and the last counts."""
        self.backlogs.put(PHONE, "x", 1.0, ["old"])
        self.backlogs.put(PHONE, "x", 2.0, ["a", "b"])
        self.assertTrue(self.backlogs.has(PHONE, "x", "a"))
        self.assertFalse(self.backlogs.has(PHONE, "x", "old"))
        self.assertFalse(self.backlogs.has(PHONE, "y", "a") or self.backlogs.has(LAPTOP, "x", "a"))
        self.assertEqual(self.backlogs.lookup(PHONE, "x"), (2.0, {"a", "b"}))
        self.assertEqual(len(self.backlogs), 2)
        self.backlogs.discard(PHONE, "x")
        self.backlogs.discard(PHONE, "x")
        self.assertEqual((len(self.backlogs), self.backlogs.lookup(PHONE, "x")), (0, None))

    def test_forget(self) -> None:
        """What is older than a time is forgotten."""
        self.backlogs.put(PHONE, "x", 1.0, ["a"])
        self.backlogs.put(PHONE, "y", 2.0, ["a"])
        self.backlogs.forget(2.0)
        self.assertEqual((len(self.backlogs), self.backlogs.has(PHONE, "y", "a")), (1, True))

    def test_bounded(self) -> None:
        """Beyond so many ids in all the oldest backlog is forgotten."""
        self.patch(connections, "MAX_BACKLOG_IDS", 5)
        for number in range(9):
            self.backlogs.put(PHONE, number, 1.0, ["a", "b"])
        self.assertEqual(len(self.backlogs), 4)
        self.assertEqual([number for number in range(9) if self.backlogs.has(PHONE, number, "a")], [7, 8])
