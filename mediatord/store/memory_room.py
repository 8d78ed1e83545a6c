"""Room in the queues of the memory store."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from mediatord.errors import QueueFull
from mediatord.interfaces import Deposit, Payload, QueueLimits, Reason
from mediatord.store.memory_queues import Entry, Queue
from mediatord.store.shares import Amount, Part, Usage, excess, is_counted, is_in


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
        coming: dict[Queue, tuple[Amount, Usage]] = {}
        for queue, one in deposits:
            if queue not in coming:
                coming[queue] = Amount(len(queue.lane.entries), queue.lane.size), self._usage(queue)
            whole, usage = coming[queue]
            amount = Amount(len(one.payloads), sum(len(payload.data) for payload in one.payloads))
            whole.add(amount.messages, amount.size)
            if excess(self._limits, whole.messages, whole.size) is not None:
                raise QueueFull()
            usage.check(one.origin, amount)
            usage.change(one.origin, amount.messages, amount.size)

    def victims(self, queue: Queue, origin: int, messages: int, size: int) -> Iterator[tuple[Entry, Reason]]:
        """
        What has to go so that so many messages of so many bytes fit beside the rest; each is to be removed before the
        next is asked for.
        """
        coming = Amount(messages, size)
        usage: Usage | None = None
        while reason := excess(self._limits, messages + len(queue.lane.entries), size + queue.lane.size):
            if usage is None:
                usage = self._usage(queue) if is_counted(self._limits, origin) else Usage(self._limits, frozenset())
            known = usage.known

            def oldest(part: Part, known: frozenset[int] = known) -> int | None:
                return next(
                    (one.origin for one in queue.lane.entries.values() if is_in(part, one.origin, known)), None
                )

            part = usage.victim(origin, coming, oldest)
            if part is None:
                return
            victim = next(one for one in queue.lane.entries.values() if is_in(part, one.origin, known))
            if len(usage):
                usage.change(victim.origin, -1, -victim.size)
            yield victim, reason

    def _usage(self, queue: Queue) -> Usage:
        senders = queue.mailbox.senders.get(queue.did)
        found = ((one.origin, 1, one.size) for one in queue.lane.entries.values())
        return Usage(self._limits, senders.known if senders else frozenset(), found)
