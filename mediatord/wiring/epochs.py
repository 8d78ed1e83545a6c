"""New keys for the tags of the event log, from time to time."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, date, datetime
from pathlib import Path

from twisted.application.service import Service
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.logger import Logger

from mediatord.eventlog.logs import EventFile
from mediatord.private_file import PrivateFileError
from mediatord.tag_keys import renewed_tag_key
from mediatord.tags import Tags

_log = Logger()

_DAY = 86_400.0
# Seconds: a timer keeps the time that it has left when the clock is set.
_LONGEST_WAIT = 3_600.0


def day_of(seconds: float) -> date:
    """The day (UTC) of a time."""
    return datetime.fromtimestamp(seconds, UTC).date()


class Epochs(Service):
    """
    Looks at midnight UTC whether tags are to be made with another key from now on.

    :param path: of `log.key`.
    :param days: that an epoch lasts, 0 for ever.
    """

    name = "log key"

    def __init__(
        self, clock: IReactorTime, path: Path, tags: Tags, events: EventFile, days: Callable[[], int]
    ) -> None:
        self._clock = clock
        self._path = path
        self._tags = tags
        self._events = events
        self._days = days
        self._timer: IDelayedCall | None = None
        self._looked = date.min

    def startService(self) -> None:
        """Begin to look; the present key was looked at just now."""
        super().startService()
        self._looked = day_of(self._clock.seconds())
        self._wait()

    def stopService(self) -> None:
        """Look no more."""
        super().stopService()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def look(self) -> None:
        """
        Go by the key of the present epoch, and begin a segment of the event log with it if it is another one.

        Where there is no key, or another one of the same epoch, the one that is in use stays.
        """
        try:
            key = renewed_tag_key(self._path, day_of(self._clock.seconds()), self._days())
        except PrivateFileError as error:
            _log.error("the key of the event log stays the same: {reason}", reason=str(error))
            return
        if key.epoch != self._tags.epoch:
            self._tags.use(key)
            self._events.use_epoch(key.epoch)
        elif key != self._tags.key:
            _log.warn(
                "{path} has another key of epoch {epoch} than the one in use, which stays until a restart",
                path=self._path,
                epoch=key.epoch,
            )

    def _wait(self) -> None:
        left = _DAY - self._clock.seconds() % _DAY
        self._timer = self._clock.callLater(min(left, _LONGEST_WAIT), self._again)

    def _again(self) -> None:
        self._wait()
        today = day_of(self._clock.seconds())
        if today != self._looked:
            self._looked = today
            self.look()
