"""
Changes of messages in SQL: enqueue with eviction, acknowledgement, delivery marks, expiry. Each function runs inside
a transaction of the caller.

SQLite releases the interpreter's lock at every step of a statement, and gets it back when the reactor lets go of it:
the cost of an operation is mostly its number of steps. So enqueues, removals and marks that are neighbours in a batch
share one statement that deletes, one that inserts, one that marks and one that counts; the results are those of doing
one after the other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from sqlite3 import Connection
from typing import Any

from mediatord.errors import QueueFull, ReplayCacheFull, UnknownRecipient
from mediatord.store.fair_share import (
    ANONYMOUS,
    AUTHENTICATED,
    NETWORK_MASK,
    SENDER_MASK,
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
    Payload,
    QueueLimits,
    RemovalReason,
    RemovedMessage,
    StoredMessage,
)
from mediatord.store.message_operations import LedgerEntry
from mediatord.store.sqlite.bulk_sql import execute_in, get_digest_head, insert_rows, select_rows, select_rows_in
from mediatord.store.sqlite.coordination_queries import NO_NODE_ID, NonceClaim, claim_nonces, get_or_create_node
from mediatord.store.sqlite.group_commit import OperationOutcome
from mediatord.store.sqlite.message_queries import get_queue_status
from mediatord.store.sqlite.queue_accounting import (
    MESSAGE_ROW_COLUMNS,
    ORIGIN_COLUMN,
    CachedQueue,
    EvictionState,
    MessageRow,
    QueueCache,
    QueueCounters,
    StoreConnection,
    load_known_senders,
    parse_message_rows,
    save_known_senders,
)

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

# A message and its origin.
_EvictionCandidate = tuple[MessageRow, int]
# The same with the limit that its queue exceeded.
EvictionVictim = tuple[MessageRow, int, RemovalReason]


def run_message_operations(
    connection: StoreConnection, operations: Sequence[EnqueueOperation | RemoveOperation | MarkDeliveredOperation]
) -> list[OperationOutcome]:
    """Perform neighbouring operations of a batch together."""
    return _MessageOperationRun(connection, operations).run()


@dataclass(slots=True)
class EnqueueOperation:
    """
    Enqueue as an operation of a batch.

    :param size: bytes of all payloads.
    """

    request: EnqueueRequest
    limits: QueueLimits
    now: float
    size: int

    run_batch = staticmethod(run_message_operations)

    def make_result(self, account: str, evicted: Iterable[RemovedMessage] = ()) -> EnqueueResult:
        request, stored = self.request, []
        for payload in request.payloads:
            stored.append(
                StoredMessage(
                    payload.id,
                    request.recipient_did,
                    account,
                    payload.data,
                    payload.form,
                    self.now,
                    request.expires_at,
                    "pending",
                    request.due_at,
                )
            )
        return EnqueueResult(tuple(stored), tuple(evicted))


@dataclass(slots=True)
class RemoveOperation:
    """
    Removal of messages as an operation of a batch.

    :param ids: of messages, each once.
    :param account: the only one whose messages are removed, in order of arrival; None for those of any account, in
        this order.
    :param now: time of the acknowledgement.
    :param claim: a nonce without which nothing is removed. The operation then returns an
        :class:`~mediatord.store.interfaces.messages.AcknowledgementResult`, or None if the nonce is not new.
    :param max_nonces: number of nonces that are kept.
    :param with_status: whether that result has the status of the account's queues.
    """

    ids: Sequence[str]
    account: str | None
    now: float
    claim: NonceClaim | None = None
    max_nonces: int = 0
    with_status: bool = False

    run_batch = staticmethod(run_message_operations)


@dataclass(slots=True)
class MarkDeliveredOperation:
    """
    Mark of messages as delivered, as an operation of a batch.

    :param ids: of messages, each once.
    """

    ids: Sequence[str]
    node: str

    run_batch = staticmethod(run_message_operations)


class _MessageOperationRun:
    """Performs neighbouring operations, collecting rows until a statement has to see them."""

    def __init__(
        self,
        connection: StoreConnection,
        operations: Sequence[EnqueueOperation | RemoveOperation | MarkDeliveredOperation],
    ) -> None:
        self._connection = connection
        self._operations = operations
        self._cache = connection.get_queue_cache()
        dids: dict[str, None] = {}
        ids: dict[str, None] = {}
        claims: list[NonceClaim] = []
        max_nonces = 0
        for operation in operations:
            if isinstance(operation, EnqueueOperation):
                dids[operation.request.recipient_did] = None
            elif isinstance(operation, RemoveOperation):
                ids.update(dict.fromkeys(operation.ids))
                if operation.claim is not None:
                    claims.append(operation.claim)
                    max_nonces = operation.max_nonces
        self._claimed = iter(claim_nonces(connection, claims, max_nonces) if claims else ())
        self._queues = self._cache.find(connection, dids) if dids else {}
        self._messages = find_message_rows(connection, self._cache, list(ids)) if ids else {}
        self._counters = QueueCounters()
        self._inserted: list[tuple[CachedQueue, EnqueueOperation, Payload]] = []
        self._deleted: list[int] = []
        self._marked: dict[str, dict[str, None]] = {}
        self._changed_senders: dict[int, CachedQueue] = {}
        self._enqueued_ids: set[str] | None = None
        self._accepted = self._acknowledged = 0

    def run(self) -> list[OperationOutcome]:
        """Outcome of each operation, in order."""
        outcomes: list[OperationOutcome] = []
        wants_status = False
        for operation in self._operations:
            if isinstance(operation, EnqueueOperation):
                outcomes.append(self._enqueue(operation))
            elif isinstance(operation, RemoveOperation):
                outcomes.append(self._remove(operation))
                wants_status = wants_status or operation.with_status
            else:
                outcomes.append(self._mark(operation))
        self._flush()
        self._counters.write(self._connection)
        if self._accepted:
            self._connection.add_ledger_entry("didcomm", "accepted", self._accepted)
        if self._acknowledged:
            self._connection.add_ledger_entry("didcomm", "acknowledged", self._acknowledged)
        if wants_status:
            self._add_statuses(outcomes)
        return outcomes

    def _enqueue(self, operation: EnqueueOperation) -> OperationOutcome:
        request, limits = operation.request, operation.limits
        queue = self._queues.get(request.recipient_did)
        if queue is None:
            return OperationOutcome(error=UnknownRecipient())
        messages, size = queue.messages + len(request.payloads), queue.size + operation.size
        if messages > limits.max_messages or size > limits.max_bytes:
            if limits.when_full == "refuse":
                return OperationOutcome(error=QueueFull())
            # Earlier messages are inserted first, so that the order is kept.
            self._flush()
            result = enqueue_with_eviction(self._connection, queue, operation, self._counters)
            for one in result.evicted:
                self._messages.pop(one.id, None)
            return OperationOutcome(result)
        if limits.when_full == "refuse" and may_exceed_share(limits, request.origin, MessageVolume(messages, size)):
            self._flush()
            try:
                check_capacity(self._connection, limits, [(queue, operation)])
            except QueueFull as error:
                return OperationOutcome(error=error.with_traceback(None))
        self._accepted += len(request.payloads)
        self._counters.add(queue, len(request.payloads), operation.size, request.origin)
        for payload in request.payloads:
            self._inserted.append((queue, operation, payload))
        return OperationOutcome(operation.make_result(queue.account))

    def _remove(self, operation: RemoveOperation) -> OperationOutcome:
        if operation.claim is not None:
            claimed = next(self._claimed)
            if isinstance(claimed, ReplayCacheFull):
                return OperationOutcome(error=claimed)
            if not claimed:
                return OperationOutcome()
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
        return OperationOutcome(removed if operation.claim is None else AcknowledgementResult(removed))

    def _add_statuses(self, outcomes: Sequence[OperationOutcome]) -> None:
        for operation, outcome in zip(self._operations, outcomes, strict=True):
            if isinstance(operation, RemoveOperation) and operation.with_status and outcome.value is not None:
                assert operation.account is not None
                status = get_queue_status(self._connection, operation.account, None, operation.now)
                outcome.value = AcknowledgementResult(outcome.value.removed, status)

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

    def _mark(self, operation: MarkDeliveredOperation) -> OperationOutcome:
        if any(not marked.keys().isdisjoint(operation.ids) for marked in self._marked.values()):
            self._flush()  # one update changes a message once
        for id_ in operation.ids:
            if id_ in self._messages:
                self._messages[id_].pushes += 1
        self._marked.setdefault(operation.node, {}).update(dict.fromkeys(operation.ids))
        return OperationOutcome()

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
            execute_in(self._connection, "DELETE FROM message WHERE seq IN ({})", deleted)
        if inserted:
            insert_messages(self._connection, inserted)
        if self._changed_senders:
            save_known_senders(self._connection, self._changed_senders.values())
            self._changed_senders = {}
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
    queues = connection.get_queue_cache().find(connection, dids)
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
    victims = choose_victims(connection, limits, queue, request.origin, coming)
    insert_messages(connection, [(queue, operation, payload) for payload in fitting])
    execute_in(connection, "DELETE FROM message WHERE seq IN ({})", [message.seq for message, _, _ in victims])
    for message, origin, _ in victims:
        counters.add(queue, -1, -message.size, origin)
    counters.add(queue, coming.messages, coming.size, request.origin)
    evicted = [message.make_removed(reason) for message, _, reason in victims]
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
    connection: Connection, messages: Sequence[tuple[CachedQueue, EnqueueOperation, Payload]]
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
    insert_rows(connection, _INSERT_MESSAGES, rows)


def mark_delivered(connection: Connection, ids: Sequence[str], node: str = "") -> None:
    number = get_or_create_node(connection, node) if node else NO_NODE_ID
    execute_in(connection, "UPDATE message SET delivered = ?, pushes = pushes + 1 WHERE id IN ({})", ids, number)


def mark_pending(connection: Connection, ids: Iterable[str]) -> list[str]:
    wanted = list(dict.fromkeys(ids))
    rows = select_rows_in(connection, "id", "FROM message WHERE id IN ({}) AND +delivered > 0", wanted)
    delivered = {id for (id,) in rows}
    pending = [id for id in wanted if id in delivered]
    execute_in(connection, "UPDATE message SET delivered = 0 WHERE id IN ({})", pending)
    return pending


def purge_messages(connection: StoreConnection, ids: Iterable[str]) -> list[RemovedMessage]:
    """Remove messages of any account for the operator."""
    wanted = list(dict.fromkeys(ids))
    found = find_message_rows(connection, connection.get_queue_cache(), wanted)
    return _remove_messages(connection, [found[id] for id in wanted if id in found], "removed")


def expire_messages(connection: StoreConnection, now: float, limit: int, max_bytes: int) -> list[RemovedMessage]:
    """Remove expired messages, at most `limit` and as many as fit in `max_bytes`, but at least one."""
    fitting: list[list[Any]] = []
    for row in select_rows(connection, MESSAGE_ROW_COLUMNS, _SELECT_EXPIRED, (now, max(limit, 0))):
        max_bytes -= row[3]
        if fitting and max_bytes < 0:
            break
        fitting.append(row)
    messages = parse_message_rows(connection.get_queue_cache(), connection, fitting)
    return _remove_messages(connection, messages, "expired", "ttl")


def find_message_rows(connection: Connection, cache: QueueCache, ids: Sequence[str]) -> dict[str, MessageRow]:
    """Messages with these ids, with their origins."""
    rows = select_rows_in(connection, f"{MESSAGE_ROW_COLUMNS}, {ORIGIN_COLUMN}", "FROM message WHERE id IN ({})", ids)
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
    execute_in(connection, "DELETE FROM message WHERE seq IN ({})", [message.seq for message in messages])
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


def choose_victims(
    connection: StoreConnection, limits: QueueLimits, queue: CachedQueue, origin: int, coming: MessageVolume
) -> list[EvictionVictim]:
    """
    Messages to be evicted so that an enqueue fits, in order.

    :param coming: the part of the enqueue that is kept.
    """
    total = MessageVolume(queue.messages, queue.size).plus(coming)
    if find_exceeded_limit(limits, total.messages, total.size) is None:
        return []
    if not needs_sender_usage(limits, origin):
        state = EvictionState(SenderUsage(limits, frozenset()))
        return _EvictionPlan(connection, queue, state).choose(limits, origin, coming, total)
    state = load_eviction_state(connection, limits, queue)
    victims = _EvictionPlan(connection, queue, state).choose(limits, origin, coming, total)
    # They are counted when they are deleted.
    for message, its_origin, _ in victims:
        state.usage.change(its_origin, 1, message.size)
    return victims


def load_eviction_state(connection: StoreConnection, limits: QueueLimits, queue: CachedQueue) -> EvictionState:
    """
    Usage of a queue by sender, read from an index, since the table has origins behind the payloads, and cached: a
    full queue receives the next message soon.
    """
    if queue.eviction_state is None:
        cache = connection.get_queue_cache()
        load_known_senders(cache, connection, [queue])
        known = queue.senders.known if queue.senders is not None else frozenset[int]()
        rows = select_rows(connection, "origin, size", _QUEUE_ROWS, (queue.recipient_id,))
        usage = SenderUsage(limits, known, [(origin, 1, size) for origin, size in rows])
        cache.keep_eviction_state(queue, EvictionState(usage))
    assert queue.eviction_state is not None
    return queue.eviction_state


class _EvictionPlan:
    """Chooses the messages that make room for one enqueue."""

    def __init__(self, connection: Connection, queue: CachedQueue, state: EvictionState) -> None:
        self._connection = connection
        self._queue = queue
        self._state = state
        self._chosen: set[int] = set()
        self._scans: dict[SenderGroup, _EvictionScan] = {}
        self._rows_wanted = 1

    def choose(
        self, limits: QueueLimits, origin: int, coming: MessageVolume, total: MessageVolume
    ) -> list[EvictionVictim]:
        """
        Victims in order, until there is room; subtracted from the usage.

        :param total: volume of the queue with the enqueue; is changed.
        """
        victims: list[EvictionVictim] = []
        while reason := find_exceeded_limit(limits, total.messages, total.size):
            rows = 1 if total.size <= limits.max_bytes else _ROWS_PER_SCAN
            self._rows_wanted = max(total.messages - limits.max_messages, rows)
            group = self._state.usage.victim(origin, coming, self._get_oldest_origin)
            candidate = None if group is None else self._find_oldest(group)
            if group is None or candidate is None:
                break
            message, its_origin = candidate
            self._chosen.add(message.seq)
            if group != SenderGroup():
                self._state.scanned_until[group] = message.seq
            total.add(-1, -message.size)
            if needs_sender_usage(limits, origin):
                self._state.usage.change(its_origin, -1, -message.size)
            victims.append((message, its_origin, reason))
        return victims

    def _find_oldest(self, group: SenderGroup) -> _EvictionCandidate | None:
        scan = self._scans.get(group)
        if scan is None:
            condition = _format_group_condition(group, self._state.usage.known)
            after = self._state.scanned_until.get(group, -1)
            scan = self._scans[group] = _EvictionScan(self._connection, self._queue, condition, after)
        return scan.find_oldest(self._chosen, self._rows_wanted)

    def _get_oldest_origin(self, group: SenderGroup) -> int | None:
        candidate = self._find_oldest(group)
        return None if candidate is None else candidate[1]


class _EvictionScan:
    """
    Messages of a queue that meet a condition, oldest first, read as they are needed.

    :param after: place in the order of arrival behind which to begin.
    """

    def __init__(self, connection: Connection, queue: CachedQueue, condition: str, after: int) -> None:
        self._connection = connection
        self._queue = queue
        self._source = _OLDEST_ROWS.format(condition)
        self._after = after
        self._candidates: deque[_EvictionCandidate] = deque()

    def find_oldest(self, chosen: Container[int], number: int) -> _EvictionCandidate | None:
        """
        The first message that is not chosen.

        :param number: rows to read if there is none yet.
        """
        while True:
            while self._candidates and self._candidates[0][0].seq in chosen:
                self._candidates.popleft()
            if self._candidates or not self._read_more(number):
                return self._candidates[0] if self._candidates else None

    def _read_more(self, number: int) -> bool:
        parameters = self._queue.recipient_id, self._after, number
        rows = select_rows(self._connection, f"{MESSAGE_ROW_COLUMNS}, some.came", self._source, parameters)
        for seq, id_, _, size, seconds, fraction, pushes, origin in rows:
            message = MessageRow(self._queue, seq, id_, size, seconds + fraction, pushes)
            self._candidates.append((message, origin))
            self._after = seq
        return bool(rows)


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
