"""Processes that play rounds at the same time; each keeps its stages for as long as it can."""

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

# A round that takes so long will not end.
STUCK_SECONDS = 400.0


class RoundPool:
    """
    :param rounds: what is to be played.
    :param options: of each lane, beside whether it can mount.
    :param tell: called with each outcome, by one thread at a time.
    """

    def __init__(
        self, rounds: Sequence[FaultRound], options: dict[str, Any], tell: Callable[[RoundOutcome], None]
    ) -> None:
        self._rounds = list(rounds)
        self._options = {**options, "mounts": bool(mount_namespace_prefix())}
        self._tell = tell
        self._lock = Lock()

    def run(self, workers: int) -> None:
        """Returns when all rounds are over."""
        stores = list(dict.fromkeys(this.store for this in self._rounds))
        threads = [
            Thread(target=self._start_worker, args=(stores[number % len(stores)],)) for number in range(workers)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _start_worker(self, store: str) -> None:
        process = None
        while (this := self._next(store)) is not None:
            store = this.store
            process = process if process is not None and process.poll() is None else self._begin()
            outcome = _read_outcome(process, this)
            with self._lock:
                self._tell(outcome)
        if process is not None:
            assert process.stdin is not None
            process.stdin.close()
            process.wait()

    def _next(self, store: str) -> FaultRound | None:
        """One on the store that is there already, if there is any."""
        with self._lock:
            if not self._rounds:
                return None
            place = next((place for place, this in enumerate(self._rounds) if this.store == store), 0)
            return self._rounds.pop(place)

    def _begin(self) -> subprocess.Popen[str]:
        command = [
            *mount_namespace_prefix(),
            sys.executable,
            "-m",
            "tests.torture",
            "lane",
            json.dumps(self._options),
        ]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@cache
def mount_namespace_prefix() -> tuple[str, ...]:
    """What to begin a command with, so that it can mount file systems that nobody else sees; nothing if it cannot."""
    for command in (("unshare", "--mount"), ("unshare", "--user", "--map-root-user", "--mount")):
        if shutil.which(command[0]) and _works([*command, "mount", "-t", "tmpfs", "tmpfs", "/mnt"]):
            return command
    return ()


def _works(command: Sequence[str]) -> bool:
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _read_outcome(process: subprocess.Popen[str], this: FaultRound) -> RoundOutcome:
    assert process.stdin is not None and process.stdout is not None
    stuck = Timer(STUCK_SECONDS, process.kill)
    stuck.start()
    try:
        process.stdin.write(json.dumps(asdict(this)) + "\n")
        process.stdin.flush()
        said = process.stdout.readline()
    except BrokenPipeError:
        said = ""
    finally:
        stuck.cancel()
    if said:
        return RoundOutcome(**json.loads(said))
    return RoundOutcome(this.number, this.store, this.kind, complaints=["the process that played it has died"])
