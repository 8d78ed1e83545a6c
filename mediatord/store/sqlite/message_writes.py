"""
Changes of messages in SQL: enqueue with eviction, acknowledgement, delivery marks, expiry, and counters of queues.
Each function runs inside a transaction of the caller.

SQLite releases the interpreter's lock at every step of a statement, and gets it back when the reactor lets go of it:
the cost of an operation is mostly its number of steps. So enqueues, removals and marks that are neighbours in a batch
share one statement that deletes, one that inserts, one that marks and one that counts; the results are those of doing
one after the other.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
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
from mediatord.store.sqlite.coordination_queries import NO_NODE_ID, NonceClaim, claim_nonces, get_or_create_node
from mediatord.store.sqlite.message_queries import get_digest_head, get_queue_status

# Queues that are cached. With DIDs of two thousand characters, their own and that of the account, that is 32 MiB of
# text at most.
CACHED_QUEUES = 8_192
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

    :ivar messages: number of messages, of `size` bytes; updated by :meth:`QueueCounters.add`.
    :ivar registered: whether the account still has the DID.
    :ivar fresh: whether the account has not been used since its first day
        (:meth:`~mediatord.store.interfaces.store.IAccountStore.record_contact`).
    :ivar eviction_state: usage by sender, while it is cached.
    :ivar senders: known senders of the recipient, while they are cached.
    """

    did: str
    recipient_id: int
    account_id: int
    account: str
    messages: int
    size: int
    registered: int = True
    fresh: int = False
    eviction_state: EvictionState | None = None
    senders: KnownSenders | None = None


class QueueCache:
    """
    An LRU cache of queues.

    It is as valid as the transaction in which it was read: changes of a queue are made here as well, and a roll-back
    or a commit of another connection clears it (:class:`~mediatord.store.sqlite.connection.StoreConnection`).
    """

    def __init__(self, capacity: int = CACHED_QUEUES) -> None:
        self._capacity = capacity
        self._by_did: OrderedDict[str, CachedQueue] = OrderedDict()
        self._by_id: dict[int, CachedQueue] = {}
        self._with_eviction_state: OrderedDict[int, CachedQueue] = OrderedDict()
        self._with_senders: OrderedDict[int, CachedQueue] = OrderedDict()

    def clear(self) -> None:
        """Remove all queues."""
        for queues in (self._by_did, self._by_id, self._with_eviction_state, self._with_senders):
            queues.clear()

    def keep_eviction_state(self, queue: CachedQueue, state: EvictionState) -> None:
        """Cache the usage by sender of a queue, and of a few others for which this was called last."""
        queue.eviction_state = state
        self._with_eviction_state[queue.recipient_id] = queue
        self._with_eviction_state.move_to_end(queue.recipient_id)
        if len(self._with_eviction_state) > CACHED_EVICTION_STATES:
            _, oldest = self._with_eviction_state.popitem(last=False)
            oldest.eviction_state = None

    def retain_known_senders(self, queue: CachedQueue) -> None:
        """Keep the known senders of a queue until :meth:`trim_known_senders` at least."""
        self._with_senders[queue.recipient_id] = queue
        self._with_senders.move_to_end(queue.recipient_id)

    def trim_known_senders(self) -> None:
        """Drop all but the most recently used sets of known senders; their changes have been written."""
        while len(self._with_senders) > CACHED_SENDER_SETS:
            _, oldest = self._with_senders.popitem(last=False)
            oldest.senders = None

    def find(self, connection: StoreConnection, dids: Iterable[str]) -> dict[str, CachedQueue]:
        """
        Queues of the DIDs that are registered; those that are not cached are read in one statement.

        :param dids: in their canonical form; another form of a DID is found too, but is read every time.
        """
        found: dict[str, CachedQueue] = {}
        missing: list[str] = []
        for did in dids:
            queue = self._by_did.get(did)
            if queue is None:
                missing.append(did)
            else:
                found[did] = queue
                self._by_did.move_to_end(did)
        if missing:
            digests = {did: compute_did_digest(did) for did in missing}
            rows = connection.select_rows_in(_QUEUE_COLUMNS, _QUEUES_BY_DID, list(digests.values()))
            queues = {
                compute_did_digest(row[0]): self._by_id.get(row[1]) or self._keep(CachedQueue(*row)) for row in rows
            }
            found |= {did: queues[digest] for did, digest in digests.items() if digest in queues}
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


