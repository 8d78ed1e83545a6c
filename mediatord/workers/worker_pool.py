"""The workers of a supervisor: spawned, watched and replaced; queried together, and led through steps together."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Protocol

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.internet.task import LoopingCall
from twisted.logger import Logger

from mediatord.observability.systemd import STATUS_SERVING
from mediatord.workers.shared_listeners import SharedListeners
from mediatord.workers.worker_process import WorkerProcess

# Seconds for the workers to answer a query.
QUERY_TIMEOUT = 1.0


class QueriedWorker(Protocol):
    """The part of a worker that a query needs."""

    pid: int
    ready: bool

    def send(self, word: str, content: Any = None) -> None: ...


@dataclass(slots=True)
class _PendingQuery:
    requester: QueriedWorker
    asked: int
    waiting: set[int]
    timer: IDelayedCall
    answer: Callable[[int, Mapping[int, Any]], None]
    reports: dict[int, Any] = field(default_factory=dict)


class BroadcastQuery:
    """
    Sends a query to all workers and collects their answers.

    :param word: word of the message; the answers repeat the number that is sent with it.
    :param workers: gives the running workers.
    """

    def __init__(self, clock: IReactorTime, word: str, workers: Callable[[], Iterable[QueriedWorker]]) -> None:
        self._clock = clock
        self._word = word
        self._workers = workers
        self._ids = count(1)
        self._queries: dict[int, _PendingQuery] = {}

    def begin(self, requester: QueriedWorker, answer: Callable[[int, Mapping[int, Any]], None]) -> None:
        """
        Query every ready worker, and the requester.

        :param answer: called with the number of workers queried, and the answers by process; after
            :data:`QUERY_TIMEOUT` at the latest.
        """
        asked = [worker for worker in self._workers() if worker.ready or worker is requester]
        number = next(self._ids)
        timer = self._clock.callLater(QUERY_TIMEOUT, self._finish, number)
        self._queries[number] = _PendingQuery(requester, len(asked), {worker.pid for worker in asked}, timer, answer)
        for worker in asked:
            worker.send(self._word, number)

    def take(self, worker: QueriedWorker, number: int, reply: Any) -> None:
        """Add the answer of a worker; late ones are ignored."""
        query = self._queries.get(number)
        if query is not None and worker.pid in query.waiting:
            query.reports[worker.pid] = reply
            self._remove_worker(number, worker)

    def gone(self, worker: QueriedWorker) -> None:
        """Wait no more for a worker that has ended."""
        for number in list(self._queries):
            self._remove_worker(number, worker)

    def stop(self) -> None:
        """Drop all queries."""
        for query in self._queries.values():
            query.timer.cancel()
        self._queries.clear()

    def _remove_worker(self, number: int, worker: QueriedWorker) -> None:
        query = self._queries[number]
        query.waiting.discard(worker.pid)
        if not query.waiting:
            query.timer.cancel()
            self._finish(number)

    def _finish(self, number: int) -> None:
        query = self._queries.pop(number)
        query.answer(query.asked, query.reports)


WorkerCommand = Callable[[WorkerProcess], None]


class WorkerBarrier:
    """
    Leads all workers through steps: each starts when every worker has answered the one before, or has ended.

    :param workers: gives the running workers.
    """

    def __init__(self, workers: Callable[[], Iterable[WorkerProcess]]) -> None:
        self._workers = workers
        self._steps: deque[Callable[[], WorkerCommand | None]] = deque()
        self._unanswered: set[WorkerProcess] = set()

    def add(self, *steps: Callable[[], WorkerCommand | None]) -> None:
        """
        Append steps.

        :param steps: each is called when it starts, and may return a command that every worker is sent and has to
            answer.
        """
        self._steps.extend(steps)
        self._run_next()

    def answered(self, child: WorkerProcess) -> None:
        """Record that a worker has answered, or has ended."""
        if child in self._unanswered:
            self._unanswered.discard(child)
            self._run_next()

    def _run_next(self) -> None:
        while self._steps and not self._unanswered:
            command = self._steps.popleft()()
            if command is not None:
                self._unanswered.update(self._workers())
                for child in list(self._unanswered):
                    command(child)


_log = Logger()

# Regular ends; a worker that has just begun to start is killed by the signal.
_EXPECTED_EXITS = ("ended with status 0", "was killed by SIGTERM")
# Seconds before a worker is replaced, by number of failures in a row.
_RESTART_DELAYS = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)


@dataclass(frozen=True, slots=True)
class WorkerTimeouts:
    """
    Timeouts of a worker pool.

    :param beat: seconds between heartbeats.
    :param hung: heartbeats without answer after which a worker is killed.
    :param late: heartbeats without answer after which systemd's watchdog is not notified.
    :param starting: heartbeats that a new worker need not answer.
    :param steady: seconds of running after which earlier failures no longer count.
    :param stop: seconds for all workers to stop.
    """

    beat: float = 5.0
    hung: int = 6
    late: int = 2
    starting: int = 6
    steady: float = 60.0
    stop: float = 8.0


@dataclass(eq=False, slots=True)
class _WorkerSlot:
    """
    The place of one worker and its replacements.

    :ivar failures: ends in a row.
    :ivar is_suspended: whether its connections are directed to other workers.
    :ivar has_served: whether any worker in this slot has served.
    :ivar start_error: why the last one could not start; empty if it could.
    """

    number: int
    name: str
    child: WorkerProcess | None = None
    restart_timer: IDelayedCall | None = None
    began: float = 0.0
    failures: int = 0
    is_suspended: bool = False
    has_served: bool = False
    start_error: str = ""


class WorkerPool:
    """
    Keeps a fixed number of workers running.

    :param spawn_worker: starts the worker of a slot, numbered from 0, given what to call with its messages and at its
        end; raises OSError.
    :param names: node names of the workers.
    :param on_message: called with messages that this class does not handle.
    :param complete: called once, when all workers are ready.
    :param changed: called when the status of a worker changes.
    :param give_up: called with the error of one worker if none of them could start.
    """

    def __init__(
        self,
        reactor: Any,
        spawn_worker: Callable[
            [int, Callable[[WorkerProcess, str, Any], None], Callable[[WorkerProcess, str], None]], WorkerProcess
        ],
        listeners: SharedListeners,
        names: Sequence[str],
        *,
        on_message: Callable[[WorkerProcess, str, Any], None],
        complete: Callable[[], None],
        changed: Callable[[], None],
        give_up: Callable[[str], None],
        timeouts: WorkerTimeouts = WorkerTimeouts(),  # noqa: B008  frozen
    ) -> None:
        self._reactor = reactor
        self._spawn_worker = spawn_worker
        self._listeners = listeners
        self._slots = [_WorkerSlot(number, name) for number, name in enumerate(names)]
        self._on_other_message = on_message
        self._complete: Callable[[], None] | None = complete
        self._changed = changed
        self._give_up = give_up
        self._timeouts = timeouts
        self._heartbeat_loop = LoopingCall(self._send_heartbeats)
        self._heartbeat_loop.clock = reactor
        self._running = False
        self._stopped: Deferred[None] | None = None
        self._kill_timer: IDelayedCall | None = None

    def __iter__(self) -> Iterator[WorkerProcess]:
        """The running workers, ready or not."""
        return iter([slot.child for slot in self._slots if slot.child is not None])

    @property
    def answers(self) -> bool:
        """Whether no worker is late with its heartbeat."""
        return all(child.missed_heartbeats < self._timeouts.late for child in self)

    @property
    def status(self) -> str:
        """The status of a worker that does not serve, if there is one."""
        return next((child.status for child in self if child.status != STATUS_SERVING), STATUS_SERVING)

    def start(self) -> None:
        """Start all workers."""
        self._running = True
        for slot in self._slots:
            self._start_worker(slot)
        self._heartbeat_loop.start(self._timeouts.beat, now=False)

    def stop(self) -> Deferred[None]:
        """Stop all workers at once, and kill those that exceed the timeout; fires when all have ended."""
        self._running = False
        if self._heartbeat_loop.running:
            self._heartbeat_loop.stop()
        for slot in self._slots:
            if slot.restart_timer is not None:
                slot.restart_timer.cancel()
                slot.restart_timer = None
        stopped: Deferred[None] = Deferred()
        self._stopped = stopped
        for child in self:
            child.signal("TERM")
        self._kill_timer = self._reactor.callLater(self._timeouts.stop, self._kill_all)
        self._check_stopped()
        return stopped

    def number(self, child: WorkerProcess) -> int:
        """The index of its slot, from 0."""
        return next(slot.number for slot in self._slots if slot.child is child)

    def _start_worker(self, slot: _WorkerSlot) -> None:
        slot.restart_timer = None
        slot.began = self._reactor.seconds()
        try:
            if slot.is_suspended:
                self._listeners.resume(slot.number)
                slot.is_suspended = False
            slot.child = self._spawn_worker(slot.number, self._on_message, self._worker_ended)
        except OSError as error:
            _log.error("worker {name} could not be started: {reason}", name=slot.name, reason=error.strerror)
            self._schedule_restart(slot)
            return
        _log.info("worker {name} is process {pid}", name=slot.child.name, pid=slot.child.pid)

    def _on_message(self, child: WorkerProcess, word: str, content: Any) -> None:
        if word == "ready":
            child.ready = True
            self._check_complete()
        elif word == "status":
            child.status = content
            self._slots[self.number(child)].has_served |= content == STATUS_SERVING
            self._changed()
        else:
            self._on_other_message(child, word, content)

    def _check_complete(self) -> None:
        if self._complete is not None and all(slot.child and slot.child.ready for slot in self._slots):
            complete, self._complete = self._complete, None
            complete()

    def _worker_ended(self, child: WorkerProcess, how: str) -> None:
        slot = self._slots[self.number(child)]
        slot.child, slot.start_error = None, child.start_error
        if not self._running:
            if how not in _EXPECTED_EXITS:
                _log.warn("worker {name} (process {pid}) {how}", name=child.name, pid=child.pid, how=how)
            self._check_stopped()
            return
        if all(one.start_error and not one.has_served for one in self._slots):
            self._give_up(child.start_error)
            return
        if child.ready and self._reactor.seconds() - slot.began >= self._timeouts.steady:
            slot.failures = 0
        if child.start_error:
            slot.failures = max(1, slot.failures)
        _log.warn(
            "worker {name} (process {pid}) {how}{why}",
            name=child.name,
            pid=child.pid,
            how=how,
            why=f": {child.start_error}" if child.start_error else "",
        )
        self._schedule_restart(slot)

    def _schedule_restart(self, slot: _WorkerSlot) -> None:
        pause = _RESTART_DELAYS[min(slot.failures, len(_RESTART_DELAYS) - 1)]
        slot.failures += 1
        if pause and not slot.is_suspended:
            slot.is_suspended = True
            self._listeners.suspend(slot.number)
        slot.restart_timer = self._reactor.callLater(pause, self._start_worker, slot)

    def _send_heartbeats(self) -> None:
        for child in self:
            if child.missed_heartbeats >= self._timeouts.hung:
                _log.error(
                    "worker {name} (process {pid}) does not answer and is killed", name=child.name, pid=child.pid
                )
                child.signal("KILL")
                continue
            child.missed_heartbeats += 1
            child.send("ping")

    def _kill_all(self) -> None:
        self._kill_timer = None
        for child in self:
            _log.error("worker {name} (process {pid}) did not stop in time", name=child.name, pid=child.pid)
            child.signal("KILL")

    def _check_stopped(self) -> None:
        if self._stopped is None or list(self):
            return
        if self._kill_timer is not None:
            self._kill_timer.cancel()
            self._kill_timer = None
        stopped, self._stopped = self._stopped, None
        stopped.callback(None)
