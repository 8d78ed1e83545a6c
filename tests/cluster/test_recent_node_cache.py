"""The cache of nodes that hold sockets of a DID, while wallets connect and disconnect."""

from __future__ import annotations

from twisted.internet.defer import Deferred, fail

from mediatord.cluster.membership import NODE_LEASE, RENEWAL_INTERVAL
from mediatord.cluster.remote_delivery import LOOKUP_DELAY
from mediatord.errors import StoreUnavailable
from tests.cluster.in_memory_cluster import InMemoryClusterTestCase
from tests.cluster.test_didcomm_cluster import DIDCommClusterTestCase
from tests.in_memory_mediator import MP, InMemoryWallet


class RecentNodeCacheTests(DIDCommClusterTestCase):
    """Bob has a socket at b, and a has cached that."""

    names = ("a", "b", "c")

    def setUp(self) -> None:
        InMemoryClusterTestCase.setUp(self)
        self.a, self.b, self.c = self.in_memory_nodes
        self.bob = self.new_wallet(self.a)
        self.bob_at_b = InMemoryWallet(self.b, self.bob.identity)
        self.advance(RENEWAL_INTERVAL)
        self.socket = self.open_live_socket(self.b)
        self.forward(self.a, "first")
        self.advance(LOOKUP_DELAY)
        self.assertEqual(self.read_texts(self.socket), ["first"])

    def hold_lookups(self) -> Deferred[None]:
        """Delay the store's presence lookups until the returned Deferred fires."""
        cluster, held = self.store.cluster, Deferred[None]()
        whereabouts = cluster.find_presence
        cluster.find_presence = lambda dids: held.addCallback(lambda _: whereabouts(dids))
        self.addCleanup(delattr, cluster, "find_presence")
        return held

    def count_stale(self) -> float:
        """How often a was wrong."""
        return self.a.counter("mediator_cluster_stale_presence_total")

    def test_push_does_not_wait_for_lookup(self) -> None:
        """A push does not wait for the presence lookup; the event log has it once a socket accepted it."""
        held = self.hold_lookups()
        self.forward(self.a)
        self.assertEqual((self.read_texts(self.socket), self.list_methods(self.a)), (["hello"], ["live", "live"]))
        held.callback(None)
        self.advance(1)
        self.assertEqual((self.read_texts(self.socket), self.network.requests, self.count_stale()), ([], 2, 0))

    def test_second_socket(self) -> None:
        """A second socket, at another node, gets the message at once and in order."""
        other_socket = self.open_live_socket(self.c)
        self.forward(self.a, "1")
        self.forward(self.a, "2")
        self.advance(LOOKUP_DELAY)
        self.assertEqual((self.read_texts(self.socket), self.read_texts(other_socket)), (["1", "2"], ["1", "2"]))

    def test_moved_socket(self) -> None:
        """A wallet that reconnects at another node gets it there at once; the stale entry is counted."""
        self.b.base.connections.closed(self.socket)
        other_socket = self.open_live_socket(self.c)
        self.forward(self.a)
        self.advance(LOOKUP_DELAY)
        self.assertEqual((self.read_texts(other_socket), self.count_stale()), (["hello"], 1))
        self.assertEqual(
            (self.count_notifications(self.a, "no_session"), self.list_methods(self.a)), (1, ["live", "live"])
        )
        self.forward(self.a, "next")
        self.assertEqual(self.read_texts(other_socket), ["next"])

    def test_live_after_enqueue(self) -> None:
        """A message stored before is in the status of the wallet, whatever a later lookup says."""
        held = self.hold_lookups()
        self.forward(self.a, "stored")
        other_socket = self.c.socket()
        reply = InMemoryWallet(self.c, self.bob.identity).answer(
            f"{MP}/live-delivery-change", {"live_delivery": True}, socket=other_socket
        )
        self.assertEqual(reply.body["message_count"], 2)
        other_socket.frames.clear()
        held.callback(None)
        self.advance(LOOKUP_DELAY)
        self.forward(self.a, "after")
        self.advance(LOOKUP_DELAY)
        self.assertEqual(self.read_texts(other_socket)[-1], "after")

    def test_closed_socket(self) -> None:
        """Without a socket anywhere the message waits, and the next one notifies nobody."""
        self.b.base.connections.closed(self.socket)
        self.forward(self.a)
        self.advance(LOOKUP_DELAY)
        self.assertEqual((self.count_stale(), self.list_methods(self.a)), (1, ["live", "queue"]))
        before = self.network.requests
        self.forward(self.a)
        self.advance(LOOKUP_DELAY)
        self.assertEqual((self.count_stale(), self.network.requests), (1, before))

    def test_lookup_fails(self) -> None:
        """If the lookup fails the last known node is used."""
        self.store.cluster.find_presence = lambda dids: fail(StoreUnavailable())
        self.addCleanup(delattr, self.store.cluster, "find_presence")
        self.forward(self.a)
        self.assertEqual((self.read_texts(self.socket), self.list_methods(self.a)), (["hello"], ["live", "live"]))

    def test_stopped_node(self) -> None:
        """It is forgotten within a moment, and the wallet is found where it is."""
        self.b.stop()
        self.advance(RENEWAL_INTERVAL)
        other_socket = self.open_live_socket(self.c)
        failed = self.count_notifications(self.a, "failed")
        self.forward(self.a)
        self.assertEqual(
            (self.read_texts(other_socket), self.count_notifications(self.a, "failed")), (["hello"], failed)
        )

    def test_node_stopped_a_moment_ago(self) -> None:
        """Nothing waits for it."""
        self.b.stop()
        other_socket = self.open_live_socket(self.c)
        other_socket.takes = False
        self.forward(self.a)
        self.advance(LOOKUP_DELAY)
        self.assertEqual(self.list_methods(self.a), ["live", "queue"])

    def test_killed_node(self) -> None:
        """It is kept while its lease lasts, and then forgotten."""
        self.b.freeze()
        other_socket = self.open_live_socket(self.c)
        self.forward(self.a)
        self.advance(LOOKUP_DELAY)
        self.assertEqual(self.read_texts(other_socket), ["hello"])
        self.advance(NODE_LEASE + RENEWAL_INTERVAL)
        failed = self.count_notifications(self.a, "failed")
        self.forward(self.a, "next")
        self.assertEqual(
            (self.read_texts(other_socket)[-1], self.count_notifications(self.a, "failed")), ("next", failed)
        )
