"""Services of the daemon's start and stop: ordered shutdown, opening the store, accepting clients, status reports."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from twisted.application.service import MultiService, Service
from twisted.internet.defer import Deferred, maybeDeferred
from twisted.internet.defer import TimeoutError as DeferredTimeout
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.internet.task import LoopingCall
from twisted.logger import Logger

from mediatord import __version__
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
from mediatord.store.sqlite.database_file import DatabaseFileLock

if TYPE_CHECKING:
    from mediatord.app.core_services import CoreServices

_log = Logger()


def check_setting_combinations(config: Config) -> None:
    """
    Reject settings that cannot be combined.

    :raise StartupError: names the setting.
    """
    if config.cluster.listen is not None and config.storage.backend != "mongodb":
        raise StartupError("cluster.listen requires storage.backend: mongodb")


class OrderedService(MultiService):
    """
    Starts its children first to last, and stops them one after the other, last to first.

    A MultiService stops all at once, which would close the store under sockets that are still draining.

    :param timeout: seconds for stopping all children; those that have not stopped by then are abandoned.
    :ivar rotate: rotates the event logs.
    :ivar reload: given a function that reads the configuration, applies what may change and rotates the event logs.
    """

    def __init__(
        self,
        clock: IReactorTime,
        timeout: float,
        rotate: Callable[[], object] = lambda: None,
        reload: Callable[[Callable[[], Config]], None] = lambda read: None,
    ) -> None:
        super().__init__()
        self._clock = clock
        self._timeout = timeout
        self.rotate = rotate
        self.reload = reload

    def stopService(self) -> Deferred[None]:
        """Fires when everything has stopped, or at the timeout."""
        Service.stopService(self)
        return Deferred.fromCoroutine(self._stop_each(self._clock.seconds() + self._timeout))

    async def _stop_each(self, deadline: float) -> None:
        for child in reversed(list(self)):
            stopping = maybeDeferred(cast(Any, child).stopService)
            try:
                await stopping.addTimeout(max(0.1, deadline - self._clock.seconds()), self._clock)
            except Exception as error:
                # A cancelled child may fail with an error of its own.
                if isinstance(error, DeferredTimeout) or self._clock.seconds() >= deadline:
                    _log.warn("{name} did not stop in time", name=child.name)
                else:
                    _log.failure("stopping {name} failed", name=child.name)


# Seconds between attempts to open the store.
STORE_RETRY_SECONDS = 1.0
# Seconds after which the daemon counts as started without its store.
STARTUP_GRACE_SECONDS = 5.0
# Seconds for which connections wait for the store to open.
MAX_ACCEPT_DELAY = 2.0
# Seconds between updates of the status for systemd.
_STATUS_INTERVAL = 1.0


class ShutdownStep(Service):
    """Runs a function at shutdown."""

    def __init__(self, name: str, end: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self.name = name
        self._end = end

    def stopService(self) -> Deferred[None]:
        super().stopService()
        return Deferred.fromCoroutine(self._end())


class StoreLockService(Service):
    """
    Locks the SQLite database against other daemons while this one runs.

    :param path: of the database.
    """

    name = "store lock"

    def __init__(self, path: Path) -> None:
        self._lock = DatabaseFileLock(path)

    def privilegedStartService(self) -> None:
        """
        Lock the database.

        :raise StartupError: another daemon has locked it.
        """
        super().privilegedStartService()
        try:
            self._lock.take()
        except ValueError as error:
            raise StartupError(str(error)) from None

    def stopService(self) -> None:
        super().stopService()
        self._lock.release()


class StoreOpener(Service):
    """
    Opens the store at the start, with retries, and closes it after everything that uses it.

    :param open_store: called until it succeeds.
    :param check: checks the store beforehand; raises ValueError with a line for the operator.
    :param opened: called once the store is open.
    :param give_up: called with one line if the store can never be opened.
    """

    name = "store"

    def __init__(
        self,
        core: CoreServices,
        open_store: Callable[[], Deferred[None]],
        check: Callable[[], None],
        opened: Callable[[], None],
        give_up: Callable[[str], None],
    ) -> None:
        self._core = core
        self._open_store = open_store
        self._check = check
        self._on_opened = opened
        self._give_up = give_up
        self._retry: IDelayedCall | None = None

    def privilegedStartService(self) -> None:
        """
        Check the store while the start can still fail.

        :raise StartupError: it cannot be used.
        """
        super().privilegedStartService()
        try:
            self._check()
        except ValueError as error:
            raise StartupError(str(error)) from None

    def startService(self) -> None:
        """Start opening the store; requests that need it get 503 until then."""
        super().startService()
        self._open()

    def _open(self) -> None:
        self._retry = None
        self._open_store().addCallbacks(self._opened, self._failed)

    def _opened(self, _: None) -> None:
        self._core.recorder.metrics.set_storage_up(True)
        self._on_opened()

    def _failed(self, failure: Any) -> None:
        self._core.recorder.metrics.set_storage_up(False)
        if failure.check(StoreUnusable):
            self._give_up(str(failure.value))
            return
        if not failure.check(StoreUnavailable):
            _log.failure("opening the store failed", failure)
        if self.running:
            self._retry = self._core.reactor.callLater(STORE_RETRY_SECONDS, self._open)

    def stopService(self) -> Deferred[None]:
        """Finish pending operations and close the store."""
        super().stopService()
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        return self._core.store.close()


class AcceptDelay(Service):
    """
    Delays accepting connections until the store is open, for :data:`MAX_ACCEPT_DELAY` at most.

    The listeners are bound meanwhile, so that clients wait in the backlog; after the delay they get an error instead.
    Starts after the listeners and stops before them.
    """

    name = "accept delay"

    def __init__(self, clock: IReactorTime, listeners: Sequence[Listener]) -> None:
        self._clock = clock
        self._listeners = listeners
        self._ready = False
        self._call: IDelayedCall | None = None

    def privilegedStartService(self) -> None:
        """Hold the listeners that were bound with privileges."""
        super().privilegedStartService()
        self._hold()

    def startService(self) -> None:
        """Hold the listeners until :meth:`open` is called, or the delay is over."""
        super().startService()
        if self._ready:
            self._open()
            return
        self._hold()
        self._call = self._clock.callLater(MAX_ACCEPT_DELAY, self._open)

    def stopService(self) -> None:
        """Leave the listeners as they are."""
        super().stopService()
        self._cancel()

    def open(self) -> None:
        """Accept connections, now or when the service starts."""
        self._ready = True
        if self._call is not None:
            self._cancel()
            self._open()

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


class LifecycleNotifier(Service):
    """
    Reports start, status and stop of the daemon to the event log and to systemd.

    The daemon counts as started once it serves requests, or has listened without its store for
    :data:`STARTUP_GRACE_SECONDS`: it answers 503 then and keeps trying, so systemd must not end it.

    :param notify: sends a state to systemd, or to the supervisor.
    :param ready: called when the store is open and requests are served.
    """

    name = "status notifier"

    def __init__(
        self,
        core: CoreServices,
        notify: Callable[[str], object] = notify_systemd,
        ready: Callable[[], None] = lambda: None,
    ) -> None:
        self._core = core
        self._notify = notify
        self._on_ready = ready
        self._is_store_open = False
        self._has_started = False
        self._last_status = ""
        self._grace_timer: IDelayedCall | None = None
        self._watchdog = LoopingCall(notify, "WATCHDOG=1")
        self._status_loop = LoopingCall(self._report_status)
        self._loops = (self._watchdog, self._status_loop)
        for loop in self._loops:
            loop.clock = core.reactor

    def startService(self) -> None:
        super().startService()
        if not has_native_masking():
            _log.warn("Autobahn lacks its native extension: reading from WebSockets is many times slower")
        self._core.recorder.record_start(__version__)
        self._core.reactor.callWhenRunning(self._begin)

    def reload(self, read: Callable[[], Config]) -> None:
        """Reload configuration and keys, and tell systemd. :param read: reads the configuration."""
        if self._has_started:
            self._notify(build_reloading_state())
        try:
            self._core.reloader.reload(read)
        finally:
            if self._has_started:
                self._notify("READY=1")

    def store_opened(self) -> None:
        """Record that the store is open, before or after the start of the other services."""
        self._is_store_open = True
        if self.running:
            self._core.reactor.callWhenRunning(self._begin)

    def _begin(self) -> None:
        if not self._status_loop.running:
            self._status_loop.start(_STATUS_INTERVAL)
        if self._is_store_open:
            self._report_status()
            self._report_ready()
            self._on_ready()
        elif self._grace_timer is None:
            self._grace_timer = self._core.reactor.callLater(STARTUP_GRACE_SECONDS, self._report_ready)

    def _report_ready(self) -> None:
        self._cancel()
        if not self._has_started:
            self._has_started = True
            self._notify("READY=1")
            interval = get_watchdog_interval()
            if interval is not None:
                self._watchdog.start(interval)

    def _report_status(self) -> None:
        state = self._state()
        if state != self._last_status:
            self._last_status = state
            self._notify(f"STATUS={state}")

    def _state(self) -> str:
        if not self._core.recorder.metrics.storage_is_up:
            return STATUS_WAITING_FOR_STORE
        return self._core.node_health.trouble or (STATUS_SERVING if self._is_store_open else STATUS_WAITING_FOR_STORE)

    def _cancel(self) -> None:
        if self._grace_timer is not None and self._grace_timer.active():
            self._grace_timer.cancel()

    def stopService(self) -> None:
        super().stopService()
        self._cancel()
        self._notify("STOPPING=1")
        for loop in self._loops:
            if loop.running:
                loop.stop()
        self._core.recorder.record_stop(__version__)
