"""Moving what was committed from the write-ahead log into the database, out of everybody's way."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from time import monotonic, sleep

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.python.failure import Failure

from mediatord.store.batches import Observer, log_fault
from mediatord.store.database import WAL_CAP_BYTES
from mediatord.store.threads import ConnectionThread

INTERVAL_SECONDS = 0.5
# While it waits for readers nobody can write: so it waits for a short time only, again and again with pauses between.
EMPTYING_SECONDS = 2.0
PAUSE_SECONDS = 0.01
# Beyond this the log is to begin at its start again.
REUSE_BYTES = 4_194_304
# While others write there is always something new, so it is tried a few times only to leave little to the writer.
_PASSES = 3
_LITTLE = 64


class Checkpoints:
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
        observe: Observer,
        *,
        on_fault: Callable[[BaseException], None] = lambda error: None,
        cap_bytes: int = WAL_CAP_BYTES,
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
            self._timer = self._clock.callLater(INTERVAL_SECONDS, self._run)

    def stop(self) -> Deferred[None]:
        """Fires after a last one that empties the log; there must be no more commits."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        # The thread does one thing after another, so this waits for a checkpoint that is under way.
        return self._thread.run(_empty).addCallbacks(lambda _: None, self._failed)

    def _run(self) -> None:
        self._timer = None
        begun = self._clock.seconds()
        done = self._thread.run(self._checkpoint).addCallback(self._reuse)
        done.addCallbacks(lambda _: self._observe("checkpoint", self._clock.seconds() - begun), self._failed)

    def _checkpoint(self, connection: sqlite3.Connection) -> int:
        """Bytes that the log has when it is over."""
        for _ in range(_PASSES):
            pages, moved = _move(connection)
            if pages - moved <= _LITTLE:
                break
        (page_size,) = connection.execute("PRAGMA page_size").fetchone()
        end = monotonic() + EMPTYING_SECONDS
        while pages * page_size > self._cap_bytes:
            pages = _empty(connection)
            if monotonic() >= end:
                break
            sleep(PAUSE_SECONDS)
        return int(pages * page_size)

    def _reuse(self, size: int) -> Deferred[tuple[int, int]] | None:
        return self._writer.run(_move) if size > REUSE_BYTES else None

    def _failed(self, failure: Failure) -> None:
        log_fault("a checkpoint failed", failure.value)
        if failure.value is not None:
            self._on_fault(failure.value)


def _move(connection: sqlite3.Connection) -> tuple[int, int]:
    """How many pages are in the log, and how many of them in the database as well."""
    _busy, pages, moved = connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
    return pages, moved


def _empty(connection: sqlite3.Connection) -> int:
    """How many pages are in the log after that: none, unless others were in the way for longer than we wait."""
    _busy, pages, _moved = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    return int(pages)
