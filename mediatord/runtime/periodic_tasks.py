"""Tasks that are repeated while the daemon runs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable

from twisted.application.service import Service
from twisted.internet.defer import CancelledError, Deferred, gatherResults
from twisted.internet.interfaces import IReactorTime
from twisted.internet.task import LoopingCall
from twisted.logger import Logger

from mediatord.errors import StoreUnavailable
from mediatord.runtime.failure_logging import LogThrottle, redact_failure

_log = Logger()


class PeriodicTasks(Service):
    """
    Repeats tasks at fixed intervals, each first after its interval and never twice at once, whether they fail or not.

    :param tasks: each with its interval in seconds.
    :param what: names one run in the log.
    """

    name = "periodic tasks"

    def __init__(
        self, clock: IReactorTime, tasks: Iterable[tuple[Callable[[], Awaitable[None]], float]], what: str
    ) -> None:
        self._clock = clock
        self._tasks = tuple(tasks)
        self._what = what
        self._loops: dict[LoopingCall, Deferred[LoopingCall]] = {}

    def startService(self) -> None:
        """Start; each task runs for the first time after its interval."""
        super().startService()
        for task, interval in self._tasks:
            loop = LoopingCall(self._run, task, LogThrottle(self._clock))
            loop.clock = self._clock
            self._loops[loop] = loop.start(interval, now=False)

    def stopService(self) -> Deferred[list[LoopingCall]]:
        """Stop; fires when the running tasks have ended."""
        super().stopService()
        loops, self._loops = self._loops, {}
        for loop in loops:
            if loop.running:
                loop.stop()
        return gatherResults(loops.values())

    async def _run(self, task: Callable[[], Awaitable[None]], warning: LogThrottle) -> None:
        await run_logging_failures(task(), self._what, warning)


async def run_logging_failures(work: Awaitable[None], what: str, warning: LogThrottle) -> None:
    """Run `work` and log its failures; an unavailable store is logged only now and then."""
    try:
        await work
    except StoreUnavailable:
        if warning.count_occurrence():
            _log.warn("could not run {what}: the store was unavailable", what=what)
    except CancelledError:
        pass
    except Exception:
        _log.failure("{what} failed", redact_failure(), what=what)
