"""Failures as they may be logged: where and what kind, without what the exception says."""

from __future__ import annotations

from twisted.python.failure import Failure


def without_text(failure: Failure | None = None) -> Failure:
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
