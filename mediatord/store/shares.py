"""
Which message of a full queue makes room: what the backends have in common (see `QueueLimits`).

A party is a number: one half of an origin, the other half being 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Literal, NamedTuple

from mediatord.errors import QueueFull
from mediatord.interfaces import QueueLimits, Reason

SENDER, NETWORK = 0x0000_0000_FFFF_FFFF, 0x7FFF_FFFF_0000_0000

# What kinds of senders there are, the one that makes room first being the lowest: whoever has an address, whoever has
# made a DID, and whom the recipient has acknowledged before.
Rank = Literal[0, 1, 2]
ANONYMOUS: Rank = 0
AUTHENTICATED: Rank = 1
KNOWN: Rank = 2
RANKS: tuple[Rank, ...] = (ANONYMOUS, AUTHENTICATED, KNOWN)


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


# Entries that may be out of date, beside some for each amount.
_SLACK = 64

# Of what has nothing; not to be changed.
NOTHING = Amount()


class Part(NamedTuple):
    """
    Some messages of a queue.

    :param rank: of their senders; None for whichever.
    :param network: the party that they came from, which may be 0; None for whichever.
    :param sender: the party that has sent them; None for whichever.
    """

    rank: Rank | None = None
    network: int | None = None
    sender: int | None = None


def party_of(origin: int) -> int:
    """Whom it is an acknowledgement of; 0 if nobody is known: the sender, or of an anonymous one the network."""
    return origin & SENDER or origin & NETWORK


def rank_of(origin: int, known: frozenset[int]) -> Rank:
    """:param known: parties whom the recipient has acknowledged before."""
    if party_of(origin) in known:
        return KNOWN
    return AUTHENTICATED if origin & SENDER else ANONYMOUS


def is_in(part: Part, origin: int, known: frozenset[int]) -> bool:
    """Whether messages of an origin are among these."""
    rank, network, sender = part
    return (
        (rank is None or rank == rank_of(origin, known))
        and (network is None or network == origin & NETWORK)
        and (sender is None or sender == origin & SENDER)
    )


def excess(limits: QueueLimits, messages: int, size: int) -> Reason | None:
    """The limit that a queue with so much in it is over."""
    if messages > limits.max_messages:
        return "fifo_count"
    return "fifo_bytes" if size > limits.max_bytes else None


def is_over(limits: QueueLimits, share: float, amount: Amount) -> bool:
    """Whether it is more than such a share of a queue."""
    return amount.messages > share * limits.max_messages or amount.size > share * limits.max_bytes


def is_counted(limits: QueueLimits, origin: int) -> bool:
    """Whether it matters who has how much of a queue that such a deposit makes too full."""
    return limits.reserved > 0 or (limits.share < 1 and origin != 0)


def may_be_refused(limits: QueueLimits, origin: int, whole: Amount) -> bool:
    """Whether so much in a queue may be too much of somebody: nobody has more than there is."""
    if limits.share < 1 and origin and is_over(limits, limits.share, whole):
        return True
    return limits.reserved > 0 and is_over(limits, 1 - limits.reserved, whole)


class Usage:
    """
    Who has how much of a queue.

    :param known: parties whom its recipient has acknowledged before.
    """

    __slots__ = ("_amounts", "_heaps", "_limits", "known")

    def __init__(
        self, limits: QueueLimits, known: frozenset[int], found: Iterable[tuple[int, int, int]] = ()
    ) -> None:
        """:param found: origin, messages and bytes."""
        self._limits = limits
        self.known = known
        # By rank and network, or by network alone, and by sender: of each what there is, and no more.
        self._amounts: dict[Part, Amount] = {}
        # Networks by what they have of a rank, where that was asked for.
        self._heaps: dict[Rank | None, list[tuple[int, Part]]] = {}
        for origin, messages, size in found:
            self.change(origin, messages, size)

    def __len__(self) -> int:
        """How many amounts are kept."""
        return len(self._amounts)

    def change(self, origin: int, messages: int, size: int) -> None:
        """So much more, or less, is from there."""
        for part in self._parts(origin):
            amount = self._amounts.get(part)
            if amount is None:
                amount = self._amounts[part] = Amount()
            amount.add(messages, size)
            if not amount.messages:
                del self._amounts[part]
            elif part.rank in self._heaps and part.network is not None:
                heappush(self._heaps[part.rank], (-self._weight(part, NOTHING), part))

    def amount(self, part: Part) -> Amount:
        """What there is of one of :meth:`_parts`."""
        return self._amounts.get(part, NOTHING)

    def victim(self, origin: int, coming: Amount, oldest: Callable[[Part], int | None]) -> Part | None:
        """
        Of which messages the oldest makes room for a deposit; None if nothing waits.

        :param oldest: the origin of the oldest message of some that wait; None if there is none.
        """
        for part in self._own_parts(origin, coming):
            return part
        if not self._limits.reserved:
            return None if oldest(Part()) is None else Part()
        for rank in self._ranks(origin, coming):
            first = oldest(Part(rank))
            if first is not None:
                return self._largest(rank, first, origin, coming)
        return None

    def likely(self, origin: int, coming: Amount) -> list[Part]:
        """What :meth:`victim` will very likely ask about and answer, before anything is known of what is oldest."""
        own = list(self._own_parts(origin, coming))
        if own:
            return own[:1]
        if not self._limits.reserved:
            return [Part()]
        for rank in self._ranks(origin, coming):
            heaviest = self._heaviest(rank)
            if heaviest:
                return [Part(rank), heaviest[0][1]]
        return []

    def check(self, origin: int, coming: Amount) -> None:
        """
        :param coming: with a deposit from there.
        :raise QueueFull: one of those that it counts for would have too much.
        """
        limits = self._limits
        if limits.share < 1:
            for party in _parties(origin):
                if is_over(limits, limits.share, self._of_party(party).plus(coming)):
                    raise QueueFull()
        if limits.reserved and self.known and rank_of(origin, self.known) != KNOWN:
            unknown = self.amount(Part(ANONYMOUS)).plus(self.amount(Part(AUTHENTICATED)))
            if is_over(limits, 1 - limits.reserved, unknown.plus(coming)):
                raise QueueFull()

    def _of_party(self, party: Part) -> Amount:
        if party.network is None or not self._limits.reserved:
            return self.amount(party)
        amounts = [self.amount(Part(rank, party.network)) for rank in RANKS]
        return Amount(sum([one.messages for one in amounts]), sum([one.size for one in amounts]))

    def _parts(self, origin: int) -> list[Part]:
        if not self._limits.reserved:
            return _parties(origin)
        rank, sender = rank_of(origin, self.known), origin & SENDER
        parts = [Part(rank), Part(rank, origin & NETWORK)]
        return [*parts, Part(sender=sender)] if sender else parts

    def _own_parts(self, origin: int, coming: Amount) -> Iterable[Part]:
        """Those of its sender and network that have something, and with what comes more than a share."""
        limits = self._limits
        if limits.share >= 1:
            return
        for party in _parties(origin):
            part = party
            if limits.reserved and party.network is not None:
                part = Part(rank_of(origin, self.known), party.network)
            amount = self.amount(part)
            if amount.messages and is_over(limits, limits.share, amount.plus(coming)):
                yield part

    def _ranks(self, origin: int, coming: Amount) -> list[Rank]:
        """In which order they make room: those that have more than what is reserved for each, the lowest first."""
        own, limits = rank_of(origin, self.known), self._limits
        amounts = {rank: self.amount(Part(rank)).plus(coming if rank == own else NOTHING) for rank in RANKS}
        return sorted(RANKS, key=lambda rank: (not is_over(limits, limits.reserved, amounts[rank]), rank))

    def _largest(self, rank: Rank, first: int, origin: int, coming: Amount) -> Part:
        """
        The network that has most of what is of a rank, if that is more than the network of the first has. Of equals
        the first message makes room.
        """
        candidates = self._heaviest(rank)
        own = Part(rank, origin & NETWORK) if rank == rank_of(origin, self.known) else None
        if own is not None and own in self._amounts:
            candidates.append((-self._weight(own, coming), own))
        weight, largest = min(candidates)
        its_own = Part(rank, first & NETWORK)
        return largest if -weight > self._weight(its_own, coming if its_own == own else NOTHING) else Part(rank)

    def _heaviest(self, rank: Rank) -> list[tuple[int, Part]]:
        """The network that has most of a rank, if any has, with minus its weight."""
        heap = self._heaps.get(rank)
        if heap is None or len(heap) > 4 * len(self._amounts) + _SLACK:
            networks = [part for part in self._amounts if part.rank == rank and part.network is not None]
            heap = self._heaps[rank] = [(-self._weight(part, NOTHING), part) for part in networks]
            heapify(heap)
        # What has changed since is in it once more.
        while heap and -heap[0][0] != self._weight(heap[0][1], NOTHING):
            heappop(heap)
        return heap[:1]

    def _weight(self, part: Part, coming: Amount) -> int:
        amount = self.amount(part).plus(coming)
        return max(amount.messages * self._limits.max_bytes, amount.size * self._limits.max_messages)


def _parties(origin: int) -> list[Part]:
    """The sender and its network, as far as they are known, in the order in which their mail makes room."""
    sender, network = origin & SENDER, origin & NETWORK
    parts = [Part(sender=sender)] if sender else []
    return [*parts, Part(network=network)] if network else parts
