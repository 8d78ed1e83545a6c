"""Message queues of the memory store: messages by id, expiry and due time, ranking of queues, and eviction."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from heapq import heapify, heappop, heappush
from itertools import accumulate, count, islice
from typing import Generic, TypeVar

from mediatord.errors import QueueFull, StoreUnavailable
from mediatord.store.fair_share import (
    KnownSenders,
    MessageVolume,
    SenderGroup,
    SenderUsage,
    find_exceeded_limit,
    get_party,
    is_from_group,
    needs_sender_usage,
)
from mediatord.store.interfaces.decentrl import MAX_PAGE_BYTES
from mediatord.store.interfaces.messages import (
    AgeBucket,
    ArrivalWindow,
    EnqueueRequest,
    EnqueueResult,
    MessageArrival,
    MessageLedger,
    Payload,
    QueueLimits,
    QueueStatus,
    QueueTotals,
    RemovalReason,
    RemovedMessage,
    StoredMessage,
)
from mediatord.store.message_operations import (
    LEDGER_ENTRY_BY_REASON,
    LedgerEntry,
    complete_buckets,
    find_earliest,
    group_by_age,
)

K = TypeVar("K", int, bytes)


class DeadlineHeap(Generic[K]):
    """
    Keys with a time each; the earliest is found in logarithmic time.

    The heap entry of a key that was removed stays until it is the first, or until such entries outnumber the others;
    so memory stays proportional to the number of keys.
    """

    def __init__(self) -> None:
        self._times: dict[K, float] = {}
        self._heap: list[tuple[float, K]] = []

    def add(self, key: K, at: float) -> None:
        """Set or change the time of a key."""
        self._times[key] = at
        heappush(self._heap, (at, key))
        self._compact()

    def discard(self, key: K) -> None:
        """Remove a key, if it is there."""
        self._times.pop(key, None)
        self._compact()

    def earliest(self) -> tuple[float, K] | None:
        """The earliest time with its key; of equal times the smaller key."""
        while self._heap:
            at, key = self._heap[0]
            if self._times.get(key) == at:
                return at, key
            heappop(self._heap)
        return None

    def take(self, now: float) -> K | None:
        """Remove and return the key with the earliest time, unless that is after `now`."""
        first = self.earliest()
        if first is None or first[0] > now:
            return None
        heappop(self._heap)
        del self._times[first[1]]
        return first[1]

    def _compact(self) -> None:
        if len(self._heap) > 2 * len(self._times) + 64:
            self._heap = [(at, key) for key, at in self._times.items()]
            heapify(self._heap)


class QueueRanking:
    """
    Number of messages by DID, and DIDs by that number.

    No cost grows with the number of DIDs: there are no more different numbers than a queue may have messages.
    """

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._dids: dict[int, dict[str, None]] = {}
        self._total = 0

    def change(self, did: str, difference: int) -> None:
        """Add messages to the number of a DID, or subtract them."""
        before = self._counts.pop(did, 0)
        if before:
            peers = self._dids[before]
            del peers[did]
            if not peers:
                del self._dids[before]
        after = before + difference
        if after:
            self._counts[did] = after
            self._dids.setdefault(after, {})[did] = None
        self._total += difference

    def top(self, number: int) -> tuple[list[tuple[str, int]], int]:
        """The DIDs with most messages, most first, and the sum of all others."""
        largest = list(islice(self._descending(), number))
        return largest, self._total - sum(number for _, number in largest)

    def _descending(self) -> Iterator[tuple[str, int]]:
        for held in sorted(self._dids, reverse=True):
            for did in self._dids[held]:
                yield did, held


@dataclass(eq=False, slots=True)
class QueueEntry:
    """
    One message with its place in the order of arrival.

    :param node: boot of the node that delivered it; None while it is pending.
    :param shown: whether it is visible: neither expired nor delayed.
    :param arrived_at: time of arrival, or of `take_due_messages` if it was delayed; None before that.
    :param origin: as for :class:`~mediatord.store.interfaces.messages.QueueLimits`.
    """

    seq: int
    queue: RecipientQueue
    payload: Payload
    received_at: float
    expires_at: float
    due_at: float | None
    node: str | None = None
    pushes: int = 0
    shown: bool = False
    arrived_at: float | None = None
    origin: int = 0

    @property
    def size(self) -> int:
        return len(self.payload.data)

    def entry_lists(self) -> tuple[EntryList, EntryList]:
        """The lists that count it."""
        return self.queue.entry_list, self.queue.mailbox.entry_list

    def message(self) -> StoredMessage:
        return StoredMessage(
            id=self.payload.id,
            recipient_did=self.queue.did,
            account=self.queue.mailbox.did,
            payload=self.payload.data,
            form=self.payload.form,
            received_at=self.received_at,
            expires_at=self.expires_at,
            status="pending" if self.node is None else "delivered",
            due_at=self.due_at,
        )

    def removed(self, reason: RemovalReason | None) -> RemovedMessage:
        return RemovedMessage(
            id=self.payload.id,
            recipient_did=self.queue.did,
            account=self.queue.mailbox.did,
            size=self.size,
            received_at=self.received_at,
            pushes=self.pushes,
            reason=reason,
        )


@dataclass(eq=False, slots=True)
class EntryList:
    """
    Messages in order of arrival, with counters.

    :param size: bytes of all, visible or not.
    """

    entries: OrderedDict[int, QueueEntry] = field(default_factory=OrderedDict)
    size: int = 0
    shown: int = 0
    shown_size: int = 0

    def add(self, entry: QueueEntry) -> None:
        self.entries[entry.seq] = entry
        self.size += entry.size

    def remove(self, entry: QueueEntry) -> None:
        del self.entries[entry.seq]
        self.size -= entry.size

    def show(self, entry: QueueEntry, difference: int) -> None:
        self.shown += difference
        self.shown_size += difference * entry.size

    def status(self) -> QueueStatus:
        if not self.shown:
            return QueueStatus(0, 0)
        oldest = next(entry for entry in self.entries.values() if entry.shown)
        newest = next(entry for entry in reversed(self.entries.values()) if entry.shown)
        return QueueStatus(self.shown, self.shown_size, oldest.received_at, newest.received_at)


@dataclass(eq=False, slots=True)
class AccountMailbox:
    """
    All messages of one account: by recipient DID, together, and by digest.

    :param registered: the recipient DIDs of the account.
    :param senders: known senders, by recipient DID that is registered or has messages.
    """

    did: str
    queues: dict[str, RecipientQueue] = field(default_factory=dict)
    entry_list: EntryList = field(default_factory=EntryList)
    digests: dict[str, dict[int, None]] = field(default_factory=dict)
    registered: set[str] = field(default_factory=set)
    senders: dict[str, KnownSenders] = field(default_factory=dict)

    def queue(self, recipient_did: str) -> RecipientQueue:
        return self.queues.setdefault(recipient_did, RecipientQueue(self, recipient_did))

    def tidy(self, recipient_did: str) -> None:
        """Remove the known senders of a DID that is not registered and has no messages."""
        queue = self.queues.get(recipient_did)
        if recipient_did not in self.registered and (queue is None or not queue.entry_list.entries):
            self.senders.pop(recipient_did, None)


@dataclass(eq=False, slots=True)
class RecipientQueue:
    """The queue of one recipient DID of one account."""

    mailbox: AccountMailbox
    did: str
    entry_list: EntryList = field(default_factory=EntryList)

    def add(self, entry: QueueEntry) -> None:
        """Append a message."""
        for entry_list in entry.entry_lists():
            entry_list.add(entry)

    def remove(self, entry: QueueEntry) -> None:
        """Remove a message."""
        for entry_list in entry.entry_lists():
            entry_list.remove(entry)
            if entry.shown:
                entry_list.show(entry, -1)


class NonEmptyQueues:
    """Queues with messages, by DID: one that has changed hands may have several."""

    def __init__(self) -> None:
        self._queues: dict[str, dict[RecipientQueue, None]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, queue: RecipientQueue) -> None:
        """Add a queue."""
        of_did = self._queues.setdefault(queue.did, {})
        self._count += queue not in of_did
        of_did[queue] = None

    def discard(self, queue: RecipientQueue) -> None:
        """Remove a queue that is empty."""
        of_did = self._queues[queue.did]
        del of_did[queue]
        self._count -= 1
        if not of_did:
            del self._queues[queue.did]

    def of(self, did: str) -> list[RecipientQueue]:
        """Queues of a DID."""
        return list(self._queues.get(did, ()))

    def all(self) -> list[RecipientQueue]:
        """All queues."""
        return [queue for of_did in self._queues.values() for queue in of_did]


class QueueCapacity:
    """Limits of queues, and the choice of the messages to be evicted."""

    def __init__(self, limits: QueueLimits) -> None:
        self._limits = limits

    def fits(self, payload: Payload) -> bool:
        """Whether a size is within the limit of a queue."""
        return len(payload.data) <= self._limits.max_bytes

    def check(self, deposits: Iterable[tuple[RecipientQueue, EnqueueRequest]]) -> None:
        """
        Check enqueues in order.

        :raise QueueFull: one of them is to be refused.
        """
        if self._limits.when_full != "refuse":
            return
        coming: dict[RecipientQueue, tuple[MessageVolume, SenderUsage]] = {}
        for queue, one in deposits:
            if queue not in coming:
                coming[queue] = (
                    MessageVolume(len(queue.entry_list.entries), queue.entry_list.size),
                    self._usage(queue),
                )
            whole, usage = coming[queue]
            amount = MessageVolume(len(one.payloads), sum(len(payload.data) for payload in one.payloads))
            whole.add(amount.messages, amount.size)
            if find_exceeded_limit(self._limits, whole.messages, whole.size) is not None:
                raise QueueFull()
            usage.check(one.origin, amount)
            usage.change(one.origin, amount.messages, amount.size)

    def victims(
        self, queue: RecipientQueue, origin: int, messages: int, size: int
    ) -> Iterator[tuple[QueueEntry, RemovalReason]]:
        """Messages to be evicted so that an enqueue fits; each has to be removed before the next is requested."""
        coming = MessageVolume(messages, size)
        usage: SenderUsage | None = None
        while reason := find_exceeded_limit(
            self._limits, messages + len(queue.entry_list.entries), size + queue.entry_list.size
        ):
            if usage is None:
                usage = (
                    self._usage(queue)
                    if needs_sender_usage(self._limits, origin)
                    else SenderUsage(self._limits, frozenset())
                )
            known = usage.known

            def oldest(part: SenderGroup, known: frozenset[int] = known) -> int | None:
                return next(
                    (
                        one.origin
                        for one in queue.entry_list.entries.values()
                        if is_from_group(part, one.origin, known)
                    ),
                    None,
                )

            part = usage.victim(origin, coming, oldest)
            if part is None:
                return
            victim = next(one for one in queue.entry_list.entries.values() if is_from_group(part, one.origin, known))
            if len(usage):
                usage.change(victim.origin, -1, -victim.size)
            yield victim, reason

    def _usage(self, queue: RecipientQueue) -> SenderUsage:
        senders = queue.mailbox.senders.get(queue.did)
        found = ((one.origin, 1, one.size) for one in queue.entry_list.entries.values())
        return SenderUsage(self._limits, senders.known if senders else frozenset(), found)


# Messages, and events, that are counted by age: that runs in the reactor's thread.
LOOKED_AT = 20_000


class MemoryMessages:
    """All messages, by id, by expiry and by due time."""

    def __init__(self, limits: QueueLimits) -> None:
        self._limits = limits
        self._room = QueueCapacity(limits)
        self._places = count(1)
        self._entries: dict[int, QueueEntry] = {}
        self._seqs: dict[str, int] = {}
        self._expiry: DeadlineHeap[int] = DeadlineHeap()
        self._due: DeadlineHeap[int] = DeadlineHeap()
        self._visibility_changes: DeadlineHeap[int] = DeadlineHeap()  # when an entry is next shown or hidden
        self._delivered: dict[str, dict[int, None]] = {}
        self._occupied = NonEmptyQueues()
        self._size = 0
        self._ledger: Counter[str] = Counter()
        self.ranking = QueueRanking()

    def update_visibility(self, now: float) -> None:
        """Show messages that have become due and hide those that have expired; called before every operation."""
        while (seq := self._visibility_changes.take(now)) is not None:
            self._update_visibility(self._entries[seq], now)

    def check(self, deposits: Sequence[tuple[RecipientQueue, EnqueueRequest]]) -> None:
        """
        Check enqueues in order.

        :raise QueueFull: one of them is to be refused.
        :raise StoreUnavailable: the id of a message that would be kept exists, or is used twice.
        """
        self._room.check(deposits)
        fitting = [payload for _, one in deposits for payload in one.payloads if self._room.fits(payload)]
        ids = {payload.id for payload in fitting}
        if len(ids) < len(fitting) or ids & self._seqs.keys():
            raise StoreUnavailable()

    def enqueue(self, queue: RecipientQueue, one: EnqueueRequest, now: float) -> EnqueueResult:
        """Append to a queue and evict messages; payloads that are too large are evicted at once."""
        incoming = [
            QueueEntry(0, queue, payload, now, one.expires_at, one.due_at, origin=one.origin)
            for payload in one.payloads
        ]
        newcomers = [entry for entry in incoming if self._room.fits(entry.payload)]
        oversize = [entry.removed("fifo_bytes") for entry in incoming if not self._room.fits(entry.payload)]
        size = sum(entry.size for entry in newcomers)
        victims = self._room.victims(queue, one.origin, len(newcomers), size)
        evicted = [self._remove(entry, reason) for entry, reason in victims]
        for entry in newcomers:
            self._add(entry)
        self._ledger["accepted"] += len(incoming)
        self._ledger["evicted"] += len(oversize)
        return EnqueueResult(tuple(entry.message() for entry in incoming), (*evicted, *oversize))

    def ledger(self) -> MessageLedger:
        """Ledger of the messages."""
        return MessageLedger(**self._ledger, waiting=len(self._entries))

    def queues(self) -> list[RecipientQueue]:
        """Queues with messages."""
        return self._occupied.all()

    def queues_of(self, did: str) -> list[RecipientQueue]:
        """Queues of a DID with messages."""
        return self._occupied.of(did)

    def purge(self, ids: Iterable[str]) -> list[RemovedMessage]:
        """Remove messages by id for the operator."""
        return [self._remove(entry, None, "removed") for entry in self._known(ids)]

    def waiting(self) -> QueueTotals:
        """Totals of all queues."""
        oldest = next(iter(self._entries.values()), None)
        return QueueTotals(
            len(self._entries), self._size, len(self._occupied), oldest.received_at if oldest else None
        )

    def cohorts(self, bounds: Sequence[float]) -> list[AgeBucket]:
        """All messages by age."""
        found = ((entry.received_at, entry.size) for entry in reversed(self._entries.values()))
        return complete_buckets(group_by_age(found, bounds, LOOKED_AT), len(self._entries), self._size)

    def queue(self, did: str) -> tuple[int, float | None]:
        """Bytes that are queued for a DID, of any account, and the time of the first arrival."""
        entry_lists = [queue.entry_list for queue in self._occupied.of(did)]
        times = [next(iter(entry_list.entries.values())).received_at for entry_list in entry_lists]
        return sum([entry_list.size for entry_list in entry_lists]), find_earliest(*times)

    def fetch(self, entry_list: EntryList, *, limit: int, max_bytes: int) -> list[StoredMessage]:
        """The oldest visible messages that fit, but at least one."""
        found: list[StoredMessage] = []
        size = 0
        for entry in entry_list.entries.values():
            if len(found) >= limit:
                break
            if not entry.shown:
                continue
            size += entry.size
            if found and size > max_bytes:
                break
            found.append(entry.message())
        return found

    def find(self, ids: Iterable[str]) -> list[StoredMessage]:
        """Visible messages by id, in order of arrival."""
        shown = sorted(entry.seq for entry in self._known(ids) if entry.shown)
        return _take_fitting([self._entries[seq] for seq in shown])

    def arrived(self, mailboxes: Iterable[AccountMailbox], window: ArrivalWindow, limit: int) -> list[MessageArrival]:
        """Messages that arrived in a window."""
        found = [
            MessageArrival(entry.payload.id, mailbox.did, entry.arrived_at)
            for mailbox in mailboxes
            for entry in mailbox.entry_list.entries.values()
            if entry.arrived_at is not None and window.has(entry.arrived_at, entry.payload.id)
        ]
        return sort_arrivals(found, limit)

    def mark_delivered(self, ids: Iterable[str], node: str) -> None:
        for entry in self._known(ids):
            self._set_node(entry, node)
            entry.pushes += 1

    def mark_pending(self, ids: Iterable[str]) -> list[str]:
        delivered = [entry for entry in self._known(ids) if entry.node is not None]
        for entry in delivered:
            self._set_node(entry, None)
        return [entry.payload.id for entry in delivered]

    def delivering(self) -> set[str]:
        """Nodes that have delivered messages."""
        return set(self._delivered)

    def release(self, node: str) -> int:
        """Make deliveries of a node pending again; returns their number."""
        entries = [self._entries[seq] for seq in self._delivered.get(node, ())]
        for entry in entries:
            self._set_node(entry, None)
        return len(entries)

    def remove(self, ids: Iterable[str], now: float) -> list[RemovedMessage]:
        """Remove messages by id, of any account."""
        return self._acknowledge(self._known(ids), now)

    def acknowledge(self, mailbox: AccountMailbox, ids: Iterable[str], now: float) -> list[RemovedMessage]:
        """Remove messages of one mailbox by id or digest; returns them in order of arrival."""
        wanted = list(dict.fromkeys(ids))
        seqs = {entry.seq for entry in self._known(wanted) if entry.queue.mailbox is mailbox}
        for digest in wanted:
            seqs.update(mailbox.digests.get(digest, ()))
        return self._acknowledge([self._entries[seq] for seq in sorted(seqs)], now)

    def _acknowledge(self, entries: Sequence[QueueEntry], now: float) -> list[RemovedMessage]:
        parties: dict[RecipientQueue, set[int]] = {}
        for entry in entries:
            parties.setdefault(entry.queue, set()).add(get_party(entry.origin))
        for queue, some in parties.items():
            if some := some - {0}:
                queue.mailbox.senders.setdefault(queue.did, KnownSenders()).acknowledged(some, now)
        return [self._remove(entry, None) for entry in entries]

    def expire(self, now: float, limit: int) -> list[RemovedMessage]:
        removed: list[RemovedMessage] = []
        while len(removed) < limit and (seq := self._expiry.take(now)) is not None:
            removed.append(self._remove(self._entries[seq], "ttl"))
        return removed

    def next_due(self, now: float) -> float | None:
        while (first := self._due.earliest()) is not None:
            if self._entries[first[1]].expires_at > now:
                return first[0]
            self._due.discard(first[1])
        return None

    def take_due(self, now: float, limit: int) -> list[StoredMessage]:
        taken: list[StoredMessage] = []
        while len(taken) < limit and (seq := self._due.take(now)) is not None:
            entry = self._entries[seq]
            if entry.expires_at > now:
                taken.append(entry.message())
                entry.due_at, entry.arrived_at = None, now
        return taken

    def _set_node(self, entry: QueueEntry, node: str | None) -> None:
        if entry.node is not None:
            delivered = self._delivered[entry.node]
            del delivered[entry.seq]
            if not delivered:
                del self._delivered[entry.node]
        if node is not None:
            self._delivered.setdefault(node, {})[entry.seq] = None
        entry.node = node

    def _known(self, ids: Iterable[str]) -> list[QueueEntry]:
        seqs = (self._seqs.get(id) for id in dict.fromkeys(ids))
        return [self._entries[seq] for seq in seqs if seq is not None]

    def _add(self, entry: QueueEntry) -> None:
        entry.seq = seq = next(self._places)
        self._entries[seq] = entry
        self._seqs[entry.payload.id] = seq
        self._size += entry.size
        self._occupied.add(entry.queue)
        entry.queue.add(entry)
        entry.queue.mailbox.queues[entry.queue.did] = entry.queue  # it may have had to be emptied for this
        digest = sha256(entry.payload.data).hexdigest()
        entry.queue.mailbox.digests.setdefault(digest, {})[seq] = None
        self.ranking.change(entry.queue.did, 1)
        self._expiry.add(seq, entry.expires_at)
        if entry.due_at is None:
            entry.arrived_at = entry.received_at
            self._update_visibility(entry, entry.received_at)
            return
        self._visibility_changes.add(seq, entry.due_at)
        if entry.due_at < entry.expires_at:
            self._due.add(seq, entry.due_at)

    def _update_visibility(self, entry: QueueEntry, now: float) -> None:
        """Show a message if it has not expired, else hide it."""
        expired = entry.expires_at <= now
        if entry.shown == expired:
            entry.shown = not expired
            for entry_list in entry.entry_lists():
                entry_list.show(entry, 1 if entry.shown else -1)
        if not expired:
            self._visibility_changes.add(entry.seq, entry.expires_at)

    def _remove(
        self, entry: QueueEntry, reason: RemovalReason | None, ledger_entry: LedgerEntry | None = None
    ) -> RemovedMessage:
        gone = entry.removed(reason)
        self._ledger[ledger_entry or LEDGER_ENTRY_BY_REASON[reason]] += 1
        self._set_node(entry, None)
        seq = entry.seq
        del self._entries[seq]
        del self._seqs[entry.payload.id]
        entry.queue.remove(entry)
        mailbox = entry.queue.mailbox
        digest = sha256(entry.payload.data).hexdigest()
        del mailbox.digests[digest][seq]
        if not mailbox.digests[digest]:
            del mailbox.digests[digest]
        self._size -= entry.size
        if not entry.queue.entry_list.entries:
            self._occupied.discard(entry.queue)
            mailbox.queues.pop(entry.queue.did, None)
            mailbox.tidy(entry.queue.did)
        self.ranking.change(entry.queue.did, -1)
        for deadlines in (self._expiry, self._due, self._visibility_changes):
            deadlines.discard(seq)
        return gone


def sort_arrivals(found: Iterable[MessageArrival], limit: int) -> list[MessageArrival]:
    """The first arrivals, in order."""
    return sorted(found, key=lambda one: (one.at, one.id))[: max(limit, 0)]


def _take_fitting(entries: Sequence[QueueEntry]) -> list[StoredMessage]:
    """The first messages that fit in a page, but at least one."""
    sizes = accumulate(entry.size for entry in entries)
    fit = [entry for entry, size in zip(entries, sizes, strict=True) if size <= MAX_PAGE_BYTES]
    return [entry.message() for entry in fit or entries[:1]]
