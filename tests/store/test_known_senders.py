"""Whom a recipient knows, by what it has acknowledged and when."""

from __future__ import annotations

from itertools import count

from twisted.trial.unittest import SynchronousTestCase

from mediatord.store.fair_share import (
    DORMANT_SECONDS,
    MAX_KNOWN_SENDERS,
    MAX_REMEMBERED_SENDERS,
    PROBATION_SECONDS,
    REFRESH_SECONDS,
    KnownSenders,
)

DAY = 86_400
FRIEND = 1 << 62


class KnownSendersTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.senders = KnownSenders()
        self.now = 1_800_000_000.0
        self.strangers = count(1)

    def acknowledge(self, *parties: int, later: float = 0.0) -> bool:
        """After so many seconds; whether there is anything to write."""
        self.now += later
        return self.senders.acknowledged(parties, self.now)

    def befriend(self, *parties: int) -> None:
        """Have these known."""
        self.acknowledge(*parties)
        self.acknowledge(*parties, later=PROBATION_SECONDS)

    def remembered(self) -> int:
        """Parties of which anything is kept."""
        return self.senders.text().count("[") - 1

    def test_probation(self) -> None:
        """One becomes known by the second acknowledgement that is an hour after the first, and by no other."""
        self.assertTrue(self.acknowledge(FRIEND))
        self.assertFalse(self.acknowledge(FRIEND, later=PROBATION_SECONDS - 1))
        self.assertEqual(self.senders.known, frozenset())
        self.assertTrue(self.acknowledge(FRIEND, later=1))
        self.assertEqual(self.senders.known, {FRIEND})

    def test_clock_set_back(self) -> None:
        """Nobody becomes known by that, nor unknown."""
        self.acknowledge(FRIEND)
        self.assertFalse(self.acknowledge(FRIEND, later=-DAY))
        self.assertEqual(self.senders.known, frozenset())
        self.acknowledge(FRIEND, later=DAY + PROBATION_SECONDS)
        self.assertFalse(self.acknowledge(FRIEND, later=-DAY))
        self.assertEqual(self.senders.known, {FRIEND})

    def test_written_seldom(self) -> None:
        """Of who is known nothing is written for a day, however much is acknowledged."""
        self.befriend(FRIEND)
        self.assertFalse(any(self.acknowledge(FRIEND, later=REFRESH_SECONDS // 100) for _ in range(99)))
        self.assertTrue(self.acknowledge(FRIEND, later=REFRESH_SECONDS))

    def test_text(self) -> None:
        """What is kept is all there is, and no more than a few kilobytes."""
        self.befriend(FRIEND, 5)
        again = KnownSenders(self.senders.text())
        self.assertEqual((again.known, again.text()), ({FRIEND, 5}, self.senders.text()))
        self.acknowledge(*range(1 << 62, (1 << 62) + 2 * MAX_REMEMBERED_SENDERS))
        self.assertLess(len(self.senders.text()), 3_000)
        self.assertEqual(KnownSenders(None).text(), "[]")

    def test_strangers_do_not_push_out_who_is_known(self) -> None:
        """However many of them there are: they take the places of each other."""
        self.befriend(FRIEND)
        for _ in range(10 * MAX_REMEMBERED_SENDERS):
            self.acknowledge(next(self.strangers), later=1)
        self.assertEqual((self.senders.known, self.remembered()), ({FRIEND}, MAX_REMEMBERED_SENDERS))

    def test_known_ones_do_not_push_out_each_other(self) -> None:
        """Whoever became known stays so, and there are places left for others to begin."""
        self.befriend(FRIEND)
        for _ in range(2 * MAX_REMEMBERED_SENDERS):
            self.befriend(next(self.strangers))
        self.assertEqual(len(self.senders.known), MAX_KNOWN_SENDERS)
        self.assertIn(FRIEND, self.senders.known)
        self.assertEqual(self.remembered(), MAX_REMEMBERED_SENDERS)

    def test_dormant(self) -> None:
        """Of whom nothing has come for a month, that makes a place, the longest one first."""
        self.befriend(FRIEND)
        for _ in range(MAX_KNOWN_SENDERS - 1):
            self.befriend(next(self.strangers))
        self.befriend(2 * FRIEND)
        self.assertIn(FRIEND, self.senders.known)
        self.now += DORMANT_SECONDS
        self.befriend(2 * FRIEND + 1)
        self.assertIn(2 * FRIEND + 1, self.senders.known)
        self.assertNotIn(FRIEND, self.senders.known)
        self.assertEqual(len(self.senders.known), MAX_KNOWN_SENDERS)
