"""
Which message of a full queue makes room: what the backends have in common (see `QueueLimits`).

A party is a number: one half of an origin, the other half being 0.

Parties whose messages a recipient has acknowledged, so that their mail need not make room for that of unknown ones.

Wallets acknowledge whatever comes, so one acknowledgement says little. A party is known when two of its messages were
acknowledged at least an hour apart. What is remembered of a recipient is bounded: who is about to become known may
take the place of another one that is, but not of one that is known, unless nothing has come from that for a month.
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

# What kinds of senders there are, the one that makes room first being the lowest: whoever has an address, whoever has
# made a DID, and whom the recipient has acknowledged before.
SenderRank = Literal[0, 1, 2]
ANONYMOUS: SenderRank = 0
AUTHENTICATED: SenderRank = 1
KNOWN: SenderRank = 2
SENDER_RANKS: tuple[SenderRank, ...] = (ANONYMOUS, AUTHENTICATED, KNOWN)


@dataclass(slots=True)
class MessageVolume:
    """So many messages of so many bytes."""

    messages: int = 0
    size: int = 0

    def add(self, messages: int, size: int) -> None:
        """Count so much more, or less."""
        self.messages += messages
        self.size += size

    def plus(self, other: MessageVolume) -> MessageVolume:
        """Both together."""
        return MessageVolume(self.messages + other.messages, self.size + other.size)


# Entries that may be out of date, beside some for each amount.
_HEAP_SLACK = 64

# Of what has nothing; not to be changed.
NO_VOLUME = MessageVolume()


class SenderGroup(NamedTuple):
    """
    Some messages of a queue.

    :param rank: of their senders; None for whichever.
    :param network: the party that they came from, which may be 0; None for whichever.
    :param sender: the party that has sent them; None for whichever.
    """

    rank: SenderRank | None = None
    network: int | None = None
    sender: int | None = None


def get_party(origin: int) -> int:
    """Whom it is an acknowledgement of; 0 if nobody is known: the sender, or of an anonymous one the network."""
    return origin & SENDER_MASK or origin & NETWORK_MASK


def rank_sender(origin: int, known: frozenset[int]) -> SenderRank:
    """:param known: parties whom the recipient has acknowledged before."""
    if get_party(origin) in known:
        return KNOWN
    return AUTHENTICATED if origin & SENDER_MASK else ANONYMOUS


def is_from_group(part: SenderGroup, origin: int, known: frozenset[int]) -> bool:
    """Whether messages of an origin are among these."""
    rank, network, sender = part
    return (
        (rank is None or rank == rank_sender(origin, known))
        and (network is None or network == origin & NETWORK_MASK)
        and (sender is None or sender == origin & SENDER_MASK)
    )


def find_exceeded_limit(limits: QueueLimits, messages: int, size: int) -> RemovalReason | None:
    """The limit that a queue with so much in it is over."""
    if messages > limits.max_messages:
        return "fifo_count"
    return "fifo_bytes" if size > limits.max_bytes else None


def exceeds_share(limits: QueueLimits, share: float, amount: MessageVolume) -> bool:
    """Whether it is more than such a share of a queue."""
    return amount.messages > share * limits.max_messages or amount.size > share * limits.max_bytes


def needs_sender_usage(limits: QueueLimits, origin: int) -> bool:
    """Whether it matters who has how much of a queue that such a deposit makes too full."""
    return limits.reserved > 0 or (limits.share < 1 and origin != 0)


def may_exceed_share(limits: QueueLimits, origin: int, whole: MessageVolume) -> bool:
    """Whether so much in a queue may be too much of somebody: nobody has more than there is."""
    if limits.share < 1 and origin and exceeds_share(limits, limits.share, whole):
        return True
    return limits.reserved > 0 and exceeds_share(limits, 1 - limits.reserved, whole)


class SenderUsage:
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
        self._amounts: dict[SenderGroup, MessageVolume] = {}
        # Networks by what they have of a rank, where that was asked for.
        self._heaps: dict[SenderRank | None, list[tuple[int, SenderGroup]]] = {}
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
                amount = self._amounts[part] = MessageVolume()
            amount.add(messages, size)
            if not amount.messages:
                del self._amounts[part]
            elif part.rank in self._heaps and part.network is not None:
                heappush(self._heaps[part.rank], (-self._weight(part, NO_VOLUME), part))

    def amount(self, part: SenderGroup) -> MessageVolume:
        """What there is of one of :meth:`_request_id_fields`."""
        return self._amounts.get(part, NO_VOLUME)

    def victim(
        self, origin: int, coming: MessageVolume, oldest: Callable[[SenderGroup], int | None]
    ) -> SenderGroup | None:
        """
        Of which messages the oldest makes room for a deposit; None if nothing waits.

        :param oldest: the origin of the oldest message of some that wait; None if there is none.
        """
        for part in self._own_parts(origin, coming):
            return part
        if not self._limits.reserved:
            return None if oldest(SenderGroup()) is None else SenderGroup()
        for rank in self._ranks(origin, coming):
            first = oldest(SenderGroup(rank))
            if first is not None:
                return self._largest(rank, first, origin, coming)
        return None

    def likely(self, origin: int, coming: MessageVolume) -> list[SenderGroup]:
        """What :meth:`victim` will very likely ask about and answer, before anything is known of what is oldest."""
        own = list(self._own_parts(origin, coming))
        if own:
            return own[:1]
        if not self._limits.reserved:
            return [SenderGroup()]
        for rank in self._ranks(origin, coming):
            heaviest = self._heaviest(rank)
            if heaviest:
                return [SenderGroup(rank), heaviest[0][1]]
        return []

    def check(self, origin: int, coming: MessageVolume) -> None:
        """
        :param coming: with a deposit from there.
        :raise QueueFull: one of those that it counts for would have too much.
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

    def _own_parts(self, origin: int, coming: MessageVolume) -> Iterable[SenderGroup]:
        """Those of its sender and network that have something, and with what comes more than a share."""
        limits = self._limits
        if limits.share >= 1:
            return
        for party in _list_parties(origin):
            part = party
            if limits.reserved and party.network is not None:
                part = SenderGroup(rank_sender(origin, self.known), party.network)
            amount = self.amount(part)
            if amount.messages and exceeds_share(limits, limits.share, amount.plus(coming)):
                yield part

    def _ranks(self, origin: int, coming: MessageVolume) -> list[SenderRank]:
        """In which order they make room: those that have more than what is reserved for each, the lowest first."""
        own, limits = rank_sender(origin, self.known), self._limits
        amounts = {
            rank: self.amount(SenderGroup(rank)).plus(coming if rank == own else NO_VOLUME) for rank in SENDER_RANKS
        }
        return sorted(
            SENDER_RANKS, key=lambda rank: (not exceeds_share(limits, limits.reserved, amounts[rank]), rank)
        )

    def _largest(self, rank: SenderRank, first: int, origin: int, coming: MessageVolume) -> SenderGroup:
        """
        The network that has most of what is of a rank, if that is more than the network of the first has. Of equals
        the first message makes room.
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
        """The network that has most of a rank, if any has, with minus its weight."""
        heap = self._heaps.get(rank)
        if heap is None or len(heap) > 4 * len(self._amounts) + _HEAP_SLACK:
            networks = [part for part in self._amounts if part.rank == rank and part.network is not None]
            heap = self._heaps[rank] = [(-self._weight(part, NO_VOLUME), part) for part in networks]
            heapify(heap)
        # What has changed since is in it once more.
        while heap and -heap[0][0] != self._weight(heap[0][1], NO_VOLUME):
            heappop(heap)
        return heap[:1]

    def _weight(self, part: SenderGroup, coming: MessageVolume) -> int:
        amount = self.amount(part).plus(coming)
        return max(amount.messages * self._limits.max_bytes, amount.size * self._limits.max_messages)


def _list_parties(origin: int) -> list[SenderGroup]:
    """The sender and its network, as far as they are known, in the order in which their mail makes room."""
    sender, network = origin & SENDER_MASK, origin & NETWORK_MASK
    parts = [SenderGroup(sender=sender)] if sender else []
    return [*parts, SenderGroup(network=network)] if network else parts


# Parties that are remembered of a recipient, and how many of them may be known.
MAX_REMEMBERED_SENDERS = 64
MAX_KNOWN_SENDERS = 48
# Seconds between two acknowledgements after which a party is known, and after which it may be forgotten.
PROBATION_SECONDS = 3_600
DORMANT_SECONDS = 30 * 86_400
# Seconds for which it is not written again that a known party is still heard of.
REFRESH_SECONDS = 86_400

_AcknowledgementSpan = tuple[int, int]


class KnownSenders:
    """
    Parties with the times of their first and last acknowledgement, in whole seconds.

    :param text: as :meth:`text` has written it; None for nothing.
    """

    __slots__ = ("_spans",)

    def __init__(self, text: str | None = None) -> None:
        self._spans: dict[int, _AcknowledgementSpan] = {
            party: (first, last) for party, first, last in json.loads(text or "[]")
        }

    def text(self) -> str:
        """As JSON, in the order of their numbers."""
        return json.dumps([[party, *span] for party, span in sorted(self._spans.items())], separators=(",", ":"))

    @property
    def known(self) -> frozenset[int]:
        """Parties that are known."""
        return frozenset([party for party, span in self._spans.items() if _is_known(span)])

    def acknowledged(self, parties: Iterable[int], now: float) -> bool:
        """Messages of these were acknowledged. Whether there is anything to be written."""
        return any([self._acknowledged(party, int(now)) for party in sorted(set(parties))])

    def _acknowledged(self, party: int, now: int) -> bool:
        span = self._spans.get(party)
        if span is None:
            self._forget_one()
            self._spans[party] = now, now
            return True
        first, last = span
        if _is_known(span):
            if now - last < REFRESH_SECONDS:
                return False
        elif now - first < PROBATION_SECONDS or not self._has_place(now):
            return False
        self._spans[party] = first, now
        return True

    def _forget_one(self) -> None:
        """If there are too many: the one on probation that came first. There are always some."""
        if len(self._spans) >= MAX_REMEMBERED_SENDERS:
            on_probation = [(span[0], party) for party, span in self._spans.items() if not _is_known(span)]
            del self._spans[min(on_probation)[1]]

    def _has_place(self, now: int) -> bool:
        """Whether one more can be known, instead of one that is dormant if need be."""
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
