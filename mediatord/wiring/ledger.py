"""What the store's own books say, told to the log: at the start, every minute, and at the end."""

from __future__ import annotations

from collections.abc import Callable

from twisted.application.service import Service
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.defer import TimeoutError as DeferredTimeout
from twisted.logger import Logger
from twisted.python.failure import Failure

from mediatord.errors import StoreUnavailable
from mediatord.faults import without_text
from mediatord.wiring.base import Base

_log = Logger()

# Seconds that the last look may take: whoever stops the daemon does not wait for figures.
_LAST_LOOK = 2.0


async def tell_ledger(base: Base) -> None:
    """
    Read the books and say what they say.

    :raise StoreUnavailable: they could not be read.
    """
    base.journal.ledger(base.store_name, await base.store.ledger())


class FirstAndLast(Service):
    """
    Tells of the books when the store was opened, and when nothing is done with it any more: of what the log says
    between the two nothing is missing in either.

    It is stopped before the store is closed, and after all that uses it.

    :param opened: told as well when the store is open.
    """

    name = "ledger"

    def __init__(self, base: Base, opened: Callable[[], None] = lambda: None) -> None:
        self._base = base
        self._opened = opened
        self._is_open = False

    def store_opened(self) -> None:
        """The store is open."""
        if not self._is_open:
            self._is_open = True
            self._tell()
        self._opened()

    def stopService(self) -> Deferred[None]:
        """Fires when the last line is written, or it is no use to wait for it."""
        super().stopService()
        return self._tell()

    def _tell(self) -> Deferred[None]:
        looking = Deferred.fromCoroutine(tell_ledger(self._base))
        looking.addTimeout(_LAST_LOOK, self._base.reactor)
        return looking.addErrback(_not_told)


def _not_told(failure: Failure) -> None:
    """That the store is away is said elsewhere."""
    if not failure.check(StoreUnavailable, DeferredTimeout, CancelledError):
        _log.failure("reading the books of the store failed", without_text(failure))
