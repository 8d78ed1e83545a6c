"""Stop a daemon of ours, do something to its files, and start it again."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

from mediatord.bench.cores import cores_of, on
from mediatord.wallet.throwaway import Daemon, DaemonFailed, is_healthy

_STOP_SECONDS = 60.0
_START_SECONDS = 60.0
_BETWEEN_LOOKS_SECONDS = 0.01


@dataclass(frozen=True, slots=True)
class Way:
    """How a daemon was started: its command line, its environment, and where it runs."""

    words: tuple[str, ...]
    environment: dict[str, str] = field(repr=False)
    cores: frozenset[int]

    @classmethod
    def of(cls, pid: int) -> Way:
        """That of a running process."""
        words = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
        pairs = (pair.partition(b"=") for pair in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") if pair)
        environment = {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}
        return cls(tuple(map(os.fsdecode, words)), environment, cores_of(pid))


def stop(pid: int) -> Way:
    """End a child process in an orderly way, and wait for that; how it could be started again."""
    way = Way.of(pid)
    os.kill(pid, signal.SIGTERM)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    return way


@contextmanager
def started_again(way: Way, daemon: Daemon) -> Iterator[tuple[Daemon, float]]:
    """
    The daemon under another process id, and the seconds until it said that it is well; ended on leaving.

    :param daemon: the one that was stopped.
    :raise DaemonFailed: it did not start.
    """
    begun = perf_counter()
    with on(way.cores), open(daemon.directory / "output.txt", "ab") as output:
        process = subprocess.Popen(
            way.words, env=way.environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
    try:
        while not is_healthy(daemon.url):
            if perf_counter() - begun > _START_SECONDS or process.poll() is not None:
                raise DaemonFailed("the daemon did not start again")
            _pause(process)
        yield Daemon(daemon.url, daemon.directory, process.pid), perf_counter() - begun
    finally:
        if process.poll() is None:
            process.terminate()
        process.wait(_STOP_SECONDS)


def _pause(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(_BETWEEN_LOOKS_SECONDS)
    except subprocess.TimeoutExpired:
        return
