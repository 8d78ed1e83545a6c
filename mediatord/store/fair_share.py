"""
Fair share of a full queue: which message is evicted, and which senders are known (see `QueueLimits`).

A party is a number: one half of an origin, the other half being 0.

Wallets acknowledge every message, so one acknowledgement means little: a party is known when two of its messages were
acknowledged at least an hour apart. The number of parties per recipient is bounded: one that is about to become known
may replace another that is not yet known, but not a known one, unless that has been silent for a month.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Literal, NamedTuple

from mediatord.errors import QueueFull
from mediatord.store.interfaces.messages import QueueLimits, RemovalReason

SENDER_MASK, NETWORK_MASK = 0x0000_0000_FFFF_FFFF, 0x7FFF_FFFF_0000_0000

# Ranks of senders in the order of eviction: those with a network address only, those with a proven DID, and those
# that the recipient has acknowledged before.
SenderRank = Literal[0, 1, 2]
ANONYMOUS: SenderRank = 0
AUTHENTICATED: SenderRank = 1
KNOWN: SenderRank = 2
SENDER_RANKS: tuple[SenderRank, ...] = (ANONYMOUS, AUTHENTICATED, KNOWN)


@dataclass(slots=True)
class MessageVolume:
    """A number of messages and their bytes."""

    messages: int = 0
    size: int = 0

    def add(self, messages: int, size: int) -> None:
        """Add to it, or subtract."""
        self.messages += messages
        self.size += size

    def plus(self, other: MessageVolume) -> MessageVolume:
        """The sum of two."""
        return MessageVolume(self.messages + other.messages, self.size + other.size)


# Outdated entries that a heap may have beyond some for each volume.
_HEAP_SLACK = 64

# Of an empty group; must not be changed.
NO_VOLUME = MessageVolume()


class SenderGroup(NamedTuple):
    """
    A group of messages of a queue.

    :param rank: rank of their senders; None for any.
    :param network: the party of their network, which may be 0; None for any.
    :param sender: the party of their sender; None for any.
    """

    rank: SenderRank | None = None
    network: int | None = None
    sender: int | None = None


def get_party(origin: int) -> int:
    """The party that an acknowledgement counts for: the sender, or the network of an anonymous one; 0 if unknown."""
    return origin & SENDER_MASK or origin & NETWORK_MASK


def rank_sender(origin: int, known: frozenset[int]) -> SenderRank:
    """
    Rank of a sender.

    :param known: parties that the recipient has acknowledged before.
    """
    if get_party(origin) in known:
        return KNOWN
    return AUTHENTICATED if origin & SENDER_MASK else ANONYMOUS


def is_from_group(part: SenderGroup, origin: int, known: frozenset[int]) -> bool:
    """Whether messages of an origin are in a group."""
    rank, network, sender = part
    return (
        (rank is None or rank == rank_sender(origin, known))
        and (network is None or network == origin & NETWORK_MASK)
        and (sender is None or sender == origin & SENDER_MASK)
    )


def find_exceeded_limit(limits: QueueLimits, messages: int, size: int) -> RemovalReason | None:
    """The limit that a queue of this volume exceeds, as a reason for removal."""
    if messages > limits.max_messages:
        return "fifo_count"
    return "fifo_bytes" if size > limits.max_bytes else None


def exceeds_share(limits: QueueLimits, share: float, amount: MessageVolume) -> bool:
    """Whether a volume is more than a share of a queue."""
    return amount.messages > share * limits.max_messages or amount.size > share * limits.max_bytes


def needs_sender_usage(limits: QueueLimits, origin: int) -> bool:
    """Whether the usage by sender matters when an enqueue from this origin makes a queue too full."""
    return limits.reserved > 0 or (limits.share < 1 and origin != 0)


def may_exceed_share(limits: QueueLimits, origin: int, whole: MessageVolume) -> bool:
    """Whether a party may exceed its share in a queue of this volume: no party has more than there is."""
    if limits.share < 1 and origin and exceeds_share(limits, limits.share, whole):
        return True
    return limits.reserved > 0 and exceeds_share(limits, 1 - limits.reserved, whole)


def get_common_room(limits: QueueLimits) -> MessageVolume:
    """The volume up to which a queue takes every message and evicts none, whoever sends it."""
    share = 1.0
    if limits.when_full == "refuse":
        share = min(limits.share, 1 - limits.reserved)
    return MessageVolume(int(share * limits.max_messages), int(share * limits.max_bytes))


class SenderUsage:
    """
    Usage of a queue by sender, network and rank.

    :param known: parties that its recipient has acknowledged before.
    """

    __slots__ = ("_amounts", "_heaps", "_limits", "known")

    def __init__(
        self, limits: QueueLimits, known: frozenset[int], found: Iterable[tuple[int, int, int]] = ()
    ) -> None:
        """:param found: origin, messages and bytes."""
        self._limits = limits
        self.known = known
        # By rank and network, or by network alone, and by sender; empty groups are left out.
        self._amounts: dict[SenderGroup, MessageVolume] = {}
        # Networks by their weight, for the ranks that were needed.
        self._heaps: dict[SenderRank | None, list[tuple[int, SenderGroup]]] = {}
        for origin, messages, size in found:
            self.change(origin, messages, size)

    def __len__(self) -> int:
        """Number of entries that are kept, those of the heaps included."""
        return len(self._amounts) + sum(map(len, self._heaps.values()))

    def change(self, origin: int, messages: int, size: int) -> None:
        """Add messages of an origin, or subtract them."""
        for part in self._parts(origin):
            amount = self._amounts.get(part)
            if amount is None:
                amount = self._amounts[part] = MessageVolume()
            amount.add(messages, size)
            if not amount.messages:
                del self._amounts[part]
            elif part.rank in self._heaps and part.network is not None:
                heap = self._heaps[part.rank]
                heappush(heap, (-self._weight(part, NO_VOLUME), part))
                if len(heap) > 4 * len(self._amounts) + _HEAP_SLACK:
                    del self._heaps[part.rank]  # it is built anew when it is needed

    def amount(self, part: SenderGroup) -> MessageVolume:
        """Volume of a group."""
        return self._amounts.get(part, NO_VOLUME)

    def victim(
        self, origin: int, coming: MessageVolume, oldest: Callable[[SenderGroup], int | None]
    ) -> SenderGroup | None:
        """
        The group whose oldest message is evicted for an enqueue; None if the queue is empty.

        :param oldest: finds the origin of the oldest message of a group; None if there is none.
        """
        limits = self._limits
        for part in _list_parties(origin):
            group = part
            if limits.reserved and part.network is not None:
                group = SenderGroup(rank_sender(origin, self.known), part.network)
            amount = self.amount(group)
            if limits.share < 1 and amount.messages and exceeds_share(limits, limits.share, amount.plus(coming)):
                return group
        if not limits.reserved:
            return None if oldest(SenderGroup()) is None else SenderGroup()
        for rank in self._ranks(origin, coming):
            first = oldest(SenderGroup(rank))
            if first is not None:
                return self._largest(rank, first, origin, coming)
        return None

    def check(self, origin: int, coming: MessageVolume) -> None:
        """
        Check an enqueue against the shares.

        :param coming: its volume.
        :raise QueueFull: a party, or the unknown senders together, would have too much.
        """
        limits = self._limits
        if limits.share < 1:
            for party in _list_parties(origin):
                if exceeds_share(limits, limits.share, self._of_party(party).plus(coming)):
                    raise QueueFull()
        if limits.reserved and self.known and rank_sender(origin, self.known) != KNOWN:
            unknown = self.amount(SenderGroup(ANONYMOUS)).plus(self.amount(SenderGroup(AUTHENTICATED)))
            if exceeds_share(limits, 1 - limits.reserved, unknown.plus(coming)):
                raise QueueFull()

    def _of_party(self, party: SenderGroup) -> MessageVolume:
        if party.network is None or not self._limits.reserved:
            return self.amount(party)
        amounts = [self.amount(SenderGroup(rank, party.network)) for rank in SENDER_RANKS]
        return MessageVolume(sum([one.messages for one in amounts]), sum([one.size for one in amounts]))

    def _parts(self, origin: int) -> list[SenderGroup]:
        if not self._limits.reserved:
            return _list_parties(origin)
        rank, sender = rank_sender(origin, self.known), origin & SENDER_MASK
        parts = [SenderGroup(rank), SenderGroup(rank, origin & NETWORK_MASK)]
        return [*parts, SenderGroup(sender=sender)] if sender else parts

    def _ranks(self, origin: int, coming: MessageVolume) -> list[SenderRank]:
        """Ranks in the order of eviction: those with more than their reserve first, and of those the lowest."""
        own, limits = rank_sender(origin, self.known), self._limits
        amounts = {
            rank: self.amount(SenderGroup(rank)).plus(coming if rank == own else NO_VOLUME) for rank in SENDER_RANKS
        }
        return sorted(
            SENDER_RANKS, key=lambda rank: (not exceeds_share(limits, limits.reserved, amounts[rank]), rank)
        )

    def _largest(self, rank: SenderRank, first: int, origin: int, coming: MessageVolume) -> SenderGroup:
        """
        The network that has most of a rank, if that is more than the network of the first message has. Of equals the
        first message is evicted.
        """
        candidates = self._heaviest(rank)
        own = SenderGroup(rank, origin & NETWORK_MASK) if rank == rank_sender(origin, self.known) else None
        if own is not None and own in self._amounts:
            candidates.append((-self._weight(own, coming), own))
        weight, largest = min(candidates)
        its_own = SenderGroup(rank, first & NETWORK_MASK)
        return (
            largest if -weight > self._weight(its_own, coming if its_own == own else NO_VOLUME) else SenderGroup(rank)
        )

    def _heaviest(self, rank: SenderRank) -> list[tuple[int, SenderGroup]]:
        """The network that has most of a rank, if any, with its negative weight."""
        heap = self._heaps.get(rank)
        if heap is None:
            networks = [part for part in self._amounts if part.rank == rank and part.network is not None]
            heap = self._heaps[rank] = [(-self._weight(part, NO_VOLUME), part) for part in networks]
            heapify(heap)
        # A group that has changed since was added again.
        while heap and -heap[0][0] != self._weight(heap[0][1], NO_VOLUME):
            heappop(heap)
        return heap[:1]

    def _weight(self, part: SenderGroup, coming: MessageVolume) -> int:
        amount = self.amount(part).plus(coming)
        return max(amount.messages * self._limits.max_bytes, amount.size * self._limits.max_messages)


def _list_parties(origin: int) -> list[SenderGroup]:
    """The sender and its network, as far as they are known, in the order of eviction."""
    sender, network = origin & SENDER_MASK, origin & NETWORK_MASK
    parts = [SenderGroup(sender=sender)] if sender else []
    return [*parts, SenderGroup(network=network)] if network else parts


# Parties per recipient, and known ones among them.
MAX_REMEMBERED_SENDERS = 64
MAX_KNOWN_SENDERS = 48
# Seconds between two acknowledgements after which a party is known, and after which it may be forgotten.
PROBATION_SECONDS = 3_600
DORMANT_SECONDS = 30 * 86_400
# Seconds between two writes of the last acknowledgement of a known party.
REFRESH_SECONDS = 86_400

_AcknowledgementSpan = tuple[int, int]


class KnownSenders:
    """
    Parties with the times of their first and last acknowledgement, in whole seconds.

    :param text: result of :meth:`text`; None for no parties.
    """

    __slots__ = ("_spans",)

    def __init__(self, text: str | None = None) -> None:
        self._spans: dict[int, _AcknowledgementSpan] = {
            party: (first, last) for party, first, last in json.loads(text or "[]")
        }

    def text(self) -> str:
        """The parties as JSON, in the order of their numbers."""
        return json.dumps([[party, *span] for party, span in sorted(self._spans.items())], separators=(",", ":"))

    @property
    def known(self) -> frozenset[int]:
        """Parties that are known."""
        return frozenset([party for party, span in self._spans.items() if _is_known(span)])

    def acknowledged(self, parties: Iterable[int], now: float) -> bool:
        """Record acknowledgements; returns whether anything has to be written."""
        second, has_changed = int(now), False
        for party in sorted(set(parties)):
            span = self._spans.get(party)
            if span is None:
                self._forget_one()
            elif _is_known(span):
                if second - span[1] < REFRESH_SECONDS:
                    continue
            elif second - span[0] < PROBATION_SECONDS or not self._has_place(second):
                continue
            self._spans[party] = (second if span is None else span[0]), second
            has_changed = True
        return has_changed

    def _forget_one(self) -> None:
        """If there are too many, remove the oldest one on probation; there always is one."""
        if len(self._spans) >= MAX_REMEMBERED_SENDERS:
            on_probation = [(span[0], party) for party, span in self._spans.items() if not _is_known(span)]
            del self._spans[min(on_probation)[1]]

    def _has_place(self, now: int) -> bool:
        """Whether one more can be known, by replacing a dormant one if needed."""
        known = [(span[1], party) for party, span in self._spans.items() if _is_known(span)]
        if len(known) < MAX_KNOWN_SENDERS:
            return True
        last, party = min(known)
        if now - last < DORMANT_SECONDS:
            return False
        del self._spans[party]
        return True


def _is_known(span: _AcknowledgementSpan) -> bool:
    return span[1] - span[0] >= PROBATION_SECONDS
