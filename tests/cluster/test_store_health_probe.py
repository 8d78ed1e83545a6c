"""Whether the store answers, for many who ask."""

from __future__ import annotations

from twisted.internet.defer import Deferred, fail, succeed
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from mediatord.cluster.membership import HEALTHY_RESULT_TTL, StoreHealthCheck
from mediatord.errors import StoreUnavailable


class StoreHealthProbeTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = Clock()
        self.asked: list[Deferred[None]] = []
        self.failures = 0
        self.asking = StoreHealthCheck(self.ask, self.clock.seconds, lambda: self.failures)

    async def ask(self) -> None:
        """A store that takes its time."""
        self.asked.append(Deferred())
        await self.asked[-1]

    def look(self) -> Deferred[None]:
        """Somebody wants to know."""
        return Deferred.fromCoroutine(self.asking())

    def test_who_asks_first_waits(self) -> None:
        """And who comes while it is asked waits for the same answer."""
        looks = [self.look(), self.look()]
        self.assertEqual(len(self.asked), 1)
        for look in looks:
            self.assertNoResult(look)
        self.asked[0].callback(None)
        for look in looks:
            self.successResultOf(look)

    def test_a_slow_disk(self) -> None:
        """Who asks soon after a good answer does not wait, and asks nevertheless."""
        look = self.look()
        self.asked[0].callback(None)
        self.successResultOf(look)
        self.successResultOf(self.look())
        self.assertEqual(len(self.asked), 2)
        self.clock.advance(HEALTHY_RESULT_TTL)
        late = self.look()
        self.assertNoResult(late)
        self.asked[1].callback(None)
        self.successResultOf(late)
        self.assertEqual(len(self.asked), 2)

    def test_the_store_has_failed_somebody(self) -> None:
        """Then nobody relies on what it said before, until it has said so again."""
        look = self.look()
        self.asked[0].callback(None)
        self.successResultOf(look)
        self.failures += 1
        look = self.look()
        self.assertNoResult(look)
        self.asked[1].callback(None)
        self.successResultOf(look)
        self.successResultOf(self.look())

    def test_a_bad_answer(self) -> None:
        """Is told to who waits, and to the next who comes."""
        self.look()
        self.asked[0].callback(None)
        self.successResultOf(self.look())
        self.asked[1].errback(StoreUnavailable())
        looks = [self.look(), self.look()]
        self.asked[2].errback(StoreUnavailable())
        for look in looks:
            self.failureResultOf(look, StoreUnavailable)

    def test_a_bad_answer_at_once(self) -> None:
        """Counts for who has asked, whatever was good before."""
        answers = iter([succeed(None), fail(StoreUnavailable()), succeed(None)])
        asking = StoreHealthCheck(lambda: next(answers), self.clock.seconds, lambda: 0)
        self.successResultOf(Deferred.fromCoroutine(asking()))
        self.failureResultOf(Deferred.fromCoroutine(asking()), StoreUnavailable)
        self.successResultOf(Deferred.fromCoroutine(asking()))
