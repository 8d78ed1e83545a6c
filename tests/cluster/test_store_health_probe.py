"""Probe of the store shared by many callers."""

from __future__ import annotations

from twisted.internet.defer import Deferred, fail, succeed
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from mediatord.cluster.membership import HEALTHY_RESULT_TTL, StoreHealthCheck
from mediatord.errors import StoreUnavailable


class StoreHealthProbeTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = Clock()
        self.pings: list[Deferred[None]] = []
        self.failures = 0
        self.health_check = StoreHealthCheck(self.ping, self.clock.seconds, lambda: self.failures)

    async def ping(self) -> None:
        """A slow store."""
        self.pings.append(Deferred())
        await self.pings[-1]

    def check(self) -> Deferred[None]:
        """Check the store's health."""
        return Deferred.fromCoroutine(self.health_check())

    def test_first_caller_waits(self) -> None:
        """Later callers wait for the same result."""
        checks = [self.check(), self.check()]
        self.assertEqual(len(self.pings), 1)
        for check in checks:
            self.assertNoResult(check)
        self.pings[0].callback(None)
        for check in checks:
            self.successResultOf(check)

    def test_recent_success_is_reused(self) -> None:
        """Soon after a success callers do not wait, and the store is probed again."""
        check = self.check()
        self.pings[0].callback(None)
        self.successResultOf(check)
        self.successResultOf(self.check())
        self.assertEqual(len(self.pings), 2)
        self.clock.advance(HEALTHY_RESULT_TTL)
        second = self.check()
        self.assertNoResult(second)
        self.pings[1].callback(None)
        self.successResultOf(second)
        self.assertEqual(len(self.pings), 2)

    def test_failed_operation_invalidates_result(self) -> None:
        """After a failed operation earlier results do not count until the next success."""
        check = self.check()
        self.pings[0].callback(None)
        self.successResultOf(check)
        self.failures += 1
        check = self.check()
        self.assertNoResult(check)
        self.pings[1].callback(None)
        self.successResultOf(check)
        self.successResultOf(self.check())

    def test_failure_is_reported(self) -> None:
        """A failure is reported to waiting callers and the next one."""
        self.check()
        self.pings[0].callback(None)
        self.successResultOf(self.check())
        self.pings[1].errback(StoreUnavailable())
        checks = [self.check(), self.check()]
        self.pings[2].errback(StoreUnavailable())
        for look in checks:
            self.failureResultOf(look, StoreUnavailable)

    def test_immediate_failure(self) -> None:
        """A failure counts for the caller, whatever was known before."""
        answers = iter([succeed(None), fail(StoreUnavailable()), succeed(None)])
        check_store = StoreHealthCheck(lambda: next(answers), self.clock.seconds, lambda: 0)
        self.successResultOf(Deferred.fromCoroutine(check_store()))
        self.failureResultOf(Deferred.fromCoroutine(check_store()), StoreUnavailable)
        self.successResultOf(Deferred.fromCoroutine(check_store()))
