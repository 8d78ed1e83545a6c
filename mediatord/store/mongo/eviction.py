"""Eviction of queued messages to make room for new ones, by fair share of the senders."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from bson import ObjectId

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
from mediatord.store.interfaces.messages import EnqueueRequest, Payload, QueueLimits, RemovalReason, RemovedMessage
from mediatord.store.mongo.driver.collection import Document, MongoCommand
from mediatord.store.mongo.driver.transactions import Transaction
from mediatord.store.mongo.message_queues import (
    EVICTION_PROJECTION,
    NETWORK_BITS,
    MessageQueueState,
    build_removed,
    join_origin,
)
from mediatord.store.mongo.schema import ABSENT, MESSAGES, RECIPIENTS

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
    A queue after some messages were appended and others evicted.

    :param oldest: what was loaded of its messages, by group of senders: the first ones, and how many were wanted.
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
        oldest: Mapping[SenderGroup, tuple[Sequence[Document], int]],
        usage: QueueUsage | None,
    ) -> None:
        self.queue = queue
        self.messages, self.bytes = queue.messages, queue.bytes
        self.new_messages: deque[EnqueuedMessage] = deque()
        self.evicted_ids: dict[str, None] = {}
        self._limits = limits
        self._oldest = {group: (deque(some), len(some) < wanted) for group, (some, wanted) in oldest.items()}
        self.usage_before = usage
        self.usage = None if usage is None else build_sender_usage(limits, usage)
        self.usage_changes: dict[int, MessageVolume] = {}

    def append(self, messages: Sequence[EnqueuedMessage]) -> list[RemovedMessage]:
        """Append messages of a request, and evict others until these fit or none is left to evict."""
        if not messages:
            return []
        evicted: list[RemovedMessage] = []
        coming, origin = sum_volume(messages), messages[0].request.origin
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


def build_sender_usage(limits: QueueLimits, usage: QueueUsage) -> SenderUsage:
    amounts = [(origin, one.messages, one.size) for origin, one in usage.amounts.items()]
    return SenderUsage(limits, usage.known_parties, amounts)


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


class _QueueDemand:
    """
    Demand of some requests for a queue, and what was loaded of it.

    :ivar whole: with all messages that are queued.
    :ivar oldest: its oldest messages by group of senders, and how many were wanted.
    """

    def __init__(self, queue: MessageQueueState, limits: QueueLimits, usage: QueueUsage | None) -> None:
        self.queue = queue
        self.usage = usage
        self.oldest: dict[SenderGroup, tuple[Sequence[Document], int]] = {}
        self._limits = limits
        self._coming: dict[int, MessageVolume] = {}
        self._whole = MessageVolume(queue.messages, queue.bytes)

    def add(self, request: EnqueueRequest) -> None:
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
        return self.usage is None and any(needs_sender_usage(self._limits, origin) for origin in self._coming)

    def list_likely_groups(self) -> Iterable[SenderGroup]:
        """List the groups whose messages may be evicted."""
        if self.usage is not None:
            senders = build_sender_usage(self._limits, self.usage)
            for origin, coming in self._coming.items():
                if needs_sender_usage(self._limits, origin):
                    yield from senders.likely(origin, coming)

    def build_oldest_query(self, group: SenderGroup, number: int) -> MongoCommand:
        known = self.usage.known_parties if self.usage is not None else frozenset[int]()
        filter = {"recipient": self.queue.recipient_id, **_build_group_filter(group, known)}
        return MESSAGES.find(filter, sort={"seq": 1}, limit=number, projection=EVICTION_PROJECTION)


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
        self._demands = {did: _QueueDemand(queue, limits, usage_cache.get(queue)) for did, queue in queues.items()}

    async def load_initial(self, requests: Iterable[EnqueueRequest]) -> None:
        """Load what the requests very likely need."""
        for request in requests:
            if request.recipient_did in self._demands:
                self._demands[request.recipient_did].add(request)
        full = {did: one for did, one in self._demands.items() if one.is_nearly_full}
        evicts = self._limits.when_full != "refuse"
        # Without reserved shares the oldest messages of all are evicted in any case.
        is_certain = evicts and not self._limits.reserved
        certain = {(did, SenderGroup()): one.eviction_count for did, one in full.items() if is_certain}
        await self._load(certain, [one for one in full.values() if one.lacks_usage])
        likely = {
            (did, group): one.eviction_count
            for did, one in full.items()
            if evicts
            for group in one.list_likely_groups()
            if group not in one.oldest
        }
        await self._load(likely)

    async def load_more(self, did: str, group: SenderGroup) -> None:
        if group not in self._demands[did].oldest:
            await self._load({(did, group): self._demands[did].eviction_count})
            return
        loaded = [(did, *one) for did, demand in self._demands.items() for one in demand.oldest.items()]
        await self._load({(did, group): number * _CANDIDATE_GROWTH for did, group, (_, number) in loaded})

    def build_plans(self) -> dict[str, EvictionPlan]:
        """Build a plan for each queue, by DID, with what was loaded so far."""
        return {
            did: EvictionPlan(one.queue, self._limits, one.oldest, one.usage) for did, one in self._demands.items()
        }

    async def _load(
        self, wanted: Mapping[tuple[str, SenderGroup], int], counted: Sequence[_QueueDemand] = ()
    ) -> None:
        """
        Load outlines of messages, and usage.

        :param wanted: how many of the oldest messages, by DID and group.
        :param counted: queues whose usage is loaded.
        """
        recipients = [one.queue.recipient_id for one in counted]
        found = await self._transaction.query_many(
            *[self._demands[did].build_oldest_query(group, number) for (did, group), number in wanted.items()],
            *[_build_usage_query(recipient) for recipient in recipients],
            *[RECIPIENTS.find({"_id": one}, limit=1, projection={"senders": 1}) for one in recipients],
        )
        for ((did, group), number), some in zip(wanted.items(), found, strict=False):
            self._demands[did].oldest[group] = some, number
        usage = found[len(wanted) :]
        for demand, sums, senders in zip(counted, usage[: len(counted)], usage[len(counted) :], strict=True):
            amounts: dict[int, MessageVolume] = {}
            for one in sums:
                amounts.setdefault(join_origin(one["_id"]), MessageVolume()).add(one["messages"], one["bytes"])
            known = [party for one in senders for party in KnownSenders(one.get("senders")).known]
            demand.usage = QueueUsage(amounts, frozenset(known))


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
