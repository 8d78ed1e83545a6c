"""Backlogs of subscriptions."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from mediatord.delivery import connections
from mediatord.delivery.connections import SubscriptionBacklogs

PHONE, LAPTOP = "did:example:phone", "did:example:laptop"


class SubscriptionBacklogsTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.backlogs = SubscriptionBacklogs()

    def test_backlog_is_per_did_and_socket(self) -> None:
        """A backlog is of one DID and one socket; a new one replaces it."""
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

    def test_forgets_old_backlogs(self) -> None:
        """Backlogs older than a time are forgotten."""
        self.backlogs.put(PHONE, "x", 1.0, ["a"])
        self.backlogs.put(PHONE, "y", 2.0, ["a"])
        self.backlogs.forget(2.0)
        self.assertEqual((len(self.backlogs), self.backlogs.has(PHONE, "y", "a")), (1, True))

    def test_number_of_ids_is_bounded(self) -> None:
        """Beyond a number of ids in all the oldest backlog is forgotten."""
        self.patch(connections, "MAX_BACKLOG_IDS", 5)
        for number in range(9):
            self.backlogs.put(PHONE, number, 1.0, ["a", "b"])
        self.assertEqual(len(self.backlogs), 4)
        self.assertEqual([number for number in range(9) if self.backlogs.has(PHONE, number, "a")], [7, 8])
