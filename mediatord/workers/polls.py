"""Asking all workers the same question."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Protocol

from twisted.internet.interfaces import IDelayedCall, IReactorTime

# Seconds that a worker has to answer in.
PATIENCE = 1.0


class Voter(Protocol):
    """A worker, as far as it is asked."""

    pid: int
    ready: bool

    def send(self, word: str, content: Any = None) -> None: ...


@dataclass(slots=True)
class _Poll:
    asker: Voter
    asked: int
    waiting: set[int]
    timer: IDelayedCall
    answer: Callable[[int, Mapping[int, Any]], None]
    reports: dict[int, Any] = field(default_factory=dict)


class Polls:
    """
    Collects what workers say.

    :param word: what they are asked with; they give back the number that comes with it.
    :param workers: those that are there.
    """

    def __init__(self, clock: IReactorTime, word: str, workers: Callable[[], Iterable[Voter]]) -> None:
        self._clock = clock
        self._word = word
        self._workers = workers
        self._ids = count(1)
        self._open: dict[int, _Poll] = {}

    def begin(self, asker: Voter, answer: Callable[[int, Mapping[int, Any]], None]) -> None:
        """
        Ask every worker that serves, the asker included.

        :param answer: told how many were asked, and what they said, by process; after :data:`PATIENCE` at the latest.
        """
        asked = [worker for worker in self._workers() if worker.ready or worker is asker]
        number = next(self._ids)
        timer = self._clock.callLater(PATIENCE, self._finish, number)
        self._open[number] = _Poll(asker, len(asked), {worker.pid for worker in asked}, timer, answer)
        for worker in asked:
            worker.send(self._word, number)

    def take(self, worker: Voter, number: int, said: Any) -> None:
        """What a worker says; nobody waits any more for what comes too late."""
        poll = self._open.get(number)
        if poll is not None and worker.pid in poll.waiting:
            poll.reports[worker.pid] = said
            self._done_with(number, worker)

    def gone(self, worker: Voter) -> None:
        """A worker has ended."""
        for number in list(self._open):
            self._done_with(number, worker)

    def stop(self) -> None:
        """Answer nobody any more."""
        for poll in self._open.values():
            poll.timer.cancel()
        self._open.clear()

    def _done_with(self, number: int, worker: Voter) -> None:
        poll = self._open[number]
        poll.waiting.discard(worker.pid)
        if not poll.waiting:
            poll.timer.cancel()
            self._finish(number)

    def _finish(self, number: int) -> None:
        poll = self._open.pop(number)
        poll.answer(poll.asked, poll.reports)
