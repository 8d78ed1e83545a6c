"""Known senders of a recipient, by what it has acknowledged and when."""

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
KNOWN_PARTY = 1 << 62


class KnownSendersTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.senders = KnownSenders()
        self.now = 1_800_000_000.0
        self.new_parties = count(1)

    def acknowledge(self, *parties: int, later: float = 0.0) -> bool:
        """Acknowledge messages so many seconds later; return whether there is a change to store."""
        self.now += later
        return self.senders.acknowledged(parties, self.now)

    def make_known(self, *parties: int) -> None:
        """Make these parties known."""
        self.acknowledge(*parties)
        self.acknowledge(*parties, later=PROBATION_SECONDS)

    def list_remembered(self) -> int:
        """Parties of which anything is stored."""
        return self.senders.text().count("[") - 1

    def test_known_by_acknowledgements_an_hour_apart(self) -> None:
        """A party becomes known by an acknowledgement an hour or more after the first, and by no other."""
        self.assertTrue(self.acknowledge(KNOWN_PARTY))
        self.assertFalse(self.acknowledge(KNOWN_PARTY, later=PROBATION_SECONDS - 1))
        self.assertEqual(self.senders.known, frozenset())
        self.assertTrue(self.acknowledge(KNOWN_PARTY, later=1))
        self.assertEqual(self.senders.known, {KNOWN_PARTY})

    def test_clock_set_back_changes_nothing(self) -> None:
        """A clock set back makes nobody known or unknown."""
        self.acknowledge(KNOWN_PARTY)
        self.assertFalse(self.acknowledge(KNOWN_PARTY, later=-DAY))
        self.assertEqual(self.senders.known, frozenset())
        self.acknowledge(KNOWN_PARTY, later=DAY + PROBATION_SECONDS)
        self.assertFalse(self.acknowledge(KNOWN_PARTY, later=-DAY))
        self.assertEqual(self.senders.known, {KNOWN_PARTY})

    def test_known_sender_is_written_once_a_day(self) -> None:
        """For a known sender nothing is written for a day, however much is acknowledged."""
        self.make_known(KNOWN_PARTY)
        self.assertFalse(any(self.acknowledge(KNOWN_PARTY, later=REFRESH_SECONDS // 100) for _ in range(99)))
        self.assertTrue(self.acknowledge(KNOWN_PARTY, later=REFRESH_SECONDS))

    def test_stored_form_is_complete_and_small(self) -> None:
        """The stored form has all data in a few kilobytes."""
        self.make_known(KNOWN_PARTY, 5)
        restored = KnownSenders(self.senders.text())
        self.assertEqual((restored.known, restored.text()), ({KNOWN_PARTY, 5}, self.senders.text()))
        self.acknowledge(*range(1 << 62, (1 << 62) + 2 * MAX_REMEMBERED_SENDERS))
        self.assertLess(len(self.senders.text()), 3_000)
        self.assertEqual(KnownSenders(None).text(), "[]")

    def test_new_parties_replace_each_other(self) -> None:
        """Any number of new parties replace each other, not known ones."""
        self.make_known(KNOWN_PARTY)
        for _ in range(10 * MAX_REMEMBERED_SENDERS):
            self.acknowledge(next(self.new_parties), later=1)
        self.assertEqual((self.senders.known, self.list_remembered()), ({KNOWN_PARTY}, MAX_REMEMBERED_SENDERS))

    def test_known_parties_stay(self) -> None:
        """Known parties are not replaced, and some places are left for new ones."""
        self.make_known(KNOWN_PARTY)
        for _ in range(2 * MAX_REMEMBERED_SENDERS):
            self.make_known(next(self.new_parties))
        self.assertEqual(len(self.senders.known), MAX_KNOWN_SENDERS)
        self.assertIn(KNOWN_PARTY, self.senders.known)
        self.assertEqual(self.list_remembered(), MAX_REMEMBERED_SENDERS)

    def test_idle_parties_are_replaced(self) -> None:
        """Parties idle for a month are replaced, the longest idle first."""
        self.make_known(KNOWN_PARTY)
        for _ in range(MAX_KNOWN_SENDERS - 1):
            self.make_known(next(self.new_parties))
        self.make_known(2 * KNOWN_PARTY)
        self.assertIn(KNOWN_PARTY, self.senders.known)
        self.now += DORMANT_SECONDS
        self.make_known(2 * KNOWN_PARTY + 1)
        self.assertIn(2 * KNOWN_PARTY + 1, self.senders.known)
        self.assertNotIn(KNOWN_PARTY, self.senders.known)
        self.assertEqual(len(self.senders.known), MAX_KNOWN_SENDERS)
