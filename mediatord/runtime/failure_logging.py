"""Logging of failures without exception texts, and throttling of repeated warnings."""

from __future__ import annotations

from math import inf

from twisted.internet.interfaces import IReactorTime
from twisted.python.failure import Failure


def redact_failure(failure: Failure | None = None) -> Failure:
    """
    Replace the exception of a failure with a bare one of the same type; libraries may put envelopes or keys into
    texts.

    :param failure: default: the exception being handled.
    """
    failure = failure or Failure()
    kind: type[BaseException] = failure.type or Exception
    try:
        bare = kind.__new__(kind)
    except TypeError:  # the exception class requires arguments
        kind, bare = Exception, Exception(kind.__name__)
    return Failure(bare, kind, failure.getTracebackObject())


# Seconds between two warnings of the same kind.
LOG_THROTTLE_SECONDS = 60.0


class LogThrottle:
    """Decides when a recurring event is to be logged, and counts what was suppressed in between."""

    def __init__(self, clock: IReactorTime, pause: float = LOG_THROTTLE_SECONDS) -> None:
        self._clock = clock
        self._pause = pause
        self._said = -inf
        self._count = 0

    def count_occurrence(self) -> int:
        """Count one occurrence; the number since the last warning if a warning is due now, else 0."""
        self._count += 1
        now = self._clock.seconds()
        if 0.0 <= now - self._said < self._pause:
            return 0
        self._said = now
        count, self._count = self._count, 0
        return count
