"""The supervisor: the parent process of the workers."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from twisted.application.service import Service
from twisted.internet.defer import Deferred
from twisted.internet.task import LoopingCall

from mediatord.cluster.presence import create_presence_counters
from mediatord.errors import StartupError
from mediatord.observability.systemd import build_reloading_state, get_watchdog_interval, notify_systemd
from mediatord.workers.metrics_aggregator import WorkerMetricsCollector
from mediatord.workers.shared_listeners import SharedListeners
from mediatord.workers.worker_pool import BroadcastQuery, WorkerBarrier, WorkerCommand, WorkerPool, WorkerTimeouts
from mediatord.workers.worker_process import (
    FIRST_SOCKET_FD,
    InheritedSocket,
    WorkerProcess,
    WorkerResources,
    WorkerSpec,
)


class Supervisor(Service):
    """
    Binds the listeners, keeps the workers running, and reports to systemd for them.

    :param workers: node name and configuration (JSON) of each worker.
    :param secret: authenticates the workers to each other.
    :param seed: secret of the mediator's identity at the start.
    :param keys: content of a key file, for all workers.
    :param check: checks the store before the workers start; raises ValueError with one line.
    :param give_up: called with one line if no worker could start.
    :param ready: called once, when all workers are ready.
    :param report_state: the state of this process, for the status page; None if there is no page.
    """

    name = "supervisor"

    def __init__(
        self,
        reactor: Any,
        listeners: SharedListeners,
        workers: Sequence[tuple[str, str]],
        *,
        secret: bytes,
        seed: bytes,
        keys: bytes,
        check: Callable[[], None],
        give_up: Callable[[str], None],
        ready: Callable[[], None] = lambda: None,
        report_state: Callable[[], Any] | None = None,
        timeouts: WorkerTimeouts = WorkerTimeouts(),  # noqa: B008  frozen
    ) -> None:
        self._reactor = reactor
        self._listeners = listeners
        self._names = [name for name, _ in workers]
        self._settings: Sequence[str] = [settings for _, settings in workers]
        self._secret = secret
        self._seed = seed
        self._keys = keys
        self._check = check
        self._on_ready = ready
        self._timeouts = timeouts
        self._directory: Path | None = None
        self._last_status = ""
        self._watchdog = LoopingCall(self._notify_watchdog)
        self._watchdog.clock = reactor
        self.pool = WorkerPool(
            reactor,
            self._spawn_worker,
            listeners,
            self._names,
            on_message=self._on_message,
            complete=self._ready,
            changed=self._notify_status,
            give_up=give_up,
            timeouts=timeouts,
        )
        self._metrics_collector = WorkerMetricsCollector(reactor, lambda: self.pool)
        self._state_query = BroadcastQuery(reactor, "state", lambda: self.pool)
        self._report_state = report_state
        self._barrier = WorkerBarrier(lambda: self.pool)
        self._is_ready = False

    def privilegedStartService(self) -> None:
        """
        Bind the listeners.

        :raise StartupError: an address is in use, or not an address of this host.
        """
        super().privilegedStartService()
        self._listeners.bind()

    def startService(self) -> None:
        """
        Check the store, and start the workers as soon as the reactor runs.

        :raise StartupError: the store cannot be used.
        :raise OSError: the directory of the workers' sockets cannot be created.
        """
        super().startService()
        try:
            # Not earlier, since the database has to belong to the user that the workers run as.
            self._check()
            self._directory = Path(tempfile.mkdtemp(prefix="mediatord-workers-"))
            create_presence_counters(self._socket(0), len(self._names))
        except ValueError as error:
            self._listeners.close()
            raise StartupError(str(error)) from None
        except OSError:
            self._listeners.close()
            raise
        self._reactor.callWhenRunning(self._start_workers)

    def rotate(self) -> None:
        """Rotate the event logs of all workers."""
        for child in self.pool:
            child.send("rotate")

    def reload(self, settings: Sequence[str], outcome: str, keys: Sequence[bytes] = ()) -> None:
        """
        Apply changed settings in all workers, and rotate their event logs.

        :param settings: configuration (JSON) of each worker, also for later replacements.
        :param outcome: of reading the configuration.
        :param keys: contents of key files; all workers use one before any of them uses the next.
        """
        first_keys, *later_keys = keys or (self._keys,)

        def apply() -> WorkerCommand:
            self._settings, self._keys = settings, first_keys
            return lambda child: child.send(
                "reload", [settings[self.pool.number(child)], outcome, first_keys.decode("utf-8")]
            )

        def use(content: bytes) -> WorkerCommand:
            self._keys = content
            return lambda child: child.send("keys", content.decode("utf-8"))

        self._notify_reload(build_reloading_state())
        self._barrier.add(apply, *(partial(use, one) for one in later_keys), partial(self._notify_reload, "READY=1"))

    def _notify_reload(self, state: str) -> None:
        # Before the start is complete this would report it as complete.
        if self._is_ready:
            notify_systemd(state)

    def stopService(self) -> Deferred[None]:
        """Close the listeners and stop the workers; fires when they have ended."""
        super().stopService()
        notify_systemd("STOPPING=1")
        if self._watchdog.running:
            self._watchdog.stop()
        self._metrics_collector.stop()
        self._state_query.stop()
        return Deferred.fromCoroutine(self._stop())

    async def _stop(self) -> None:
        self._listeners.close()
        await self.pool.stop()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)

    def _start_workers(self) -> None:
        if self.running:
            self.pool.start()

    def _ready(self) -> None:
        self._is_ready = True
        notify_systemd("READY=1")
        self._on_ready()
        interval = get_watchdog_interval()
        if interval is not None:
            self._watchdog.start(interval)

    def _notify_status(self) -> None:
        status = self.pool.status
        if status != self._last_status:
            self._last_status = status
            notify_systemd(f"STATUS={status}")

    def _notify_watchdog(self) -> None:
        if self.pool.answers:
            notify_systemd("WATCHDOG=1")

    def _spawn_worker(
        self,
        number: int,
        on_message: Callable[[WorkerProcess, str, Any], None],
        gone: Callable[[WorkerProcess, str], None],
    ) -> WorkerProcess:
        path = self._socket(number)
        for stale in (path, path.with_name(f"{path.name}.lock")):
            with contextlib.suppress(FileNotFoundError):
                stale.unlink()
        sockets = self._listeners.sockets(number)
        inherited = tuple(
            InheritedSocket(FIRST_SOCKET_FD + index, family) for index, (_, family) in enumerate(sockets)
        )
        resources = WorkerResources(str(path), self._secret, self._seed, inherited, self._keys)
        spec = WorkerSpec(resources, self._settings[number])

        def ended(child: WorkerProcess, how: str) -> None:
            self._metrics_collector.gone(child)
            self._state_query.gone(child)
            gone(child, how)
            self._barrier.answered(child)

        child = WorkerProcess(self._names[number], on_message, ended, missed_heartbeats=-self._timeouts.starting)
        child.spawn(self._reactor, spec.to_bytes(), [descriptor for descriptor, _ in sockets])
        return child

    def _socket(self, number: int) -> Path:
        """Path of the node-to-node socket of a worker, numbered from 0."""
        assert self._directory is not None
        return self._directory / f"{number + 1}.sock"

    def _on_message(self, child: WorkerProcess, word: str, content: Any) -> None:
        if word == "fetch metrics":
            self._metrics_collector.collect(child, lambda text: child.send("all metrics", [content, text]))
        elif word == "reloaded":
            self._barrier.answered(child)
        elif word == "metrics":
            self._metrics_collector.take(child, *content)
        elif word == "fetch states":
            self._state_query.begin(child, partial(self._send_states, child, content))
        elif word == "state":
            self._state_query.take(child, *content)

    def _send_states(self, child: WorkerProcess, number: int, asked: int, states: Mapping[int, Any]) -> None:
        own = [] if self._report_state is None else [self._report_state()]
        child.send("all states", [number, [asked, [*states.values(), *own]]])
