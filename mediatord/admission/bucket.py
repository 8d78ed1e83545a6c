"""One limit for many keys."""

from __future__ import annotations

import math
from collections.abc import Mapping

from twisted.internet.interfaces import IReactorTime

from mediatord.admission.allowances import Allowances
from mediatord.admission.share import Share
from mediatord.protocol.limits import SlidingWindow


class Bucket:
    """
    One limit, for many keys: exactly in this process, and with all others as far as the store answers; while it does
    not, this process has its part of the limit.

    Waits are whole seconds, and 0 means that it is admitted.
    """

    def __init__(
        self, clock: IReactorTime, name: str, limit: int, allowances: Allowances | None, period: float = 60.0
    ) -> None:
        self._clock = clock
        self._window = SlidingWindow(limit, period)
        self._larger: Mapping[str, int] = {}
        self._share = None
        if allowances is not None:

            def alone(key: str, more: int) -> float:
                limit = self._larger.get(key, self._window.limit)
                return self._window.wait(key, clock.seconds(), more, allowances.part(limit))

            self._share = Share(clock, allowances, name, limit, alone=alone, period=period)

    def __len__(self) -> int:
        """How many keys are remembered."""
        return len(self._window)

    def change(self, limit: int, larger: Mapping[str, int] | None = None) -> None:
        """
        Go by another limit from now on.

        :param larger: those of some keys that have limits of their own.
        """
        larger = larger or {}
        if (limit, larger) != (self._window.limit, self._larger):
            self._window.limit = limit
            self._larger = larger
            if self._share is not None:
                self._share.change(limit, larger)

    def wait(self, key: str, cost: int = 1) -> int:
        """Whether `key` is known to be over its limit, or would be."""
        wait = self._window.wait(key, self._clock.seconds(), cost, self._larger.get(key))
        if wait or self._share is None:
            return wait
        return math.ceil(self._share.wait(key, cost))

    async def standing(self, key: str, cost: int = 1) -> int:
        """The same, once everything it used is paid for."""
        wait = self.wait(key, cost)
        if not wait and self._share is not None and self._share.owes(key):
            wait = math.ceil(await self._share.take(key, 0))
        return wait

    async def admit(self, key: str, cost: int = 1) -> int:
        """Charge `key`; what is refused costs nothing."""
        wait = self._window.admit(key, self._clock.seconds(), cost, self._larger.get(key))
        if not wait and self._share is not None:
            wait = math.ceil(await self._share.take(key, cost))
            if wait:
                self._window.give_back(key, cost)
        return wait

    def admit_at_once(self, key: str, cost: int = 1) -> bool:
        """Charge `key` if that is known to be within its limit without asking anybody."""
        if self._window.admit(key, self._clock.seconds(), cost, self._larger.get(key)):
            return False
        if self._share is None or self._share.take_at_once(key, cost):
            return True
        self._window.give_back(key, cost)
        return False

    def owe(self, key: str) -> int:
        """Charge `key` for what was done already; the other processes know later."""
        wait = self._window.admit(key, self._clock.seconds(), 1, self._larger.get(key))
        if not wait and self._share is not None:
            wait = math.ceil(self._share.owe(key, 1))
            if wait:
                self._window.give_back(key)
        return wait

    def give_back(self, key: str, cost: int) -> None:
        """Undo a charge; the other processes know later."""
        self._window.give_back(key, cost)
        if self._share is not None:
            self._share.give_back(key, cost)
