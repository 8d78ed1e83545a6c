"""The cache of owners of recipient DIDs."""

from __future__ import annotations

from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from mediatord.store.caches import OwnerCache


class OwnerCacheTests(SynchronousTestCase):
    """Lifetime and size of the cache."""

    def test_entry_expires(self) -> None:
        """Where other processes may change an owner, an entry is valid for a limited time."""
        clock = Clock()
        owners: OwnerCache[str] = OwnerCache(now=clock.seconds, lifetime=2.0)
        owners.keep("did:x", "alice", owners.age)
        clock.advance(1.5)
        self.assertEqual(owners.get("did:x"), "alice")
        clock.advance(0.5)
        self.assertIsNone(owners.get("did:x"))
        owners.keep("did:x", "bob", owners.age)
        self.assertEqual(owners.get("did:x"), "bob")

    def test_lifetime_zero_disables_cache(self) -> None:
        """With a lifetime of zero nothing is cached."""
        owners: OwnerCache[str] = OwnerCache(0)
        owners.keep("did:x", "alice", owners.age)
        self.assertIsNone(owners.get("did:x"))

    def test_evicts_least_recently_used(self) -> None:
        """The least recently used entry is evicted."""
        owners: OwnerCache[str] = OwnerCache(2)
        for did in ("did:a", "did:b"):
            owners.keep(did, "alice", owners.age)
        owners.get("did:a")
        owners.keep("did:c", "alice", owners.age)
        self.assertEqual([owners.get(did) for did in ("did:a", "did:b", "did:c")], ["alice", None, "alice"])
