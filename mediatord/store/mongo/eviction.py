"""Eviction of queued messages to make room for new ones, by fair share of the senders."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from bson import ObjectId

from mediatord.store.fair_share import (
    KnownSenders,
    MessageVolume,
    SenderGroup,
    SenderUsage,
    find_exceeded_limit,
    is_from_group,
    may_exceed_share,
    needs_sender_usage,
)
from mediatord.store.interfaces.messages import Payload, QueueLimits, RemovalReason, RemovedMessage
from mediatord.store.mongo.driver.commands import Document, MongoCommand, build_aggregate, build_find
from mediatord.store.mongo.driver.transactions import Transaction
from mediatord.store.mongo.message_queues import (
    EVICTION_PROJECTION,
    MessageQueueState,
    MongoEnqueueRequest,
    build_group_filter,
    build_removed,
    join_origin,
)
from mediatord.store.mongo.schema import MESSAGES, RECIPIENTS

# Origins in the cached usage of all queues.
_USAGE_CACHE_SIZE = 100_000
# Messages to load first when a queue has too many bytes, and the factor by which to load more.
_INITIAL_CANDIDATES = 16
_CANDIDATE_GROWTH = 8


@dataclass(frozen=True, slots=True)
class QueueUsage:
    """
    Shares of the senders in a queue.

    :param amounts: by origin.
    :param known_parties: those whose messages the recipient has acknowledged before.
    """

    amounts: dict[int, MessageVolume]
    known_parties: frozenset[int] = frozenset()

    def build_sender_usage(self, limits: QueueLimits) -> SenderUsage:
        amounts = [(origin, one.messages, one.size) for origin, one in self.amounts.items()]
        return SenderUsage(limits, self.known_parties, amounts)


class EvictionDataMissing(Exception):
    """More messages of a queue have to be loaded."""

    def __init__(self, did: str, group: SenderGroup) -> None:
        super().__init__()
        self.did = did
        self.group = group


# Outlines of the first messages of a group of senders, and whether there are no more.
OldestMessages = tuple[Sequence[Document], bool]


@dataclass(eq=False, slots=True)
class EnqueuedMessage:
    """A message that is being queued."""

    request: MongoEnqueueRequest
    payload: Payload
    queue: MessageQueueState
    kept: bool = True


class EvictionPlan:
    """
    A queue after some messages were appended and others evicted.

    :param oldest: what was loaded of its messages, by group of senders.
    :param usage: None if it does not matter.
    :ivar messages: their number by now; `bytes` is the sum of their payloads.
    :ivar new_messages: those of them that were appended.
    :ivar evicted_ids: ids of those that are evicted and were there before.
    :ivar usage_before: usage of the queue before, and `usage_changes` since; None if it does not matter.
    :ivar usage: usage by now; None if it does not matter.
    """

    def __init__(
        self,
        queue: MessageQueueState,
        limits: QueueLimits,
        oldest: Mapping[SenderGroup, OldestMessages],
        usage: QueueUsage | None,
    ) -> None:
        self.queue = queue
        self.messages, self.bytes = queue.messages, queue.bytes
        self.new_messages: deque[EnqueuedMessage] = deque()
        self.evicted_ids: dict[str, None] = {}
        self._limits = limits
        self._oldest = {group: (deque(some), all_known) for group, (some, all_known) in oldest.items()}
        self.usage_before = usage
        self.usage = usage.build_sender_usage(limits) if usage is not None else None
        self.usage_changes: dict[int, MessageVolume] = {}

    def append(self, request: MongoEnqueueRequest, payloads: Sequence[Payload]) -> list[EnqueuedMessage]:
        new_messages = [EnqueuedMessage(request, payload, self.queue) for payload in payloads]
        self.new_messages += new_messages
        self._count(len(payloads), sum_payload_sizes(payloads), request.origin)
        return new_messages

    def make_room(self, request: MongoEnqueueRequest, payloads: Sequence[Payload]) -> list[RemovedMessage]:
        """Evict messages until these fit or none is left to evict."""
        evicted: list[RemovedMessage] = []
        coming = MessageVolume(len(payloads), sum_payload_sizes(payloads))
        while reason := find_exceeded_limit(self._limits, self.messages + coming.messages, self.bytes + coming.size):
            usage = (
                self.usage
                if self.usage and needs_sender_usage(self._limits, request.origin)
                else SenderUsage(self._limits, frozenset())
            )
            group = usage.victim(request.origin, coming, self._find_oldest_origin)
            if group is None:
                break
            evicted.append(self._evict_oldest(group, reason))
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
        return new_message.request.removed(new_message.payload, self.queue.account, reason)

    def _find_oldest(self, group: SenderGroup) -> Document | None:
        """
        Find the oldest message of a group that was there before and is not evicted.

        :raise EvictionDataMissing: it was not loaded.
        """
        outlines, all_known = self._oldest.get(group, (deque(), False))
        while outlines and outlines[0]["_id"] in self.evicted_ids:
            outlines.popleft()
        if outlines:
            return outlines[0]
        if not all_known:
            raise EvictionDataMissing(self.queue.did, group)
        return None

    def _find_new_message(self, group: SenderGroup) -> EnqueuedMessage | None:
        known = self.usage_before.known_parties if self.usage_before is not None else frozenset[int]()
        return next((one for one in self.new_messages if is_from_group(group, one.request.origin, known)), None)

    def _count(self, messages: int, size: int, origin: int) -> None:
        self.messages += messages
        self.bytes += size
        if self.usage is not None:
            self.usage.change(origin, messages, size)
            self.usage_changes.setdefault(origin, MessageVolume()).add(messages, size)


def filter_fitting(payloads: Sequence[Payload], limits: QueueLimits) -> Sequence[Payload]:
    """Return the payloads that are not larger than a whole queue may be."""
    return [payload for payload in payloads if len(payload.data) <= limits.max_bytes]


def sum_payload_sizes(payloads: Iterable[Payload]) -> int:
    return sum([len(payload.data) for payload in payloads])


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


class _QueueDemand:
    """
    Demand of some requests for a queue.

    :ivar whole: with all messages that are queued.
    """

    def __init__(
        self, queue: MessageQueueState, requests: Sequence[MongoEnqueueRequest], limits: QueueLimits
    ) -> None:
        self.queue = queue
        self._limits = limits
        self._incoming = [(request.origin, filter_fitting(request.payloads, limits)) for request in requests]
        self.whole = MessageVolume(queue.messages, queue.bytes)
        for _, payloads in self._incoming:
            self.whole.add(len(payloads), sum_payload_sizes(payloads))

    @property
    def is_nearly_full(self) -> bool:
        """Whether a limit of the queue or of a sender may be exceeded."""
        if self._limits.when_full == "refuse":
            return any(may_exceed_share(self._limits, origin, self.whole) for origin, _ in self._incoming)
        return self.eviction_count > 0

    @property
    def eviction_count(self) -> int:
        """How many of the oldest messages to load first."""
        number = max(self.whole.messages - self._limits.max_messages, 0)
        return number + _INITIAL_CANDIDATES if self.whole.size > self._limits.max_bytes else number

    @property
    def needs_usage(self) -> bool:
        return any(needs_sender_usage(self._limits, origin) for origin, _ in self._incoming)

    def list_likely_groups(self, usage: QueueUsage) -> Iterable[SenderGroup]:
        """List the groups whose messages may be evicted."""
        senders = usage.build_sender_usage(self._limits)
        for origin in {origin for origin, _ in self._incoming if needs_sender_usage(self._limits, origin)}:
            coming = MessageVolume()
            for payloads in [some for of, some in self._incoming if of == origin]:
                coming.add(len(payloads), sum_payload_sizes(payloads))
            yield from senders.likely(origin, coming)


class EvictionLoader:
    """
    Loads from queues, in a transaction, what the eviction for some requests depends on.

    :param queues: by DID.
    """

    def __init__(
        self,
        limits: QueueLimits,
        transaction: Transaction,
        queues: Mapping[str, MessageQueueState],
        usage_cache: QueueUsageCache,
    ) -> None:
        self._limits = limits
        self._transaction = transaction
        self._queues = queues
        # Of queues that are full, or nearly.
        self._queue_demands: dict[str, _QueueDemand] = {}
        # How many of the oldest messages were loaded, by DID and group.
        self._loaded_counts: dict[tuple[str, SenderGroup], int] = {}
        self._oldest: dict[str, dict[SenderGroup, OldestMessages]] = {}
        cached = {did: usage_cache.get(queue) for did, queue in queues.items()}
        self._usage = {did: usage for did, usage in cached.items() if usage is not None}

    async def load_initial(self, requests: Iterable[MongoEnqueueRequest]) -> None:
        """Load what the requests very likely need."""
        coming: dict[str, list[MongoEnqueueRequest]] = {}
        for request in requests:
            coming.setdefault(request.recipient_did, []).append(request)
        demands = {did: _QueueDemand(queue, coming[did], self._limits) for did, queue in self._queues.items()}
        self._queue_demands = full = {did: one for did, one in demands.items() if one.is_nearly_full}
        if self._limits.when_full == "refuse":
            await self._load({}, full)
            return
        # Without reserved shares the oldest messages of all are evicted in any case.
        certain = (
            {} if self._limits.reserved else {(did, SenderGroup()): one.eviction_count for did, one in full.items()}
        )
        await self._load(certain, full)
        likely = {
            (did, group): demand.eviction_count
            for did, demand in full.items()
            if did in self._usage
            for group in demand.list_likely_groups(self._usage[did])
        }
        await self._load({key: number for key, number in likely.items() if key not in self._loaded_counts})

    async def load_more(self, missing: EvictionDataMissing) -> None:
        key = (missing.did, missing.group)
        if key in self._loaded_counts:
            await self._load({key: number * _CANDIDATE_GROWTH for key, number in self._loaded_counts.items()})
        else:
            await self._load({key: self._queue_demands[missing.did].eviction_count})

    def build_plans(self) -> dict[str, EvictionPlan]:
        """Build a plan for each queue, by DID, with what was loaded so far."""
        return {
            did: EvictionPlan(queue, self._limits, self._oldest.get(did, {}), self._usage.get(did))
            for did, queue in self._queues.items()
        }

    async def _load(self, wanted: Mapping[tuple[str, SenderGroup], int], full: Iterable[str] = ()) -> None:
        """
        Load outlines of messages, and usage.

        :param wanted: how many of the oldest messages, by DID and group.
        :param full: DIDs of queues whose usage may matter.
        """
        counted = [did for did in full if did not in self._usage and self._queue_demands[did].needs_usage]
        recipients = [self._get_recipient(did) for did in counted]
        queries = [
            *[self._build_oldest_query(did, group, number) for (did, group), number in wanted.items()],
            *[_build_usage_query(recipient) for recipient in recipients],
            *[
                build_find(RECIPIENTS, {"_id": recipient}, limit=1, projection={"senders": 1})
                for recipient in recipients
            ],
        ]
        if not queries:
            return
        found = await self._transaction.query_many(*queries)
        for ((did, group), number), some in zip(wanted.items(), found, strict=False):
            self._oldest.setdefault(did, {})[group] = (some, len(some) < number)
            self._loaded_counts[did, group] = number
        usage = found[len(wanted) :]
        for did, sums, senders in zip(counted, usage[: len(counted)], usage[len(counted) :], strict=True):
            known = [party for one in senders for party in KnownSenders(one.get("senders")).known]
            self._usage[did] = QueueUsage(_sum_amounts(sums), frozenset(known))

    def _build_oldest_query(self, did: str, group: SenderGroup, number: int) -> MongoCommand:
        usage = self._usage.get(did)
        known = usage.known_parties if usage is not None else frozenset[int]()
        filter = {"recipient": self._get_recipient(did), **build_group_filter(group, known)}
        return build_find(MESSAGES, filter, sort={"seq": 1}, limit=number, projection=EVICTION_PROJECTION)

    def _get_recipient(self, did: str) -> ObjectId:
        return self._queue_demands[did].queue.recipient_id


def _build_usage_query(recipient: ObjectId) -> MongoCommand:
    origin = {"network": "$network", "sender": "$sender"}
    sums = {"_id": origin, "messages": {"$sum": 1}, "bytes": {"$sum": "$size"}}
    return build_aggregate(MESSAGES, [{"$match": {"recipient": recipient}}, {"$group": sums}])


def _sum_amounts(sums: Iterable[Document]) -> dict[int, MessageVolume]:
    amounts: dict[int, MessageVolume] = {}
    for one in sums:
        amounts.setdefault(join_origin(one["_id"]), MessageVolume()).add(one["messages"], one["bytes"])
    return amounts
