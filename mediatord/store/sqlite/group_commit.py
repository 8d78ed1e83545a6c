"""
Threads for blocking work, each with a database connection of its own.

Several operations in one transaction.

A commit costs a wait for the disk whatever is in it, so operations that are there at the same time share one. An
operation is a function of the connection; it has no other effect, so that it can be run again. Until its first
write it may raise a :class:`~mediatord.errors.MediatorError`, which is its answer and nobody else's concern; to
refuse and keep what it wrote it returns an :class:`Outcome`. Any other failure undoes the transaction, and then each
of its operations gets one of its own: a bad one does not take the others with it. A work may have a method
`together(connection, works)`, which does a run of works of its kind at once and returns their outcomes; of a kind are
works with the same `kind`, and those that have none with others of their type.

What is asked for in one turn of the reactor goes to the thread in one hop.
"""

from __future__ import annotations

import sqlite3
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from queue import SimpleQueue
from threading import Thread
from typing import Any, Protocol, TypeVar

from twisted.internet.defer import Deferred, fail, succeed
from twisted.internet.interfaces import IReactorFromThreads, IReactorTime
from twisted.python.failure import Failure

from mediatord.errors import MediatorError, StoreUnavailable
from mediatord.store.message_operations import BatchLimits, OperationObserver, ignore_observation, log_store_fault  # noqa: F401
from mediatord.store.sqlite.locks import begin_immediate, is_lock_error
from mediatord.store.sqlite.queue_accounting import StoreConnection, begin_accounting, end_accounting, flush_ledger

T = TypeVar("T")

_Job = tuple[Callable[[], Any], Deferred[Any]]


class JobRunner(Protocol):
    """Does work one after another, out of the reactor's way; in tests, right away."""

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def __call__(self, work: Callable[[], T]) -> Deferred[T]: ...


