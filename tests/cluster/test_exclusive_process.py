"""A single process on a store that can be shared."""

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
SECOND_PROCESS_REFUSED = "node ann uses this database exclusively; set cluster.listen on every node to share it"
NODES_PRESENT = "cluster.listen is null, but a cluster uses this database: bea; set it, or stop these nodes"


class ExclusiveProcessTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = Clock()
        self.clock.advance(NOW)
        self.store: Any = MemoryStore(self.clock, QueueLimits())
        # Another user keeps the memory store open, or it would be empty each time.
        self.successResultOf(self.store.open())
        self.fatal_errors: list[str] = []
        self.gate = RequestGate(self.clock)
        self.gate.startService()
        self.node_health = NodeHealth(self.clock)

    def make_process(self, boot: str = "aaaa", name: str = "ann") -> ExclusiveStoreLease:
        """A process that requires exclusive use."""
        node = ClusterNode(name, boot, "", b"")
        alone = ExclusiveStoreLease(
            self.clock, self.store, node, self.gate, self.node_health, self.fatal_errors.append
        )
        alone.startService()
        return alone

    def open_process(self, boot: str = "aaaa") -> ExclusiveStoreLease:
        """One that opens the store without conflict."""
        alone = self.make_process(boot)
        self.successResultOf(alone.open())
        return alone

    def kill_process(self, boot: str = "aaaa") -> None:
        """Leave the records of a process that was killed."""
        self.successResultOf(
            self.store.cluster.join(ClusterNode(STANDALONE_NODE_NAME, boot, "ann", b""), EXCLUSIVE_LEASE)
        )

    def list_boots(self) -> list[str]:
        """Boots of the live nodes."""
        return [node.boot for node in self.successResultOf(self.store.cluster.list_nodes())]

    def list_lapsed(self) -> list[str]:
        """Nodes that were killed and not dropped."""
        found: list[str] = self.successResultOf(self.store.cluster.list_lapsed_nodes())
        return found

    def run_for(self, seconds: float) -> None:
        """Let time pass, in small steps."""
        self.clock.pump([EXCLUSIVE_POLL_INTERVAL] * round(seconds / EXCLUSIVE_POLL_INTERVAL))

    def is_served(self) -> bool:
        """Whether a request is served."""

        async def work() -> bool:
            return True

        served = Deferred.fromCoroutine(self.gate.run_request(work))
        return bool(served.called)

    def test_keeps_lease_until_stopped(self) -> None:
        """The process keeps its lease as long as it runs, and leaves at once."""
        alone = self.open_process()
        for _ in range(3):
            self.run_for(EXCLUSIVE_LEASE)
            self.assertEqual(self.list_boots(), ["aaaa"])
        self.successResultOf(alone.stopService())
        self.assertEqual((self.list_boots(), self.list_lapsed(), self.fatal_errors), ([], [], []))
        self.assertEqual(self.clock.getDelayedCalls(), [])
        self.open_process("cccc")

    def test_second_process_is_refused(self) -> None:
        """A second process of any name is refused in one line, serves nothing until then, and disturbs nobody."""
        self.open_process()
        opening = self.make_process("cccc", "cid").open()
        self.assertFalse(self.is_served())
        self.run_for(EXCLUSIVE_LEASE + EXCLUSIVE_RENEWAL_INTERVAL)
        self.assertNoResult(opening)
        self.run_for(EXCLUSIVE_POLL_INTERVAL * 2)
        self.assertEqual(str(self.failureResultOf(opening, StoreUnusable).value), SECOND_PROCESS_REFUSED)
        self.assertFalse(self.is_served())
        self.assertEqual((self.list_boots(), self.fatal_errors), (["aaaa"], []))

    def test_delivery_marks_name_process(self) -> None:
        """Its pushes have its boot, or a second process that opens the store would requeue them."""
        base: Any = SimpleNamespace(cluster=None, node=ClusterNode("ann", "aaaa", "", b""))
        for backend, node in (("mongodb", "aaaa"), ("sqlite", "")):
            config = Config.model_validate({"storage": {"backend": backend}})
            self.assertEqual(get_marking_node(base, config), node)

    def test_is_leader(self) -> None:
        """It does the housekeeping unless the store refuses, which SQLite never does."""
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

    def test_cluster_node_beside_it(self) -> None:
        """A cluster node is refused too, and the store refuses it as well."""
        self.open_process()
        opening = open_shared_store(self.clock, self.store, self.gate)
        self.assertFalse(self.is_served())
        self.run_for(EXCLUSIVE_LEASE + EXCLUSIVE_RENEWAL_INTERVAL + EXCLUSIVE_POLL_INTERVAL * 2)
        self.assertEqual(str(self.failureResultOf(opening, StoreUnusable).value), SECOND_PROCESS_REFUSED)
        self.failureResultOf(self.store.cluster.join(BEA, NODE_LEASE), ClusterSecretMismatch)

    def test_beside_a_cluster(self) -> None:
        """It is refused at once in a line that names the nodes, and leaves no record."""
        self.successResultOf(self.store.cluster.join(BEA, NODE_LEASE))
        refusal = self.failureResultOf(self.make_process().open(), StoreUnusable)
        self.assertEqual(str(refusal.value), NODES_PRESENT)
        self.assertEqual((self.list_boots(), self.list_lapsed()), (["bbbb"], []))

    def test_waits_for_lease_of_killed_process(self) -> None:
        """The next process waits for the end of the lease, a few seconds, and cleans up; so do nodes."""
        for opening in (self.make_process("cccc").open, lambda: open_shared_store(self.clock, self.store, self.gate)):
            self.kill_process()
            opened = opening()
            self.run_for(EXCLUSIVE_LEASE - EXCLUSIVE_POLL_INTERVAL)
            self.assertNoResult(opened)
            self.assertFalse(self.is_served())
            self.run_for(EXCLUSIVE_POLL_INTERVAL)
            self.successResultOf(opened)
            self.assertTrue(self.is_served())
            for boot in ("aaaa", "cccc"):
                self.successResultOf(self.store.cluster.drop(boot, until=inf))

    def test_process_killed_long_ago(self) -> None:
        """It might be cut off instead, but would have returned in the meantime."""
        self.kill_process()
        self.clock.advance(60)
        opened = self.make_process("cccc").open()
        self.run_for(REJOIN_GRACE_PERIOD - EXCLUSIVE_POLL_INTERVAL)
        self.assertNoResult(opened)
        self.run_for(EXCLUSIVE_POLL_INTERVAL)
        self.successResultOf(opened)
        self.assertEqual((self.list_boots(), self.list_lapsed()), (["cccc"], []))

    def test_others_return_after_outage(self) -> None:
        """After an outage that ended all leases, a process that starts just then replaces nobody."""
        self.successResultOf(self.store.cluster.join(BEA, NODE_LEASE))
        self.clock.advance(NODE_LEASE + 1)
        opening = self.make_process().open()
        self.run_for(REJOIN_GRACE_PERIOD / 2)
        self.successResultOf(self.store.cluster.join(BEA, NODE_LEASE))
        self.run_for(REJOIN_GRACE_PERIOD / 2)
        self.assertEqual(str(self.failureResultOf(opening, StoreUnusable).value), NODES_PRESENT)

    def test_cut_off_process_returns(self) -> None:
        """A cut-off process returns by itself; if it was replaced meanwhile, it ends."""
        for taker, line in (
            (None, ""),
            (ClusterNode(STANDALONE_NODE_NAME, "dddd", "ann", b""), SECOND_PROCESS_REFUSED),
            (BEA, NODES_PRESENT),
        ):
            alone = self.open_process()
            renew, join = self.store.cluster.renew, self.store.cluster.join
            self.store.cluster.renew = self.store.cluster.join = lambda *_: fail(StoreUnavailable())
            self.run_for(EXCLUSIVE_LEASE + EXCLUSIVE_RENEWAL_INTERVAL)
            self.assertEqual(self.list_boots(), [])
            self.store.cluster.renew, self.store.cluster.join = renew, join
            if taker is not None:
                self.successResultOf(join(taker, NODE_LEASE))
            self.run_for(EXCLUSIVE_RENEWAL_INTERVAL)
            self.assertEqual(self.fatal_errors, [line] if line else [])
            self.assertEqual(self.list_boots(), [taker.boot] if taker else ["aaaa"])
            self.successResultOf(alone.stopService())
            self.fatal_errors.clear()
            if taker is not None:
                self.successResultOf(self.store.cluster.drop(taker.boot, until=inf))

    def test_wrong_clock_at_start(self) -> None:
        """It ends with one line and serves nothing."""
        self.store.cluster.join = lambda *_: fail(ClockSkewError(4320))
        refusal = self.failureResultOf(self.make_process().open(), StoreUnusable)
        line = "the clock of this host is 1 h 12 min ahead of the MongoDB server's; at most 60 s are allowed"
        self.assertEqual(str(refusal.value), line)
        self.assertFalse(self.is_served())

    def test_wrong_clock_later(self) -> None:
        """It goes on and reports the clock until that is right, whether its lease ended by then or not."""
        self.open_process()
        for seconds in (EXCLUSIVE_RENEWAL_INTERVAL, EXCLUSIVE_LEASE + EXCLUSIVE_RENEWAL_INTERVAL):
            really = self.store.cluster.renew, self.store.cluster.join
            self.store.cluster.renew = self.store.cluster.join = lambda *_: fail(ClockSkewError(4320))
            self.run_for(seconds)
            trouble = "the clock of this host is 1 h 12 min ahead of the MongoDB server's"
            self.assertEqual((self.node_health.trouble, self.fatal_errors), (trouble, []))
            self.store.cluster.renew, self.store.cluster.join = really
            self.run_for(EXCLUSIVE_RENEWAL_INTERVAL)
            self.assertEqual((self.node_health.trouble, self.list_boots(), self.fatal_errors), ("", ["aaaa"], []))

    def test_opens_after_conflict(self) -> None:
        """A store that an earlier process kept from opening opens the next time."""
        self.kill_process()
        self.clock.advance(EXCLUSIVE_LEASE)
        next_process = self.make_process("cccc")
        really, self.store.open = self.store.open, lambda: fail(StoreUnavailable())
        opening = next_process.open()
        self.run_for(REJOIN_GRACE_PERIOD)
        self.failureResultOf(opening, StoreUnavailable)
        self.assertEqual(self.list_lapsed(), [])
        self.store.open = really
        self.successResultOf(next_process.open())

    def test_stopped_while_waiting(self) -> None:
        """It can be stopped while it waits."""
        self.kill_process()
        alone = self.make_process("cccc")
        opening = alone.open()
        self.successResultOf(alone.stopService())
        self.run_for(EXCLUSIVE_LEASE)
        self.failureResultOf(opening, StoreUnavailable)
        self.assertEqual(self.list_boots(), [])

    def test_store_outage_while_waiting(self) -> None:
        """Waiting requests fail; the next one opens the store again."""
        self.kill_process()
        opening = self.make_process("cccc").open()
        self.store.cluster.join = lambda *_: fail(StoreUnavailable())
        self.run_for(EXCLUSIVE_POLL_INTERVAL)
        self.failureResultOf(opening, StoreUnavailable)
        self.assertTrue(self.is_served())

    def test_stops_during_outage(self) -> None:
        """Stopping does not wait for the store."""
        alone = self.open_process()
        self.store.cluster.drop = lambda *_, **__: fail(StoreUnavailable())
        self.successResultOf(alone.stopService())

    def test_programming_error_is_logged(self) -> None:
        """A programming error is logged, and the lease is renewed the next time."""
        self.open_process()
        really, self.store.cluster.renew = self.store.cluster.renew, lambda *_: fail(RuntimeError("boom"))
        self.run_for(EXCLUSIVE_RENEWAL_INTERVAL)
        self.assertEqual(len(self.flushLoggedErrors(RuntimeError)), 1)
        self.store.cluster.renew = really
        self.run_for(EXCLUSIVE_LEASE)
        self.assertEqual(self.list_boots(), ["aaaa"])
