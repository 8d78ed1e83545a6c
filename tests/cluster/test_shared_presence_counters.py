"""Counters of sockets that come, in memory that several workers share."""

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
        self.first, self.second, self.third = (self.worker(number) for number in (1, 2, 3))

    def worker(self, number: int) -> SharedPresenceCounters:
        """As it finds it, counted from 1."""
        found = SharedPresenceCounters.open(self.directory / f"{number}.sock")
        assert found is not None
        return found

    def test_others_see_it(self) -> None:
        """That of the DID changes, for all but the worker that it came to."""
        before = [(one.epoch(BOB), one.epoch(EVE)) for one in (self.first, self.second, self.third)]
        self.second.increment([BOB])
        after = [(one.epoch(BOB), one.epoch(EVE)) for one in (self.first, self.second, self.third)]
        changed = [(a[0] != b[0], a[1] != b[1]) for a, b in zip(before, after, strict=True)]
        self.assertEqual(changed, [(True, False), (False, False), (True, False)])

    def test_each_counts(self) -> None:
        """Never back to what it was, whoever comes."""
        signs = [self.first.epoch(BOB)]
        for one in (self.second, self.third, self.second, self.worker(2)):
            one.increment([EVE, BOB])
            signs.append(self.first.epoch(BOB))
        self.assertEqual(len(set(signs)), 5)

    def test_any_name(self) -> None:
        """Also one that no encoding has."""
        self.second.increment(["\ud800", "", "x" * 5000])
        self.assertNotEqual(self.first.epoch("\ud800"), self.second.epoch("\ud800"))

    def test_room(self) -> None:
        """As much as all of them need; a supervisor of before has made none."""
        self.assertEqual(presence_counter_path(self.directory / "1.sock").stat().st_size, 3 * COUNTERS_PER_WORKER * 8)
        self.assertIsNone(SharedPresenceCounters.open(self.directory / "nowhere" / "1.sock"))
