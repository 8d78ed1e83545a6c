"""SIGTERM and SIGINT: what goes on is stopped at any moment, and in order."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from threading import Thread
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT)
# So long may be taken for an end in order: a query that is given up, staged files that are deleted.
PATIENCE_S = 10.0


class Stopped(BaseException):
    """A signal came. :param number: of the signal."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.exit_status = 128 + number


class Stop:
    """
    What a signal does.

    By itself it raises :class:`Stopped` in the main thread. That must not happen while Java is asked: the rest of an
    answer that was cut off would be taken for the answer to the next question. During :meth:`halting` it therefore
    interrupts nothing; another thread makes what goes on fail.

    :ivar came: the first signal; None so far.
    """

    def __init__(self) -> None:
        self.came: Stopped | None = None
        self._asked: SimpleQueue[bool] | None = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """
        Take signals meanwhile; in the main thread only.

        One may come where nothing can be raised, as while an object is deleted: then it is left to :meth:`check`, and
        nobody is told of it a second time.
        """
        before = {number: signal.signal(number, self._take) for number in SIGNALS}
        tell = sys.unraisablehook
        sys.unraisablehook = lambda what: None if self._is_mine(what) else tell(what)
        try:
            yield
        finally:
            sys.unraisablehook = tell
            for number, handler in before.items():
                signal.signal(number, handler)

    def check(self) -> None:
        """:raise Stopped: a signal came."""
        if self.came is not None:
            raise self.came

    @contextmanager
    def halting(
        self, halt: Callable[[], object], kill: Callable[[], object], patience_s: float = PATIENCE_S
    ) -> Iterator[None]:
        """
        Halt what is done meanwhile if a signal comes.

        :param halt: called by another thread: is to make what goes on fail soon; may hang.
        :param kill: called if that did not help within `patience_s` seconds, or at a second signal.
        :raise Stopped: a signal came, whatever became of what was done.
        """
        asked = SimpleQueue[bool]()
        thread = Thread(target=_await, args=(asked, halt, kill, patience_s), name="stop", daemon=True)
        self._asked = asked
        try:
            thread.start()
            yield
        finally:
            asked.put(False)
            thread.join()
            self._asked = None
            self.check()

    def _is_mine(self, what: Any) -> bool:
        return self.came is not None and what.exc_value is self.came

    def _take(self, number: int, _frame: FrameType | None) -> None:
        first = self.came is None
        self.came = self.came or Stopped(number)
        if self._asked is not None:
            # Nothing else that threads have for each other may be used in the middle of anything.
            self._asked.put(True)
        elif first:
            raise self.came


# Signals are sent to the process, so there is one of these in it.
STOP = Stop()


def _await(
    asked: SimpleQueue[bool], halt: Callable[[], object], kill: Callable[[], object], patience_s: float
) -> None:
    """:param asked: has True for each signal, and False once all is over."""
    if not asked.get():
        return
    halting = Thread(target=halt, name="halt", daemon=True)
    halting.start()
    try:
        going_on = asked.get(timeout=patience_s)
    except Empty:
        going_on = True
    if not going_on:
        halting.join(patience_s)
    if going_on or halting.is_alive():
        kill()
        halting.join(patience_s)
