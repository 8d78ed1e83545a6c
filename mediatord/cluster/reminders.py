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
# Seconds until the next attempt: at first, and at most, twice as many after each that failed.
FIRST, LONGEST = 1.0, 15.0


class _Line:
    """
    DIDs that wait for the same pace, the oldest in front.

    :param remind: told of each, with the boots that need not be told.
    :param longest: seconds that the pause between two lots grows to.
    """

    def __init__(self, clock: IReactorTime, remind: Callable[[str, Collection[str]], None], longest: float) -> None:
        self.owed: OrderedDict[str, frozenset[str]] = OrderedDict()
        self._clock = clock
        self._remind = remind
        self._longest = longest
        self._pause = FIRST
        self._next: IDelayedCall | None = None

    def put(self, did: str, told: frozenset[str]) -> None:
        """At its end."""
        self.owed[did] = told
        self._arm()

    def hurry(self) -> None:
        """Begin with short pauses again, if they are not: the next lot is not put off over and over."""
        if self._pause > FIRST:
            self._pause = FIRST
            self._cancel()
            self._arm()

    def end(self) -> None:
        """Forget them."""
        self.owed.clear()
        self._cancel()

    def _cancel(self) -> None:
        if self._next is not None:
            self._next.cancel()
            self._next = None

    def _arm(self) -> None:
        if self.owed and self._next is None:
            self._next = self._clock.callLater(self._pause, self._go_through)

    def _go_through(self) -> None:
        self._next = None
        self._pause = min(2 * self._pause, self._longest)
        some = [self.owed.popitem(last=False) for _ in range(min(AT_ONCE, len(self.owed)))]
        for did, told in some:
            self._remind(did, told)
        self._arm()


class Reminders:
    """
    However often something has changed for a DID, it is said once.

    Those that failed have a line of their own: of a node that nobody reaches there may be thousands, which are in
    nobody's way there.

    :param remind: says so to all who hold sockets of a DID, but for these boots; calls :meth:`owe_still` or
        :meth:`paid`.
    :param dropped: called when there are too many.
    """

    def __init__(
        self, clock: IReactorTime, remind: Callable[[str, Collection[str]], None], dropped: Callable[[], None]
    ) -> None:
        self._dropped = dropped
        self._new = _Line(clock, remind, FIRST)
        self._failed = _Line(clock, remind, LONGEST)
        self._over = False

    def __len__(self) -> int:
        return len(self._new.owed) + len(self._failed.owed)

    def owe(self, did: str, told: Collection[str]) -> None:
        """
        Some could not be told of a change.

        :param told: boots that could.
        """
        self._put(self._new, did, told)

    def owe_still(self, did: str, told: Collection[str]) -> None:
        """
        Nor when they were reminded, unless there is a newer change to remind them of.

        :param told: boots that need not be told.
        """
        self._put(self._new if did in self._new.owed else self._failed, did, told)

    def paid(self) -> None:
        """A reminder came to all whom it was for: others may, too."""
        self._failed.hurry()

    def end(self) -> None:
        """Forget them."""
        self._over = True
        self._new.end()
        self._failed.end()

    def _put(self, line: _Line, did: str, told: Collection[str]) -> None:
        if self._over:
            return
        needless = frozenset(told)
        for one in (self._new, self._failed):
            needless &= one.owed.pop(did, needless)
        line.put(did, needless)
        if len(self) > MAX_OWED:
            (self._failed.owed or self._new.owed).popitem(last=False)
            self._dropped()
