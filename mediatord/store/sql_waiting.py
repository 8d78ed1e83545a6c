"""Messages that are to go, as they are read in SQL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mediatord.interfaces import Reason, Removed
from mediatord.store.known_queues import Queue

# A time in two numbers, because JSON would round it.
COLUMNS = """
    seq, id, recipient_id, size, CAST(received_at AS INTEGER), received_at - CAST(received_at AS INTEGER), pushes
"""
# In the table it is behind the payload, in the index it is not.
ORIGIN = """
    (
        SELECT origin FROM message o INDEXED BY message_of_recipient
        WHERE o.recipient_id = message.recipient_id AND o.seq = message.seq
    )
"""


class Waiting:
    """A message that is to go: its row without the payload, and its queue."""

    __slots__ = ("id", "origin", "pushes", "queue", "received_at", "seq", "size")

    def __init__(
        self, queue: Queue, seq: int, id: str, size: int, received_at: float, pushes: int, origin: int = 0
    ) -> None:
        self.queue = queue
        self.seq = seq
        self.id = id
        self.size = size
        self.received_at = received_at
        self.pushes = pushes
        self.origin = origin

    def removed(self, reason: Reason | None = None) -> Removed:
        queue = self.queue
        return Removed(self.id, queue.did, queue.account, self.size, self.received_at, self.pushes, reason)


def read_waiting(queue: Queue, row: Sequence[Any]) -> Waiting:
    """From the :data:`COLUMNS`, with its origin behind them or not."""
    seq, id_, _, size, seconds, fraction, pushes, *origin = row
    return Waiting(queue, seq, id_, size, seconds + fraction, pushes, *origin)