class QueueCounters:
    """Changes of queue counters by a run of operations; the cached queues change at once, the table with `write`."""

    def __init__(self) -> None:
        # Queue, messages and bytes.
        self._changes: dict[int, list[Any]] = {}

    def add(self, queue: CachedQueue, messages: int, size: int, origin: int | None = None) -> None:
        """
        Count messages that were inserted or, if negative, deleted.

        :param origin: of all of them; None where it is unknown, after which the usage by sender is read anew.
        """
        if queue.eviction_state is not None:
            if origin is None:
                queue.eviction_state = None
            else:
                queue.eviction_state.usage.change(origin, messages, size)
        queue.messages += messages
        queue.size += size
        change = self._changes.get(queue.recipient_id)
        if change is None:
            self._changes[queue.recipient_id] = [queue, messages, size]
        else:
            change[1] += messages
            change[2] += size

    def write(self, connection: StoreConnection) -> None:
        """Update the table; empty queues are deleted, and so are recipients of which nothing else is left."""
        rows: list[tuple[int, int, int, int]] = []
        empty: list[CachedQueue] = []
        first_used: list[int] = []
        for recipient_id, (queue, messages, size) in self._changes.items():
            if messages or size:
                rows.append((queue.account_id, recipient_id, messages, size))
            if queue.messages <= 0:
                empty.append(queue)
            if queue.fresh:
                queue.fresh = False
                first_used.append(queue.account_id)
        if rows:
            connection.insert_rows(_INSERT_COUNTS, rows, _ADD_COUNTS)
        if first_used:
            accounts = list(set(first_used))
            connection.execute_in("UPDATE account SET fresh = 0 WHERE id IN ({}) AND fresh = 1", accounts)
        if empty:
            pairs = [(queue.account_id, queue.recipient_id) for queue in empty]
            connection.execute_values(_DELETE_EMPTY_QUEUES, pairs)
            left_over = [queue.recipient_id for queue in empty if not queue.registered]
            connection.execute_in(_DELETE_LEFTOVER_RECIPIENTS, left_over)


_UPDATE_SENDERS = """
    UPDATE recipient SET senders = new.column2 FROM (SELECT column1, column2 FROM (VALUES {})) new
    WHERE recipient.id = new.column1
"""


