"""Nodes that remember where the sockets of a DID are, and wallets that come and go meanwhile."""

from __future__ import annotations

from twisted.internet.defer import Deferred, fail

from mediatord.cluster.membership import NODE_LEASE, RENEWAL_INTERVAL
from mediatord.cluster.remote_delivery import LOOKUP_DELAY
from mediatord.errors import StoreUnavailable
from tests.cluster.in_memory_cluster import InMemoryClusterTestCase
from tests.cluster.test_didcomm_cluster import DIDCommClusterTestCase
from tests.in_memory_mediator import MP, InMemoryWallet


class RecentNodeCacheTests(DIDCommClusterTestCase):
    """Bob has a socket at b, and a knows."""

    names = ("a", "b", "c")

    def setUp(self) -> None:
        InMemoryClusterTestCase.setUp(self)
        self.a, self.b, self.c = self.in_memory_nodes
        self.bob = self.new_wallet(self.a)
        self.bob_at_b = InMemoryWallet(self.b, self.bob.identity)
        self.later(RENEWAL_INTERVAL)
        self.socket = self.live_at(self.b)
        self.forward(self.a, "first")
        self.later(LOOKUP_DELAY)
        self.assertEqual(self.texts(self.socket), ["first"])

    def hold(self) -> Deferred[None]:
        """Let the store be slow to say where sockets are; fires for it to be done."""
        cluster, held = self.store.cluster, Deferred[None]()
        whereabouts = cluster.find_presence
        cluster.find_presence = lambda dids: held.addCallback(lambda _: whereabouts(dids))
        self.addCleanup(delattr, cluster, "find_presence")
        return held

    def stale(self) -> float:
        """How often a was wrong."""
        return self.a.counter("mediator_cluster_stale_presence_total")

    def test_at_once(self) -> None:
        """A push waits for no answer about sockets; the log has it as soon as one took it."""
        held = self.hold()
        self.forward(self.a)
        self.assertEqual((self.texts(self.socket), self.methods(self.a)), (["hello"], ["live", "live"]))
        held.callback(None)
        self.later(1)
        self.assertEqual((self.texts(self.socket), self.network.requests, self.stale()), ([], 2, 0))

    def test_one_more(self) -> None:
        """A second socket, at another node, gets it too, at once, and in order."""
        there = self.live_at(self.c)
        self.forward(self.a, "1")
        self.forward(self.a, "2")
        self.later(LOOKUP_DELAY)
        self.assertEqual((self.texts(self.socket), self.texts(there)), (["1", "2"], ["1", "2"]))

    def test_moved(self) -> None:
        """A wallet that has come back at another node gets it there at once; the guess is counted as wrong."""
        self.b.base.connections.closed(self.socket)
        there = self.live_at(self.c)
        self.forward(self.a)
        self.later(LOOKUP_DELAY)
        self.assertEqual((self.texts(there), self.stale()), (["hello"], 1))
        self.assertEqual((self.pushes(self.a, "no_session"), self.methods(self.a)), (1, ["live", "live"]))
        self.forward(self.a, "next")
        self.assertEqual(self.texts(there), ["next"])

    def test_goes_live_after_the_deposit(self) -> None:
        """What was stored before is in the status that a wallet is told, whatever the store says of sockets later."""
        held = self.hold()
        self.forward(self.a, "stored")
        there = self.c.socket()
        reply = InMemoryWallet(self.c, self.bob.identity).answer(
            f"{MP}/live-delivery-change", {"live_delivery": True}, socket=there
        )
        self.assertEqual(reply.body["message_count"], 2)
        there.frames.clear()
        held.callback(None)
        self.later(LOOKUP_DELAY)
        self.forward(self.a, "after")
        self.later(LOOKUP_DELAY)
        self.assertEqual(self.texts(there)[-1], "after")

    def test_gone(self) -> None:
        """With no socket anywhere the message waits, and nobody is asked about the next one."""
        self.b.base.connections.closed(self.socket)
        self.forward(self.a)
        self.later(LOOKUP_DELAY)
        self.assertEqual((self.stale(), self.methods(self.a)), (1, ["live", "queue"]))
        before = self.network.requests
        self.forward(self.a)
        self.later(LOOKUP_DELAY)
        self.assertEqual((self.stale(), self.network.requests), (1, before))

    def test_store_does_not_know(self) -> None:
        """Where nobody can say where sockets are, the last place is as good as any."""
        self.store.cluster.find_presence = lambda dids: fail(StoreUnavailable())
        self.addCleanup(delattr, self.store.cluster, "find_presence")
        self.forward(self.a)
        self.assertEqual((self.texts(self.socket), self.methods(self.a)), (["hello"], ["live", "live"]))

    def test_node_stopped(self) -> None:
        """Within a moment it is forgotten, and the wallet found where it is."""
        self.b.stop()
        self.later(RENEWAL_INTERVAL)
        there = self.live_at(self.c)
        failed = self.pushes(self.a, "failed")
        self.forward(self.a)
        self.assertEqual((self.texts(there), self.pushes(self.a, "failed")), (["hello"], failed))

    def test_node_stopped_a_moment_ago(self) -> None:
        """Nobody waits for it."""
        self.b.stop()
        there = self.live_at(self.c)
        there.takes = False
        self.forward(self.a)
        self.later(LOOKUP_DELAY)
        self.assertEqual(self.methods(self.a), ["live", "queue"])

    def test_node_killed(self) -> None:
        """While its lease lasts it may be there; then it is forgotten."""
        self.b.freeze()
        there = self.live_at(self.c)
        self.forward(self.a)
        self.later(LOOKUP_DELAY)
        self.assertEqual(self.texts(there), ["hello"])
        self.later(NODE_LEASE + RENEWAL_INTERVAL)
        failed = self.pushes(self.a, "failed")
        self.forward(self.a, "next")
        self.assertEqual((self.texts(there)[-1], self.pushes(self.a, "failed")), ("next", failed))
