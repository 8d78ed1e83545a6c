"""StopHandler: interrupts at once, or cancels in order from another thread."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from threading import Event, current_thread, main_thread

import pytest

from analytics.errors import StopHandler, StoppedBySignal


@pytest.fixture
def stop() -> Iterator[StopHandler]:
    """Handles the signals of this process."""
    handler = StopHandler()
    with handler.handle_signals():
        yield handler


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signal_interrupts_once(stop: StopHandler, number: signal.Signals, status: int) -> None:
    """A second signal does not interrupt the clean-up."""
    with pytest.raises(StoppedBySignal, match=f"^stopped by {number.name}$") as caught:
        signal.raise_signal(number)
    assert (stop.first_signal, caught.value.exit_status) == (caught.value, status)
    signal.raise_signal(signal.SIGTERM)
    with pytest.raises(StoppedBySignal, match=number.name):
        stop.check()


def test_cancels_java_call_from_another_thread(stop: StopHandler) -> None:
    """The call is not interrupted; after its end, in an error or not, the signal is raised."""
    cancelled, threads, steps, killed = Event(), [], [], Event()

    def cancel() -> None:
        threads.append(current_thread())
        cancelled.set()

    with pytest.raises(StoppedBySignal, match="SIGTERM"), stop.cancel_on_signal(cancel, killed.set, timeout_s=1e6):
        signal.raise_signal(signal.SIGTERM)
        cancelled.wait()
        steps.append("the end")
        raise RuntimeError("the query was cancelled")
    assert steps and threads[0] is not main_thread() and not killed.is_set()


def test_kills_after_timeout(stop: StopHandler) -> None:
    killed = Event()
    with pytest.raises(StoppedBySignal), stop.cancel_on_signal(killed.wait, killed.set, timeout_s=0.01):
        signal.raise_signal(signal.SIGTERM)
        killed.wait()


def test_second_signal_kills(stop: StopHandler) -> None:
    """The exit status is that of the first."""
    killed = Event()
    with (
        pytest.raises(StoppedBySignal, match="SIGTERM"),
        stop.cancel_on_signal(killed.wait, killed.set, timeout_s=1e6),
    ):
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        killed.wait()


def test_kills_if_cancellation_outlasts_block(stop: StopHandler) -> None:
    killed = Event()
    with pytest.raises(StoppedBySignal), stop.cancel_on_signal(killed.wait, killed.set, timeout_s=0.01):
        signal.raise_signal(signal.SIGTERM)
    assert killed.is_set()


def test_does_nothing_without_signal(stop: StopHandler) -> None:
    """Errors pass through, and the previous handlers are restored."""
    called = Event()
    with stop.cancel_on_signal(called.set, called.set):
        pass
    with pytest.raises(RuntimeError, match="its own"), stop.cancel_on_signal(called.set, called.set):
        raise RuntimeError("its own")
    stop.check()
    assert not called.is_set()
    before = signal.getsignal(signal.SIGTERM)
    with StopHandler().handle_signals():
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before


class _CallOnDeletion:
    """Calls a function in its finalizer, where exceptions cannot propagate."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._work = work

    def __del__(self) -> None:
        self._work()


def test_signal_in_finalizer_is_raised_by_next_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once; other exceptions in finalizers are still reported."""
    reported: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: reported.append(type(unraisable.exc_value)))
    stop = StopHandler()
    with stop.handle_signals():
        _CallOnDeletion(lambda: signal.raise_signal(signal.SIGTERM))
        _CallOnDeletion(lambda: 1 // 0)
        with pytest.raises(StoppedBySignal):
            stop.check()
    assert reported == [ZeroDivisionError]
