"""Queueing of messages in batches, with eviction of others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import NamedTuple

from bson import Timestamp

from mediatord.errors import MediatorError, QueueFull, UnknownRecipient
from mediatord.store.fair_share import MessageVolume, SenderUsage, find_exceeded_limit
from mediatord.store.interfaces.messages import EnqueueRequest, EnqueueResult, QueueLimits, StoredMessage
from mediatord.store.mongo.driver.collection import MAX_DOCUMENT_BYTES, Document, MongoCommand
from mediatord.store.mongo.driver.operation import Operation
from mediatord.store.mongo.driver.transactions import SessionSlot, Transaction, UndoCallback
from mediatord.store.mongo.eviction import (
    EnqueuedMessage,
    EvictionDataMissing,
    EvictionLoader,
    EvictionPlan,
    QueueUsageCache,
    filter_fitting,
    sum_volume,
)
from mediatord.store.mongo.ledger import build_ledger_entries
from mediatord.store.mongo.message_queues import MessageQueueFinder, MessageQueueState, split_origin
from mediatord.store.mongo.removal import UncertainRemovalReporter, withdraw_messages
from mediatord.store.mongo.schema import MESSAGES, RECIPIENTS

# Bytes of a message document beside its payload, at most.
_DOCUMENT_OVERHEAD = 1_024

EnqueueOutcome = list[EnqueueResult] | MediatorError


class EnqueueWork(NamedTuple):
    """Requests that are done completely or not at all, and their time."""

    requests: Sequence[EnqueueRequest]
    now: float


@dataclass(frozen=True, slots=True)
class EnqueueBatch:
    """Queues messages; a BatchOperation on :class:`EnqueueWork`."""

    limits: QueueLimits
    reporter: UncertainRemovalReporter
    finder: MessageQueueFinder = field(default_factory=MessageQueueFinder)
    usage_cache: QueueUsageCache = field(default_factory=QueueUsageCache)

    async def __call__(
        self, run: Operation, works: Sequence[EnqueueWork], tries: int | None
    ) -> Sequence[EnqueueOutcome]:
        ids = [payload.id for work in works for request in work.requests for payload in request.payloads]
        answers: list[EnqueueOutcome] = []
        plans: list[EvictionPlan] = []

        async def enqueue(transaction: Transaction) -> None:
            enqueue_pass, answers[:] = await self._enqueue(transaction, works)
            plans[:] = enqueue_pass.changed

        async def undo(transaction: Transaction) -> UndoCallback | None:
            await withdraw_messages(transaction, ids)
            own, results = set(ids), [one for one in answers if not isinstance(one, MediatorError)]
            evicted = [gone for some in results for one in some for gone in one.evicted if gone.id not in own]
            return await self.reporter.find_missing(transaction, MESSAGES, evicted)

        await run.transact(enqueue, undo, tries=tries)
        self.usage_cache.update(plans)
        return answers

    def is_possible(self, requests: Sequence[EnqueueRequest]) -> bool:
        """Whether every message that fits in a queue fits in a document."""
        largest = MAX_DOCUMENT_BYTES - _DOCUMENT_OVERHEAD
        return all(
            len(payload.data) <= largest
            for request in requests
            for payload in filter_fitting(request.payloads, self.limits)
        )

    async def _enqueue(
        self, transaction: Transaction, works: Sequence[EnqueueWork]
    ) -> tuple[_EnqueuePass, list[EnqueueOutcome]]:
        dids = {request.recipient_did for work in works for request in work.requests}
        found = await self.finder.find(transaction, dids)
        queues = {queue.did: queue for queue in found.values()}
        works = [EnqueueWork([_use_stored_did(one, found) for one in work.requests], work.now) for work in works]
        loader = EvictionLoader(self.limits, transaction, queues, self.usage_cache)
        await loader.load_initial(request for work in works for request in work.requests)
        while True:
            enqueue_pass = _EnqueuePass(self.limits, loader.build_plans())
            try:
                answers = [enqueue_pass.enqueue(work) for work in works]
            except EvictionDataMissing as missing:
                await loader.load_more(*missing.args)
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

    def enqueue(self, work: EnqueueWork) -> EnqueueOutcome:
        """Queue the messages of all requests; return the error if one of them is rejected."""
        if any(request.recipient_did not in self._plans for request in work.requests):
            return UnknownRecipient()
        works = [(request, self._build_messages(request, work.now)) for request in work.requests]
        if self._limits.when_full == "refuse":
            try:
                self._refuse_excess(works)
            except QueueFull as error:
                return error.with_traceback(None)
        return [self._append(request, messages) for request, messages in works]

    @property
    def changed(self) -> list[EvictionPlan]:
        return [plan for plan in self._plans.values() if plan.new_messages or plan.evicted_ids]

    def build_writes(self, slot: SessionSlot) -> list[MongoCommand]:
        evicted = [id for plan in self.changed for id in plan.evicted_ids]
        return [
            *MESSAGES.insert([_build_document(one) for one in self._new_messages if one.kept]),
            *RECIPIENTS.update_each([_build_counter_update(plan) for plan in self.changed]),
            *(MESSAGES.delete({"_id": {"$in": evicted}}) if evicted else ()),
            *build_ledger_entries(slot, "didcomm", accepted=self._accepted, evicted=self._evicted),
        ]

    def _build_messages(self, request: EnqueueRequest, now: float) -> list[EnqueuedMessage]:
        queue = self._plans[request.recipient_did].queue
        return [EnqueuedMessage(request, payload, now, queue) for payload in request.payloads]

    def _refuse_excess(self, requests: Iterable[tuple[EnqueueRequest, Sequence[EnqueuedMessage]]]) -> None:
        """:raise QueueFull: the messages of the requests would exceed a limit."""
        wholes: dict[str, MessageVolume] = {}
        counted: list[tuple[SenderUsage, int, MessageVolume]] = []
        try:
            for request, messages in requests:
                plan, coming = self._plans[request.recipient_did], sum_volume(messages)
                whole = wholes.setdefault(request.recipient_did, MessageVolume(plan.messages, plan.bytes))
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

    def _append(self, request: EnqueueRequest, messages: Sequence[EnqueuedMessage]) -> EnqueueResult:
        plan, largest = self._plans[request.recipient_did], self._limits.max_bytes
        fitting = [one for one in messages if len(one.payload.data) <= largest]
        evicted = plan.append(fitting)
        evicted += [one.removed("fifo_bytes") for one in messages if len(one.payload.data) > largest]
        self._new_messages += fitting
        self._accepted += len(messages)
        self._evicted += len(evicted)
        return EnqueueResult(tuple([_build_stored_message(one) for one in messages]), tuple(evicted))


def _use_stored_did(request: EnqueueRequest, queues: Mapping[str, MessageQueueState]) -> EnqueueRequest:
    """Return the request with the DID in its stored form, so that a recipient has one plan."""
    queue = queues.get(request.recipient_did)
    if queue is None or queue.did == request.recipient_did:
        return request
    return replace(request, recipient_did=queue.did)


def _build_document(message: EnqueuedMessage) -> Document:
    request, payload, queue = message.request, message.payload, message.queue
    document: Document = {
        "_id": payload.id,
        "recipient": queue.recipient_id,
        "account": queue.account_id,
        "seq": Timestamp(0, 0),
        "form": payload.form,
        "size": len(payload.data),
        "received_at": message.now,
        "expires_at": request.expires_at,
        "pushes": 0,
        "digest": sha256(payload.data).digest(),
        "payload": payload.data,
    }
    if request.due_at is None:
        document["arrived_at"] = message.now
    else:
        document["due_at"] = request.due_at
        if request.due_at < request.expires_at:
            document["wakes_at"] = request.due_at
    return document | split_origin(request.origin)


def _build_stored_message(message: EnqueuedMessage) -> StoredMessage:
    request, payload = message.request, message.payload
    return StoredMessage(
        id=payload.id,
        recipient_did=request.recipient_did,
        account=message.queue.account,
        payload=payload.data,
        form=payload.form,
        received_at=message.now,
        expires_at=request.expires_at,
        due_at=request.due_at,
    )


def _build_counter_update(plan: EvictionPlan) -> Document:
    messages, size = plan.messages - plan.queue.messages, plan.bytes - plan.queue.bytes
    change: Document = {"$inc": {"messages": messages, "bytes": size, "changes": 1}}
    if not plan.queue.messages:
        change["$set"] = {"waited_for": True}
    return {"q": {"_id": plan.queue.recipient_id}, "u": change}