class ThreadRunner:
    """
    A :class:`JobRunner` with one thread between start and stop.

    Twisted's pool does the same for any number of threads, at several times what it costs to hand over work to one.
    """

    def __init__(self, reactor: IReactorFromThreads, name: str) -> None:
        self._reactor = reactor
        self._name = name
        self._thread: Thread | None = None
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()

    def start(self) -> None:
        """A runner that was stopped can be started again."""
        self._thread = Thread(target=self._serve, name=self._name)
        self._thread.start()

    def stop(self) -> None:
        """Wait for what is being done, then end the thread."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None

    def __call__(self, work: Callable[[], T]) -> Deferred[T]:
        if self._thread is None:
            raise RuntimeError("not started")
        done: Deferred[T] = Deferred()
        self._jobs.put((work, done))
        return done

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            work, done = job
            fire: Callable[[Any], None] = done.callback
            try:
                result = work()
            except BaseException:
                result, fire = Failure(), done.errback
            self._reactor.callFromThread(fire, result)
            del job, work, done, fire, result  # nothing of it is held on to until there is more to do


class ConnectionThread:
    """
    A runner and the connection that is used nowhere else.

    A connection that a job leaves inside a transaction, because it could not be rolled back, is replaced: every later
    `BEGIN` on it would fail.
    """

    def __init__(self, runner: JobRunner) -> None:
        self._runner = runner
        self._connection: sqlite3.Connection | None = None
        self._connect: Callable[[], sqlite3.Connection] | None = None

    def open(
        self, connect: Callable[[], sqlite3.Connection], reconnect: Callable[[], sqlite3.Connection] | None = None
    ) -> Deferred[None]:
        """
        Start the thread and connect in it; if that fails, the thread is stopped again.

        :param reconnect: makes the connection that takes the place of one that cannot be used any longer.
        """
        self._connect = reconnect or connect
        self._runner.start()
        opened = self._runner(connect)
        return opened.addCallbacks(self._opened, self._stop)

    def run(self, work: Callable[[sqlite3.Connection], T]) -> Deferred[T]:
        """Do `work` with the connection."""
        if self._connect is None:
            raise RuntimeError("used before it was opened or after it was closed")
        return self._runner(lambda: self._perform(work))

    def interrupt(self) -> None:
        """Have the statement that is being executed fail, if there is one; may be called from another thread."""
        if self._connection is not None:
            self._connection.interrupt()

    def close(self) -> Deferred[None]:
        """Close the connection and stop the thread, if they are there."""
        if self._connect is None:
            return succeed(None)
        self._connect = None
        return self._runner(self._disconnect).addBoth(self._stop)

    def _perform(self, work: Callable[[sqlite3.Connection], T]) -> T:
        connection = self._connection
        if connection is None:
            assert self._connect is not None
            connection = self._connection = self._connect()
        try:
            return work(connection)
        finally:
            if connection.in_transaction:
                self._disconnect()

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _opened(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def _stop(self, result: T) -> T:
        self._connect = None
        self._runner.stop()
        return result


SQLOperation = Callable[[sqlite3.Connection], Any]


@dataclass(slots=True)
class OperationOutcome:
    """
    What became of one operation.

    :param error: what its Deferred fails with; None when `value` is its answer.
    :param cause: what went wrong below, for the log.
    """

    value: Any = None
    error: MediatorError | None = None
    cause: BaseException | None = None

    @property
    def locked_out(self) -> bool:
        """Whether somebody else held the lock for longer than we wait."""
        return is_lock_error(self.cause)


def commit_batch(
    connection: sqlite3.Connection, works: Sequence[SQLOperation], patience: float = 0.0
) -> list[OperationOutcome]:
    """
    Do all works, durably when this returns; what cannot be done fails with StoreUnavailable.

    :param patience: seconds for which to wait while another process writes.
    """
    try:
        outcomes = _commit_all(connection, works, patience)
    except _BeginError as error:
        # None of the works is to blame, so there is no point in trying them one by one.
        return [_make_failure(error.reason) for _ in works]
    except Exception as error:
        return [_make_failure(error)] if len(works) == 1 else _commit_each(connection, works, patience)
    return outcomes


class _BeginError(Exception):
    """The transaction could not be begun."""

    def __init__(self, reason: sqlite3.Error) -> None:
        super().__init__()
        self.reason = reason


def _commit_all(
    connection: sqlite3.Connection, works: Sequence[SQLOperation], patience: float
) -> list[OperationOutcome]:
    """:raise _NotBegun: the transaction could not be begun; after any other exception it was rolled back."""
    if connection.in_transaction:
        _roll_back(connection)  # which failed the last time
    queue = connection.queue if isinstance(connection, StoreConnection) else None
    if queue is not None:
        patience = queue.enter(patience)
    try:
        try:
            begin_immediate(connection, patience)
        except sqlite3.Error as error:
            raise _BeginError(error) from None
        begin_accounting(connection)
        try:
            outcomes = run_operations(connection, works)
            flush_ledger(connection)
            connection.execute("COMMIT")
        except Exception:
            _roll_back(connection)
            end_accounting(connection, committed=False)
            raise
        end_accounting(connection, committed=True)
        return outcomes
    finally:
        if queue is not None:
            queue.leave()


def read_batch(connection: sqlite3.Connection, works: Sequence[SQLOperation]) -> list[OperationOutcome]:
    """Do all works on one and the same state of the database; a failing one does not disturb the others."""
    try:
        if connection.in_transaction:
            _roll_back(connection)  # which failed the last time
        connection.execute("BEGIN")
        return [_run_read(connection, work) for work in works]
    except sqlite3.Error as error:
        return [_make_failure(error) for _ in works]
    finally:
        _roll_back(connection)


def run_operations(connection: sqlite3.Connection, works: Sequence[SQLOperation]) -> list[OperationOutcome]:
    """
    Do works in their order in the transaction that is open; neighbours of a kind that knows how to be done together
    are done so.
    """
    outcomes: list[OperationOutcome] = []
    for _, group in groupby(works, key=_get_kind):
        run = list(group)
        together = getattr(run[0], "together", None) if len(run) > 1 else None
        if together is None:
            outcomes += [_run_operation(connection, work) for work in run]
        else:
            outcomes += together(connection, run)
    return outcomes


def _get_kind(work: SQLOperation) -> object:
    return getattr(work, "kind", None) or type(work)


def _run_operation(connection: sqlite3.Connection, work: SQLOperation) -> OperationOutcome:
    before = connection.total_changes
    try:
        done = work(connection)
        return done if isinstance(done, OperationOutcome) else OperationOutcome(done)
    except MediatorError as error:
        if connection.total_changes != before:
            raise  # what it wrote must not be committed
        return OperationOutcome(error=error.with_traceback(None))


def _run_read(connection: sqlite3.Connection, work: SQLOperation) -> OperationOutcome:
    try:
        return OperationOutcome(work(connection))
    except Exception as error:
        return _make_failure(error)


def _commit_each(
    connection: sqlite3.Connection, works: Sequence[SQLOperation], patience: float
) -> list[OperationOutcome]:
    outcomes: list[OperationOutcome] = []
    for work in works:
        if outcomes and outcomes[-1].locked_out:
            outcomes.append(replace(outcomes[-1], error=StoreUnavailable()))  # each would wait as long for the lock
        else:
            outcomes.extend(commit_batch(connection, [work], patience))
    return outcomes


def _roll_back(connection: sqlite3.Connection) -> None:
    if connection.in_transaction:
        try:
            connection.execute("ROLLBACK")
        except sqlite3.Error:
            pass  # it is tried again before the next BEGIN, and the thread replaces a connection that stays like this


def _make_failure(error: Exception) -> OperationOutcome:
    if isinstance(error, MediatorError):
        return OperationOutcome(error=error.with_traceback(None))
    return OperationOutcome(error=StoreUnavailable(), cause=error)


BatchFunction = Callable[[sqlite3.Connection, Sequence[SQLOperation]], list[OperationOutcome]]


class _BatchReply:
    """
    Where the outcomes of operations go that were asked for together: there is one Deferred for all of them.

    :ivar early: told of those that are done while others are not: the place of the first, and their outcomes.
    """

    __slots__ = ("deferred", "early", "number", "outcomes", "told")

    def __init__(self, number: int, early: Callable[[int, list[OperationOutcome]], None] | None) -> None:
        self.number = number
        self.early = early
        self.outcomes: list[OperationOutcome] = []
        self.told = 0
        self.deferred: Deferred[list[OperationOutcome]] = Deferred()

    def resolve(self, outcome: OperationOutcome) -> None:
        """The next of them is done."""
        self.outcomes.append(outcome)
        if len(self.outcomes) == self.number:
            self.deferred.callback(self.outcomes)

    def report_early(self) -> None:
        """A batch is done that may not have been the last with operations of this answer."""
        if self.early is not None and len(self.outcomes) < self.number:
            told, self.told = self.told, len(self.outcomes)
            try:
                self.early(told, self.outcomes[told:])
            except Exception as error:
                log_store_fault("telling of operations failed", error)


class _QueuedOperation:
    __slots__ = ("answer", "name", "since", "size", "work")

    def __init__(self, name: str, work: SQLOperation, size: int, since: float, answer: _BatchReply) -> None:
        self.name = name
        self.work = work
        self.size = size
        self.since = since
        self.answer = answer


class OperationBatcher:
    """
    Collects operations until the end of the reactor's turn, or while a batch is being performed, and has them
    performed together. Their Deferreds fire when the whole batch is done.

    :param on_fault: told what an operation failed of below.
    :param gather: seconds for which a batch waits for more at most, as long as every turn brings some, and never for
        more than an eighth of what the last one took: where the disk is slow, those who have just been answered come
        back in that time, and one wait for it will do for all.
    """

    def __init__(
        self,
        thread: ConnectionThread,
        perform: BatchFunction,
        clock: IReactorTime,
        observe: OperationObserver,
        bounds: BatchLimits,
        *,
        on_fault: Callable[[BaseException], None] = lambda error: None,
        max_delay: float = 0.0,
    ) -> None:
        self._thread = thread
        self._on_fault = on_fault
        self._perform = perform
        self._clock = clock
        self._observe = observe
        self._bounds = bounds
        self._max_delay = max_delay
        self._last_duration = 0.0
        self._collect_until = 0.0
        self._collected = 0
        self._waiting: deque[_QueuedOperation] = deque()
        self._waiting_bytes = 0
        self._after_batch: Callable[[float], None] | None = None
        self._accepting = False
        self._busy = False
        self._drained: Deferred[None] | None = None
        self._next_log_at = 0.0
        self._failed = 0

    @property
    def held(self) -> tuple[int, int]:
        """How many operations wait, and the bytes that they hold on to."""
        return len(self._waiting), self._waiting_bytes

    @property
    def accepting(self) -> bool:
        return self._accepting

    def start(self, after_batch: Callable[[float], None] | None = None) -> None:
        """
        Accept operations.

        :param after_batch: called with the seconds each batch took, before its Deferreds fire.
        """
        self._after_batch = after_batch
        self._accepting = True

    def submit(self, name: str, work: Callable[[sqlite3.Connection], T], size: int = 0) -> Deferred[T]:
        """
        Have `work` performed with the next batch.

        :param size: bytes it holds on to while it waits.
        :raise StoreUnavailable: not started, stopped, or too much is waiting already.
        """
        return self.submit_each(name, [(work, size)]).addCallback(_get_single_value)

    def submit_each(
        self,
        name: str,
        works: Sequence[tuple[SQLOperation, int]],
        early: Callable[[int, list[OperationOutcome]], None] | None = None,
    ) -> Deferred[list[OperationOutcome]]:
        """
        The same with several, each of which may have another outcome; there is at least one.

        :param works: each with its size.
        :param early: told of those that are done while others wait for a later batch: the place of the first, and
            their outcomes.
        :raise StoreUnavailable: as :meth:`submit`, for all of them.
        """
        bounds, size = self._bounds, sum([size for _, size in works])
        full = len(self._waiting) >= bounds.waiting or self._waiting_bytes + size > bounds.waiting_bytes
        if full or not self._accepting:
            return fail(StoreUnavailable())
        answer, now = _BatchReply(len(works), early), self._clock.seconds()
        self._waiting.extend([_QueuedOperation(name, work, size, now, answer) for work, size in works])
        self._waiting_bytes += size
        if not self._busy:
            self._schedule()
        return answer.deferred

    def stop(self) -> Deferred[None]:
        """Accept no more; fires when everything that was accepted is done."""
        self._accepting = False
        if not self._busy:
            return succeed(None)
        self._drained = Deferred()
        return self._drained

    def _schedule(self) -> None:
        self._busy = True
        self._collected = 0
        if self._max_delay:
            self._collect_until = self._clock.seconds() + min(self._last_duration / 8, self._max_delay)
        self._clock.callLater(0, self._begin)

    def _begin(self) -> None:
        now = self._clock.seconds()
        if self._keeps_collecting(now):
            self._clock.callLater(0, self._begin)
            return
        batch = self._next_batch()
        works = [operation.work for operation in batch]
        done = self._thread.run(lambda connection: self._perform(connection, works))
        done.addErrback(self._not_performed, len(batch))
        done.addCallback(self._finish, batch, now)

    def _keeps_collecting(self, now: float) -> bool:
        """Whether the turn has brought more, and there is room and time for more still."""
        before, self._collected = self._collected, len(self._waiting)
        return before < self._collected < self._bounds.batch and now < self._collect_until

    def _next_batch(self) -> list[_QueuedOperation]:
        """At least one, then as many as fit."""
        batch: list[_QueuedOperation] = []
        size = 0
        while self._waiting and len(batch) < self._bounds.batch:
            size += self._waiting[0].size
            if batch and size > self._bounds.batch_bytes:
                break
            batch.append(self._waiting.popleft())
            self._waiting_bytes -= batch[-1].size
        return batch

    def _take_all(self) -> list[_QueuedOperation]:
        waiting = list(self._waiting)
        self._waiting.clear()
        self._waiting_bytes = 0
        return waiting

    def _not_performed(self, failure: Failure, number: int) -> list[OperationOutcome]:
        return [OperationOutcome(error=StoreUnavailable(), cause=failure.value) for _ in range(number)]

    def _finish(self, outcomes: list[OperationOutcome], batch: list[_QueuedOperation], begun: float) -> None:
        now = self._clock.seconds()
        self._last_duration = now - begun
        if self._after_batch is not None:
            self._after_batch(self._last_duration)
        self._report([outcome.cause for outcome in outcomes if outcome.cause is not None], now)
        if outcomes[-1].locked_out:
            # Whoever waits has waited for the same lock, and would wait as long again.
            late = self._take_all()
            batch, outcomes = (
                [*batch, *late],
                [*outcomes, *(OperationOutcome(error=StoreUnavailable()) for _ in late)],
            )
        self._busy = False
        if self._waiting:
            self._schedule()
        for operation, outcome in zip(batch, outcomes, strict=True):
            operation.answer.resolve(outcome)
        # Of all that were asked for together with others only the last ones may go on in the next batch.
        batch[-1].answer.report_early()
        for operation in batch:
            self._observe(operation.name, now - operation.since)
        if self._drained is not None and not self._busy:
            drained, self._drained = self._drained, None
            drained.callback(None)

    def _report(self, faults: list[BaseException], now: float) -> None:
        """Log a fault, but no more than one a second: a full disk fails everything."""
        self._failed += len(faults)
        if faults and now >= self._next_log_at:
            log_store_fault(f"operations failed ({self._failed})", faults[0])
            self._next_log_at = now + 1.0
            self._failed = 0
        for fault in faults:
            self._on_fault(fault)


def _get_single_value(outcomes: list[OperationOutcome]) -> Any:
    (outcome,) = outcomes
    # Not raised: the traceback would lead back here, and to the outcome itself.
    return outcome.value if outcome.error is None else Failure(outcome.error)
