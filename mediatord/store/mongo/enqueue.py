"""Queueing of messages in batches, with eviction of others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from mediatord.errors import MediatorError, QueueFull, UnknownRecipient
from mediatord.store.fair_share import MessageVolume, SenderUsage, find_exceeded_limit
from mediatord.store.interfaces.messages import EnqueueResult, QueueLimits
from mediatord.store.mongo.driver.commands import (
    MAX_DOCUMENT_BYTES,
    Document,
    MongoCommand,
    build_deletes,
    build_inserts,
    build_updates,
)
from mediatord.store.mongo.driver.executor import OperationExecutor
from mediatord.store.mongo.driver.transactions import SessionSlot, Transaction, UndoCallback
from mediatord.store.mongo.eviction import (
    EnqueuedMessage,
    EvictionDataMissing,
    EvictionLoader,
    EvictionPlan,
    QueueUsageCache,
    filter_fitting,
    sum_payload_sizes,
)
from mediatord.store.mongo.ledger import build_ledger_entries
from mediatord.store.mongo.message_queues import MessageQueueFinder, MessageQueueState, MongoEnqueueRequest
from mediatord.store.mongo.removal import LateCommitReporter, withdraw_messages
from mediatord.store.mongo.schema import MESSAGES, RECIPIENTS

# Bytes of a message document beside its payload, at most.
_DOCUMENT_OVERHEAD = 1_024

EnqueueWork = Sequence[MongoEnqueueRequest]
EnqueueOutcome = list[EnqueueResult] | MediatorError


@dataclass(frozen=True, slots=True)
class EnqueueBatchOperation:
    """Queues messages; a MongoBatchOperation on lists of requests, each of which is done completely or not at all."""

    limits: QueueLimits
    finder: MessageQueueFinder
    late_commits: LateCommitReporter
    usage_cache: QueueUsageCache = field(default_factory=QueueUsageCache)

    async def __call__(
        self, executor: OperationExecutor, works: Sequence[EnqueueWork], deadline: float, tries: int | None
    ) -> Sequence[EnqueueOutcome]:
        ids = [payload.id for requests in works for request in requests for payload in request.payloads]
        answers: list[EnqueueOutcome] = []
        plans: list[EvictionPlan] = []

        async def enqueue(transaction: Transaction) -> None:
            enqueue_pass, answers[:] = await self._enqueue(transaction, works)
            plans[:] = enqueue_pass.changed

        async def undo(transaction: Transaction) -> UndoCallback | None:
            await withdraw_messages(transaction, ids)
            own, results = set(ids), [one for one in answers if not isinstance(one, MediatorError)]
            evicted = [gone for some in results for one in some for gone in one.evicted if gone.id not in own]
            return await self.late_commits.find_missing(transaction, evicted)

        await executor.transact(enqueue, deadline, undo, tries=tries)
        self.usage_cache.update(plans)
        return answers

    def is_possible(self, work: EnqueueWork) -> bool:
        """Whether every message that fits in a queue fits in a document."""
        largest = MAX_DOCUMENT_BYTES - _DOCUMENT_OVERHEAD
        return all(
            len(payload.data) <= largest
            for request in work
            for payload in filter_fitting(request.payloads, self.limits)
        )

    async def _enqueue(
        self, transaction: Transaction, works: Sequence[EnqueueWork]
    ) -> tuple[_EnqueuePass, list[EnqueueOutcome]]:
        found = await self.finder.find(
            transaction, {request.recipient_did for requests in works for request in requests}
        )
        queues = {queue.did: queue for queue in found.values()}
        works = [[_use_stored_did(request, found) for request in requests] for requests in works]
        loader = EvictionLoader(self.limits, transaction, queues, self.usage_cache)
        await loader.load_initial(request for requests in works for request in requests)
        while True:
            enqueue_pass = _EnqueuePass(self.limits, loader.build_plans())
            try:
                answers = [enqueue_pass.enqueue(requests) for requests in works]
            except EvictionDataMissing as missing:
                await loader.load_more(missing)
                continue
            transaction.write_at_end(enqueue_pass.build_writes(transaction.slot))
            return enqueue_pass, answers


class _EnqueuePass:
    """
    Queues the messages of several works in memory.

    :param plans: by DID in its stored form, which the requests use as well.
    """

    def __init__(self, limits: QueueLimits, plans: Mapping[str, EvictionPlan]) -> None:
        self._limits = limits
        self._plans = plans
        self._new_messages: list[EnqueuedMessage] = []
        self._accepted = self._evicted = 0

    def enqueue(self, requests: EnqueueWork) -> EnqueueOutcome:
        """Queue the messages of all requests; return the error if one of them is rejected."""
        if any(request.recipient_did not in self._plans for request in requests):
            return UnknownRecipient()
        if self._limits.when_full == "refuse":
            try:
                self._refuse_excess(requests)
            except QueueFull as error:
                return error.with_traceback(None)
        return [self._append(request, self._plans[request.recipient_did]) for request in requests]

    @property
    def changed(self) -> list[EvictionPlan]:
        return [plan for plan in self._plans.values() if plan.new_messages or plan.evicted_ids]

    def build_writes(self, slot: SessionSlot) -> list[MongoCommand]:
        kept = [one for one in self._new_messages if one.kept]
        evicted = [id for plan in self.changed for id in plan.evicted_ids]
        return [
            *build_inserts(MESSAGES, [one.request.document(one.payload, one.queue) for one in kept]),
            *build_updates(RECIPIENTS, [_build_counter_update(plan) for plan in self.changed]),
            *(build_deletes(MESSAGES, {"_id": {"$in": evicted}}) if evicted else ()),
            *build_ledger_entries(slot, "didcomm", accepted=self._accepted, evicted=self._evicted),
        ]

    def _refuse_excess(self, requests: EnqueueWork) -> None:
        """:raise QueueFull: the requests would exceed a limit."""
        wholes: dict[str, MessageVolume] = {}
        counted: list[tuple[SenderUsage, int, MessageVolume]] = []
        try:
            for request in requests:
                plan = self._plans[request.recipient_did]
                whole = wholes.setdefault(request.recipient_did, MessageVolume(plan.messages, plan.bytes))
                coming = MessageVolume(len(request.payloads), sum_payload_sizes(request.payloads))
                whole.add(coming.messages, coming.size)
                if find_exceeded_limit(self._limits, whole.messages, whole.size) is not None:
                    raise QueueFull()
                if plan.usage is not None:
                    plan.usage.check(request.origin, coming)
                    plan.usage.change(request.origin, coming.messages, coming.size)
                    counted.append((plan.usage, request.origin, coming))
        finally:
            # They are counted again when they are appended.
            for usage, origin, coming in counted:
                usage.change(origin, -coming.messages, -coming.size)

    def _append(self, request: MongoEnqueueRequest, plan: EvictionPlan) -> EnqueueResult:
        payloads, account = filter_fitting(request.payloads, self._limits), plan.queue.account
        evicted = plan.make_room(request, payloads)
        self._new_messages += plan.append(request, payloads)
        largest = self._limits.max_bytes
        evicted += [
            request.removed(one, account, "fifo_bytes") for one in request.payloads if len(one.data) > largest
        ]
        self._accepted += len(request.payloads)
        self._evicted += len(evicted)
        return request.enqueued(account, evicted)


def _use_stored_did(request: MongoEnqueueRequest, queues: Mapping[str, MessageQueueState]) -> MongoEnqueueRequest:
    """Return the request with the DID in its stored form, so that a recipient has one plan."""
    queue = queues.get(request.recipient_did)
    if queue is None or queue.did == request.recipient_did:
        return request
    return replace(request, recipient_did=queue.did)


def _build_counter_update(plan: EvictionPlan) -> Document:
    messages, size = plan.messages - plan.queue.messages, plan.bytes - plan.queue.bytes
    change: Document = {"$inc": {"messages": messages, "bytes": size, "changes": 1}}
    if not plan.queue.messages:
        change["$set"] = {"waited_for": True}
    return {"q": {"_id": plan.queue.recipient_id}, "u": change}
