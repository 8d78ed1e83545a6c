"""Room in the queues of the memory store."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from mediatord.interfaces import Deposit, Payload, QueueLimits, Reason
from mediatord.store.memory_queues import Entry, Lane, Queue
from mediatord.store.shares import Amount, counting_parties, excess, is_over_share, refuse_excess


class Room:
    """How much a queue may have, and which of its messages make room."""

    def __init__(self, limits: QueueLimits) -> None:
        self._limits = limits

    def fits(self, payload: Payload) -> bool:
        """Whether it could be in any queue."""
        return len(payload.data) <= self._limits.max_bytes

    def check(self, deposits: Iterable[tuple[Queue, Deposit]]) -> None:
        """:raise QueueFull: one of these deposits, which come one after another, is to be refused."""
        if self._limits.when_full != "refuse":
            return
        coming: dict[tuple[Queue, int], Amount] = {}
        for queue, one in deposits:
            size = sum(len(payload.data) for payload in one.payloads)
            amounts = []
            for party in (0, *counting_parties(self._limits, one.origin)):
                amount = coming.setdefault((queue, party), Amount())
                amount.add(len(one.payloads), size)
                lane = queue.parties.get(party, Lane()) if party else queue.lane
                amounts.append(Amount(amount.messages + len(lane.entries), amount.size + lane.size))
            refuse_excess(self._limits, amounts[0], amounts[1:])

    def victims(self, queue: Queue, origin: int, messages: int, size: int) -> Iterator[tuple[Entry, Reason]]:
        """
        What has to go so that so many messages of so many bytes fit beside the rest; each is to be removed before the
        next is asked for.
        """
        shared = counting_parties(self._limits, origin)
        while reason := excess(self._limits, messages + len(queue.lane.entries), size + queue.lane.size):
            lanes = [queue.parties[party] for party in shared if party in queue.parties]
            greedy = [
                lane for lane in lanes if is_over_share(self._limits, messages + len(lane.entries), size + lane.size)
            ]
            oldest = next(iter([*greedy, queue.lane][0].entries.values()), None)
            if oldest is None:
                return
            yield oldest, reason
