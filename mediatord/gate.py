"""Lets work in while the daemon runs, and waits for what is inside when it stops."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from twisted.application.service import Service
from twisted.internet.defer import Deferred, succeed

from mediatord.errors import ShuttingDown

T = TypeVar("T")


class Gate(Service):
    """Counts the work that is under way."""

    name = "gate"

    def __init__(self) -> None:
        self._inside = 0
        self._open = False
        self._emptied: Deferred[None] | None = None

    @property
    def is_open(self) -> bool:
        """Whether new work is taken."""
        return self._open

    async def through(self, work: Callable[[], Awaitable[T]]) -> T:
        """
        Do `work` and know of it.

        :raise ShuttingDown: the daemon is stopping; `work` was not begun.
        """
        if not self._open:
            raise ShuttingDown
        self._inside += 1
        try:
            return await work()
        finally:
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
        if self._inside == 0:
            return succeed(None)
        self._emptied = Deferred()
        return self._emptied
