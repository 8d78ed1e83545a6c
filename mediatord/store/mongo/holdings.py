"""Who has how much of a queue, as this process has left it, so that it is not counted for every deposit."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from bson import ObjectId

from mediatord.store.mongo.lanes import Held, Lane
from mediatord.store.mongo.queue_finder import Queue
from mediatord.store.shares import Amount

# Origins in all of them.
_CAPACITY = 100_000

# Number of the last change, messages and bytes.
_State = tuple[int, int, int]


class Holdings:
    """
    Of the queues that were counted last. Every change of a queue, by whatever node, has a number: what is known of
    another one than the last is not used. An older version does not number its changes, but counts what there is.
    """

    def __init__(self, capacity: int = _CAPACITY) -> None:
        self._capacity = capacity
        self._origins = 0
        self._known: OrderedDict[ObjectId, tuple[_State, Held]] = OrderedDict()

    def of(self, queue: Queue) -> Held | None:
        """Who has how much of it; None if that has to be counted."""
        state, held = self._known.get(queue.place.recipient, (None, None))
        return held if state == (queue.changes, queue.messages, queue.bytes) else None

    def remember(self, lanes: Iterable[Lane]) -> None:
        """These were changed, and that is durable."""
        for lane in lanes:
            recipient = lane.queue.place.recipient
            if recipient in self._known:
                self._origins -= len(self._known.pop(recipient)[1].amounts)
            if lane.held is None:
                continue
            amounts = lane.held.amounts
            for origin, more in lane.more.items():
                amount = amounts.setdefault(origin, Amount())
                amount.add(more.messages, more.size)
                if not amount.messages:
                    del amounts[origin]
            self._known[recipient] = ((lane.queue.changes + 1, lane.messages, lane.bytes), lane.held)
            self._origins += len(amounts)
        while self._origins > self._capacity:
            _, (_, oldest) = self._known.popitem(last=False)
            self._origins -= len(oldest.amounts)
