"""How a run ends: exit statuses, errors, and SIGTERM and SIGINT."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from threading import Thread
from types import FrameType
from typing import Any

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_NO_INPUT = 3
EXIT_INTEGRITY = 4


class AnalyticsError(Exception):
    """
    Failure of a run, described in one sentence for the operator.

    :param exit_status: of the process; one of those above.
    """

    def __init__(self, message: str, exit_status: int = EXIT_FAILED) -> None:
        super().__init__(message)
        self.exit_status = exit_status


def find_root_cause(error: BaseException) -> str:
    """
    Return the innermost cause that an error names, in one line; errors of Java contain whole stack traces.

    Call it while Java runs, because Java has the text.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    causes = [line.partition("Caused by: ")[2] for line in lines if line.startswith("Caused by: ")]
    # The first line of py4j describes the call; Java's own message starts with a colon.
    own = [line.removeprefix(": ") for line in lines if line.startswith(": ")]
    return (causes[-1:] or own or lines or [type(error).__name__])[0]


STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
# Time for an orderly end: cancelling a query, deleting staged files.
STOP_TIMEOUT_S = 10.0


class StoppedBySignal(BaseException):
    """The process received SIGTERM or SIGINT."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.exit_status = 128 + number


class StopHandler:
    """
    Handles SIGTERM and SIGINT.

    By default a signal raises :class:`StoppedBySignal` in the main thread. During a call to Java that is not safe:
    the rest of the interrupted response would be read as the response to the next call. There nothing is interrupted;
    another thread makes the running work fail instead.

    :ivar first_signal: the first signal received, or None.
    """

    def __init__(self) -> None:
        self.first_signal: StoppedBySignal | None = None
        self._signal_queue: SimpleQueue[bool] | None = None

    @contextmanager
    def handle_signals(self) -> Iterator[None]:
        """
        Install the signal handlers for the block; in the main thread only.

        A signal may arrive where nothing can be raised, such as in a finalizer: then :meth:`check` raises it later,
        and the error is not reported twice.
        """
        previous_handlers = {number: signal.signal(number, self._handle_signal) for number in STOP_SIGNALS}
        default_hook = sys.unraisablehook
        sys.unraisablehook = lambda what: None if self._is_own_exception(what) else default_hook(what)
        try:
            yield
        finally:
            sys.unraisablehook = default_hook
            for number, handler in previous_handlers.items():
                signal.signal(number, handler)

    def check(self) -> None:
        """:raise StoppedBySignal: a signal was received."""
        if self.first_signal is not None:
            raise self.first_signal

    @contextmanager
    def cancel_on_signal(
        self, halt: Callable[[], object], kill: Callable[[], object], timeout_s: float = STOP_TIMEOUT_S
    ) -> Iterator[None]:
        """
        Cancel the work of the block if a signal arrives.

        :param halt: called by another thread; makes the work fail soon; may hang.
        :param kill: called if the work goes on after `timeout_s` seconds, or at a second signal.
        :raise StoppedBySignal: a signal was received, whatever the outcome of the work.
        """
        signals = SimpleQueue[bool]()
        thread = Thread(target=_wait_for_signal, args=(signals, halt, kill, timeout_s), name="stop", daemon=True)
        self._signal_queue = signals
        try:
            thread.start()
            yield
        finally:
            signals.put(False)
            thread.join()
            self._signal_queue = None
            self.check()

    def _is_own_exception(self, what: Any) -> bool:
        return self.first_signal is not None and what.exc_value is self.first_signal

    def _handle_signal(self, number: int, _frame: FrameType | None) -> None:
        first = self.first_signal is None
        self.first_signal = self.first_signal or StoppedBySignal(number)
        if self._signal_queue is not None:
            # A SimpleQueue is the only primitive that is safe to use within a signal handler.
            self._signal_queue.put(True)
        elif first:
            raise self.first_signal


# Signals are sent to the process, hence one handler.
STOP_HANDLER = StopHandler()


def _wait_for_signal(
    signals: SimpleQueue[bool], halt: Callable[[], object], kill: Callable[[], object], timeout_s: float
) -> None:
    """:param signals: gets True for each signal, and False when the work has ended."""
    if not signals.get():
        return
    halt_thread = Thread(target=halt, name="halt", daemon=True)
    halt_thread.start()
    try:
        still_running = signals.get(timeout=timeout_s)
    except Empty:
        still_running = True
    if not still_running:
        halt_thread.join(timeout_s)
    if still_running or halt_thread.is_alive():
        kill()
        halt_thread.join(timeout_s)
