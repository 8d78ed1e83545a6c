"""
Runs rounds; each is a line of JSON on standard input, and its outcome one on standard output.

A failed round keeps its files, and the next round on the same store starts a new daemon.
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
    :param keep: directory for files of failed rounds.
    :param mounts: as of :class:`~tests.torture.daemon_fixture.DaemonFixture`.
    :param syncs: whether disks honour syncs.
    """

    def __init__(self, keep: Path, *, mounts: bool, syncs: bool) -> None:
        self._keep = keep
        self._mounts = mounts
        self._syncs = syncs
        self._fixtures: dict[str, DaemonFixture] = {}

    async def run_round(self, fault_round: FaultRound) -> RoundOutcome:
        """Run one round."""
        outcome = RoundOutcome(fault_round.number, fault_round.store, fault_round.kind)
        try:
            outcome = await run_round(await self._open_fixture(fault_round), fault_round)
        except Exception:
            outcome.complaints.append(traceback.format_exc())
        if outcome.complaints and (fixture := self._fixtures.pop(fault_round.store, None)) is not None:
            await fixture.close(self._keep / failed_round_directory(fault_round.seed, fault_round.number))
        return outcome

    async def close(self) -> None:
        """End everything."""
        while self._fixtures:
            await self._fixtures.popitem()[1].close()

    async def _open_fixture(self, fault_round: FaultRound) -> DaemonFixture:
        if fault_round.store not in self._fixtures:
            self._fixtures[fault_round.store] = fixture = DaemonFixture(
                reactor, fault_round.store, mounts=self._mounts
            )
            await fixture.open(syncs=self._syncs)
        return self._fixtures[fault_round.store]


def main(options: str) -> None:
    """Run rounds until standard input ends. :param options: JSON, as of :class:`RoundWorker`."""
    arguments: dict[str, Any] = json.loads(options)
    # Output of libraries must not mix with outcomes.
    output = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    worker = RoundWorker(Path(arguments["keep"]), mounts=arguments["mounts"], syncs=arguments["syncs"])
    reactor.callWhenRunning(reactor.callInThread, _work, worker, output)
    reactor.run()


def _work(worker: RoundWorker, output: TextIO) -> None:
    try:
        for line in sys.stdin:
            fault_round = FaultRound(**json.loads(line))
            outcome: RoundOutcome = _run_in_reactor(partial(worker.run_round, fault_round))
            output.write(json.dumps(outcome.values) + "\n")
            output.flush()
    finally:
        with contextlib.suppress(Exception):
            _run_in_reactor(worker.close)
        reactor.callFromThread(reactor.stop)


def _run_in_reactor(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine in the reactor thread; return its result."""
    begin: Callable[[], Any] = lambda: Deferred.fromCoroutine(work())  # noqa: E731  it has no type otherwise
    result: T = blockingCallFromThread(reactor, begin)
    return result
