"""Children of the root service that only begin, end or tell something."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from twisted.application.service import Service
from twisted.internet.defer import Deferred
from twisted.internet.task import LoopingCall
from twisted.logger import Logger

from mediatord import __version__
from mediatord.errors import StoreUnavailable
from mediatord.notify import notify, watchdog_interval
from mediatord.web.websocket import native_masking
from mediatord.wiring.base import Base

_log = Logger()


class Endings(Service):
    """Something that only has to be ended."""

    def __init__(self, name: str, end: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self.name = name
        self._end = end

    def stopService(self) -> Deferred[None]:
        super().stopService()
        return Deferred.fromCoroutine(self._end())


class StoreLife(Service):
    """Opens the store when the daemon starts, and closes it after everything that uses it."""

    name = "store"

    def __init__(self, base: Base) -> None:
        self._base = base

    def startService(self) -> None:
        super().startService()
        self._base.store.open().addCallbacks(self._opened, self._failed)

    def _opened(self, _: None) -> None:
        self._base.journal.metrics.storage_up(True)

    def _failed(self, failure: Any) -> None:
        self._base.journal.metrics.storage_up(False)
        if not failure.check(StoreUnavailable):
            _log.failure("opening the store failed", failure)

    def stopService(self) -> Deferred[None]:
        super().stopService()
        return self._base.store.close()


class Signs(Service):
    """Says to the log and to systemd that the daemon takes work, and that it is about to stop."""

    name = "signs of life"

    def __init__(self, base: Base) -> None:
        self._base = base
        self._watchdog: LoopingCall | None = None

    def startService(self) -> None:
        super().startService()
        if not native_masking():
            _log.warn("Autobahn runs without its native code: reading from sockets is many times slower")
        self._base.journal.started(__version__)
        self._base.reactor.callWhenRunning(self._ready)

    def _ready(self) -> None:
        notify("READY=1")
        interval = watchdog_interval()
        if interval is not None:
            self._watchdog = LoopingCall(notify, "WATCHDOG=1")
            self._watchdog.clock = self._base.reactor
            self._watchdog.start(interval)

    def stopService(self) -> None:
        super().stopService()
        notify("STOPPING=1")
        if self._watchdog is not None and self._watchdog.running:
            self._watchdog.stop()
        self._base.journal.stopped(__version__)