def load_known_senders(cache: QueueCache, connection: StoreConnection, queues: Iterable[CachedQueue]) -> None:
    """Read the known senders of the recipients of these queues, in one statement."""
    missing = {}
    for queue in queues:
        cache.retain_known_senders(queue)
        if queue.senders is None:
            missing[queue.recipient_id] = queue
    for number, text in connection.select_rows_in("id, senders", "FROM recipient WHERE id IN ({})", list(missing)):
        missing[number].senders = KnownSenders(text)


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
        return _MessageOperationRun(connection, operations).run()


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
    :param claim: a nonce without which nothing is removed. The operation then returns an
        :class:`~mediatord.store.interfaces.messages.AcknowledgementResult`, or None if the nonce is not new.
    :param with_status: whether that result has the status of the account's queues.
    """

    ids: Sequence[str]
    account: str | None
    now: float
    claim: NonceClaim | None = None
    with_status: bool = False


@dataclass(slots=True)
class MarkDeliveredOperation(_MessageOperation):
    """
    Mark of messages as delivered, as an operation of a batch.

    :param ids: of messages, each once.
    """

    ids: Sequence[str]
    node: str


class _MessageOperationRun:
    """Performs neighbouring operations, collecting rows until a statement has to see them."""

    def __init__(self, connection: StoreConnection, operations: Sequence[_MessageOperation]) -> None:
        self._connection = connection
        self._operations = operations
        self._cache = connection.get_cache(QueueCache)
        dids: dict[str, None] = {}
        ids: dict[str, None] = {}
        claims: list[NonceClaim] = []
        for operation in operations:
            if isinstance(operation, EnqueueOperation):
                dids[operation.request.recipient_did] = None
            elif isinstance(operation, RemoveOperation):
                ids.update(dict.fromkeys(operation.ids))
                if operation.claim is not None:
                    claims.append(operation.claim)
        self._claimed = iter(claim_nonces(connection, claims) if claims else ())
        self._queues = self._cache.find(connection, dids) if dids else {}
        self._messages = find_message_rows(connection, self._cache, list(ids)) if ids else {}
        self._counters = QueueCounters()
        self._inserted: list[tuple[CachedQueue, EnqueueOperation, Payload]] = []
        self._deleted: list[int] = []
        self._marked: dict[str, dict[str, None]] = {}
        self._changed_senders: dict[int, CachedQueue] = {}
        self._enqueued_ids: set[str] | None = None
        self._accepted = self._acknowledged = 0

    def run(self) -> list[Any]:
        """Outcome of each operation, in order."""
        outcomes: list[Any] = []
        wants_status = False
        for operation in self._operations:
            if isinstance(operation, EnqueueOperation):
                outcomes.append(self._enqueue(operation))
            elif isinstance(operation, RemoveOperation):
                outcomes.append(self._remove(operation))
                wants_status = wants_status or operation.with_status
            elif isinstance(operation, MarkDeliveredOperation):
                self._mark(operation)
                outcomes.append(None)
        self._flush()
        self._counters.write(self._connection)
        if self._accepted:
            self._connection.add_ledger_entry("didcomm", "accepted", self._accepted)
        if self._acknowledged:
            self._connection.add_ledger_entry("didcomm", "acknowledged", self._acknowledged)
            self._cache.trim_known_senders()
        if wants_status:
            self._add_statuses(outcomes)
        return outcomes

    def _enqueue(self, operation: EnqueueOperation) -> EnqueueResult | MediatorError:
        request, limits = operation.request, operation.limits
        queue = self._queues.get(request.recipient_did)
        if queue is None:
            return UnknownRecipient()
        messages, size = queue.messages + len(request.payloads), queue.size + operation.size
        if messages > limits.max_messages or size > limits.max_bytes:
            if limits.when_full == "refuse":
                return QueueFull()
            # Earlier messages are inserted first, so that the order is kept.
            self._flush()
            result = enqueue_with_eviction(self._connection, queue, operation, self._counters)
            for one in result.evicted:
                self._messages.pop(one.id, None)
            return result
        if limits.when_full == "refuse" and may_exceed_share(limits, request.origin, MessageVolume(messages, size)):
            self._flush()
            try:
                check_capacity(self._connection, limits, [(queue, operation)])
            except QueueFull as error:
                return error.with_traceback(None)
        self._accepted += len(request.payloads)
        self._counters.add(queue, len(request.payloads), operation.size, request.origin)
        for payload in request.payloads:
            self._inserted.append((queue, operation, payload))
        return operation.make_result(queue.account)

    def _remove(self, operation: RemoveOperation) -> Any:
        if operation.claim is not None:
            claimed = next(self._claimed)
            if claimed is not True:
                return claimed or None
        self._find_enqueued(operation)
        messages: list[MessageRow] = []
        for id_ in operation.ids:
            message = self._messages.get(id_)
            if message is not None and operation.account in (None, message.queue.account):
                messages.append(message)
        if operation.account is not None and len(messages) > 1:
            messages.sort(key=lambda message: message.seq)
        removed: list[RemovedMessage] = []
        for message in messages:
            del self._messages[message.id]
            self._counters.add(message.queue, -1, -message.size)
            self._deleted.append(message.seq)
            removed.append(message.make_removed())
        self._record_senders(messages, operation.now)
        self._acknowledged += len(messages)
        return removed if operation.claim is None else AcknowledgementResult(removed)

    def _add_statuses(self, outcomes: Sequence[Any]) -> None:
        for operation, outcome in zip(self._operations, outcomes, strict=True):
            if isinstance(outcome, AcknowledgementResult) and isinstance(operation, RemoveOperation):
                if operation.with_status and operation.account is not None:
                    outcome.status = get_queue_status(self._connection, operation.now, operation.account, None)

    def _record_senders(self, acknowledged: Iterable[MessageRow], now: float) -> None:
        parties: dict[CachedQueue, set[int]] = {}
        is_missing = False
        for message in acknowledged:
            if message.origin:
                parties.setdefault(message.queue, set()).add(get_party(message.origin))
                is_missing = is_missing or message.queue.senders is None
        if is_missing:
            # With those of messages that are likely to be acknowledged next.
            more = [message.queue for message in self._messages.values() if message.origin]
            load_known_senders(self._cache, self._connection, [*parties, *more])
        for queue, some in parties.items():
            self._cache.retain_known_senders(queue)
            if queue.senders is not None and queue.senders.acknowledged(some, now):
                self._changed_senders[queue.recipient_id] = queue

    def _mark(self, operation: MarkDeliveredOperation) -> None:
        if any(not marked.keys().isdisjoint(operation.ids) for marked in self._marked.values()):
            self._flush()  # one update changes a message once
        for id_ in operation.ids:
            if id_ in self._messages:
                self._messages[id_].pushes += 1
        self._marked.setdefault(operation.node, {}).update(dict.fromkeys(operation.ids))

    def _find_enqueued(self, operation: RemoveOperation) -> None:
        """Find messages that this run has enqueued, if such are to be removed."""
        unknown = set(operation.ids).difference(self._messages)
        if not unknown:
            return
        if self._enqueued_ids is None:
            requests = [one.request for one in self._operations if isinstance(one, EnqueueOperation)]
            self._enqueued_ids = {payload.id for request in requests for payload in request.payloads}
        if not self._enqueued_ids.isdisjoint(unknown):
            self._flush()
            self._messages |= find_message_rows(self._connection, self._cache, operation.ids)

    def _flush(self) -> None:
        deleted, self._deleted = self._deleted, []
        inserted, self._inserted = self._inserted, []
        if deleted:
            self._connection.execute_in("DELETE FROM message WHERE seq IN ({})", deleted)
        if inserted:
            insert_messages(self._connection, inserted)
        if self._changed_senders:
            changed, self._changed_senders = self._changed_senders, {}
            rows = [(id_, queue.senders.text()) for id_, queue in changed.items() if queue.senders is not None]
            self._connection.execute_values(_UPDATE_SENDERS, rows)
        if self._marked:
            marked, self._marked = self._marked, {}
            for node, ids in marked.items():
                mark_delivered(self._connection, list(ids), node)


def enqueue_all(connection: StoreConnection, operations: Sequence[EnqueueOperation]) -> list[EnqueueResult]:
    """
    Several enqueues, all or none.

    :raise UnknownRecipient: one of the DIDs is not registered.
    :raise QueueFull: one of them is refused.
    """
    dids = dict.fromkeys([operation.request.recipient_did for operation in operations])
    queues = connection.get_cache(QueueCache).find(connection, dids)
    if len(queues) < len(dids):
        raise UnknownRecipient()
    if operations and operations[0].limits.when_full == "refuse":
        addressed = [(queues[operation.request.recipient_did], operation) for operation in operations]
        check_capacity(connection, operations[0].limits, addressed)
    counters = QueueCounters()
    results = [
        enqueue_with_eviction(connection, queues[operation.request.recipient_did], operation, counters)
        for operation in operations
    ]
    counters.write(connection)
    return results


def enqueue_with_eviction(
    connection: StoreConnection, queue: CachedQueue, operation: EnqueueOperation, counters: QueueCounters
) -> EnqueueResult:
    """
    Append to a queue whose messages are all in the table, and make room in it; payloads that are too large for the
    queue are evicted at once.

    :param counters: to be written by the caller.
    """
    request, limits = operation.request, operation.limits
    fitting = [payload for payload in request.payloads if len(payload.data) <= limits.max_bytes]
    coming = MessageVolume(len(fitting), sum([len(payload.data) for payload in fitting]))
    victims = _choose_victims(connection, limits, queue, request.origin, coming)
    insert_messages(connection, [(queue, operation, payload) for payload in fitting])
    connection.execute_in("DELETE FROM message WHERE seq IN ({})", [message.seq for message, _ in victims])
    for message, _ in victims:
        counters.add(queue, -1, -message.size, message.origin)
    counters.add(queue, coming.messages, coming.size, request.origin)
    evicted = [message.make_removed(reason) for message, reason in victims]
    evicted += [
        RemovedMessage(
            payload.id, request.recipient_did, queue.account, len(payload.data), operation.now, 0, "fifo_bytes"
        )
        for payload in request.payloads
        if len(payload.data) > limits.max_bytes
    ]
    connection.add_ledger_entry("didcomm", "accepted", len(request.payloads))
    connection.add_ledger_entry("didcomm", "evicted", len(evicted))
    return operation.make_result(queue.account, evicted)


def insert_messages(
    connection: StoreConnection, messages: Sequence[tuple[CachedQueue, EnqueueOperation, Payload]]
) -> None:
    """Append messages in this order to queues that have room for them."""
    rows = []
    for queue, operation, payload in messages:
        request, data = operation.request, payload.data
        digest = sha256(data).digest()
        rows.append(
            (
                payload.id,
                queue.recipient_id,
                queue.account_id,
                payload.form,
                len(data),
                operation.now,
                request.expires_at,
                request.due_at,
                get_digest_head(digest),
                digest,
                data,
                request.origin,
            )
        )
    connection.insert_rows(_INSERT_MESSAGES, rows)


def mark_delivered(connection: StoreConnection, ids: Sequence[str], node: str = "") -> None:
    number = get_or_create_node(connection, node) if node else NO_NODE_ID
    connection.execute_in("UPDATE message SET delivered = ?, pushes = pushes + 1 WHERE id IN ({})", ids, number)


def mark_pending(connection: StoreConnection, ids: Iterable[str]) -> list[str]:
    wanted = filter_valid_ids(ids)
    rows = connection.select_rows_in("id", "FROM message WHERE id IN ({}) AND +delivered > 0", wanted)
    delivered = {id for (id,) in rows}
    pending = [id for id in wanted if id in delivered]
    connection.execute_in("UPDATE message SET delivered = 0 WHERE id IN ({})", pending)
    return pending


def purge_messages(connection: StoreConnection, ids: Iterable[str]) -> list[RemovedMessage]:
    """Remove messages of any account for the operator."""
    wanted = list(dict.fromkeys(ids))
    found = find_message_rows(connection, connection.get_cache(QueueCache), wanted)
    return _remove_messages(connection, [found[id] for id in wanted if id in found], "removed")


def expire_messages(connection: StoreConnection, now: float, limit: int, max_bytes: int) -> list[RemovedMessage]:
    """Remove expired messages, at most `limit` and as many as fit in `max_bytes`, but at least one."""
    fitting: list[list[Any]] = []
    for row in connection.select_rows(MESSAGE_ROW_COLUMNS, _SELECT_EXPIRED, (now, max(limit, 0))):
        max_bytes -= row[3]
        if fitting and max_bytes < 0:
            break
        fitting.append(row)
    messages = parse_message_rows(connection.get_cache(QueueCache), connection, fitting)
    return _remove_messages(connection, messages, "expired", "ttl")


def find_message_rows(connection: StoreConnection, cache: QueueCache, ids: Sequence[str]) -> dict[str, MessageRow]:
    """Messages with these ids, with their origins."""
    rows = connection.select_rows_in(f"{MESSAGE_ROW_COLUMNS}, {ORIGIN_COLUMN}", "FROM message WHERE id IN ({})", ids)
    messages = {}
    for message in parse_message_rows(cache, connection, rows):
        messages[message.id] = message
    return messages


def _remove_messages(
    connection: StoreConnection,
    messages: Sequence[MessageRow],
    entry: LedgerEntry,
    reason: RemovalReason | None = None,
) -> list[RemovedMessage]:
    counters = QueueCounters()
    removed = [message.make_removed(reason) for message in messages]
    connection.execute_in("DELETE FROM message WHERE seq IN ({})", [message.seq for message in messages])
    for message in messages:
        counters.add(message.queue, -1, -message.size)
    counters.write(connection)
    connection.add_ledger_entry("didcomm", entry, len(messages))
    return removed


def check_capacity(
    connection: StoreConnection, limits: QueueLimits, operations: Sequence[tuple[CachedQueue, EnqueueOperation]]
) -> None:
    """
    Check enqueues in order against the limits of their queues.

    :raise QueueFull: one of them is to be refused.
    """
    totals: dict[int, MessageVolume] = {}
    counted: list[tuple[SenderUsage, int, MessageVolume]] = []
    try:
        for queue, operation in operations:
            origin, coming = operation.request.origin, MessageVolume(len(operation.request.payloads), operation.size)
            total = totals.setdefault(queue.recipient_id, MessageVolume(queue.messages, queue.size))
            total.add(coming.messages, coming.size)
            if find_exceeded_limit(limits, total.messages, total.size) is not None:
                raise QueueFull()
            if len(operations) > 1 or may_exceed_share(limits, origin, total):
                usage = load_eviction_state(connection, limits, queue).usage
                usage.check(origin, coming)
                usage.change(origin, coming.messages, coming.size)
                counted.append((usage, origin, coming))
    finally:
        # They are counted when they are enqueued.
        for usage, origin, coming in counted:
            usage.change(origin, -coming.messages, -coming.size)


def _choose_victims(
    connection: StoreConnection, limits: QueueLimits, queue: CachedQueue, origin: int, coming: MessageVolume
) -> list[_EvictionVictim]:
    """
    Messages to be evicted so that an enqueue fits, in order.

    :param coming: the part of the enqueue that is kept.
    """
    total = MessageVolume(queue.messages, queue.size).plus(coming)
    if find_exceeded_limit(limits, total.messages, total.size) is None:
        return []
    needs_usage = needs_sender_usage(limits, origin)
    if needs_usage:
        state = load_eviction_state(connection, limits, queue)
    else:
        state = EvictionState(SenderUsage(limits, frozenset()))
    victims: list[_EvictionVictim] = []
    scan = _EvictionScan(connection, queue, state)
    while reason := find_exceeded_limit(limits, total.messages, total.size):
        rows = 1 if total.size <= limits.max_bytes else _ROWS_PER_SCAN
        scan.rows_wanted = max(total.messages - limits.max_messages, rows)
        group = state.usage.victim(origin, coming, scan.get_oldest_origin)
        message = scan.choose_oldest(group)
        if message is None:
            break
        total.add(-1, -message.size)
        if needs_usage:
            state.usage.change(message.origin, -1, -message.size)
        victims.append((message, reason))
    if needs_usage:
        # They are counted when they are deleted.
        for message, _ in victims:
            state.usage.change(message.origin, 1, message.size)
    return victims


def load_eviction_state(connection: StoreConnection, limits: QueueLimits, queue: CachedQueue) -> EvictionState:
    """
    Usage of a queue by sender, read from an index, since the table has origins behind the payloads, and cached: a
    full queue receives the next message soon.
    """
    if queue.eviction_state is None:
        cache = connection.get_cache(QueueCache)
        load_known_senders(cache, connection, [queue])
        known = queue.senders.known if queue.senders is not None else frozenset[int]()
        rows = connection.select_rows("origin, size", _QUEUE_ROWS, (queue.recipient_id,))
        usage = SenderUsage(limits, known, [(origin, 1, size) for origin, size in rows])
        cache.keep_eviction_state(queue, EvictionState(usage))
        cache.trim_known_senders()
    assert queue.eviction_state is not None
    return queue.eviction_state


class _EvictionScan:
    """
    Messages of a queue by group of senders, oldest first, read as they are needed.

    :ivar rows_wanted: rows to read at a time.
    """

    def __init__(self, connection: StoreConnection, queue: CachedQueue, state: EvictionState) -> None:
        self._connection = connection
        self._queue = queue
        self._state = state
        self._candidates: dict[SenderGroup, deque[MessageRow]] = {}
        # By group, the place behind which to go on.
        self._after: dict[SenderGroup, int] = {}
        self._chosen: set[int] = set()
        self.rows_wanted = 1

    def get_oldest_origin(self, group: SenderGroup) -> int | None:
        """The origin of the first message of a group that is not chosen."""
        message = self._find_oldest(group)
        return None if message is None else message.origin

    def choose_oldest(self, group: SenderGroup | None) -> MessageRow | None:
        """Choose the first message of a group; None if there is none."""
        message = None if group is None else self._find_oldest(group)
        if group is not None and message is not None:
            self._chosen.add(message.seq)
            if group != SenderGroup():
                self._state.scanned_until[group] = message.seq
        return message

    def _find_oldest(self, group: SenderGroup) -> MessageRow | None:
        """The first message of a group that is not chosen."""
        candidates = self._candidates.setdefault(group, deque())
        while True:
            while candidates and candidates[0].seq in self._chosen:
                candidates.popleft()
            if candidates:
                return candidates[0]
            after = self._after.get(group, self._state.scanned_until.get(group, -1))
            source = _OLDEST_ROWS.format(_format_group_condition(group, self._state.usage.known))
            parameters = self._queue.recipient_id, after, self.rows_wanted
            rows = self._connection.select_rows(f"{MESSAGE_ROW_COLUMNS}, some.came", source, parameters)
            if not rows:
                return None
            for seq, id_, _, size, seconds, fraction, pushes, origin in rows:
                candidates.append(MessageRow(self._queue, seq, id_, size, seconds + fraction, pushes, origin))
            self._after[group] = candidates[-1].seq


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
