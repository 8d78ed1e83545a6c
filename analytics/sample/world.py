"""The fleet at a point in time: a calendar of what is to happen, the processes, and the store they share."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from analytics.sample.counting import ENTRIES
from analytics.sample.node import Node
from analytics.sample.people import Message, Socket
from analytics.sample.spec import HOUR, Spec
from analytics.sample.truth import Tally, Truth

_RSS = 92_000_000
_RSS_OF_A_SOCKET = 38_000
_DESCRIPTORS = 31
_STORE = "0f1e2d3c4b5a"


@dataclass(slots=True, eq=False)
class Place:
    """
    Where a process runs, or does not just now.

    :ivar slowness: factor on everything that takes time.
    :ivar late: None, or where the segment goes that begins next.
    """

    number: int
    name: str
    directory: Path
    node: Node | None = None
    sockets: dict[str, Socket] = field(default_factory=dict)
    slowness: float = 1.0
    late: Path | None = None


def late_directory(directory: Path) -> Path:
    """Where segments lie that come late."""
    return directory.with_name(directory.name + "-late")


class World:
    """:ivar now: seconds since the epoch. :ivar depth: messages in all queues. :ivar bytes: their payloads."""

    def __init__(self, spec: Spec, directory: Path) -> None:
        self.spec = spec
        self.rng = Random(spec.seed)
        self.now = spec.begin
        self.tallies = [Tally(spec)]
        self.places = [Place(n, name, directory / name) for n, name in enumerate(spec.processes)]
        self.truth = Truth(spec, directory, {}, {})
        self.depth = self.bytes = self._recipients = 0
        self._order: deque[Message] = deque()
        self._calendar: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._started: list[Node] = []
        self._entries = 0

    def at(self, when: float, use: Callable[..., None], *args: object) -> None:
        """Call `use` then; what is for one moment goes in order."""
        self._entries += 1
        heapq.heappush(self._calendar, (when, self._entries, use, args))

    def run(self) -> None:
        """Let everything happen that happens before the end, or at it."""
        calendar, end = self._calendar, self.spec.end
        while calendar and calendar[0][0] <= end:
            self.now, _, use, args = heapq.heappop(calendar)
            use(*args)

    def begin(self) -> None:
        """Start all processes and their clocks."""
        for place in self.places:
            self.start(place)
            self.at(self.now + self.spec.gauge_s * (place.number + 1) / (len(self.places) + 1), self._minute, place)
        self.at(self.now + self.spec.segment_hours * HOUR, self._rotate)

    def finish(self) -> Truth:
        """Leave the last segments as they are of a daemon that goes on, and close the books."""
        for place in self.up():
            if place.node is not None:
                place.node.go_on()
        self.truth.days = self.tallies[0].finish(self.spec.end)
        self.truth.days_before_late = self.tallies[-1].finish(self.spec.end)
        for place in self.places:
            late = late_directory(self.truth.directory) / place.name
            self.truth.late += [(path, place.directory / path.name) for path in sorted(late.glob("events-*"))]
        return self.truth

    def start(self, place: Place) -> None:
        """A process starts."""
        compress = self.spec.compress
        place.node = Node(place.name, place.directory, lambda: self.now, self.rng, self.tallies, compress=compress)
        self._started.append(place.node)

    def up(self) -> list[Place]:
        """Where a process runs; there is always one."""
        return [place for place in self.places if place.node is not None]

    def kept(self, message: Message) -> None:
        """It waits for its recipient."""
        self._recipients += not message.to.waiting
        message.to.waiting[message.tag] = message
        self._order.append(message)
        self.depth += 1
        self.bytes += message.size

    def gone(self, message: Message) -> None:
        """It waits no more."""
        del message.to.waiting[message.tag]
        self._recipients -= not message.to.waiting
        self.depth -= 1
        self.bytes -= message.size

    def fork(self) -> None:
        """From here on there are lines that one tally counts and the other does not."""
        self.tallies.append(deepcopy(self.tallies[0]))

    def _oldest_ms(self) -> int:
        while self._order and self._order[0].tag not in self._order[0].to.waiting:
            self._order.popleft()
        return int((self.now - self._order[0].at) * 1000) if self._order else 0

    def _minute(self, place: Place) -> None:
        self.at(self.now + self.spec.gauge_s, self._minute, place)
        node = place.node
        if node is None:
            return
        lag = self.rng.expovariate(1 / 1.5) + (60.0 * (place.slowness - 1.0))
        node.emit(
            "gauge",
            depth=self.depth,
            bytes=self.bytes,
            rcpts=self._recipients,
            oldest_ms=self._oldest_ms(),
            conns=node.sockets,
            rss=_RSS + _RSS_OF_A_SOCKET * node.sockets,
            fds=_DESCRIPTORS + node.sockets,
            lag_ms=lag,
        )
        node.emit("counters", **node.counters)
        self._ledger(node)

    def _ledger(self, node: Node) -> None:
        """What the store that all share says of either half."""
        for half in ("didcomm", "decentrl"):
            kept = {entry: sum(one.books[half, entry] for one in self._started) for entry in ENTRIES.values()}
            waiting = 2 * kept["accepted"] - sum(kept.values())
            totals = {f"all_{entry}": number for entry, number in kept.items()}
            node.emit("ledger", proto=half, store=_STORE, waiting=waiting, difference=0, all_withdrawn=0, **totals)

    def _rotate(self) -> None:
        self.at(self.now + self.spec.segment_hours * HOUR, self._rotate)
        for place in self.places:
            if place.node is not None:
                if place.late is not None:
                    self.fork()
                place.node.rotate(place.late)
                place.late = None
