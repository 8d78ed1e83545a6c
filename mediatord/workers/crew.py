"""The workers: a process in each place, replaced when it ends or hangs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IDelayedCall
from twisted.internet.task import LoopingCall
from twisted.logger import Logger

from mediatord.notify import SERVING
from mediatord.workers.child import Child
from mediatord.workers.sockets import Sharing

_log = Logger()

# How workers end that were told to: the second one had only begun.
_IN_ORDER = ("ended with status 0", "was killed by SIGTERM")
# Seconds until a worker is replaced: the first time, the second time and so on.
_PAUSES = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)


@dataclass(frozen=True, slots=True)
class Patience:
    """
    How long workers are waited for.

    :param beat: seconds between heartbeats.
    :param hung: heartbeats without answer after which a worker is killed.
    :param late: heartbeats without answer after which the watchdog is told no more.
    :param starting: heartbeats that a new one need not answer.
    :param steady: seconds after which an end has nothing to do with the one before.
    :param stop: seconds that all may take to stop.
    """

    beat: float = 5.0
    hung: int = 6
    late: int = 2
    starting: int = 6
    steady: float = 60.0
    stop: float = 8.0


class Recruit(Protocol):
    """Makes the process of a place, counted from 0; raises OSError."""

    def __call__(
        self, number: int, hear: Callable[[Child, str, Any], None], gone: Callable[[Child, str], None]
    ) -> Child: ...


class _Place:
    """
    :ivar failures: ends since the place was last steady.
    :ivar resting: whether its connections go to others.
    :ivar served: whether there ever was a worker that served.
    :ivar unable: why the last one could not start; empty if it could.
    """

    def __init__(self, number: int, name: str) -> None:
        self.number = number
        self.name = name
        self.child: Child | None = None
        self.again: IDelayedCall | None = None
        self.began = 0.0
        self.failures = 0
        self.resting = False
        self.served = False
        self.unable = ""


class Crew:
    """
    Keeps as many workers as there are places.

    :param names: of the places.
    :param hear: told what workers say that is not about their being there.
    :param complete: called once, when all are ready.
    :param changed: called when one of them is better or worse off.
    :param give_up: told why none of them could start at all, in the words of one.
    """

    def __init__(
        self,
        reactor: Any,
        recruit: Recruit,
        sharing: Sharing,
        names: Sequence[str],
        *,
        hear: Callable[[Child, str, Any], None],
        complete: Callable[[], None],
        changed: Callable[[], None],
        give_up: Callable[[str], None],
        patience: Patience = Patience(),  # noqa: B008  frozen
    ) -> None:
        self._reactor = reactor
        self._recruit = recruit
        self._sharing = sharing
        self._places = [_Place(number, name) for number, name in enumerate(names)]
        self._hear_more = hear
        self._complete: Callable[[], None] | None = complete
        self._changed = changed
        self._give_up = give_up
        self._patience = patience
        self._hearts = LoopingCall(self._beat)
        self._hearts.clock = reactor
        self._running = False
        self._stopped: Deferred[None] | None = None
        self._kill: IDelayedCall | None = None

    def __iter__(self) -> Iterator[Child]:
        """Those that are there now, ready or not."""
        return iter([place.child for place in self._places if place.child is not None])

    @property
    def answers(self) -> bool:
        """Whether none of them is late with its heartbeat."""
        return all(child.missed < self._patience.late for child in self)

    @property
    def status(self) -> str:
        """How they are, in the words of those that are worst off; where one has gone, how the others are."""
        return next((child.status for child in self if child.status != SERVING), SERVING)

    def start(self) -> None:
        """Have them all begin."""
        self._running = True
        for place in self._places:
            self._fill(place)
        self._hearts.start(self._patience.beat, now=False)

    def stop(self) -> Deferred[None]:
        """Have them all stop at the same time. Fires when the last is gone; who takes too long is killed."""
        self._running = False
        if self._hearts.running:
            self._hearts.stop()
        for place in self._places:
            if place.again is not None:
                place.again.cancel()
                place.again = None
        stopped: Deferred[None] = Deferred()
        self._stopped = stopped
        for child in self:
            child.signal("TERM")
        self._kill = self._reactor.callLater(self._patience.stop, self._kill_all)
        self._look_for_end()
        return stopped

    def number(self, child: Child) -> int:
        """Its place, counted from 0."""
        return next(place.number for place in self._places if place.child is child)

    def _fill(self, place: _Place) -> None:
        place.again = None
        place.began = self._reactor.seconds()
        try:
            if place.resting:
                self._sharing.wake(place.number)
                place.resting = False
            place.child = self._recruit(place.number, self._hear, self._gone)
        except OSError as error:
            _log.error("worker {name} could not be started: {reason}", name=place.name, reason=error.strerror)
            self._refill(place)
            return
        _log.info("worker {name} is process {pid}", name=place.child.name, pid=place.child.pid)

    def _hear(self, child: Child, word: str, content: Any) -> None:
        if word == "ready":
            child.ready = True
            self._count()
        elif word == "status":
            child.status = content
            self._places[self.number(child)].served |= content == SERVING
            self._changed()
        else:
            self._hear_more(child, word, content)

    def _count(self) -> None:
        if self._complete is not None and all(place.child and place.child.ready for place in self._places):
            complete, self._complete = self._complete, None
            complete()

    def _gone(self, child: Child, how: str) -> None:
        place = self._places[self.number(child)]
        place.child, place.unable = None, child.unable
        if not self._running:
            if how not in _IN_ORDER:
                _log.warn("worker {name} (process {pid}) {how}", name=child.name, pid=child.pid, how=how)
            self._look_for_end()
            return
        if all(one.unable and not one.served for one in self._places):
            self._give_up(child.unable)
            return
        if child.ready and self._reactor.seconds() - place.began >= self._patience.steady:
            place.failures = 0
        if child.unable:
            place.failures = max(1, place.failures)
        _log.warn(
            "worker {name} (process {pid}) {how}{why}",
            name=child.name,
            pid=child.pid,
            how=how,
            why=f": {child.unable}" if child.unable else "",
        )
        self._refill(place)

    def _refill(self, place: _Place) -> None:
        pause = _PAUSES[min(place.failures, len(_PAUSES) - 1)]
        place.failures += 1
        if pause and not place.resting:
            place.resting = True
            self._sharing.rest(place.number)
        place.again = self._reactor.callLater(pause, self._fill, place)

    def _beat(self) -> None:
        for child in self:
            if child.missed >= self._patience.hung:
                _log.error(
                    "worker {name} (process {pid}) does not answer and is killed", name=child.name, pid=child.pid
                )
                child.signal("KILL")
                continue
            child.missed += 1
            child.send("ping")

    def _kill_all(self) -> None:
        self._kill = None
        for child in self:
            _log.error("worker {name} (process {pid}) did not stop in time", name=child.name, pid=child.pid)
            child.signal("KILL")

    def _look_for_end(self) -> None:
        if self._stopped is None or list(self):
            return
        if self._kill is not None:
            self._kill.cancel()
            self._kill = None
        stopped, self._stopped = self._stopped, None
        stopped.callback(None)
