"""
Changes of messages in SQL: enqueue with eviction, acknowledgement, delivery marks, expiry, and counters of queues.
Each function runs inside a transaction of the caller.

SQLite releases the interpreter's lock at every step of a statement, and gets it back when the reactor lets go of it:
the cost of an operation is mostly its number of steps. So enqueues, removals and marks that are neighbours in a batch
share one statement that deletes, one that inserts, one that marks and one that counts; the results are those of doing
one after the other.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from mediatord.errors import MediatorError, QueueFull, UnknownRecipient
from mediatord.protocol.canonical_did import compute_did_digest
from mediatord.store.fair_share import (
    ANONYMOUS,
    AUTHENTICATED,
    NETWORK_MASK,
    SENDER_MASK,
    KnownSenders,
    MessageVolume,
    SenderGroup,
    SenderUsage,
    find_exceeded_limit,
    get_party,
    may_exceed_share,
    needs_sender_usage,
)
from mediatord.store.interfaces.messages import (
    AcknowledgementResult,
    EnqueueRequest,
    EnqueueResult,
    LedgerEntry,
    Payload,
    QueueLimits,
    RemovalReason,
    RemovedMessage,
    StoredMessage,
    filter_valid_ids,
)
from mediatord.store.sqlite.connection import BatchOperation, StoreConnection
from mediatord.store.sqlite.coordination_queries import (
    NO_NODE_ID,
    get_or_create_node,
)
from mediatord.store.sqlite.message_queries import get_digest_head, get_queue_status

# Queues that are cached. With DIDs of two thousand characters, their own and that of the account, that is 32 MiB of
# text at most.
CACHED_QUEUES = 8_192
# Registered DIDs whose digests are cached: they remain valid when another process commits, which clears the queues.
# Longer DIDs are left out, so that this is 4 MiB of text at most.
CACHED_DIGESTS, CACHED_DIGEST_CHARACTERS = 4_096, 1_024
# Queues whose usage by sender is cached: a queue of a thousand messages may have twice as many senders and networks.
CACHED_EVICTION_STATES = 32
# Queues whose known senders are cached: ten thousand bytes each at most.
CACHED_SENDER_SETS = 64

_QUEUE_COLUMNS = """
    r.did, r.id, r.account_id, a.did, coalesce(q.messages, 0), coalesce(q.bytes, 0), r.registered IS NOT NULL,
    a.fresh
"""
_QUEUE_SOURCE = """
    FROM recipient r CROSS JOIN account a ON a.id = r.account_id
    LEFT JOIN queue q ON q.account_id = r.account_id AND q.recipient_id = r.id
