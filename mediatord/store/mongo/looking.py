"""What has to be known of queues that are full, or nearly: as much of them as deposits depend on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from bson import ObjectId

from mediatord.interfaces import QueueLimits
from mediatord.store.known_senders import KnownSenders
from mediatord.store.mongo.collections import MESSAGES, RECIPIENTS
from mediatord.store.mongo.cursors import aggregating, finding
from mediatord.store.mongo.holdings import Holdings
from mediatord.store.mongo.lanes import Held, Known, TooFewKnown, fitting, size_of, usage_of
from mediatord.store.mongo.queue_finder import Queue
from mediatord.store.mongo.requests import Document, Request
from mediatord.store.mongo.rows import OUTLINE_OF_PARTY, Order, of_part, origin_of
from mediatord.store.mongo.transaction import Transaction
from mediatord.store.shares import Amount, Part, is_counted, may_be_refused

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
            return any(may_be_refused(self._limits, origin, self.whole) for origin, _ in self._incoming)
        return self.victims > 0

    @property
    def victims(self) -> int:
        """How many of the oldest to look at first."""
        number = max(self.whole.messages - self._limits.max_messages, 0)
        return number + _SOME if self.whole.size > self._limits.max_bytes else number

    @property
    def is_counted(self) -> bool:
        """Whether it matters who has how much."""
        return any(is_counted(self._limits, origin) for origin, _ in self._incoming)

    def likely(self, held: Held) -> Iterable[Part]:
        """What of it may have to make room."""
        usage = usage_of(self._limits, held)
        for origin in {origin for origin, _ in self._incoming if is_counted(self._limits, origin)}:
            coming = Amount()
            for payloads in [some for of, some in self._incoming if of == origin]:
                coming.add(len(payloads), size_of(payloads))
            yield from usage.likely(origin, coming)


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
        # How many of the oldest were looked at, by DID and part.
        self._looked: dict[tuple[str, Part], int] = {}
        self._oldest: dict[str, dict[Part, tuple[Sequence[Document], bool]]] = {}
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
        anyway = {} if self._limits.reserved else {(did, Part()): one.victims for did, one in self._demands.items()}
        await self._look(anyway, self._demands)
        likely = {(did, part): self._demands[did].victims for did, part in self._likely()}
        await self._look({key: number for key, number in likely.items() if key not in self._looked})

    async def more(self, missing: TooFewKnown) -> None:
        """Look at more, since this was not known."""
        key = (missing.did, missing.part)
        if key in self._looked:
            await self._look({key: number * _MORE for key, number in self._looked.items()})
        else:
            await self._look({key: self._demands[missing.did].victims})

    def known(self, did: str) -> Known:
        """What is known by now."""
        return Known(self._oldest.get(did, {}), self._held.get(did))

    def _likely(self) -> Iterable[tuple[str, Part]]:
        """What may have to make room."""
        for did, demand in self._demands.items():
            held = self._held.get(did)
            if held is not None:
                for part in demand.likely(held):
                    yield did, part

    async def _look(self, wanted: Mapping[tuple[str, Part], int], full: Iterable[str] = ()) -> None:
        """
        :param wanted: how many of the oldest, by DID and part.
        :param full: DIDs of queues in which it may matter who has how much.
        """
        shared = [did for did in full if did not in self._held and self._demands[did].is_counted]
        recipients = [self._recipient(did) for did in shared]
        questions = [
            *[self._oldest_of(did, part, number) for (did, part), number in wanted.items()],
            *[_holding(recipient) for recipient in recipients],
            *[_senders(recipient) for recipient in recipients],
        ]
        if not questions:
            return
        found = await self._transaction.ask(*questions)
        for ((did, part), number), some in zip(wanted.items(), found, strict=False):
            self._oldest.setdefault(did, {})[part] = (some, len(some) < number)
            self._looked[did, part] = number
        counted = found[len(wanted) :]
        for did, sums, senders in zip(shared, counted[: len(shared)], counted[len(shared) :], strict=True):
            self._held[did] = Held(_added_up(sums), _known(senders))

    def _oldest_of(self, did: str, part: Part, number: int) -> Request:
        held = self._held.get(did)
        known = held.known if held is not None else frozenset[int]()
        filter = {"recipient": self._recipient(did), **of_part(part, known)}
        return finding(MESSAGES, filter, sort={"seq": 1}, limit=number, projection=OUTLINE_OF_PARTY)

    def _recipient(self, did: str) -> ObjectId:
        return self._demands[did].queue.place.recipient


def _holding(recipient: ObjectId) -> Request:
    """For what there is of each origin."""
    origin = {"network": "$network", "sender": "$sender"}
    sums = {"_id": origin, "messages": {"$sum": 1}, "bytes": {"$sum": "$size"}}
    return aggregating(MESSAGES, [{"$match": {"recipient": recipient}}, {"$group": sums}])


def _senders(recipient: ObjectId) -> Request:
    return finding(RECIPIENTS, {"_id": recipient}, limit=1, projection={"senders": 1})


def _known(recipients: Iterable[Document]) -> frozenset[int]:
    return frozenset([party for one in recipients for party in KnownSenders(one.get("senders")).known])


def _added_up(sums: Iterable[Document]) -> dict[int, Amount]:
    amounts: dict[int, Amount] = {}
    for one in sums:
        amounts.setdefault(origin_of(one["_id"]), Amount()).add(one["messages"], one["bytes"])
    return amounts
