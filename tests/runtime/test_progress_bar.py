"""Progress bars of commands."""

from __future__ import annotations

import sys
from io import StringIO
from threading import Event

import pytest

from mediatord.runtime.progress_bar import progress_bar


class FakeStream(StringIO):
    """
    Standard error that may be a terminal.

    :ivar written: set by each write.
    """

    def __init__(self, *, is_terminal: bool) -> None:
        super().__init__()
        self._is_terminal = is_terminal
        self.written = Event()

    def isatty(self) -> bool:
        return self._is_terminal

    def write(self, text: str) -> int:
        length = super().write(text)
        self.written.set()
        return length

    def await_text(self, text: str) -> None:
        """Wait until this was written."""
        while text not in self.getvalue():
            assert self.written.wait(60.0), self.getvalue()
            self.written.clear()


@pytest.fixture
def terminal() -> FakeStream:
    return FakeStream(is_terminal=True)


def test_shows_share_of_total(terminal: FakeStream) -> None:
    with progress_bar("exporting", 200, stream=terminal, delay=0.0, interval=0.001) as update:
        update(50)
        terminal.await_text("25%")
        update(200)
    assert "exporting" in terminal.getvalue()
    assert "100%" in terminal.getvalue()
    assert terminal.getvalue().endswith("\n")


def test_shows_measured_amount(terminal: FakeStream) -> None:
    with progress_bar("copying", 10, measure=lambda: 3, stream=terminal, delay=0.0, interval=0.001):
        terminal.await_text("30%")


def test_never_exceeds_total(terminal: FakeStream) -> None:
    """A measured size may grow beyond the estimate."""
    with progress_bar("copying", 10, measure=lambda: 30, stream=terminal, delay=0.0, interval=0.001):
        terminal.await_text("100%")
    assert "300%" not in terminal.getvalue()


def test_shows_count_without_total(terminal: FakeStream) -> None:
    with progress_bar("reading", measure=lambda: 7, stream=terminal, delay=0.0, interval=0.001):
        terminal.await_text("7")


def test_moves_without_any_amount(terminal: FakeStream) -> None:
    with progress_bar("checking", stream=terminal, delay=0.0, interval=0.001):
        terminal.await_text("checking")
    assert "%" not in terminal.getvalue()


def test_is_hidden_from_quick_work(terminal: FakeStream) -> None:
    with progress_bar("exporting", 2, stream=terminal, delay=60.0) as update:
        update(1)
    assert terminal.getvalue() == ""


def test_is_hidden_from_files() -> None:
    stream = FakeStream(is_terminal=False)
    with progress_bar("exporting", 2, stream=stream, delay=0.0, interval=0.001) as update:
        update(1)
    assert stream.getvalue() == ""


def test_is_hidden_without_standard_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python has no such stream if it was closed before the start, as by `2>&-`."""
    monkeypatch.setattr(sys, "stderr", None)
    with progress_bar("exporting", 2, delay=0.0, interval=0.001) as update:
        update(1)


def test_ends_with_the_line_of_an_error(terminal: FakeStream) -> None:
    """The error is printed on a line of its own."""
    with pytest.raises(ValueError, match="damaged"):
        with progress_bar("exporting", 2, stream=terminal, delay=0.0, interval=0.001) as update:
            update(1)
            terminal.await_text("50%")
            raise ValueError("damaged")
    assert terminal.getvalue().endswith("\n")
