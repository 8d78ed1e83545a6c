"""
Contract changes that nodes with sockets are yet to be told of.

A message that no hint came for is found in the store; that a contract has changed is not. So whoever could not say
so says it again, until all who hold sockets have answered or hold none any more.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection

from twisted.internet.interfaces import IDelayedCall, IReactorTime

# DIDs that are remembered, and how many are gone through at a time.
MAX_OWED = 10_000
AT_ONCE = 100
# Seconds until the next attempt: at first, and at most, twice as many after each.
FIRST, LONGEST = 1.0, 15.0


class Reminders:
    """
    However often something has changed for a DID, it is said once.

    :param remind: says so to all who hold sockets of a DID, but for these boots; calls :meth:`owe` or :meth:`paid`.
    :param dropped: called when there are too many.
    """

    def __init__(
        self, clock: IReactorTime, remind: Callable[[str, Collection[str]], None], dropped: Callable[[], None]
    ) -> None:
        self._clock = clock
        self._remind = remind
        self._dropped = dropped
        self._owed: OrderedDict[str, frozenset[str]] = OrderedDict()
        self._pause = FIRST
        self._next: IDelayedCall | None = None
        self._over = False

    def __len__(self) -> int:
        return len(self._owed)

    def owe(self, did: str, told: Collection[str]) -> None:
        """
        Some could not be told of a change.

        :param told: boots that could.
        """
        if self._over:
            return
        self._owed[did] = frozenset(told) & self._owed.pop(did, frozenset(told))
        if len(self._owed) > MAX_OWED:
            self._owed.popitem(last=False)
            self._dropped()
        self._arm()

    def paid(self) -> None:
        """A reminder came to all whom it was for: others may, too."""
        self._pause = FIRST
        if self._next is not None:
            self._next.cancel()
            self._next = None
            self._arm()

    def end(self) -> None:
        """Forget them."""
        self._over = True
        self._owed.clear()
        if self._next is not None:
            self._next.cancel()
            self._next = None

    def _arm(self) -> None:
        if self._owed and self._next is None:
            self._next = self._clock.callLater(self._pause, self._go_through)

    def _go_through(self) -> None:
        """What fails again is behind the others then."""
        self._next = None
        self._pause = min(2 * self._pause, LONGEST)
        some = [self._owed.popitem(last=False) for _ in range(min(AT_ONCE, len(self._owed)))]
        for did, told in some:
            self._remind(did, told)
        self._arm()
