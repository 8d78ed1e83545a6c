"""Health that a process reports to load balancers."""

from __future__ import annotations

from twisted.internet.task import Clock
from twisted.logger import capturedLogs, formatEvent
from twisted.trial.unittest import SynchronousTestCase

from mediatord.cluster.membership import NODE_LEASE, NOT_JOINED, NodeHealth
from mediatord.store.interfaces.cluster_and_quotas import ClockSkewError
from tests.in_memory_mediator import NOW

CLOCK_ERROR = "the clock of this host is 1 h 12 min ahead of the MongoDB server's"


class NodeHealthTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = Clock()
        self.clock.advance(NOW)
        self.node = NodeHealth(self.clock, NODE_LEASE)

    def test_healthy_without_cluster(self) -> None:
        """Without a cluster there is nothing to join."""
        self.assertEqual(NodeHealth(self.clock).trouble, "")

    def test_unhealthy_until_joined(self) -> None:
        """A node is unhealthy until it has joined."""
        self.assertEqual(self.node.trouble, NOT_JOINED)
        self.node.joined()
        self.assertEqual(self.node.trouble, "")

    def test_short_absence_is_healthy(self) -> None:
        """After a store outage all nodes are absent for a moment, which does not make them unhealthy."""
        self.node.joined()
        self.node.parted()
        self.clock.advance(NODE_LEASE)
        self.node.parted()
        self.assertEqual(self.node.trouble, "")
        self.clock.advance(1)
        self.assertEqual(self.node.trouble, NOT_JOINED)
        self.node.joined()
        self.assertEqual(self.node.trouble, "")

    def test_clock_set_back(self) -> None:
        """A clock set back does not prolong that moment."""
        self.node.joined()
        self.node.parted()
        self.clock.rightNow -= 7200
        self.clock.advance(NODE_LEASE + 1)
        self.assertEqual(self.node.trouble, NOT_JOINED)

    def test_other_reason_after_clock_is_right(self) -> None:
        """Once the clock is right another reason is reported instead."""
        self.node.joined()
        self.node.clock_differs(ClockSkewError(4320))
        self.node.parted()
        self.clock.advance(NODE_LEASE + 1)
        self.assertEqual(self.node.trouble, CLOCK_ERROR)
        self.node.clock_agrees()
        self.assertEqual(self.node.trouble, NOT_JOINED)

    def test_wrong_clock(self) -> None:
        """A wrong clock is reported at once, with one warning for each time, and one line when it is over."""
        for node_health in (self.node, NodeHealth(self.clock)):
            node_health.joined()
            for _ in range(2):
                with capturedLogs() as events:
                    for _ in range(3):
                        node_health.clock_differs(ClockSkewError(4320))
                        node_health.parted()
                        self.assertEqual(node_health.trouble, CLOCK_ERROR)
                    node_health.joined()
                    node_health.joined()
                self.assertEqual(node_health.trouble, "")
                warning, over = events
                self.assertIn(CLOCK_ERROR, formatEvent(warning))
                self.assertEqual([event["log_level"].name for event in (warning, over)], ["warn", "info"])
