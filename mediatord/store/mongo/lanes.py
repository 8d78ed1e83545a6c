"""A queue while deposits are made into it: what waits there, as far as it is known, and what makes room."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from mediatord.interfaces import Payload, QueueLimits, Reason, Removed
from mediatord.store.mongo.queue_finder import Queue
from mediatord.store.mongo.requests import Document
from mediatord.store.mongo.rows import Order, Place, origin_of, removed
from mediatord.store.shares import Amount, counting_parties, excess, is_over_share, parties_of

# What each party has in a queue.
Held = dict[int, Amount]
# That it is not one party that is meant but all that waits.
ALL = 0


class TooFewKnown(Exception):
    """More of what waits has to be looked at."""

    def __init__(self, did: str, party: int) -> None:
        super().__init__()
        self.did = did
        self.party = party


@dataclass(frozen=True, slots=True)
class Known:
    """
    What was seen of a queue.

    :param oldest: outlines of its first messages, by the party that they are of, and whether there are no more.
    :param held: None if it does not matter.
    """

    oldest: Mapping[int, tuple[Sequence[Document], bool]] = field(default_factory=dict)
    held: Held | None = None


@dataclass(eq=False, slots=True)
class Newcomer:
    """A message that is being deposited."""

    order: Order
    payload: Payload
    place: Place
    kept: bool = True


class Lane:
    """
    :ivar messages: how many there are by now, `bytes` being those of their payloads.
    :ivar newcomers: those of them that were deposited.
    :ivar gone: ids of those that waited before and are out.
    :ivar held: what each party had before, which is not changed here; `more` is what it has now beyond that.
    """

    def __init__(self, queue: Queue, known: Known, limits: QueueLimits) -> None:
        self.queue = queue
        self.messages, self.bytes = queue.messages, queue.bytes
        self.newcomers: deque[Newcomer] = deque()
        self.gone: dict[str, None] = {}
        self._limits = limits
        self._oldest = {party: (deque(some), all_known) for party, (some, all_known) in known.oldest.items()}
        self.held = known.held
        self.more: Held = {}

    def append(self, order: Order, payloads: Sequence[Payload]) -> list[Newcomer]:
        """Let these wait."""
        newcomers = [Newcomer(order, payload, self.queue.place) for payload in payloads]
        self.newcomers += newcomers
        self._count(len(payloads), size_of(payloads), order.origin)
        return newcomers

    def make_room(self, order: Order, payloads: Sequence[Payload]) -> list[Removed]:
        """Take out what is in the way of these, as long as there is anything."""
        evicted: list[Removed] = []
        size = size_of(payloads)
        parties = counting_parties(self._limits, order.origin) if self.held is not None else []
        while reason := excess(self._limits, self.messages + len(payloads), self.bytes + size):
            heavy = [party for party in parties if self._is_heavy(party, len(payloads), size)]
            victim = next(filter(None, (self._take(party, reason) for party in (*heavy, ALL))), None)
            if victim is None:
                break
            evicted.append(victim)
        return evicted

    def amount(self, party: int) -> Amount:
        """What a party has, as far as that matters."""
        sums = [amounts[party] for amounts in (self.held or {}, self.more) if party in amounts]
        return Amount(sum([one.messages for one in sums]), sum([one.size for one in sums]))

    def _is_heavy(self, party: int, messages: int, size: int) -> bool:
        """Whether it has something here, and with so much more too large a share."""
        held = self.amount(party)
        return held.messages > 0 and is_over_share(self._limits, held.messages + messages, held.size + size)

    def _take(self, party: int, reason: Reason) -> Removed | None:
        """Take out the oldest of a party, if there is one."""
        outlines, all_known = self._oldest.get(party, (deque(), False))
        while outlines:
            document = outlines.popleft()
            if document["_id"] not in self.gone:
                self.gone[document["_id"]] = None
                self._count(-1, -document["size"], origin_of(document))
                return removed(document, self.queue.did, self.queue.account, reason)
        if not all_known:
            raise TooFewKnown(self.queue.did, party)
        for newcomer in self.newcomers:
            if party in (ALL, *parties_of(newcomer.order.origin)):
                newcomer.kept = False
                self.newcomers.remove(newcomer)
                self._count(-1, -len(newcomer.payload.data), newcomer.order.origin)
                return newcomer.order.removed(newcomer.payload, self.queue.account, reason)
        return None

    def _count(self, messages: int, size: int, origin: int) -> None:
        self.messages += messages
        self.bytes += size
        if self.held is None:
            return
        for party in counting_parties(self._limits, origin):
            self.more.setdefault(party, Amount()).add(messages, size)


def fitting(payloads: Sequence[Payload], limits: QueueLimits) -> Sequence[Payload]:
    """Those that are not too large for any queue."""
    return [payload for payload in payloads if len(payload.data) <= limits.max_bytes]


def size_of(payloads: Iterable[Payload]) -> int:
    """Their bytes."""
    return sum([len(payload.data) for payload in payloads])
