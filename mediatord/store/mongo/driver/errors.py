"""
Errors in replies of a MongoDB server, and the log of failed operations.

Error texts of the server are never kept, because they repeat keys and sometimes documents; code and name are.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from bson.errors import BSONError
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger

from mediatord.errors import MediatorError
from mediatord.runtime.failure_logging import LogThrottle

# The server is shutting down, or is not the primary.
NOT_PRIMARY_CODES = frozenset({91, 189, 10058, 10107, 11600, 11602, 13435, 13436})
# The same command may succeed a moment later: network errors between members, locks, interruptions.
_RETRYABLE_CODES = frozenset({6, 7, 24, 64, 89, 112, 133, 134, 246, 262, 9001, 11601}) | NOT_PRIMARY_CODES
_WRITE_CONFLICT_CODES = frozenset({24, 112})
_CURSOR_LOST_CODES = frozenset({43, 237})
_AUTHENTICATION_FAILED = 18
_UNAUTHORIZED_CODES = frozenset({13, _AUTHENTICATION_FAILED})
_DUPLICATE_KEY_CODES = frozenset({11000, 11001, 12582})
_MAX_TIME_EXPIRED = 50
_NO_SUCH_TRANSACTION = 251

# Raised before anything is sent, for lone surrogates or numbers over 64 bits. Their texts repeat the value.
ENCODING_ERRORS = (BSONError, UnicodeEncodeError, OverflowError)

_DUPLICATE_INDEX_PATTERN = re.compile(r" collection: [^.\s]+\.(\S+) index: (\S+) dup key")


class ServerUnreachable(Exception):
    """
    No reply: there is no connection to a primary, it was lost, or the deadline has passed.

    :param connected: False if there was no connection at all.
    """

    def __init__(self, reason: str, *, connected: bool = True) -> None:
        super().__init__(reason)
        self.connected = connected


class MongoCommandError(Exception):
    """
    The server rejected a command.

    :param labels: error labels of the reply, such as `TransientTransactionError`.
    """

    def __init__(self, code: int, name: str, labels: Collection[str] = ()) -> None:
        super().__init__(f"{code} {name}".rstrip())
        self.code = code
        self.labels = frozenset(labels)

    @property
    def is_retryable(self) -> bool:
        """Whether the same command may succeed in a moment, alone or as the first of a transaction."""
        return (
            self.code in _RETRYABLE_CODES or self.code in _CURSOR_LOST_CODES or "RetryableWriteError" in self.labels
        )

    @property
    def is_transient(self) -> bool:
        """Whether the transaction was aborted and may succeed in a moment."""
        return self.is_retryable or self.code == _NO_SUCH_TRANSACTION or "TransientTransactionError" in self.labels

    @property
    def is_write_conflict(self) -> bool:
        """Whether the transaction conflicts with another one."""
        return self.code in _WRITE_CONFLICT_CODES

    @property
    def is_commit_uncertain(self) -> bool:
        """Whether a commit that got this reply may have taken effect."""
        if "TransientTransactionError" in self.labels:
            return False
        return self.is_retryable or self.code == _MAX_TIME_EXPIRED or "UnknownTransactionCommitResult" in self.labels

    @property
    def is_unauthorized(self) -> bool:
        """Whether the credentials are wrong, or do not allow the command."""
        return self.code in _UNAUTHORIZED_CODES

    @property
    def is_authentication_failure(self) -> bool:
        """Whether the credentials are wrong, so that no command is allowed."""
        return self.code == _AUTHENTICATION_FAILED


class DuplicateKeyError(Exception):
    """
    A unique index already has the value; nothing was written.

    :param index: its name, `_id_` for the primary key.
    """

    def __init__(self, collection: str, index: str) -> None:
        super().__init__(f"{collection} {index}")
        self.collection = collection
        self.index = index


class CommitWithError(Exception):
    """Raised in a transaction to commit what it wrote and then fail with `error`."""

    def __init__(self, error: MediatorError) -> None:
        super().__init__()
        self.error = error


class RepeatTransaction(Exception):
    """Raised in a transaction to discard what it wrote, and to run the work again at once."""


class UnsupportedServer(Exception):
    """The server can be reached but cannot be used; the text is one line for the operator."""


def is_unauthenticated_reply(reply: dict[str, Any]) -> bool:
    """Whether a command was rejected because its connection is not authenticated."""
    text = str(reply.get("errmsg", "")).lower()
    return reply.get("code") in _UNAUTHORIZED_CODES and "requires authentication" in text


def check_reply(reply: dict[str, Any]) -> dict[str, Any]:
    """
    Return the reply if the command succeeded completely and with the requested write concern.

    :raise DuplicateKeyError: a unique index already has the value.
    :raise MongoCommandError: any other error.
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
    Build the exception for an error document.

    :param reply: the whole reply, which has the error labels.
    """
    code = int(error.get("code", 0))
    if code in _DUPLICATE_KEY_CODES:
        found = _DUPLICATE_INDEX_PATTERN.search(str(error.get("errmsg", "")))
        return DuplicateKeyError(found[1], found[2]) if found else DuplicateKeyError("", "")
    return MongoCommandError(code, str(error.get("codeName", "")), reply.get("errorLabels", ()))


_log = Logger(namespace="mediatord.store")


class OperationErrorLog:
    """Logs failed operations, one line a second at most, without texts of the server or data to be stored."""

    def __init__(self, clock: IReactorTime) -> None:
        self._failures = LogThrottle(clock, 1.0)
        self._authorization_failures = LogThrottle(clock, 60.0)

    def report(self, name: str, error: Exception) -> None:
        if number := self._failures.count_occurrence():
            _log.error(
                "{number} operations failed, last: {name}: {error}",
                event="store.failed",
                number=number,
                name=name,
                error=str(error),
            )

    def report_unauthorized(self, hosts: str) -> None:
        if self._authorization_failures.count_occurrence():
            _log.error("MongoDB at {hosts} rejects the credentials, or the user lacks privileges", hosts=hosts)
