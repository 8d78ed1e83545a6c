"""
Room in a queue, in SQL; each function runs inside a transaction of the caller, and all messages of the queue are in
the table.

Who has how much of a queue is read from an index, since the table has it behind the payloads, and remembered: a queue
that is full gets the next deposit soon.

What changes the messages, in SQL; each function runs inside a transaction of the caller.

Many deposits, acknowledgements and marks in few statements.

SQLite gives the interpreter's lock back at every step of a statement, and has it again when the reactor lets it: what
a deposit costs is mostly the number of steps. Deposits, removals and marks that stand next to each other in a batch
share a statement that deletes, one that inserts, one that marks and one that counts; what comes of them is what would
have come of one after the other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from sqlite3 import Connection
from typing import Any

from mediatord.errors import QueueFull, UnknownRecipient
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
    EnqueueResult,
    Payload,
    QueueLimits,
    RemovalReason,
    RemovedMessage,
    StoredMessage,
)
from mediatord.store.message_operations import LedgerEntry
from mediatord.store.sqlite.bulk_sql import execute_in, insert_rows, select_rows, select_rows_in
from mediatord.store.sqlite.coordination_queries import NO_NODE_ID, get_or_create_node
from mediatord.store.sqlite.group_commit import OperationOutcome, SQLOperation
from mediatord.store.sqlite.queue_accounting import (
    MESSAGE_ROW_COLUMNS,
    ORIGIN_COLUMN,
    CachedQueue,
    EvictionState,
    MessageRow,
    QueueCache,
    QueueCounters,
    add_ledger_entry,
    get_queue_cache,
    load_known_senders,
    parse_message_row,
    save_known_senders,
)

# Of large messages, of which a few may do.
_ROWS_PER_SCAN = 32
_QUEUE_ROWS = "FROM message INDEXED BY message_of_recipient WHERE recipient_id = ?"
# The subquery is answered by the index alone. CROSS JOIN, because its order is to be kept.
_OLDEST_ROWS = f"""
    FROM (SELECT seq AS place, origin AS came {_QUEUE_ROWS} AND seq > ? AND {{}} ORDER BY seq LIMIT ?) some
    CROSS JOIN message ON seq = some.place
