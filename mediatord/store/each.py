"""Deposits that have nothing to do with each other, for stores that have no better way to do them together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from twisted.internet.defer import Deferred, DeferredList
from twisted.logger import Logger
from twisted.python.failure import Failure

from mediatord.errors import InternalFault, MediatorError
from mediatord.faults import without_text
from mediatord.interfaces import Deposit, Deposited

_log = Logger(namespace="mediatord.store")


def one_by_one(
    deposit: Callable[..., Deferred[Deposited]], deposits: Sequence[Deposit]
) -> Deferred[list[Deposited | MediatorError]]:
    """
    As :meth:`~mediatord.interfaces.IMessageStore.deposit_each`.

    :param deposit: as :meth:`~mediatord.interfaces.IMessageStore.deposit`.
    """
    begun = [
        deposit(one.recipient_did, one.payloads, expires_at=one.expires_at, due_at=one.due_at, origin=one.origin)
        for one in deposits
    ]
    done: Deferred[Any] = DeferredList(begun, consumeErrors=True)
    return done.addCallback(lambda results: [_outcome(result) for _, result in results])


def _outcome(result: Any) -> Deposited | MediatorError:
    if isinstance(result, Failure):
        if isinstance(result.value, MediatorError):
            return result.value.with_traceback(None)
        # The others may have been stored, and their senders are to be told so.
        _log.failure("storing a message failed", without_text(result))
        return InternalFault()
    deposited: Deposited = result
    return deposited
