"""Progress bars of commands, on standard error."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import repeat
from threading import Event, Thread
from typing import TextIO

import click

# Seconds before a bar appears, so that quick commands have none, and between two updates of it.
_DELAY = 1.0
_INTERVAL = 0.2


def is_terminal(stream: TextIO | None) -> bool:
    """Whether a stream is a terminal. A standard stream that was closed before the start is None."""
    return stream is not None and stream.isatty()


class _ProgressCounter:
    """The amount of work that is done."""

    done = 0

    def set(self, done: int) -> None:
        self.done = done


@contextmanager
def progress_bar(
    label: str,
    total: int | None = None,
    *,
    measure: Callable[[], int] | None = None,
    stream: TextIO | None = None,
    delay: float = _DELAY,
    interval: float = _INTERVAL,
) -> Iterator[Callable[[int], None]]:
    """
    Show a progress bar if the work takes longer than a second and standard error is a terminal. Yields the function
    to call with the amount that is done.

    A thread draws the bar, so that it also moves during a call that reports nothing, such as one of SQLite.

    :param total: None if unknown; the bar then shows the amount that is done, if any, and moves.
    :param measure: returns the amount that is done, for work that cannot report it.
    :param stream: default: standard error.
    """
    stream = sys.stderr if stream is None else stream
    counter = _ProgressCounter()
    if not is_terminal(stream):
        yield counter.set
        return

    def read_done() -> int:
        return counter.done if measure is None else measure()

    ended = Event()
    thread = Thread(target=_draw, args=(label, total, read_done, stream, ended, delay, interval), daemon=True)
    thread.start()
    try:
        yield counter.set
    finally:
        ended.set()
        thread.join()


def _draw(
    label: str,
    total: int | None,
    read_done: Callable[[], int],
    stream: TextIO,
    ended: Event,
    delay: float,
    interval: float,
) -> None:
    if ended.wait(delay):
        return
    counts = total is None and read_done() > 0
    items = repeat(None) if total is None else None
    with click.progressbar(items, total, label=label, file=stream, show_pos=counts) as bar:
        is_last = False
        while not is_last:
            is_last = ended.wait(interval)
            done = read_done()
            # Without any amount each update is a step, which moves the bar.
            bar.update(max(0, done - bar.pos) if total is not None or counts else 1)
