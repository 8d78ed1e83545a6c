"""What is said again until it was heard: how much of it, how often."""

from __future__ import annotations

from collections.abc import Collection

from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from mediatord.cluster import reminders
from mediatord.cluster.reminders import AT_ONCE, FIRST, LONGEST, Reminders


class RemindersTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = Clock()
        self.said: list[str] = []
        self.told: list[Collection[str]] = []
        self.deaf: set[str] = set()
        self.dropped = 0
        self.reminders = Reminders(self.clock, self.remind, self.drop)

    def remind(self, did: str, told: Collection[str]) -> None:
        """Heard at once, or not."""
        self.said.append(did)
        self.told.append(told)
        if did in self.deaf:
            self.reminders.owe_still(did, told)
        else:
            self.reminders.paid()

    def drop(self) -> None:
        """Counted."""
        self.dropped += 1

    def after(self, seconds: float) -> list[str]:
        """What is said in so many seconds."""
        self.said.clear()
        self.clock.pump([0.5] * int(seconds * 2))
        return list(self.said)

    def test_some_at_a_time(self) -> None:
        """Many do not come all at once; while they are heard they do not have to wait for long."""
        names = [f"{number:03}" for number in range(2 * AT_ONCE + 1)]
        for name in names:
            self.reminders.owe(name, ())
        self.assertEqual(self.after(FIRST), names[:AT_ONCE])
        self.assertEqual(self.after(FIRST), names[AT_ONCE : 2 * AT_ONCE])
        self.assertEqual(self.after(FIRST), names[2 * AT_ONCE :])
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_nobody_in_the_way(self) -> None:
        """Those who hear nothing come after those who have not been tried since."""
        self.deaf = {str(number) for number in range(AT_ONCE)}
        for name in (*sorted(self.deaf), "hears"):
            self.reminders.owe(name, ())
        self.assertNotIn("hears", self.after(FIRST))
        self.assertIn("hears", self.after(FIRST))

    def test_again_soon(self) -> None:
        """When one was heard after a long time, others may be as well."""
        self.deaf = {"a", "b"}
        self.reminders.owe("a", ())
        self.reminders.owe("b", ())
        self.after(10 * LONGEST)
        self.deaf = {"b"}
        self.assertEqual(self.after(LONGEST)[:2], ["a", "b"])
        self.deaf = set()
        self.assertEqual(self.after(3 * FIRST), ["b"])

    def test_limit(self) -> None:
        """The oldest is dropped, and counted."""
        self.patch(reminders, "MAX_OWED", 2)
        for name in "abac":
            self.reminders.owe(name, ())
        self.assertEqual((len(self.reminders), self.dropped), (2, 1))
        self.assertEqual(self.after(FIRST), ["a", "c"])

    def test_limit_of_those_that_failed(self) -> None:
        """They are dropped before those that were never tried."""
        self.patch(reminders, "MAX_OWED", 3)
        self.deaf = {"a", "b"}
        self.reminders.owe("a", ())
        self.reminders.owe("b", ())
        self.after(FIRST)
        for name in "cde":
            self.reminders.owe(name, ())
        self.assertEqual((len(self.reminders), self.dropped), (3, 2))
        self.assertEqual(self.after(FIRST), ["c", "d", "e"])

    def test_new_ones_do_not_wait_for_those_that_failed(self) -> None:
        """However many there are, and however long the pauses between their lots have become."""
        self.deaf = {str(number) for number in range(20 * AT_ONCE)}
        for name in self.deaf:
            self.reminders.owe(name, ())
        self.after(10 * LONGEST)
        self.reminders.owe("new", ())
        self.assertIn("new", self.after(FIRST))

    def test_failed_ones_come_again(self) -> None:
        """The one that was tried last comes last, even while others are heard all the time."""
        self.deaf = {f"{number:03}" for number in range(2 * AT_ONCE)}
        for name in sorted(self.deaf):
            self.reminders.owe(name, ())
        self.after(2 * FIRST)
        tried: list[str] = []
        for _ in range(10):
            self.reminders.paid()
            tried += self.after(FIRST / 2)
        self.assertEqual(tried[: 2 * AT_ONCE], sorted(self.deaf))

    def test_changed_again(self) -> None:
        """What has failed and changes once more is new, and there once."""
        self.deaf = {"a"}
        self.reminders.owe("a", ["x", "y"])
        self.after(4 * LONGEST)
        self.reminders.owe("a", ["y", "z"])
        self.assertEqual(len(self.reminders), 1)
        self.told.clear()
        self.assertEqual((self.after(FIRST), self.told), (["a"], [{"y"}]))

    def test_changed_while_reminding(self) -> None:
        """The newer change counts: it is not behind because the older one could not be told."""
        self.deaf = {"b"}
        self.reminders.owe("b", ())
        self.after(4 * LONGEST + 5)
        self.told.clear()
        self.reminders.owe("a", ["x", "y"])
        self.reminders.owe_still("a", ["y"])
        self.assertEqual((len(self.reminders), self.after(FIRST), self.told), (2, ["a"], [{"y"}]))

    def test_who_was_told(self) -> None:
        """Of two changes, only those who were told of both need not be told."""
        self.reminders.owe("a", ["x", "y"])
        self.reminders.owe("a", ["y", "z"])
        self.after(FIRST)
        self.assertEqual(self.told, [{"y"}])

    def test_end(self) -> None:
        """No timer is left, and none comes."""
        self.reminders.owe("a", ())
        self.reminders.end()
        self.reminders.owe("b", ())
        self.reminders.paid()
        self.assertEqual(self.clock.getDelayedCalls(), [])
