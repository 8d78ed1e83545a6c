"""The cache of presence, and the lookups that it saves."""

from __future__ import annotations

from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from mediatord.cluster import presence
from mediatord.cluster.presence import RECENT_NODE_TTL, PresenceCache
from mediatord.store.interfaces.cluster_and_quotas import ClusterNode
from tests.in_memory_mediator import NOW

BOB, EVE = "did:x:bob", "did:x:eve"
ANN, BEA, CAL = (
    ClusterNode(name, name * 2, "tcp:host=10.0.0.1:port=7070", b"seal") for name in ("ann", "bea", "cal")
)


class PresenceCacheTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = Clock()
        self.clock.advance(NOW)
        self.cache = PresenceCache(self.clock)
        self.cache.set_live_nodes([ANN.boot, BEA.boot])

    def test_guess_expires(self) -> None:
        """A guess expires some time after the latest lookup."""
        self.cache.record(BOB, [BEA])
        self.clock.advance(RECENT_NODE_TTL - 1)
        self.assertEqual(self.cache.get_nodes(BOB), [BEA])
        self.cache.record(BOB, [BEA, ANN])
        self.clock.advance(RECENT_NODE_TTL - 1)
        self.assertEqual(self.cache.get_nodes(BOB), [BEA, ANN])
        self.clock.advance(1)
        self.assertEqual(self.cache.get_nodes(BOB), ())

    def test_absence_is_not_cached(self) -> None:
        """Absence is not cached, as a socket may connect at any time."""
        self.cache.record(BOB, [BEA])
        self.cache.record(BOB, [])
        self.assertEqual((list(self.cache.get_nodes(BOB)), len(self.cache)), ([], 0))

    def test_removed_node(self) -> None:
        """A node that is not live is left out."""
        self.cache.record(BOB, [ANN, BEA])
        self.cache.set_live_nodes([ANN.boot])
        self.assertEqual(self.cache.get_nodes(BOB), [ANN])

    def test_limit(self) -> None:
        """The entry that was recorded first is dropped."""
        self.patch(presence, "MAX_CACHED_DIDS", 2)
        for did in (BOB, EVE, BOB, "did:x:sue"):
            self.cache.record(did, [BEA])
        self.assertEqual([list(self.cache.get_nodes(did)) for did in (BOB, EVE, "did:x:sue")], [[BEA], [], [BEA]])
