"""Finding out which peers are gone: a ping for every socket now and then, all of them by one timer."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Protocol

from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.logger import Logger

from mediatord.faults import without_text

_log = Logger()

# A socket has its turn every so many ticks.
TURNS = 30
# Sockets that are looked at in one turn of the reactor.
_AT_ONCE = 100


class Beating(Protocol):
    """
    A socket.

    :ivar turn: when it has its turn; for the pulse alone.
    """

    turn: int

    def beat(self) -> None:
        """Send a ping; give the peer up if it has not been heard since the last one."""

    def __hash__(self) -> int: ...


class Pulse:
    """
    Lets every socket beat once in an interval, for the first time an interval after it was opened.

    Time is counted in ticks, so that setting the clock makes no peer look dead.

    :param interval: seconds.
    """

    def __init__(self, clock: IReactorTime, interval: float) -> None:
        self._clock = clock
        self._tick_seconds = interval / TURNS
        self._ring: list[set[Beating]] = [set() for _ in range(TURNS)]
        self._now = 0
        self._count = 0
        self._late: list[Beating] = []
        self._timer: IDelayedCall | None = None

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Beating]:
        """The sockets that are open."""
        return chain.from_iterable(self._ring)

    def add(self, socket: Beating) -> None:
        """A socket is open."""
        socket.turn = self._now
        self._ring[self._now].add(socket)
        self._count += 1
        if self._timer is None:
            self._timer = self._clock.callLater(self._tick_seconds, self._tick)

    def remove(self, socket: Beating) -> None:
        """It is gone."""
        if socket not in self._ring[socket.turn]:
            return
        self._ring[socket.turn].discard(socket)
        self._count -= 1
        if not self._count and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick(self) -> None:
        self._timer = self._clock.callLater(self._tick_seconds, self._tick)
        self._now = (self._now + 1) % TURNS
        late = bool(self._late)
        self._late += self._ring[self._now]
        if not late:
            self._go_on()

    def _go_on(self) -> None:
        """Some of those whose turn it is, the rest when others have had theirs: many may have come at once."""
        now, self._late = self._late[:_AT_ONCE], self._late[_AT_ONCE:]
        for socket in now:
            if socket in self._ring[socket.turn]:
                _beat(socket)
        if self._late:
            self._clock.callLater(0, self._go_on)


def _beat(socket: Beating) -> None:
    """One that fails stops no other: nobody would find their dead peers any more."""
    try:
        socket.beat()
    except Exception:
        _log.failure("a socket has no pulse", without_text())