"""
_QUEUES_BY_DID = f"{_QUEUE_SOURCE} WHERE r.did_digest IN ({{}}) AND r.registered IS NOT NULL"
_QUEUES_BY_ID = f"{_QUEUE_SOURCE} WHERE r.id IN ({{}})"


@dataclass(slots=True)
class EvictionState:
    """
    Usage of a queue by sender, valid as long as the queue is only changed by counted enqueues.

    :ivar scanned_until: by group of messages, the place in the order of arrival up to which there are none.
    """

    usage: SenderUsage
    scanned_until: dict[SenderGroup, int] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class CachedQueue:
    """
    The queue of one recipient DID of an account, with its counters.

    :ivar messages: number of messages, of `size` bytes; updated by :meth:`MessageWriter.count`.
    :ivar registered: whether the account still has the DID.
    :ivar fresh: whether the account has not been used since its first day
        (:meth:`~mediatord.store.interfaces.store.IAccountStore.record_contact`).
    """

    did: str
    recipient_id: int
    account_id: int
    account: str
    messages: int
    size: int
    registered: int = True
    fresh: int = False


class QueueCache:
    """
    An LRU cache of queues.

    It is as valid as the transaction in which it was read: changes of a queue are made here as well, and a roll-back
    or a commit of another connection clears it (:class:`~mediatord.store.sqlite.connection.StoreConnection`), except
    for the digests of DIDs, which never change.

    :ivar eviction_states: usage of a few queues by sender, by the number of the recipient.
    :ivar senders: known senders of a few recipients.
    """

    def __init__(self, capacity: int = CACHED_QUEUES) -> None:
        self._capacity = capacity
        self._by_did: OrderedDict[str, CachedQueue] = OrderedDict()
        self._by_id: dict[int, CachedQueue] = {}
        self._digests: dict[str, bytes] = {}
        self.eviction_states: OrderedDict[int, EvictionState] = OrderedDict()
        self.senders: OrderedDict[int, KnownSenders] = OrderedDict()

    def clear(self) -> None:
        """Remove everything but digests."""
        for cached in (self._by_did, self._by_id, self.eviction_states, self.senders):
            cached.clear()

    def load_senders(self, connection: StoreConnection, recipient_ids: Iterable[int]) -> None:
        """Read the known senders of these recipients, in one statement, and keep them until :meth:`trim_senders`."""
        missing = []
        for recipient_id in dict.fromkeys(recipient_ids):
            if recipient_id in self.senders:
                self.senders.move_to_end(recipient_id)
            else:
                missing.append(recipient_id)
        if missing:
            for number, text in connection.select_rows_in("id, senders", "FROM recipient WHERE id IN ({})", missing):
                self.senders[number] = KnownSenders(text)

    def trim_senders(self) -> None:
        """Drop all but the most recently used sets of known senders; their changes have been written."""
        while len(self.senders) > CACHED_SENDER_SETS:
            self.senders.popitem(last=False)

    def find(self, connection: StoreConnection, dids: Iterable[str]) -> dict[str, CachedQueue]:
        """
        Queues of the DIDs that are registered; those that are not cached are read in one statement.

        :param dids: in their canonical form; another form of a DID is found too, but is read every time.
        """
        found: dict[str, CachedQueue] = {}
        missing: dict[bytes, list[str]] = {}
        for did in dids:
            queue = self._by_did.get(did)
            if queue is None:
                missing.setdefault(self._digests.get(did) or compute_did_digest(did), []).append(did)
            else:
                found[did] = queue
                self._by_did.move_to_end(did)
        if missing:
            columns = f"hex(r.did_digest), {_QUEUE_COLUMNS}"
            for digest, *row in connection.select_rows_in(columns, _QUEUES_BY_DID, list(missing)):
                queue = self._by_id.get(row[1]) or self._keep(CachedQueue(*row))
                self._keep_digest(queue.did, bytes.fromhex(digest))
                for did in missing[bytes.fromhex(digest)]:
                    found[did] = queue
        return found

    def find_by_ids(self, connection: StoreConnection, recipient_ids: Iterable[int]) -> dict[int, CachedQueue]:
        """Queues by the numbers of recipients, registered or left over."""
        found: dict[int, CachedQueue] = {}
        missing: dict[int, None] = {}
        for recipient_id in recipient_ids:
            queue = self._by_id.get(recipient_id)
            if queue is None:
                missing[recipient_id] = None
            else:
                found[recipient_id] = queue
                self._by_did.move_to_end(queue.did)
        if missing:
            for row in connection.select_rows_in(_QUEUE_COLUMNS, _QUEUES_BY_ID, list(missing)):
                queue = CachedQueue(*row)
                found[queue.recipient_id] = self._keep(queue) if queue.registered else queue
        return found

    def _keep_digest(self, did: str, digest: bytes) -> None:
        if did not in self._digests and len(did) <= CACHED_DIGEST_CHARACTERS:
            self._digests[did] = digest
            if len(self._digests) > CACHED_DIGESTS:
                del self._digests[next(iter(self._digests))]

    def _keep(self, queue: CachedQueue) -> CachedQueue:
        self._by_did[queue.did] = self._by_id[queue.recipient_id] = queue
        if len(self._by_did) > self._capacity:
            _, oldest = self._by_did.popitem(last=False)
            del self._by_id[oldest.recipient_id]
        return queue


# A time in two numbers, because JSON would round it.
MESSAGE_ROW_COLUMNS = """
    seq, id, recipient_id, size, CAST(received_at AS INTEGER), received_at - CAST(received_at AS INTEGER), pushes
"""
# In the table it is behind the payload, in the index it is not.
ORIGIN_COLUMN = """
    (
        SELECT origin FROM message o INDEXED BY message_of_recipient
        WHERE o.recipient_id = message.recipient_id AND o.seq = message.seq
    )
