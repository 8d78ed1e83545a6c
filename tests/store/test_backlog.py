"""How much of what waits is counted."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from mediatord.ids import new_message_id
from mediatord.interfaces import Cohort, IStore, QueueLimits
from mediatord.store import memory_events, memory_messages, sql_backlog
from mediatord.store.backlog import completed, grouped, spans, summed
from mediatord.store.memory import MemoryStore
from tests.store.builders import ALICE, HOUR, NOON, InPlace, PromptClock, a_path, a_payload, a_sqlite_store

INBOX = "did:key:z6MkInbox"


class CountingTests(SynchronousTestCase):
    """What is said where not all is counted."""

    def aged(self, store: IStore, clock: PromptClock) -> IStore:
        """An open store with five messages each from now, five seconds ago and ten seconds ago."""
        self.successResultOf(store.open())
        self.successResultOf(store.grant(ALICE))
        self.successResultOf(store.update(ALICE, [(INBOX, "add")], max_recipients=1))
        self.addCleanup(store.close)
        for number in range(3):
            payloads = [a_payload(new_message_id(clock.seconds()), b"x") for _ in range(5)]
            self.successResultOf(store.deposit(INBOX, payloads, expires_at=NOON + HOUR))
            clock.advance(5 * (number < 2))
        return store

    def cohorts(self, store: IStore, *bounds: float) -> tuple[Cohort, ...]:
        return self.successResultOf(store.backlog(bounds, 0)).cohorts

    def test_memory(self) -> None:
        """The latest are counted; of what is older it is known that it is not younger, and the last is the rest."""
        for module in (memory_messages, memory_events):
            self.patch(module, "LOOKED_AT", 7)
        clock = PromptClock()
        store = self.aged(MemoryStore(clock, QueueLimits()), clock)
        self.assertEqual(self.cohorts(store, NOON + 10), (Cohort(5, 5), Cohort(10, 10)))
        expected = Cohort(5, 5), Cohort(2, 2, exact=False), Cohort(0, 0, exact=False)
        self.assertEqual(self.cohorts(store, NOON + 10, NOON + 5), expected)

    def test_sqlite(self) -> None:
        """So many of each age are counted, and of fewer the bytes added up; what all amount to is known."""
        self.patch(sql_backlog, "_WEIGHED", 5)
        self.patch(sql_backlog, "_COUNTED", 5)
        clock, runner = PromptClock(), InPlace()
        store = self.aged(a_sqlite_store(clock, a_path(self), write=runner, read=runner), clock)
        backlog = self.successResultOf(store.backlog([NOON + 10], 0))
        self.assertEqual(backlog.cohorts, (Cohort(5, None, exact=False),) * 2)
        self.assertEqual((backlog.messages, backlog.bytes), (15, 15))
        self.patch(sql_backlog, "_WEIGHED", 6)
        self.patch(sql_backlog, "_COUNTED", 6)
        self.assertEqual(self.cohorts(store, NOON + 10), (Cohort(5, 5), Cohort(10, 10)))
        self.assertEqual(self.cohorts(store, NOON + 10, NOON + 5), (Cohort(5, 5),) * 3)

    def test_before_any_time(self) -> None:
        """Bounds of before the epoch are bounds all the same."""
        self.assertEqual(spans([-5.0]), [("0" * 12, None), (None, "0" * 12)])


class ArithmeticTests(SynchronousTestCase):
    """What the backends have in common."""

    def test_grouped(self) -> None:
        """By bounds, each the first moment of its cohort."""
        found = [(9.0, 1), (5.0, 2), (4.9, 4), (0.0, 8)]
        self.assertEqual(grouped(found, [5.0, 1.0], 4), [Cohort(2, 3), Cohort(1, 4), Cohort(1, 8)])
        self.assertEqual(
            grouped(found, [5.0, 1.0], 3), [Cohort(2, 3), Cohort(1, 4, exact=False), Cohort(0, 0, exact=False)]
        )
        self.assertEqual(grouped([], [5.0], 0), [Cohort(0, 0)] * 2)

    def test_completed(self) -> None:
        """One that was not counted to its end is the rest, and never less than was counted."""
        some = Cohort(2, 20), Cohort(5, 50, exact=False)
        self.assertEqual(completed(some, 100, 1000), [Cohort(2, 20), Cohort(98, 980)])
        self.assertEqual(completed(some, 100, None), [Cohort(2, 20), Cohort(98, None)])
        self.assertEqual(completed(some, 6, None), [Cohort(2, 20), Cohort(5, None)])
        unknown = [Cohort(5, None, exact=False)] * 2
        self.assertEqual(completed(unknown, 100, None), unknown)

    def test_summed(self) -> None:
        """What is unknown of one half is unknown of both."""
        self.assertEqual(summed([Cohort(1, 2)], [Cohort(3, 4)]), (Cohort(4, 6),))
        self.assertEqual(summed([Cohort(1, None)], [Cohort(3, 4, exact=False)]), (Cohort(4, None, exact=False),))
