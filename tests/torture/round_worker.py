"""
Plays rounds, one after the other; each is a line of JSON on standard input, and its outcome one on standard output.

What fails leaves what it can, and the next round on the same store begins with everything new.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import traceback
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any, TextIO, TypeVar

from twisted.internet import reactor as _reactor  # noqa: TID251  the daemon is a child process, its sockets are real
from twisted.internet.defer import Deferred
from twisted.internet.threads import blockingCallFromThread

from tests.torture.daemon_fixture import DaemonFixture
from tests.torture.rounds import FaultRound, RoundOutcome, failed_round_directory, run_round

reactor: Any = _reactor

T = TypeVar("T")


class RoundWorker:
    """
    :param keep: where the remains of failed rounds go.
    :param mounts: as of :class:`~tests.torture.daemon_fixture.DaemonFixture`.
    :param syncs: whether disks do as they are told.
    """

    def __init__(self, keep: Path, *, mounts: bool, syncs: bool) -> None:
        self._keep = keep
        self._mounts = mounts
        self._syncs = syncs
        self._stages: dict[str, DaemonFixture] = {}

    async def play(self, this: FaultRound) -> RoundOutcome:
        """One round."""
        outcome = RoundOutcome(this.number, this.store, this.kind)
        try:
            outcome = await run_round(await self._stage(this), this)
        except Exception:
            outcome.complaints.append(traceback.format_exc())
        if outcome.complaints and (stage := self._stages.pop(this.store, None)) is not None:
            await stage.close(self._keep / failed_round_directory(this.seed, this.number))
        return outcome

    async def close(self) -> None:
        """End everything."""
        while self._stages:
            await self._stages.popitem()[1].close()

    async def _stage(self, this: FaultRound) -> DaemonFixture:
        if this.store not in self._stages:
            self._stages[this.store] = stage = DaemonFixture(reactor, this.store, mounts=self._mounts)
            await stage.open(syncs=self._syncs)
        return self._stages[this.store]


def main(options: str) -> None:
    """Until standard input ends. :param options: JSON, as of :class:`Lane`."""
    arguments: dict[str, Any] = json.loads(options)
    # What libraries print is not an outcome.
    said = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    worker = RoundWorker(Path(arguments["keep"]), mounts=arguments["mounts"], syncs=arguments["syncs"])
    reactor.callWhenRunning(reactor.callInThread, _work, worker, said)
    reactor.run()


def _work(worker: RoundWorker, said: TextIO) -> None:
    try:
        for line in sys.stdin:
            this = FaultRound(**json.loads(line))
            outcome: RoundOutcome = _done(partial(worker.play, this))
            said.write(json.dumps(outcome.values) + "\n")
            said.flush()
    finally:
        with contextlib.suppress(Exception):
            _done(worker.close)
        reactor.callFromThread(reactor.stop)


def _done(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """What comes of it in the thread of the reactor."""
    begin: Callable[[], Any] = lambda: Deferred.fromCoroutine(work())  # noqa: E731  it has no type otherwise
    result: T = blockingCallFromThread(reactor, begin)
    return result
