"""The parent of the workers, as a service."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
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


@dataclass(frozen=True, slots=True)
class WorkerPoolSpec:
    """
    What the workers are to do.

    :param workers: name and configuration (as JSON) of each.
    :param secret: they know each other by it.
    :param seed: of what they are to have in common with other nodes.
    :param keys: the content of a key file, that all of them have.
    """

    workers: Sequence[tuple[str, str]]
    secret: bytes = field(repr=False)
    seed: bytes = field(repr=False)
    keys: bytes = field(repr=False)


class Supervisor(Service):
    """
    Binds the listeners, keeps the workers going, and speaks for them to systemd.

    :param check: finds out whether the workers could use the store at all; raises ValueError with one line.
    :param give_up: told in one line why no worker could start.
    :param ready: told once that all workers are up.
    :ivar tell_state: what this process has to say beside the workers when they are asked for their states.
    """

    name = "supervisor"

    def __init__(
        self,
        reactor: Any,
        listeners: SharedListeners,
        pool_spec: WorkerPoolSpec,
        *,
        check: Callable[[], None],
        give_up: Callable[[str], None],
        ready: Callable[[], None] = lambda: None,
        timeouts: WorkerTimeouts = WorkerTimeouts(),  # noqa: B008  frozen
    ) -> None:
        self._reactor = reactor
        self._listeners = listeners
        self._pool_spec = pool_spec
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
            [name for name, _ in pool_spec.workers],
            on_message=self._on_message,
            complete=self._ready,
            changed=self._notify_status,
            give_up=give_up,
            timeouts=timeouts,
        )
        self._metrics_collector = WorkerMetricsCollector(reactor, lambda: self.pool)
        self._state_query = BroadcastQuery(reactor, "state", lambda: self.pool)
        self.report_state: Callable[[], Any] | None = None
        self._barrier = WorkerBarrier(lambda: self.pool)
        self._is_ready = False

    def privilegedStartService(self) -> None:
        """
        Bind the listeners, while there is still somebody to tell.

        :raise StartupError: an address is taken or not ours.
        """
        super().privilegedStartService()
        self._listeners.bind()

    def startService(self) -> None:
        """
        Look at the store, and have the workers begin as soon as the reactor runs.

        :raise StartupError: the store cannot be used.
        :raise OSError: there is no place for the workers' sockets.
        """
        super().startService()
        try:
            # Not earlier: the database is to belong to the user that the workers run as.
            self._check()
            self._directory = Path(tempfile.mkdtemp(prefix="mediatord-workers-"))
            create_presence_counters(self._socket(0), len(self._pool_spec.workers))
        except ValueError as error:
            self._listeners.close()
            raise StartupError(str(error)) from None
        except OSError:
            self._listeners.close()
            raise
        self._reactor.callWhenRunning(self._start_workers)

    def rotate(self) -> None:
        """Have every worker close the segment of its event log."""
        for child in self.pool:
            child.send("rotate")

    def reload(self, settings: Sequence[str], outcome: str, keys: Sequence[bytes] = ()) -> None:
        """
        Have every worker go by other settings, and close the segment of its event log.

        :param settings: configuration (as JSON) of each, also for those that are to replace one of them.
        :param outcome: what became of the configuration that was read.
        :param keys: contents of key files: each is what all workers go by before any of them goes by the next.
        """
        present, *later = keys or (self._pool_spec.keys,)
        named_settings = zip(self._pool_spec.workers, settings, strict=True)
        pool_spec = replace(self._pool_spec, workers=[(name, new) for (name, _), new in named_settings])

        def apply() -> WorkerCommand:
            self._pool_spec = replace(pool_spec, keys=present)
            return lambda child: child.send(
                "reload", [settings[self.pool.number(child)], outcome, present.decode("utf-8")]
            )

        def use(content: bytes) -> WorkerCommand:
            self._pool_spec = replace(self._pool_spec, keys=content)
            return lambda child: child.send("keys", content.decode("utf-8"))

        self._notify_reload(build_reloading_state())
        self._barrier.add(apply, *(partial(use, one) for one in later), partial(self._notify_reload, "READY=1"))

    def _notify_reload(self, state: str) -> None:
        # A daemon that is not up yet must not say that it is.
        if self._is_ready:
            notify_systemd(state)

    def stopService(self) -> Deferred[None]:
        """Take no more connections, and have the workers stop. Fires when they are gone."""
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
        for left in (path, path.with_name(f"{path.name}.lock")):
            with contextlib.suppress(FileNotFoundError):
                left.unlink()
        name, settings = self._pool_spec.workers[number]
        sockets = self._listeners.sockets(number)
        inherited = tuple(
            InheritedSocket(FIRST_SOCKET_FD + index, family) for index, (_, family) in enumerate(sockets)
        )
        resources = WorkerResources(
            str(path), self._pool_spec.secret, self._pool_spec.seed, inherited, self._pool_spec.keys
        )
        spec = WorkerSpec(resources, settings)

        def ended(child: WorkerProcess, how: str) -> None:
            self._metrics_collector.gone(child)
            self._state_query.gone(child)
            gone(child, how)
            self._barrier.answered(child)

        child = WorkerProcess(name, on_message, ended, missed_heartbeats=-self._timeouts.starting)
        child.spawn(self._reactor, spec.written(), [descriptor for descriptor, _ in sockets])
        return child

    def _socket(self, number: int) -> Path:
        """The node-to-node socket of a worker, counted from 0."""
        assert self._directory is not None
        return self._directory / f"{number + 1}.sock"

    def _on_message(self, child: WorkerProcess, word: str, content: Any) -> None:
        if word == "ask":
            self._metrics_collector.begin(child, lambda page: child.send("page", [content, page]))
        elif word == "reloaded":
            self._barrier.answered(child)
        elif word == "report":
            self._metrics_collector.take(child, *content)
        elif word == "ask states":
            self._state_query.begin(child, partial(self._send_states, child, content))
        elif word == "state":
            self._state_query.take(child, *content)

    def _send_states(self, child: WorkerProcess, number: int, asked: int, states: Mapping[int, Any]) -> None:
        own = [] if self.report_state is None else [self.report_state()]
        child.send("states", [number, [asked, [*states.values(), *own]]])
