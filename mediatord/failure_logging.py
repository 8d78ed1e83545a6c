"""Failures as they may be logged: where and what kind, without what the exception says, and not over and over."""

from __future__ import annotations

from math import inf

from twisted.internet.interfaces import IReactorTime
from twisted.python.failure import Failure


def redact_failure(failure: Failure | None = None) -> Failure:
    """
    The same failure with a bare exception of the same type, because a library may have put what it was given, part
    of an envelope or a key, into its text.

    :param failure: the exception being handled unless given.
    """
    failure = failure or Failure()
    kind: type[BaseException] = failure.type or Exception
    try:
        bare = kind.__new__(kind)
    except TypeError:  # it cannot be made without arguments
        kind, bare = Exception, Exception(kind.__name__)
    return Failure(bare, kind, failure.getTracebackObject())


def release_traceback(error: BaseException) -> None:
    """
    Drop the traceback of an exception that was handled, and the exceptions it came from.

    A frame that has the exception in a variable makes a reference cycle of everything in all of these frames, such as
    the request that was refused: only the garbage collector would free it.
    """
    error.__traceback__ = error.__context__ = error.__cause__ = None


# A warning is not repeated for so many seconds.
LOG_THROTTLE_SECONDS = 60.0


class LogThrottle:
    """Says how often something has happened, when it is time to speak of it again."""

    def __init__(self, clock: IReactorTime, pause: float = LOG_THROTTLE_SECONDS) -> None:
        self._clock = clock
        self._pause = pause
        self._said = -inf
        self._count = 0

    def count_occurrence(self) -> int:
        """It has happened once more: how often since it was spoken of; 0 when that is not to be said now."""
        self._count += 1
        now = self._clock.seconds()
        if 0.0 <= now - self._said < self._pause:
            return 0
        self._said = now
        count, self._count = self._count, 0
        return count
