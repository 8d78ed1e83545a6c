"""Which cores the server has to itself and which ones its clients, so that "one core" is one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Cores:
    """
    :param server: where servers and floors run, one at a time.
    :param clients: where everything else runs; the same ones where there is only one.
    """

    server: frozenset[int]
    clients: frozenset[int]

    @property
    def apart(self) -> bool:
        """Whether servers and clients do not get into each other's way."""
        return not self.server & self.clients

    @property
    def note(self) -> str:
        """A sentence that says so."""
        if not self.apart:
            return "Servers and clients share one core."
        return f"Servers are pinned to core {min(self.server)}, one at a time; clients have {_listed(self.clients)}."


def split(servers: int = 1) -> Cores:
    """
    So many of the cores that we may use for the server, the rest for its clients.

    :param servers: at least one core is left to the clients, if there are two.
    """
    mine = sorted(os.sched_getaffinity(0))
    if len(mine) == 1:
        return Cores(frozenset(mine), frozenset(mine))
    servers = min(servers, len(mine) - 1)
    return Cores(frozenset(mine[:servers]), frozenset(mine[servers:]))


@contextmanager
def on(cores: frozenset[int]) -> Iterator[None]:
    """Run on these cores; children started meanwhile stay there with all their threads."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def cores_of(pid: int) -> frozenset[int]:
    """Where the threads of a process may run, all of them together."""
    return frozenset(
        core for thread in Path(f"/proc/{pid}/task").iterdir() for core in os.sched_getaffinity(int(thread.name))
    )


def _listed(cores: frozenset[int]) -> str:
    return f"core {min(cores)}" if len(cores) == 1 else f"cores {', '.join(map(str, sorted(cores)))}"
