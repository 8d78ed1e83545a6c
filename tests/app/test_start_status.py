"""Reporting the start of a daemon to the parent process of twistd."""

from __future__ import annotations

import atexit
import os
import select
from typing import Any

from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from mediatord.app.lifecycle import OrderedService
from mediatord.errors import StartupError
from mediatord.tap import STARTUP_GRACE_SECONDS, StartupReporter, TwistdDaemonService


class FakeReactor(Clock):
    """A running reactor."""

    def callWhenRunning(self, call: Any) -> None:  # noqa: N802  Twisted's name
        """Ignore: signals are not handled in tests."""

    def stop(self) -> None:
        """Ignore."""


class StartStatusTests(SynchronousTestCase):
    """The pipe on which the parent process waits."""

    def setUp(self) -> None:
        self.read, written = os.pipe()
        self.addCleanup(os.close, self.read)
        # As in Twisted's daemon.
        self.options: dict[str, Any] = {"nodaemon": 1, "statusPipe": written, "pidfile": ""}
        self.status = StartupReporter(self.options)
        self.status.watch()
        self.addCleanup(atexit.unregister, self.status.process_ends)
        self.reactor = FakeReactor()
        self.root = TwistdDaemonService(self.reactor, self.status)
        self.daemon = OrderedService(self.reactor, 1.0)

    def reported(self) -> bytes:
        """What the parent reads, up to the end."""
        return b"".join(iter(lambda: os.read(self.read, 100), b""))

    def assert_reported_at_end(self, outcome: bytes) -> None:
        """The parent reads this when the process has ended, and nothing before: twistd still removes its files."""
        self.assertEqual(select.select([self.read], [], [], 0)[0], [])
        self.status.process_ends()
        self.assertEqual(self.reported(), outcome)

    def start(self) -> None:
        """Start all services, as Twisted does."""
        self.root.run(None, lambda reactor, config, **options: self.daemon)  # type: ignore[arg-type]
        self.root.privilegedStartService()
        self.root.startService()

    def test_success(self) -> None:
        """Success is reported once the daemon serves, once."""
        self.start()
        self.assertIsNone(self.options["statusPipe"])  # or Twisted would report it now
        self.root.ready()
        self.root.give_up("later")
        self.root.ready()
        self.assertEqual(self.reported(), b"0")
        self.assertEqual(self.reactor.getDelayedCalls(), [])

    def test_failure_after_start(self) -> None:
        """The reason, if the start fails while the reactor runs."""
        self.start()
        self.root.give_up("another daemon has the database")
        self.assert_reported_at_end(b"1 another daemon has the database")

    def test_long_reason(self) -> None:
        """The reason is truncated to what Twisted reads."""
        self.start()
        self.root.give_up("\N{SNOWMAN}" + "x" * 200)
        self.assert_reported_at_end((b"1 \\u2603" + b"x" * 200)[:100])

    def test_slow_store(self) -> None:
        """A daemon that waits for its store for long counts as started."""
        self.start()
        self.reactor.advance(STARTUP_GRACE_SECONDS)
        self.assertEqual(self.reported(), b"0")

    def test_cannot_start(self) -> None:
        """The reason, and exit status 1, at each step; an OS error is put into one line."""
        for error, reason in (
            (StartupError("no such key"), b"1 no such key"),
            (FileNotFoundError(2, "No such file or directory", "/nowhere"), b"1 /nowhere: No such file or directory"),
            (OSError(12, "Cannot allocate memory"), b"1 Cannot allocate memory"),
        ):
            for step in ("privilegedStartService", "startService"):
                self.setUp()

                def fail(error: Exception = error) -> None:
                    raise error

                setattr(self.daemon, step, fail)
                self.assertEqual(self.assertRaises(SystemExit, self.start).code, 1)
                self.assert_reported_at_end(reason)
