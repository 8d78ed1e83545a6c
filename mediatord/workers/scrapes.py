"""Asking all workers what they have measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count

from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.logger import Logger

from mediatord.workers.child import Child
from mediatord.workers.figures import Figures

_log = Logger()

# Seconds that a worker has to answer in.
PATIENCE = 1.0


@dataclass(slots=True)
class _Scrape:
    asker: Child
    asked: int
    waiting: set[int]
    timer: IDelayedCall
    answer: Callable[[str], None]
    reports: dict[int, str] = field(default_factory=dict)


class Scrapes:
    """
    Collects reports, and adds them up for the one that wants to know.

    :param workers: those that are there.
    """

    def __init__(self, clock: IReactorTime, workers: Callable[[], Iterable[Child]]) -> None:
        self._clock = clock
        self._workers = workers
        self._figures = Figures()
        self._ids = count(1)
        self._open: dict[int, _Scrape] = {}

    def begin(self, asker: Child, answer: Callable[[str], None]) -> None:
        """
        Ask every worker that serves, the asker included.

        :param answer: called with the page, after :data:`PATIENCE` at the latest.
        """
        asked = [child for child in self._workers() if child.ready or child is asker]
        number = next(self._ids)
        timer = self._clock.callLater(PATIENCE, self._finish, number)
        self._open[number] = _Scrape(asker, len(asked), {child.pid for child in asked}, timer, answer)
        for child in asked:
            child.send("report", number)

    def take(self, child: Child, number: int, text: str) -> None:
        """What a worker reports; nobody waits any more for what comes too late."""
        scrape = self._open.get(number)
        if scrape is not None and child.pid in scrape.waiting:
            scrape.reports[child.pid] = text
            self._done_with(number, child)

    def gone(self, child: Child) -> None:
        """A worker has ended."""
        for number in list(self._open):
            self._done_with(number, child)
        self._figures.retire(child.pid)

    def stop(self) -> None:
        """Answer nobody any more."""
        for scrape in self._open.values():
            scrape.timer.cancel()
        self._open.clear()

    def _done_with(self, number: int, child: Child) -> None:
        scrape = self._open[number]
        scrape.waiting.discard(child.pid)
        if not scrape.waiting:
            scrape.timer.cancel()
            self._finish(number)

    def _finish(self, number: int) -> None:
        scrape = self._open.pop(number)
        if scrape.asker.pid not in scrape.reports:
            return  # It is gone, or busy, and has told its client so.
        try:
            scrape.answer(self._figures.page(scrape.reports, scrape.asker.pid, scrape.asked))
        except ValueError:
            _log.failure("what the workers report cannot be added up")
