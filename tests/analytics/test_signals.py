"""What a signal does: at once where nothing is torn by it, else in order and by another thread."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from threading import Event, current_thread, main_thread

import pytest

from analytics.errors import StopHandler, StoppedBySignal


@pytest.fixture
def stop() -> Iterator[StopHandler]:
    """One that takes the signals of this process."""
    made = StopHandler()
    with made.handle_signals():
        yield made


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_by_itself_a_signal_interrupts(stop: StopHandler, number: signal.Signals, status: int) -> None:
    """Once: what is cleaned up then is not interrupted again."""
    with pytest.raises(StoppedBySignal, match=f"^stopped by {number.name}$") as caught:
        signal.raise_signal(number)
    assert (stop.first_signal, caught.value.exit_status) == (caught.value, status)
    signal.raise_signal(signal.SIGTERM)
    with pytest.raises(StoppedBySignal, match=number.name):
        stop.check()


def test_what_asks_java_is_not_interrupted(stop: StopHandler) -> None:
    """Another thread halts it; when it has ended, in an error or not, the signal is told."""
    halted, by, reached, killed = Event(), [], [], Event()

    def halt() -> None:
        by.append(current_thread())
        halted.set()

    with pytest.raises(StoppedBySignal, match="SIGTERM"), stop.cancel_on_signal(halt, killed.set, timeout_s=1e6):
        signal.raise_signal(signal.SIGTERM)
        halted.wait()
        reached.append("the end")
        raise RuntimeError("the query was cancelled")
    assert reached and by[0] is not main_thread() and not killed.is_set()


def test_an_end_that_does_not_come_is_forced(stop: StopHandler) -> None:
    """After some time."""
    killed = Event()
    with pytest.raises(StoppedBySignal), stop.cancel_on_signal(killed.wait, killed.set, timeout_s=0.01):
        signal.raise_signal(signal.SIGTERM)
        killed.wait()


def test_a_second_signal_forces_the_end(stop: StopHandler) -> None:
    """Whoever presses the keys again does not want to wait; the status stays that of the first."""
    killed = Event()
    with (
        pytest.raises(StoppedBySignal, match="SIGTERM"),
        stop.cancel_on_signal(killed.wait, killed.set, timeout_s=1e6),
    ):
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        killed.wait()


def test_halting_that_hangs_when_all_is_over(stop: StopHandler) -> None:
    """It is waited for, and then ended by force."""
    killed = Event()
    with pytest.raises(StoppedBySignal), stop.cancel_on_signal(killed.wait, killed.set, timeout_s=0.01):
        signal.raise_signal(signal.SIGTERM)
    assert killed.is_set()


def test_without_a_signal(stop: StopHandler) -> None:
    """Nothing is halted, errors stay as they are, and the handlers of before come back."""
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


class _Deleted:
    """Raises what it is given where nothing can be raised; a signal may come just then."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._work = work

    def __del__(self) -> None:
        self._work()


def test_a_signal_where_nothing_can_be_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is noticed at the next look, and told once; whatever else goes wrong in such a place is told."""
    told: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda what: told.append(type(what.exc_value)))
    stop = StopHandler()
    with stop.handle_signals():
        _Deleted(lambda: signal.raise_signal(signal.SIGTERM))
        _Deleted(lambda: 1 // 0)
        with pytest.raises(StoppedBySignal):
            stop.check()
    assert told == [ZeroDivisionError]
