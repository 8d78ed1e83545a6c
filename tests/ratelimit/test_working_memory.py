"""Memory of requests in progress, while whatever they wait for is slow."""

from __future__ import annotations

from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from mediatord.errors import RateLimitExceeded
from mediatord.protocol.probe_markers import PROBE_CLIENT
from mediatord.ratelimit.admission import MEMORY_WAIT_SECONDS, RequestMemoryBudget, estimate_request_memory

# Of one request of the tests.
REQUEST_COST = estimate_request_memory(1000)


class RequestMemoryBudgetTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = Clock()
        self.memory = RequestMemoryBudget(self.clock, 3 * REQUEST_COST, 5 * REQUEST_COST)

    def wait(self, peer: str) -> Deferred[None]:
        """A request without room at once."""
        self.assertFalse(self.memory.try_acquire(peer, REQUEST_COST))
        return Deferred.fromCoroutine(self.memory.acquire(peer, REQUEST_COST))

    def test_cost_of_a_request(self) -> None:
        """Small requests cost their bytes; large ones are bounded in the number of values."""
        self.assertEqual(estimate_request_memory(1000), 50_000)
        self.assertEqual(estimate_request_memory(1_048_576), 4 * 1_048_576 + 12_000_000)

    def test_limit_per_address(self) -> None:
        """A request beyond the limit waits for another one to end, and later ones wait behind it."""
        self.assertEqual([self.memory.try_acquire("a", REQUEST_COST) for _ in range(3)], [True] * 3)
        first, second = self.wait("a"), self.wait("a")
        self.assertTrue(self.memory.try_acquire("b", REQUEST_COST))
        self.assertEqual(self.memory.held, (4, 4 * REQUEST_COST))
        self.memory.release("a", REQUEST_COST)
        self.clock.advance(0)
        self.assertTrue(first.called)
        self.assertNoResult(second)
        self.assertEqual(self.memory.held, (4, 4 * REQUEST_COST))
        for peer in "aaab":
            self.memory.release(peer, REQUEST_COST)
            self.clock.advance(0)
        self.assertTrue(second.called)
        self.memory.release("a", REQUEST_COST)
        self.assertEqual((self.memory.held, self.memory._taken, self.memory._waiting), ((0, 0), {}, {}))
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_total_limit(self) -> None:
        """An address without requests in progress has room for one, whatever others use."""
        for peer in "aaabb":
            self.assertTrue(self.memory.try_acquire(peer, REQUEST_COST))
        second = self.wait("b")
        self.assertTrue(self.memory.try_acquire("c", REQUEST_COST))
        self.memory.release("a", REQUEST_COST)
        self.clock.advance(0)
        self.assertNoResult(second)
        self.memory.release("a", REQUEST_COST)
        self.clock.advance(0)
        self.successResultOf(second)

    def test_oversized_request(self) -> None:
        """It is admitted alone, even beyond the bound."""
        self.assertTrue(self.memory.try_acquire("a", 100 * REQUEST_COST))
        second = self.wait("a")
        self.memory.release("a", 100 * REQUEST_COST)
        self.clock.advance(0)
        self.successResultOf(second)

    def test_waiting_time_is_limited(self) -> None:
        """A request that waited too long is refused and leaves nothing behind."""
        for _ in range(3):
            self.memory.try_acquire("a", REQUEST_COST)
        waiting = self.wait("a")
        self.clock.advance(MEMORY_WAIT_SECONDS)
        self.assertEqual(self.failureResultOf(waiting, RateLimitExceeded).value.retry_after, 5)
        self.assertEqual((self.memory.held, self.memory._waiting), ((3, 3 * REQUEST_COST), {}))
        last = self.wait("a")
        self.clock.advance(MEMORY_WAIT_SECONDS - 1)
        self.memory.release("a", REQUEST_COST)
        self.clock.advance(1)
        self.successResultOf(last)

    def test_requests_of_the_daemon_itself(self) -> None:
        """They are not counted."""
        for _ in range(9):
            self.assertTrue(self.memory.try_acquire(PROBE_CLIENT, REQUEST_COST))
        self.memory.release(PROBE_CLIENT, REQUEST_COST)
        self.assertEqual(self.memory.held, (0, 0))
