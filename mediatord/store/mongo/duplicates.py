"""Transactions that insert what another one may have inserted meanwhile."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

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
