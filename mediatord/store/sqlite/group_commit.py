"""
Threads that own a database connection, and group commit: operations that are submitted at the same time share a
transaction.

A commit costs a wait for the disk, however little is in it. An operation is a function of the connection without
other effects, so that it can be run again, or an object with `run_batch` (:class:`SQLBatchOperation`). Before its
first write it may raise a :class:`~mediatord.errors.MediatorError`, which is its result and does not affect the
others; to refuse and keep what it wrote it returns an :class:`OperationOutcome`. Any other exception rolls the
transaction back; then each operation gets a transaction of its own, so that a bad one fails alone.
"""

from __future__ import annotations

import sqlite3
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from threading import Thread
from typing import Any, Protocol, TypeVar, runtime_checkable

from twisted.internet.defer import Deferred, fail, succeed
from twisted.internet.interfaces import IReactorFromThreads, IReactorTime
from twisted.python.failure import Failure

from mediatord.errors import MediatorError, StoreUnavailable
from mediatord.store.message_operations import BatchLimits, OperationObserver, log_store_fault
from mediatord.store.sqlite.locks import is_lock_error
from mediatord.store.sqlite.queue_accounting import StoreConnection

T = TypeVar("T")

_Job = tuple[Callable[..., Any], tuple[Any, ...], Deferred[Any]]


class JobRunner(Protocol):
    """Runs jobs one after another outside of the reactor's thread; in tests, at once."""

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def __call__(self, work: Callable[..., T], *args: Any) -> Deferred[T]: ...


