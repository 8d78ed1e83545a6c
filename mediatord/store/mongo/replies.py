"""
What a server's reply means.

Texts of a server are never kept: they repeat keys, and sometimes documents. A code and its name say as much.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from bson.errors import BSONError

from mediatord.errors import MediatorError

# The server is shutting down, or is not the primary (any more).
NOT_PRIMARY = frozenset({91, 189, 10058, 10107, 11600, 11602, 13435, 13436})
# The same command may succeed a moment later: network faults between servers, locks, interruptions.
_PASSING = frozenset({6, 7, 24, 64, 89, 112, 133, 134, 246, 262, 9001, 11601}) | NOT_PRIMARY
_CONTENDED = frozenset({24, 112})
_CURSOR_GONE = frozenset({43, 237})
_AUTHENTICATION_FAILED = 18
_UNAUTHENTICATED = frozenset({13, _AUTHENTICATION_FAILED})
_DUPLICATE = frozenset({11000, 11001, 12582})
_OUT_OF_TIME = 50
_NO_SUCH_TRANSACTION = 251

# Raised before anything is sent: texts that are no Unicode, numbers that are too large. Their texts show what it was.
UNSTORABLE = (BSONError, UnicodeEncodeError, OverflowError)

_INDEX = re.compile(r" collection: [^.\s]+\.(\S+) index: (\S+) dup key")


class Unreachable(Exception):
    """
    No answer: no connection to a primary, or it was lost, or time is up.

    :param connected: whether there was somebody to ask.
    """

    def __init__(self, reason: str, *, connected: bool = True) -> None:
        super().__init__(reason)
        self.connected = connected


class Refused(Exception):
    """
    The server said no.

    :param labels: those of the protocol, such as `TransientTransactionError`.
    """

    def __init__(self, code: int, name: str, labels: Collection[str] = ()) -> None:
        super().__init__(f"{code} {name}".rstrip())
        self.code = code
        self.labels = frozenset(labels)

    @property
    def passing(self) -> bool:
        """Whether the same command may succeed in a moment, by itself or as the beginning of a transaction."""
        return self.code in _PASSING or self.code in _CURSOR_GONE or "RetryableWriteError" in self.labels

    @property
    def transient(self) -> bool:
        """Whether nothing of the transaction is kept, and it may succeed in a moment."""
        return self.passing or self.code == _NO_SUCH_TRANSACTION or "TransientTransactionError" in self.labels

    @property
    def contended(self) -> bool:
        """Whether another transaction was in the way."""
        return self.code in _CONTENDED

    @property
    def unsettled(self) -> bool:
        """Of a commit: whether it may have been done all the same."""
        if "TransientTransactionError" in self.labels:
            return False
        return self.passing or self.code == _OUT_OF_TIME or "UnknownTransactionCommitResult" in self.labels

    @property
    def unauthenticated(self) -> bool:
        """Whether it does not know us, or not allow it."""
        return self.code in _UNAUTHENTICATED

    @property
    def unknown(self) -> bool:
        """Whether it does not know us, and would not allow anything else either."""
        return self.code == _AUTHENTICATION_FAILED


class Duplicate(Exception):
    """
    A unique index has this value already; nothing was written.

    :param index: its name, `_id_` being that of the primary one.
    """

    def __init__(self, collection: str, index: str) -> None:
        super().__init__(f"{collection} {index}")
        self.collection = collection
        self.index = index


class Kept(Exception):
    """Raised in a transaction: what was written is to be committed, and `error` is the answer then."""

    def __init__(self, error: MediatorError) -> None:
        super().__init__()
        self.error = error


def is_unauthenticated(reply: dict[str, Any]) -> bool:
    """Whether a command was refused because its connection has not shown who we are, whatever anybody may do."""
    text = str(reply.get("errmsg", "")).lower()
    return reply.get("code") in _UNAUTHENTICATED and "requires authentication" in text


def check(reply: dict[str, Any]) -> dict[str, Any]:
    """
    The reply, if the command was done, all of it, and as durably as was asked.

    :raise Duplicate: a unique index has this value already.
    :raise Refused: anything else.
    """
    if not reply.get("ok"):
        raise refusal(reply, reply)
    for error in reply.get("writeErrors", ()):
        raise refusal(error, reply)
    concern = reply.get("writeConcernError")
    if concern:
        raise refusal(concern, reply)
    return reply


def refusal(error: dict[str, Any], reply: dict[str, Any]) -> Refused | Duplicate:
    """
    What to raise for an error.

    :param reply: what it was part of, which has the labels.
    """
    code = int(error.get("code", 0))
    if code in _DUPLICATE:
        found = _INDEX.search(str(error.get("errmsg", "")))
        return Duplicate(found[1], found[2]) if found else Duplicate("", "")
    return Refused(code, str(error.get("codeName", "")), reply.get("errorLabels", ()))
