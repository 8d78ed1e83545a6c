"""Who may change something, within one process."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass, field
from typing import TypeVar

from twisted.internet.defer import Deferred, fail
from twisted.internet.interfaces import IReactorTime

from mediatord.errors import StoreUnavailable

T = TypeVar("T")


class Locks:
    """
    Those who are about to change the same thing wait in line, in their order, instead of running into each other at
    the server.
    """

    def __init__(self, clock: IReactorTime) -> None:
        self._clock = clock
        self._lines: dict[Hashable, _Line] = {}

    def __len__(self) -> int:
        """How many things are being changed."""
        return len(self._lines)

    async def holding(self, key: Hashable, work: Callable[[], Awaitable[T]], deadline: float) -> T:
        """
        Do it when everybody who came before has done theirs.

        :raise StoreUnavailable: that was not so by the deadline.
        """
        line = self._lines.setdefault(key, _Line(self._clock))
        await line.enter(deadline)
        try:
            return await work()
        finally:
            if line.is_last:
                del self._lines[key]
            line.leave()


@dataclass(eq=False, slots=True)
class _Line:
    """Those who wait do not go on inside each other, however many fail at once."""

    _clock: IReactorTime
    _waiting: deque[Deferred[None]] = field(default_factory=deque)
    _busy: bool = False
    _passing: bool = False

    @property
    def is_last(self) -> bool:
        """Whether nobody comes after the one whose turn it is."""
        return not self._waiting

    async def enter(self, deadline: float) -> None:
        if self._busy or self._waiting:
            turn: Deferred[None] = Deferred(self._waiting.remove)
            self._waiting.append(turn)
            left = max(deadline - self._clock.seconds(), 0.0)
            await turn.addTimeout(left, self._clock, lambda _, __: fail(StoreUnavailable()))
        self._busy = True

    def leave(self) -> None:
        self._busy = False
        if self._passing:
            return
        self._passing = True
        while self._waiting and not self._busy:
            self._waiting.popleft().callback(None)
        self._passing = False
