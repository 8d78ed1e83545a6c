"""Failures are logged without their texts, and warnings are not repeated all the time."""

from __future__ import annotations

from twisted.internet.task import Clock
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase

from mediatord.runtime.failure_logging import LOG_THROTTLE_SECONDS, LogThrottle, redact_failure


class RedactFailureTests(SynchronousTestCase):
    def test_type_and_traceback_stay(self) -> None:
        """A log line shows what failed and where, and nothing that a library put into the text."""
        try:
            raise ValueError("a secret")
        except ValueError:
            failure = redact_failure()
        self.assertTrue(failure.check(ValueError))
        text = failure.getTraceback()
        self.assertIn("test_type_and_traceback_stay", text)
        self.assertNotIn("secret", text.replace('raise ValueError("a secret")', ""))

    def test_an_exception_with_arguments(self) -> None:
        """Of an exception that cannot be made without arguments the name of its type stays."""
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
        """At first, and then with how often it was not said."""
        self.assertEqual([self.rarely.count_occurrence() for _ in range(3)], [1, 0, 0])
        self.clock.advance(LOG_THROTTLE_SECONDS - 1)
        self.assertEqual(self.rarely.count_occurrence(), 0)
        self.clock.advance(1)
        self.assertEqual(self.rarely.count_occurrence(), 4)

    def test_a_clock_set_back(self) -> None:
        """It is said again, instead of never for so long."""
        self.assertEqual(self.rarely.count_occurrence(), 1)
        self.clock.rightNow -= 3600
        self.assertEqual([self.rarely.count_occurrence() for _ in range(2)], [1, 0])