class ThreadRunner:
    """
    A :class:`JobRunner` with one thread between start and stop.

    Twisted's pool does the same for any number of threads, at several times the cost of handing a job to one.
    """

    def __init__(self, reactor: IReactorFromThreads, name: str) -> None:
        self._reactor = reactor
        self._name = name
        self._thread: Thread | None = None
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()

    def start(self) -> None:
        """Start the thread, also after a stop."""
        self._thread = Thread(target=self._serve, name=self._name)
        self._thread.start()

    def stop(self) -> None:
        """Wait for the jobs that were accepted, then end the thread."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None

    def __call__(self, work: Callable[..., T], *args: Any) -> Deferred[T]:
        if self._thread is None:
            raise RuntimeError("not started")
        done: Deferred[T] = Deferred()
        self._jobs.put((work, args, done))
        return done

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            work, args, done = job
            fire: Callable[[Any], None] = done.callback
            try:
                result = work(*args)
            except BaseException:
                result, fire = Failure(), done.errback
            self._reactor.callFromThread(fire, result)
            del job, work, args, done, fire, result  # while idle, keep no references


class ConnectionThread:
    """
    A thread and the connection that only it uses.

    A connection that a job leaves inside a transaction, because it could not be rolled back, is replaced: every later
    `BEGIN` on it would fail.
    """

    def __init__(self, runner: JobRunner) -> None:
        self._runner = runner
        self._connection: StoreConnection | None = None
        self._connect: Callable[[], StoreConnection] | None = None

    def open(
        self, connect: Callable[[], StoreConnection], reconnect: Callable[[], StoreConnection] | None = None
    ) -> Deferred[None]:
        """
        Start the thread and connect in it; if that fails, the thread is stopped again.

        :param reconnect: makes a replacement for a connection that cannot be used any longer.
        """
        self._connect = reconnect or connect
        self._runner.start()
        return self._runner(connect).addCallbacks(self._keep_connection, self._stop)

    def run(self, work: Callable[..., T], *args: Any) -> Deferred[T]:
        """Call `work` with the connection and further arguments."""
        if self._connect is None:
            raise RuntimeError("used before it was opened or after it was closed")
        return self._runner(self._perform, work, args)

    def interrupt(self) -> None:
        """Make the statement that is being executed fail, if there is one; may be called from another thread."""
        if self._connection is not None:
            self._connection.interrupt()

    def close(self) -> Deferred[None]:
        """Close the connection and stop the thread, if they exist."""
        if self._connect is None:
            return succeed(None)
        self._connect = None
        return self._runner(self._disconnect).addBoth(self._stop)

    def _perform(self, work: Callable[..., T], args: tuple[Any, ...]) -> T:
        connection = self._connection
        if connection is None:
            assert self._connect is not None
            connection = self._connection = self._connect()
        try:
            return work(connection, *args)
        finally:
            if connection.in_transaction:
                self._disconnect()

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _keep_connection(self, connection: StoreConnection) -> None:
        self._connection = connection

    def _stop(self, result: T) -> T:
        self._connect = None
        self._runner.stop()
        return result


@dataclass(slots=True)
class OperationOutcome:
    """
    Result of one operation.

    :param error: what its Deferred fails with; None when it fires with `value`.
    :param cause: the exception behind the error, for the log.
    """

    value: Any = None
    error: MediatorError | None = None
    cause: BaseException | None = None


@runtime_checkable
class SQLBatchOperation(Protocol):
    """
    An operation that is performed together with its neighbours in a batch.

    :ivar run_batch: a static method that performs consecutive operations with the same `run_batch`, one or more, in
        order, and returns their outcomes.
    """

    @property
    def run_batch(self) -> Callable[[StoreConnection, Sequence[Any]], list[OperationOutcome]]: ...


SQLOperation = Callable[[StoreConnection], Any] | SQLBatchOperation


def bind_arguments(work: Callable[..., Any], args: tuple[Any, ...]) -> Callable[[StoreConnection], Any]:
    """An operation that passes these after the connection."""
    return lambda connection: work(connection, *args)


def commit_batch(
    connection: StoreConnection, operations: Sequence[SQLOperation], patience: float = 0.0
) -> list[OperationOutcome]:
    """
    Perform operations durably; those that cannot be performed fail with StoreUnavailable.

    :param patience: seconds to wait while another process writes.
    """
    try:
        if connection.in_transaction:
            _roll_back(connection)  # the last roll-back has failed
        ticket_lock = connection.ticket_lock
        if ticket_lock is not None:
            patience = ticket_lock.enter(patience)
        try:
            try:
                connection.begin_batch(patience)
            except sqlite3.Error as error:
                # None of the operations is to blame, so there is no point in trying them one by one.
                return [_make_failure(error) for _ in operations]
            try:
                outcomes = run_operations(connection, operations)
                connection.commit_batch()
            except Exception:
                _roll_back(connection)
                connection.abort_batch()
                raise
            return outcomes
        finally:
            if ticket_lock is not None:
                ticket_lock.leave()
    except Exception as error:
        return [_make_failure(error)] if len(operations) == 1 else _commit_each(connection, operations, patience)


def read_batch(connection: StoreConnection, operations: Sequence[SQLOperation]) -> list[OperationOutcome]:
    """Perform operations on one snapshot of the database; one that fails does not affect the others."""
    try:
        if connection.in_transaction:
            _roll_back(connection)  # the last roll-back has failed
        connection.execute("BEGIN")
        outcomes = []
        for operation in operations:
            assert callable(operation)
            try:
                outcomes.append(OperationOutcome(operation(connection)))
            except Exception as error:
                outcomes.append(_make_failure(error))
        return outcomes
    except sqlite3.Error as error:
        return [_make_failure(error) for _ in operations]
    finally:
        _roll_back(connection)


def run_operations(connection: StoreConnection, operations: Sequence[SQLOperation]) -> list[OperationOutcome]:
    """Perform operations in order in the transaction that is open, neighbours with the same `run_batch` together."""
    outcomes: list[OperationOutcome] = []
    start, number = 0, len(operations)
    while start < number:
        operation, end = operations[start], start + 1
        run_batch = getattr(operation, "run_batch", None)
        if run_batch is None:
            assert callable(operation)
            outcomes.append(_run_operation(connection, operation))
        else:
            while end < number and getattr(operations[end], "run_batch", None) is run_batch:
                end += 1
            outcomes += run_batch(connection, operations[start:end])
        start = end
    return outcomes


def _run_operation(connection: StoreConnection, work: Callable[[StoreConnection], Any]) -> OperationOutcome:
    before = connection.total_changes
    try:
        result = work(connection)
        return result if isinstance(result, OperationOutcome) else OperationOutcome(result)
    except MediatorError as error:
        if connection.total_changes != before:
            raise  # what it wrote must not be committed
        return OperationOutcome(error=error.with_traceback(None))


def _commit_each(
    connection: StoreConnection, operations: Sequence[SQLOperation], patience: float
) -> list[OperationOutcome]:
    outcomes: list[OperationOutcome] = []
    for operation in operations:
        if outcomes and is_lock_error(outcomes[-1].cause):
            outcomes.append(replace(outcomes[-1], error=StoreUnavailable()))  # each would wait as long for the lock
        else:
            outcomes.extend(commit_batch(connection, [operation], patience))
    return outcomes


def _roll_back(connection: StoreConnection) -> None:
    if connection.in_transaction:
        try:
            connection.execute("ROLLBACK")
        except sqlite3.Error:
            pass  # tried again before the next BEGIN; the thread replaces a connection that stays like this


def _make_failure(error: Exception) -> OperationOutcome:
    if isinstance(error, MediatorError):
        return OperationOutcome(error=error.with_traceback(None))
    return OperationOutcome(error=StoreUnavailable(), cause=error)


BatchFunction = Callable[[StoreConnection, Sequence[SQLOperation]], list[OperationOutcome]]
EarlyOutcomesCallback = Callable[[int, list[OperationOutcome]], None]


@dataclass(slots=True)
class _BatchReply:
    """
    Collects the outcomes of operations that were submitted together, for one Deferred.

    :ivar early: called with outcomes while others are missing: the index of the first, and the outcomes.
    :ivar reported: number of outcomes it has been called with.
    """

    number: int
    early: EarlyOutcomesCallback | None
    outcomes: list[OperationOutcome] = field(default_factory=list)
    reported: int = 0
    deferred: Deferred[list[OperationOutcome]] = field(default_factory=Deferred)

    def report_early(self) -> None:
        """Pass on the outcomes that are new, if some are missing, which are in a later batch then."""
        if self.early is not None and len(self.outcomes) < self.number:
            reported, self.reported = self.reported, len(self.outcomes)
            try:
                self.early(reported, self.outcomes[reported:])
            except Exception as error:
                log_store_fault("early result callback failed", error)


@dataclass(slots=True)
class _QueuedOperation:
    name: str
    work: SQLOperation
    size: int
    since: float
    reply: _BatchReply


class OperationBatcher:
    """
    Collects operations until the end of the reactor iteration, or while a batch is being performed, and has them
    performed as one batch. Their Deferreds fire when the whole batch is done.

    :param perform: performs a batch, in the thread.
    :param on_fault: called with the exception behind each failed operation.
    :param max_delay: seconds for which a batch waits for more operations at most, as long as every reactor iteration
        brings some, and never for more than an eighth of the duration of the last batch: where the disk is slow,
        clients that have just been answered come back in that time, and share the next wait.
    """

    def __init__(
        self,
        thread: ConnectionThread,
        perform: BatchFunction,
        clock: IReactorTime,
        observe: OperationObserver,
        limits: BatchLimits,
        *,
        on_fault: Callable[[BaseException], None] = lambda error: None,
        max_delay: float = 0.0,
    ) -> None:
        self._thread = thread
        self._on_fault = on_fault
        self._perform = perform
        self._clock = clock
        self._observe = observe
        self._limits = limits
        self._max_delay = max_delay
        self._last_duration = 0.0
        self._collect_until = 0.0
        self._collected = 0
        self._queue: deque[_QueuedOperation] = deque()
        self._queued_bytes = 0
        self._after_batch: Callable[[float], None] | None = None
        self.is_accepting = False
        self._busy = False
        self._drained: Deferred[None] | None = None
        self._next_log_at = 0.0
        self._failures = 0

    @property
    def buffered(self) -> tuple[int, int]:
        """Number of queued operations, and the bytes that they hold."""
        return len(self._queue), self._queued_bytes

    def start(self, after_batch: Callable[[float], None] | None = None) -> None:
        """
        Accept operations.

        :param after_batch: called with the seconds each batch took, before its Deferreds fire.
        """
        self._after_batch = after_batch
        self.is_accepting = True

    def submit(self, name: str, work: SQLOperation, size: int = 0) -> Deferred[Any]:
        """
        Perform an operation with the next batch.

        :param size: bytes it holds until then.
        :raise StoreUnavailable: not started, stopped, or too much is queued.
        """
        return self.submit_each(name, [(work, size)]).addCallback(get_single_value)

    def submit_each(
        self, name: str, works: Sequence[tuple[SQLOperation, int]], early: EarlyOutcomesCallback | None = None
    ) -> Deferred[list[OperationOutcome]]:
        """
        Submit several operations, at least one, whose outcomes may differ.

        :param works: each with its size.
        :param early: called with outcomes while operations are waiting for a later batch: the index of the first, and
            the outcomes.
        :raise StoreUnavailable: as :meth:`submit`, for all of them.
        """
        queue, size = self._queue, self._queued_bytes
        reply, now = _BatchReply(len(works), early), self._clock.seconds()
        if not self.is_accepting or len(queue) >= self._limits.waiting:
            return fail(StoreUnavailable())
        for _, more in works:
            size += more
        if size > self._limits.waiting_bytes:
            return fail(StoreUnavailable())
        self._queued_bytes = size
        for work, more in works:
            queue.append(_QueuedOperation(name, work, more, now, reply))
        if not self._busy:
            self._schedule(now)
        return reply.deferred

    def stop(self) -> Deferred[None]:
        """Accept no more; fires when all accepted operations are done."""
        self.is_accepting = False
        if not self._busy:
            return succeed(None)
        self._drained = Deferred()
        return self._drained

    def _schedule(self, now: float) -> None:
        self._busy = True
        self._collected = 0
        self._collect_until = now + min(self._last_duration / 8, self._max_delay)
        self._clock.callLater(0, self._run_batch)

    def _run_batch(self) -> None:
        now, queue, limits = self._clock.seconds(), self._queue, self._limits
        before, self._collected = self._collected, len(queue)
        if before < self._collected < limits.batch and now < self._collect_until:
            self._clock.callLater(0, self._run_batch)
            return
        batch: list[_QueuedOperation] = []
        works: list[SQLOperation] = []
        size = 0
        while queue and len(batch) < limits.batch and (not batch or size + queue[0].size <= limits.batch_bytes):
            operation = queue.popleft()
            size += operation.size
            batch.append(operation)
            works.append(operation.work)
        self._queued_bytes -= size
        done = self._thread.run(self._perform, works).addErrback(_make_failures, len(works))
        done.addCallback(self._finish, batch, now)

    def _finish(self, outcomes: list[OperationOutcome], batch: list[_QueuedOperation], begun: float) -> None:
        now = self._clock.seconds()
        self._last_duration = now - begun
        if self._after_batch is not None:
            self._after_batch(self._last_duration)
        if [outcome for outcome in outcomes if outcome.cause is not None]:
            self._report_faults(outcomes, now)
            self._fail_locked_out(batch, outcomes)
        self._busy = False
        if self._queue:
            self._schedule(now)
        for operation, outcome in zip(batch, outcomes, strict=True):
            reply = operation.reply
            reply.outcomes.append(outcome)
            if len(reply.outcomes) == reply.number:
                reply.deferred.callback(reply.outcomes)
        # Only operations of the last submission can be split between this batch and the next.
        batch[-1].reply.report_early()
        for operation in batch:
            self._observe(operation.name, now - operation.since)
        if self._drained is not None and not self._busy:
            drained, self._drained = self._drained, None
            drained.callback(None)

    def _fail_locked_out(self, batch: list[_QueuedOperation], outcomes: list[OperationOutcome]) -> None:
        """Fail queued operations together with a batch that did not get the lock: they have waited for it as long."""
        if is_lock_error(outcomes[-1].cause):
            batch += self._queue
            outcomes += [OperationOutcome(error=StoreUnavailable()) for _ in self._queue]
            self._queue.clear()
            self._queued_bytes = 0

    def _report_faults(self, outcomes: Sequence[OperationOutcome], now: float) -> None:
        """Log the first fault, but no more than one a second: on a full disk everything fails."""
        faults = [outcome.cause for outcome in outcomes if outcome.cause is not None]
        self._failures += len(faults)
        if now >= self._next_log_at:
            log_store_fault(f"store operations failed ({self._failures})", faults[0])
            self._next_log_at = now + 1.0
            self._failures = 0
        for fault in faults:
            self._on_fault(fault)


def _make_failures(failure: Failure, number: int) -> list[OperationOutcome]:
    return [OperationOutcome(error=StoreUnavailable(), cause=failure.value) for _ in range(number)]


def get_single_value(outcomes: list[OperationOutcome]) -> Any:
    """Result of a single operation, or its failure."""
    (outcome,) = outcomes
    # Not raised: the traceback would refer to this frame, and to the outcome itself.
    return outcome.value if outcome.error is None else Failure(outcome.error)
