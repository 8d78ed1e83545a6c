"""Refusing what is too much."""

from __future__ import annotations

from collections import deque
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger

from mediatord.errors import StoreUnavailable
from mediatord.faults import Rarely

# Seconds that a turn of the reactor has for it.
_A_TURN = 0.005

_log = Logger(namespace="mediatord.store")


class Refusals:
    """
    Refuses a few at a time, with time for everything else in between: those that come again at once would otherwise
    leave none to what was not refused.
    """

    def __init__(self, clock: IReactorTime) -> None:
        self._clock = clock
        self._waiting: deque[Deferred[Any]] = deque()
        self._rarely = Rarely(clock)

    def refuse(self, answer: Deferred[Any]) -> Deferred[Any]:
        """Have it fail with StoreUnavailable shortly."""
        if not self._waiting:
            self._clock.callLater(0, self._refuse_some)
        self._waiting.append(answer)
        if number := self._rarely.count():
            _log.warn("MongoDB is asked for more than it does in time: {number} refused", number=number)
        return answer

    def finish(self) -> None:
        """Refuse all of them now."""
        while self._waiting:
            self._waiting.popleft().errback(StoreUnavailable())

    def _refuse_some(self) -> None:
        give_up = self._clock.seconds() + _A_TURN
        for _ in range(len(self._waiting)):
            if not self._waiting:
                return
            self._waiting.popleft().errback(StoreUnavailable())
            if self._clock.seconds() >= give_up:
                break
        if self._waiting:
            self._clock.callLater(0, self._refuse_some)
