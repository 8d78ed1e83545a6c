"""Queueing of messages in batches, and eviction of others to make room, by fair share of the senders."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
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
    get_common_room,
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
from mediatord.store.mongo.driver.errors import RepeatTransaction
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
from mediatord.store.mongo.removal import RecentMessages, UncertainRemovalReporter, withdraw_messages
from mediatord.store.mongo.schema import ABSENT, MESSAGES, PRESENT, RECIPIENTS

# Bytes of a message document beside its payload, at most.
_DOCUMENT_OVERHEAD = 1_024
# Entries in the cached usage of all queues.
_USAGE_CACHE_SIZE = 100_000
# Of the oldest messages of a queue, how many to load first beyond one for each that comes, and the factor by which to
# load more.
_SPARE_CANDIDATES = 4
_CANDIDATE_GROWTH = 8


class EvictionDataMissing(Exception):
    """More has to be loaded of a queue; its plan has recorded what."""


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
        did, account, size = self.queue.did, self.queue.account, len(self.payload.data)
        return RemovedMessage(self.payload.id, did, account, size, self.now, 0, reason)


def sum_volume(messages: Sequence[EnqueuedMessage]) -> MessageVolume:
    return MessageVolume(len(messages), sum([len(one.payload.data) for one in messages]))


class EvictionPlan:
    """
    A queue after some messages were appended and others evicted, and what was loaded of it for that.

    :param usage: usage of the queue, which the plan changes; None if it is not known.
    :ivar coming: how many messages are to be queued.
    :ivar messages: their number by now; `bytes` is the sum of their payloads.
    :ivar new_messages: those of them that were appended.
    :ivar evicted_ids: ids of those that are evicted and were there before.
    :ivar lacks_usage: whether the usage has to be loaded.
    :ivar lacking: groups of senders whose oldest messages have to be loaded, and how many.
    """

    def __init__(self, queue: MessageQueueState, limits: QueueLimits, usage: SenderUsage | None) -> None:
        self.queue = queue
        self.usage = usage
        self.coming = 0
        self._limits = limits
        # The oldest messages by group, as far as they were loaded, and how many were wanted.
        self._oldest: dict[SenderGroup, tuple[Sequence[Document], int]] = {}
        self._usage_changes: list[tuple[int, int, int]] = []
        self.restart()

    def restart(self) -> None:
        """Begin with what was loaded until now."""
        for origin, messages, size in reversed(self._usage_changes):
            self.require_usage().change(origin, -messages, -size)
        self._usage_changes = []
        self.messages, self.bytes = self.queue.messages, self.queue.bytes
        self.new_messages: deque[EnqueuedMessage] = deque()
        self.evicted_ids: dict[str, None] = {}
        self.lacks_usage = False
        self.lacking: dict[SenderGroup, int] = {}
        self._left = {group: deque(some) for group, (some, _) in self._oldest.items()}

    @property
    def is_changed(self) -> bool:
        return bool(self.new_messages or self.evicted_ids)

    def get_changed_queue(self) -> MessageQueueState:
        return self.queue._replace(messages=self.messages, bytes=self.bytes)

    def require_usage(self) -> SenderUsage:
        """:raise EvictionDataMissing: it was not loaded."""
        if self.usage is None:
            self.lacks_usage = True
            raise EvictionDataMissing
        return self.usage

    def set_usage(self, sums: Iterable[Document], senders: str | None) -> None:
        """
        Set the usage.

        :param sums: result of :func:`_build_usage_query`.
        :param senders: parties that the recipient has acknowledged, see :class:`KnownSenders`.
        """
        found = [(join_origin(one["_id"]), one["messages"], one["bytes"]) for one in sums]
        self.usage = SenderUsage(self._limits, KnownSenders(senders).known, found)

    def build_oldest_query(self, group: SenderGroup) -> MongoCommand:
        known = frozenset[int]() if self.usage is None else self.usage.known
        filter = {"recipient": self.queue.recipient_id, **_build_group_filter(group, known)}
        return MESSAGES.find(filter, sort={"seq": 1}, limit=self.lacking[group], projection=EVICTION_PROJECTION)

    def set_oldest(self, group: SenderGroup, found: Sequence[Document]) -> None:
        """:param found: result of :meth:`build_oldest_query`."""
        self._oldest[group] = found, self.lacking[group]

    def append(self, messages: Sequence[EnqueuedMessage], origin: int) -> list[RemovedMessage]:
        """
        Append messages of a request, and evict others until these fit or none is left to evict.

        :raise EvictionDataMissing: more has to be loaded.
        """
        evicted: list[RemovedMessage] = []
        coming = sum_volume(messages)
        while reason := find_exceeded_limit(self._limits, self.messages + coming.messages, self.bytes + coming.size):
            if needs_sender_usage(self._limits, origin):
                usage = self.require_usage()
            else:
                usage = SenderUsage(self._limits, frozenset())
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
        some, wanted = self._oldest.get(group, ((), 0))
        if len(some) >= wanted:
            self.lacking[group] = wanted * _CANDIDATE_GROWTH or self.coming + _SPARE_CANDIDATES
            raise EvictionDataMissing
        return None

    def _find_new_message(self, group: SenderGroup) -> EnqueuedMessage | None:
        known = frozenset[int]() if self.usage is None else self.usage.known
        return next((one for one in self.new_messages if is_from_group(group, one.request.origin, known)), None)

    def _count(self, messages: int, size: int, origin: int) -> None:
        self.messages += messages
        self.bytes += size
        if self.usage is not None:
            self.usage.change(origin, messages, size)
            self._usage_changes.append((origin, messages, size))


# Number of the last change, messages and bytes.
_QueueVersion = tuple[int, int, int]


class QueueUsageCache:
    """
    Cache of the usage of queues, so that it is not counted for every message.

    Every change of a queue, by any node, has a number; usage is valid only for the latest one.
    """

    def __init__(self, capacity: int = _USAGE_CACHE_SIZE) -> None:
        self._capacity = capacity
        self._usage_entries = 0
        self._entries: OrderedDict[ObjectId, tuple[_QueueVersion, SenderUsage]] = OrderedDict()

    def take(self, queue: MessageQueueState) -> SenderUsage | None:
        """Remove and return the usage of a queue, which a plan is going to change, perhaps in vain."""
        version, usage = self._entries.pop(queue.recipient_id, (None, None))
        self._usage_entries -= 0 if usage is None else len(usage)
        return usage if version == (queue.changes, queue.messages, queue.bytes) else None

    def keep(self, plans: Iterable[EvictionPlan]) -> None:
        """Keep the usage after plans that are durable."""
        for plan in plans:
            self.take(plan.queue)
            if plan.usage is not None:
                version = plan.queue.changes + plan.is_changed, plan.messages, plan.bytes
                self._entries[plan.queue.recipient_id] = version, plan.usage
                self._usage_entries += len(plan.usage)
        while self._usage_entries > self._capacity:
            _, (_, oldest) = self._entries.popitem(last=False)
            self._usage_entries -= len(oldest)


async def _load_missing(transaction: Transaction, plans: Iterable[EvictionPlan]) -> None:
    """Load what plans lack, in one round trip."""
    lacking = [plan for plan in plans if plan.lacks_usage or plan.lacking]
    queries: list[MongoCommand] = []
    for plan in lacking:
        queries += [plan.build_oldest_query(group) for group in plan.lacking]
        if plan.lacks_usage:
            wanted = {"_id": plan.queue.recipient_id}
            queries += [_build_usage_query(plan.queue), RECIPIENTS.find(wanted, projection={"senders": 1})]
    found = iter(await transaction.query_many(*queries))
    for plan in lacking:
        for group in plan.lacking:
            plan.set_oldest(group, next(found))
        if plan.lacks_usage:
            sums, (recipient,) = next(found), next(found)
            plan.set_usage(sums, recipient.get("senders"))


def _build_usage_query(queue: MessageQueueState) -> MongoCommand:
    origin = {"network": "$network", "sender": "$sender"}
    sums = {"_id": origin, "messages": {"$sum": 1}, "bytes": {"$sum": "$size"}}
    return MESSAGES.aggregate([{"$match": {"recipient": queue.recipient_id}}, {"$group": sums}])


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
    recent: RecentMessages
    finder: MessageQueueFinder = field(default_factory=MessageQueueFinder)
    usage_cache: QueueUsageCache = field(default_factory=QueueUsageCache)

    async def __call__(
        self, run: Operation, works: Sequence[EnqueueWork], tries: int | None
    ) -> Sequence[EnqueueOutcome]:
        requests = [request for work in works for request in work.requests]
        dids = {request.recipient_did for request in requests}
        remembered = self.finder.recall(dids)
        answers: list[EnqueueOutcome] = []
        plans: dict[str, EvictionPlan] = {}

        async def enqueue(transaction: Transaction) -> None:
            nonlocal plans, remembered
            if remembered is not None:
                plans = self._make_plans(remembered, {})
                if self._have_room(plans, requests):
                    enqueue_pass = _EnqueuePass(self.limits, plans)
                    answers[:] = [enqueue_pass.enqueue(work) for work in works]
                    if await enqueue_pass.write_if_unchanged(transaction):
                        return
                    remembered = None
                    self.finder.forget(dids)
                    raise RepeatTransaction
            plans = await self._read_plans(transaction, requests, dids)
            answers[:] = await self._enqueue(transaction, works, plans)

        async def undo(transaction: Transaction) -> UndoCallback | None:
            own = {payload.id for request in requests for payload in request.payloads}
            await withdraw_messages(transaction, list(own))
            results = [one for one in answers if not isinstance(one, MediatorError)]
            evicted = [gone for some in results for one in some for gone in one.evicted if gone.id not in own]
            return await self.reporter.find_missing(transaction, MESSAGES, evicted)

        await run.transact(enqueue, undo, tries=tries)
        self.usage_cache.keep(plans.values())
        self.finder.remember({did: plan.get_changed_queue() for did, plan in plans.items()})
        for plan in set(plans.values()):
            for one in plan.new_messages:
                self.recent.add(one.payload.id, len(one.payload.data), one.now, one.request.origin, plan.queue)
        return answers

    def is_possible(self, requests: Sequence[EnqueueRequest]) -> bool:
        """Whether every message that fits in a queue fits in a document."""
        sizes = [len(payload.data) for request in requests for payload in request.payloads]
        return not any(MAX_DOCUMENT_BYTES - _DOCUMENT_OVERHEAD < size <= self.limits.max_bytes for size in sizes)

    def _have_room(self, plans: Mapping[str, EvictionPlan], requests: Iterable[EnqueueRequest]) -> bool:
        """Whether there are messages for each queue, and all fit whoever sends them, as far as is known."""
        volumes = {plan: MessageVolume() for plan in plans.values()}
        for request in requests:
            size = sum([len(payload.data) for payload in request.payloads])
            volumes[plans[request.recipient_did]].add(len(request.payloads), size)
        room = get_common_room(self.limits)
        return all(
            volume.messages
            and plan.messages + volume.messages <= room.messages
            and plan.bytes + volume.size <= room.size
            for plan, volume in volumes.items()
        )

    async def _read_plans(
        self, transaction: Transaction, requests: Iterable[EnqueueRequest], dids: Collection[str]
    ) -> dict[str, EvictionPlan]:
        found = await self.finder.find(transaction, dids)
        plans = self._make_plans(found, {one.recipient_id: self.usage_cache.take(one) for one in found.values()})
        for request in requests:
            if request.recipient_did in plans:
                plans[request.recipient_did].coming += len(request.payloads)
        return plans

    def _make_plans(
        self, queues: Mapping[str, MessageQueueState], usages: Mapping[ObjectId, SenderUsage | None]
    ) -> dict[str, EvictionPlan]:
        """Make a plan for each queue, the same one for all forms of a DID."""
        plans: dict[ObjectId, EvictionPlan] = {}
        for one in queues.values():
            if one.recipient_id not in plans:
                plans[one.recipient_id] = EvictionPlan(one, self.limits, usages.get(one.recipient_id))
        return {did: plans[one.recipient_id] for did, one in queues.items()}

    async def _enqueue(
        self, transaction: Transaction, works: Sequence[EnqueueWork], plans: Mapping[str, EvictionPlan]
    ) -> list[EnqueueOutcome]:
        while True:
            enqueue_pass = _EnqueuePass(self.limits, plans)
            answers: list[EnqueueOutcome] = []
            for work in works:
                with suppress(EvictionDataMissing):
                    answers.append(enqueue_pass.enqueue(work))
            if len(answers) == len(works):
                transaction.write_at_end(enqueue_pass.build_writes(transaction.slot))
                return answers
            await _load_missing(transaction, enqueue_pass.plans)


class _EnqueuePass:
    """
    Queues the messages of several works in memory.

    :param plans_by_did: the same one for all forms of a DID.
    """

    def __init__(self, limits: QueueLimits, plans_by_did: Mapping[str, EvictionPlan]) -> None:
        self._limits = limits
        self._plans_by_did = plans_by_did
        self._new_messages: list[EnqueuedMessage] = []
        self._accepted = self._evicted = 0
        self.plans = list(dict.fromkeys(plans_by_did.values()))
        for plan in self.plans:
            plan.restart()

    def enqueue(self, work: EnqueueWork) -> EnqueueOutcome:
        """
        Queue the messages of all requests; return the error if one of them is rejected.

        :raise EvictionDataMissing: more has to be loaded; the pass is in vain.
        """
        if any(request.recipient_did not in self._plans_by_did for request in work.requests):
            return UnknownRecipient()
        if self._limits.when_full == "refuse":
            try:
                self._refuse_excess(work.requests)
            except QueueFull as error:
                return error.with_traceback(None)
        return [self._append(request, work.now) for request in work.requests]

    async def write_if_unchanged(self, transaction: Transaction) -> bool:
        """
        Write, although the queues were not read, on the condition that all are still registered, by accounts with the
        same DIDs, and have room; return whether that holds. If not, the transaction must not be committed.
        """
        writes = self.build_writes(transaction.slot, get_common_room(self._limits))
        updated, *_ = await transaction.write(writes)
        return bool(updated["n"] == len(self.plans))

    def build_writes(self, slot: SessionSlot, room: MessageVolume | None = None) -> list[MongoCommand]:
        """
        Build the writes, that of the counters first.

        :param room: volume that no queue may exceed; None if that was checked.
        """
        changed = [plan for plan in self.plans if plan.is_changed]
        evicted = [id for plan in changed for id in plan.evicted_ids]
        return [
            *RECIPIENTS.update_each([_build_counter_update(plan, room) for plan in changed]),
            *MESSAGES.insert([_build_document(one) for one in self._new_messages if one.kept]),
            *(MESSAGES.delete({"_id": {"$in": evicted}}) if evicted else ()),
            *build_ledger_entries(slot, "didcomm", accepted=self._accepted, evicted=self._evicted),
        ]

    def _refuse_excess(self, requests: Iterable[EnqueueRequest]) -> None:
        """:raise QueueFull: the messages of the requests would exceed a limit."""
        wholes: dict[EvictionPlan, MessageVolume] = {}
        counted: list[tuple[SenderUsage, int, MessageVolume]] = []
        try:
            for request in requests:
                plan = self._plans_by_did[request.recipient_did]
                size = sum([len(payload.data) for payload in request.payloads])
                coming = MessageVolume(len(request.payloads), size)
                whole = wholes.setdefault(plan, MessageVolume(plan.messages, plan.bytes))
                whole.add(coming.messages, coming.size)
                if find_exceeded_limit(self._limits, whole.messages, whole.size) is not None:
                    raise QueueFull()
                if may_exceed_share(self._limits, request.origin, whole):
                    plan.require_usage().check(request.origin, coming)
                if plan.usage is not None:
                    plan.usage.change(request.origin, coming.messages, coming.size)
                    counted.append((plan.usage, request.origin, coming))
        finally:
            # They are counted again when they are appended.
            for usage, origin, coming in reversed(counted):
                usage.change(origin, -coming.messages, -coming.size)

    def _append(self, request: EnqueueRequest, now: float) -> EnqueueResult:
        plan = self._plans_by_did[request.recipient_did]
        messages = [EnqueuedMessage(request, payload, now, plan.queue) for payload in request.payloads]
        too_large = [one for one in messages if len(one.payload.data) > self._limits.max_bytes]
        fitting = [one for one in messages if len(one.payload.data) <= self._limits.max_bytes]
        evicted = plan.append(fitting, request.origin)
        evicted += [one.removed("fifo_bytes") for one in too_large]
        self._new_messages += fitting
        self._accepted += len(messages)
        self._evicted += len(evicted)
        return EnqueueResult(tuple([_build_stored_message(one) for one in messages]), tuple(evicted))


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
        recipient_did=message.queue.did,
        account=message.queue.account,
        payload=payload.data,
        form=payload.form,
        received_at=message.now,
        expires_at=request.expires_at,
        due_at=request.due_at,
    )


def _build_counter_update(plan: EvictionPlan, room: MessageVolume | None) -> Document:
    messages, size = plan.messages - plan.queue.messages, plan.bytes - plan.queue.bytes
    change: Document = {"$inc": {"messages": messages, "bytes": size, "changes": 1}}
    if room is not None or not plan.queue.messages:
        change["$set"] = {"waited_for": True}
    wanted: Document = {"_id": plan.queue.recipient_id}
    if room is not None:
        most = {"messages": {"$lte": room.messages - messages}, "bytes": {"$lte": room.size - size}}
        wanted |= {"registered": PRESENT, "moves": plan.queue.moves or ABSENT, **most}
    return {"q": wanted, "u": change}
