"""Having the store mark messages as pushed, when it is worth a write."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.logger import Logger

from mediatord.deadline import on_its_own
from mediatord.errors import StoreUnavailable
from mediatord.faults import without_text

_log = Logger()

# How long a push may wait to be marked in the store. One that is acknowledged before that is never marked.
MARK_SECONDS = 1.0
# Pushes that are marked at once when there are so many.
MAX_MARKS = 1000


class Marks:
    """
    Has the store mark messages as delivered.

    The mark is for operators, for counters and for other nodes. Where there are none of those, it waits a little:
    nearly every push is acknowledged before it would have been worth a write.

    :param write: `mark_delivered` of the store.
    :param patience: seconds that a mark may wait.
    """

    def __init__(
        self, clock: IReactorTime, write: Callable[[Sequence[str]], Deferred[None]], patience: float
    ) -> None:
        self._clock = clock
        self._write = write
        self._patience = patience
        self._waiting: dict[str, None] = {}
        self._timer: IDelayedCall | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, id_: str) -> None:
        """A message was pushed."""
        self._waiting[id_] = None
        if not self._patience or len(self._waiting) >= MAX_MARKS:
            self._flush()
        elif self._timer is None:
            self._timer = self._clock.callLater(self._patience, self._flush)

    def take_back(self, id_: str) -> bool:
        """There is nothing to be marked any more; whether it had been left unmarked so far."""
        if id_ not in self._waiting:
            return False
        del self._waiting[id_]
        if not self._waiting:
            self._stop()
        return True

    def _flush(self) -> None:
        ids = list(self._waiting)
        self._waiting.clear()
        self._stop()
        with on_its_own():
            watch(self._write(ids))

    def _stop(self) -> None:
        if self._timer is not None and self._timer.active():
            self._timer.cancel()
        self._timer = None


def watch(done: Deferred[None]) -> None:
    """The mark is for operators and counters; the message itself is safe without it."""

    def failed(failure: object) -> None:
        _log.warn("the store did not take a delivery mark")

    done.addErrback(lambda failure: failed(failure) if failure.check(StoreUnavailable) else failure)
    done.addErrback(lambda failure: _log.failure("marking a delivery failed", without_text(failure)))
