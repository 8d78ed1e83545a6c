"""Lets work in while the daemon runs and may use its store, and waits for what is inside when it stops."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from twisted.application.service import Service
from twisted.internet.defer import Deferred, succeed
from twisted.internet.interfaces import IReactorTime

from mediatord.clock import request_scope
from mediatord.errors import ShutdownInProgress

T = TypeVar("T")


class RequestGate(Service):
    """Counts the work that is under way, each of it one request."""

    name = "gate"

    def __init__(self, clock: IReactorTime) -> None:
        self._clock = clock
        self._in_flight = 0
        self._open = False
        self._waiting: list[Deferred[None]] | None = None
        self._drained: Deferred[None] | None = None

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

    async def run_request(self, work: Callable[[], Awaitable[T]]) -> T:
        """
        Do `work` and know of it.

        :raise ShutdownInProgress: the daemon is stopping; `work` was not begun.
        """
        if not self.enter():
            await self.wait()
        try:
            with request_scope(self._clock):
                return await work()
        finally:
            self.leave()

    async def wait(self) -> None:
        """
        Enter as soon as that is possible; to be followed by :meth:`leave`.

        :raise ShutdownInProgress: the daemon is stopping.
        """
        if self._open and self._waiting is not None:
            released: Deferred[None] = Deferred()
            self._waiting.append(released)
            await released
        if not self._open:
            raise ShutdownInProgress
        self._in_flight += 1

    def enter(self) -> bool:
        """Whether work may begin at once; whoever begins it says when it is done, by :meth:`leave`."""
        if not self._open or self._waiting is not None:
            return False
        self._in_flight += 1
        return True

    def leave(self) -> None:
        """Some work is done."""
        self._in_flight -= 1
        if self._drained is not None and self._in_flight == 0:
            emptied, self._drained = self._drained, None
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
        if self._in_flight == 0:
            return succeed(None)
        self._drained = Deferred()
        return self._drained
