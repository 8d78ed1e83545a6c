"""Child processes, with the time they took and the memory that they and their own children held."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread
from time import perf_counter
from typing import Any

from analytics.errors import AnalyticsError

_EVERY_S = 0.1


@dataclass(frozen=True, slots=True)
class Ended:
    """
    :param seconds: from its start to its end.
    :param peak: bytes resident in all its processes together, at the worst moment that was looked at.
    :param output: what it printed.
    :param told: lines of standard error, each with the seconds since the start.
    """

    status: int
    seconds: float
    peak: int
    output: str
    told: Sequence[tuple[float, str]]


def run(arguments: Sequence[str], fine: Sequence[int] = (0,)) -> Ended:
    """
    Run `python` with these arguments.

    :param fine: exit statuses that are.
    :raise AnalyticsError: it ended with another one.
    """
    began = perf_counter()
    with tempfile.TemporaryFile("w+") as output:
        child = subprocess.Popen(
            [sys.executable, *arguments], stdout=output, stderr=subprocess.PIPE, text=True, cwd=_ROOT
        )
        watch = _Watch(child.pid)
        watch.start()
        assert child.stderr is not None
        told = [(perf_counter() - began, line.rstrip()) for line in child.stderr]
        status = child.wait()
        seconds = perf_counter() - began
        peak = watch.stop()
        output.seek(0)
        printed = output.read()
    if status not in fine:
        last = told[-1][1] if told else "it said nothing"
        raise AnalyticsError(f"{' '.join(arguments[:3])} ended with status {status}: {last}")
    return Ended(status, seconds, peak, printed, told)


def measured(task: str, **given: Any) -> Mapping[str, Any]:
    """
    What a task of :mod:`analytics.goals.tasks` found out, in a process of its own.

    :raise AnalyticsError: it failed.
    """
    found: Mapping[str, Any] = json.loads(run(["-m", "analytics.goals.tasks", task, json.dumps(given)]).output)
    return found


_ROOT = Path(__file__).resolve().parents[2]


class _Watch(Thread):
    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._pid = pid
        self._over = Event()
        self._peak = 0

    def run(self) -> None:
        while not self._over.wait(_EVERY_S):
            self._peak = max(self._peak, resident(self._pid))

    def stop(self) -> int:
        """Its peak."""
        self._over.set()
        self.join()
        return self._peak


def resident(pid: int, parent: tuple[int, ...] = (0, 0)) -> int:
    """
    Bytes of a process and all below it.

    :param parent: pages that its parent has, all and resident. One that was just forked has those very pages.
    """
    try:
        size, held = map(int, Path(f"/proc/{pid}/statm").read_text().split()[:2])
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        children = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except (OSError, ValueError):  # it has just ended
        return 0
    # The parent goes on meanwhile, and pages of files are not the child's before it looks at them.
    is_forked = abs(size - parent[0]) < 0.01 * parent[0] and abs(held - parent[1]) < 0.1 * parent[1]
    own = 0 if is_forked else held * os.sysconf("SC_PAGE_SIZE")
    return own + sum(resident(child, (size, held)) for child in children)
