"""The database file with the threads that work on it."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from sqlite3 import Connection
from typing import TypeVar

from twisted.internet.defer import Deferred, DeferredLock, fail, gatherResults, succeed
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure

from mediatord.errors import StoreUnavailable
from mediatord.interfaces.store import Fault
from mediatord.store.batches import Batches, Bounds, Observer
from mediatord.store.checkpoints import Checkpoints
from mediatord.store.database import (
    WAL_CAP_BYTES,
    connect_for_checkpoints,
    connect_for_reading,
    open_database,
    reopen_database,
)
from mediatord.store.database_check import START_SECONDS, quick_check
from mediatord.store.disk_space import DiskSpace, SpaceLimits
from mediatord.store.file_health import FileHealth, FileLost, shows_full
from mediatord.store.group_commit import Outcome, Work, commit_together, read_together
from mediatord.store.known_queues import StoreConnection
from mediatord.store.locking import PATIENCE_SECONDS
from mediatord.store.threads import ConnectionThread, Runner
from mediatord.store.writer_queue import WriterQueue

T = TypeVar("T")

_log = Logger(namespace="mediatord.store")

# For which a commit may be put off while more comes, where the disk is that slow.
_GATHER_SECONDS = 0.01
# Seconds between two checks of the file and its disk.
CHECK_INTERVAL = 1.0


@dataclass(frozen=True, slots=True)
class Runners:
    """
    Where the work is done.

    :param survey: for what takes long and hurries nobody, such as checkpoints.
    :param search: for what somebody waits for and others should not wait behind.
    """

    write: Runner
    read: Runner
    survey: Runner
    search: Runner


@dataclass(frozen=True, slots=True)
class Tuning:
    """
    Numbers that only a test has a reason to change.

    :param patience: seconds for which a write waits for another process before it fails.
    """

    max_nonces: int = 1_000_000
    bounds: Bounds = Bounds()
    read_bounds: Bounds = Bounds(waiting_bytes=1 << 62)  # what is yet to be read takes no room
    search_bounds: Bounds = Bounds(batch=1, waiting=64, waiting_bytes=1 << 62)
    wal_cap_bytes: int = WAL_CAP_BYTES
    patience: float = PATIENCE_SECONDS


class SQLiteFile:
    """
    Reads and writes, each kind in its own thread; the file is there between open and close.

    :param shared: whether other processes write to the file, so that transactions wait in line.
    :param create: whether to make the file if it is not there.
    :param on_fault: told of what is wrong with the file, see :class:`~mediatord.store.file_health.FileHealth`.
    :ivar health: of the file.
    """

    def __init__(
        self,
        path: Path,
        clock: IReactorTime,
        runners: Runners,
        observe: Observer,
        tuning: Tuning,
        *,
        shared: bool = False,
        create: bool = True,
        space_limits: SpaceLimits = SpaceLimits(),  # noqa: B008  it is frozen
        on_fault: Callable[[Fault, bool], None] = lambda fault, present: None,
    ) -> None:
        self._path = path
        self._create = create
        self._space = DiskSpace(path, space_limits)
        self.health = FileHealth(path, self._space, on_fault)
        self._patience = tuning.patience
        self._timer: IDelayedCall | None = None
        self._surveying = False
        self._queue = WriterQueue(path) if shared else None
        self._clock = clock
        self._observe = observe
        self._writer = ConnectionThread(runners.write)
        self._reader = ConnectionThread(runners.read)
        self._surveyor = ConnectionThread(runners.survey)
        self._searcher = ConnectionThread(runners.search)
        failed = self.health.failed
        self._writes = Batches(
            self._writer, self._commit, clock, observe, tuning.bounds, on_fault=failed, gather=_GATHER_SECONDS
        )
        self._reads = Batches(self._reader, read_together, clock, observe, tuning.read_bounds, on_fault=failed)
        self._surveys = Batches(self._surveyor, read_together, clock, observe, tuning.read_bounds, on_fault=failed)
        self._searches = Batches(self._searcher, read_together, clock, observe, tuning.search_bounds, on_fault=failed)
        self._checkpoints = Checkpoints(
            self._surveyor, self._writer, clock, observe, on_fault=failed, cap_bytes=tuning.wal_cap_bytes
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
        entries = [each.held[0] for each in (self._writes, self._reads, self._surveys, self._searches)]
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
        works: Sequence[tuple[Work, int]],
        early: Callable[[int, list[Outcome]], None] | None = None,
    ) -> Deferred[list[Outcome]]:
        """
        Several writes, each with its size; fires when all are on disk, or failed.

        :param early: as for :meth:`~mediatord.store.batches.Batches.submit_each`.
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
        return self._surveys.submit(name, work)

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
        opened.addCallback(lambda _: self._reader.open(lambda: connect_for_reading(self._path)))
        opened.addCallback(lambda _: self._surveyor.open(lambda: connect_for_checkpoints(self._path)))
        opened.addCallback(lambda _: self._searcher.open(lambda: connect_for_reading(self._path)))
        return opened.addCallbacks(self._start, self._give_up)

    def _first_connection(self) -> StoreConnection:
        connection = open_database(self._path, self._clock.seconds(), create=self._create)
        connection.queue = self._queue
        self.health.opened()
        self._space.opened()
        self._survey_space(connection)
        return connection

    def _next_connection(self) -> StoreConnection:
        if self.health.is_lost():
            raise FileLost
        connection = reopen_database(self._path)
        connection.queue = self._queue
        return connection

    def _commit(self, connection: Connection, works: Sequence[Work]) -> list[Outcome]:
        outcomes = commit_together(connection, works, self._patience)
        if any([shows_full(outcome.cause) for outcome in outcomes]):
            outcomes = self._commit_again(connection, works, outcomes)
        if self.health.is_lost():
            return [Outcome(error=StoreUnavailable(), cause=FileLost()) for _ in outcomes]
        return outcomes

    def _commit_again(
        self, connection: Connection, works: Sequence[Work], outcomes: Sequence[Outcome]
    ) -> list[Outcome]:
        """Once more what found no room, with the write-ahead log from its beginning, where it need not grow."""
        self._restart_log(connection)
        return [
            commit_together(connection, [work], self._patience)[0] if shows_full(outcome.cause) else outcome
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
        self._timer = self._clock.callLater(CHECK_INTERVAL, self._check_file)
        self.health.check()
        if not self._surveying:
            self._surveying = True
            shorter = self.health.is_shorter and "damaged" not in self.health.faults
            surveyed = self._surveyor.run(partial(self._survey, shorter=shorter))
            surveyed.addCallback(self._surveyed).addErrback(self._not_surveyed)

    def _surveyed(self, examined: tuple[int, list[str]] | None) -> None:
        self._surveying = False
        if examined is not None:
            self.health.examined(*examined)

    def _not_surveyed(self, failure: Failure) -> None:
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
        with closing(connect_for_reading(self._path)) as fresh:
            return size, quick_check(fresh, START_SECONDS)

    def _survey_space(self, connection: Connection) -> None:
        ((pages,),) = connection.execute("PRAGMA freelist_count").fetchall()
        ((page_size,),) = connection.execute("PRAGMA page_size").fetchall()
        self._space.reusable(pages * page_size)

    def _start(self, _: None) -> None:
        self._writes.start(after_batch=self._committed)
        self._reads.start()
        self._surveys.start()
        self._searches.start()
        self.health.check()
        self._timer = self._clock.callLater(CHECK_INTERVAL, self._check_file)

    def _committed(self, seconds: float) -> None:
        self._observe("commit", seconds)
        self._checkpoints.committed()

    def _give_up(self, failure: Failure) -> Deferred[None]:
        # Nothing of what peers sent can be in this text: it is about the file.
        _log.error("cannot open the store: {reason}", event="store.refused", reason=failure.getErrorMessage())

        def refuse(_: None) -> None:
            raise StoreUnavailable() from failure.value

        return self._let_go().addCallback(refuse)

    def _close(self) -> Deferred[None]:
        if not self.is_open:
            return succeed(None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        ends = [self._writes.stop(), self._reads.stop(), self._surveys.stop(), self._searches.stop()]
        self._searcher.interrupt()
        drained = gatherResults(ends)
        emptied = drained.addCallback(lambda _: self._checkpoints.stop())
        return emptied.addCallback(lambda _: self._let_go())

    def _let_go(self) -> Deferred[None]:
        self.health.closed()
        gone = self._reader.close()
        gone.addCallback(lambda _: self._surveyor.close())
        gone.addCallback(lambda _: self._searcher.close())
        gone.addCallback(lambda _: self._writer.close())
        return gone.addCallback(self._closed)

    def _closed(self, _: None) -> None:
        self._space.closed()
        if self._queue is not None:
            self._queue.close()
