"""
Who has how much of a queue, and which of its messages makes room: what the backends have in common.

A party is a number: one half of an origin, the other half being 0 (:class:`~mediatord.interfaces.QueueLimits`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mediatord.errors import QueueFull
from mediatord.interfaces import QueueLimits, Reason

SENDER, NETWORK = 0x0000_FFFF, 0xFFFF_0000


@dataclass(slots=True)
class Amount:
    """So many messages of so many bytes."""

    messages: int = 0
    size: int = 0

    def add(self, messages: int, size: int) -> None:
        """Count so much more, or less."""
        self.messages += messages
        self.size += size

    def plus(self, other: Amount) -> Amount:
        """Both together."""
        return Amount(self.messages + other.messages, self.size + other.size)


def parties_of(origin: int) -> list[int]:
    """The sender and its network, as far as they are known, in the order in which their mail makes room."""
    return [party for party in (origin & SENDER, origin & NETWORK) if party]


def counting_parties(limits: QueueLimits, origin: int) -> list[int]:
    """Those of them to which a share applies."""
    return parties_of(origin) if limits.share < 1 else []


def excess(limits: QueueLimits, messages: int, size: int) -> Reason | None:
    """The limit that a queue with so much in it is over."""
    if messages > limits.max_messages:
        return "fifo_count"
    return "fifo_bytes" if size > limits.max_bytes else None


def is_over_share(limits: QueueLimits, messages: int, size: int) -> bool:
    """Whether so much is more than one party may have."""
    return messages > limits.share * limits.max_messages or size > limits.share * limits.max_bytes


def refuse_excess(limits: QueueLimits, whole: Amount, parties: Iterable[Amount]) -> None:
    """
    :param whole: what a queue would have; `parties` what those would have that a deposit is from.
    :raise QueueFull: that is too much.
    """
    if excess(limits, whole.messages, whole.size) is not None:
        raise QueueFull()
    if any(is_over_share(limits, one.messages, one.size) for one in parties):
        raise QueueFull()
