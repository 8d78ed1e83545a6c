"""
Access to an open SQLite database: its threads, the write-ahead log, and the health of its files.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep
from typing import Any, Protocol

from twisted.internet.defer import Deferred, DeferredLock, fail, gatherResults, succeed
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure

from mediatord.errors import StoreUnavailable
from mediatord.store.interfaces.store import STORE_FAULT_MESSAGES, STORE_FAULTS, StoreFault
from mediatord.store.message_operations import BatchLimits, OperationObserver, log_store_fault
from mediatord.store.quotas import GROWING_OPERATIONS, DiskSpaceMonitor, SpaceLimits
from mediatord.store.sqlite.database_file import (
    MAX_WAL_BYTES,
    STARTUP_CHECK_SECONDS,
    DatabaseFileLost,
    check_structure,
    connect_checkpointer,
    connect_reader,
    is_damage_error,
    is_disk_full_error,
    open_database,
    reopen_database,
)
from mediatord.store.sqlite.group_commit import (
    ConnectionThread,
    EarlyOutcomesCallback,
    JobRunner,
    OperationBatcher,
    OperationOutcome,
    SQLOperation,
    bind_arguments,
    commit_batch,
    read_batch,
)
from mediatord.store.sqlite.locks import LOCK_TIMEOUT_SECONDS, WriteTicketLock
from mediatord.store.sqlite.queue_accounting import StoreConnection

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
# Seconds between two checks of the files and their disk.
FILE_CHECK_INTERVAL = 1.0

_log = Logger(namespace="mediatord.store")


class WALCheckpointer:
    """
    Moves committed pages from the write-ahead log into the database: a passive checkpoint some time after the first
    of several commits, in a thread of its own.

    The log is written from its start again only if all of it was moved when the next transaction begins, which never
    happens while there is one transaction after another. So the last pages are moved by the thread that writes, where
    nothing can come between: writing over a file costs the disk less than letting it grow.

    A passive checkpoint waits for nobody, so under a long reader, or when several processes write all the time, the
    log still grows; beyond `cap_bytes` follows a checkpoint that waits for readers and writers and empties it.

    :param thread: runs the checkpoints.
    :param writer: the thread that writes.
    :param on_fault: called with the exception of a checkpoint that failed.
    """

    def __init__(
        self,
        thread: ConnectionThread,
        writer: ConnectionThread,
        clock: IReactorTime,
        observe: OperationObserver,
        *,
        on_fault: Callable[[BaseException], None] = lambda error: None,
        cap_bytes: int = MAX_WAL_BYTES,
    ) -> None:
        self._thread = thread
        self._writer = writer
        self._clock = clock
        self._observe = observe
        self._on_fault = on_fault
        self._cap_bytes = cap_bytes
        self._timer: IDelayedCall | None = None

    def schedule(self) -> None:
        """Schedule a checkpoint after a commit, unless there is one."""
        if self._timer is None:
            self._timer = self._clock.callLater(CHECKPOINT_INTERVAL_SECONDS, self._run)

    def stop(self) -> Deferred[None]:
        """Fires after a last checkpoint, which empties the log; there must be no more commits."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        # The thread runs one job after another, so this waits for a checkpoint that is under way.
        return self._thread.run(_checkpoint_truncate).addCallbacks(lambda _: None, self._report_failure)

    def _run(self) -> None:
        self._timer = None
        begun = self._clock.seconds()
        done = self._thread.run(self._checkpoint).addCallback(self._make_reusable)
        done.addCallbacks(lambda _: self._observe("checkpoint", self._clock.seconds() - begun), self._report_failure)

    def _checkpoint(self, connection: sqlite3.Connection) -> int:
        """Size of the log afterwards, in bytes."""
        for _ in range(_CHECKPOINT_PASSES):
            pages, moved = _checkpoint_passive(connection)
            if pages - moved <= _MAX_PAGES_LEFT:
                break
        (page_size,) = connection.execute("PRAGMA page_size").fetchone()
        end = monotonic() + CHECKPOINT_TRUNCATE_SECONDS
        while pages * page_size > self._cap_bytes:
            pages = _checkpoint_truncate(connection)
            if monotonic() >= end:
                break
            sleep(CHECKPOINT_RETRY_SECONDS)
        return int(pages * page_size)

    def _make_reusable(self, size: int) -> Deferred[tuple[int, int]] | None:
        return self._writer.run(_checkpoint_passive) if size > WAL_REUSE_BYTES else None

    def _report_failure(self, failure: Failure) -> None:
        log_store_fault("a checkpoint failed", failure.value)
        if failure.value is not None:
            self._on_fault(failure.value)


