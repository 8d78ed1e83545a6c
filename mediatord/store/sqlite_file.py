"""The database file with the threads that work on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from sqlite3 import Connection
from typing import TypeVar

from twisted.internet.defer import Deferred, DeferredLock, gatherResults, succeed
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure

from mediatord.errors import StoreUnavailable
from mediatord.store.batches import Batches, Bounds, Observer
from mediatord.store.checkpoints import Checkpoints
from mediatord.store.database import WAL_CAP_BYTES, connect_for_checkpoints, connect_for_reading, open_database
from mediatord.store.group_commit import Outcome, Work, commit_together, read_together
from mediatord.store.locking import PATIENCE_SECONDS
from mediatord.store.threads import ConnectionThread, Runner

T = TypeVar("T")

_log = Logger(namespace="mediatord.store")

# For which a commit may be put off while more comes, where the disk is that slow.
_GATHER_SECONDS = 0.01


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
    """Reads and writes, each kind in its own thread; the file is there between open and close."""

    def __init__(self, path: Path, clock: IReactorTime, runners: Runners, observe: Observer, tuning: Tuning) -> None:
        self._path = path
        self._clock = clock
        self._observe = observe
        self._writer = ConnectionThread(runners.write)
        self._reader = ConnectionThread(runners.read)
        self._surveyor = ConnectionThread(runners.survey)
        self._searcher = ConnectionThread(runners.search)
        committing = partial(commit_together, patience=tuning.patience)
        self._writes = Batches(self._writer, committing, clock, observe, tuning.bounds, gather=_GATHER_SECONDS)
        self._reads = Batches(self._reader, read_together, clock, observe, tuning.read_bounds)
        self._surveys = Batches(self._surveyor, read_together, clock, observe, tuning.read_bounds)
        self._searches = Batches(self._searcher, read_together, clock, observe, tuning.search_bounds)
        self._checkpoints = Checkpoints(self._surveyor, self._writer, clock, observe, cap_bytes=tuning.wal_cap_bytes)
        self._changing = DeferredLock()

    @property
    def is_open(self) -> bool:
        return self._writes.accepting

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

    def write(self, name: str, work: Callable[[Connection], T], size: int = 0) -> Deferred[T]:
        """Fires when what `work` wrote is on disk. :param size: bytes that it keeps in memory until then."""
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
        return self._writes.submit_each(name, works, early)

    def read(self, name: str, work: Callable[[Connection], T], size: int = 0) -> Deferred[T]:
        """:param size: bytes that it may read, so that not too many are in memory at the same time."""
        return self._reads.submit(name, work, size)

    def survey(self, name: str, work: Callable[[Connection], T]) -> Deferred[T]:
        """A read that takes so long that others should not wait behind it."""
        return self._surveys.submit(name, work)

    def search(self, name: str, work: Callable[[Connection], T]) -> Deferred[T]:
        """The same for somebody who waits for it; few may wait at a time, and none is waited for at the end."""

        def unless_closing(connection: Connection) -> T:
            if not self._searches.accepting:
                raise StoreUnavailable()
            return work(connection)

        return self._searches.submit(name, unless_closing)

    def _open(self) -> Deferred[None]:
        if self.is_open:
            return succeed(None)
        opened = self._writer.open(lambda: open_database(self._path, self._clock.seconds()))
        opened.addCallback(lambda _: self._reader.open(lambda: connect_for_reading(self._path)))
        opened.addCallback(lambda _: self._surveyor.open(lambda: connect_for_checkpoints(self._path)))
        opened.addCallback(lambda _: self._searcher.open(lambda: connect_for_reading(self._path)))
        return opened.addCallbacks(self._start, self._give_up)

    def _start(self, _: None) -> None:
        self._writes.start(after_batch=self._committed)
        self._reads.start()
        self._surveys.start()
        self._searches.start()

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
        ends = [self._writes.stop(), self._reads.stop(), self._surveys.stop(), self._searches.stop()]
        self._searcher.interrupt()
        drained = gatherResults(ends)
        emptied = drained.addCallback(lambda _: self._checkpoints.stop())
        return emptied.addCallback(lambda _: self._let_go())

    def _let_go(self) -> Deferred[None]:
        gone = self._reader.close()
        gone.addCallback(lambda _: self._surveyor.close())
        gone.addCallback(lambda _: self._searcher.close())
        return gone.addCallback(lambda _: self._writer.close())
