"""The supervisor: the parent process of the workers, which spawns, watches, replaces and questions them."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twisted.application.service import Service
from twisted.internet.defer import Deferred, DeferredList, DeferredLock
from twisted.internet.interfaces import IDelayedCall
from twisted.internet.task import LoopingCall
from twisted.logger import Logger
from twisted.python.failure import Failure

from mediatord.errors import StartupError
from mediatord.observability.systemd import (
    STATUS_SERVING,
    build_reloading_state,
    get_watchdog_interval,
    notify_systemd,
)
from mediatord.workers.control_channel import NoAnswer
from mediatord.workers.live_did_counters import create_live_did_counters
from mediatord.workers.metrics_aggregator import MetricsAggregator
from mediatord.workers.shared_listeners import SharedListeners
from mediatord.workers.sibling_channel import get_socket_path
from mediatord.workers.supervised_worker import FIRST_SOCKET_FD, SupervisedWorker, WorkerSpec

_log = Logger()

# Seconds for the workers to answer a query.
QUERY_TIMEOUT = 1.0
# Regular ends; a worker that has just begun to start is killed by the signal.
_EXPECTED_EXITS = ("ended with status 0", "was killed by SIGTERM")
# Seconds before a worker is replaced, by number of failures in a row, and of running after which they do not count.
_RESTART_DELAYS = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
_STEADY_SECONDS = 60.0
# Seconds between heartbeats. Number of those without answer after which systemd's watchdog is not notified, and after
# which a worker is killed.
_HEARTBEAT_INTERVAL = 5.0
_LATE_HEARTBEATS, _HUNG_HEARTBEATS = 2, 6


@dataclass(eq=False, slots=True)
class _WorkerSlot:
    """
    The place of one worker and its replacements.

    :ivar settings: configuration (JSON) of the next one.
    :ivar failures: ends in a row.
    :ivar is_suspended: whether its connections are directed to other workers.
    :ivar has_served: whether any worker in this slot has served.
    :ivar start_error: why the last one could not start; empty if it could.
    """

    number: int
    name: str
    settings: str
    child: SupervisedWorker | None = None
    restart_timer: IDelayedCall | None = None
    began: float = 0.0
    failures: int = 0
    is_suspended: bool = False
    has_served: bool = False
    start_error: str = ""


def _stop_if_refused(failure: Failure, child: SupervisedWorker) -> None:
    """Stop a worker that could not apply settings or keys; its replacement starts with them."""
    failure.trap(NoAnswer)
    child.signal("TERM")


class Supervisor(Service):
    """
    Binds the listeners, keeps the workers running, and reports to systemd for them.

    :param workers: node name and configuration (JSON) of each worker.
    :param secret: authenticates the workers to each other.
    :param seed: secret of the mediator's identity at the start.
    :param keys: content of a key file, for all workers.
    :param check: checks the store before the workers start; raises ValueError with one line.
    :param give_up: called with the error of one worker if none of them could start.
    :param ready: called once, when all workers are ready.
    :param report_state: the state of this process, for the status page; None if there is no page.
    :param stop_timeout: seconds for all workers to stop.
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
        stop_timeout: float = 8.0,
    ) -> None:
        self._reactor = reactor
        self._listeners = listeners
        self._slots = [_WorkerSlot(number, *worker) for number, worker in enumerate(workers)]
        self._secret = secret
        self._seed = seed
        self._keys = keys
        self._check = check
        self._give_up = give_up
        self._on_ready = ready
        self._report_state = report_state
        self._stop_timeout = stop_timeout
        self._directory = Path()
        self._last_status = ""
        self._is_ready = False
        self._reload_lock = DeferredLock()
        self._aggregator = MetricsAggregator()
        self._stopped: Deferred[None] | None = None
        self._heartbeat, self._watchdog = LoopingCall(self._send_heartbeats), LoopingCall(self._notify_watchdog)
        self._heartbeat.clock = self._watchdog.clock = reactor

    @property
    def _workers(self) -> list[tuple[_WorkerSlot, SupervisedWorker]]:
        """The running workers, ready or not."""
        return [(slot, slot.child) for slot in self._slots if slot.child is not None]

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
            create_live_did_counters(self._directory, len(self._slots))
        except (ValueError, OSError) as error:
            self._listeners.close()
            if isinstance(error, ValueError):
                raise StartupError(str(error)) from None
            raise
        self._reactor.callWhenRunning(self._start_workers)

    def rotate(self) -> None:
        """Rotate the event logs of all workers."""
        for _, child in self._workers:
            child.send("rotate")

    def reload(self, settings: Sequence[str], outcome: str, keys: Sequence[bytes] = ()) -> None:
        """
        Apply changed settings in all workers, and rotate their event logs.

        :param settings: configuration (JSON) of each worker, also for later replacements.
        :param outcome: of reading the configuration.
        :param keys: contents of key files; all workers use one before any of them uses the next.
        """
        self._notify_reload(build_reloading_state())
        reload = self._reload(settings, outcome, keys or (self._keys,))
        done = self._reload_lock.run(lambda: Deferred.fromCoroutine(reload))
        done.addErrback(lambda failure: _log.failure("reloading the workers failed", failure))

    async def _reload(self, settings: Sequence[str], outcome: str, keys: Sequence[bytes]) -> None:
        for slot in self._slots:
            slot.settings = settings[slot.number]
        for step, content in enumerate(keys):
            self._keys, text = content, content.decode("utf-8")
            asked = [
                (child, child.ask("keys", text) if step else child.ask("reload", [slot.settings, outcome, text]))
                for slot, child in self._workers
            ]
            for child, answer in asked:
                answer.addErrback(_stop_if_refused, child)
            await DeferredList([answer for _, answer in asked], consumeErrors=True)
        self._notify_reload("READY=1")

    def _notify_reload(self, state: str) -> None:
        # Before the start is complete this would report it as complete.
        if self._is_ready:
            notify_systemd(state)

    def stopService(self) -> Deferred[None]:
        """Close the listeners and stop the workers; fires when they have ended."""
        super().stopService()
        notify_systemd("STOPPING=1")
        for loop in (self._watchdog, self._heartbeat):
            if loop.running:
                loop.stop()
        self._listeners.close()
        return Deferred.fromCoroutine(self._stop())

    async def _stop(self) -> None:
        for slot in self._slots:
            if slot.restart_timer is not None:
                slot.restart_timer.cancel()
        for _, child in self._workers:
            child.signal("TERM")
        if self._workers:
            self._stopped = Deferred()
            kill_timer = self._reactor.callLater(self._stop_timeout, self._kill_all)
            await self._stopped
            if kill_timer.active():
                kill_timer.cancel()
        if self._directory.is_absolute():
            shutil.rmtree(self._directory, ignore_errors=True)

    def _kill_all(self) -> None:
        for _, child in self._workers:
            _log.error("worker {name} (process {pid}) did not stop in time", name=child.name, pid=child.pid)
            child.signal("KILL")

    def _start_workers(self) -> None:
        if self.running:
            for slot in self._slots:
                self._start_worker(slot)
            self._heartbeat.start(_HEARTBEAT_INTERVAL, now=False)

    def _start_worker(self, slot: _WorkerSlot) -> None:
        slot.restart_timer = None
        slot.began = self._reactor.seconds()
        try:
            if slot.is_suspended:
                self._listeners.resume(slot.number)
                slot.is_suspended = False
            slot.child = self._spawn_worker(slot)
        except OSError as error:
            _log.error("cannot start worker {name}: {reason}", name=slot.name, reason=error.strerror)
            self._schedule_restart(slot)
            return
        _log.info("started worker {name}, process {pid}", name=slot.name, pid=slot.child.pid)

    def _spawn_worker(self, slot: _WorkerSlot) -> SupervisedWorker:
        path = get_socket_path(self._directory, slot.number)
        for stale in (path, path.with_name(f"{path.name}.lock")):
            stale.unlink(missing_ok=True)
        sockets = self._listeners.descriptors(slot.number)
        inherited = range(FIRST_SOCKET_FD, FIRST_SOCKET_FD + len(sockets))
        spec = WorkerSpec(str(path), self._secret, self._seed, list(inherited), self._keys, slot.settings)

        def ended(child: SupervisedWorker, how: str) -> None:
            self._worker_ended(slot, child, how)

        child = SupervisedWorker(self._reactor, slot.name, ended)
        child.handlers |= {
            "ready": lambda _: self._worker_ready(child),
            "status": lambda status: self._set_status(slot, child, status),
            "all metrics": lambda _: self._collect_metrics(child),
            "all states": lambda _: self._collect_states(child),
        }
        child.spawn(spec, sockets)
        return child

    def _worker_ready(self, child: SupervisedWorker) -> None:
        child.ready = True
        if self._is_ready or not all(slot.child and slot.child.ready for slot in self._slots):
            return
        self._is_ready = True
        notify_systemd("READY=1")
        self._on_ready()
        interval = get_watchdog_interval()
        if interval is not None:
            self._watchdog.start(interval)

    def _set_status(self, slot: _WorkerSlot, child: SupervisedWorker, status: str) -> None:
        child.status = status
        slot.has_served |= status == STATUS_SERVING
        worst = next((one.status for _, one in self._workers if one.status != STATUS_SERVING), STATUS_SERVING)
        if worst != self._last_status:
            self._last_status = worst
            notify_systemd(f"STATUS={worst}")

    def _worker_ended(self, slot: _WorkerSlot, child: SupervisedWorker, how: str) -> None:
        self._aggregator.retire(child.pid)
        slot.child, slot.start_error = None, child.start_error
        if self.running and all(one.start_error and not one.has_served for one in self._slots):
            self._give_up(child.start_error)
            return
        if self.running or how not in _EXPECTED_EXITS:
            _log.warn(
                "worker {name} (process {pid}) {how}{why}",
                name=child.name,
                pid=child.pid,
                how=how,
                why=f": {child.start_error}" if child.start_error and self.running else "",
            )
        if self.running:
            if child.ready and self._reactor.seconds() - slot.began >= _STEADY_SECONDS:
                slot.failures = 0
            if child.start_error:
                slot.failures = max(1, slot.failures)
            self._schedule_restart(slot)
        elif self._stopped is not None and not self._workers:
            self._stopped.callback(None)

    def _schedule_restart(self, slot: _WorkerSlot) -> None:
        pause = _RESTART_DELAYS[min(slot.failures, len(_RESTART_DELAYS) - 1)]
        slot.failures += 1
        if pause and not slot.is_suspended:
            slot.is_suspended = True
            self._listeners.suspend(slot.number)
        slot.restart_timer = self._reactor.callLater(pause, self._start_worker, slot)

    def _send_heartbeats(self) -> None:
        for _, child in self._workers:
            if child.missed_heartbeats >= _HUNG_HEARTBEATS:
                _log.error(
                    "killing worker {name} (process {pid}): it does not respond", name=child.name, pid=child.pid
                )
                child.signal("KILL")
                continue
            child.missed_heartbeats += 1
            child.send("ping")

    def _notify_watchdog(self) -> None:
        if all(child.missed_heartbeats < _LATE_HEARTBEATS for _, child in self._workers):
            notify_systemd("WATCHDOG=1")

    async def _query_all(self, word: str, requester: SupervisedWorker) -> tuple[int, Mapping[int, Any]]:
        """Query every ready worker, and the requester: how many there are, and the answers in time, by process."""
        asked = [child for _, child in self._workers if child.ready or child is requester]
        answers = [child.ask(word, timeout=QUERY_TIMEOUT) for child in asked]
        results: Any = await DeferredList(answers, consumeErrors=True)
        return len(asked), {
            child.pid: value for child, (answered, value) in zip(asked, results, strict=True) if answered
        }

    async def _collect_metrics(self, requester: SupervisedWorker) -> str:
        """The metrics of all workers, aggregated."""
        asked, reports = await self._query_all("metrics", requester)
        if requester.pid not in reports:
            raise NoAnswer
        return self._aggregator.page(reports, requester.pid, asked)

    async def _collect_states(self, requester: SupervisedWorker) -> tuple[int, list[Any]]:
        """The number of workers, and the states of those that answered and of the supervisor."""
        asked, states = await self._query_all("state", requester)
        return asked, [*states.values(), *([] if self._report_state is None else [self._report_state()])]
