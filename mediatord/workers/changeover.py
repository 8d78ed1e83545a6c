"""Doing something in all workers before anything else is done in any of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from mediatord.workers.child import Child

Tell = Callable[[Child], None]


class Changeover:
    """
    Takes the workers through steps: each begins when all of them have answered the one before, or are gone.

    :param crew: the workers that are there now.
    """

    def __init__(self, crew: Callable[[], Iterable[Child]]) -> None:
        self._crew = crew
        self._steps: deque[Callable[[], Tell | None]] = deque()
        self._waiting: set[Child] = set()

    def add(self, *steps: Callable[[], Tell | None]) -> None:
        """
        Take these steps after all that were added before.

        :param steps: called when it is their time; what they give, if anything, is what each worker is told then,
            and has to answer.
        """
        self._steps.extend(steps)
        self._go_on()

    def answered(self, child: Child) -> None:
        """A worker has done what it was told, or is gone."""
        if child in self._waiting:
            self._waiting.discard(child)
            self._go_on()

    def _go_on(self) -> None:
        while self._steps and not self._waiting:
            tell = self._steps.popleft()()
            if tell is not None:
                self._waiting.update(self._crew())
                for child in list(self._waiting):
                    tell(child)
