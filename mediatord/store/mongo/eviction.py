"""
Whose a recipient DID is, and what waits for it.

A queue while deposits are made into it: what waits there, as far as it is known, and what makes room.

Who has how much of a queue, as this process has left it, so that it is not counted for every deposit.

What has to be known of queues that are full, or nearly: as much of them as deposits depend on.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from bson import ObjectId

from mediatord.protocol.canonical_did import compute_did_digest
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
    MessageQueueIDs,
    MongoEnqueueRequest,
    build_part_filter,
    build_removed,
    join_origin,
)
from mediatord.store.mongo.schema import ACCOUNTS, MESSAGES, RECIPIENTS

_ACCOUNT_CACHE_SIZE = 16_384
_MAX_CACHED_DID_LENGTH = 2_048
# Which are long, and matter where a queue is full.
_WITHOUT_SENDERS = {"senders": 0}


@dataclass(frozen=True, slots=True)
class MessageQueueState:
    """
    What waits for a recipient.

    :param did: as it is stored, however it was asked for.
    :param account: DID of the account that has registered it.
    :param changes: how often what waits was changed; of a document that another version wrote, since then.
    """

    did: str
    place: MessageQueueIDs
    account: str
    messages: int
    bytes: int
    changes: int = 0


class MessageQueueFinder:
    """
    Finds queues with the DIDs of their accounts. Which account has a recipient is remembered, so that both can be
    asked for at once; whether that is still so is seen in the answers. A join at the server would cost it more.
    """

    def __init__(self, capacity: int = _ACCOUNT_CACHE_SIZE) -> None:
        self._capacity = capacity
        self._accounts: OrderedDict[str, ObjectId] = OrderedDict()

    async def find(self, transaction: Transaction, dids: Collection[str]) -> dict[str, MessageQueueState]:
        """Those of the DIDs that somebody has registered; all spellings of one have the same queue."""
        likely = {account for account in map(self._accounts.get, dids) if account is not None}
        digests = {did: compute_did_digest(did) for did in dids}
        registered = {"did_digest": {"$in": list(set(digests.values()))}, "registered": {"$exists": True}}
        found, owners = await transaction.ask(
            build_find(RECIPIENTS, registered, projection=_WITHOUT_SENDERS), _build_account_query(likely)
        )
        missing = {one["account"] for one in found} - {one["_id"] for one in owners}
        if missing:
            owners += await transaction.query(_build_account_query(missing))
        accounts: dict[ObjectId, str] = {one["_id"]: one["did"] for one in owners}
        self._remember(found)
        queues = {
            one["did_digest"]: MessageQueueState(
                one["did"],
                MessageQueueIDs(one["_id"], one["account"]),
                accounts[one["account"]],
                one["messages"],
                one["bytes"],
                one.get("changes", 0),
            )
            for one in found
        }
        return {did: queues[digest] for did, digest in digests.items() if digest in queues}

    def _remember(self, recipients: Iterable[Document]) -> None:
        for one in recipients:
            if len(one["did"]) <= _MAX_CACHED_DID_LENGTH:
                self._accounts[one["did"]] = one["account"]
                self._accounts.move_to_end(one["did"])
        while len(self._accounts) > self._capacity:
            self._accounts.popitem(last=False)


def _build_account_query(ids: Collection[ObjectId]) -> MongoCommand:
    return build_find(ACCOUNTS, {"_id": {"$in": list(ids)}}, projection={"did": 1})


@dataclass(frozen=True, slots=True)
class QueueUsage:
    """
    Who has how much of a queue.

    :param amounts: of each origin.
    :param known: parties whom the recipient has acknowledged before.
    """

    amounts: dict[int, MessageVolume]
    known: frozenset[int] = frozenset()


class EvictionDataMissing(Exception):
    """More of what waits has to be looked at."""

    def __init__(self, did: str, part: SenderGroup) -> None:
        super().__init__()
        self.did = did
        self.part = part


@dataclass(frozen=True, slots=True)
class EvictionCandidates:
    """
    What was seen of a queue.

    :param oldest: outlines of its first messages, by the part that they are of, and whether there are no more.
    :param held: None if it does not matter.
    """

    oldest: Mapping[SenderGroup, tuple[Sequence[Document], bool]] = field(default_factory=dict)
    held: QueueUsage | None = None


@dataclass(eq=False, slots=True)
class EnqueuedMessage:
    """A message that is being deposited."""

    order: MongoEnqueueRequest
    payload: Payload
    place: MessageQueueIDs
    kept: bool = True


class EvictionPlan:
    """
    :ivar messages: how many there are by now, `bytes` being those of their payloads.
    :ivar newcomers: those of them that were deposited.
    :ivar gone: ids of those that waited before and are out.
    :ivar held: what there was of each origin before, which is not changed here; `more` is what there is beyond that.
    :ivar usage: as it is by now; None if it does not matter.
    """

    def __init__(self, queue: MessageQueueState, known: EvictionCandidates, limits: QueueLimits) -> None:
        self.queue = queue
        self.messages, self.bytes = queue.messages, queue.bytes
        self.new_messages: deque[EnqueuedMessage] = deque()
        self.gone: dict[str, None] = {}
        self._limits = limits
        self._oldest = {part: (deque(some), all_known) for part, (some, all_known) in known.oldest.items()}
        self.held = known.held
        self.usage = build_usage(limits, known.held) if known.held is not None else None
        self.more: dict[int, MessageVolume] = {}

    def append(self, order: MongoEnqueueRequest, payloads: Sequence[Payload]) -> list[EnqueuedMessage]:
        """Let these wait."""
        new_messages = [EnqueuedMessage(order, payload, self.queue.place) for payload in payloads]
        self.new_messages += new_messages
        self._count(len(payloads), sum_payload_sizes(payloads), order.origin)
        return new_messages

    def make_room(self, order: MongoEnqueueRequest, payloads: Sequence[Payload]) -> list[RemovedMessage]:
        """Take out what is in the way of these, as long as there is anything."""
        evicted: list[RemovedMessage] = []
        coming = MessageVolume(len(payloads), sum_payload_sizes(payloads))
        while reason := find_exceeded_limit(self._limits, self.messages + coming.messages, self.bytes + coming.size):
            usage = (
                self.usage
                if self.usage and needs_sender_usage(self._limits, order.origin)
                else _build_empty_usage(self._limits)
            )
            part = usage.victim(order.origin, coming, self._origin)
            if part is None:
                break
            evicted.append(self._take(part, reason))
        return evicted

    def _origin(self, part: SenderGroup) -> int | None:
        """That of the oldest of some, if there is one."""
        document = self._outline(part)
        if document is not None:
            return join_origin(document)
        new_message = self._find_new_message(part)
        return None if new_message is None else new_message.order.origin

    def _take(self, part: SenderGroup, reason: RemovalReason) -> RemovedMessage:
        """Take out the oldest of some; there is one."""
        document = self._outline(part)
        if document is not None:
            self.gone[document["_id"]] = None
            self._count(-1, -document["size"], join_origin(document))
            return build_removed(document, self.queue.did, self.queue.account, reason)
        new_message = self._find_new_message(part)
        assert new_message is not None
        new_message.kept = False
        self.new_messages.remove(new_message)
        self._count(-1, -len(new_message.payload.data), new_message.order.origin)
        return new_message.order.removed(new_message.payload, self.queue.account, reason)

    def _outline(self, part: SenderGroup) -> Document | None:
        """
        Of the oldest that waited before and is not out.

        :raise TooFewKnown: that cannot be told.
        """
        outlines, all_known = self._oldest.get(part, (deque(), False))
        while outlines and outlines[0]["_id"] in self.gone:
            outlines.popleft()
        if outlines:
            return outlines[0]
        if not all_known:
            raise EvictionDataMissing(self.queue.did, part)
        return None

    def _find_new_message(self, part: SenderGroup) -> EnqueuedMessage | None:
        known = self.held.known if self.held is not None else frozenset[int]()
        return next((one for one in self.new_messages if is_from_group(part, one.order.origin, known)), None)

    def _count(self, messages: int, size: int, origin: int) -> None:
        self.messages += messages
        self.bytes += size
        if self.usage is not None:
            self.usage.change(origin, messages, size)
            self.more.setdefault(origin, MessageVolume()).add(messages, size)


def build_usage(limits: QueueLimits, held: QueueUsage) -> SenderUsage:
    """The same, by all that matters."""
    return SenderUsage(limits, held.known, [(origin, one.messages, one.size) for origin, one in held.amounts.items()])


def _build_empty_usage(limits: QueueLimits) -> SenderUsage:
    return SenderUsage(limits, frozenset())


def filter_fitting(payloads: Sequence[Payload], limits: QueueLimits) -> Sequence[Payload]:
    """Those that are not too large for any queue."""
    return [payload for payload in payloads if len(payload.data) <= limits.max_bytes]


def sum_payload_sizes(payloads: Iterable[Payload]) -> int:
    """Their bytes."""
    return sum([len(payload.data) for payload in payloads])


# Origins in all of them.
_USAGE_CACHE_SIZE = 100_000

# Number of the last change, messages and bytes.
_QueueVersion = tuple[int, int, int]


class QueueUsageCache:
    """
    Of the queues that were counted last. Every change of a queue, by whatever node, has a number: what is known of
    another one than the last is not used. An older version does not number its changes, but counts what there is.
    """

    def __init__(self, capacity: int = _USAGE_CACHE_SIZE) -> None:
        self._capacity = capacity
        self._origins = 0
        self._known: OrderedDict[ObjectId, tuple[_QueueVersion, QueueUsage]] = OrderedDict()

    def of(self, queue: MessageQueueState) -> QueueUsage | None:
        """Who has how much of it; None if that has to be counted."""
        state, held = self._known.get(queue.place.recipient, (None, None))
        return held if state == (queue.changes, queue.messages, queue.bytes) else None

    def remember(self, plans: Iterable[EvictionPlan]) -> None:
        """These were changed, and that is durable."""
        for plan in plans:
            recipient = plan.queue.place.recipient
            if recipient in self._known:
                self._origins -= len(self._known.pop(recipient)[1].amounts)
            if plan.held is None:
                continue
            amounts = plan.held.amounts
            for origin, more in plan.more.items():
                amount = amounts.setdefault(origin, MessageVolume())
                amount.add(more.messages, more.size)
                if not amount.messages:
                    del amounts[origin]
            self._known[recipient] = ((plan.queue.changes + 1, plan.messages, plan.bytes), plan.held)
            self._origins += len(amounts)
        while self._origins > self._capacity:
            _, (_, oldest) = self._known.popitem(last=False)
            self._origins -= len(oldest.amounts)


# Messages of a queue that are looked at first when it has too many bytes, and how many times more when those are too
# few.
_INITIAL_CANDIDATES = 16
_CANDIDATE_GROWTH = 8


class _QueueDemand:
    """
    What some deposits come to for a queue.

    :ivar whole: with all that waits.
    """

    def __init__(self, queue: MessageQueueState, orders: Sequence[MongoEnqueueRequest], limits: QueueLimits) -> None:
        self.queue = queue
        self._limits = limits
        self._incoming = [(order.origin, filter_fitting(order.payloads, limits)) for order in orders]
        self.whole = MessageVolume(queue.messages, queue.bytes)
        for _, payloads in self._incoming:
            self.whole.add(len(payloads), sum_payload_sizes(payloads))

    @property
    def is_nearly_full(self) -> bool:
        """Whether there may be too much in it, of all or of a party."""
        if self._limits.when_full == "refuse":
            return any(may_exceed_share(self._limits, origin, self.whole) for origin, _ in self._incoming)
        return self.eviction_count > 0

    @property
    def eviction_count(self) -> int:
        """How many of the oldest to look at first."""
        number = max(self.whole.messages - self._limits.max_messages, 0)
        return number + _INITIAL_CANDIDATES if self.whole.size > self._limits.max_bytes else number

    @property
    def is_counted(self) -> bool:
        """Whether it matters who has how much."""
        return any(needs_sender_usage(self._limits, origin) for origin, _ in self._incoming)

    def likely(self, held: QueueUsage) -> Iterable[SenderGroup]:
        """What of it may have to make room."""
        usage = build_usage(self._limits, held)
        for origin in {origin for origin, _ in self._incoming if needs_sender_usage(self._limits, origin)}:
            coming = MessageVolume()
            for payloads in [some for of, some in self._incoming if of == origin]:
                coming.add(len(payloads), sum_payload_sizes(payloads))
            yield from usage.likely(origin, coming)


class EvictionLoader:
    """
    Looks at queues, in a transaction, before some deposits into them.

    :param queues: by DID.
    :param holdings: what is known of them already.
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
        # Of those that are full, or nearly.
        self._queue_demands: dict[str, _QueueDemand] = {}
        # How many of the oldest were looked at, by DID and part.
        self._loaded_counts: dict[tuple[str, SenderGroup], int] = {}
        self._oldest: dict[str, dict[SenderGroup, tuple[Sequence[Document], bool]]] = {}
        remembered = {did: usage_cache.of(queue) for did, queue in queues.items()}
        self._held = {did: held for did, held in remembered.items() if held is not None}

    async def begin(self, orders: Iterable[MongoEnqueueRequest]) -> None:
        """Look at what these will very likely depend on."""
        coming: dict[str, list[MongoEnqueueRequest]] = {}
        for order in orders:
            coming.setdefault(order.recipient_did, []).append(order)
        demands = {did: _QueueDemand(queue, coming[did], self._limits) for did, queue in self._queues.items()}
        self._queue_demands = {did: one for did, one in demands.items() if one.is_nearly_full}
        if self._limits.when_full == "refuse":
            await self._look({}, self._queue_demands)
            return
        anyway = (
            {}
            if self._limits.reserved
            else {(did, SenderGroup()): one.eviction_count for did, one in self._queue_demands.items()}
        )
        await self._look(anyway, self._queue_demands)
        likely = {(did, part): self._queue_demands[did].eviction_count for did, part in self._likely()}
        await self._look({key: number for key, number in likely.items() if key not in self._loaded_counts})

    async def more(self, missing: EvictionDataMissing) -> None:
        """Look at more, since this was not known."""
        key = (missing.did, missing.part)
        if key in self._loaded_counts:
            await self._look({key: number * _CANDIDATE_GROWTH for key, number in self._loaded_counts.items()})
        else:
            await self._look({key: self._queue_demands[missing.did].eviction_count})

    def known(self, did: str) -> EvictionCandidates:
        """What is known by now."""
        return EvictionCandidates(self._oldest.get(did, {}), self._held.get(did))

    def _likely(self) -> Iterable[tuple[str, SenderGroup]]:
        """What may have to make room."""
        for did, demand in self._queue_demands.items():
            held = self._held.get(did)
            if held is not None:
                for part in demand.likely(held):
                    yield did, part

    async def _look(self, wanted: Mapping[tuple[str, SenderGroup], int], full: Iterable[str] = ()) -> None:
        """
        :param wanted: how many of the oldest, by DID and part.
        :param full: DIDs of queues in which it may matter who has how much.
        """
        shared = [did for did in full if did not in self._held and self._queue_demands[did].is_counted]
        recipients = [self._recipient(did) for did in shared]
        questions = [
            *[self._build_oldest_query(did, part, number) for (did, part), number in wanted.items()],
            *[_build_usage_query(recipient) for recipient in recipients],
            *[_build_senders_query(recipient) for recipient in recipients],
        ]
        if not questions:
            return
        found = await self._transaction.ask(*questions)
        for ((did, part), number), some in zip(wanted.items(), found, strict=False):
            self._oldest.setdefault(did, {})[part] = (some, len(some) < number)
            self._loaded_counts[did, part] = number
        counted = found[len(wanted) :]
        for did, sums, senders in zip(shared, counted[: len(shared)], counted[len(shared) :], strict=True):
            self._held[did] = QueueUsage(_sum_amounts(sums), _parse_known_senders(senders))

    def _build_oldest_query(self, did: str, part: SenderGroup, number: int) -> MongoCommand:
        held = self._held.get(did)
        known = held.known if held is not None else frozenset[int]()
        filter = {"recipient": self._recipient(did), **build_part_filter(part, known)}
        return build_find(MESSAGES, filter, sort={"seq": 1}, limit=number, projection=EVICTION_PROJECTION)

    def _recipient(self, did: str) -> ObjectId:
        return self._queue_demands[did].queue.place.recipient


def _build_usage_query(recipient: ObjectId) -> MongoCommand:
    """For what there is of each origin."""
    origin = {"network": "$network", "sender": "$sender"}
    sums = {"_id": origin, "messages": {"$sum": 1}, "bytes": {"$sum": "$size"}}
    return build_aggregate(MESSAGES, [{"$match": {"recipient": recipient}}, {"$group": sums}])


def _build_senders_query(recipient: ObjectId) -> MongoCommand:
    return build_find(RECIPIENTS, {"_id": recipient}, limit=1, projection={"senders": 1})


def _parse_known_senders(recipients: Iterable[Document]) -> frozenset[int]:
    return frozenset([party for one in recipients for party in KnownSenders(one.get("senders")).known])


def _sum_amounts(sums: Iterable[Document]) -> dict[int, MessageVolume]:
    amounts: dict[int, MessageVolume] = {}
    for one in sums:
        amounts.setdefault(join_origin(one["_id"]), MessageVolume()).add(one["messages"], one["bytes"])
    return amounts
