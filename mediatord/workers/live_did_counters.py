"""Which worker may have sockets of a DID: counters in memory that all workers of a daemon map."""

from __future__ import annotations

import mmap
from pathlib import Path
from zlib import crc32

from twisted.internet.defer import Deferred, succeed

# Counters of a worker. With 10,000 live DIDs one of 26 others shares the counter of one of them.
COUNTERS_PER_WORKER = 262_144
_COUNTER_BYTES = 4
_FILE_NAME = "live-dids"


class LiveDIDCounters:
    """
    Counts the live DIDs of each worker by a hash of the DID, so that nobody has to be asked where one is live.

    Each worker writes its own counters only, so no lock is needed. A counter above 0 may be due to another DID with
    the same hash; one at 0 is certain. A DID is counted before its socket's backlog is read, so a message that is
    committed later is pushed, and one that was committed before is in the backlog.

    It publishes presence as :class:`~mediatord.delivery.connections.IPresencePublisher`.

    :param directory: that of :func:`create_live_did_counters`.
    :param number: index of this worker, from 0. Its counters are set to zero: those of a killed predecessor remain.
    :raise OSError: the file cannot be mapped.
    """

    def __init__(self, directory: Path, number: int) -> None:
        with open(directory / _FILE_NAME, "r+b") as file:
            memory = mmap.mmap(file.fileno(), 0)
        counters = memoryview(memory).cast("I")
        sections = range(0, len(counters), COUNTERS_PER_WORKER)
        self._others = [
            (other, counters[start : start + COUNTERS_PER_WORKER])
            for other, start in enumerate(sections)
            if other != number
        ]
        self._own = counters[number * COUNTERS_PER_WORKER :][:COUNTERS_PER_WORKER]
        self._own[:] = memoryview(bytes(len(self._own) * _COUNTER_BYTES)).cast("I")
        self._present: set[str] = set()

    @property
    def others(self) -> list[int]:
        """The numbers of all other workers."""
        return [number for number, _ in self._others]

    def add(self, did: str) -> Deferred[None]:
        """Count a DID as live here, once; fires at once."""
        if did not in self._present:
            self._present.add(did)
            self._own[_counter_index(did)] += 1
        return succeed(None)

    def remove(self, did: str) -> None:
        """The last socket of a DID is gone."""
        if did in self._present:
            self._present.remove(did)
            self._own[_counter_index(did)] -= 1

    def find_workers(self, did: str) -> list[int]:
        """The numbers of the other workers that may have sockets of a DID."""
        index = _counter_index(did)
        return [number for number, counters in self._others if counters[index]]


def create_live_did_counters(directory: Path, count: int) -> None:
    """
    Create the counters of all workers.

    :raise OSError: the file cannot be written.
    """
    (directory / _FILE_NAME).write_bytes(bytes(count * COUNTERS_PER_WORKER * _COUNTER_BYTES))


def _counter_index(did: str) -> int:
    return crc32(did.encode("utf-8", "surrogatepass")) % COUNTERS_PER_WORKER