def _checkpoint_passive(connection: sqlite3.Connection) -> tuple[int, int]:
    """Number of pages in the log, and of those that are in the database as well."""
    _busy, pages, moved = connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
    return pages, moved


def _checkpoint_truncate(connection: sqlite3.Connection) -> int:
    """Number of pages in the log afterwards: none, unless others held locks for longer than it waits."""
    _busy, pages, _moved = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    return int(pages)


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
        self._paths = tuple(os.fspath(path.absolute()) + suffix for suffix in ("", "-wal"))
        self._shared_memory = os.fspath(path.absolute()) + "-shm"
        self._space = space
        self._on_fault = on_fault
        self._identities: tuple[tuple[int, int], ...] | None = None
        self._shared_identity: tuple[int, int] | None = None
        self._size = 0
        self.is_shorter = False
        self.faults: set[StoreFault] = set()

    @property
    def fault_description(self) -> str:
        """The worst fault, for the operator; empty when there is none."""
        return next((STORE_FAULT_MESSAGES[fault] for fault in STORE_FAULTS if fault in self.faults), "")

    def record_open(self) -> None:
        """Remember the files that have been opened; called in a thread of the store."""
        self._identities = tuple(_get_file_identity(path) for path in self._paths)
        self._shared_identity = _get_file_identity(self._shared_memory)
        self._size = os.stat(self._paths[0]).st_size
        self.is_shorter = False

    def record_close(self) -> None:
        """Forget files and faults."""
        self._identities = None
        ended, self.faults = self.faults, set()
        for fault in ended:
            self._on_fault(fault, False)

    def is_lost(self) -> bool:
        """Whether database or write-ahead log are not the files that were opened; may be called in any thread."""
        if self._identities is not None:
            try:
                for path, identity in zip(self._paths, self._identities, strict=True):
                    found = os.stat(path)
                    if (found.st_dev, found.st_ino) != identity:
                        return True
            except OSError:
                return True
        return False

    def check(self) -> None:
        """Check the files and the disk, and update the faults."""
        if self._identities is None:
            return
        size = self._get_size(self._identities)
        self._change("missing", size is None)
        if size is not None:
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

    def refuses_reading(self) -> bool:
        """Whether nothing can be read."""
        return "missing" in self.faults

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

    def _get_size(self, known: tuple[tuple[int, int], ...]) -> int | None:
        """Size of the database; None if a file is not the one that was opened."""
        try:
            database, log = (os.stat(path) for path in self._paths)
            shared = _get_file_identity(self._shared_memory)
        except OSError:
            return None
        there = tuple((found.st_dev, found.st_ino) for found in (database, log))
        return database.st_size if (there, shared) == (known, self._shared_identity) else None

    def _change(self, fault: StoreFault, present: bool) -> None:
        if present == (fault in self.faults):
            return
        (self.faults.add if present else self.faults.discard)(fault)
        if present:
            _log.error(
                "{trouble} ({path})", event="store.fault", trouble=STORE_FAULT_MESSAGES[fault], path=self._paths[0]
            )
        else:
            _log.info("store fault cleared: {trouble}", event="store.fault_over", trouble=STORE_FAULT_MESSAGES[fault])
        self._on_fault(fault, present)


def _get_file_identity(path: str) -> tuple[int, int]:
    """:raise OSError: there is no such file."""
    found = os.stat(path)
    return found.st_dev, found.st_ino


@dataclass(frozen=True, slots=True)
class SQLiteRunners:
    """
    Threads of a store.

    :param background: for work that takes long, such as checkpoints and statistics.
    :param search: for long reads that a client waits for.
    """

    write: JobRunner
    read: JobRunner
    background: JobRunner
    search: JobRunner


