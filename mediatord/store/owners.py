"""Who has registered which DID, as far as was asked lately."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from math import inf

# With this, the cache holds 32 MiB of text at most.
CAPACITY = 16_384
_LONGEST = 2_048


class Owners:
    """
    A bounded cache from recipient DID to account DID, the least recently used going first.

    Only what is registered is kept. Another process may take a DID away unnoticed, so where there are several an
    answer is good for a short time or not kept at all; and what is stored is checked again where it is stored.

    An answer that was under way while something changed is not kept: `age` differs then.

    :param now: the clock.
    :param lifetime: seconds for which an answer is good.
    """

    def __init__(
        self, capacity: int = CAPACITY, *, now: Callable[[], float] = lambda: 0.0, lifetime: float = inf
    ) -> None:
        self._capacity = capacity
        self._now = now
        self._lifetime = lifetime
        self._accounts: OrderedDict[str, tuple[str, float]] = OrderedDict()
        self.age = 0

    def get(self, did: str) -> str | None:
        account, until = self._accounts.get(did, (None, 0.0))
        if account is None or until <= self._now():
            return None
        self._accounts.move_to_end(did)
        return account

    def keep(self, did: str, account: str | None, age: int) -> None:
        """Keep an answer that was asked for when the cache was of this age."""
        if account is None or age != self.age or len(did) + len(account) > _LONGEST:
            return
        self._accounts[did] = account, self._now() + self._lifetime
        if len(self._accounts) > self._capacity:
            self._accounts.popitem(last=False)

    def forget(self, dids: Iterable[str]) -> None:
        """Their registration may have changed."""
        self.age += 1
        for did in dids:
            self._accounts.pop(did, None)

    def clear(self) -> None:
        """An account has another DID now."""
        self.age += 1
        self._accounts.clear()
