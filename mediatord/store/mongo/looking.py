"""What has to be known of queues that are full, or nearly: as much of them as deposits depend on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property

from bson import ObjectId

from mediatord.interfaces import QueueLimits
from mediatord.store.mongo.collections import MESSAGES
from mediatord.store.mongo.cursors import aggregating, finding
from mediatord.store.mongo.holdings import Holdings
from mediatord.store.mongo.lanes import ALL, Held, Known, TooFewKnown, fitting, size_of
from mediatord.store.mongo.queue_finder import Queue
from mediatord.store.mongo.requests import Document, Request
from mediatord.store.mongo.rows import OUTLINE_OF_PARTY, Order, of_party, origin_of
from mediatord.store.mongo.transaction import Transaction
from mediatord.store.shares import Amount, counting_parties, is_over_share, parties_of

# Messages of a queue that are looked at first when it has too many bytes, and how many times more when those are too
# few.
_SOME = 16
_MORE = 8


class _Demand:
    """
    What some deposits come to for a queue.

    :ivar whole: with all that waits.
    """

    def __init__(self, queue: Queue, orders: Sequence[Order], limits: QueueLimits) -> None:
        self.queue = queue
        self._limits = limits
        self._incoming = [(order.origin, fitting(order.payloads, limits)) for order in orders]
        self.whole = Amount(queue.messages, queue.bytes)
        for _, payloads in self._incoming:
            self.whole.add(len(payloads), size_of(payloads))

    @property
    def is_near(self) -> bool:
        """Whether there may be too much in it, of all or of a party."""
        if self._limits.when_full == "refuse":
            return is_over_share(self._limits, self.whole.messages, self.whole.size)
        return self.victims > 0

    @property
    def victims(self) -> int:
        """How many of the oldest to look at first."""
        number = max(self.whole.messages - self._limits.max_messages, 0)
        return number + _SOME if self.whole.size > self._limits.max_bytes else number

    @cached_property
    def parties(self) -> Held:
        """What comes now of each of whom it matters how much they have."""
        parties: Held = {}
        for origin, payloads in self._incoming:
            for party in counting_parties(self._limits, origin):
                parties.setdefault(party, Amount()).add(len(payloads), size_of(payloads))
        return parties


class Looking:
    """
    Looks at queues, in a transaction, before some deposits into them.

    :param queues: by DID.
    :param holdings: what is known of them already.
    """

    def __init__(
        self, limits: QueueLimits, transaction: Transaction, queues: Mapping[str, Queue], holdings: Holdings
    ) -> None:
        self._limits = limits
        self._transaction = transaction
        self._queues = queues
        # Of those that are full, or nearly.
        self._demands: dict[str, _Demand] = {}
        # How many of the oldest were looked at, by DID and party.
        self._looked: dict[tuple[str, int], int] = {}
        self._oldest: dict[str, dict[int, tuple[Sequence[Document], bool]]] = {}
        remembered = {did: holdings.of(queue) for did, queue in queues.items()}
        self._held = {did: held for did, held in remembered.items() if held is not None}

    async def begin(self, orders: Iterable[Order]) -> None:
        """Look at what these will very likely depend on."""
        coming: dict[str, list[Order]] = {}
        for order in orders:
            coming.setdefault(order.recipient_did, []).append(order)
        demands = {did: _Demand(queue, coming[did], self._limits) for did, queue in self._queues.items()}
        self._demands = {did: one for did, one in demands.items() if one.is_near}
        if self._limits.when_full == "refuse":
            await self._look({}, self._demands)
            return
        await self._look({(did, ALL): one.victims for did, one in self._demands.items()}, self._demands)
        await self._look(dict(self._heavy()))

    async def more(self, missing: TooFewKnown) -> None:
        """Look at more, since this was not known."""
        key = (missing.did, missing.party)
        if key in self._looked:
            await self._look({key: number * _MORE for key, number in self._looked.items()})
        else:
            await self._look({key: self._demands[missing.did].victims})

    def known(self, did: str) -> Known:
        """What is known by now."""
        return Known(self._oldest.get(did, {}), self._held.get(did))

    def _heavy(self) -> Iterable[tuple[tuple[str, int], int]]:
        """Parties that may have to make room, and how many of their messages."""
        for did, demand in self._demands.items():
            held = self._held.get(did, {})
            for party, more in demand.parties.items():
                amount = held.get(party)
                if amount and is_over_share(self._limits, amount.messages + more.messages, amount.size + more.size):
                    yield (did, party), demand.victims

    async def _look(self, wanted: Mapping[tuple[str, int], int], full: Iterable[str] = ()) -> None:
        """
        :param wanted: how many of the oldest, by DID and party.
        :param full: DIDs of queues in which it may matter who has how much.
        """
        shared = [did for did in full if did not in self._held and self._demands[did].parties]
        questions = [
            *[_oldest(self._recipient(did), party, number) for (did, party), number in wanted.items()],
            *[_holding(self._recipient(did)) for did in shared],
        ]
        if not questions:
            return
        found = await self._transaction.ask(*questions)
        for ((did, party), number), some in zip(wanted.items(), found, strict=False):
            self._oldest.setdefault(did, {})[party] = (some, len(some) < number)
            self._looked[did, party] = number
        for did, sums in zip(shared, found[len(wanted) :], strict=True):
            self._held[did] = _added_up(sums)

    def _recipient(self, did: str) -> ObjectId:
        return self._demands[did].queue.place.recipient


def _oldest(recipient: ObjectId, party: int, number: int) -> Request:
    filter = {"recipient": recipient, **(of_party(party) if party != ALL else {})}
    return finding(MESSAGES, filter, sort={"seq": 1}, limit=number, projection=OUTLINE_OF_PARTY)


def _holding(recipient: ObjectId) -> Request:
    """For what there is of each origin."""
    origin = {"network": "$network", "sender": "$sender"}
    sums = {"_id": origin, "messages": {"$sum": 1}, "bytes": {"$sum": "$size"}}
    return aggregating(MESSAGES, [{"$match": {"recipient": recipient}}, {"$group": sums}])


def _added_up(sums: Iterable[Document]) -> Held:
    held: Held = {}
    for one in sums:
        for party in parties_of(origin_of(one["_id"])):
            held.setdefault(party, Amount()).add(one["messages"], one["bytes"])
    return held
