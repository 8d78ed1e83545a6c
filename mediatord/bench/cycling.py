"""
The whole way of a message to a wallet that is online: forward, push, acknowledgement.

Run by the process that holds the wallets (:mod:`mediatord.bench.wallets`). A forward is known again when it is
pushed, by the tag of the envelope in it; of several that are the same, the oldest is taken to have come first.
"""

from __future__ import annotations

import select
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import cycle
from time import perf_counter, process_time

from mediatord.bench.courier import PICKUP, Courier, ids_and_tags
from mediatord.bench.load import Answers, Line, connect, loopback
from mediatord.bench.rawsocket import RawSocket
from mediatord.bench.schedule import LATE_SECONDS, intended_times
from mediatord.wallet.packing import Unreadable

_PATIENCE_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Letter:
    """
    A forward that is ready to be posted.

    :param tag: of the envelope inside, by which it is known.
    """

    request: bytes = field(repr=False)
    tag: str


@dataclass(frozen=True, slots=True)
class Turn:
    """
    :param seconds: for so long forwards are posted.
    :param connections: they are posted on; without a rate, so many messages are on their way at most.
    :param rate: forwards per second at times fixed beforehand; 0 for as many as come through.
    :param seed: of those times.
    :param apart: each connection has an address of its own, and they take turns.
    """

    seconds: float
    connections: int
    rate: float = 0.0
    even: bool = False
    seed: int = 0
    apart: bool = False


@dataclass(slots=True)
class Cycled:
    """
    :param pushed: how many messages came out and were acknowledged.
    :param missing: how many were accepted and never pushed.
    :param repeated: how many were pushed more often than posted.
    :param seconds: from the first forward to the last acknowledgement being read.
    :param accepted_us: from when a forward was sent, or was to be sent, to its 202.
    :param pushed_us: likewise, to its push.
    :param late: forwards that were sent later than intended.
    :param cpu_seconds: of this process.
    """

    statuses: dict[str, int] = field(default_factory=dict)
    pushed: int = 0
    missing: int = 0
    repeated: int = 0
    seconds: float = 0.0
    accepted_us: list[int] = field(default_factory=list)
    pushed_us: list[int] = field(default_factory=list)
    late: int = 0
    cpu_seconds: float = 0.0


class Live:
    """A wallet on its socket in live mode. :param source: its address, if it matters."""

    def __init__(self, courier: Courier, url: str, source: str = "") -> None:
        self.courier = courier
        self.socket = RawSocket(url, source=source)

    def ask(self, packed: bytes) -> dict[str, object]:
        """Send a request, and the answer to it; what is pushed meanwhile is not taken note of."""
        self.socket.send(packed)
        while True:
            for raw in self.socket.take():
                answer = self.courier.open(raw)
                if answer["type"] != f"{PICKUP}/delivery":
                    return answer

    def begin(self) -> None:
        """
        Switch live delivery on.

        :raise Unreadable: it was not confirmed.
        """
        answer = self.ask(self.courier.request(f"{PICKUP}/live-delivery-change", {"live_delivery": True}))
        if answer["type"] != f"{PICKUP}/status":
            raise Unreadable("live delivery was not switched on")

    def waiting(self) -> int:
        """How many messages the mediator still has for the wallet."""
        answer = self.ask(self.courier.request(f"{PICKUP}/status-request", {}))
        body = answer.get("body")
        return int(body["message_count"]) if isinstance(body, dict) else 0


