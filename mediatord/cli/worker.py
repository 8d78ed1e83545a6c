"""One of the processes of a daemon with `workers` above 1."""

from __future__ import annotations

import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from twisted.internet.defer import Deferred, maybeDeferred
from twisted.logger import globalLogBeginner

from mediatord.config import Config
from mediatord.service import StartupError
from mediatord.steady import keep_steady
from mediatord.tap import Root
from mediatord.wiring import build
from mediatord.workers import Brief, Worker
from mediatord.workers.child import BRIEF
from mediatord.workers.worker import wind


def serve() -> int:
    """
    Do what the brief says until the supervisor, or its end, ends it; the exit status.

    :raise StartupError: there is no brief.
    """
    wind()  # not only once the reactor runs: who hangs before that is ended as well, should nobody be there to do it
    try:
        with os.fdopen(BRIEF, "rb") as file:
            brief = Brief.read(file.read())
    except (OSError, ValueError):
        raise StartupError("a worker is begun by its supervisor, which is what mediatord run starts") from None
    from twisted.internet import reactor  # noqa: TID251  this is the program

    keep_steady(reactor)
    return _serve(reactor, brief)


def _serve(reactor: Any, brief: Brief) -> int:
    worker = Worker(reactor, brief.place, partial(_orphaned, Path(brief.place.path).parent))
    root = Root(reactor, worker.unable)
    reactor.callWhenRunning(worker.connect)
    reactor.callWhenRunning(globalLogBeginner.beginLoggingTo, [worker.observe])
    root.run(Config.model_validate_json(brief.settings), partial(build, worker=worker))
    root.privilegedStartService()
    root.startService()

    async def stop() -> None:
        await maybeDeferred(root.stopService)
        worker.leave()

    reactor.addSystemEventTrigger("before", "shutdown", lambda: Deferred.fromCoroutine(stop()))
    reactor.run()
    return 1 if root.failed else 0


def _orphaned(directory: Path) -> NoReturn:
    """
    End as the supervisor did: at once. What was accepted is on disk.

    A worker that went on would be in the way of the next daemon, which has workers of the same name.
    """
    shutil.rmtree(directory, ignore_errors=True)
    os._exit(1)
