"""Asking the store whether it answers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from twisted.internet.defer import Deferred
from twisted.python.failure import Failure

# Seconds for which a good answer is good enough for who does not want to wait for the next.
GOOD_FOR = 1.0


class Asking:
    """
    Asks, once for all who want to know at the same time.

    To be told that all is well nobody waits who asks within a second of the last good answer: where the disk takes
    long to do as it is told, an answer takes that long as well. It is asked all the same, and a bad answer counts for
    whoever comes next.

    :param ask: really asks; raises what is wrong.
    :param steady: seconds since any time, by a clock that nobody sets.
    :param failures: how often the store has failed anybody so far; after one more a good answer is good no longer.
    """

    def __init__(
        self, ask: Callable[[], Awaitable[None]], steady: Callable[[], float], failures: Callable[[], int]
    ) -> None:
        self._ask = ask
        self._steady = steady
        self._failures = failures
        self._failed = 0
        self._under_way = False
        self._good_until = -GOOD_FOR
        self._waiting: list[Deferred[None]] = []

    async def __call__(self) -> None:
        """Return if the store answers; raise what is wrong with it otherwise."""
        told: Deferred[None] = Deferred()
        self._waiting.append(told)
        if not self._under_way:
            self._under_way = True
            Deferred.fromCoroutine(self._once()).addBoth(self._answered)
        if not told.called and self._steady() < self._good_until and self._failures() == self._failed:
            self._waiting.remove(told)
            return
        await told

    async def _once(self) -> None:
        await self._ask()

    def _answered(self, answer: None | Failure) -> None:
        self._under_way = False
        self._good_until = -GOOD_FOR if isinstance(answer, Failure) else self._steady() + GOOD_FOR
        self._failed = self._failures()
        waiting, self._waiting = self._waiting, []
        for one in waiting:
            one.callback(answer)  # a failure becomes that of the Deferred
