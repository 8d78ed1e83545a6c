"""Presence counters in memory that workers share."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from mediatord.cluster.presence import (
    COUNTERS_PER_WORKER,
    SharedPresenceCounters,
    create_presence_counters,
    presence_counter_path,
)

BOB, EVE = "did:x:bob", "did:x:eve"


class SharedPresenceCountersTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.directory = Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.directory)
        create_presence_counters(self.directory / "1.sock", 3)
        self.first, self.second, self.third = (self.open_worker_counters(number) for number in (1, 2, 3))

    def open_worker_counters(self, number: int) -> SharedPresenceCounters:
        """Counters of a worker, numbered from 1."""
        found = SharedPresenceCounters.open(self.directory / f"{number}.sock")
        assert found is not None
        return found

    def test_other_workers_see_change(self) -> None:
        """The epoch of the DID changes for all workers but the one with the socket."""
        before = [(one.epoch(BOB), one.epoch(EVE)) for one in (self.first, self.second, self.third)]
        self.second.increment([BOB])
        after = [(one.epoch(BOB), one.epoch(EVE)) for one in (self.first, self.second, self.third)]
        changed = [(a[0] != b[0], a[1] != b[1]) for a, b in zip(before, after, strict=True)]
        self.assertEqual(changed, [(True, False), (False, False), (True, False)])

    def test_epoch_never_returns(self) -> None:
        """The epoch never returns to an earlier value, whoever counts."""
        signs = [self.first.epoch(BOB)]
        for one in (self.second, self.third, self.second, self.open_worker_counters(2)):
            one.increment([EVE, BOB])
            signs.append(self.first.epoch(BOB))
        self.assertEqual(len(set(signs)), 5)

    def test_any_did(self) -> None:
        """Also one that cannot be encoded."""
        self.second.increment(["\ud800", "", "x" * 5000])
        self.assertNotEqual(self.first.epoch("\ud800"), self.second.epoch("\ud800"))

    def test_size(self) -> None:
        """The file has room for all workers; one of an older supervisor is missing."""
        self.assertEqual(presence_counter_path(self.directory / "1.sock").stat().st_size, 3 * COUNTERS_PER_WORKER * 8)
        self.assertIsNone(SharedPresenceCounters.open(self.directory / "nowhere" / "1.sock"))
