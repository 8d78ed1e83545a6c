"""Transactions that insert what another one may have inserted meanwhile."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from twisted.internet.defer import Deferred

from mediatord.errors import StoreUnavailable
from mediatord.store.mongo.replies import Duplicate

T = TypeVar("T")

_ATTEMPTS = 5


async def retried(transact: Callable[[], Awaitable[T]]) -> T:
    """
    Again, since what was in the way will be seen then.

    :raise Duplicate: it was not.
    """
    for _ in range(_ATTEMPTS - 1):
        try:
            return await transact()
        except Duplicate:
            continue
    return await transact()


def begin(work: Coroutine[Any, Any, T]) -> Deferred[T]:
    """Do `work`, for which a duplicate that stays in the way is a failure of the store."""
    return Deferred.fromCoroutine(_answer(work))


async def _answer(work: Coroutine[Any, Any, T]) -> T:
    try:
        return await work
    except Duplicate:
        raise StoreUnavailable() from None
