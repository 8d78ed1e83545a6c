"""Lets work in while the daemon runs and may use its store, and waits for what is inside when it stops."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from twisted.application.service import Service
from twisted.internet.defer import Deferred, succeed
from twisted.internet.interfaces import IReactorTime

from mediatord.deadline import one_request
from mediatord.errors import ShuttingDown

T = TypeVar("T")


class Gate(Service):
    """Counts the work that is under way, each of it one request."""

    name = "gate"

    def __init__(self, clock: IReactorTime) -> None:
        self._clock = clock
        self._inside = 0
        self._open = False
        self._waiting: list[Deferred[None]] | None = None
        self._emptied: Deferred[None] | None = None

    def hold(self) -> None:
        """Let what comes wait: the store answers, but it is not known yet whether we may use it."""
        if self._waiting is None:
            self._waiting = []

    def release(self) -> None:
        """Let it in."""
        waiting, self._waiting = self._waiting or [], None
        for one in waiting:
            one.callback(None)

    @property
    def is_open(self) -> bool:
        """Whether new work is taken."""
        return self._open

    async def through(self, work: Callable[[], Awaitable[T]]) -> T:
        """
        Do `work` and know of it.

        :raise ShuttingDown: the daemon is stopping; `work` was not begun.
        """
        if self._open and self._waiting is not None:
            turn: Deferred[None] = Deferred()
            self._waiting.append(turn)
            await turn
        if not self._open:
            raise ShuttingDown
        self._inside += 1
        try:
            with one_request(self._clock):
                return await work()
        finally:
            self.leave()

    def enter(self) -> bool:
        """Whether work may begin at once; whoever begins it says when it is done, by :meth:`leave`."""
        if not self._open or self._waiting is not None:
            return False
        self._inside += 1
        return True

    def leave(self) -> None:
        """Some work is done."""
        self._inside -= 1
        if self._emptied is not None and self._inside == 0:
            emptied, self._emptied = self._emptied, None
            emptied.callback(None)

    def startService(self) -> None:
        """Let work in."""
        super().startService()
        self._open = True

    def stopService(self) -> Deferred[None]:
        """Let no more work in; fires when the last is done."""
        super().stopService()
        self._open = False
        self.release()
        if self._inside == 0:
            return succeed(None)
        self._emptied = Deferred()
        return self._emptied