class Cycling:
    """One turn."""

    def __init__(
        self, address: tuple[str, int], letters: Sequence[Letter], lives: Sequence[Live], turn: Turn
    ) -> None:
        self._turn = turn
        self._letters = cycle(letters)
        self._lives = {live.socket.fileno(): live for live in lives}
        sources = [loopback(number) if turn.apart else "" for number in range(turn.connections)]
        lines = [Line(connect(*address, source)) for source in sources]
        self._lines = {line.fileno(): line for line in lines}
        self._idle = deque(lines)
        self._posted: dict[str, deque[float]] = {}
        self._under_way = self._next = 0
        self._answers = Answers()
        self._accepted_us, self._pushed_us = array("I"), array("I")
        self._found = Cycled()
        self._times = intended_times(turn.rate, turn.seconds, turn.seed, even=turn.even) if turn.rate else None
        self._last: Live | None = None

    def run(self) -> Cycled:
        """Until everything that was accepted has been pushed and acknowledged, or is missing."""
        start, start_cpu = perf_counter(), process_time()
        with select.epoll() as epoll:
            for number in (*self._lines, *self._lives):
                epoll.register(number, select.EPOLLIN)
            self._exchange(epoll, start)
        found = self._found
        found.missing = self._under_way
        if self._last is not None:
            self._last.waiting()  # an answer: what was said before has been read
        found.seconds, found.cpu_seconds = perf_counter() - start, process_time() - start_cpu
        found.statuses = self._answers.by_name()
        found.accepted_us, found.pushed_us = list(self._accepted_us), list(self._pushed_us)
        for line in self._lines.values():
            line.close()
        return found

    def _exchange(self, epoll: select.epoll, start: float) -> None:
        heard = start
        while self._send(start) or self._under_way or len(self._idle) < len(self._lines):
            select.select([epoll], [], [], self._patience(start))
            events = epoll.poll(0)
            now = perf_counter()
            if events:
                heard = now
            elif now - heard > _PATIENCE_SECONDS:
                break
            for number, _ in events:
                live = self._lives.get(number)
                if live is not None:
                    self._take_push(live)
                else:
                    self._take_answer(self._lines[number])

    def _send(self, start: float) -> bool:
        """Post what may be posted now; whether there will be more."""
        return self._send_punctually(start) if self._times is not None else self._send_freely(start)

    def _send_freely(self, start: float) -> bool:
        now = perf_counter()
        more = now - start < self._turn.seconds
        while more and self._idle and self._under_way < self._turn.connections:
            self._post(perf_counter())
        return more

    def _send_punctually(self, start: float) -> bool:
        assert self._times is not None
        while self._idle and self._next < len(self._times):
            intended = start + self._times[self._next]
            lateness = perf_counter() - intended
            if lateness < 0:
                break
            self._post(intended)
            self._next += 1
            self._found.late += lateness > LATE_SECONDS
        return self._next < len(self._times)

    def _post(self, intended: float) -> None:
        line = self._idle.popleft() if self._turn.apart else self._idle.pop()
        letter = next(self._letters)
        line.begun = intended
        self._posted.setdefault(letter.tag, deque()).append(intended)
        self._under_way += 1
        line.send(letter.request)

    def _patience(self, start: float) -> float:
        if self._times is None:
            return max(0.001, min(_PATIENCE_SECONDS, start + self._turn.seconds - perf_counter()))
        if not self._idle or self._next == len(self._times):
            return _PATIENCE_SECONDS
        return max(0.0, start + self._times[self._next] - perf_counter())

    def _take_answer(self, line: Line) -> None:
        if self._answers.take(line):
            self._accepted_us.append(int((perf_counter() - line.begun) * 1e6))
            self._idle.append(line)

    def _take_push(self, live: Live) -> None:
        for raw in live.socket.take():
            came = perf_counter()
            found = ids_and_tags(live.courier.open(raw))
            for _, tag in found:
                self._note(tag, came)
            live.socket.send(live.courier.acknowledgement([id_ for id_, _ in found]))
            self._last = live

    def _note(self, tag: str, came: float) -> None:
        posted = self._posted.get(tag)
        if not posted:
            self._found.repeated += 1
            return
        self._under_way -= 1
        self._found.pushed += 1
        self._pushed_us.append(int((came - posted.popleft()) * 1e6))
