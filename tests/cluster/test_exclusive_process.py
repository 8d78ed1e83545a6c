"""A single process on a store that others could share."""

from __future__ import annotations

from math import inf
from types import SimpleNamespace
from typing import Any

from twisted.internet.defer import Deferred, fail, succeed
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from mediatord.app.protocol_services import build_leader_lease, get_marking_node
from mediatord.cluster.leases import (
    EXCLUSIVE_LEASE,
    EXCLUSIVE_POLL_INTERVAL,
    EXCLUSIVE_RENEWAL_INTERVAL,
    REJOIN_GRACE_PERIOD,
    ExclusiveStoreLease,
    open_shared_store,
)
from mediatord.cluster.membership import NODE_LEASE, STANDALONE_NODE_NAME, NodeHealth
from mediatord.config.settings import Config
from mediatord.errors import StoreUnavailable
from mediatord.ratelimit.admission import RequestGate
from mediatord.store.interfaces.cluster_and_quotas import ClockSkewError, ClusterNode, ClusterSecretMismatch
from mediatord.store.interfaces.messages import QueueLimits
from mediatord.store.interfaces.store import StoreUnusable
from mediatord.store.sqlite.memory_store import MemoryStore
from tests.in_memory_mediator import NOW

BEA = ClusterNode("bea", "bbbb", "tcp:host=10.0.0.2:port=7070", b"seal")
TAKEN = "node ann uses this database exclusively; set cluster.listen on every node to share it"
BESIDE = "cluster.listen is null, but a cluster uses this database: bea; set it, or stop these nodes"


class ExclusiveProcessTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = Clock()
        self.clock.advance(NOW)
        self.store: Any = MemoryStore(self.clock, QueueLimits())
        # Somebody else has it open, or it would be empty each time.
        self.successResultOf(self.store.open())
        self.said: list[str] = []
        self.gate = RequestGate(self.clock)
        self.gate.startService()
        self.node_health = NodeHealth(self.clock)

    def lone(self, boot: str = "aaaa", name: str = "ann") -> ExclusiveStoreLease:
        """A process that works alone."""
        node = ClusterNode(name, boot, "", b"")
        alone = ExclusiveStoreLease(self.clock, self.store, node, self.gate, self.node_health, self.said.append)
        alone.startService()
        return alone

    def opened(self, boot: str = "aaaa") -> ExclusiveStoreLease:
        """One that nobody is in the way of."""
        alone = self.lone(boot)
        self.successResultOf(alone.open())
        return alone

    def dead(self, boot: str = "aaaa") -> None:
        """One that was here and was killed."""
        self.successResultOf(
            self.store.cluster.join(ClusterNode(STANDALONE_NODE_NAME, boot, "ann", b""), EXCLUSIVE_LEASE)
        )

    def boots(self) -> list[str]:
        """Of those that are live."""
        return [node.boot for node in self.successResultOf(self.store.cluster.list_nodes())]

    def lapsed(self) -> list[str]:
        """Those that were killed and not cleared away."""
        found: list[str] = self.successResultOf(self.store.cluster.list_lapsed_nodes())
        return found

    def run_for(self, seconds: float) -> None:
        """Let time pass, in small steps."""
        self.clock.pump([EXCLUSIVE_POLL_INTERVAL] * round(seconds / EXCLUSIVE_POLL_INTERVAL))

    def is_served(self) -> bool:
        """Whether a request is."""

        async def work() -> bool:
            return True

        served = Deferred.fromCoroutine(self.gate.run_request(work))
        return bool(served.called)

    def test_stays(self) -> None:
        """For as long as it runs; it leaves at once."""
        alone = self.opened()
        for _ in range(3):
            self.run_for(EXCLUSIVE_LEASE)
            self.assertEqual(self.boots(), ["aaaa"])
        self.successResultOf(alone.stopService())
        self.assertEqual((self.boots(), self.lapsed(), self.said), ([], [], []))
        self.assertEqual(self.clock.getDelayedCalls(), [])
        self.opened("cccc")

    def test_a_second_one(self) -> None:
        """Whatever it is called, it is refused in a line, serves nobody until then, and disturbs nobody."""
        self.opened()
        opening = self.lone("cccc", "cid").open()
        self.assertFalse(self.is_served())
        self.run_for(EXCLUSIVE_LEASE + EXCLUSIVE_RENEWAL_INTERVAL)
        self.assertNoResult(opening)
        self.run_for(EXCLUSIVE_POLL_INTERVAL * 2)
        self.assertEqual(str(self.failureResultOf(opening, StoreUnusable).value), TAKEN)
        self.assertFalse(self.is_served())
        self.assertEqual((self.boots(), self.said), (["aaaa"], []))

    def test_marks(self) -> None:
        """What it pushed is known as its own, or a second one that begins to open the store would take it back."""
        base: Any = SimpleNamespace(cluster=None, node=ClusterNode("ann", "aaaa", "", b""))
        for backend, node in (("mongodb", "aaaa"), ("sqlite", "")):
            config = Config.model_validate({"storage": {"backend": backend}})
            self.assertEqual(get_marking_node(base, config), node)

    def test_keeps_house(self) -> None:
        """Unless the store says that it may not, which one on a file need not be asked."""
        base: Any = SimpleNamespace(
            cluster=None, reactor=self.clock, store=self.store, node=ClusterNode("ann", "aaaa", "", b"")
        )
        leader_lease = build_leader_lease(base, Config.model_validate({"storage": {"backend": "mongodb"}}))
        assert leader_lease is not None
        self.assertIs(self.successResultOf(Deferred.fromCoroutine(leader_lease.is_leader())), True)
        self.store.cluster.acquire_lease = lambda *_: succeed(False)
        self.clock.advance(EXCLUSIVE_LEASE)
        self.assertIs(self.successResultOf(Deferred.fromCoroutine(leader_lease.is_leader())), False)
        self.assertIsNone(build_leader_lease(base, Config.model_validate({"storage": {"backend": "sqlite"}})))

    def test_a_node_of_a_cluster_beside_it(self) -> None:
        """The same, and the store does not let it in either."""
        self.opened()
        opening = open_shared_store(self.clock, self.store, self.gate)
        self.assertFalse(self.is_served())
        self.run_for(EXCLUSIVE_LEASE + EXCLUSIVE_RENEWAL_INTERVAL + EXCLUSIVE_POLL_INTERVAL * 2)
        self.assertEqual(str(self.failureResultOf(opening, StoreUnusable).value), TAKEN)
        self.failureResultOf(self.store.cluster.join(BEA, NODE_LEASE), ClusterSecretMismatch)

    def test_beside_a_cluster(self) -> None:
        """Refused at once in a line that names the nodes; nothing is noted."""
        self.successResultOf(self.store.cluster.join(BEA, NODE_LEASE))
        refusal = self.failureResultOf(self.lone().open(), StoreUnusable)
        self.assertEqual(str(refusal.value), BESIDE)
        self.assertEqual((self.boots(), self.lapsed()), (["bbbb"], []))

    def test_one_that_was_killed(self) -> None:
        """The next one waits for the end of its lease, a few seconds, and ends what it left; so do nodes."""
        for opening in (self.lone("cccc").open, lambda: open_shared_store(self.clock, self.store, self.gate)):
            self.dead()
            opened = opening()
            self.run_for(EXCLUSIVE_LEASE - EXCLUSIVE_POLL_INTERVAL)
            self.assertNoResult(opened)
            self.assertFalse(self.is_served())
            self.run_for(EXCLUSIVE_POLL_INTERVAL)
            self.successResultOf(opened)
            self.assertTrue(self.is_served())
            for boot in ("aaaa", "cccc"):
                self.successResultOf(self.store.cluster.drop(boot, until=inf))

    def test_one_that_was_killed_long_ago(self) -> None:
        """It may be cut off instead; had it a way back, it would have come in the meantime."""
        self.dead()
        self.clock.advance(60)
        opened = self.lone("cccc").open()
        self.run_for(REJOIN_GRACE_PERIOD - EXCLUSIVE_POLL_INTERVAL)
        self.assertNoResult(opened)
        self.run_for(EXCLUSIVE_POLL_INTERVAL)
        self.successResultOf(opened)
        self.assertEqual((self.boots(), self.lapsed()), (["cccc"], []))

    def test_others_that_come_back(self) -> None:
        """After an outage that ended all leases, who starts just then takes nobody's place."""
        self.successResultOf(self.store.cluster.join(BEA, NODE_LEASE))
        self.clock.advance(NODE_LEASE + 1)
        opening = self.lone().open()
        self.run_for(REJOIN_GRACE_PERIOD / 2)
        self.successResultOf(self.store.cluster.join(BEA, NODE_LEASE))
        self.run_for(REJOIN_GRACE_PERIOD / 2)
        self.assertEqual(str(self.failureResultOf(opening, StoreUnusable).value), BESIDE)

    def test_cut_off(self) -> None:
        """It comes back by itself; if its place was taken meanwhile, it ends."""
        for taker, line in (
            (None, ""),
            (ClusterNode(STANDALONE_NODE_NAME, "dddd", "ann", b""), TAKEN),
            (BEA, BESIDE),
        ):
            alone = self.opened()
            renew, join = self.store.cluster.renew, self.store.cluster.join
            self.store.cluster.renew = self.store.cluster.join = lambda *_: fail(StoreUnavailable())
            self.run_for(EXCLUSIVE_LEASE + EXCLUSIVE_RENEWAL_INTERVAL)
            self.assertEqual(self.boots(), [])
            self.store.cluster.renew, self.store.cluster.join = renew, join
            if taker is not None:
                self.successResultOf(join(taker, NODE_LEASE))
            self.run_for(EXCLUSIVE_RENEWAL_INTERVAL)
            self.assertEqual(self.said, [line] if line else [])
            self.assertEqual(self.boots(), [taker.boot] if taker else ["aaaa"])
            self.successResultOf(alone.stopService())
            self.said.clear()
            if taker is not None:
                self.successResultOf(self.store.cluster.drop(taker.boot, until=inf))

    def test_a_wrong_clock_at_the_start(self) -> None:
        """One line, and nobody is served."""
        self.store.cluster.join = lambda *_: fail(ClockSkewError(4320))
        refusal = self.failureResultOf(self.lone().open(), StoreUnusable)
        line = "the clock of this host is 1 h 12 min ahead of the MongoDB server's; at most 60 s are allowed"
        self.assertEqual(str(refusal.value), line)
        self.assertFalse(self.is_served())

    def test_a_wrong_clock_later(self) -> None:
        """It goes on and says so, until the clock is right, whether its lease was over by then or not."""
        self.opened()
        for seconds in (EXCLUSIVE_RENEWAL_INTERVAL, EXCLUSIVE_LEASE + EXCLUSIVE_RENEWAL_INTERVAL):
            really = self.store.cluster.renew, self.store.cluster.join
            self.store.cluster.renew = self.store.cluster.join = lambda *_: fail(ClockSkewError(4320))
            self.run_for(seconds)
            trouble = "the clock of this host is 1 h 12 min ahead of the MongoDB server's"
            self.assertEqual((self.node_health.trouble, self.said), (trouble, []))
            self.store.cluster.renew, self.store.cluster.join = really
            self.run_for(EXCLUSIVE_RENEWAL_INTERVAL)
            self.assertEqual((self.node_health.trouble, self.boots(), self.said), ("", ["aaaa"], []))

    def test_what_is_in_the_way_of_opening(self) -> None:
        """A store that does not open because of what an earlier process left opens the next time."""
        self.dead()
        self.clock.advance(EXCLUSIVE_LEASE)
        again = self.lone("cccc")
        really, self.store.open = self.store.open, lambda: fail(StoreUnavailable())
        opening = again.open()
        self.run_for(REJOIN_GRACE_PERIOD)
        self.failureResultOf(opening, StoreUnavailable)
        self.assertEqual(self.lapsed(), [])
        self.store.open = really
        self.successResultOf(again.open())

    def test_stopped_before(self) -> None:
        """One that waits no longer."""
        self.dead()
        alone = self.lone("cccc")
        opening = alone.open()
        self.successResultOf(alone.stopService())
        self.run_for(EXCLUSIVE_LEASE)
        self.failureResultOf(opening, StoreUnavailable)
        self.assertEqual(self.boots(), [])

    def test_the_store_goes_away_while_it_waits(self) -> None:
        """Whoever waits is answered; it is opened again by whoever asked."""
        self.dead()
        opening = self.lone("cccc").open()
        self.store.cluster.join = lambda *_: fail(StoreUnavailable())
        self.run_for(EXCLUSIVE_POLL_INTERVAL)
        self.failureResultOf(opening, StoreUnavailable)
        self.assertTrue(self.is_served())

    def test_leaving_while_it_is_away(self) -> None:
        """Nobody waits for that."""
        alone = self.opened()
        self.store.cluster.drop = lambda *_, **__: fail(StoreUnavailable())
        self.successResultOf(alone.stopService())

    def test_a_fault_of_ours(self) -> None:
        """It is logged, and the lease is renewed the next time."""
        self.opened()
        really, self.store.cluster.renew = self.store.cluster.renew, lambda *_: fail(RuntimeError("boom"))
        self.run_for(EXCLUSIVE_RENEWAL_INTERVAL)
        self.assertEqual(len(self.flushLoggedErrors(RuntimeError)), 1)
        self.store.cluster.renew = really
        self.run_for(EXCLUSIVE_LEASE)
        self.assertEqual(self.boots(), ["aaaa"])
