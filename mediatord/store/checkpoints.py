"""Moving what was committed from the write-ahead log into the database, out of everybody's way."""

from __future__ import annotations

import sqlite3
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


class Checkpoints:
    """
    A passive checkpoint some time after the first of several commits, in a thread of its own.

    A passive one waits for nobody, so under a long reader, or when several processes write all the time, the log
    keeps growing; past `cap_bytes` one follows that waits for readers and writers and empties it.
    """

    def __init__(
        self, thread: ConnectionThread, clock: IReactorTime, observe: Observer, *, cap_bytes: int = WAL_CAP_BYTES
    ) -> None:
        self._thread = thread
        self._clock = clock
        self._observe = observe
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
        done = self._thread.run(self._checkpoint)
        done.addCallbacks(lambda _: self._observe("checkpoint", self._clock.seconds() - begun), self._failed)

    def _checkpoint(self, connection: sqlite3.Connection) -> None:
        _busy, pages, _moved = connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        (page_size,) = connection.execute("PRAGMA page_size").fetchone()
        end = monotonic() + EMPTYING_SECONDS
        while pages * page_size > self._cap_bytes:
            pages = _empty(connection)
            if monotonic() >= end:
                break
            sleep(PAUSE_SECONDS)

    def _failed(self, failure: Failure) -> None:
        log_fault("a checkpoint failed", failure.value)


def _empty(connection: sqlite3.Connection) -> int:
    """How many pages are in the log after that: none, unless others were in the way for longer than we wait."""
    _busy, pages, _moved = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    return int(pages)
