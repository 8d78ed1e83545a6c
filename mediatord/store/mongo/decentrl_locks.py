"""Who may change something, within one process."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from twisted.internet.defer import Deferred

T = TypeVar("T")


class Locks:
    """
    Those who are about to change the same thing wait in line, in their order, instead of running into each other at
    the server.
    """

    def __init__(self) -> None:
        self._lines: dict[bytes, _Line] = {}

    def __len__(self) -> int:
        """How many things are being changed."""
        return len(self._lines)

    async def holding(self, key: bytes, work: Callable[[], Awaitable[T]]) -> T:
        """Do it when everybody who came before has done theirs."""
        line = self._lines.setdefault(key, _Line())
        await line.enter()
        try:
            return await work()
        finally:
            if line.is_last:
                del self._lines[key]
            line.leave()


@dataclass(eq=False, slots=True)
class _Line:
    """Those who wait do not go on inside each other, however many fail at once."""

    _waiting: deque[Deferred[None]] = field(default_factory=deque)
    _busy: bool = False
    _passing: bool = False

    @property
    def is_last(self) -> bool:
        """Whether nobody comes after the one whose turn it is."""
        return not self._waiting

    async def enter(self) -> None:
        if self._busy or self._waiting:
            turn: Deferred[None] = Deferred()
            self._waiting.append(turn)
            await turn
        self._busy = True

    def leave(self) -> None:
        self._busy = False
        if self._passing:
            return
        self._passing = True
        while self._waiting and not self._busy:
            self._waiting.popleft().callback(None)
        self._passing = False
