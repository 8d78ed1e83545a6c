"""Whether the server answers, so that nobody waits for one that does not."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from twisted.internet.defer import CancelledError, Deferred, succeed
from twisted.internet.interfaces import IReactorTime
from twisted.internet.task import deferLater
from twisted.logger import Logger

_log = Logger(namespace="mediatord.store")

# Seconds between two questions to a server that does not answer, and that each of them is given.
INTERVAL = 0.5
PATIENCE = 1.0


class Availability:
    """
    Up until an operation found nobody and a question right after it neither; then down until a question is answered.

    :param probe: ask the server, until a time; fails if it does not answer.
    :param on_up: told of every change.
    """

    def __init__(
        self, clock: IReactorTime, probe: Callable[[float], Awaitable[None]], on_up: Callable[[bool], None]
    ) -> None:
        self._clock = clock
        self._probe = probe
        self._on_up = on_up
        self._asking = False
        self._question: Deferred[None] = succeed(None)
        self.up = False

    def set(self, up: bool) -> None:
        """What somebody who asked found."""
        if up and not self.up:
            _log.info("MongoDB answers")
        elif self.up and not up:
            _log.warn("MongoDB does not answer")
        self.up = up
        self._on_up(up)

    def doubt(self, *, connected: bool) -> None:
        """
        An operation got no answer: ask.

        :param connected: whether there was a connection; without one, nobody else need try.
        """
        if not connected and self.up:
            self.set(False)
        if not self._asking:
            self._asking = True
            self._question = Deferred.fromCoroutine(self._ask())
            self._question.addErrback(lambda failure: failure.trap(CancelledError) and None)

    def stop(self) -> None:
        """Ask no more."""
        self.up = self._asking = False
        self._question.cancel()

    async def _ask(self) -> None:
        while not await self._answers():
            if not self._asking:
                return
            if self.up:
                self.set(False)
            await deferLater(self._clock, INTERVAL)
        self._asking = False
        if not self.up:
            self.set(True)

    async def _answers(self) -> bool:
        try:
            await self._probe(self._clock.seconds() + PATIENCE)
        except CancelledError:
            raise
        except Exception:
            return False
        return True
