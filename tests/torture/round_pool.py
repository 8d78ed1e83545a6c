"""Runs rounds in parallel processes; each keeps its daemons as long as possible."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import cache
from threading import Lock, Thread, Timer
from typing import Any

from tests.torture.rounds import FaultRound, RoundOutcome

# Longer than any round takes.
STUCK_SECONDS = 400.0


class RoundPool:
    """
    :param rounds: rounds to run.
    :param options: options of each worker, except whether it can mount file systems.
    :param report: called with each outcome, by one thread at a time.
    """

    def __init__(
        self, rounds: Sequence[FaultRound], options: dict[str, Any], report: Callable[[RoundOutcome], None]
    ) -> None:
        self._rounds = list(rounds)
        self._options = {**options, "mounts": bool(mount_namespace_prefix())}
        self._report = report
        self._lock = Lock()

    def run(self, workers: int) -> None:
        """Return when all rounds are over."""
        stores = list(dict.fromkeys(fault_round.store for fault_round in self._rounds))
        threads = [
            Thread(target=self._start_worker, args=(stores[number % len(stores)],)) for number in range(workers)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _start_worker(self, store: str) -> None:
        process = None
        while (fault_round := self._next(store)) is not None:
            store = fault_round.store
            process = process if process is not None and process.poll() is None else self._start_process()
            outcome = _read_outcome(process, fault_round)
            with self._lock:
                self._report(outcome)
        if process is not None:
            assert process.stdin is not None
            process.stdin.close()
            process.wait()

    def _next(self, store: str) -> FaultRound | None:
        """A round on the store that the worker already uses, if there is one."""
        with self._lock:
            if not self._rounds:
                return None
            index = next((index for index, fault_round in enumerate(self._rounds) if fault_round.store == store), 0)
            return self._rounds.pop(index)

    def _start_process(self) -> subprocess.Popen[str]:
        command = [
            *mount_namespace_prefix(),
            sys.executable,
            "-m",
            "tests.torture",
            "worker",
            json.dumps(self._options),
        ]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@cache
def mount_namespace_prefix() -> tuple[str, ...]:
    """Command prefix that permits mounting file systems in a private namespace; empty if not possible."""
    for command in (("unshare", "--mount"), ("unshare", "--user", "--map-root-user", "--mount")):
        if shutil.which(command[0]) and _works([*command, "mount", "-t", "tmpfs", "tmpfs", "/mnt"]):
            return command
    return ()


def _works(command: Sequence[str]) -> bool:
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _read_outcome(process: subprocess.Popen[str], fault_round: FaultRound) -> RoundOutcome:
    assert process.stdin is not None and process.stdout is not None
    stuck = Timer(STUCK_SECONDS, process.kill)
    stuck.start()
    try:
        process.stdin.write(json.dumps(asdict(fault_round)) + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
    except BrokenPipeError:
        line = ""
    finally:
        stuck.cancel()
    if line:
        return RoundOutcome(**json.loads(line))
    return RoundOutcome(
        fault_round.number, fault_round.store, fault_round.kind, complaints=["the process that played it has died"]
    )