"""


@dataclass(slots=True, eq=False)
class MessageRow:
    """A message that is to be removed: its row without the payload, and its queue."""

    queue: CachedQueue
    seq: int
    id: str
    size: int
    received_at: float
    pushes: int
    origin: int = 0

    def make_removed(self, reason: RemovalReason | None = None) -> RemovedMessage:
        queue = self.queue
        return RemovedMessage(self.id, queue.did, queue.account, self.size, self.received_at, self.pushes, reason)


def parse_message_rows(cache: QueueCache, connection: StoreConnection, rows: Sequence[list[Any]]) -> list[MessageRow]:
    """Messages from rows of the :data:`MESSAGE_ROW_COLUMNS`, with the origin behind them or not."""
    recipient_ids = []
    for row in rows:
        recipient_ids.append(row[2])
    queues = cache.find_by_ids(connection, recipient_ids)
    found = []
    for seq, id_, recipient_id, size, seconds, fraction, pushes, *origin in rows:
        found.append(MessageRow(queues[recipient_id], seq, id_, size, seconds + fraction, pushes, *origin))
    return found


_INSERT_COUNTS = "INSERT OR ROLLBACK INTO queue (account_id, recipient_id, messages, bytes)"
_ADD_COUNTS = "ON CONFLICT DO UPDATE SET messages = messages + excluded.messages, bytes = bytes + excluded.bytes"
_UNSET_FRESH = "UPDATE account SET fresh = 0 WHERE id IN ({}) AND fresh = 1"
# A subquery, because SQLite would look for the pairs of a `VALUES` in all of the table.
_DELETE_EMPTY_QUEUES = """
    WITH one (account, recipient) AS (VALUES {})
    DELETE FROM queue WHERE (account_id, recipient_id) IN (SELECT account, recipient FROM one) AND messages = 0
"""
_DELETE_LEFTOVER_RECIPIENTS = """
    DELETE FROM recipient
    WHERE id IN ({}) AND registered IS NULL AND NOT EXISTS (
        SELECT 1 FROM queue q WHERE q.account_id = recipient.account_id AND q.recipient_id = recipient.id
    )
"""
_UPDATE_SENDERS = """
    UPDATE recipient SET senders = new.column2 FROM (SELECT column1, column2 FROM (VALUES {})) new
    WHERE recipient.id = new.column1
"""
# Rows that are read at a time where messages may be so large that few of them make room.
_ROWS_PER_SCAN = 32
_QUEUE_ROWS = "FROM message INDEXED BY message_of_recipient WHERE recipient_id = ?"
# The subquery is answered by the index alone. CROSS JOIN, because its order is to be kept.
_OLDEST_ROWS = f"""
    FROM (SELECT seq AS place, origin AS came {_QUEUE_ROWS} AND seq > ? AND {{}} ORDER BY seq LIMIT ?) some
    CROSS JOIN message ON seq = some.place
"""
_INSERT_MESSAGES = """
    INSERT OR ROLLBACK INTO message (
        id, recipient_id, account_id, form, size, received_at, expires_at, due_at, digest_head, digest, payload,
        origin
    )
