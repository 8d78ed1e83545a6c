"""How far something is: a bar on a terminal, nothing elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

# Calls between two looks at the bar: a million records are told of one by one.
_SELDOM = 256


@contextmanager
def bar(what: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
    """
    On standard error, as standard output is for what was asked for. What is given is to be told how much is done.

    :param total: None when that is not known.
    """
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=total)

        def tell(done: int) -> None:
            if done % _SELDOM == 0 or done == total:
                progress.update(task, completed=done)

        yield tell
