"""
Services that start and stop one after the other.

Children of the root service that only begin, end or tell something.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, cast

from twisted.application.service import MultiService, Service
from twisted.internet.defer import Deferred, maybeDeferred
from twisted.internet.defer import TimeoutError as DeferredTimeout
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.internet.task import LoopingCall
from twisted.logger import Logger

from mediatord import __version__
from mediatord.app.core_services import CoreServices
from mediatord.config.settings import Config
from mediatord.errors import StartupError, StoreUnavailable
from mediatord.http.websocket import has_native_masking
from mediatord.net.listeners import Listener
from mediatord.observability.systemd import (
    STATUS_SERVING,
    STATUS_WAITING_FOR_STORE,
    build_reloading_state,
    get_watchdog_interval,
    notify_systemd,
)
from mediatord.store.interfaces.store import StoreUnusable
from mediatord.store.sqlite.database_file import ExclusiveStoreLock

_log = Logger()


def check_setting_combinations(config: Config) -> None:
    """
    Refuse settings that cannot be had together, or that this version does not have yet.

    :raise StartupError: names the setting.
    """
    if config.cluster.listen is not None and config.storage.backend != "mongodb":
        raise StartupError("cluster.listen needs storage.backend mongodb, which nodes can share")


class OrderedService(MultiService):
    """
    Starts its children first to last, and stops them last to first, each after the one before.

    A MultiService stops all at once, which would close the store under a socket that is still draining.

    :param patience: seconds that stopping may take in all; what is not done by then is left behind.
    :ivar rotate: closes the segments of the event logs.
    :ivar reload: takes what reads the configuration, applies what can be applied, and closes the segments as well.
    """

    def __init__(
        self,
        clock: IReactorTime,
        patience: float,
        rotate: Callable[[], object] = lambda: None,
        reload: Callable[[Callable[[], Config]], None] = lambda read: None,
    ) -> None:
        super().__init__()
        self._clock = clock
        self._patience = patience
        self.rotate = rotate
        self.reload = reload

    def stopService(self) -> Deferred[None]:
        """Fires when everything has stopped, or time is up."""
        Service.stopService(self)
        return Deferred.fromCoroutine(self._stop_each(self._clock.seconds() + self._patience))

    async def _stop_each(self, deadline: float) -> None:
        for child in reversed(list(self)):
            stopping = maybeDeferred(cast(Any, child).stopService)
            try:
                await stopping.addTimeout(max(0.1, deadline - self._clock.seconds()), self._clock)
            except Exception as error:
                # A child may put its cancellation into an error of its own.
                if isinstance(error, DeferredTimeout) or self._clock.seconds() >= deadline:
                    _log.warn("{name} did not stop in time", name=child.name)
                else:
                    _log.failure("{name} did not stop", name=child.name)


# Seconds until a store that did not open is tried again.
STORE_RETRY_SECONDS = 1.0
# Seconds that the store may take before the daemon counts as up without it; its doors are open by then.
STARTUP_GRACE_SECONDS = 5.0
# Seconds that connections may wait for a store that is not open yet.
MAX_ACCEPT_DELAY = 2.0
# Seconds between looks at how the daemon is.
_STATUS_INTERVAL = 1.0


class ShutdownStep(Service):
    """Something that only has to be ended."""

    def __init__(self, name: str, end: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self.name = name
        self._end = end

    def stopService(self) -> Deferred[None]:
        super().stopService()
        return Deferred.fromCoroutine(self._end())


class StoreLockService(Service):
    """
    Keeps the database from other daemons, from before anything is done until everything is.

    :param path: of the database.
    """

    name = "sole user"

    def __init__(self, path: Path) -> None:
        self._use = ExclusiveStoreLock(path)

    def privilegedStartService(self) -> None:
        """
        Lock it.

        :raise StartupError: another daemon has.
        """
        super().privilegedStartService()
        try:
            self._use.take()
        except ValueError as error:
            raise StartupError(str(error)) from None

    def stopService(self) -> None:
        super().stopService()
        self._use.release()


class StoreOpener(Service):
    """
    Opens the store when the daemon starts, and closes it after everything that uses it.

    :param open_store: may be called again when it failed.
    :param check: finds out whether opening makes sense at all; raises ValueError with a line for the operator.
    :param opened: told once it is open.
    :param give_up: told in a line why it never will be.
    """

    name = "store"

    def __init__(
        self,
        base: CoreServices,
        open_store: Callable[[], Deferred[None]],
        check: Callable[[], None],
        opened: Callable[[], None],
        give_up: Callable[[str], None],
    ) -> None:
        self._base = base
        self._open_store = open_store
        self._check = check
        self._tell_opened = opened
        self._give_up = give_up
        self._retry: IDelayedCall | None = None

    def privilegedStartService(self) -> None:
        """
        Look at the store while there is still somebody to tell.

        :raise StartupError: it cannot be used.
        """
        super().privilegedStartService()
        try:
            self._check()
        except ValueError as error:
            raise StartupError(str(error)) from None

    def startService(self) -> None:
        """Open it; what needs it before that is done is answered 503."""
        super().startService()
        self._open()

    def _open(self) -> None:
        self._retry = None
        self._open_store().addCallbacks(self._opened, self._failed)

    def _opened(self, _: None) -> None:
        self._base.recorder.metrics.set_storage_up(True)
        self._tell_opened()

    def _failed(self, failure: Any) -> None:
        self._base.recorder.metrics.set_storage_up(False)
        if failure.check(StoreUnusable):
            self._give_up(str(failure.value))
            return
        if not failure.check(StoreUnavailable):
            _log.failure("opening the store failed", failure)
        if self.running:
            self._retry = self._base.reactor.callLater(STORE_RETRY_SECONDS, self._open)

    def stopService(self) -> Deferred[None]:
        """Finish what was accepted, and close."""
        super().stopService()
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        return self._base.store.close()


class AcceptDelay(Service):
    """
    Has listeners take no connections before there is something to serve them with.

    They are bound by then, so that what comes waits in the backlog, though not for long: clients are to be told when
    the store is in trouble. Started after the listeners, and stopped before them.

    :param opened: told when this is told to open.
    """

    name = "doors"

    def __init__(self, clock: IReactorTime, listeners: Sequence[Listener], opened: Callable[[], None]) -> None:
        self._clock = clock
        self._listeners = listeners
        self._opened = opened
        self._ready = False
        self._call: IDelayedCall | None = None

    def privilegedStartService(self) -> None:
        """What was bound for privileges is held from the beginning."""
        super().privilegedStartService()
        self._hold()

    def startService(self) -> None:
        """Open after a while, if that was not done by then."""
        super().startService()
        if self._ready:
            self._open()
            return
        self._hold()
        self._call = self._clock.callLater(MAX_ACCEPT_DELAY, self._open)

    def stopService(self) -> None:
        """Stay closed, if they are."""
        super().stopService()
        self._cancel()

    def open(self) -> None:
        """There is something to serve them with."""
        self._ready = True
        if self._call is not None:
            self._cancel()
            self._open()
        self._opened()

    def _hold(self) -> None:
        for listener in self._listeners:
            listener.hold()

    def _open(self) -> None:
        self._call = None
        for listener in self._listeners:
            listener.resume_accepting()

    def _cancel(self) -> None:
        if self._call is not None:
            self._call.cancel()
            self._call = None


class StatusNotifier(Service):
    """
    Says to the log and to systemd that the daemon is up, how it is, and that it is about to stop.

    It is up once it serves, or has listened for a while and answers 503: one whose store is away keeps trying, which
    is no reason to end it.

    :param tell: tells systemd.
    :param ready: told that the store is open and requests are served.
    """

    name = "signs of life"

    def __init__(
        self,
        base: CoreServices,
        tell: Callable[[str], object] = notify_systemd,
        ready: Callable[[], None] = lambda: None,
    ) -> None:
        self._base = base
        self._tell = tell
        self._tell_ready = ready
        self._store_open = False
        self._up = False
        self._told = ""
        self._late: IDelayedCall | None = None
        self._watchdog = LoopingCall(tell, "WATCHDOG=1")
        self._status_loop = LoopingCall(self._report_status)
        self._loops = (self._watchdog, self._status_loop)
        for loop in self._loops:
            loop.clock = base.reactor

    def startService(self) -> None:
        super().startService()
        if not has_native_masking():
            _log.warn("Autobahn runs without its native code: reading from sockets is many times slower")
        self._base.recorder.record_start(__version__)
        self._base.reactor.callWhenRunning(self._begin)

    def reload(self, read: Callable[[], Config]) -> None:
        """Read configuration and keys again, and say so. :param read: reads the configuration."""
        if self._up:
            self._tell(build_reloading_state())
        try:
            self._base.reloading.reload(read)
        finally:
            if self._up:
                self._tell("READY=1")

    def store_opened(self) -> None:
        """The store is open, which may be before or after everything else has started."""
        self._store_open = True
        if self.running:
            self._base.reactor.callWhenRunning(self._begin)

    def _begin(self) -> None:
        if not self._status_loop.running:
            self._status_loop.start(_STATUS_INTERVAL)
        if self._store_open:
            self._report_status()
            self._report_ready()
            self._tell_ready()
        elif self._late is None:
            self._late = self._base.reactor.callLater(STARTUP_GRACE_SECONDS, self._report_ready)

    def _report_ready(self) -> None:
        self._cancel()
        if not self._up:
            self._up = True
            self._tell("READY=1")
            interval = get_watchdog_interval()
            if interval is not None:
                self._watchdog.start(interval)

    def _report_status(self) -> None:
        state = self._state()
        if state != self._told:
            self._told = state
            self._tell(f"STATUS={state}")

    def _state(self) -> str:
        if not self._base.recorder.metrics.storage_is_up:
            return STATUS_WAITING_FOR_STORE
        return self._base.node_health.trouble or (STATUS_SERVING if self._store_open else STATUS_WAITING_FOR_STORE)

    def _cancel(self) -> None:
        if self._late is not None and self._late.active():
            self._late.cancel()

    def stopService(self) -> None:
        super().stopService()
        self._cancel()
        self._tell("STOPPING=1")
        for loop in self._loops:
            if loop.running:
                loop.stop()
        self._base.recorder.record_stop(__version__)
