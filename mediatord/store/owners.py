"""Who has registered which DID, as far as was asked lately."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

# With this, the cache holds 32 MiB of text at most.
_CAPACITY = 16_384
_LONGEST = 2_048


class Owners:
    """
    A bounded cache from recipient DID to account DID, the least recently used going first.

    Only what is registered is kept. Another process may take a DID away unnoticed, so an entry is good for a
    quick answer, and what is stored is checked again where it is stored.

    An answer that was under way while something changed is not kept: `age` differs then.
    """

    def __init__(self, capacity: int = _CAPACITY) -> None:
        self._capacity = capacity
        self._accounts: OrderedDict[str, str] = OrderedDict()
        self.age = 0

    def get(self, did: str) -> str | None:
        account = self._accounts.get(did)
        if account is not None:
            self._accounts.move_to_end(did)
        return account

    def keep(self, did: str, account: str | None, age: int) -> None:
        """Keep an answer that was asked for when the cache was of this age."""
        if account is None or age != self.age or len(did) + len(account) > _LONGEST:
            return
        self._accounts[did] = account
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
