"""Appending to queues and making room in them, for many at a time."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from mediatord.errors import MediatorError, QueueFull, RecipientUnknown
from mediatord.interfaces import Deposited, QueueLimits, Removed
from mediatord.store.mongo.aftermath import Aftermath
from mediatord.store.mongo.collections import MESSAGES, RECIPIENTS
from mediatord.store.mongo.holdings import Holdings
from mediatord.store.mongo.lanes import Lane, Newcomer, TooFewKnown, fitting, size_of
from mediatord.store.mongo.ledger import Page, entering
from mediatord.store.mongo.looking import Looking
from mediatord.store.mongo.operations import Operations
from mediatord.store.mongo.queue_finder import Queue, QueueFinder
from mediatord.store.mongo.removals import withdraw
from mediatord.store.mongo.requests import LARGEST_DOCUMENT, Document, Request, deleting, inserting, updating
from mediatord.store.mongo.rows import Order
from mediatord.store.mongo.transaction import Transaction
from mediatord.store.mongo.transactions import Settled
from mediatord.store.shares import Amount, Usage, excess

_BESIDE_THE_PAYLOAD = 1_024

Work = Sequence[Order]
Answer = list[Deposited] | MediatorError


@dataclass(frozen=True, slots=True)
class Depositing:
    """Does works of some orders each, all of a work or nothing; see :class:`~.gathering.Together`."""

    limits: QueueLimits
    finder: QueueFinder
    aftermath: Aftermath
    holdings: Holdings = field(default_factory=Holdings)

    async def __call__(
        self, operations: Operations, works: Sequence[Work], deadline: float, tries: int | None
    ) -> Sequence[Answer]:
        ids = [payload.id for orders in works for order in orders for payload in order.payloads]
        answers: list[Answer] = []
        lanes: list[Lane] = []

        async def deposit(transaction: Transaction) -> None:
            run, answers[:] = await self._deposit(transaction, works)
            lanes[:] = run.changed

        async def undo(transaction: Transaction) -> Settled | None:
            await withdraw(transaction, ids)
            return await self.aftermath.look(transaction, _others(answers, set(ids)))

        await operations.transact(deposit, deadline, undo, tries=tries)
        self.holdings.remember(lanes)
        return answers

    def possible(self, work: Work) -> bool:
        """Whether no message that would be kept is larger than a document can be."""
        largest = LARGEST_DOCUMENT - _BESIDE_THE_PAYLOAD
        return all(len(payload.data) <= largest for order in work for payload in fitting(order.payloads, self.limits))

    async def _deposit(self, transaction: Transaction, works: Sequence[Work]) -> tuple[_Run, list[Answer]]:
        asked = await self.finder.find(transaction, {order.recipient_did for orders in works for order in orders})
        queues = {queue.did: queue for queue in asked.values()}
        works = [[_addressed(order, asked) for order in orders] for orders in works]
        looking = Looking(self.limits, transaction, queues, self.holdings)
        await looking.begin(order for orders in works for order in orders)
        while True:
            run = _Run(
                self.limits, {did: Lane(queue, looking.known(did), self.limits) for did, queue in queues.items()}
            )
            try:
                answers = [run.deposit(orders) for orders in works]
            except TooFewKnown as missing:
                await looking.more(missing)
                continue
            transaction.later(run.requests(transaction.page))
            return run, answers


class _Run:
    """
    Deposits in a row.

    :param lanes: by DID as it is stored; orders name theirs like that.
    """

    def __init__(self, limits: QueueLimits, lanes: Mapping[str, Lane]) -> None:
        self._limits = limits
        self._lanes = lanes
        self._newcomers: list[Newcomer] = []
        self._accepted = self._evicted = 0

    def deposit(self, orders: Work) -> Answer:
        """What becomes of some orders, or why none of them is carried out."""
        if any(order.recipient_did not in self._lanes for order in orders):
            return RecipientUnknown()
        if self._limits.when_full == "refuse":
            try:
                self._refuse_excess(orders)
            except QueueFull as error:
                return error.with_traceback(None)
        return [self._append(order, self._lanes[order.recipient_did]) for order in orders]

    @property
    def changed(self) -> list[Lane]:
        """Those that are not as they were."""
        return [lane for lane in self._lanes.values() if lane.newcomers or lane.gone]

    def requests(self, page: Page) -> list[Request]:
        """What is to be written."""
        kept = [one for one in self._newcomers if one.kept]
        gone = [id for lane in self.changed for id in lane.gone]
        return [
            *inserting(MESSAGES, [one.order.document(one.payload, one.place) for one in kept]),
            *updating(RECIPIENTS, [_counting(lane) for lane in self.changed]),
            *(deleting(MESSAGES, {"_id": {"$in": gone}}) if gone else ()),
            *entering(page, "didcomm", accepted=self._accepted, evicted=self._evicted),
        ]

    def _refuse_excess(self, orders: Work) -> None:
        """:raise QueueFull: after one of these something would be too much."""
        wholes: dict[str, Amount] = {}
        counted: list[tuple[Usage, int, Amount]] = []
        try:
            for order in orders:
                lane = self._lanes[order.recipient_did]
                whole = wholes.setdefault(order.recipient_did, Amount(lane.messages, lane.bytes))
                coming = Amount(len(order.payloads), size_of(order.payloads))
                whole.add(coming.messages, coming.size)
                if excess(self._limits, whole.messages, whole.size) is not None:
                    raise QueueFull()
                if lane.usage is not None:
                    lane.usage.check(order.origin, coming)
                    lane.usage.change(order.origin, coming.messages, coming.size)
                    counted.append((lane.usage, order.origin, coming))
        finally:
            # It is counted when it is appended.
            for usage, origin, coming in counted:
                usage.change(origin, -coming.messages, -coming.size)

    def _append(self, order: Order, lane: Lane) -> Deposited:
        payloads, account = fitting(order.payloads, self._limits), lane.queue.account
        evicted = lane.make_room(order, payloads)
        self._newcomers += lane.append(order, payloads)
        largest = self._limits.max_bytes
        evicted += [order.removed(one, account, "fifo_bytes") for one in order.payloads if len(one.data) > largest]
        self._accepted += len(order.payloads)
        self._evicted += len(evicted)
        return order.deposited(account, evicted)


def _addressed(order: Order, queues: Mapping[str, Queue]) -> Order:
    """The same for the DID as it is stored, so that one recipient has one lane; as it is if nobody has the DID."""
    queue = queues.get(order.recipient_did)
    if queue is None or queue.did == order.recipient_did:
        return order
    return replace(order, recipient_did=queue.did)


def _others(answers: Sequence[Answer], ids: Collection[str]) -> list[Removed]:
    """What was evicted but for these."""
    deposited = [one for answer in answers if not isinstance(answer, MediatorError) for one in answer]
    return [gone for one in deposited for gone in one.evicted if gone.id not in ids]


def _counting(lane: Lane) -> Document:
    messages, size = lane.messages - lane.queue.messages, lane.bytes - lane.queue.bytes
    change: Document = {"$inc": {"messages": messages, "bytes": size, "changes": 1}}
    if not lane.queue.messages:
        change["$set"] = {"waited_for": True}
    return {"q": {"_id": lane.queue.place.recipient}, "u": change}
