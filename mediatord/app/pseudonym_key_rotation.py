"""New keys for the tags of the event log, from time to time."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, date, datetime
from pathlib import Path

from twisted.application.service import Service
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.logger import Logger

from mediatord.observability.event_log import EventLogWriter
from mediatord.observability.pseudonyms import Pseudonymizer, renew_pseudonym_key
from mediatord.private_file import PrivateFileError

_log = Logger()

_DAY_SECONDS = 86_400.0
# Seconds: a timer keeps the time that it has left when the clock is set.
_MAX_WAIT = 3_600.0


def log_failed_renewal(reason: str) -> None:
    """Tell the operator that the pseudonym key could not be renewed."""
    _log.error("the key of the event log stays the same: {reason}", reason=reason)


def to_utc_day(seconds: float) -> date:
    """The day (UTC) of a time."""
    return datetime.fromtimestamp(seconds, UTC).date()


class PseudonymKeyRotation(Service):
    """
    Looks at midnight UTC whether tags are to be made with another key from now on.

    :param path: of `log.key`.
    :param days: that an epoch lasts, 0 for ever.
    """

    name = "log key"

    def __init__(
        self, clock: IReactorTime, path: Path, tags: Pseudonymizer, events: EventLogWriter, days: Callable[[], int]
    ) -> None:
        self._clock = clock
        self._path = path
        self._tags = tags
        self._events = events
        self._days = days
        self._timer: IDelayedCall | None = None
        self._checked_day = date.min

    def startService(self) -> None:
        """Begin to look; the present key was looked at just now."""
        super().startService()
        self._checked_day = to_utc_day(self._clock.seconds())
        self._schedule()

    def stopService(self) -> None:
        """Look no more."""
        super().stopService()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def rotate_if_due(self) -> None:
        """
        Go by the key of the present epoch, and begin a segment of the event log with it if it is another one.

        Where there is no key, or another one of the same epoch, the one that is in use stays.
        """
        try:
            key = renew_pseudonym_key(self._path, to_utc_day(self._clock.seconds()), self._days(), log_failed_renewal)
        except PrivateFileError as error:
            log_failed_renewal(str(error))
            return
        if key.epoch != self._tags.epoch:
            self._tags.set_key(key)
            self._events.set_key_epoch(key.epoch)
        elif key != self._tags.key:
            _log.warn(
                "{path} has another key of epoch {epoch} than the one in use, which stays until a restart",
                path=self._path,
                epoch=key.epoch,
            )

    def _schedule(self) -> None:
        remaining = _DAY_SECONDS - self._clock.seconds() % _DAY_SECONDS
        self._timer = self._clock.callLater(min(remaining, _MAX_WAIT), self._check_day)

    def _check_day(self) -> None:
        self._schedule()
        today = to_utc_day(self._clock.seconds())
        if today != self._checked_day:
            self._checked_day = today
            self.rotate_if_due()
