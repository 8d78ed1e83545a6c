"""Counters of live DIDs in memory that workers share."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from mediatord.workers import live_did_counters
from mediatord.workers.live_did_counters import COUNTERS_PER_WORKER, LiveDIDCounters, create_live_did_counters

BOB, EVE = "did:x:bob", "did:x:eve"


class LiveDIDCountersTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.directory = Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.directory)
        create_live_did_counters(self.directory, 3)
        self.first, self.second, self.third = (LiveDIDCounters(self.directory, number) for number in range(3))

    def find_workers(self, did: str = BOB) -> list[list[int]]:
        """What each worker finds."""
        return [one.find_workers(did) for one in (self.first, self.second, self.third)]

    def test_others_see_it_at_once(self) -> None:
        """All workers but the one with the socket find it, however often it subscribes, until it is gone."""
        self.assertEqual(self.find_workers(), [[], [], []])
        for _ in range(2):
            self.successResultOf(self.second.add(BOB))
        self.assertEqual(self.find_workers(), [[1], [], [1]])
        self.third.add(BOB)
        self.assertEqual(self.find_workers(), [[1, 2], [2], [1]])
        self.assertEqual(self.find_workers(EVE), [[], [], []])
        self.second.remove(BOB)
        self.second.remove(BOB)
        self.assertEqual(self.find_workers(), [[2], [2], []])

    def test_shared_counter(self) -> None:
        """A DID that shares its counter with a live one is found too, and stays when that is gone."""
        self.patch(live_did_counters, "COUNTERS_PER_WORKER", 1)
        self.second.add(BOB)
        self.second.add(EVE)
        self.second.remove(BOB)
        self.assertEqual(self.find_workers(BOB), [[1], [], [1]])
        self.second.remove(EVE)
        self.assertEqual(self.find_workers(EVE), [[], [], []])

    def test_replacement_begins_at_zero(self) -> None:
        """What a killed worker has counted is gone when its replacement starts; others keep theirs."""
        self.second.add(BOB)
        self.third.add(BOB)
        self.second = LiveDIDCounters(self.directory, 1)
        self.assertEqual(self.find_workers(), [[2], [2], []])

    def test_any_did(self) -> None:
        """Also one that cannot be encoded."""
        for did in ("\ud800", "", "x" * 5000):
            self.second.add(did)
            self.assertEqual(self.first.find_workers(did), [1])

    def test_size(self) -> None:
        """The file has room for all workers, whatever is counted."""
        (path,) = self.directory.iterdir()
        self.assertEqual(path.stat().st_size, 3 * COUNTERS_PER_WORKER * 4)
