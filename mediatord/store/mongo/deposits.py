"""Appending to queues and making room in them, for many at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from bson import ObjectId

from mediatord.errors import MediatorError, RecipientUnknown
from mediatord.interfaces import Deposited, Payload, QueueLimits, Reason, Removed
from mediatord.store.mongo.aftermath import Aftermath
from mediatord.store.mongo.collections import MESSAGES, RECIPIENTS
from mediatord.store.mongo.cursors import finding
from mediatord.store.mongo.operations import Operations
from mediatord.store.mongo.queue_finder import Queue, QueueFinder
from mediatord.store.mongo.removals import remove_by_id
from mediatord.store.mongo.requests import LARGEST_DOCUMENT, Document, Request, deleting, inserting, updating
from mediatord.store.mongo.rows import OUTLINE, Order, Place, removed
from mediatord.store.mongo.transaction import Transaction
from mediatord.store.mongo.transactions import Settled

# Messages of a queue that are looked at first when it has too many bytes.
_SOME = 16
_BESIDE_THE_PAYLOAD = 1_024

Work = Sequence[Order]
Answer = list[Deposited] | MediatorError


class _TooFewKnown(Exception):
    """More of what waits has to be looked at."""


@dataclass(frozen=True, slots=True)
class Depositing:
    """Does works of some orders each, all of a work or nothing; see :class:`~.gathering.Together`."""

    limits: QueueLimits
    finder: QueueFinder
    aftermath: Aftermath

    async def __call__(
        self, operations: Operations, works: Sequence[Work], deadline: float, tries: int | None
    ) -> Sequence[Answer]:
        ids = [payload.id for orders in works for order in orders for payload in order.payloads]
        answers: list[Answer] = []

        async def deposit(transaction: Transaction) -> list[Answer]:
            answers[:] = await self._deposit(transaction, works)
            return answers

        async def undo(transaction: Transaction) -> Settled | None:
            await remove_by_id(transaction, ids)
            return await self.aftermath.look(transaction, _others(answers, set(ids)))

        return await operations.transact(deposit, deadline, undo, tries=tries)

    def possible(self, work: Work) -> bool:
        """Whether no message that would be kept is larger than a document can be."""
        largest = LARGEST_DOCUMENT - _BESIDE_THE_PAYLOAD
        return all(
            len(payload.data) <= largest for order in work for payload in _fitting(order.payloads, self.limits)
        )

    async def _deposit(self, transaction: Transaction, works: Sequence[Work]) -> list[Answer]:
        queues = await self.finder.find(transaction, {order.recipient_did for orders in works for order in orders})
        wanted = self._in_need_of_room(works, queues)
        while True:
            run = _Run(self.limits, queues, await _look(transaction, wanted))
            try:
                answers = [run.deposit(orders) for orders in works]
            except _TooFewKnown:
                wanted = {recipient: number * 8 for recipient, number in wanted.items()}
                continue
            transaction.later(run.requests())
            return answers

    def _in_need_of_room(self, works: Iterable[Work], queues: Mapping[str, Queue]) -> dict[ObjectId, int]:
        """How many of the oldest to look at, by recipient."""
        messages = {queue.did: queue.messages for queue in queues.values()}
        size = {queue.did: queue.bytes for queue in queues.values()}
        for order in (order for orders in works for order in orders if order.recipient_did in queues):
            fitting = _fitting(order.payloads, self.limits)
            messages[order.recipient_did] += len(fitting)
            size[order.recipient_did] += _size(fitting)
        wanted: dict[ObjectId, int] = {}
        for did, queue in queues.items():
            number = max(messages[did] - self.limits.max_messages, 0)
            if size[did] > self.limits.max_bytes:
                number += _SOME
            if number:
                wanted[queue.place.recipient] = number
        return wanted


@dataclass(eq=False, slots=True)
class _Newcomer:
    order: Order
    payload: Payload
    place: Place
    kept: bool = True


@dataclass(eq=False, slots=True)
class _Lane:
    """
    A queue as it is after some deposits.

    :param oldest: outlines of those that waited before, as far as they are known.
    :param all_known: whether there are no more.
    """

    queue: Queue
    oldest: deque[Document]
    all_known: bool
    messages: int
    bytes: int
    newcomers: deque[_Newcomer] = field(default_factory=deque)
    gone: list[str] = field(default_factory=list)

    def evict(self, reason: Reason) -> Removed | None:
        """Take out the oldest, if there is one."""
        if self.oldest:
            document = self.oldest.popleft()
            self.gone.append(document["_id"])
            return self._without(removed(document, self.queue.did, self.queue.account, reason))
        if not self.all_known:
            raise _TooFewKnown
        if self.newcomers:
            newcomer = self.newcomers.popleft()
            newcomer.kept = False
            return self._without(newcomer.order.removed(newcomer.payload, self.queue.account, reason))
        return None

    def _without(self, one: Removed) -> Removed:
        self.messages -= 1
        self.bytes -= one.size
        return one


class _Run:
    """Deposits in a row."""

    def __init__(
        self, limits: QueueLimits, queues: Mapping[str, Queue], oldest: Mapping[ObjectId, tuple[list[Document], bool]]
    ) -> None:
        self._limits = limits
        self._lanes: dict[str, _Lane] = {}
        for did, queue in queues.items():
            known, all_known = oldest.get(queue.place.recipient, ([], False))
            self._lanes[did] = _Lane(queue, deque(known), all_known, queue.messages, queue.bytes)
        self._newcomers: list[_Newcomer] = []

    def deposit(self, orders: Work) -> Answer:
        """What becomes of some orders, or why none of them is carried out."""
        if any(order.recipient_did not in self._lanes for order in orders):
            return RecipientUnknown()
        return [self._append(order, self._lanes[order.recipient_did]) for order in orders]

    def requests(self) -> list[Request]:
        """What is to be written."""
        kept = [one for one in self._newcomers if one.kept]
        lanes = [lane for lane in self._lanes.values() if lane.newcomers or lane.gone]
        gone = [id for lane in lanes for id in lane.gone]
        return [
            *inserting(MESSAGES, [one.order.document(one.payload, one.place) for one in kept]),
            *updating(RECIPIENTS, [_counting(lane) for lane in lanes]),
            *(deleting(MESSAGES, {"_id": {"$in": gone}}) if gone else ()),
        ]

    def _append(self, order: Order, lane: _Lane) -> Deposited:
        limits = self._limits
        fitting = _fitting(order.payloads, limits)
        size = _size(fitting)
        evicted: list[Removed] = []
        while True:
            if lane.messages + len(fitting) > limits.max_messages:
                victim = lane.evict("fifo_count")
            elif lane.bytes + size > limits.max_bytes:
                victim = lane.evict("fifo_bytes")
            else:
                break
            if victim is None:
                break
            evicted.append(victim)
        newcomers = [_Newcomer(order, payload, lane.queue.place) for payload in fitting]
        lane.newcomers += newcomers
        lane.messages += len(fitting)
        lane.bytes += size
        self._newcomers += newcomers
        account = lane.queue.account
        if len(fitting) < len(order.payloads):
            largest = limits.max_bytes
            evicted += [
                order.removed(one, account, "fifo_bytes") for one in order.payloads if len(one.data) > largest
            ]
        return order.deposited(account, evicted)


def _others(answers: Sequence[Answer], ids: Collection[str]) -> list[Removed]:
    """What was evicted but for these."""
    deposited = [one for answer in answers if not isinstance(answer, MediatorError) for one in answer]
    return [gone for one in deposited for gone in one.evicted if gone.id not in ids]


def _fitting(payloads: Sequence[Payload], limits: QueueLimits) -> Sequence[Payload]:
    """Those that are not too large for any queue."""
    return [payload for payload in payloads if len(payload.data) <= limits.max_bytes]


def _size(payloads: Iterable[Payload]) -> int:
    return sum([len(payload.data) for payload in payloads])


def _counting(lane: _Lane) -> Document:
    more = {"messages": lane.messages - lane.queue.messages, "bytes": lane.bytes - lane.queue.bytes}
    change: Document = {"$inc": more}
    if not lane.queue.messages:
        change["$set"] = {"waited_for": True}
    return {"q": {"_id": lane.queue.place.recipient}, "u": change}


async def _look(
    transaction: Transaction, wanted: Mapping[ObjectId, int]
) -> dict[ObjectId, tuple[list[Document], bool]]:
    """The oldest messages of some recipients, and whether those are all."""
    if not wanted:
        return {}
    questions = [
        finding(MESSAGES, {"recipient": recipient}, sort={"seq": 1}, limit=number, projection=OUTLINE)
        for recipient, number in wanted.items()
    ]
    found = await transaction.ask(*questions)
    return {
        recipient: (some, len(some) < number) for (recipient, number), some in zip(wanted.items(), found, strict=True)
    }
