"""Who has registered which DID, from memory."""

from __future__ import annotations

from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from mediatord.store.caches import OwnerCache


class OwnerTests(SynchronousTestCase):
    """What is remembered and for how long."""

    def test_lifetime(self) -> None:
        """Where others may change it, an answer is good for a while only."""
        clock = Clock()
        owners: OwnerCache[str] = OwnerCache(now=clock.seconds, lifetime=2.0)
        owners.keep("did:x", "alice", owners.age)
        clock.advance(1.5)
        self.assertEqual(owners.get("did:x"), "alice")
        clock.advance(0.5)
        self.assertIsNone(owners.get("did:x"))
        owners.keep("did:x", "bob", owners.age)
        self.assertEqual(owners.get("did:x"), "bob")

    def test_nothing_is_kept(self) -> None:
        """Where it must not be remembered at all it is not."""
        owners: OwnerCache[str] = OwnerCache(0)
        owners.keep("did:x", "alice", owners.age)
        self.assertIsNone(owners.get("did:x"))

    def test_least_recently_used_goes(self) -> None:
        """Who was asked for last stays."""
        owners: OwnerCache[str] = OwnerCache(2)
        for did in ("did:a", "did:b"):
            owners.keep(did, "alice", owners.age)
        owners.get("did:a")
        owners.keep("did:c", "alice", owners.age)
        self.assertEqual([owners.get(did) for did in ("did:a", "did:b", "did:c")], ["alice", None, "alice"])
