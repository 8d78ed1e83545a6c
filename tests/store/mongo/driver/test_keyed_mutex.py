"""Tests of the mutex by key."""

from __future__ import annotations

from twisted.internet.defer import Deferred, DeferredList
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from mediatord.errors import StoreUnavailable
from mediatord.store.mongo.driver.operation import KeyedMutex


class KeyedMutexTests(SynchronousTestCase):
    """One at a time, in order, for each key."""

    def setUp(self) -> None:
        self.clock = Clock()
        self.locks = KeyedMutex(self.clock)
        self.started: list[str] = []
        self.ends: dict[str, Deferred[str]] = {}

    def lock(self, name: str, key: bytes = b"key", *, deadline: float = 60.0) -> Deferred[str]:
        """Start work that lasts until a Deferred fires, with a deadline to start."""
        self.ends[name] = Deferred()

        async def work() -> str:
            self.started.append(name)
            return await self.ends[name]

        return Deferred.fromCoroutine(self.locks.run_exclusive(key, work, deadline))

    def unlock(self, name: str) -> None:
        """End the work, so that the next waiter starts in the next reactor iteration."""
        self.ends[name].callback("done")
        self.clock.advance(0)

    def test_serves_waiters_in_order(self) -> None:
        """Waiters are served in order."""
        deferreds = [self.lock(name) for name in "abc"]
        self.assertEqual(self.started, ["a"])
        self.unlock("a")
        self.assertEqual((self.successResultOf(deferreds[0]), self.started), ("done", ["a", "b"]))
        self.ends["b"].errback(StoreUnavailable())
        self.clock.advance(0)
        self.failureResultOf(deferreds[1], StoreUnavailable)
        self.assertEqual(self.started, ["a", "b", "c"])

    def test_keys_are_independent(self) -> None:
        """Keys are independent, and nothing is kept of a key that is not locked."""
        self.lock("a", b"1")
        self.lock("b", b"2")
        self.lock("c", b"1")
        self.assertEqual((self.started, len(self.locks._locks)), (["a", "b"], 2))
        for name in "abc":
            self.unlock(name)
        self.assertEqual((self.started, len(self.locks._locks)), (["a", "b", "c"], 0))

    def test_new_waiter_is_last(self) -> None:
        """A waiter that locks again from its predecessor's release is the last."""
        deferreds = self.lock("a")
        self.lock("b")
        deferreds.addCallback(lambda _: self.lock("again"))
        self.unlock("a")
        self.assertEqual(self.started, ["a", "b"])
        self.unlock("b")
        self.assertEqual(self.started, ["a", "b", "again"])
        self.unlock("again")
        self.assertEqual(len(self.locks._locks), 0)

    def test_waiter_past_deadline_leaves_queue(self) -> None:
        """A waiter whose deadline passes leaves the queue without effect on others."""
        deferreds = [self.lock(name, deadline=2.0 if name in "bd" else 60.0) for name in "abcd"]
        self.clock.advance(2.0)
        for one in (deferreds[1], deferreds[3]):
            self.failureResultOf(one, StoreUnavailable)
        self.unlock("a")
        self.assertEqual(self.started, ["a", "c"])
        waiter = self.lock("late", deadline=1.0)
        self.clock.advance(0)
        self.failureResultOf(waiter, StoreUnavailable)
        self.unlock("c")
        self.assertEqual((self.started, len(self.locks._locks)), (["a", "c"], 0))
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_many_waiters_are_not_nested(self) -> None:
        """Thousands of waiters that end at once are not nested."""

        async def fail() -> None:
            raise StoreUnavailable()

        self.lock("first")
        deferreds = [Deferred.fromCoroutine(self.locks.run_exclusive(b"key", fail, 60.0)) for _ in range(5000)]
        self.unlock("first")
        outcomes = self.successResultOf(DeferredList(deferreds, consumeErrors=True))
        self.assertEqual({done for done, _ in outcomes}, {False})
        self.assertEqual(len(self.locks._locks), 0)
