"""Who has registered which DID, as far as was asked lately."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from math import inf
from typing import Any, Generic, TypeVar

from mediatord.protocol.canonical_did import is_short_of_other

T = TypeVar("T")

# With this, the cache holds 32 MiB of text at most.
CAPACITY = 16_384
_LONGEST = 2_048


class Owners(Generic[T]):
    """
    A bounded cache from recipient DID to account DID, or from that to the account; it loses the least recently used.

    DIDs are in their canonical form. Only what is registered is kept. Another process may take a DID away unnoticed,
    so where there are several an answer is good for a short time or not kept at all; and what is stored is checked
    again where it is stored.

    An answer that was under way while something changed is not kept: `age` differs then.

    :param now: the clock.
    :param lifetime: seconds for which an answer is good.
    :param length: characters of an answer.
    """

    def __init__(
        self,
        capacity: int = CAPACITY,
        *,
        now: Callable[[], float] = lambda: 0.0,
        lifetime: float = inf,
        length: Callable[[Any], int] = len,
    ) -> None:
        self._capacity = capacity
        self._now = now
        self._lifetime = lifetime
        self._length = length
        self._accounts: OrderedDict[str, tuple[T, float]] = OrderedDict()
        self.age = 0

    def get(self, did: str) -> T | None:
        account, until = self._accounts.get(did, (None, 0.0))
        if account is None or until <= self._now():
            return None
        self._accounts.move_to_end(did)
        return account

    def keep(self, did: str, account: T | None, age: int) -> None:
        """Keep an answer that was asked for when the cache was of this age."""
        if is_short_of_other(did):
            return  # nobody would know when to forget it
        if account is None or age != self.age or len(did) + self._length(account) > _LONGEST:
            return
        self._accounts[did] = account, self._now() + self._lifetime
        if len(self._accounts) > self._capacity:
            self._accounts.popitem(last=False)

    def forget(self, dids: Iterable[str]) -> None:
        """Their registration may have changed."""
        self.age += 1
        for did in dids:
            if is_short_of_other(did):
                self._accounts.clear()
            self._accounts.pop(did, None)

    def clear(self) -> None:
        """An account has another DID now."""
        self.age += 1
        self._accounts.clear()
