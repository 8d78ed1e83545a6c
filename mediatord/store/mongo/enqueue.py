"""Appending to queues and making room in them, for many at a time."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from mediatord.errors import MediatorError, QueueFull, UnknownRecipient
from mediatord.store.fair_share import MessageVolume, SenderUsage, find_exceeded_limit
from mediatord.store.interfaces.messages import EnqueueResult, QueueLimits, RemovedMessage
from mediatord.store.mongo.driver.commands import (
    MAX_DOCUMENT_BYTES,
    Document,
    MongoCommand,
    build_deletes,
    build_inserts,
    build_updates,
)
from mediatord.store.mongo.driver.executor import OperationExecutor
from mediatord.store.mongo.driver.transactions import Transaction, UndoCallback
from mediatord.store.mongo.eviction import (
    EnqueuedMessage,
    EvictionDataMissing,
    EvictionLoader,
    EvictionPlan,
    MessageQueueFinder,
    MessageQueueState,
    QueueUsageCache,
    filter_fitting,
    sum_payload_sizes,
)
from mediatord.store.mongo.ledger_entries import LedgerPage, build_ledger_entries
from mediatord.store.mongo.message_queues import MongoEnqueueRequest
from mediatord.store.mongo.removal import LateCommitReporter, withdraw_messages
from mediatord.store.mongo.schema import MESSAGES, RECIPIENTS

_DOCUMENT_OVERHEAD = 1_024

EnqueueWork = Sequence[MongoEnqueueRequest]
EnqueueOutcome = list[EnqueueResult] | MediatorError


@dataclass(frozen=True, slots=True)
class EnqueueBatchOperation:
    """Does works of some orders each, all of a work or nothing; see :class:`~.gathering.Together`."""

    limits: QueueLimits
    finder: MessageQueueFinder
    late_commits: LateCommitReporter
    usage_cache: QueueUsageCache = field(default_factory=QueueUsageCache)

    async def __call__(
        self, executor: OperationExecutor, works: Sequence[EnqueueWork], deadline: float, tries: int | None
    ) -> Sequence[EnqueueOutcome]:
        ids = [payload.id for orders in works for order in orders for payload in order.payloads]
        answers: list[EnqueueOutcome] = []
        plans: list[EvictionPlan] = []

        async def enqueue(transaction: Transaction) -> None:
            run, answers[:] = await self._deposit(transaction, works)
            plans[:] = run.changed

        async def undo(transaction: Transaction) -> UndoCallback | None:
            await withdraw_messages(transaction, ids)
            return await self.late_commits.look(transaction, _list_other_evicted(answers, set(ids)))

        await executor.transact(enqueue, deadline, undo, tries=tries)
        self.usage_cache.remember(plans)
        return answers

    def possible(self, work: EnqueueWork) -> bool:
        """Whether no message that would be kept is larger than a document can be."""
        largest = MAX_DOCUMENT_BYTES - _DOCUMENT_OVERHEAD
        return all(
            len(payload.data) <= largest for order in work for payload in filter_fitting(order.payloads, self.limits)
        )

    async def _deposit(
        self, transaction: Transaction, works: Sequence[EnqueueWork]
    ) -> tuple[_EnqueuePass, list[EnqueueOutcome]]:
        asked = await self.finder.find(transaction, {order.recipient_did for orders in works for order in orders})
        queues = {queue.did: queue for queue in asked.values()}
        works = [[_use_stored_did(order, asked) for order in orders] for orders in works]
        loader = EvictionLoader(self.limits, transaction, queues, self.usage_cache)
        await loader.begin(order for orders in works for order in orders)
        while True:
            run = _EnqueuePass(
                self.limits,
                {did: EvictionPlan(queue, loader.known(did), self.limits) for did, queue in queues.items()},
            )
            try:
                answers = [run.enqueue(orders) for orders in works]
            except EvictionDataMissing as missing:
                await loader.more(missing)
                continue
            transaction.write_at_end(run.requests(transaction.page))
            return run, answers


class _EnqueuePass:
    """
    Deposits in a row.

    :param lanes: by DID as it is stored; orders name theirs like that.
    """

    def __init__(self, limits: QueueLimits, plans: Mapping[str, EvictionPlan]) -> None:
        self._limits = limits
        self._plans = plans
        self._new_messages: list[EnqueuedMessage] = []
        self._accepted = self._evicted = 0

    def enqueue(self, orders: EnqueueWork) -> EnqueueOutcome:
        """What becomes of some orders, or why none of them is carried out."""
        if any(order.recipient_did not in self._plans for order in orders):
            return UnknownRecipient()
        if self._limits.when_full == "refuse":
            try:
                self._refuse_excess(orders)
            except QueueFull as error:
                return error.with_traceback(None)
        return [self._append(order, self._plans[order.recipient_did]) for order in orders]

    @property
    def changed(self) -> list[EvictionPlan]:
        """Those that are not as they were."""
        return [plan for plan in self._plans.values() if plan.new_messages or plan.gone]

    def requests(self, page: LedgerPage) -> list[MongoCommand]:
        """What is to be written."""
        kept = [one for one in self._new_messages if one.kept]
        gone = [id for plan in self.changed for id in plan.gone]
        return [
            *build_inserts(MESSAGES, [one.order.document(one.payload, one.place) for one in kept]),
            *build_updates(RECIPIENTS, [_build_counter_update(plan) for plan in self.changed]),
            *(build_deletes(MESSAGES, {"_id": {"$in": gone}}) if gone else ()),
            *build_ledger_entries(page, "didcomm", accepted=self._accepted, evicted=self._evicted),
        ]

    def _refuse_excess(self, orders: EnqueueWork) -> None:
        """:raise QueueFull: after one of these something would be too much."""
        wholes: dict[str, MessageVolume] = {}
        counted: list[tuple[SenderUsage, int, MessageVolume]] = []
        try:
            for order in orders:
                plan = self._plans[order.recipient_did]
                whole = wholes.setdefault(order.recipient_did, MessageVolume(plan.messages, plan.bytes))
                coming = MessageVolume(len(order.payloads), sum_payload_sizes(order.payloads))
                whole.add(coming.messages, coming.size)
                if find_exceeded_limit(self._limits, whole.messages, whole.size) is not None:
                    raise QueueFull()
                if plan.usage is not None:
                    plan.usage.check(order.origin, coming)
                    plan.usage.change(order.origin, coming.messages, coming.size)
                    counted.append((plan.usage, order.origin, coming))
        finally:
            # It is counted when it is appended.
            for usage, origin, coming in counted:
                usage.change(origin, -coming.messages, -coming.size)

    def _append(self, order: MongoEnqueueRequest, plan: EvictionPlan) -> EnqueueResult:
        payloads, account = filter_fitting(order.payloads, self._limits), plan.queue.account
        evicted = plan.make_room(order, payloads)
        self._new_messages += plan.append(order, payloads)
        largest = self._limits.max_bytes
        evicted += [order.removed(one, account, "fifo_bytes") for one in order.payloads if len(one.data) > largest]
        self._accepted += len(order.payloads)
        self._evicted += len(evicted)
        return order.enqueued(account, evicted)


def _use_stored_did(order: MongoEnqueueRequest, queues: Mapping[str, MessageQueueState]) -> MongoEnqueueRequest:
    """The same for the DID as it is stored, so that one recipient has one lane; as it is if nobody has the DID."""
    queue = queues.get(order.recipient_did)
    if queue is None or queue.did == order.recipient_did:
        return order
    return replace(order, recipient_did=queue.did)


def _list_other_evicted(answers: Sequence[EnqueueOutcome], ids: Collection[str]) -> list[RemovedMessage]:
    """What was evicted but for these."""
    enqueued = [one for answer in answers if not isinstance(answer, MediatorError) for one in answer]
    return [gone for one in enqueued for gone in one.evicted if gone.id not in ids]


def _build_counter_update(plan: EvictionPlan) -> Document:
    messages, size = plan.messages - plan.queue.messages, plan.bytes - plan.queue.bytes
    change: Document = {"$inc": {"messages": messages, "bytes": size, "changes": 1}}
    if not plan.queue.messages:
        change["$set"] = {"waited_for": True}
    return {"q": {"_id": plan.queue.place.recipient}, "u": change}
