"""Memory of requests in progress, while whatever they wait for is slow."""

from __future__ import annotations

from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from mediatord.errors import RateLimitExceeded
from mediatord.protocol.probe_markers import PROBE_CLIENT
from mediatord.ratelimit.admission import MEMORY_WAIT_SECONDS, RequestMemoryBudget, estimate_request_memory

# Of one request of the tests.
ONE = estimate_request_memory(1000)


class RequestMemoryBudgetTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = Clock()
        self.memory = RequestMemoryBudget(self.clock, 3 * ONE, 5 * ONE)

    def wait(self, peer: str) -> Deferred[None]:
        """A request without room at once."""
        self.assertFalse(self.memory.try_acquire(peer, ONE))
        return Deferred.fromCoroutine(self.memory.acquire(peer, ONE))

    def test_cost_of_a_request(self) -> None:
        """Small requests cost their bytes; large ones are bounded in the number of values."""
        self.assertEqual(estimate_request_memory(1000), 50_000)
        self.assertEqual(estimate_request_memory(1_048_576), 4 * 1_048_576 + 12_000_000)

    def test_limit_per_address(self) -> None:
        """A request beyond the limit waits for another one to end, and later ones wait behind it."""
        self.assertEqual([self.memory.try_acquire("a", ONE) for _ in range(3)], [True] * 3)
        first, second = self.wait("a"), self.wait("a")
        self.assertTrue(self.memory.try_acquire("b", ONE))
        self.assertEqual(self.memory.held, (4, 4 * ONE))
        self.memory.release("a", ONE)
        self.clock.advance(0)
        self.assertTrue(first.called)
        self.assertNoResult(second)
        self.assertEqual(self.memory.held, (4, 4 * ONE))
        for peer in "aaab":
            self.memory.release(peer, ONE)
            self.clock.advance(0)
        self.assertTrue(second.called)
        self.memory.release("a", ONE)
        self.assertEqual((self.memory.held, self.memory._taken, self.memory._waiting), ((0, 0), {}, {}))
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_total_limit(self) -> None:
        """An address without requests in progress has room for one, whatever others use."""
        for peer in "aaabb":
            self.assertTrue(self.memory.try_acquire(peer, ONE))
        late = self.wait("b")
        self.assertTrue(self.memory.try_acquire("c", ONE))
        self.memory.release("a", ONE)
        self.clock.advance(0)
        self.assertNoResult(late)
        self.memory.release("a", ONE)
        self.clock.advance(0)
        self.successResultOf(late)

    def test_oversized_request(self) -> None:
        """It is admitted alone, even beyond the bound."""
        self.assertTrue(self.memory.try_acquire("a", 100 * ONE))
        late = self.wait("a")
        self.memory.release("a", 100 * ONE)
        self.clock.advance(0)
        self.successResultOf(late)

    def test_waiting_time_is_limited(self) -> None:
        """A request that waited too long is refused and leaves nothing behind."""
        for _ in range(3):
            self.memory.try_acquire("a", ONE)
        late = self.wait("a")
        self.clock.advance(MEMORY_WAIT_SECONDS)
        self.assertEqual(self.failureResultOf(late, RateLimitExceeded).value.retry_after, 5)
        self.assertEqual((self.memory.held, self.memory._waiting), ((3, 3 * ONE), {}))
        last = self.wait("a")
        self.clock.advance(MEMORY_WAIT_SECONDS - 1)
        self.memory.release("a", ONE)
        self.clock.advance(1)
        self.successResultOf(last)

    def test_requests_of_the_daemon_itself(self) -> None:
        """They are not counted."""
        for _ in range(9):
            self.assertTrue(self.memory.try_acquire(PROBE_CLIENT, ONE))
        self.memory.release(PROBE_CLIENT, ONE)
        self.assertEqual(self.memory.held, (0, 0))
