"""Asking all workers what they have measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger

from mediatord.workers.child import Child
from mediatord.workers.figures import Figures
from mediatord.workers.polls import Polls

_log = Logger()


class Scrapes:
    """
    Collects reports, and adds them up for the one that wants to know.

    :param workers: those that are there.
    """

    def __init__(self, clock: IReactorTime, workers: Callable[[], Iterable[Child]]) -> None:
        self._figures = Figures()
        self._polls = Polls(clock, "report", workers)
        self.take = self._polls.take
        self.stop = self._polls.stop

    def begin(self, asker: Child, answer: Callable[[str], None]) -> None:
        """
        Ask every worker that serves, the asker included.

        :param answer: called with the page, after :data:`~mediatord.workers.polls.PATIENCE` at the latest.
        """
        self._polls.begin(asker, lambda asked, reports: self._finish(asker.pid, asked, reports, answer))

    def gone(self, child: Child) -> None:
        """A worker has ended."""
        self._polls.gone(child)
        self._figures.retire(child.pid)

    def _finish(self, asker: int, asked: int, reports: Mapping[int, str], answer: Callable[[str], None]) -> None:
        if asker not in reports:
            return  # It is gone, or busy, and has told its client so.
        try:
            answer(self._figures.page(dict(reports), asker, asked))
        except ValueError:
            _log.failure("what the workers report cannot be added up")