@dataclass(frozen=True, slots=True)
class SQLiteTuning:
    """
    Parameters that only tests change.

    :param patience: seconds for which a write waits for another process before it fails.
    """

    bounds: BatchLimits = BatchLimits()
    read_bounds: BatchLimits = BatchLimits(waiting_bytes=1 << 62)  # what is yet to be read takes no memory
    search_bounds: BatchLimits = BatchLimits(batch=1, waiting=64, waiting_bytes=1 << 62)
    wal_cap_bytes: int = MAX_WAL_BYTES
    patience: float = LOCK_TIMEOUT_SECONDS


class SQLExecutor(Protocol):
    """
    Runs operations on a database between open and close: by threads on a file
    (:class:`SQLiteExecutor`), or at once in memory.
    """

    @property
    def is_readable(self) -> bool: ...

    @property
    def buffered(self) -> tuple[int, int]: ...

    @property
    def trouble(self) -> str: ...

    def open(self) -> Deferred[None]: ...

    def close(self) -> Deferred[None]: ...

    def write(
        self, name: str, work: SQLOperation | Callable[..., Any], *args: Any, size: int = 0, shrinking: bool = False
    ) -> Deferred[Any]: ...

    def write_each(
        self, name: str, works: Sequence[tuple[SQLOperation, int]], early: EarlyOutcomesCallback | None = None
    ) -> Deferred[list[OperationOutcome]]: ...

    def read(self, name: str, work: Callable[..., Any], *args: Any, size: int = 0) -> Deferred[Any]: ...

    def read_in_background(self, name: str, work: Callable[..., Any], *args: Any) -> Deferred[Any]: ...

    def search(self, name: str, work: Callable[[StoreConnection], Any]) -> Deferred[Any]: ...

    def ping(self) -> Deferred[None]: ...


