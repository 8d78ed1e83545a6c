"""Which queues are the longest, in memory."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice


class Ranking:
    """
    How many messages wait for each DID, with the DIDs also kept by that number.

    Adding and asking for the top cost nothing that grows with the number of DIDs: there are no more different
    numbers than a queue may have messages.
    """

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._dids: dict[int, dict[str, None]] = {}
        self._total = 0

    def change(self, did: str, difference: int) -> None:
        """Count `difference` more messages (or fewer, if negative) for a DID."""
        before = self._counts.pop(did, 0)
        if before:
            peers = self._dids[before]
            del peers[did]
            if not peers:
                del self._dids[before]
        after = before + difference
        if after:
            self._counts[did] = after
            self._dids.setdefault(after, {})[did] = None
        self._total += difference

    def top(self, number: int) -> tuple[list[tuple[str, int]], int]:
        """The DIDs with most messages, most first, and the sum of all others."""
        largest = list(islice(self._descending(), number))
        return largest, self._total - sum(count for _, count in largest)

    def _descending(self) -> Iterator[tuple[str, int]]:
        for count in sorted(self._dids, reverse=True):
            for did in self._dids[count]:
                yield did, count
