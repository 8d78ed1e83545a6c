"""Choice of the evicted message, compared with a direct implementation of the rule."""

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


def sum_volume(messages: list[Message], wanted: Callable[[int], bool]) -> MessageVolume:
    """Volume of the messages with matching origins."""
    sizes = [size for origin, size in messages if wanted(origin)]
    return MessageVolume(len(sizes), sum(sizes))


def exceeds_share(limits: QueueLimits, share: float, what: MessageVolume) -> bool:
    """Whether a volume exceeds a share of the limits."""
    return what.messages > share * limits.max_messages or what.size > share * limits.max_bytes


class EvictionRule:
    """The rule of `QueueLimits`, for one new message."""

    def __init__(self, limits: QueueLimits, waiting: list[Message], new: Message) -> None:
        self.limits = limits
        self.waiting = waiting
        self.new = new

    def get_rank(self, origin: int) -> int:
        """Rank of an origin; all have the same one if nothing is reserved."""
        return rank_sender(origin, KNOWN) if self.limits.reserved else 0

    def are_grouped(self, one: int, other: int) -> bool:
        """Whether both are of one rank and network."""
        return one & NETWORK_MASK == other & NETWORK_MASK and self.get_rank(one) == self.get_rank(other)

    def find_victim(self) -> Message:
        """The message to evict."""
        own = self.find_own_victim() if self.limits.share < 1 else None
        return own or (self.find_victim_by_rank() if self.limits.reserved else self.waiting[0])

    def find_own_victim(self) -> Message | None:
        """The oldest message of its sender or network, if that exceeds its share."""
        origin, size = self.new

        def same_sender(of: int) -> bool:
            return of & SENDER_MASK == origin & SENDER_MASK != 0

        def same_network(of: int) -> bool:
            return bool(origin & NETWORK_MASK) and self.are_grouped(of, origin)

        for same in (same_sender, same_network):
            held = sum_volume(self.waiting, same)
            if held.messages and exceeds_share(self.limits, self.limits.share, held.plus(MessageVolume(1, size))):
                return next(message for message in self.waiting if same(message[0]))
        return None

    def find_victim_by_rank(self) -> Message:
        """The oldest message of the largest network in the lowest rank that exceeds its reserve."""
        existing = sorted({self.get_rank(of) for of, _ in self.waiting})
        too_much = [item for item in existing if self.exceeds_reserve(item)]
        lowest = [message for message in self.waiting if self.get_rank(message[0]) == [*too_much, *existing][0]]
        most = max(self.get_weight(of) for of, _ in lowest)
        if self.get_weight(lowest[0][0]) == most:
            return lowest[0]
        network = min(of & NETWORK_MASK for of, _ in lowest if self.get_weight(of) == most)
        return next(one for one in lowest if one[0] & NETWORK_MASK == network)

    def exceeds_reserve(self, rank: int) -> bool:
        """Whether a rank has more than its reserve."""
        held = sum_volume([*self.waiting, self.new], lambda of: self.get_rank(of) == rank)
        return exceeds_share(self.limits, self.limits.reserved, held)

    def get_weight(self, origin: int) -> int:
        """Usage by its network within its rank."""
        held = sum_volume([*self.waiting, self.new], lambda of: self.are_grouped(of, origin))
        return max(held.messages * self.limits.max_bytes, held.size * self.limits.max_messages)


def test_agrees_with_rule() -> None:
    """The evicted message is that of the rule, whatever was queued before."""
    for seed, limits in enumerate(POLICIES):
        random = Random(seed)
        waiting: list[Message] = []
        usage = SenderUsage(limits, KNOWN)
        for _ in range(STEPS):
            new = random.randrange(5) << 32 | random.choice((0, 0, 1, 2, 4)), random.choice((1, 3, 15))
            while len(waiting) >= limits.max_messages or sum(size for _, size in waiting) + new[1] > limits.max_bytes:
                expected = EvictionRule(limits, waiting, new).find_victim()

                def find_oldest(part: SenderGroup, existing: list[Message] = waiting) -> int | None:
                    return next((of for of, _ in existing if is_from_group(part, of, KNOWN)), None)

                part = usage.victim(new[0], MessageVolume(1, new[1]), find_oldest)
                assert part is not None
                found = next(message for message in waiting if is_from_group(part, message[0], KNOWN))
                assert found == expected, (limits, waiting, new, part)
                waiting.remove(found)
                usage.change(found[0], -1, -found[1])
            waiting.append(new)
            usage.change(new[0], 1, new[1])


def test_party_is_proven_sender_or_network() -> None:
    """An acknowledgement counts for the proven sender, else for the network."""
    assert [get_party(origin) for origin in (5 << 32 | 7, 7, 5 << 32, 0)] == [7, 7, 5 << 32, 0]
    assert [rank_sender(origin, KNOWN) for origin in (3 << 32, 3 << 32 | 7, 9 << 32 | 2, 9 << 32, 0)] == [
        2,
        1,
        2,
        0,
        0,
    ]


def test_usage_is_bounded() -> None:
    """A usage that changes repeatedly does not grow, whether its largest network is read or not."""
    usage = SenderUsage(QueueLimits(12, 120, share=0.5, reserved=0.25), KNOWN, [(1 << 32, 3, 9), (5 << 32, 3, 9)])
    usage.victim(1 << 32, MessageVolume(1, 1), lambda group: 5 << 32)
    for _ in range(1_000):
        usage.change(1 << 32, 1, 1)
        usage.change(1 << 32, -1, -1)
    heaps = sum([len(heap) for heap in usage._heaps.values()])
    assert heaps < 200
    assert len(usage) > heaps, "the heaps have to count against the bound of a cache"