class SQLiteExecutor:
    """
    Runs operations on a database between open and close: writes, reads, background reads and searches, each kind in
    its own thread.

    :param shared: whether other processes write to the file, so that transactions queue for a lock.
    :param create: whether to create the file if it does not exist.
    :param on_fault: called with each fault of the file when it begins and ends.
    """

    def __init__(
        self,
        path: Path,
        clock: IReactorTime,
        runners: SQLiteRunners,
        observe: OperationObserver,
        tuning: SQLiteTuning,
        *,
        shared: bool = False,
        create: bool = True,
        space_limits: SpaceLimits = SpaceLimits(),  # noqa: B008  it is frozen
        on_fault: Callable[[StoreFault, bool], None] = lambda fault, present: None,
    ) -> None:
        self._path = path
        self._create = create
        self._space = DiskSpaceMonitor(path, space_limits)
        self.health = DatabaseFileHealth(path, self._space, on_fault)
        self._patience = tuning.patience
        self._timer: IDelayedCall | None = None
        self._is_examining = False
        self._ticket_lock = WriteTicketLock(path) if shared else None
        self._clock = clock
        self._observe = observe
        self._writer = ConnectionThread(runners.write)
        self._reader = ConnectionThread(runners.read)
        self._background = ConnectionThread(runners.background)
        self._search_reader = ConnectionThread(runners.search)

        def make_batcher(
            thread: ConnectionThread,
            limits: BatchLimits,
            perform: Callable[..., list[OperationOutcome]] = read_batch,
            max_delay: float = 0.0,
        ) -> OperationBatcher:
            on_failure = self.health.record_failure
            return OperationBatcher(thread, perform, clock, observe, limits, on_fault=on_failure, max_delay=max_delay)

        self._writes = make_batcher(self._writer, tuning.bounds, self._commit, _MAX_COMMIT_DELAY)
        self._reads = make_batcher(self._reader, tuning.read_bounds)
        self._background_reads = make_batcher(self._background, tuning.read_bounds)
        self._searches = make_batcher(self._search_reader, tuning.search_bounds)
        self._checkpointer = WALCheckpointer(
            self._background,
            self._writer,
            clock,
            observe,
            on_fault=self.health.record_failure,
            cap_bytes=tuning.wal_cap_bytes,
        )
        self._changing = DeferredLock()

    @property
    def is_open(self) -> bool:
        return self._writes.is_accepting

    @property
    def is_readable(self) -> bool:
        """Whether it is open and the file exists."""
        return self._writes.is_accepting and not self.health.refuses_reading()

    @property
    def buffered(self) -> tuple[int, int]:
        """Number of queued operations, and the bytes that queued writes hold."""
        queued = [each.buffered[0] for each in (self._writes, self._reads, self._background_reads, self._searches)]
        return sum(queued), self._writes.buffered[1]

    @property
    def trouble(self) -> str:
        """The fault of the file, for the operator; empty when there is none."""
        return self.health.fault_description

    def open(self) -> Deferred[None]:
        """:raise StoreUnavailable: it could not be opened; the reason is logged, and another try may help."""
        return self._changing.run(self._open)

    def close(self) -> Deferred[None]:
        """Refuse more operations, finish those that were accepted, empty the write-ahead log and disconnect."""
        return self._changing.run(self._close)

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
        return self._writes.submit(name, bind_arguments(work, args) if args and callable(work) else work, size)

    def write_each(
        self, name: str, works: Sequence[tuple[SQLOperation, int]], early: EarlyOutcomesCallback | None = None
    ) -> Deferred[list[OperationOutcome]]:
        """
        Several writes, each with its size; fires when all are on disk, or have failed.

        :param early: as for :meth:`~mediatord.store.sqlite.group_commit.OperationBatcher.submit_each`.
        """
        if self.health.faults and self.health.refuses_writing(name, shrinking=False):
            return fail(StoreUnavailable())
        return self._writes.submit_each(name, works, early)

    def read(self, name: str, work: Callable[..., Any], *args: Any, size: int = 0) -> Deferred[Any]:
        """
        Fires with the result of a function of the connection.

        :param args: passed to it after the connection.
        :param size: bytes that it may read, so that not too many are in memory at the same time.
        """
        return self._read_in(self._reads, name, bind_arguments(work, args), size)

    def read_in_background(self, name: str, work: Callable[..., Any], *args: Any) -> Deferred[Any]:
        """A read that takes so long that others should not wait for it."""
        return self._read_in(self._background_reads, name, bind_arguments(work, args))

    def search(self, name: str, work: Callable[[StoreConnection], Any]) -> Deferred[Any]:
        """A long read that a client waits for; few are queued, and close interrupts them."""

        def unless_closing(connection: StoreConnection) -> Any:
            if not self._searches.is_accepting:
                raise StoreUnavailable()
            return work(connection)

        return self._read_in(self._searches, name, unless_closing)

    def ping(self) -> Deferred[None]:
        """A write and a read, so that a full disk and a thread that hangs are noticed."""
        if self.health.faults:
            self.health.check()
        if self.health.faults:
            return fail(StoreUnavailable())
        return self.write("ping", write_ping).addCallback(lambda _: self.read("ping", read_ping))

    def _read_in(self, batcher: OperationBatcher, name: str, work: SQLOperation, size: int = 0) -> Deferred[Any]:
        if self.health.faults and self.health.refuses_reading():
            return fail(StoreUnavailable())
        return batcher.submit(name, work, size)

    def _open(self) -> Deferred[None]:
        if self.is_open:
            return succeed(None)
        opened = self._writer.open(self._connect_writer, self._reconnect_writer)
        opened.addCallback(lambda _: self._reader.open(lambda: connect_reader(self._path)))
        opened.addCallback(lambda _: self._background.open(lambda: connect_checkpointer(self._path)))
        opened.addCallback(lambda _: self._search_reader.open(lambda: connect_reader(self._path)))
        return opened.addCallbacks(self._start, self._fail_open)

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

    def _commit(self, connection: StoreConnection, operations: Sequence[SQLOperation]) -> list[OperationOutcome]:
        outcomes = commit_batch(connection, operations, self._patience)
        for outcome in outcomes:
            if outcome.cause is not None and is_disk_full_error(outcome.cause):
                outcomes = self._retry_on_full_disk(connection, operations, outcomes)
                break
        if self.health.is_lost():
            return [OperationOutcome(error=StoreUnavailable(), cause=DatabaseFileLost()) for _ in outcomes]
        return outcomes

    def _retry_on_full_disk(
        self, connection: StoreConnection, operations: Sequence[SQLOperation], outcomes: Sequence[OperationOutcome]
    ) -> list[OperationOutcome]:
        """Retry operations that found no space, with the log written from its start, so that it need not grow."""
        patience = self._patience if self._ticket_lock is None else self._ticket_lock.enter(self._patience)
        try:
            # Waits for others that read or write.
            connection.execute(f"PRAGMA busy_timeout = {round(patience * 1000)}")
            with suppress(sqlite3.Error):
                connection.execute("PRAGMA wal_checkpoint(RESTART)").fetchall()
            connection.execute("PRAGMA busy_timeout = 0")
        finally:
            if self._ticket_lock is not None:
                self._ticket_lock.leave()
        return [
            commit_batch(connection, [operation], self._patience)[0] if is_disk_full_error(outcome.cause) else outcome
            for operation, outcome in zip(operations, outcomes, strict=True)
        ]

    def _check_files(self) -> None:
        """Check the files and their disk periodically."""
        self._timer = self._clock.callLater(FILE_CHECK_INTERVAL, self._check_files)
        self.health.check()
        if not self._is_examining:
            self._is_examining = True
            is_shorter = self.health.is_shorter and "damaged" not in self.health.faults
            examined = self._background.run(self._examine, is_shorter)
            examined.addCallback(self._end_examination).addErrback(self._fail_examination)

    def _end_examination(self, examined: tuple[int, list[str]] | None) -> None:
        self._is_examining = False
        if examined is not None:
            self.health.record_examination(*examined)

    def _fail_examination(self, failure: Failure) -> None:
        self._is_examining = False
        self.health.record_failure(failure.value)

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

    def _measure_free_pages(self, connection: StoreConnection) -> None:
        ((pages,),) = connection.execute("PRAGMA freelist_count").fetchall()
        ((page_size,),) = connection.execute("PRAGMA page_size").fetchall()
        self._space.reusable(pages * page_size)

    def _start(self, _: None) -> None:
        self._writes.start(after_batch=self._after_commit)
        self._reads.start()
        self._background_reads.start()
        self._searches.start()
        self.health.check()
        self._timer = self._clock.callLater(FILE_CHECK_INTERVAL, self._check_files)

    def _after_commit(self, seconds: float) -> None:
        self._observe("commit", seconds)
        self._checkpointer.schedule()

    def _fail_open(self, failure: Failure) -> Deferred[None]:
        # The text is about the file: nothing that peers sent can be in it.
        _log.error("cannot open the store: {reason}", event="store.refused", reason=failure.getErrorMessage())

        def refuse(_: None) -> None:
            raise StoreUnavailable() from failure.value

        return self._close_connections().addCallback(refuse)

    def _close(self) -> Deferred[None]:
        if not self.is_open:
            return succeed(None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        ends = [self._writes.stop(), self._reads.stop(), self._background_reads.stop(), self._searches.stop()]
        self._search_reader.interrupt()
        emptied = gatherResults(ends).addCallback(lambda _: self._checkpointer.stop())
        return emptied.addCallback(lambda _: self._close_connections())

    def _close_connections(self) -> Deferred[None]:
        self.health.record_close()
        closed = self._reader.close()
        closed.addCallback(lambda _: self._background.close())
        closed.addCallback(lambda _: self._search_reader.close())
        closed.addCallback(lambda _: self._writer.close())
        return closed.addCallback(self._release_files)

    def _release_files(self, _: None) -> None:
        self._space.closed()
        if self._ticket_lock is not None:
            self._ticket_lock.close()


def write_ping(connection: StoreConnection) -> None:
    """A write that reaches the disk."""
    connection.execute("UPDATE tally SET value = value + 1 WHERE name = 'pings'")


def read_ping(connection: StoreConnection) -> None:
    """A read that reaches the database."""
    connection.execute("SELECT value FROM tally WHERE name = 'pings'").fetchone()
