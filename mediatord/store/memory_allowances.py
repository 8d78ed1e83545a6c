"""The allowances of the memory store."""

from __future__ import annotations

from mediatord.store.allowances import Lot, still_counting, wait_for, with_taking, without_latest
from mediatord.store.deadlines import Deadlines


class Allowances:
    """What was taken, by key, for as long as it counts."""

    def __init__(self) -> None:
        self._lots: dict[bytes, list[Lot]] = {}
        self._over: Deadlines[bytes] = Deadlines()

    def take(self, key: bytes, amount: int, limit: int, period: float, now: float) -> float:
        self._forget(now)
        lots = still_counting(self._lots.get(key, ()), period, now)
        wait = wait_for(lots, amount, limit=limit, period=period, now=now)
        if not wait and amount:
            self._lots[key] = lots = with_taking(lots, amount, period=period, now=now)
            self._over.add(key, lots[-1][0] + period)
        return wait

    def put_back(self, key: bytes, amount: int) -> None:
        lots = without_latest(self._lots.get(key, ()), amount)
        if lots:
            self._lots[key] = lots
        elif self._lots.pop(key, None) is not None:
            self._over.discard(key)

    def _forget(self, now: float) -> None:
        while (key := self._over.take(now)) is not None:
            del self._lots[key]
