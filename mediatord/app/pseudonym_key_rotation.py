"""Rotation of pseudonym keys: a new key when an epoch ends, which is checked at midnight UTC."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, date, datetime
from pathlib import Path

from twisted.application.service import Service
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.logger import Logger

from mediatord.observability.event_log import EventLogWriter
from mediatord.observability.pseudonyms import Pseudonymizer, renew_pseudonym_key
from mediatord.runtime.secret_files import SecretFileError

_log = Logger()


_DAY_SECONDS = 86_400.0
# Seconds. A timer ignores changes of the wall clock, so longer waits are split.
_MAX_WAIT = 3_600.0


def to_utc_day(seconds: float) -> date:
    """The UTC date of a POSIX timestamp."""
    return datetime.fromtimestamp(seconds, UTC).date()


def log_failed_renewal(reason: str) -> None:
    """Log why the pseudonym key was not renewed."""
    _log.error("keeping the current pseudonym key: {reason}", reason=reason)


class PseudonymKeyRotation(Service):
    """
    Switches the event log to a new pseudonym key when a key epoch ends; checks once a day, at midnight UTC.

    :param path: of `log.key`.
    :param epoch_days: length of an epoch in days; 0 means that it never ends.
    """

    name = "pseudonym key rotation"

    def __init__(
        self,
        clock: IReactorTime,
        path: Path,
        pseudonymizer: Pseudonymizer,
        events: EventLogWriter,
        epoch_days: Callable[[], int],
    ) -> None:
        self._clock = clock
        self._path = path
        self._pseudonymizer = pseudonymizer
        self._events = events
        self._epoch_days = epoch_days
        self._timer: IDelayedCall | None = None
        self._checked_day = date.min

    def startService(self) -> None:
        """Start the daily check; the current key was checked when it was loaded."""
        super().startService()
        self._checked_day = to_utc_day(self._clock.seconds())
        self._schedule()

    def stopService(self) -> None:
        """Stop the daily check."""
        super().stopService()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def rotate_if_due(self) -> None:
        """
        Use the key of the current epoch, in a new segment of the event log if the epoch has changed.

        The key in use stays if there is no key file, or if the file has another key for the same epoch.
        """
        try:
            key = renew_pseudonym_key(
                self._path, to_utc_day(self._clock.seconds()), self._epoch_days(), log_failed_renewal
            )
        except SecretFileError as error:
            log_failed_renewal(str(error))
            return
        if key.epoch != self._pseudonymizer.epoch:
            self._pseudonymizer.set_key(key)
            self._events.set_key_epoch(key.epoch)
        elif key != self._pseudonymizer.key:
            _log.warn(
                "{path} has a different key for epoch {epoch}; keeping the key in use until a restart",
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
