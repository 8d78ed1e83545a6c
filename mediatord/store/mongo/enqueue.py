"""Queueing of messages in batches, and eviction of others to make room, by fair share of the senders."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import NamedTuple

from bson import ObjectId, Timestamp

from mediatord.errors import MediatorError, QueueFull, UnknownRecipient
from mediatord.store.fair_share import (
    ANONYMOUS,
    AUTHENTICATED,
    KNOWN,
    SENDER_MASK,
    KnownSenders,
    MessageVolume,
    SenderGroup,
    SenderUsage,
    find_exceeded_limit,
    is_from_group,
    may_exceed_share,
    needs_sender_usage,
)
from mediatord.store.interfaces.messages import (
    EnqueueRequest,
    EnqueueResult,
    Payload,
    QueueLimits,
    RemovalReason,
    RemovedMessage,
    StoredMessage,
)
from mediatord.store.mongo.driver.collection import MAX_DOCUMENT_BYTES, Document, MongoCommand
from mediatord.store.mongo.driver.operation import Operation
from mediatord.store.mongo.driver.transactions import SessionSlot, Transaction, UndoCallback
from mediatord.store.mongo.ledger import build_ledger_entries
from mediatord.store.mongo.message_queues import (
    EVICTION_PROJECTION,
    NETWORK_BITS,
    MessageQueueFinder,
    MessageQueueState,
    build_removed,
    join_origin,
    split_origin,
)
from mediatord.store.mongo.removal import UncertainRemovalReporter, withdraw_messages
from mediatord.store.mongo.schema import ABSENT, MESSAGES, RECIPIENTS

# Bytes of a message document beside its payload, at most.
_DOCUMENT_OVERHEAD = 1_024
# Origins in the cached usage of all queues.
_USAGE_CACHE_SIZE = 100_000
# Messages to load first when a queue has too many bytes, and the factor by which to load more.
_INITIAL_CANDIDATES = 16
_CANDIDATE_GROWTH = 8


class QueueUsage(NamedTuple):
    """
    Shares of the senders in a queue.

    :param amounts: by origin.
    :param known_parties: those whose messages the recipient has acknowledged before.
    """

    amounts: dict[int, MessageVolume]
    known_parties: frozenset[int] = frozenset()


class EvictionDataMissing(Exception):
    """More messages of a group of senders have to be loaded from a queue."""


@dataclass(eq=False, slots=True)
class EnqueuedMessage:
    """
    A message that is being queued.

    :param now: time of the request.
    """

    request: EnqueueRequest
    payload: Payload
    now: float
    queue: MessageQueueState
    kept: bool = True

    def removed(self, reason: RemovalReason) -> RemovedMessage:
        """Build the record of its eviction."""
        did, account, size = self.request.recipient_did, self.queue.account, len(self.payload.data)
        return RemovedMessage(self.payload.id, did, account, size, self.now, 0, reason)


def sum_volume(messages: Sequence[EnqueuedMessage]) -> MessageVolume:
    return MessageVolume(len(messages), sum([len(one.payload.data) for one in messages]))


class EvictionPlan:
    """
    A queue after some messages were appended and others evicted, and what was loaded of it for that.

    :ivar usage_before: usage of the queue before; None if it was not loaded.
    :ivar oldest: its oldest messages by group of senders, as far as they were loaded, and how many were wanted.
    :ivar messages: their number by now; `bytes` is the sum of their payloads.
    :ivar new_messages: those of them that were appended.
    :ivar evicted_ids: ids of those that are evicted and were there before.
    :ivar usage: usage by now, and `usage_changes` since it was loaded; None if it does not matter.
    """

    def __init__(self, queue: MessageQueueState, limits: QueueLimits, usage: QueueUsage | None) -> None:
        self.queue = queue
        self.usage_before: QueueUsage | None = None
        self.oldest: dict[SenderGroup, tuple[Sequence[Document], int]] = {}
        self._limits = limits
        # What is to be queued, by origin, and all that will be queued with it.
        self._coming: dict[int, MessageVolume] = {}
        self._whole = MessageVolume(queue.messages, queue.bytes)
        self.restart()
        self.usage_before = usage

    def restart(self) -> None:
        """Begin with what was loaded until now."""
        self.messages, self.bytes = self.queue.messages, self.queue.bytes
        self.new_messages: deque[EnqueuedMessage] = deque()
        self.evicted_ids: dict[str, None] = {}
        self.usage = self._build_sender_usage()
        self.usage_changes: dict[int, MessageVolume] = {}
        self._left = {group: deque(some) for group, (some, _) in self.oldest.items()}

    def announce(self, request: EnqueueRequest) -> None:
        """Count a request that is going to be queued."""
        payloads = filter_fitting(request.payloads, self._limits)
        size = sum([len(payload.data) for payload in payloads])
        self._coming.setdefault(request.origin, MessageVolume()).add(len(payloads), size)
        self._whole.add(len(payloads), size)

    @property
    def is_nearly_full(self) -> bool:
        """Whether a limit of the queue or of a sender may be exceeded."""
        if self._limits.when_full == "refuse":
            return any(may_exceed_share(self._limits, origin, self._whole) for origin in self._coming)
        return self.eviction_count > 0

    @property
    def eviction_count(self) -> int:
        """How many of the oldest messages to load first."""
        number = max(self._whole.messages - self._limits.max_messages, 0)
        return number + _INITIAL_CANDIDATES if self._whole.size > self._limits.max_bytes else number

    @property
    def lacks_usage(self) -> bool:
        return self.usage_before is None and any(needs_sender_usage(self._limits, one) for one in self._coming)

    def list_likely_groups(self) -> Iterable[SenderGroup]:
        """List the groups whose messages may be evicted."""
        senders = self._build_sender_usage()
        for origin, coming in self._coming.items():
            if senders is not None and needs_sender_usage(self._limits, origin):
                yield from senders.likely(origin, coming)

    def build_oldest_query(self, group: SenderGroup, number: int) -> MongoCommand:
        filter = {"recipient": self.queue.recipient_id, **_build_group_filter(group, self._known_parties)}
        return MESSAGES.find(filter, sort={"seq": 1}, limit=number, projection=EVICTION_PROJECTION)

    def append(self, messages: Sequence[EnqueuedMessage], origin: int) -> list[RemovedMessage]:
        """Append messages of a request, and evict others until these fit or none is left to evict."""
        evicted: list[RemovedMessage] = []
        coming = sum_volume(messages)
        while reason := find_exceeded_limit(self._limits, self.messages + coming.messages, self.bytes + coming.size):
            usage = (
                self.usage
                if self.usage and needs_sender_usage(self._limits, origin)
                else SenderUsage(self._limits, frozenset())
            )
            group = usage.victim(origin, coming, self._find_oldest_origin)
            if group is None:
                break
            evicted.append(self._evict_oldest(group, reason))
        self.new_messages += messages
        self._count(coming.messages, coming.size, origin)
        return evicted

    def _find_oldest_origin(self, group: SenderGroup) -> int | None:
        """Origin of the oldest message of a group, if there is one."""
        document = self._find_oldest(group)
        if document is not None:
            return join_origin(document)
        new_message = self._find_new_message(group)
        return None if new_message is None else new_message.request.origin

    def _evict_oldest(self, group: SenderGroup, reason: RemovalReason) -> RemovedMessage:
        """Evict the oldest message of a group, which has one."""
        document = self._find_oldest(group)
        if document is not None:
            self.evicted_ids[document["_id"]] = None
            self._count(-1, -document["size"], join_origin(document))
            return build_removed(document, self.queue.did, self.queue.account, reason)
        new_message = self._find_new_message(group)
        assert new_message is not None
        new_message.kept = False
        self.new_messages.remove(new_message)
        self._count(-1, -len(new_message.payload.data), new_message.request.origin)
        return new_message.removed(reason)

    def _find_oldest(self, group: SenderGroup) -> Document | None:
        """
        Find the oldest message of a group that was there before and is not evicted.

        :raise EvictionDataMissing: it was not loaded.
        """
        left = self._left.get(group, deque[Document]())
        while left and left[0]["_id"] in self.evicted_ids:
            left.popleft()
        if left:
            return left[0]
        some, wanted = self.oldest.get(group, ((), 0))
        if len(some) >= wanted:
            raise EvictionDataMissing(self.queue.did, group)
        return None

    def _find_new_message(self, group: SenderGroup) -> EnqueuedMessage | None:
        known = self._known_parties
        return next((one for one in self.new_messages if is_from_group(group, one.request.origin, known)), None)

    @property
    def _known_parties(self) -> frozenset[int]:
        return frozenset() if self.usage_before is None else self.usage_before.known_parties

    def _build_sender_usage(self) -> SenderUsage | None:
        if self.usage_before is None:
            return None
        amounts = [(origin, one.messages, one.size) for origin, one in self.usage_before.amounts.items()]
        return SenderUsage(self._limits, self.usage_before.known_parties, amounts)

    def _count(self, messages: int, size: int, origin: int) -> None:
        self.messages += messages
        self.bytes += size
        if self.usage is not None:
            self.usage.change(origin, messages, size)
            self.usage_changes.setdefault(origin, MessageVolume()).add(messages, size)


def filter_fitting(payloads: Sequence[Payload], limits: QueueLimits) -> list[Payload]:
    """Return the payloads that are not larger than a whole queue may be."""
    return [payload for payload in payloads if len(payload.data) <= limits.max_bytes]


# Number of the last change, messages and bytes.
_QueueVersion = tuple[int, int, int]


class QueueUsageCache:
    """
    Cache of the usage of queues, so that it is not counted for every message.

    Every change of a queue, by any node, has a number; usage is valid only for the latest one.
    """

    def __init__(self, capacity: int = _USAGE_CACHE_SIZE) -> None:
        self._capacity = capacity
        self._origins = 0
        self._entries: OrderedDict[ObjectId, tuple[_QueueVersion, QueueUsage]] = OrderedDict()

    def get(self, queue: MessageQueueState) -> QueueUsage | None:
        version, usage = self._entries.get(queue.recipient_id, (None, None))
        return usage if version == (queue.changes, queue.messages, queue.bytes) else None

    def update(self, plans: Iterable[EvictionPlan]) -> None:
        """Apply plans that are durable."""
        for plan in plans:
            recipient = plan.queue.recipient_id
            if recipient in self._entries:
                self._origins -= len(self._entries.pop(recipient)[1].amounts)
            if plan.usage_before is None:
                continue
            amounts = plan.usage_before.amounts
            for origin, change in plan.usage_changes.items():
                amount = amounts.setdefault(origin, MessageVolume())
                amount.add(change.messages, change.size)
                if not amount.messages:
                    del amounts[origin]
            self._entries[recipient] = ((plan.queue.changes + 1, plan.messages, plan.bytes), plan.usage_before)
            self._origins += len(amounts)
        while self._origins > self._capacity:
            _, (_, oldest) = self._entries.popitem(last=False)
            self._origins -= len(oldest.amounts)


class EvictionLoader:
    """
    Loads from queues, in a transaction, what the eviction for some requests depends on.

    :param plans: by DID.
    """

    def __init__(self, limits: QueueLimits, transaction: Transaction, plans: Mapping[str, EvictionPlan]) -> None:
        self._limits = limits
        self._transaction = transaction
        self._plans = plans

    async def load_initial(self, requests: Iterable[EnqueueRequest]) -> None:
        """Load what the requests very likely need."""
        for request in requests:
            if request.recipient_did in self._plans:
                self._plans[request.recipient_did].announce(request)
        full = {did: one for did, one in self._plans.items() if one.is_nearly_full}
        counted = [one for one in full.values() if one.lacks_usage]
        if self._limits.when_full == "refuse":
            await self._load({}, counted)
            return
        # Without reserved shares the oldest messages of all are evicted in any case.
        certain = {(did, SenderGroup()): one.eviction_count for did, one in full.items()}
        await self._load({} if self._limits.reserved else certain, counted)
        likely = {
            (did, group): one.eviction_count
            for did, one in full.items()
            for group in one.list_likely_groups()
            if group not in one.oldest
        }
        await self._load(likely)

    async def load_more(self, did: str, group: SenderGroup) -> None:
        if group not in self._plans[did].oldest:
            await self._load({(did, group): self._plans[did].eviction_count})
            return
        loaded = [(did, *one) for did, plan in self._plans.items() for one in plan.oldest.items()]
        await self._load({(did, group): number * _CANDIDATE_GROWTH for did, group, (_, number) in loaded})

    async def _load(
        self, wanted: Mapping[tuple[str, SenderGroup], int], counted: Sequence[EvictionPlan] = ()
    ) -> None:
        """
        Load outlines of messages, and usage.

        :param wanted: how many of the oldest messages, by DID and group.
        :param counted: queues whose usage is loaded.
        """
        recipients = [one.queue.recipient_id for one in counted]
        found = await self._transaction.query_many(
            *[self._plans[did].build_oldest_query(group, number) for (did, group), number in wanted.items()],
            *[_build_usage_query(recipient) for recipient in recipients],
            *[RECIPIENTS.find({"_id": one}, limit=1, projection={"senders": 1}) for one in recipients],
        )
        for ((did, group), number), some in zip(wanted.items(), found, strict=False):
            self._plans[did].oldest[group] = some, number
        usage = found[len(wanted) :]
        for plan, sums, senders in zip(counted, usage[: len(counted)], usage[len(counted) :], strict=True):
            amounts: dict[int, MessageVolume] = {}
            for one in sums:
                amounts.setdefault(join_origin(one["_id"]), MessageVolume()).add(one["messages"], one["bytes"])
            known = [party for one in senders for party in KnownSenders(one.get("senders")).known]
            plan.usage_before = QueueUsage(amounts, frozenset(known))


def _build_usage_query(recipient: ObjectId) -> MongoCommand:
    origin = {"network": "$network", "sender": "$sender"}
    sums = {"_id": origin, "messages": {"$sum": 1}, "bytes": {"$sum": "$size"}}
    return MESSAGES.aggregate([{"$match": {"recipient": recipient}}, {"$group": sums}])


def _build_group_filter(group: SenderGroup, known: frozenset[int]) -> Document:
    """
    Build a filter for a group of senders; see :mod:`mediatord.store.fair_share`.

    :param known: parties whose messages the recipient has acknowledged before.
    """
    rank, network, sender = group
    conditions: list[Document] = []
    if sender is not None:
        conditions.append({"sender": sender})
    if network is not None:
        conditions.append({"network": network >> NETWORK_BITS or ABSENT})
    senders = sorted(party for party in known if party & SENDER_MASK)
    networks = sorted(party >> NETWORK_BITS for party in known if not party & SENDER_MASK)
    if rank == ANONYMOUS:
        conditions.append({"sender": ABSENT, "network": {"$nin": networks}})
    elif rank == AUTHENTICATED:
        conditions.append({"sender": {"$exists": True, "$nin": senders}})
    elif rank == KNOWN:
        anonymous = {"sender": ABSENT, "network": {"$in": networks}}
        conditions.append({"$or": [{"sender": {"$in": senders}}, anonymous]})
    return {"$and": conditions} if conditions else {}


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
        works = [EnqueueWork([_use_stored_did(one, found) for one in work.requests], work.now) for work in works]
        plans = {one.did: EvictionPlan(one, self.limits, self.usage_cache.get(one)) for one in found.values()}
        loader = EvictionLoader(self.limits, transaction, plans)
        await loader.load_initial(request for work in works for request in work.requests)
        while True:
            enqueue_pass = _EnqueuePass(self.limits, plans)
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
        for plan in plans.values():
            plan.restart()

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
        evicted = plan.append(fitting, request.origin)
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
