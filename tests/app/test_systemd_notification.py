"""Notifications for systemd."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from prometheus_client import CollectorRegistry
from twisted.internet.testing import MemoryReactorClock
from twisted.trial.unittest import SynchronousTestCase

from mediatord.app.lifecycle import STARTUP_GRACE_SECONDS, LifecycleNotifier
from mediatord.cluster.membership import NOT_JOINED, NodeHealth
from mediatord.observability.metrics import Metrics

SERVING, WAITING = "STATUS=serving", "STATUS=waiting for the store"


class RunningReactor(MemoryReactorClock):
    """A running reactor."""

    def callWhenRunning(self, callable: Callable[..., Any], *arguments: Any, **more: Any) -> None:  # noqa: N802
        callable(*arguments, **more)


class RecordingReloader:
    """Records that it was called."""

    fails = False

    def __init__(self) -> None:
        self.calls: list[object] = []

    def read(self) -> Any:
        """Nothing."""

    def reload(self, read: object) -> None:
        """Ignore."""
        self.calls.append(read)
        if self.fails:
            raise ZeroDivisionError


class FakeCoreServices:
    """The parts of the core services that notifications depend on."""

    def __init__(self) -> None:
        self.reactor: Any = RunningReactor()
        self.metrics = Metrics(CollectorRegistry(), version="1")
        self.recorder = self
        self.node_health = NodeHealth(self.reactor, 10.0)
        self.lived: list[str] = []
        self.reloader = RecordingReloader()

    def record_start(self, version: str) -> None:
        """Record the start."""
        self.lived.append("started")

    def record_stop(self, version: str) -> None:
        """Record the stop."""
        self.lived.append("stopped")


class SystemdNotificationTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.base: Any = FakeCoreServices()
        self.notifications: list[str] = []
        self.signs = self.make_notification(self.base)

    def make_notification(self, base: Any) -> LifecycleNotifier:
        """Build the notification service of a daemon that has not started."""
        return LifecycleNotifier(base, self.notifications.append)

    def sent(self) -> list[str]:
        """Notifications since the last call."""
        found, self.notifications[:] = list(self.notifications), []
        return found

    def open_store(self) -> None:
        """Open the store, as a single daemon or a joined node."""
        self.base.metrics.set_storage_up(True)
        self.base.node_health.joined()
        self.signs.store_opened()

    def test_ready(self) -> None:
        """READY once the store is open; nothing waits for it afterwards."""
        self.signs.startService()
        self.assertEqual(self.sent(), [WAITING])
        self.base.reactor.advance(STARTUP_GRACE_SECONDS - 1)
        self.assertEqual(self.sent(), [])
        self.open_store()
        self.assertEqual(self.sent(), [SERVING, "READY=1"])
        self.base.reactor.advance(STARTUP_GRACE_SECONDS)
        self.assertEqual(self.sent(), [])

    def test_store_opens_first(self) -> None:
        """The store may be open before the rest has started."""
        self.open_store()
        self.assertEqual(self.sent(), [])
        self.signs.startService()
        self.assertEqual(self.sent(), [SERVING, "READY=1"])

    def test_no_store(self) -> None:
        """After a while READY is sent once without the store; the status says more."""
        self.signs.startService()
        self.base.reactor.advance(STARTUP_GRACE_SECONDS)
        self.assertEqual(self.sent(), [WAITING, "READY=1"])
        self.base.reactor.advance(600)
        self.open_store()
        self.assertEqual(self.sent(), [SERVING])

    def test_trouble(self) -> None:
        """The status is updated within a second after a change."""
        self.open_store()
        self.signs.startService()
        self.sent()
        self.base.metrics.set_storage_up(False)
        self.base.reactor.pump([0.5] * 10)
        self.assertEqual(self.sent(), [WAITING])
        self.base.metrics.set_storage_up(True)
        self.base.reactor.advance(1)
        self.assertEqual(self.sent(), [SERVING])
        self.base.node_health.parted()
        self.base.reactor.pump([1] * 12)
        self.assertEqual(self.sent(), [f"STATUS={NOT_JOINED}"])

    def test_watchdog(self) -> None:
        """WATCHDOG is sent by a running daemon, whatever its store does."""
        for name, value in {"WATCHDOG_USEC": "20000000", "WATCHDOG_PID": str(os.getpid())}.items():
            self.addCleanup(os.environ.pop, name)
            os.environ[name] = value
        self.signs.startService()
        self.base.reactor.advance(STARTUP_GRACE_SECONDS)
        self.assertEqual(self.sent(), [WAITING, "READY=1", "WATCHDOG=1"])
        self.base.reactor.pump([10, 10])
        self.assertEqual(self.sent(), ["WATCHDOG=1"] * 2)

    def test_reload(self) -> None:
        """RELOADING and READY, unless the daemon is not ready yet; also after a failed reload."""
        read = self.base.reloader.read
        self.signs.startService()
        self.sent()
        self.signs.reload(read)
        self.assertEqual(self.sent(), [])
        self.open_store()
        self.sent()
        before = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        self.signs.reload(read)
        first, ended = self.sent()
        reloader, since = first.splitlines()
        self.assertEqual((reloader, ended), ("RELOADING=1", "READY=1"))
        name, _, microseconds = since.partition("=")
        self.assertEqual(name, "MONOTONIC_USEC")
        self.assertLessEqual(before, int(microseconds))
        self.base.reloader.fails = True
        self.assertRaises(ZeroDivisionError, self.signs.reload, read)
        self.assertEqual(self.sent()[-1], "READY=1")
        self.assertEqual(self.base.reloader.calls, [read] * 3)

    def test_stop(self) -> None:
        """STOPPING once; nothing follows, and no timer remains."""
        for wait in (0.0, STARTUP_GRACE_SECONDS):
            self.signs = self.make_notification(self.base)
            self.signs.startService()
            self.base.reactor.advance(wait)
            self.sent()
            self.signs.stopService()
            self.signs.store_opened()
            self.assertEqual(self.sent(), ["STOPPING=1"])
            self.assertEqual(self.base.reactor.getDelayedCalls(), [])
        self.assertEqual(self.base.lived, ["started", "stopped"] * 2)