"""
_EXPIRED_COLUMNS = "seq, id, recipient_id, size, received_at, pushes"
_SELECT_EXPIRED = (
    f"FROM (SELECT {_EXPIRED_COLUMNS} FROM message WHERE expires_at <= ? ORDER BY expires_at, seq LIMIT ?) some"
)


# A message, and the limit that its queue exceeded.
_EvictionVictim = tuple[MessageRow, RemovalReason]


class _MessageOperation(BatchOperation):
    __slots__ = ()

    @staticmethod
    def run_batch(connection: StoreConnection, operations: Sequence[_MessageOperation]) -> list[Any]:
        writer = MessageWriter(connection)
        writer.load(operations)
        outcomes: list[Any] = []
        for operation in operations:
            if isinstance(operation, EnqueueOperation):
                outcomes.append(writer.enqueue(operation))
            elif isinstance(operation, RemoveOperation):
                outcomes.append(writer.remove(operation))
            elif isinstance(operation, MarkDeliveredOperation):
                writer.mark(operation)
                outcomes.append(None)
        writer.finish()
        for result, account, now in writer.wanting_status:
            result.status = get_queue_status(connection, now, account, None)
        return outcomes


@dataclass(slots=True)
class EnqueueOperation(_MessageOperation):
    """
    Enqueue as an operation of a batch.

    :param size: bytes of all payloads.
    """

    request: EnqueueRequest
    limits: QueueLimits
    now: float
    size: int

    def make_result(self, account: str, evicted: Iterable[RemovedMessage] = ()) -> EnqueueResult:
        request, stored = self.request, []
        did, expires_at, due_at = request.recipient_did, request.expires_at, request.due_at
        for payload in request.payloads:
            stored.append(
                StoredMessage(
                    payload.id, did, account, payload.data, payload.form, self.now, expires_at, "pending", due_at
                )
            )
        return EnqueueResult(tuple(stored), tuple(evicted))


@dataclass(slots=True)
class RemoveOperation(_MessageOperation):
    """
    Removal of messages as an operation of a batch.

    :param ids: of messages, each once.
    :param account: the only one whose messages are removed, in order of arrival; None for those of any account, in
        this order.
    :param now: time of the acknowledgement.
    :param with_status: whether the result has the status of the account's queues.
    """

    ids: Sequence[str]
    account: str | None
    now: float
    with_status: bool = False


@dataclass(slots=True)
class MarkDeliveredOperation(_MessageOperation):
    """
    Mark of messages as delivered, as an operation of a batch.

    :param ids: of messages, each once.
    """

    ids: Sequence[str]
    node: str


class MessageWriter:
    """
    Changes of messages in one transaction, with their queues, known senders and ledger. Rows are collected until a
    statement has to see them, and written by :meth:`finish` at the latest.
    """

    def __init__(self, connection: StoreConnection) -> None:
        self.cache = connection.get_cache(QueueCache)
        self._connection = connection
        # Messages that may be removed, by id, and ids of those that were enqueued since they were read.
        self._messages: dict[str, MessageRow] = {}
        self._enqueued_ids: set[str] = set()
        self._queues: dict[str, CachedQueue] = {}
        self.wanting_status: list[tuple[AcknowledgementResult, str, float]] = []
        self._inserted: list[tuple[CachedQueue, EnqueueOperation, Payload]] = []
        self._deleted: list[int] = []
        self._marked: dict[str, dict[str, None]] = {}
        self._changed_senders: dict[int, KnownSenders] = {}
        # Queue, messages and bytes, by recipient.
        self._counts: dict[int, list[Any]] = {}
        self._first_used: dict[int, None] = {}
        self._accepted = 0

    def load(self, operations: Sequence[_MessageOperation]) -> None:
        """Read queues and messages, in one statement each."""
        dids: dict[str, None] = {}
        ids: dict[str, None] = {}
        for operation in operations:
            if isinstance(operation, EnqueueOperation):
                dids[operation.request.recipient_did] = None
            elif isinstance(operation, RemoveOperation):
                ids.update(dict.fromkeys(operation.ids))
        if dids:
            self._queues = self.cache.find(self._connection, dids)
        if ids:
            self._messages = self.find_messages(list(ids))

    def delete(
        self, messages: Sequence[MessageRow], entry: LedgerEntry, reason: RemovalReason | None = None
    ) -> list[RemovedMessage]:
        """Remove messages that are in the table."""
        removed: list[RemovedMessage] = []
        for message in messages:
            self.count(message.queue, -1, -message.size)
            self._deleted.append(message.seq)
            removed.append(message.make_removed(reason))
        self._connection.add_ledger_entry("didcomm", entry, len(messages))
        return removed

    def count(self, queue: CachedQueue, messages: int, size: int, origin: int | None = None) -> None:
        """
        Count messages that are inserted or, if negative, deleted; the cached queue changes at once.

        :param origin: of all of them; None where it is unknown, or where ranks may change with it, after which the
            usage by sender is read anew.
        """
        state = self.cache.eviction_states.get(queue.recipient_id)
        if state is not None:
            if origin is None:
                del self.cache.eviction_states[queue.recipient_id]
            else:
                state.usage.change(origin, messages, size)
        queue.messages += messages
        queue.size += size
        if queue.fresh:
            queue.fresh = False
            self._first_used[queue.account_id] = None
        change = self._counts.get(queue.recipient_id)
        if change is None:
            self._counts[queue.recipient_id] = [queue, messages, size]
        else:
            change[1] += messages
            change[2] += size

    def finish(self) -> None:
        """Write what is left, counters and ledger."""
        self._flush()
        rows: list[tuple[int, int, int, int]] = []
        empty: list[CachedQueue] = []
        for recipient_id, (queue, messages, size) in self._counts.items():
            rows.append((queue.account_id, recipient_id, messages, size))
            if queue.messages <= 0:
                empty.append(queue)
        if rows:  # also of a queue that is empty again, which gets a row that is deleted below
            self._connection.insert_rows(_INSERT_COUNTS, rows, _ADD_COUNTS)
        if self._first_used:
            self._connection.execute_in(_UNSET_FRESH, list(self._first_used))
        if empty:
            self._delete_empty(empty)
        self._connection.add_ledger_entry("didcomm", "accepted", self._accepted)
        if len(self.cache.senders) > CACHED_SENDER_SETS:
            self.cache.trim_senders()

    def _delete_empty(self, queues: Sequence[CachedQueue]) -> None:
        """Delete the counters of empty queues, and recipients of which nothing else is left."""
        pairs = [(queue.account_id, queue.recipient_id) for queue in queues]
        self._connection.execute_values(_DELETE_EMPTY_QUEUES, pairs)
        left_over = [queue.recipient_id for queue in queues if not queue.registered]
        self._connection.execute_in(_DELETE_LEFTOVER_RECIPIENTS, left_over)

    def enqueue(self, operation: EnqueueOperation) -> EnqueueResult | MediatorError:
        request, limits = operation.request, operation.limits
        queue = self._queues.get(request.recipient_did)
        if queue is None:
            return UnknownRecipient()
        messages, size = queue.messages + len(request.payloads), queue.size + operation.size
        if messages > limits.max_messages or size > limits.max_bytes:
            return QueueFull() if limits.when_full == "refuse" else self.enqueue_with_eviction(queue, operation)
        if limits.when_full == "refuse" and may_exceed_share(limits, request.origin, MessageVolume(messages, size)):
            self._flush()
            try:
                self.check_capacity(limits, [(queue, operation)])
            except QueueFull as error:
                return error.with_traceback(None)
        self._accepted += len(request.payloads)
        self.count(queue, len(request.payloads), operation.size, request.origin)
        for payload in request.payloads:
            self._inserted.append((queue, operation, payload))
            self._enqueued_ids.add(payload.id)
        return operation.make_result(queue.account)

    def remove(self, operation: RemoveOperation) -> AcknowledgementResult:
        if self._enqueued_ids and not self._enqueued_ids.isdisjoint(set(operation.ids).difference(self._messages)):
            self._flush()
            self._messages |= self.find_messages(operation.ids)
        messages: list[MessageRow] = []
        for id_ in operation.ids:
            message = self._messages.get(id_)
            if message is not None and operation.account in (None, message.queue.account):
                messages.append(self._messages.pop(id_))
        if operation.account is not None and len(messages) > 1:
            messages.sort(key=lambda message: message.seq)
        self._record_senders(messages, operation.now)
        result = AcknowledgementResult(self.delete(messages, "acknowledged"))
        if operation.with_status and operation.account is not None:
            self.wanting_status.append((result, operation.account, operation.now))
        return result

    def _record_senders(self, acknowledged: Iterable[MessageRow], now: float) -> None:
        parties: dict[int, set[int]] = {}
        for message in acknowledged:
            if message.origin:
                parties.setdefault(message.queue.recipient_id, set()).add(get_party(message.origin))
        if not parties:
            return
        more: list[int] = []
        if not parties.keys() <= self.cache.senders.keys():
            # With those of messages that are likely to be acknowledged next.
            more = [message.queue.recipient_id for message in self._messages.values() if message.origin]
        self.cache.load_senders(self._connection, [*more, *parties])
        for recipient_id, some in parties.items():
            senders = self.cache.senders[recipient_id]
            if senders.acknowledged(some, now):
                self._changed_senders[recipient_id] = senders

    def mark(self, operation: MarkDeliveredOperation) -> None:
        for marked in self._marked.values():
            if not marked.keys().isdisjoint(operation.ids):
                self._flush()  # one update changes a message once
                break
        for id_ in operation.ids:
            if id_ in self._messages:
                self._messages[id_].pushes += 1
        self._marked.setdefault(operation.node, {}).update(dict.fromkeys(operation.ids))

    def _flush(self) -> None:
        """Write messages and known senders."""
        connection = self._connection
        if self._deleted:
            connection.execute_in("DELETE FROM message WHERE seq IN ({})", self._deleted)
            self._deleted = []
        if self._inserted:
            rows: list[tuple[Any, ...]] = []
            for queue, operation, payload in self._inserted:
                request, data = operation.request, payload.data
                digest = sha256(data).digest()
                keys = payload.id, queue.recipient_id, queue.account_id, payload.form, len(data)
                times = operation.now, request.expires_at, request.due_at
                rows.append((*keys, *times, get_digest_head(digest), digest, data, request.origin))
            connection.insert_rows(_INSERT_MESSAGES, rows)
            self._inserted = []
        if self._changed_senders:
            rows = [(recipient_id, senders.text()) for recipient_id, senders in self._changed_senders.items()]
            connection.execute_values(_UPDATE_SENDERS, rows)
            self._changed_senders = {}
        for node, ids in self._marked.items():
            number = get_or_create_node(connection, node) if node else NO_NODE_ID
            mark = "UPDATE message SET delivered = ?, pushes = pushes + 1 WHERE id IN ({})"
            connection.execute_in(mark, list(ids), number)
        self._marked = {}

    def find_messages(self, ids: Sequence[str]) -> dict[str, MessageRow]:
        """Messages with these ids, with their origins."""
        columns = f"{MESSAGE_ROW_COLUMNS}, {ORIGIN_COLUMN}"
        rows = self._connection.select_rows_in(columns, "FROM message WHERE id IN ({})", ids)
        messages = {}
        for message in parse_message_rows(self.cache, self._connection, rows):
            messages[message.id] = message
        return messages

    def enqueue_with_eviction(self, queue: CachedQueue, operation: EnqueueOperation) -> EnqueueResult:
        """
        Append to a queue, and make room in it; payloads that are too large for the queue are evicted at once.
        """
        request, limits = operation.request, operation.limits
        fitting = [payload for payload in request.payloads if len(payload.data) <= limits.max_bytes]
        coming = MessageVolume(len(fitting), sum([len(payload.data) for payload in fitting]))
        victims = self._choose_victims(limits, queue, request.origin, coming)
        self._inserted += [(queue, operation, payload) for payload in fitting]
        self._enqueued_ids.update([payload.id for payload in fitting])
        if victims:
            self._flush()  # before they are deleted: no later message may get the number of one of them
        evicted: list[RemovedMessage] = []
        for message, reason in victims:
            self._deleted.append(message.seq)
            self._messages.pop(message.id, None)
            self.count(queue, -1, -message.size, message.origin)
            evicted.append(message.make_removed(reason))
        self.count(queue, coming.messages, coming.size, request.origin)
        for payload in request.payloads:
            if (size := len(payload.data)) > limits.max_bytes:
                removed = payload.id, request.recipient_did, queue.account, size, operation.now, 0
                evicted.append(RemovedMessage(*removed, "fifo_bytes"))
        self._accepted += len(request.payloads)
        self._connection.add_ledger_entry("didcomm", "evicted", len(evicted))
        return operation.make_result(queue.account, evicted)

    def check_capacity(self, limits: QueueLimits, operations: Sequence[tuple[CachedQueue, EnqueueOperation]]) -> None:
        """
        Check enqueues in order against the limits of their queues.

        :raise QueueFull: one of them is to be refused.
        """
        totals: dict[int, MessageVolume] = {}
        counted: list[tuple[SenderUsage, int, MessageVolume]] = []
        try:
            for queue, operation in operations:
                origin = operation.request.origin
                coming = MessageVolume(len(operation.request.payloads), operation.size)
                total = totals.setdefault(queue.recipient_id, MessageVolume(queue.messages, queue.size))
                total.add(coming.messages, coming.size)
                if find_exceeded_limit(limits, total.messages, total.size) is not None:
                    raise QueueFull()
                if len(operations) > 1 or may_exceed_share(limits, origin, total):
                    usage = self._load_eviction_state(limits, queue).usage
                    usage.check(origin, coming)
                    usage.change(origin, coming.messages, coming.size)
                    counted.append((usage, origin, coming))
        finally:
            # They are counted when they are enqueued.
            for usage, origin, coming in counted:
                usage.change(origin, -coming.messages, -coming.size)

    def _choose_victims(
        self, limits: QueueLimits, queue: CachedQueue, origin: int, coming: MessageVolume
    ) -> list[_EvictionVictim]:
        """
        Messages to be evicted so that an enqueue fits, in order.

        :param coming: the part of the enqueue that is kept.
        """
        total = MessageVolume(queue.messages, queue.size).plus(coming)
        if find_exceeded_limit(limits, total.messages, total.size) is None:
            return []
        self._flush()
        needs_usage = needs_sender_usage(limits, origin)
        if needs_usage:
            state = self._load_eviction_state(limits, queue)
        else:
            state = EvictionState(SenderUsage(limits, frozenset()))
        victims: list[_EvictionVictim] = []
        scan = _EvictionScan(self._connection, queue, state)
        while reason := find_exceeded_limit(limits, total.messages, total.size):
            rows = 1 if total.size <= limits.max_bytes else _ROWS_PER_SCAN
            scan.rows_wanted = max(total.messages - limits.max_messages, rows)
            group = state.usage.victim(origin, coming, scan.get_oldest_origin)
            message = None if group is None else scan.choose_oldest(group)
            if message is None:
                break
            total.add(-1, -message.size)
            if needs_usage:
                state.usage.change(message.origin, -1, -message.size)
            victims.append((message, reason))
        scan.close()
        if needs_usage:
            # They are counted when they are deleted.
            for message, _ in victims:
                state.usage.change(message.origin, 1, message.size)
        return victims

    def _load_eviction_state(self, limits: QueueLimits, queue: CachedQueue) -> EvictionState:
        """
        Usage of a queue by sender, read from an index, since the table has origins behind the payloads, and cached:
        a full queue receives the next message soon.
        """
        number, states = queue.recipient_id, self.cache.eviction_states
        if number not in states:
            self.cache.load_senders(self._connection, [number])
            rows = self._connection.select_rows("origin, size", _QUEUE_ROWS, (number,))
            usage = SenderUsage(
                limits, self.cache.senders[number].known, [(origin, 1, size) for origin, size in rows]
            )
            self.cache.trim_senders()
            states[number] = EvictionState(usage)
            if len(states) > CACHED_EVICTION_STATES:
                states.popitem(last=False)
        states.move_to_end(number)
        return states[number]


def enqueue_all(connection: StoreConnection, operations: Sequence[EnqueueOperation]) -> list[EnqueueResult]:
    """
    Several enqueues, all or none.

    :raise UnknownRecipient: one of the DIDs is not registered.
    :raise QueueFull: one of them is refused.
    """
    writer = MessageWriter(connection)
    dids = dict.fromkeys([operation.request.recipient_did for operation in operations])
    queues = writer.cache.find(connection, dids)
    if len(queues) < len(dids):
        raise UnknownRecipient()
    addressed = [(queues[operation.request.recipient_did], operation) for operation in operations]
    if operations and operations[0].limits.when_full == "refuse":
        writer.check_capacity(operations[0].limits, addressed)
    results = [writer.enqueue_with_eviction(queue, operation) for queue, operation in addressed]
    writer.finish()
    return results


def mark_pending(connection: StoreConnection, ids: Iterable[str]) -> list[str]:
    wanted = filter_valid_ids(ids)
    rows = connection.select_rows_in("id", "FROM message WHERE id IN ({}) AND +delivered > 0", wanted)
    delivered = {id for (id,) in rows}
    pending = [id for id in wanted if id in delivered]
    connection.execute_in("UPDATE message SET delivered = 0 WHERE id IN ({})", pending)
    return pending


def purge_messages(connection: StoreConnection, ids: Iterable[str]) -> list[RemovedMessage]:
    """Remove messages of any account for the operator."""
    writer, wanted = MessageWriter(connection), list(dict.fromkeys(ids))
    found = writer.find_messages(wanted)
    removed = writer.delete([found[id] for id in wanted if id in found], "removed")
    writer.finish()
    return removed


def expire_messages(
    connection: StoreConnection, rows: int, now: float, limit: int, max_bytes: int
) -> list[RemovedMessage]:
    """Remove expired messages, at most `rows` or `limit` and as many as fit in `max_bytes`, but at least one."""
    fitting: list[list[Any]] = []
    for row in connection.select_rows(MESSAGE_ROW_COLUMNS, _SELECT_EXPIRED, (now, max(0, min(rows, limit)))):
        max_bytes -= row[3]
        if fitting and max_bytes < 0:
            break
        fitting.append(row)
    writer = MessageWriter(connection)
    removed = writer.delete(parse_message_rows(writer.cache, connection, fitting), "expired", "ttl")
    writer.finish()
    return removed


class _EvictionScan:
    """
    Messages of a queue by group of senders, oldest first, read as they are needed.

    :ivar rows_wanted: rows to read at a time.
    """

    def __init__(self, connection: StoreConnection, queue: CachedQueue, state: EvictionState) -> None:
        self._connection = connection
        self._queue = queue
        self._state = state
        # By group: its first message that was not chosen when it was wanted last, and those after it.
        self._oldest: dict[SenderGroup, MessageRow | None] = {}
        self._later: dict[SenderGroup, Iterator[MessageRow]] = {}
        self._chosen: set[int] = set()
        self.rows_wanted = 1

    def close(self) -> None:
        """Drop the readers: they refer to this, and the cycle would keep their rows until a garbage collection."""
        self._later.clear()

    def get_oldest_origin(self, group: SenderGroup) -> int | None:
        """The origin of the first message of a group that is not chosen."""
        message = self._find_oldest(group)
        return None if message is None else message.origin

    def choose_oldest(self, group: SenderGroup) -> MessageRow | None:
        """Choose the first message of a group; None if there is none."""
        message = self._find_oldest(group)
        if message is not None:
            self._chosen.add(message.seq)
            if group != SenderGroup():
                self._state.scanned_until[group] = message.seq
        return message

    def _find_oldest(self, group: SenderGroup) -> MessageRow | None:
        """The first message of a group that is not chosen."""
        if group not in self._later:
            self._later[group] = self._read(group)
            self._oldest[group] = next(self._later[group], None)
        message = self._oldest[group]
        while message is not None and message.seq in self._chosen:
            message = self._oldest[group] = next(self._later[group], None)
        return message

    def _read(self, group: SenderGroup) -> Iterator[MessageRow]:
        after = self._state.scanned_until.get(group, -1)
        source = _OLDEST_ROWS.format(_format_group_condition(group, self._state.usage.known))
        columns, recipient_id = f"{MESSAGE_ROW_COLUMNS}, some.came", self._queue.recipient_id
        while rows := self._connection.select_rows(columns, source, (recipient_id, after, self.rows_wanted)):
            for seq, id_, _, size, seconds, fraction, pushes, origin in rows:
                yield MessageRow(self._queue, seq, id_, size, seconds + fraction, pushes, origin)
            after = rows[-1][0]


def _format_group_condition(group: SenderGroup, known: frozenset[int]) -> str:
    """Condition in SQL for the messages of a group, by their origin; numbers only."""
    rank, network, sender = group
    conditions = ["1"]
    if sender is not None:
        conditions.append(f"origin & {SENDER_MASK} = {sender}")
    if network is not None:
        conditions.append(f"origin & {NETWORK_MASK} = {network}")
    if rank is not None:
        numbers = ", ".join(map(str, sorted(known)))
        # As :func:`~mediatord.store.fair_share.get_party`.
        party = f"CASE origin & {SENDER_MASK} WHEN 0 THEN origin & {NETWORK_MASK} ELSE origin & {SENDER_MASK} END"
        if rank == ANONYMOUS:
            conditions.append(f"origin & {SENDER_MASK} = 0 AND NOT {party} IN ({numbers})")
        elif rank == AUTHENTICATED:
            conditions.append(f"origin & {SENDER_MASK} <> 0 AND NOT {party} IN ({numbers})")
        else:
            conditions.append(f"{party} IN ({numbers})")
    return " AND ".join(conditions)