"""

# A message and its origin.
_EvictionCandidate = tuple[MessageRow, int]
# With the limit that its queue was over.
EvictionVictim = tuple[MessageRow, int, RemovalReason]


def check_capacity(
    connection: Connection, limits: QueueLimits, orders: Sequence[tuple[CachedQueue, int, int, int]]
) -> None:
    """
    Deposits in order, each with its queue, origin, messages and bytes.

    :raise QueueFull: one of them is to be refused.
    """
    wholes: dict[int, MessageVolume] = {}
    coming: list[tuple[SenderUsage, int, MessageVolume]] = []
    try:
        for queue, origin, messages, size in orders:
            whole = wholes.setdefault(queue.recipient_id, MessageVolume(queue.messages, queue.size))
            whole.add(messages, size)
            if find_exceeded_limit(limits, whole.messages, whole.size) is not None:
                raise QueueFull()
            if len(orders) > 1 or may_exceed_share(limits, origin, whole):
                usage, amount = load_eviction_state(connection, limits, queue).usage, MessageVolume(messages, size)
                usage.check(origin, amount)
                usage.change(origin, messages, size)
                coming.append((usage, origin, amount))
    finally:
        # It is counted when it is deposited.
        for usage, origin, amount in coming:
            usage.change(origin, -amount.messages, -amount.size)


def choose_victims(
    connection: Connection, limits: QueueLimits, queue: CachedQueue, origin: int, coming: MessageVolume
) -> list[EvictionVictim]:
    """
    What has to go so that a deposit fits beside the rest, in order.

    :param coming: what of it will be kept.
    """
    whole = MessageVolume(queue.messages, queue.size).plus(coming)
    if find_exceeded_limit(limits, whole.messages, whole.size) is None:
        return []
    if not needs_sender_usage(limits, origin):
        return _EvictionPlan(connection, queue, EvictionState(SenderUsage(limits, frozenset()))).victims(
            limits, origin, coming, whole
        )
    standing = load_eviction_state(connection, limits, queue)
    found = _EvictionPlan(connection, queue, standing).victims(limits, origin, coming, whole)
    # They are counted out when they are deleted.
    for victim, came, _ in found:
        standing.change(came, 1, victim.size)
    return found


class _EvictionPlan:
    """Looks for what makes room for a deposit."""

    def __init__(self, connection: Connection, queue: CachedQueue, standing: EvictionState) -> None:
        self._connection = connection
        self._queue = queue
        self._standing = standing
        self._taken: set[int] = set()
        self._lanes: dict[SenderGroup, _EvictionScan] = {}
        self._number = 1

    def victims(
        self, limits: QueueLimits, origin: int, coming: MessageVolume, whole: MessageVolume
    ) -> list[EvictionVictim]:
        """
        Until there is room, in order; counted out of the standing.

        :param whole: what waits, with what comes; is changed.
        """
        found: list[EvictionVictim] = []
        while reason := find_exceeded_limit(limits, whole.messages, whole.size):
            self._number = max(
                whole.messages - limits.max_messages, 1 if whole.size <= limits.max_bytes else _ROWS_PER_SCAN
            )
            part = self._standing.usage.victim(origin, coming, self._origin)
            candidate = None if part is None else self._oldest(part)
            if part is None or candidate is None:
                break
            victim, came = candidate
            self._taken.add(victim.seq)
            if part != SenderGroup():
                self._standing.behind[part] = victim.seq
            whole.add(-1, -victim.size)
            if needs_sender_usage(limits, origin):
                self._standing.change(came, -1, -victim.size)
            found.append((victim, came, reason))
        return found

    def _oldest(self, part: SenderGroup) -> _EvictionCandidate | None:
        lane = self._lanes.get(part)
        if lane is None:
            condition = _format_group_condition(part, self._standing.usage.known)
            lane = _EvictionScan(self._connection, self._queue, condition, self._standing.behind.get(part, -1))
            self._lanes[part] = lane
        return lane.oldest(self._taken, self._number)

    def _origin(self, part: SenderGroup) -> int | None:
        candidate = self._oldest(part)
        return None if candidate is None else candidate[1]


def load_eviction_state(connection: Connection, limits: QueueLimits, queue: CachedQueue) -> EvictionState:
    """Who has how much of a queue."""
    if queue.standing is None:
        load_known_senders(connection, [queue])
        known = queue.senders.known if queue.senders is not None else frozenset[int]()
        rows = select_rows(connection, "origin, size", _QUEUE_ROWS, (queue.recipient_id,))
        usage = SenderUsage(limits, known, [(origin, 1, size) for origin, size in rows])
        get_queue_cache(connection).keep_eviction_state(queue, EvictionState(usage))
    assert queue.standing is not None
    return queue.standing


class _EvictionScan:
    """
    Some messages of a queue, the oldest first; read when they are asked for.

    :param condition: what finds them.
    :param after: where in the order of arrival to begin.
    """

    def __init__(self, connection: Connection, queue: CachedQueue, condition: str, after: int) -> None:
        self._connection = connection
        self._queue = queue
        self._source = _OLDEST_ROWS.format(condition)
        self._after = after
        self._read: deque[_EvictionCandidate] = deque()

    def oldest(self, taken: Container[int], number: int) -> _EvictionCandidate | None:
        """
        The first that is not taken.

        :param number: as many as may be wanted soon.
        """
        while True:
            while self._read and self._read[0][0].seq in taken:
                self._read.popleft()
            if self._read or not self._read_more(number):
                return self._read[0] if self._read else None

    def _read_more(self, number: int) -> bool:
        queue = self._queue
        parameters = queue.recipient_id, self._after, number
        rows = select_rows(self._connection, f"{MESSAGE_ROW_COLUMNS}, some.came", self._source, parameters)
        self._read += [(parse_message_row(queue, row[:-1]), row[-1]) for row in rows]
        if rows:
            self._after = rows[-1][0]
        return bool(rows)


def _format_group_condition(part: SenderGroup, known: frozenset[int]) -> str:
    """What finds some messages by their origin; numbers only."""
    rank, network, sender = part
    conditions = ["1"]
    if sender is not None:
        conditions.append(f"origin & {SENDER_MASK} = {sender}")
    if network is not None:
        conditions.append(f"origin & {NETWORK_MASK} = {network}")
    if rank is not None:
        numbers = ", ".join(map(str, sorted(known)))
        # The party of an origin, see :func:`~mediatord.store.fair_share.get_party`.
        is_known = f"CASE origin & {SENDER_MASK} WHEN 0 THEN origin & {NETWORK_MASK} ELSE origin & {SENDER_MASK} END IN ({numbers})"
        if rank == ANONYMOUS:
            conditions.append(f"origin & {SENDER_MASK} = 0 AND NOT {is_known}")
        elif rank == AUTHENTICATED:
            conditions.append(f"origin & {SENDER_MASK} <> 0 AND NOT {is_known}")
        else:
            conditions.append(is_known)
    return " AND ".join(conditions)


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


@dataclass(slots=True)
class TimedEnqueueRequest:
    """What is to be queued for whom."""

    recipient_did: str
    payloads: Sequence[Payload]
    now: float
    expires_at: float
    due_at: float | None
    origin: int = 0

    @property
    def size(self) -> int:
        """Bytes of all payloads."""
        if len(self.payloads) == 1:
            return len(self.payloads[0].data)
        return sum([len(payload.data) for payload in self.payloads])

    def enqueued(self, account: str, evicted: Iterable[RemovedMessage] = ()) -> EnqueueResult:
        if len(self.payloads) == 1:
            return EnqueueResult((self._stored(self.payloads[0], account),), tuple(evicted))
        return EnqueueResult(tuple([self._stored(payload, account) for payload in self.payloads]), tuple(evicted))

    def _stored(self, payload: Payload, account: str) -> StoredMessage:
        return StoredMessage(
            payload.id,
            self.recipient_did,
            account,
            payload.data,
            payload.form,
            self.now,
            self.expires_at,
            "pending",
            self.due_at,
        )

    def oversize(self, payload: Payload, account: str) -> RemovedMessage:
        return RemovedMessage(payload.id, self.recipient_did, account, len(payload.data), self.now, 0, "fifo_bytes")


def enqueue(connection: Connection, limits: QueueLimits, order: TimedEnqueueRequest) -> EnqueueResult:
    """
    Append to a queue and make room in it; too large ones are out again at once.

    :raise UnknownRecipient: nobody has registered the DID.
    :raise QueueFull: it is to be refused.
    """
    counts = QueueCounters()
    queue = get_queue_cache(connection).find(connection, [order.recipient_did]).get(order.recipient_did)
    if queue is None:
        raise UnknownRecipient()
    if limits.when_full == "refuse":
        check_capacity(connection, limits, [(queue, order.origin, len(order.payloads), order.size)])
    enqueued = enqueue_in_queue(connection, limits, queue, order, counts)
    counts.write(connection)
    return enqueued


def enqueue_in_queue(
    connection: Connection, limits: QueueLimits, queue: CachedQueue, order: TimedEnqueueRequest, counts: QueueCounters
) -> EnqueueResult:
    """As :func:`deposit`, for a queue whose messages are all in the table; what changed is in `counts`."""
    fitting = [payload for payload in order.payloads if len(payload.data) <= limits.max_bytes]
    size = sum([len(payload.data) for payload in fitting])
    gone = choose_victims(connection, limits, queue, order.origin, MessageVolume(len(fitting), size))
    insert_messages(connection, [(queue, order, payload) for payload in fitting])
    delete_messages(connection, [one for one, _, _ in gone])
    for one, origin, _ in gone:
        counts.add(queue, -1, -one.size, origin)
    counts.add(queue, len(fitting), size, order.origin)
    evicted = [one.removed(reason) for one, _, reason in gone]
    if len(fitting) < len(order.payloads):
        evicted += [order.oversize(p, queue.account) for p in order.payloads if len(p.data) > limits.max_bytes]
    add_ledger_entry(connection, "didcomm", "accepted", len(order.payloads))
    add_ledger_entry(connection, "didcomm", "evicted", len(evicted))
    return order.enqueued(queue.account, evicted)


def mark_delivered(connection: Connection, ids: Iterable[str], node: str = "") -> None:
    number = get_or_create_node(connection, node) if node else NO_NODE_ID
    marking = "UPDATE message SET delivered = ?, pushes = pushes + 1 WHERE id IN ({})"
    execute_in(connection, marking, list(dict.fromkeys(ids)), number)


def mark_pending(connection: Connection, ids: Iterable[str]) -> list[str]:
    wanted = list(dict.fromkeys(ids))
    rows = select_rows_in(connection, "id", "FROM message WHERE id IN ({}) AND +delivered > 0", wanted)
    delivered = {id for (id,) in rows}
    pending = [id for id in wanted if id in delivered]
    execute_in(connection, "UPDATE message SET delivered = 0 WHERE id IN ({})", pending)
    return pending


def purge_messages(connection: Connection, ids: Iterable[str]) -> list[RemovedMessage]:
    """Remove by id, whoever it belongs to, because the operator wants it."""
    wanted = list(dict.fromkeys(ids))
    found = find_message_rows(connection, get_queue_cache(connection), wanted)
    return remove_messages(connection, [found[id] for id in wanted if id in found], "removed")


def expire_messages(connection: Connection, now: float, limit: int, max_bytes: int) -> list[RemovedMessage]:
    """The first that have expired, as many as fit in `max_bytes`, but at least one."""
    rows = select_rows(connection, MESSAGE_ROW_COLUMNS, _SELECT_EXPIRED, (now, max(limit, 0)))
    fitting: list[list[Any]] = []
    for row in rows:
        max_bytes -= row[3]
        if fitting and max_bytes < 0:
            break
        fitting.append(row)
    return remove_messages(
        connection, _parse_rows(connection, get_queue_cache(connection), fitting), "expired", "ttl"
    )


def find_message_rows(connection: Connection, known: QueueCache, ids: Sequence[str]) -> dict[str, MessageRow]:
    """What there is with these ids, with its origin."""
    rows = select_rows_in(connection, f"{MESSAGE_ROW_COLUMNS}, {ORIGIN_COLUMN}", "FROM message WHERE id IN ({})", ids)
    return {one.id: one for one in _parse_rows(connection, known, rows)}


def remove_messages(
    connection: Connection, messages: Sequence[MessageRow], entry: LedgerEntry, reason: RemovalReason | None = None
) -> list[RemovedMessage]:
    """Delete them and count them out."""
    counts = QueueCounters()
    removed = [one.removed(reason) for one in messages]
    delete_messages(connection, messages)
    for one in messages:
        counts.add(one.queue, -1, -one.size)
    counts.write(connection)
    add_ledger_entry(connection, "didcomm", entry, len(messages))
    return removed


def delete_messages(connection: Connection, messages: Sequence[MessageRow]) -> None:
    """Delete them; whoever does that counts them out."""
    execute_in(connection, "DELETE FROM message WHERE seq IN ({})", [one.seq for one in messages])


def insert_messages(connection: Connection, rows: Sequence[tuple[CachedQueue, TimedEnqueueRequest, Payload]]) -> None:
    """Append messages in this order, where there is room for them."""
    insert_rows(connection, _INSERT_MESSAGES, [_build_row(*row) for row in rows])


def _parse_rows(connection: Connection, known: QueueCache, rows: Sequence[list[Any]]) -> list[MessageRow]:
    queues = known.find_by_ids(connection, [row[2] for row in rows])
    return [parse_message_row(queues[row[2]], row) for row in rows]


def _build_row(queue: CachedQueue, order: TimedEnqueueRequest, payload: Payload) -> tuple[Any, ...]:
    data = payload.data
    digest = sha256(data).digest()
    return (
        payload.id,
        queue.recipient_id,
        queue.account_id,
        payload.form,
        len(data),
        order.now,
        order.expires_at,
        order.due_at,
        get_digest_head(digest),
        digest,
        data,
        order.origin,
    )


def get_digest_head(digest: bytes) -> int:
    """What stands for a digest in the index."""
    return int.from_bytes(digest[:8], "big", signed=True)


# What the works of this module have in common: they are done together.
MESSAGE_OPERATIONS = "traffic"


class EnqueueOperation:
    """A deposit as an operation of a batch."""

    kind = MESSAGE_OPERATIONS
    __slots__ = ("limits", "order")

    def __init__(self, order: TimedEnqueueRequest, limits: QueueLimits) -> None:
        self.order = order
        self.limits = limits

    def __call__(self, connection: Connection) -> EnqueueResult:
        """By itself; see :func:`~mediatord.store.sqlite.message_writes.enqueue`."""
        return enqueue(connection, self.limits, self.order)

    def together(self, connection: Connection, works: Sequence[SQLOperation]) -> list[OperationOutcome]:
        """This one and the deposits, removals and marks after it."""
        return _MessageOperationRun(connection, works).outcomes()


class RemoveOperation:
    """
    The removal of messages as an operation of a batch.

    :param ids: of messages.
    :param account: the only one whose messages count, in order of arrival; None for anybody's, in this order.
    :param now: when they are acknowledged.
    """

    kind = MESSAGE_OPERATIONS
    __slots__ = ("account", "ids", "now")

    def __init__(self, ids: Iterable[str], account: str | None, now: float) -> None:
        self.ids = tuple(dict.fromkeys(ids))
        self.account = account
        self.now = now

    def __call__(self, connection: Connection) -> list[RemovedMessage]:
        """By itself."""
        (outcome,) = _MessageOperationRun(connection, [self]).outcomes()
        removed: list[RemovedMessage] = outcome.value
        return removed

    def together(self, connection: Connection, works: Sequence[SQLOperation]) -> list[OperationOutcome]:
        """This one and the deposits, removals and marks after it."""
        return _MessageOperationRun(connection, works).outcomes()


class MarkDeliveredOperation:
    """A mark that messages were pushed as an operation of a batch."""

    kind = MESSAGE_OPERATIONS
    __slots__ = ("ids", "node")

    def __init__(self, ids: Iterable[str], node: str) -> None:
        self.ids = tuple(dict.fromkeys(ids))
        self.node = node

    def __call__(self, connection: Connection) -> None:
        """By itself."""
        mark_delivered(connection, self.ids, self.node)

    def together(self, connection: Connection, works: Sequence[SQLOperation]) -> list[OperationOutcome]:
        """This one and the deposits, removals and marks after it."""
        return _MessageOperationRun(connection, works).outcomes()


def enqueue_all(
    connection: Connection, limits: QueueLimits, orders: Sequence[TimedEnqueueRequest]
) -> list[EnqueueResult]:
    """
    Several deposits, all or none.

    :raise UnknownRecipient: nobody has registered one of the DIDs.
    :raise QueueFull: one of them is to be refused.
    """
    dids = list(dict.fromkeys([order.recipient_did for order in orders]))
    queues = get_queue_cache(connection).find(connection, dids)
    if len(queues) < len(dids):
        raise UnknownRecipient()
    if limits.when_full == "refuse":
        addressed = [(queues[order.recipient_did], order.origin, len(order.payloads), order.size) for order in orders]
        check_capacity(connection, limits, addressed)
    counts = QueueCounters()
    done = [enqueue_in_queue(connection, limits, queues[order.recipient_did], order, counts) for order in orders]
    counts.write(connection)
    return done


class _MessageOperationRun:
    """Deposits and removals in a row, with what is known of their queues."""

    def __init__(self, connection: Connection, works: Sequence[SQLOperation]) -> None:
        self._connection = connection
        self._works = works
        dids = dict.fromkeys([work.order.recipient_did for work in works if isinstance(work, EnqueueOperation)])
        ids = dict.fromkeys([id_ for work in works if isinstance(work, RemoveOperation) for id_ in work.ids])
        self._known = get_queue_cache(connection)
        self._queues = self._known.find(connection, list(dids)) if dids else {}
        self._waiting = find_message_rows(connection, self._known, list(ids)) if ids else {}
        self._counts = QueueCounters()
        self._rows: list[tuple[CachedQueue, TimedEnqueueRequest, Payload]] = []
        self._gone: list[MessageRow] = []
        self._marks: dict[str, dict[str, None]] = {}
        self._heard_of: dict[int, CachedQueue] = {}
        self._brought: set[str] | None = None
        self._accepted = self._acknowledged = 0

    def outcomes(self) -> list[OperationOutcome]:
        """What became of each, in order."""
        outcomes = [self._do(work) for work in self._works]
        self._flush()
        self._counts.write(self._connection)
        add_ledger_entry(self._connection, "didcomm", "accepted", self._accepted)
        add_ledger_entry(self._connection, "didcomm", "acknowledged", self._acknowledged)
        return outcomes

    def _do(self, work: SQLOperation) -> OperationOutcome:
        if isinstance(work, EnqueueOperation):
            return self._deposit(work)
        if isinstance(work, RemoveOperation):
            return self._remove(work)
        assert isinstance(work, MarkDeliveredOperation)
        return self._mark(work)

    def _deposit(self, work: EnqueueOperation) -> OperationOutcome:
        order, limits = work.order, work.limits
        queue = self._queues.get(order.recipient_did)
        if queue is None:
            return OperationOutcome(error=UnknownRecipient())
        payloads = order.payloads
        size = order.size
        messages, total = queue.messages + len(payloads), queue.size + size
        if messages > limits.max_messages or total > limits.max_bytes:
            return self._make_room(queue, order, limits)
        if limits.when_full == "refuse" and may_exceed_share(limits, order.origin, MessageVolume(messages, total)):
            if self._is_refused(queue, order, limits):
                return OperationOutcome(error=QueueFull())
        self._accepted += len(payloads)
        self._counts.add(queue, len(payloads), size, order.origin)
        for payload in payloads:
            self._rows.append((queue, order, payload))
        return OperationOutcome(order.enqueued(queue.account))

    def _make_room(self, queue: CachedQueue, order: TimedEnqueueRequest, limits: QueueLimits) -> OperationOutcome:
        """It is more than there is room for."""
        if limits.when_full == "refuse":
            return OperationOutcome(error=QueueFull())
        # What came before is inserted first, so that the order is kept.
        self._flush()
        enqueued = enqueue_in_queue(self._connection, limits, queue, order, self._counts)
        for one in enqueued.evicted:
            self._waiting.pop(one.id, None)
        return OperationOutcome(enqueued)

    def _is_refused(self, queue: CachedQueue, order: TimedEnqueueRequest, limits: QueueLimits) -> bool:
        self._flush()
        try:
            check_capacity(self._connection, limits, [(queue, order.origin, len(order.payloads), order.size)])
        except QueueFull:
            return True
        return False

    def _remove(self, work: RemoveOperation) -> OperationOutcome:
        self._look_again(work)
        found = [self._waiting[id_] for id_ in work.ids if id_ in self._waiting]
        if work.account is not None:
            found = sorted([one for one in found if one.queue.account == work.account], key=lambda one: one.seq)
        for one in found:
            del self._waiting[one.id]
            self._counts.add(one.queue, -1, -one.size)
        self._note_senders(found, work.now)
        self._gone += found
        self._acknowledged += len(found)
        return OperationOutcome([one.removed() for one in found])

    def _note_senders(self, acknowledged: Iterable[MessageRow], now: float) -> None:
        parties: dict[CachedQueue, set[int]] = {}
        for one in acknowledged:
            if one.origin:
                parties.setdefault(one.queue, set()).add(get_party(one.origin))
        if any(queue.senders is None for queue in parties):
            # With those of what is likely to be acknowledged next.
            more = [one.queue for one in self._waiting.values() if one.origin]
            load_known_senders(self._connection, [*parties, *more])
        for queue, some in parties.items():
            self._known.retain_known_senders(queue)
            if queue.senders is not None and queue.senders.acknowledged(some, now):
                self._heard_of[queue.recipient_id] = queue

    def _mark(self, work: MarkDeliveredOperation) -> OperationOutcome:
        if any(not marked.keys().isdisjoint(work.ids) for marked in self._marks.values()):
            self._flush()  # one update changes a message once
        for id_ in work.ids:
            if id_ in self._waiting:
                self._waiting[id_].pushes += 1
        self._marks.setdefault(work.node, {}).update(dict.fromkeys(work.ids))
        return OperationOutcome()

    def _look_again(self, work: RemoveOperation) -> None:
        """It may be for what this run has deposited."""
        unknown = [id_ for id_ in work.ids if id_ not in self._waiting]
        if not unknown:
            return
        if self._brought is None:
            orders = [work.order for work in self._works if isinstance(work, EnqueueOperation)]
            self._brought = {payload.id for order in orders for payload in order.payloads}
        if not self._brought.isdisjoint(unknown):
            self._flush()
            self._waiting |= find_message_rows(self._connection, self._known, work.ids)

    def _flush(self) -> None:
        gone, self._gone = self._gone, []
        rows, self._rows = self._rows, []
        delete_messages(self._connection, gone)
        insert_messages(self._connection, rows)
        if self._heard_of:
            save_known_senders(self._connection, self._heard_of.values())
            self._heard_of = {}
        marks, self._marks = self._marks, {}
        for node, ids in marks.items():
            mark_delivered(self._connection, ids, node)
