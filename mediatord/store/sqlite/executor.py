"""
Moving what was committed from the write-ahead log into the database, out of everybody's way.

How many bytes each table of an SQLite database takes.

The database file with the threads that work on it.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from sqlite3 import Connection
from time import monotonic, sleep
from typing import TypeVar

from twisted.internet.defer import Deferred, DeferredLock, fail, gatherResults, succeed
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure

from mediatord.errors import StoreUnavailable
from mediatord.store.interfaces.store import StoreFault
from mediatord.store.message_operations import BatchLimits, OperationObserver, log_store_fault
from mediatord.store.quotas import DiskSpaceMonitor, SpaceLimits
from mediatord.store.sqlite.database_file import (
    MAX_WAL_BYTES,
    STARTUP_CHECK_SECONDS,
    DatabaseFileHealth,
    DatabaseFileLost,
    check_structure,
    connect_checkpointer,
    connect_reader,
    is_disk_full_error,
    open_database,
    reopen_database,
)
from mediatord.store.sqlite.group_commit import (
    ConnectionThread,
    JobRunner,
    OperationBatcher,
    OperationOutcome,
    SQLOperation,
    commit_batch,
    read_batch,
)
from mediatord.store.sqlite.locks import LOCK_TIMEOUT_SECONDS, WriteTicketLock
from mediatord.store.sqlite.queue_accounting import StoreConnection

CHECKPOINT_INTERVAL_SECONDS = 0.5
# While it waits for readers nobody can write: so it waits for a short time only, again and again with pauses between.
CHECKPOINT_TRUNCATE_SECONDS = 2.0
CHECKPOINT_RETRY_SECONDS = 0.01
# Beyond this the log is to begin at its start again.
REUSE_BYTES = 4_194_304
# While others write there is always something new, so it is tried a few times only to leave little to the writer.
_CHECKPOINT_PASSES = 3
_FEW_PAGES = 64


class WALCheckpointer:
    """
    A passive checkpoint some time after the first of several commits, in a thread of its own.

    The log is written from its start again only if all of it was moved when the next transaction begins, and while
    there is one after another that never happens by itself. So what is left in the end is moved by the thread that
    writes, where nothing can come between: writing over a file costs the disk less than letting it grow.

    A passive checkpoint waits for nobody, so under a long reader, or when several processes write all the time, the
    log keeps growing all the same; past `cap_bytes` one follows that waits for readers and writers and empties it.

    :param writer: the thread that writes.
    :param on_fault: told what a checkpoint failed of below.
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

    def committed(self) -> None:
        """Something was committed: a checkpoint will follow."""
        if self._timer is None:
            self._timer = self._clock.callLater(CHECKPOINT_INTERVAL_SECONDS, self._run)

    def stop(self) -> Deferred[None]:
        """Fires after a last one that empties the log; there must be no more commits."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        # The thread does one thing after another, so this waits for a checkpoint that is under way.
        return self._thread.run(_checkpoint_truncate).addCallbacks(lambda _: None, self._failed)

    def _run(self) -> None:
        self._timer = None
        begun = self._clock.seconds()
        done = self._thread.run(self._checkpoint).addCallback(self._reuse)
        done.addCallbacks(lambda _: self._observe("checkpoint", self._clock.seconds() - begun), self._failed)

    def _checkpoint(self, connection: sqlite3.Connection) -> int:
        """Bytes that the log has when it is over."""
        for _ in range(_CHECKPOINT_PASSES):
            pages, moved = _checkpoint_passive(connection)
            if pages - moved <= _FEW_PAGES:
                break
        (page_size,) = connection.execute("PRAGMA page_size").fetchone()
        end = monotonic() + CHECKPOINT_TRUNCATE_SECONDS
        while pages * page_size > self._cap_bytes:
            pages = _checkpoint_truncate(connection)
            if monotonic() >= end:
                break
            sleep(CHECKPOINT_RETRY_SECONDS)
        return int(pages * page_size)

    def _reuse(self, size: int) -> Deferred[tuple[int, int]] | None:
        return self._writer.run(_checkpoint_passive) if size > REUSE_BYTES else None

    def _failed(self, failure: Failure) -> None:
        log_store_fault("a checkpoint failed", failure.value)
        if failure.value is not None:
            self._on_fault(failure.value)


def _checkpoint_passive(connection: sqlite3.Connection) -> tuple[int, int]:
    """How many pages are in the log, and how many of them in the database as well."""
    _busy, pages, moved = connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
    return pages, moved


def _checkpoint_truncate(connection: sqlite3.Connection) -> int:
    """How many pages are in the log after that: none, unless others were in the way for longer than we wait."""
    _busy, pages, _moved = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    return int(pages)


# Seconds that one look may take: `dbstat` reads every page.
_MEASURE_SECONDS = 0.2
# Of SQLite's virtual machine, between two looks at the clock; some five for a page.
_PROGRESS_STEPS = 1_000
# It took too long, or this SQLite was built without `dbstat`.
_EXPECTED_ERRORS = (sqlite3.SQLITE_INTERRUPT, sqlite3.SQLITE_ERROR)

_SELECT_TABLES = (
    "SELECT name, tbl_name FROM sqlite_schema WHERE rootpage UNION ALL SELECT 'sqlite_schema', 'sqlite_schema'"
)
# A row for each page, so that it can be ended between two of them.
_SELECT_SIZE = "SELECT sum(pgsize) FROM dbstat WHERE name = ?"


class TableSizeEstimator:
    """
    Measures a few tables and indexes at each call, and remembers the others.

    One that could not be measured in time is estimated from what the others leave of the database; more than one such
    are not told.

    :param steady: seconds since any time, by a clock that nobody sets.
    """

    def __init__(self, steady: Callable[[], float] = monotonic) -> None:
        self._steady = steady
        self._known: dict[str, int] = {}
        self._slow: set[str] = set()
        self._next: list[str] = []

    def measure(self, connection: sqlite3.Connection) -> dict[str, int]:
        """Bytes by table, those of its indexes among them, with `free` for pages without content."""
        owners = dict(connection.execute(_SELECT_TABLES).fetchall())
        self._measure_some(connection, sorted(owners))
        page_size = _read_pragma(connection, "page_size")
        free = _read_pragma(connection, "freelist_count") * page_size
        sizes: dict[str, int] = {"free": free}
        for name, owner in owners.items():
            if name in self._known:
                sizes[owner] = sizes.get(owner, 0) + self._known[name]
        missing = {owners[name] for name in owners if name not in self._known}
        if len(missing) == 1:
            rest = _read_pragma(connection, "page_count") * page_size - sum(sizes.values())
            (owner,) = missing
            sizes[owner] = sizes.get(owner, 0) + max(0, rest)
            return sizes
        return {owner: size for owner, size in sizes.items() if owner not in missing}

    def _measure_some(self, connection: sqlite3.Connection, names: list[str]) -> None:
        end = self._steady() + _MEASURE_SECONDS
        # Those that took too long come last, so that they keep nobody from being measured.
        self._next = [name for name in self._next if name in names] or sorted(names, key=self._slow.__contains__)
        connection.set_progress_handler(lambda: self._steady() > end, _PROGRESS_STEPS)
        try:
            while self._next and self._steady() < end:
                name = self._next.pop(0)
                try:
                    ((size,),) = connection.execute(_SELECT_SIZE, (name,)).fetchall()
                    self._known[name] = size or 0
                except sqlite3.OperationalError as error:
                    if error.sqlite_errorcode not in _EXPECTED_ERRORS:
                        raise
                    self._slow.add(name)
        finally:
            connection.set_progress_handler(None, 0)


def _read_pragma(connection: sqlite3.Connection, pragma: str) -> int:
    ((number,),) = connection.execute(f"PRAGMA {pragma}").fetchall()
    return int(number)


T = TypeVar("T")

_log = Logger(namespace="mediatord.store")

# For which a commit may be put off while more comes, where the disk is that slow.
_MAX_COMMIT_DELAY = 0.01
# Seconds between two checks of the file and its disk.
FILE_CHECK_INTERVAL = 1.0


@dataclass(frozen=True, slots=True)
class SQLiteRunners:
    """
    Where the work is done.

    :param survey: for what takes long and hurries nobody, such as checkpoints.
    :param search: for what somebody waits for and others should not wait behind.
    """

    write: JobRunner
    read: JobRunner
    survey: JobRunner
    search: JobRunner


@dataclass(frozen=True, slots=True)
class SQLiteTuning:
    """
    Numbers that only a test has a reason to change.

    :param patience: seconds for which a write waits for another process before it fails.
    """

    max_nonces: int = 1_000_000
    bounds: BatchLimits = BatchLimits()
    read_bounds: BatchLimits = BatchLimits(waiting_bytes=1 << 62)  # what is yet to be read takes no room
    search_bounds: BatchLimits = BatchLimits(batch=1, waiting=64, waiting_bytes=1 << 62)
    wal_cap_bytes: int = MAX_WAL_BYTES
    patience: float = LOCK_TIMEOUT_SECONDS


class SQLiteExecutor:
    """
    Reads and writes, each kind in its own thread; the file is there between open and close.

    :param shared: whether other processes write to the file, so that transactions wait in line.
    :param create: whether to make the file if it is not there.
    :param on_fault: told of what is wrong with the file, see :class:`~mediatord.store.sqlite.database_file.DatabaseFileHealth`.
    :ivar health: of the file.
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
        self._surveying = False
        self._queue = WriteTicketLock(path) if shared else None
        self._clock = clock
        self._observe = observe
        self._writer = ConnectionThread(runners.write)
        self._reader = ConnectionThread(runners.read)
        self._background = ConnectionThread(runners.survey)
        self._search_reader = ConnectionThread(runners.search)
        failed = self.health.failed
        self._writes = OperationBatcher(
            self._writer, self._commit, clock, observe, tuning.bounds, on_fault=failed, max_delay=_MAX_COMMIT_DELAY
        )
        self._reads = OperationBatcher(self._reader, read_batch, clock, observe, tuning.read_bounds, on_fault=failed)
        self._background_reads = OperationBatcher(
            self._background, read_batch, clock, observe, tuning.read_bounds, on_fault=failed
        )
        self._searches = OperationBatcher(
            self._search_reader, read_batch, clock, observe, tuning.search_bounds, on_fault=failed
        )
        self._checkpoints = WALCheckpointer(
            self._background, self._writer, clock, observe, on_fault=failed, cap_bytes=tuning.wal_cap_bytes
        )
        self._changing = DeferredLock()

    @property
    def is_open(self) -> bool:
        return self._writes.accepting

    @property
    def is_readable(self) -> bool:
        """Whether it is open and there."""
        return self._writes.accepting and not self.health.refuses_reading()

    @property
    def held(self) -> tuple[int, int]:
        """How many operations wait for one of the threads, and the bytes that those hold on to that write."""
        entries = [each.held[0] for each in (self._writes, self._reads, self._background_reads, self._searches)]
        return sum(entries), self._writes.held[1]

    def open(self) -> Deferred[None]:
        """:raise StoreUnavailable: it could not be opened; the reason is logged, and trying again may help."""
        return self._changing.run(self._open)

    def close(self) -> Deferred[None]:
        """Refuse more, finish what was accepted, empty the write-ahead log and let go."""
        return self._changing.run(self._close)

    def write(
        self, name: str, work: Callable[[Connection], T], size: int = 0, *, shrinking: bool = False
    ) -> Deferred[T]:
        """
        Fires when what `work` wrote is on disk.

        :param size: bytes that it keeps in memory until then.
        :param shrinking: whether it is done on a full disk although others of its name are not.
        """
        if self.health.faults and self.health.refuses_writing(name, shrinking):
            return fail(StoreUnavailable())
        return self._writes.submit(name, work, size)

    def write_each(
        self,
        name: str,
        works: Sequence[tuple[SQLOperation, int]],
        early: Callable[[int, list[OperationOutcome]], None] | None = None,
    ) -> Deferred[list[OperationOutcome]]:
        """
        Several writes, each with its size; fires when all are on disk, or failed.

        :param early: as for :meth:`~mediatord.store.sqlite.group_commit.OperationBatcher.submit_each`.
        """
        if self.health.faults and self.health.refuses_writing(name, shrinking=False):
            return fail(StoreUnavailable())
        return self._writes.submit_each(name, works, early)

    def read(self, name: str, work: Callable[[Connection], T], size: int = 0) -> Deferred[T]:
        """:param size: bytes that it may read, so that not too many are in memory at the same time."""
        if self.health.faults and self.health.refuses_reading():
            return fail(StoreUnavailable())
        return self._reads.submit(name, work, size)

    def survey(self, name: str, work: Callable[[Connection], T]) -> Deferred[T]:
        """A read that takes so long that others should not wait behind it."""
        if self.health.faults and self.health.refuses_reading():
            return fail(StoreUnavailable())
        return self._background_reads.submit(name, work)

    def search(self, name: str, work: Callable[[Connection], T]) -> Deferred[T]:
        """The same for somebody who waits for it; few may wait at a time, and none is waited for at the end."""

        if self.health.faults and self.health.refuses_reading():
            return fail(StoreUnavailable())

        def unless_closing(connection: Connection) -> T:
            if not self._searches.accepting:
                raise StoreUnavailable()
            return work(connection)

        return self._searches.submit(name, unless_closing)

    def _open(self) -> Deferred[None]:
        if self.is_open:
            return succeed(None)
        opened = self._writer.open(self._first_connection, self._next_connection)
        opened.addCallback(lambda _: self._reader.open(lambda: connect_reader(self._path)))
        opened.addCallback(lambda _: self._background.open(lambda: connect_checkpointer(self._path)))
        opened.addCallback(lambda _: self._search_reader.open(lambda: connect_reader(self._path)))
        return opened.addCallbacks(self._start, self._fail_open)

    def _first_connection(self) -> StoreConnection:
        connection = open_database(self._path, self._clock.seconds(), create=self._create)
        connection.queue = self._queue
        self.health.opened()
        self._space.opened()
        self._survey_space(connection)
        return connection

    def _next_connection(self) -> StoreConnection:
        if self.health.is_lost():
            raise DatabaseFileLost
        connection = reopen_database(self._path)
        connection.queue = self._queue
        return connection

    def _commit(self, connection: Connection, works: Sequence[SQLOperation]) -> list[OperationOutcome]:
        outcomes = commit_batch(connection, works, self._patience)
        if any([is_disk_full_error(outcome.cause) for outcome in outcomes]):
            outcomes = self._commit_again(connection, works, outcomes)
        if self.health.is_lost():
            return [OperationOutcome(error=StoreUnavailable(), cause=DatabaseFileLost()) for _ in outcomes]
        return outcomes

    def _commit_again(
        self, connection: Connection, works: Sequence[SQLOperation], outcomes: Sequence[OperationOutcome]
    ) -> list[OperationOutcome]:
        """Once more what found no room, with the write-ahead log from its beginning, where it need not grow."""
        self._restart_log(connection)
        return [
            commit_batch(connection, [work], self._patience)[0] if is_disk_full_error(outcome.cause) else outcome
            for work, outcome in zip(works, outcomes, strict=True)
        ]

    def _restart_log(self, connection: Connection) -> None:
        """Have the write-ahead log written from its beginning, after waiting for others that read or write."""
        patience = self._patience if self._queue is None else self._queue.enter(self._patience)
        try:
            connection.execute(f"PRAGMA busy_timeout = {round(patience * 1000)}")
            with suppress(sqlite3.Error):
                connection.execute("PRAGMA wal_checkpoint(RESTART)").fetchall()
            connection.execute("PRAGMA busy_timeout = 0")
        finally:
            if self._queue is not None:
                self._queue.leave()

    def _check_file(self) -> None:
        """Check the file and its disk, again and again."""
        self._timer = self._clock.callLater(FILE_CHECK_INTERVAL, self._check_file)
        self.health.check()
        if not self._surveying:
            self._surveying = True
            shorter = self.health.is_shorter and "damaged" not in self.health.faults
            surveyed = self._background.run(partial(self._survey, shorter=shorter))
            surveyed.addCallback(self._check_done).addErrback(self._check_failed)

    def _check_done(self, examined: tuple[int, list[str]] | None) -> None:
        self._surveying = False
        if examined is not None:
            self.health.examined(*examined)

    def _check_failed(self, failure: Failure) -> None:
        self._surveying = False
        self.health.failed(failure.value)

    def _survey(self, connection: Connection, *, shorter: bool) -> tuple[int, list[str]] | None:
        """Look at the space; in a file that is shorter, for damage. :return: its size and what is wrong in it."""
        self._survey_space(connection)
        self._space.provide()
        if not shorter:
            return None
        size = self._path.stat().st_size
        # What another connection remembers of the file may not be there any longer.
        with closing(connect_reader(self._path)) as fresh:
            return size, check_structure(fresh, STARTUP_CHECK_SECONDS)

    def _survey_space(self, connection: Connection) -> None:
        ((pages,),) = connection.execute("PRAGMA freelist_count").fetchall()
        ((page_size,),) = connection.execute("PRAGMA page_size").fetchall()
        self._space.reusable(pages * page_size)

    def _start(self, _: None) -> None:
        self._writes.start(after_batch=self._committed)
        self._reads.start()
        self._background_reads.start()
        self._searches.start()
        self.health.check()
        self._timer = self._clock.callLater(FILE_CHECK_INTERVAL, self._check_file)

    def _committed(self, seconds: float) -> None:
        self._observe("commit", seconds)
        self._checkpoints.committed()

    def _fail_open(self, failure: Failure) -> Deferred[None]:
        # Nothing of what peers sent can be in this text: it is about the file.
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
        drained = gatherResults(ends)
        emptied = drained.addCallback(lambda _: self._checkpoints.stop())
        return emptied.addCallback(lambda _: self._close_connections())

    def _close_connections(self) -> Deferred[None]:
        self.health.closed()
        gone = self._reader.close()
        gone.addCallback(lambda _: self._background.close())
        gone.addCallback(lambda _: self._search_reader.close())
        gone.addCallback(lambda _: self._writer.close())
        return gone.addCallback(self._closed)

    def _closed(self, _: None) -> None:
        self._space.closed()
        if self._queue is not None:
            self._queue.close()
