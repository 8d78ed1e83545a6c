"""
Bounding the memory of requests that are being served.

A request is parsed before the store is asked about it, and a tree of JSON takes many times the bytes of its text.
Those of many connections would add up while the store is slow, so a request is parsed when there is room for it.
"""

from __future__ import annotations

from collections import deque

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime

from mediatord.errors import RateLimited
from mediatord.synthetic import ITSELF

PER_PEER = 67_108_864
IN_ALL = 268_435_456
# What a request may come to: its bytes, sealed and open, and a tree of as many values as are allowed. Of JSON that is
# nothing but the smallest objects, a byte becomes about 46.
_COPIES = 4
_TREE = 12_000_000
_BYTES_OF_ONE = 50
# Seconds that a request waits for room; it is answered late by then anyway.
WAIT_SECONDS = 10.0


def working_memory(size: int) -> int:
    """Bytes of memory that a request of so many bytes may take, until it is answered."""
    return min(_BYTES_OF_ONE * size, _COPIES * size + _TREE)


class WorkingMemory:
    """
    Counts what requests may take, for each address and for all.

    A request of an address that has no other always has room for itself.
    """

    def __init__(self, clock: IReactorTime, per_peer: int = PER_PEER, in_all: int = IN_ALL) -> None:
        self._clock = clock
        self._per_peer = per_peer
        self._in_all = in_all
        self._taken: dict[str, int] = {}
        self._requests = 0
        self._total = 0
        self._waiting: dict[str, deque[tuple[int, Deferred[None]]]] = {}

    @property
    def held(self) -> tuple[int, int]:
        """Requests, and bytes that they may take."""
        return self._requests, self._total

    def take(self, peer: str, size: int) -> bool:
        """Whether a request may be parsed at once; if so, :meth:`give_back` follows."""
        if peer == ITSELF:
            return True
        if self._waiting and peer in self._waiting:
            return False
        return self._take(peer, working_memory(size))

    def _take(self, peer: str, size: int) -> bool:
        taken = self._taken.get(peer, 0)
        if taken and (taken + size > self._per_peer or self._total + size > self._in_all):
            return False
        self._taken[peer] = taken + size
        self._total += size
        self._requests += 1
        return True

    async def wait(self, peer: str, size: int) -> None:
        """
        Wait until a request may be parsed, where it may not at once; :meth:`give_back` follows.

        :raise RateLimited: that takes too long.
        """
        turn: Deferred[None] = Deferred()
        place = (working_memory(size), turn)
        self._waiting.setdefault(peer, deque()).append(place)
        timer = self._clock.callLater(WAIT_SECONDS, self._give_up, peer, place)
        try:
            await turn
        finally:
            if timer.active():
                timer.cancel()

    def _give_up(self, peer: str, place: tuple[int, Deferred[None]]) -> None:
        waiting = self._waiting.get(peer, deque())
        if place not in waiting:  # it has room, and is about to begin
            return
        waiting.remove(place)
        if not waiting:
            del self._waiting[peer]
        place[1].errback(RateLimited(retry_after=5))

    def give_back(self, peer: str, size: int) -> None:
        """A request is answered, or given up."""
        if peer == ITSELF:
            return
        size = working_memory(size)
        left = self._taken[peer] - size
        if left:
            self._taken[peer] = left
        else:
            del self._taken[peer]
        self._total -= size
        self._requests -= 1
        if self._waiting:
            for other in list(self._waiting):
                self._admit(other)

    def _admit(self, peer: str) -> None:
        """Let those requests of an address begin that there is room for."""
        while waiting := self._waiting.get(peer):
            size, turn = waiting[0]
            if not self._take(peer, size):
                return
            waiting.popleft()
            if not waiting:
                del self._waiting[peer]
            # In a call of its own: whoever gives back is not held up by what others do then.
            self._clock.callLater(0, turn.callback, None)
