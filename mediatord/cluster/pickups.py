"""Lets other nodes know what recipients have got by pickup, so that it is not pushed to them as well."""

from __future__ import annotations

from collections.abc import Sequence

from twisted.logger import Logger
from twisted.python.failure import Failure

from mediatord.deadline import on_its_own
from mediatord.errors import StoreUnavailable
from mediatord.faults import without_text
from mediatord.interfaces import IClusterStore

_log = Logger()


class PickupRecorder:
    """
    Waits for nothing and never fails: without a record, a message comes once more.

    :param period: seconds after which what was not acknowledged may be pushed.
    """

    def __init__(self, store: IClusterStore, period: float) -> None:
        self._store = store
        self._period = period

    def __call__(self, ids: Sequence[str]) -> None:
        """These have been handed out."""
        if ids:
            with on_its_own():
                self._store.record_pickups(ids, self._period).addErrback(_not_recorded)


def _not_recorded(failure: Failure) -> None:
    if failure.check(StoreUnavailable):
        _log.warn("the store did not take a record of pickups")
    else:
        _log.failure("recording pickups failed", without_text(failure))
