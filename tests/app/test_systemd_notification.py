"""What systemd is told, and when."""

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


class Reactor(MemoryReactorClock):
    """One that runs."""

    def callWhenRunning(self, callable: Callable[..., Any], *arguments: Any, **more: Any) -> None:  # noqa: N802
        callable(*arguments, **more)


class Reloads:
    """Notes that it was asked."""

    fails = False

    def __init__(self) -> None:
        self.asked: list[object] = []

    def read(self) -> Any:
        """Nothing."""

    def reload(self, read: object) -> None:
        """Do nothing."""
        self.asked.append(read)
        if self.fails:
            raise ZeroDivisionError


class Base:
    """As much of the daemon as there is to say of it."""

    def __init__(self) -> None:
        self.reactor: Any = Reactor()
        self.metrics = Metrics(CollectorRegistry(), version="1")
        self.recorder = self
        self.node_health = NodeHealth(self.reactor, 10.0)
        self.lived: list[str] = []
        self.reloader = Reloads()

    def record_start(self, version: str) -> None:
        """It is noted."""
        self.lived.append("started")

    def record_stop(self, version: str) -> None:
        """It is noted."""
        self.lived.append("stopped")


class SystemdNotificationTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.base: Any = Base()
        self.said: list[str] = []
        self.signs = self.make_signs(self.base)

    def make_signs(self, base: Any) -> LifecycleNotifier:
        """Those of a daemon that is yet to be started."""
        return LifecycleNotifier(base, self.said.append)

    def told(self) -> list[str]:
        """Since the last call."""
        found, self.said[:] = list(self.said), []
        return found

    def open_store(self) -> None:
        """As a daemon does that is no node, or has joined."""
        self.base.metrics.set_storage_up(True)
        self.base.node_health.joined()
        self.signs.store_opened()

    def test_serving(self) -> None:
        """It is up once the store is open, which nobody has to wait for after that."""
        self.signs.startService()
        self.assertEqual(self.told(), [WAITING])
        self.base.reactor.advance(STARTUP_GRACE_SECONDS - 1)
        self.assertEqual(self.told(), [])
        self.open_store()
        self.assertEqual(self.told(), [SERVING, "READY=1"])
        self.base.reactor.advance(STARTUP_GRACE_SECONDS)
        self.assertEqual(self.told(), [])

    def test_a_store_that_is_quick(self) -> None:
        """It may be open before the rest has started."""
        self.open_store()
        self.assertEqual(self.told(), [])
        self.signs.startService()
        self.assertEqual(self.told(), [SERVING, "READY=1"])

    def test_no_store(self) -> None:
        """After a while the daemon counts as up, which it does once; how it is, is another thing."""
        self.signs.startService()
        self.base.reactor.advance(STARTUP_GRACE_SECONDS)
        self.assertEqual(self.told(), [WAITING, "READY=1"])
        self.base.reactor.advance(600)
        self.open_store()
        self.assertEqual(self.told(), [SERVING])

    def test_trouble(self) -> None:
        """What there is to say changes within a second, and is said when it does."""
        self.open_store()
        self.signs.startService()
        self.told()
        self.base.metrics.set_storage_up(False)
        self.base.reactor.pump([0.5] * 10)
        self.assertEqual(self.told(), [WAITING])
        self.base.metrics.set_storage_up(True)
        self.base.reactor.advance(1)
        self.assertEqual(self.told(), [SERVING])
        self.base.node_health.parted()
        self.base.reactor.pump([1] * 12)
        self.assertEqual(self.told(), [f"STATUS={NOT_JOINED}"])

    def test_watchdog(self) -> None:
        """It hears from a daemon that is up, whatever its store does."""
        for name, value in {"WATCHDOG_USEC": "20000000", "WATCHDOG_PID": str(os.getpid())}.items():
            self.addCleanup(os.environ.pop, name)
            os.environ[name] = value
        self.signs.startService()
        self.base.reactor.advance(STARTUP_GRACE_SECONDS)
        self.assertEqual(self.told(), [WAITING, "READY=1", "WATCHDOG=1"])
        self.base.reactor.pump([10, 10])
        self.assertEqual(self.told(), ["WATCHDOG=1"] * 2)

    def test_reload(self) -> None:
        """It is begun and ended, unless the daemon is not up yet; also where it fails."""
        read = self.base.reloader.read
        self.signs.startService()
        self.told()
        self.signs.reload(read)
        self.assertEqual(self.told(), [])
        self.open_store()
        self.told()
        before = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        self.signs.reload(read)
        begun, ended = self.told()
        reloader, since = begun.splitlines()
        self.assertEqual((reloader, ended), ("RELOADING=1", "READY=1"))
        name, _, microseconds = since.partition("=")
        self.assertEqual(name, "MONOTONIC_USEC")
        self.assertLessEqual(before, int(microseconds))
        self.base.reloader.fails = True
        self.assertRaises(ZeroDivisionError, self.signs.reload, read)
        self.assertEqual(self.told()[-1], "READY=1")
        self.assertEqual(self.base.reloader.asked, [read] * 3)

    def test_stop(self) -> None:
        """Said once; nothing comes after that, and nothing is left."""
        for wait in (0.0, STARTUP_GRACE_SECONDS):
            self.signs = self.make_signs(self.base)
            self.signs.startService()
            self.base.reactor.advance(wait)
            self.told()
            self.signs.stopService()
            self.signs.store_opened()
            self.assertEqual(self.told(), ["STOPPING=1"])
            self.assertEqual(self.base.reactor.getDelayedCalls(), [])
        self.assertEqual(self.base.lived, ["started", "stopped"] * 2)
