"""Sockets that come, as all workers of a daemon see it: counters in memory that they share."""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from pathlib import Path
from zlib import crc32

# Counters of each worker. A DID has one of them, with others.
COUNTERS = 4_096
_BYTES = 8


class SharedArrivals:
    """
    Each worker counts in a part of its own, so that nobody has to take turns. Whoever takes the place of a worker
    goes on counting where that one ended.

    :param number: of the worker, counted from 0.
    """

    def __init__(self, path: Path, number: int) -> None:
        with open(path, "r+b") as file:
            memory = mmap.mmap(file.fileno(), 0)
        self._counters = memoryview(memory).cast("Q")
        parts = range(0, len(self._counters), COUNTERS)
        self._own = parts[number]
        self._others = [part for part in parts if part != self._own]

    @classmethod
    def of(cls, socket: Path) -> SharedArrivals | None:
        """
        That of the worker whose node-to-node socket is called so; None where no supervisor has made any.

        :raise OSError: it cannot be had.
        """
        path = path_beside(socket)
        return cls(path, int(socket.stem) - 1) if path.exists() else None

    def came(self, dids: Iterable[str]) -> None:
        """Sockets of these are here, and the store knows it."""
        for did in dids:
            self._counters[self._own + _place(did)] += 1

    def sign(self, did: str) -> tuple[int, ...]:
        """Never the same before a socket of the DID came to another worker and after that."""
        place, counters = _place(did), self._counters
        return tuple([counters[part + place] for part in self._others])


def make_arrivals(socket: Path, count: int) -> None:
    """
    Make room for the counters of so many workers.

    :param socket: node-to-node socket of one of them.
    :raise OSError: there is none.
    """
    path_beside(socket).write_bytes(bytes(count * COUNTERS * _BYTES))


def path_beside(socket: Path) -> Path:
    """Where the counters are that go with a node-to-node socket."""
    return socket.with_name("arrivals")


def _place(did: str) -> int:
    return crc32(did.encode("utf-8", "surrogatepass")) % COUNTERS
