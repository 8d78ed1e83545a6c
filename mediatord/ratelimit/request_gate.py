"""Tracks requests in flight; refuses new ones and drains the rest at shutdown."""

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
    """Service that admits requests while it runs, and stops once they are finished."""

    name = "gate"

    def __init__(self, clock: IReactorTime) -> None:
        self._clock = clock
        self._in_flight = 0
        self._open = False
        self._waiting: list[Deferred[None]] | None = None
        self._drained: Deferred[None] | None = None

    def hold(self) -> None:
        """Make new requests wait, while it is unknown whether this process may use the store."""
        if self._waiting is None:
            self._waiting = []

    def release(self) -> None:
        """Start the waiting requests."""
        waiting, self._waiting = self._waiting or [], None
        for one in waiting:
            one.callback(None)

    @property
    def is_open(self) -> bool:
        """Whether new requests are admitted."""
        return self._open

    async def run_request(self, work: Callable[[], Awaitable[T]]) -> T:
        """
        Run `work` as a request in flight.

        :raise ShutdownInProgress: the daemon is stopping; `work` was not started.
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
        """Admit a request if it can start immediately; pair with :meth:`leave`."""
        if not self._open or self._waiting is not None:
            return False
        self._in_flight += 1
        return True

    def leave(self) -> None:
        """Mark a request as finished."""
        self._in_flight -= 1
        if self._drained is not None and self._in_flight == 0:
            emptied, self._drained = self._drained, None
            emptied.callback(None)

    def startService(self) -> None:
        """Open the gate."""
        super().startService()
        self._open = True

    def stopService(self) -> Deferred[None]:
        """Close the gate; fires when all requests are finished."""
        super().stopService()
        self._open = False
        self.release()
        if self._in_flight == 0:
            return succeed(None)
        self._drained = Deferred()
        return self._drained
