"""
What a server's reply means.

Texts of a server are never kept: they repeat keys, and sometimes documents. A code and its name say as much.

What is logged of operations that failed.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from bson.errors import BSONError
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger

from mediatord.errors import MediatorError

# The server is shutting down, or is not the primary (any more).
NOT_PRIMARY_CODES = frozenset({91, 189, 10058, 10107, 11600, 11602, 13435, 13436})
# The same command may succeed a moment later: network faults between servers, locks, interruptions.
_RETRYABLE_CODES = frozenset({6, 7, 24, 64, 89, 112, 133, 134, 246, 262, 9001, 11601}) | NOT_PRIMARY_CODES
_WRITE_CONFLICT_CODES = frozenset({24, 112})
_CURSOR_LOST_CODES = frozenset({43, 237})
_AUTHENTICATION_FAILED = 18
_UNAUTHORIZED_CODES = frozenset({13, _AUTHENTICATION_FAILED})
_DUPLICATE_KEY_CODES = frozenset({11000, 11001, 12582})
_MAX_TIME_EXPIRED = 50
_NO_SUCH_TRANSACTION = 251

# Raised before anything is sent: texts that are no Unicode, numbers that are too large. Their texts show what it was.
ENCODING_ERRORS = (BSONError, UnicodeEncodeError, OverflowError)

_DUPLICATE_INDEX_PATTERN = re.compile(r" collection: [^.\s]+\.(\S+) index: (\S+) dup key")


class ServerUnreachable(Exception):
    """
    No answer: no connection to a primary, or it was lost, or time is up.

    :param connected: whether there was somebody to ask.
    """

    def __init__(self, reason: str, *, connected: bool = True) -> None:
        super().__init__(reason)
        self.connected = connected


class MongoCommandError(Exception):
    """
    The server said no.

    :param labels: those of the protocol, such as `TransientTransactionError`.
    """

    def __init__(self, code: int, name: str, labels: Collection[str] = ()) -> None:
        super().__init__(f"{code} {name}".rstrip())
        self.code = code
        self.labels = frozenset(labels)

    @property
    def is_retryable(self) -> bool:
        """Whether the same command may succeed in a moment, by itself or as the beginning of a transaction."""
        return (
            self.code in _RETRYABLE_CODES or self.code in _CURSOR_LOST_CODES or "RetryableWriteError" in self.labels
        )

    @property
    def is_transient(self) -> bool:
        """Whether nothing of the transaction is kept, and it may succeed in a moment."""
        return self.is_retryable or self.code == _NO_SUCH_TRANSACTION or "TransientTransactionError" in self.labels

    @property
    def contended(self) -> bool:
        """Whether another transaction was in the way."""
        return self.code in _WRITE_CONFLICT_CODES

    @property
    def is_commit_uncertain(self) -> bool:
        """Of a commit: whether it may have been done all the same."""
        if "TransientTransactionError" in self.labels:
            return False
        return self.is_retryable or self.code == _MAX_TIME_EXPIRED or "UnknownTransactionCommitResult" in self.labels

    @property
    def is_unauthorized(self) -> bool:
        """Whether it does not know us, or not allow it."""
        return self.code in _UNAUTHORIZED_CODES

    @property
    def is_authentication_failure(self) -> bool:
        """Whether it does not know us, and would not allow anything else either."""
        return self.code == _AUTHENTICATION_FAILED


class DuplicateKeyError(Exception):
    """
    A unique index has this value already; nothing was written.

    :param index: its name, `_id_` being that of the primary one.
    """

    def __init__(self, collection: str, index: str) -> None:
        super().__init__(f"{collection} {index}")
        self.collection = collection
        self.index = index


class CommitWithError(Exception):
    """Raised in a transaction: what was written is to be committed, and `error` is the answer then."""

    def __init__(self, error: MediatorError) -> None:
        super().__init__()
        self.error = error


def is_unauthenticated_reply(reply: dict[str, Any]) -> bool:
    """Whether a command was refused because its connection has not shown who we are, whatever anybody may do."""
    text = str(reply.get("errmsg", "")).lower()
    return reply.get("code") in _UNAUTHORIZED_CODES and "requires authentication" in text


def check_reply(reply: dict[str, Any]) -> dict[str, Any]:
    """
    The reply, if the command was done, all of it, and as durably as was asked.

    :raise Duplicate: a unique index has this value already.
    :raise Refused: anything else.
    """
    if not reply.get("ok"):
        raise build_error(reply, reply)
    for error in reply.get("writeErrors", ()):
        raise build_error(error, reply)
    concern = reply.get("writeConcernError")
    if concern:
        raise build_error(concern, reply)
    return reply


def build_error(error: dict[str, Any], reply: dict[str, Any]) -> MongoCommandError | DuplicateKeyError:
    """
    What to raise for an error.

    :param reply: what it was part of, which has the labels.
    """
    code = int(error.get("code", 0))
    if code in _DUPLICATE_KEY_CODES:
        found = _DUPLICATE_INDEX_PATTERN.search(str(error.get("errmsg", "")))
        return DuplicateKeyError(found[1], found[2]) if found else DuplicateKeyError("", "")
    return MongoCommandError(code, str(error.get("codeName", "")), reply.get("errorLabels", ()))


_log = Logger(namespace="mediatord.store")


class OperationErrorLog:
    """One line a second at most, with nothing in it that a server said or was to store."""

    def __init__(self, clock: IReactorTime) -> None:
        self._clock = clock
        self._number = 0
        self._quiet_until = 0.0
        self._credentials_quiet_until = 0.0

    def report(self, name: str, error: Exception) -> None:
        self._number += 1
        now = self._clock.seconds()
        if now >= self._quiet_until:
            _log.error(
                "operations failed ({number}), the last one being {name}: {error}",
                event="store.failed",
                number=self._number,
                name=name,
                error=str(error),
            )
            self._number, self._quiet_until = 0, now + 1.0

    def report_credentials(self, hosts: str) -> None:
        now = self._clock.seconds()
        if now >= self._credentials_quiet_until:
            _log.error("MongoDB at {hosts} does not take our credentials, or they do not allow enough", hosts=hosts)
            self._credentials_quiet_until = now + 60.0
