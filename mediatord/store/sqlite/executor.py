"""
Execution of operations on an SQLite database: a thread for each kind of them, group commit, the write-ahead log, and
the health of the files.

A commit costs a wait for the disk, however little is in it, so operations that are submitted at the same time share a
transaction.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, Protocol, TypeAlias, TypeVar

from twisted.internet.defer import Deferred, DeferredLock, fail, gatherResults, succeed
from twisted.internet.interfaces import IDelayedCall, IReactorFromThreads, IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure

from mediatord.errors import StoreUnavailable
from mediatord.store.caches import OwnerCache
from mediatord.store.disk_space import GROWING_OPERATIONS, DiskSpaceMonitor, SpaceLimits
from mediatord.store.interfaces.store import (
    STORE_FAULT_MESSAGES,
    STORE_FAULTS,
    BatchLimits,
    OperationObserver,
    StoreFault,
    ignore_observation,
    log_store_fault,
)
from mediatord.store.sqlite.connection import (
    LOCK_TIMEOUT_SECONDS,
    MAX_WAL_BYTES,
    SQLOperation,
    StoreConnection,
    WriteTicketLock,
    connect_checkpointer,
    connect_reader,
    get_cause,
    is_disk_full_error,
    is_lock_error,
    make_failure,
)
from mediatord.store.sqlite.database_file import (
    STARTUP_CHECK_SECONDS,
    DatabaseFileLost,
    check_structure,
    is_damage_error,
    open_database,
    reopen_database,
)

if TYPE_CHECKING:
    from mediatord.store.sqlite.memory_store import InlineExecutor

T = TypeVar("T")
P = ParamSpec("P")

CHECKPOINT_INTERVAL_SECONDS = 0.5
# A checkpoint that waits for readers keeps others from writing: so each try waits for a short time only.
CHECKPOINT_TRUNCATE_SECONDS = 2.0
CHECKPOINT_RETRY_SECONDS = 0.01
# A larger log is to be written from its start again.
WAL_REUSE_BYTES = 4_194_304
# While others write there is always something new; these passes leave little of it to the thread that writes.
_CHECKPOINT_PASSES = 3
_MAX_PAGES_LEFT = 64
# Seconds by which a commit is delayed at most to collect more operations, where the disk is slow.
_MAX_COMMIT_DELAY = 0.01
# Seconds that a slice of long work should take before its commit.
SLICE_SECONDS = 0.004
# Seconds for which a slice waits for a moment without other operations. Then it joins them.
SLICE_PATIENCE = 0.05
# Slices between two checkpoints, so that no checkpoint has so much to move that commits wait long for the disk.
SLICES_PER_CHECKPOINT = 8
# Seconds between two checks of the files and their disk.
FILE_CHECK_INTERVAL = 1.0

_log = Logger(namespace="mediatord.store")


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
        self._jobs: SimpleQueue[tuple[Callable[..., Any], tuple[Any, ...], Deferred[Any]] | None] = SimpleQueue()

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


EarlyOutcomesCallback = Callable[[int, list[Any]], None]


@dataclass(slots=True, eq=False)
class _Submission:
    """
    Operations that were submitted together, for one Deferred, and their outcomes.

    :ivar early: called with outcomes while others are missing: the index of the first, and the outcomes.
    :ivar reported: number of outcomes it has been called with.
    """

    name: str
    number: int
    since: float
    early: EarlyOutcomesCallback | None = None
    outcomes: list[Any] = field(default_factory=list)
    reported: int = 0
    deferred: Deferred[Any] = field(default_factory=Deferred)

    def report_early(self, callback: EarlyOutcomesCallback) -> None:
        """Pass on the outcomes that are new."""
        reported, self.reported = self.reported, len(self.outcomes)
        try:
            callback(reported, self.outcomes[reported:])
        except Exception as error:
            log_store_fault("early result callback failed", error)


class SliceSize:
    """
    Number of rows of the slices of one kind of long work, adjusted so that a slice takes :data:`SLICE_SECONDS`.

    :param least: number that no slice goes below, so that the work proceeds.
    :param most: number that no slice exceeds, as the time of the commit, which depends on it, is not counted.
    """

    def __init__(self, least: int, most: int, monotonic_time: Callable[[], float] = monotonic) -> None:
        self._least = least
        self._most = most
        self._time = monotonic_time
        self.rows = least

    def perform(self, work: Callable[..., T], connection: StoreConnection, *args: Any) -> T:
        """Call `work` with the connection, the number of rows and further arguments; in the thread that writes."""
        began = self._time()
        result = work(connection, self.rows, *args)
        share = SLICE_SECONDS / max(self._time() - began, SLICE_SECONDS / 2)
        self.rows = max(self._least, min(self._most, int(self.rows * share)))
        return result


# With its size.
_QueuedOperation = tuple[_Submission, SQLOperation, int]


@dataclass(eq=False, slots=True)
class OperationBatcher:
    """
    A thread with a connection that only it uses, and the operations that are queued for it.

    Operations are collected until the end of the reactor iteration, or while a batch is being performed, and then
    performed as one batch. Their Deferreds fire when the whole batch is done.

    A slice of long work waits until there are no other operations, and joins a batch of others after
    :data:`SLICE_PATIENCE`. No batch has more than one. A slice alone is not synced, so that what arrives meanwhile
    waits for one sync, its own.

    A connection that a job leaves inside a transaction, because it could not be rolled back, is replaced: every later
    `BEGIN` on it would fail.

    :param perform: performs a batch, in the thread.
    :param perform_slice: performs a slice alone.
    :param on_fault: called with the exception behind each failed operation.
    :param max_delay: seconds for which a batch waits for more operations at most, as long as every reactor iteration
        brings some, and never for more than half of the duration of the last batch: where the disk is slow,
        clients that have just been answered come back in that time, and share the next wait. An operation that comes
        alone after one that was alone waits for none.
    :param after_batch: called with the seconds each batch took, before its Deferreds fire.
    :ivar is_accepting: whether operations are accepted; set once all connections of the store are open.
    :ivar slices_left: slices that may be performed until more are permitted.
    """

    runner: JobRunner
    perform: Callable[[StoreConnection, Sequence[Any]], list[Any]]
    clock: IReactorTime
    observe: OperationObserver
    limits: BatchLimits
    on_fault: Callable[[BaseException], None] = lambda error: None
    max_delay: float = 0.0
    after_batch: Callable[[float], None] | None = None
    perform_slice: Callable[[StoreConnection, Sequence[Any]], list[Any]] | None = None
    is_accepting: bool = field(default=False, init=False)
    slices_left: int = field(default=SLICES_PER_CHECKPOINT, init=False)
    _connection: StoreConnection | None = field(default=None, init=False)
    _connect: Callable[[], StoreConnection] | None = field(default=None, init=False)
    _delay: float = field(default=0.0, init=False)
    _collect_until: float = field(default=0.0, init=False)
    _collected: int = field(default=0, init=False)
    _last_size: int = field(default=0, init=False)
    _queue: deque[_QueuedOperation] = field(default_factory=deque, init=False)
    _queued_bytes: int = field(default=0, init=False)
    _slices: deque[_QueuedOperation] = field(default_factory=deque, init=False)
    _busy: bool = field(default=False, init=False)
    _drained: Deferred[None] | None = field(default=None, init=False)
    _next_log_at: float = field(default=0.0, init=False)
    _failures: int = field(default=0, init=False)

    def open(
        self, connect: Callable[[], StoreConnection], reconnect: Callable[[], StoreConnection] | None = None
    ) -> Deferred[None]:
        """
        Start the thread and connect in it; if that fails, the thread is stopped again.

        :param reconnect: makes a replacement for a connection that cannot be used any longer.
        """

        def keep_connection(connection: StoreConnection) -> None:
            self._connection = connection

        self._connect = reconnect or connect
        self.runner.start()
        return self.runner(connect).addCallbacks(keep_connection, self._stop_thread)

    def run(self, work: Callable[..., T], *args: Any) -> Deferred[T]:
        """Call `work` with the connection and further arguments, beside the batches."""
        return self.runner(self._run_job, work, *args)

    def interrupt(self) -> None:
        """Make the statement that is being executed fail, if there is one; may be called from another thread."""
        if self._connection is not None:
            self._connection.interrupt()

    def drain(self) -> Deferred[None]:
        """Accept no more operations; fires when all accepted ones are done."""
        self.is_accepting = False
        if not self._busy and not self._slices:
            return succeed(None)
        self._drained = Deferred()
        return self._drained

    def close(self) -> Deferred[None]:
        """Close the connection and stop the thread, if they exist."""
        if self._connect is None:
            return succeed(None)
        self._connect = None
        return self.runner(self._disconnect).addBoth(self._stop_thread)

    @property
    def buffered(self) -> tuple[int, int]:
        """Number of queued operations, and the bytes that they hold."""
        return len(self._queue) + len(self._slices), self._queued_bytes

    @property
    def is_busy(self) -> bool:
        """Whether a batch is being collected or performed."""
        return self._busy

    def permit_slices(self, number: int) -> None:
        """Set the number of slices that may be performed."""
        self.slices_left = number
        self._schedule_batch(self.clock.seconds())

    def submit_slice(self, name: str, work: SQLOperation) -> Deferred[list[Any]]:
        """
        Perform a slice of long work; fires with its outcome, as the only one.

        :raise StoreUnavailable: not accepting, or too much is queued.
        """
        now = self.clock.seconds()
        if not self.is_accepting or len(self._slices) >= self.limits.waiting:
            return fail(StoreUnavailable())
        submission = _Submission(name, 1, now)
        self._slices.append((submission, work, 0))
        self._schedule_batch(now)
        return submission.deferred

    def submit(
        self, name: str, works: Sequence[tuple[SQLOperation, int]], early: EarlyOutcomesCallback | None = None
    ) -> Deferred[list[Any]]:
        """
        Perform operations, at least one, with the next batch; fires with their outcomes.

        :param works: each with the bytes that it holds until then.
        :param early: called with outcomes while operations are waiting for a later batch: the index of the first, and
            the outcomes.
        :raise StoreUnavailable: not accepting, or too much is queued; none of them is performed.
        """
        queue, size, now = self._queue, self._queued_bytes, self.clock.seconds()
        if not self.is_accepting or len(queue) >= self.limits.waiting:
            return fail(StoreUnavailable())
        for _, more in works:
            size += more
        if size > self.limits.waiting_bytes:
            return fail(StoreUnavailable())
        self._queued_bytes = size
        submission = _Submission(name, len(works), now, early)
        for work, more in works:
            queue.append((submission, work, more))
        self._schedule_batch(now)
        return submission.deferred

    def _schedule_batch(self, now: float) -> None:
        """Collect a batch, unless that is done already, if there is something to perform."""
        if not self._busy and (self._queue or (self._slices and self.slices_left > 0)):
            self._busy, self._collect_until = True, now + self._delay
            self.clock.callLater(0, self._run_batch)

    def _run_batch(self) -> None:
        now, queue, limits = self.clock.seconds(), self._queue, self.limits
        before, self._collected = self._collected, len(queue)
        is_busy = self._collected > 1 or self._last_size > 1
        if is_busy and before < self._collected < limits.batch and now < self._collect_until:
            self.clock.callLater(0, self._run_batch)
            return
        self._collected = 0
        batch: list[_QueuedOperation] = []
        works: list[SQLOperation] = []
        size = 0
        is_slice_due = not queue or (self._slices and now - self._slices[0][0].since >= SLICE_PATIENCE)
        has_slice = bool(is_slice_due and self._slices and self.slices_left > 0)
        if has_slice:
            self.slices_left -= 1
            batch.append(self._slices.popleft())
            works.append(batch[0][1])
        while queue and len(batch) < limits.batch and (not batch or size + queue[0][2] <= limits.batch_bytes):
            queued = queue.popleft()
            size += queued[2]
            batch.append(queued)
            works.append(queued[1])
        if not batch:  # slices that may no longer be performed
            self._busy = False
            return
        self._queued_bytes -= size
        self._last_size = len(batch)
        perform = self.perform_slice if has_slice and len(works) == 1 and self.perform_slice else self.perform
        done = self.runner(self._run_job, perform, works)
        done.addErrback(lambda failure: [make_failure(failure.value) for _ in works])
        done.addCallback(self._finish, batch, now)

    def _finish(self, outcomes: list[Any], batch: list[_QueuedOperation], begun: float) -> None:
        now = self.clock.seconds()
        self._delay = min((now - begun) / 2, self.max_delay)
        if self.after_batch is not None:
            self.after_batch(now - begun)
        if StoreUnavailable in map(type, outcomes):
            self._report_faults(outcomes, now)
            self._fail_locked_out(batch, outcomes)
        self._busy = False
        if self._queue or self._slices:
            self._schedule_batch(now)
        for (submission, _, _), outcome in zip(batch, outcomes, strict=True):
            submission.outcomes.append(outcome)
            self.observe(submission.name, now - submission.since)
            if len(submission.outcomes) == submission.number:
                submission.deferred.callback(submission.outcomes)
        # Only operations of the last submission can be split between this batch and the next.
        last = batch[-1][0]
        if last.early is not None and len(last.outcomes) < last.number:
            last.report_early(last.early)
        if self._drained is not None and not self._busy and not self._slices:
            drained, self._drained = self._drained, None
            drained.callback(None)

    def _report_faults(self, outcomes: Sequence[Any], now: float) -> None:
        """Log the first fault, but no more than one a second: on a full disk everything fails."""
        faults = [cause for outcome in outcomes if (cause := get_cause(outcome)) is not None]
        self._failures += len(faults)
        if faults and now >= self._next_log_at:
            log_store_fault(f"store operations failed ({self._failures})", faults[0])
            self._next_log_at = now + 1.0
            self._failures = 0
        for fault in faults:
            self.on_fault(fault)

    def _fail_locked_out(self, batch: list[_QueuedOperation], outcomes: list[Any]) -> None:
        """Fail queued operations together with a batch that did not get the lock: they have waited for it as long."""
        if is_lock_error(get_cause(outcomes[-1])):
            batch += self._queue
            outcomes += [StoreUnavailable() for _ in self._queue]
            self._queue.clear()
            self._queued_bytes = 0

    def _run_job(self, work: Callable[..., T], *args: Any) -> T:
        connection = self._connection
        if connection is None:
            if self._connect is None:
                raise RuntimeError("the store is not open")
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

    def _stop_thread(self, result: T) -> T:
        self._connect = None
        self.runner.stop()
        return result


def get_single_result(outcomes: list[Any]) -> Any:
    """Result of a single operation, or the failure with which its Deferred fires."""
    (outcome,) = outcomes
    # Not raised: the traceback would refer to this frame, and to the outcome itself.
    return Failure(outcome) if isinstance(outcome, Exception) else outcome


def _checkpoint(connection: StoreConnection) -> tuple[int, bool]:
    """
    Move committed pages from the write-ahead log into the database, in the background; returns the size of the log
    afterwards, and whether all of it was moved.

    A passive checkpoint waits for nobody, so under a long reader, or when several processes write all the time, the
    log still grows; beyond `MAX_WAL_BYTES` follows a checkpoint that waits for readers and writers and empties it.
    """
    for _ in range(_CHECKPOINT_PASSES):
        pages, moved = _checkpoint_pages(connection, "PASSIVE")
        if pages - moved <= _MAX_PAGES_LEFT:
            break
    page_size = connection.select_value("PRAGMA page_size")
    end = monotonic() + CHECKPOINT_TRUNCATE_SECONDS
    while pages * page_size > MAX_WAL_BYTES:
        pages, moved = _checkpoint_pages(connection, "TRUNCATE")
        if monotonic() >= end:
            break
        sleep(CHECKPOINT_RETRY_SECONDS)
    return pages * page_size, pages == moved


def _checkpoint_pages(connection: StoreConnection, mode: str) -> tuple[int, int]:
    """Number of pages in the log afterwards, and of those that are in the database as well."""
    _busy, pages, moved = connection.execute(f"PRAGMA wal_checkpoint({mode})").fetchone()
    return pages, moved


class DatabaseFileHealth:
    """
    Faults of the database file and its disk, and the operations that are refused because of them.

    A file that is put back is used again, and so is a disk with free space. Damage lasts until a restart of the
    daemon, which checks the file: until then nothing is written, as that could destroy more.

    :param on_fault: called with each fault when it begins and when it ends.
    :ivar faults: current faults.
    :ivar is_shorter: whether the database is shorter than it was. That is damage, or a program has returned space to
        the disk, which only an examination can distinguish.
    """

    def __init__(self, path: Path, space: DiskSpaceMonitor, on_fault: Callable[[StoreFault, bool], None]) -> None:
        self._path = os.fspath(path.absolute())
        # The first two are compared after each commit; another process may use the third one instead of this.
        self._paths = tuple(self._path + suffix for suffix in ("", "-wal", "-shm"))
        self._space = space
        self._on_fault = on_fault
        self._identities: tuple[tuple[int, int], ...] = ()
        self._size = 0
        self.is_shorter = False
        self.faults: set[StoreFault] = set()

    def record_open(self) -> None:
        """Remember the files that have been opened; called in a thread of the store."""
        self._identities = tuple((found.st_dev, found.st_ino) for found in map(os.stat, self._paths))
        self._size, self.is_shorter = os.stat(self._path).st_size, False

    def record_close(self) -> None:
        """Forget files and faults."""
        self._identities = ()
        for fault in tuple(self.faults):
            self.faults.discard(fault)
            self._on_fault(fault, False)

    def is_lost(self, files: int = 2) -> bool:
        """
        Whether database or write-ahead log are not the files that were opened; may be called in any thread.

        :param files: 3 for the shared memory as well.
        """
        try:
            for path, identity in zip(self._paths[:files], self._identities, strict=False):
                found = os.stat(path)
                if (found.st_dev, found.st_ino) != identity:
                    return True
        except OSError:
            return True
        return False

    def check(self) -> None:
        """Check the files and the disk, and update the faults."""
        if not self._identities:
            return
        lost = self.is_lost(files=3)
        self._change("missing", lost)
        if not lost:
            with suppress(OSError):
                size = os.stat(self._path).st_size
                self.is_shorter = size < self._size
                self._size = max(size, self._size)
        self._change("full", self._space.is_full())

    def record_examination(self, size: int, problems: Sequence[str]) -> None:
        """
        Record the examination of a file that has become shorter.

        :param size: its size then.
        :param problems: damage that was found.
        """
        if problems:
            self._change("damaged", True)
        else:
            self._size, self.is_shorter = size, False

    def record_failure(self, error: BaseException | None) -> None:
        """Derive faults from the exception of an operation."""
        if isinstance(error, DatabaseFileLost):
            self.check()
        elif is_damage_error(error):
            self.check()  # a file that is gone is no damage
            if "missing" not in self.faults:
                self._change("damaged", True)
        elif is_disk_full_error(error):
            self._space.exhausted()
            self._change("full", self._space.is_full())

    def refuses_writing(self, name: str, shrinking: bool) -> bool:
        """
        Whether an operation is refused while there are faults.

        :param shrinking: whether the store holds less after it although others of its name let it grow.
        """
        if self.faults != {"full"}:
            return bool(self.faults)
        if shrinking or name not in GROWING_OPERATIONS:
            return False
        # There may be free space again.
        self._change("full", self._space.is_full())
        return bool(self.faults)

    def _change(self, fault: StoreFault, present: bool) -> None:
        if present == (fault in self.faults):
            return
        if present:
            self.faults.add(fault)
            _log.error(
                "{trouble} ({path})", event="store.fault", trouble=STORE_FAULT_MESSAGES[fault], path=self._path
            )
        else:
            self.faults.discard(fault)
            _log.info("store fault cleared: {trouble}", event="store.fault_over", trouble=STORE_FAULT_MESSAGES[fault])
        self._on_fault(fault, present)


WRITE_LIMITS = BatchLimits()
READ_LIMITS = BatchLimits(waiting_bytes=1 << 62)  # what is yet to be read takes no memory
SEARCH_LIMITS = BatchLimits(batch=1, waiting=64, waiting_bytes=1 << 62)


class SQLiteExecutor:
    """
    Runs operations on a database between open and close: writes, reads, background reads and searches, each kind in
    its own thread.

    Some time after the first of several commits the write-ahead log is moved into the database, in the background. It
    is written from its start again only if all of it was moved when the next transaction begins, which never happens
    while there is one transaction after another. So then the last pages are moved by the thread that writes, where
    nothing can come between: writing over a file costs the disk less than letting it grow. Slices of long work, which
    would fill it faster than anything else, wait for a checkpoint after every few of them.

    :param make_runner: makes the thread for a kind of operations: `write`, `read`, `background` for work that takes
        long, such as checkpoints and statistics, and `search` for long reads that a client waits for.
    :param patience: seconds for which a write waits for another process before it fails.
    :param shared: whether other processes write to the file, so that transactions queue for a lock.
    :param create: whether to create the file if it does not exist.
    :param on_fault: called with each fault of the file when it begins and ends.
    """

    def __init__(
        self,
        path: Path,
        clock: IReactorTime,
        make_runner: Callable[[str], JobRunner],
        observe: OperationObserver = ignore_observation,
        *,
        patience: float = LOCK_TIMEOUT_SECONDS,
        shared: bool = False,
        create: bool = True,
        space_limits: SpaceLimits = SpaceLimits(),  # noqa: B008  it is frozen
        on_fault: Callable[[StoreFault, bool], None] = lambda fault, present: None,
    ) -> None:
        self._path = path
        self._create = create
        self._space = DiskSpaceMonitor(path, space_limits)
        self.health = DatabaseFileHealth(path, self._space, on_fault)
        self._patience = patience
        self._check_timer: IDelayedCall | None = None
        self._checkpoint_timer: IDelayedCall | None = None
        self._is_examining = self._is_checkpointing = False
        self._ticket_lock = WriteTicketLock(path) if shared else None
        self._clock = clock
        self._observe = observe
        on_failure, perform = self.health.record_failure, StoreConnection.read_batch
        self._writes = OperationBatcher(
            make_runner("write"),
            self._commit,
            clock,
            observe,
            WRITE_LIMITS,
            on_fault=on_failure,
            max_delay=_MAX_COMMIT_DELAY,
            after_batch=self._after_commit,
            perform_slice=partial(self._commit, durable=False),
        )
        self._reads, self._background, self._searches = (
            OperationBatcher(make_runner(kind), perform, clock, observe, limits, on_failure)
            for kind, limits in (
                ("read", READ_LIMITS),
                ("background", READ_LIMITS),
                ("search", SEARCH_LIMITS),
            )
        )
        self._batchers = (self._reads, self._background, self._searches, self._writes)
        self._changing = DeferredLock()

    @property
    def is_readable(self) -> bool:
        """Whether it is open and the file exists."""
        return self._writes.is_accepting and "missing" not in self.health.faults

    @property
    def buffered(self) -> tuple[int, int]:
        """Number of queued operations, and the bytes that queued writes hold."""
        return sum([batcher.buffered[0] for batcher in self._batchers]), self._writes.buffered[1]

    @property
    def fault_description(self) -> str:
        """The fault of the file, for the operator; empty when there is none."""
        return next((STORE_FAULT_MESSAGES[fault] for fault in STORE_FAULTS if fault in self.health.faults), "")

    def open(self) -> Deferred[None]:
        """:raise StoreUnavailable: it could not be opened; the reason is logged, and another try may help."""
        return Deferred.fromCoroutine(self._open())

    def close(self) -> Deferred[None]:
        """Refuse more operations, finish those that were accepted, empty the write-ahead log and disconnect."""
        return Deferred.fromCoroutine(self._close())

    def write(
        self,
        name: str,
        work: SQLOperation | Callable[..., Any],
        *args: Any,
        size: int = 0,
        shrinking: bool = False,
    ) -> Deferred[Any]:
        """
        Fires with the result of an operation when its changes are on disk.

        :param args: passed to it after the connection.
        :param size: bytes that it keeps in memory until then.
        :param shrinking: whether it is performed on a full disk although others of its name are not.
        """
        if self.health.faults and self.health.refuses_writing(name, shrinking):
            return fail(StoreUnavailable())
        operation = (lambda connection: work(connection, *args)) if args and callable(work) else work
        return self._writes.submit(name, [(operation, size)]).addCallback(get_single_result)

    def write_slice(self, name: str, size: SliceSize, work: Callable[..., Any], *args: Any) -> Deferred[Any]:
        """
        As :meth:`write`, for a slice of long work, which waits while there are other operations. It may be on disk
        only with the next commit or checkpoint, so it has to be one that can be repeated.

        :param work: called with the connection, a number of rows and further arguments.
        """
        if self.health.faults and self.health.refuses_writing(name, shrinking=False):
            return fail(StoreUnavailable())
        done = self._writes.submit_slice(name, lambda connection: size.perform(work, connection, *args))
        return done.addCallback(get_single_result)

    def write_each(
        self, name: str, works: Sequence[tuple[SQLOperation, int]], early: EarlyOutcomesCallback | None = None
    ) -> Deferred[list[Any]]:
        """
        Several writes, each with its size; fires with their outcomes when all are on disk, or have failed.

        :param early: as for :meth:`OperationBatcher.submit`.
        """
        if self.health.faults and self.health.refuses_writing(name, shrinking=False):
            return fail(StoreUnavailable())
        return self._writes.submit(name, works, early)

    def read(self, name: str, work: Callable[..., Any], *args: Any, size: int = 0) -> Deferred[Any]:
        """
        Fires with the result of a function of the connection.

        :param args: passed to it after the connection.
        :param size: bytes that it may read, so that not too many are in memory at the same time.
        """
        return self._submit_read(self._reads, name, lambda connection: work(connection, *args), size)

    def read_in_background(self, name: str, work: Callable[..., Any], *args: Any) -> Deferred[Any]:
        """A read that takes so long that others should not wait for it."""
        return self._submit_read(self._background, name, lambda connection: work(connection, *args))

    def search(self, name: str, work: Callable[..., Any], *args: Any) -> Deferred[Any]:
        """A long read that a client waits for; few are queued, and close interrupts them."""

        def unless_closing(connection: StoreConnection) -> Any:
            if not self._searches.is_accepting:
                raise StoreUnavailable()
            return work(connection, *args)

        return self._submit_read(self._searches, name, unless_closing)

    def ping(self) -> Deferred[None]:
        """A write and a read, so that a full disk and a thread that hangs are noticed."""
        if self.health.faults:
            self.health.check()
        if self.health.faults:
            return fail(StoreUnavailable())
        return self.write("ping", write_ping).addCallback(lambda _: self.read("ping", read_ping))

    def _submit_read(self, batcher: OperationBatcher, name: str, work: SQLOperation, size: int = 0) -> Deferred[Any]:
        if "missing" in self.health.faults:
            return fail(StoreUnavailable())
        return batcher.submit(name, [(work, size)]).addCallback(get_single_result)

    async def _open(self) -> None:
        async with self._changing:
            if self._writes.is_accepting:
                return
            try:
                await self._writes.open(self._connect_writer, self._reconnect_writer)
                await self._reads.open(lambda: connect_reader(self._path))
                await self._background.open(lambda: connect_checkpointer(self._path))
                await self._searches.open(lambda: connect_reader(self._path))
            except Exception as error:
                # The text is about the file: nothing that peers sent can be in it.
                _log.error("cannot open the store: {reason}", event="store.refused", reason=str(error))
                await self._close_connections()
                raise StoreUnavailable() from error
            for batcher in self._batchers:
                batcher.is_accepting = True
            self.health.check()
            self._check_timer = self._clock.callLater(FILE_CHECK_INTERVAL, self._check_files)

    async def _close(self) -> None:
        async with self._changing:
            if not self._writes.is_accepting:
                return
            if self._check_timer is not None:
                self._check_timer.cancel()
            drained = gatherResults([batcher.drain() for batcher in self._batchers])
            self._searches.interrupt()
            await drained
            if self._checkpoint_timer is not None:
                self._checkpoint_timer.cancel()
                self._checkpoint_timer = None
            # The thread runs one job after another, so this waits for a checkpoint that is under way.
            await self._background.run(_checkpoint_pages, "TRUNCATE").addErrback(self._report_checkpoint_failure)
            await self._close_connections()

    async def _close_connections(self) -> None:
        self.health.record_close()
        for batcher in self._batchers:
            await batcher.close()
        self._space.closed()
        if self._ticket_lock is not None:
            self._ticket_lock.close()

    def _connect_writer(self) -> StoreConnection:
        connection = open_database(self._path, self._clock.seconds(), create=self._create)
        connection.ticket_lock = self._ticket_lock
        self.health.record_open()
        self._space.opened()
        self._measure_free_pages(connection)
        return connection

    def _reconnect_writer(self) -> StoreConnection:
        if self.health.is_lost():
            raise DatabaseFileLost
        connection = reopen_database(self._path)
        connection.ticket_lock = self._ticket_lock
        return connection

    def _commit(
        self, connection: StoreConnection, operations: Sequence[SQLOperation], *, durable: bool = True
    ) -> list[Any]:
        if durable is not connection.is_durable:
            connection.set_durable(durable)
        outcomes = connection.commit_batch(operations, self._patience)
        if StoreUnavailable in map(type, outcomes):
            outcomes = connection.retry_on_full_disk(operations, outcomes, self._patience)
        if self.health.is_lost():
            return [make_failure(DatabaseFileLost()) for _ in outcomes]
        return outcomes

    def _after_commit(self, seconds: float) -> None:
        self._observe("commit", seconds)
        if self._writes.slices_left <= 0 and not self._is_checkpointing:
            if self._checkpoint_timer is not None:
                self._checkpoint_timer.cancel()
            self._run_checkpoint()
        elif self._checkpoint_timer is None:
            self._checkpoint_timer = self._clock.callLater(CHECKPOINT_INTERVAL_SECONDS, self._run_checkpoint)

    def _run_checkpoint(self) -> None:
        if self._is_checkpointing:
            self._checkpoint_timer = self._clock.callLater(CHECKPOINT_INTERVAL_SECONDS, self._run_checkpoint)
            return
        self._checkpoint_timer = None
        self._is_checkpointing = True
        self._writes.permit_slices(0)
        begun = self._clock.seconds()

        def make_reusable(log: tuple[int, bool]) -> Any:
            size, is_moved = log
            # If nobody writes, the next transaction begins at the start of a log that was moved.
            if size <= WAL_REUSE_BYTES or (is_moved and not self._writes.is_busy):
                return None
            return self._writes.run(self._make_log_reusable)

        done: Deferred[Any] = self._background.run(self._checkpoint)
        done.addCallback(make_reusable).addCallbacks(
            lambda _: self._observe("checkpoint", self._clock.seconds() - begun), self._report_checkpoint_failure
        )
        done.addBoth(self._end_checkpoint)

    def _end_checkpoint(self, _: None) -> None:
        self._is_checkpointing = False
        self._writes.permit_slices(SLICES_PER_CHECKPOINT)

    def _checkpoint(self, connection: StoreConnection) -> tuple[int, bool]:
        with self._space.keep_reserve():
            return _checkpoint(connection)

    def _make_log_reusable(self, connection: StoreConnection) -> None:
        with self._space.keep_reserve():
            _checkpoint_pages(connection, "PASSIVE")

    def _report_checkpoint_failure(self, failure: Failure) -> None:
        log_store_fault("a checkpoint failed", failure.value)
        self.health.record_failure(failure.value)

    def _check_files(self) -> None:
        """Check the files and their disk periodically."""
        self._check_timer = self._clock.callLater(FILE_CHECK_INTERVAL, self._check_files)
        self.health.check()
        if not self._is_examining:
            self._is_examining = True
            is_shorter = self.health.is_shorter and "damaged" not in self.health.faults
            self._background.run(self._examine, is_shorter).addBoth(self._end_examination)

    def _examine(self, connection: StoreConnection, is_shorter: bool) -> tuple[int, list[str]] | None:
        """Measure the space, and check a file that has become shorter: its size, and the damage that was found."""
        self._measure_free_pages(connection)
        self._space.provide()
        if not is_shorter:
            return None
        size = self._path.stat().st_size
        # Other connections have pages cached that may no longer be in the file.
        with closing(connect_reader(self._path)) as fresh:
            return size, check_structure(fresh, STARTUP_CHECK_SECONDS)

    def _end_examination(self, examined: tuple[int, list[str]] | Failure | None) -> None:
        self._is_examining = False
        if isinstance(examined, Failure):
            self.health.record_failure(examined.value)
        elif examined is not None:
            self.health.record_examination(*examined)

    def _measure_free_pages(self, connection: StoreConnection) -> None:
        free, page_size = (connection.select_value(f"PRAGMA {name}") for name in ("freelist_count", "page_size"))
        self._space.reusable(free * page_size)


SQLExecutor: TypeAlias = "SQLiteExecutor | InlineExecutor"
_OperationKind = Literal["read", "read_in_background", "search", "write"]


def sql_method(
    kind: _OperationKind, name: str, query: Callable[Concatenate[StoreConnection, P], T]
) -> Callable[Concatenate[Any, P], Deferred[T]]:
    """A method of a part of a store that runs a query; the part has its executor in the attribute `_executor`."""

    def method(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> Deferred[T]:
        done: Deferred[T] = getattr(self._executor, kind)(name, lambda c: query(c, *args, **kwargs))
        return done

    return method


def timed_sql_method(
    kind: _OperationKind, name: str, query: Callable[Concatenate[StoreConnection, float, P], T]
) -> Callable[Concatenate[Any, P], Deferred[T]]:
    """As :func:`sql_method`, for a query that takes the time of the call, by the clock in the attribute `_clock`."""

    def method(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> Deferred[T]:
        now = self._clock.seconds()
        done: Deferred[T] = getattr(self._executor, kind)(name, lambda c: query(c, now, *args, **kwargs))
        return done

    return method


def read_cached(
    executor: SQLExecutor, name: str, read: Callable[[StoreConnection, str], T | None], cache: OwnerCache[T], key: str
) -> Deferred[T | None]:
    """Fires with what is cached, or with the result of a read, which is then cached."""
    if not executor.is_readable:
        return fail(StoreUnavailable())
    cached = cache.get(key)
    if cached is not None:
        return succeed(cached)
    age = cache.age

    def keep(result: T | None) -> T | None:
        cache.keep(key, result, age)
        return result

    return executor.read(name, read, key).addCallback(keep)


def write_ping(connection: StoreConnection) -> None:
    """A write that reaches the disk."""
    connection.execute("UPDATE counter SET value = value + 1 WHERE name = 'pings'")


def read_ping(connection: StoreConnection) -> None:
    """A read that reaches the database."""
    connection.select_value("SELECT value FROM counter WHERE name = 'pings'")
