"""Which message makes room, against the rule as it is written, applied to every message anew."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from mediatord.interfaces import QueueLimits
from mediatord.store.shares import NETWORK, SENDER, Amount, Part, Usage, is_in, party_of, rank_of

KNOWN = frozenset({2, 3 << 32})
POLICIES = (
    QueueLimits(12, 120, share=0.5, reserved=0.25),
    QueueLimits(12, 120, reserved=0.1),
    QueueLimits(12, 120, share=0.3, reserved=1 / 3),
    QueueLimits(12, 120, share=0.4),
)
STEPS = 600

Message = tuple[int, int]


def amount(messages: list[Message], wanted: Callable[[int], bool]) -> Amount:
    """How much of these is from such origins."""
    sizes = [size for origin, size in messages if wanted(origin)]
    return Amount(len(sizes), sum(sizes))


def over(limits: QueueLimits, share: float, what: Amount) -> bool:
    """More than a share."""
    return what.messages > share * limits.max_messages or what.size > share * limits.max_bytes


def by_the_rule(limits: QueueLimits, waiting: list[Message], new: Message) -> Message:
    """As `QueueLimits` has it."""
    origin, size = new
    ranked = limits.reserved > 0

    def rank(of: int) -> int:
        return rank_of(of, KNOWN) if ranked else 0

    own_rank, coming = rank(origin), Amount(1, size)
    for same in (
        lambda of: of & SENDER == origin & SENDER != 0,
        lambda of: of & NETWORK == origin & NETWORK != 0 and rank(of) == own_rank,
    ):
        held = amount(waiting, same)
        if limits.share < 1 and held.messages and over(limits, limits.share, held.plus(coming)):
            return next(one for one in waiting if same(one[0]))
    if not ranked:
        return waiting[0]
    there = [rank for rank in range(3) if amount(waiting, lambda of, r=rank: rank_of(of, KNOWN) == r).messages]
    everything = [*waiting, new]
    too_much = [r for r in there if over(limits, limits.reserved, amount(everything, lambda of, r=r: rank(of) == r))]
    lowest = [one for one in waiting if rank(one[0]) == [*too_much, *there][0]]

    def weight(of: int) -> int:
        held = amount(everything, lambda other: other & NETWORK == of & NETWORK and rank(other) == rank(of))
        return max(held.messages * limits.max_bytes, held.size * limits.max_messages)

    most = max(weight(of) for of, _ in lowest)
    if weight(lowest[0][0]) == most:
        return lowest[0]
    network = min(of & NETWORK for of, _ in lowest if weight(of) == most)
    return next(one for one in lowest if one[0] & NETWORK == network)


def test_by_the_rule() -> None:
    """It is the same, whatever came and went before."""
    for seed, limits in enumerate(POLICIES):
        random = Random(seed)
        waiting: list[Message] = []
        usage = Usage(limits, KNOWN)
        for _ in range(STEPS):
            new = random.randrange(5) << 32 | random.choice((0, 0, 1, 2, 4)), random.choice((1, 3, 15))
            while len(waiting) >= limits.max_messages or sum(size for _, size in waiting) + new[1] > limits.max_bytes:
                expected = by_the_rule(limits, waiting, new)

                def oldest(part: Part, there: list[Message] = waiting) -> int | None:
                    return next((of for of, _ in there if is_in(part, of, KNOWN)), None)

                part = usage.victim(new[0], Amount(1, new[1]), oldest)
                assert part is not None
                found = next(one for one in waiting if is_in(part, one[0], KNOWN))
                assert found == expected, (limits, waiting, new, part)
                waiting.remove(found)
                usage.change(found[0], -1, -found[1])
            waiting.append(new)
            usage.change(new[0], 1, new[1])


def test_parties() -> None:
    """An acknowledgement is of the sender that is proven, and of the network where none is."""
    assert [party_of(origin) for origin in (5 << 32 | 7, 7, 5 << 32, 0)] == [7, 7, 5 << 32, 0]
    assert [rank_of(origin, KNOWN) for origin in (3 << 32, 3 << 32 | 7, 9 << 32 | 2, 9 << 32, 0)] == [2, 1, 2, 0, 0]
