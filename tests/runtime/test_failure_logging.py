"""Redacted failures and throttled warnings."""

from __future__ import annotations

from twisted.internet.task import Clock
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase

from mediatord.runtime.failure_logging import LOG_THROTTLE_SECONDS, LogThrottle, redact_failure


class RedactFailureTests(SynchronousTestCase):
    def test_type_and_traceback_stay(self) -> None:
        """A log line has type and traceback, and nothing of the exception's text."""
        try:
            raise ValueError("a secret")
        except ValueError:
            failure = redact_failure()
        self.assertTrue(failure.check(ValueError))
        text = failure.getTraceback()
        self.assertIn("test_type_and_traceback_stay", text)
        self.assertNotIn("secret", text.replace('raise ValueError("a secret")', ""))

    def test_exception_with_arguments(self) -> None:
        """An exception that needs arguments is logged by the name of its type."""
        try:
            b"\xff".decode()
        except UnicodeDecodeError:
            failure = redact_failure(Failure())
        self.assertNotIn("0xff", failure.getErrorMessage())


class LogThrottleTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = Clock()
        self.clock.advance(10_000)
        self.rarely = LogThrottle(self.clock)

    def test_once_a_minute(self) -> None:
        """At once, and then with the number of suppressed warnings."""
        self.assertEqual([self.rarely.count_occurrence() for _ in range(3)], [1, 0, 0])
        self.clock.advance(LOG_THROTTLE_SECONDS - 1)
        self.assertEqual(self.rarely.count_occurrence(), 0)
        self.clock.advance(1)
        self.assertEqual(self.rarely.count_occurrence(), 4)

    def test_clock_set_back(self) -> None:
        """The warning is logged again, instead of being suppressed for long."""
        self.assertEqual(self.rarely.count_occurrence(), 1)
        self.clock.rightNow -= 3600
        self.assertEqual([self.rarely.count_occurrence() for _ in range(2)], [1, 0])
