"""Which message makes room, against the rule as it is written, applied to every message anew."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from mediatord.store.fair_share import (
    NETWORK_MASK,
    SENDER_MASK,
    MessageVolume,
    SenderGroup,
    SenderUsage,
    get_party,
    is_from_group,
    rank_sender,
)
from mediatord.store.interfaces.messages import QueueLimits

KNOWN = frozenset({2, 3 << 32})
POLICIES = (
    QueueLimits(12, 120, share=0.5, reserved=0.25),
    QueueLimits(12, 120, reserved=0.1),
    QueueLimits(12, 120, share=0.3, reserved=1 / 3),
    QueueLimits(12, 120, share=0.4),
)
STEPS = 600

Message = tuple[int, int]


def amount(messages: list[Message], wanted: Callable[[int], bool]) -> MessageVolume:
    """How much of these is from such origins."""
    sizes = [size for origin, size in messages if wanted(origin)]
    return MessageVolume(len(sizes), sum(sizes))


def over(limits: QueueLimits, share: float, what: MessageVolume) -> bool:
    """More than a share."""
    return what.messages > share * limits.max_messages or what.size > share * limits.max_bytes


class Rule:
    """As `QueueLimits` has it, for a message that comes."""

    def __init__(self, limits: QueueLimits, waiting: list[Message], new: Message) -> None:
        self.limits = limits
        self.waiting = waiting
        self.new = new

    def rank(self, origin: int) -> int:
        """All are of one where nothing is reserved."""
        return rank_sender(origin, KNOWN) if self.limits.reserved else 0

    def is_beside(self, one: int, other: int) -> bool:
        """Whether both are of one rank and network."""
        return one & NETWORK_MASK == other & NETWORK_MASK and self.rank(one) == self.rank(other)

    def victim(self) -> Message:
        """What makes room."""
        own = self.own_victim() if self.limits.share < 1 else None
        return own or (self.of_a_rank() if self.limits.reserved else self.waiting[0])

    def own_victim(self) -> Message | None:
        """The oldest of its sender or network, if that has more than its share."""
        origin, size = self.new

        def same_sender(of: int) -> bool:
            return of & SENDER_MASK == origin & SENDER_MASK != 0

        def same_network(of: int) -> bool:
            return bool(origin & NETWORK_MASK) and self.is_beside(of, origin)

        for same in (same_sender, same_network):
            held = amount(self.waiting, same)
            if held.messages and over(self.limits, self.limits.share, held.plus(MessageVolume(1, size))):
                return next(one for one in self.waiting if same(one[0]))
        return None

    def of_a_rank(self) -> Message:
        """The oldest of the network that has most of the lowest rank that has too much."""
        there = sorted({self.rank(of) for of, _ in self.waiting})
        too_much = [one for one in there if self.has_too_much(one)]
        lowest = [one for one in self.waiting if self.rank(one[0]) == [*too_much, *there][0]]
        most = max(self.weight(of) for of, _ in lowest)
        if self.weight(lowest[0][0]) == most:
            return lowest[0]
        network = min(of & NETWORK_MASK for of, _ in lowest if self.weight(of) == most)
        return next(one for one in lowest if one[0] & NETWORK_MASK == network)

    def has_too_much(self, rank: int) -> bool:
        """More than is reserved for it."""
        held = amount([*self.waiting, self.new], lambda of: self.rank(of) == rank)
        return over(self.limits, self.limits.reserved, held)

    def weight(self, origin: int) -> int:
        """How much its network has of its rank."""
        held = amount([*self.waiting, self.new], lambda of: self.is_beside(of, origin))
        return max(held.messages * self.limits.max_bytes, held.size * self.limits.max_messages)


def test_by_the_rule() -> None:
    """It is the same, whatever came and went before."""
    for seed, limits in enumerate(POLICIES):
        random = Random(seed)
        waiting: list[Message] = []
        usage = SenderUsage(limits, KNOWN)
        for _ in range(STEPS):
            new = random.randrange(5) << 32 | random.choice((0, 0, 1, 2, 4)), random.choice((1, 3, 15))
            while len(waiting) >= limits.max_messages or sum(size for _, size in waiting) + new[1] > limits.max_bytes:
                expected = Rule(limits, waiting, new).victim()

                def oldest(part: SenderGroup, there: list[Message] = waiting) -> int | None:
                    return next((of for of, _ in there if is_from_group(part, of, KNOWN)), None)

                part = usage.victim(new[0], MessageVolume(1, new[1]), oldest)
                assert part is not None
                found = next(one for one in waiting if is_from_group(part, one[0], KNOWN))
                assert found == expected, (limits, waiting, new, part)
                waiting.remove(found)
                usage.change(found[0], -1, -found[1])
            waiting.append(new)
            usage.change(new[0], 1, new[1])


def test_parties() -> None:
    """An acknowledgement is of the sender that is proven, and of the network where none is."""
    assert [get_party(origin) for origin in (5 << 32 | 7, 7, 5 << 32, 0)] == [7, 7, 5 << 32, 0]
    assert [rank_sender(origin, KNOWN) for origin in (3 << 32, 3 << 32 | 7, 9 << 32 | 2, 9 << 32, 0)] == [
        2,
        1,
        2,
        0,
        0,
    ]


def test_bounded() -> None:
    """A usage that is changed again and again does not grow, whether anybody asks for its largest network or not."""
    usage = SenderUsage(QueueLimits(12, 120, share=0.5, reserved=0.25), KNOWN, [(1 << 32, 3, 9), (5 << 32, 3, 9)])
    usage.victim(1 << 32, MessageVolume(1, 1), lambda group: 5 << 32)
    for _ in range(1_000):
        usage.change(1 << 32, 1, 1)
        usage.change(1 << 32, -1, -1)
    heaps = sum([len(heap) for heap in usage._heaps.values()])
    assert heaps < 200
    assert len(usage) > heaps, "the heaps have to count against the bound of a cache"
