"""What changes the messages, in SQL; each function runs inside a transaction of the caller."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from sqlite3 import Connection
from typing import Any

from mediatord.errors import RecipientUnknown
from mediatord.interfaces import Deposited, Payload, QueueLimits, Reason, Removed, StoredMessage
from mediatord.store.known_queues import KnownQueues, Queue, known_queues
from mediatord.store.sql_cluster import NO_NODE, enter_node
from mediatord.store.sql_queue_counts import Counts
from mediatord.store.sql_rows import change_in, gather, gather_in, insert_rows

_INSERT = """
    INSERT OR ROLLBACK INTO message (
        id, recipient_id, account_id, form, size, received_at, expires_at, due_at, digest_head, digest, payload
    )
"""
# A time in two numbers, because JSON would round it.
_COLUMNS = """
    seq, id, recipient_id, size, CAST(received_at AS INTEGER), received_at - CAST(received_at AS INTEGER), pushes
"""
_PARTS = "seq, id, recipient_id, size, received_at, pushes"
_EXPIRED = f"FROM (SELECT {_PARTS} FROM message WHERE expires_at <= ? ORDER BY expires_at, seq LIMIT ?) some"
_OLDEST = f"FROM (SELECT {_PARTS} FROM message WHERE recipient_id = ? AND seq > ? ORDER BY seq LIMIT ?) some"
_OLDEST_AT_A_TIME = 32


@dataclass(slots=True)
class Deposit:
    """What is to be queued for whom."""

    recipient_did: str
    payloads: Sequence[Payload]
    now: float
    expires_at: float
    due_at: float | None

    @property
    def size(self) -> int:
        """Bytes of all payloads."""
        if len(self.payloads) == 1:
            return len(self.payloads[0].data)
        return sum([len(payload.data) for payload in self.payloads])

    def deposited(self, account: str, evicted: Iterable[Removed] = ()) -> Deposited:
        if len(self.payloads) == 1:
            return Deposited((self._stored(self.payloads[0], account),), tuple(evicted))
        return Deposited(tuple([self._stored(payload, account) for payload in self.payloads]), tuple(evicted))

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

    def oversize(self, payload: Payload, account: str) -> Removed:
        return Removed(payload.id, self.recipient_did, account, len(payload.data), self.now, 0, "fifo_bytes")


class Waiting:
    """A message that is to go: its row without the payload, and its queue."""

    __slots__ = ("id", "pushes", "queue", "received_at", "seq", "size")

    def __init__(self, queue: Queue, seq: int, id: str, size: int, received_at: float, pushes: int) -> None:
        self.queue = queue
        self.seq = seq
        self.id = id
        self.size = size
        self.received_at = received_at
        self.pushes = pushes

    def removed(self, reason: Reason | None = None) -> Removed:
        queue = self.queue
        return Removed(self.id, queue.did, queue.account, self.size, self.received_at, self.pushes, reason)


def deposit(connection: Connection, limits: QueueLimits, order: Deposit) -> Deposited:
    """
    Append to a queue and make room in it; too large ones are out again at once.

    :raise RecipientUnknown: nobody has registered the DID.
    """
    counts = Counts()
    queue = known_queues(connection).find(connection, [order.recipient_did]).get(order.recipient_did)
    if queue is None:
        raise RecipientUnknown()
    deposited = deposit_in(connection, limits, queue, order, counts)
    counts.write(connection)
    return deposited


def deposit_in(
    connection: Connection, limits: QueueLimits, queue: Queue, order: Deposit, counts: Counts
) -> Deposited:
    """As :func:`deposit`, for a queue whose messages are all in the table; what changed is in `counts`."""
    fitting = [payload for payload in order.payloads if len(payload.data) <= limits.max_bytes]
    size = sum([len(payload.data) for payload in fitting])
    victims = _victims(connection, limits, queue, len(fitting), size)
    insert_all(connection, [(queue, order, payload) for payload in fitting])
    delete(connection, [one for one, _ in victims])
    for one, _ in victims:
        counts.add(one.queue, -1, -one.size)
    counts.add(queue, len(fitting), size)
    evicted = [one.removed(reason) for one, reason in victims]
    if len(fitting) < len(order.payloads):
        evicted += [order.oversize(p, queue.account) for p in order.payloads if len(p.data) > limits.max_bytes]
    return order.deposited(queue.account, evicted)


def mark_delivered(connection: Connection, ids: Iterable[str], node: str = "") -> None:
    number = enter_node(connection, node) if node else NO_NODE
    marking = "UPDATE message SET delivered = ?, pushes = pushes + 1 WHERE id IN ({})"
    change_in(connection, marking, list(dict.fromkeys(ids)), number)


def mark_pending(connection: Connection, ids: Iterable[str]) -> list[str]:
    wanted = list(dict.fromkeys(ids))
    rows = gather_in(connection, "id", "FROM message WHERE id IN ({}) AND +delivered > 0", wanted)
    delivered = {id for (id,) in rows}
    pending = [id for id in wanted if id in delivered]
    change_in(connection, "UPDATE message SET delivered = 0 WHERE id IN ({})", pending)
    return pending


def remove(connection: Connection, ids: Iterable[str]) -> list[Removed]:
    """Remove by id, whoever it belongs to."""
    wanted = list(dict.fromkeys(ids))
    found = find_waiting(connection, known_queues(connection), wanted)
    return take_out(connection, [found[id] for id in wanted if id in found])


def expire(connection: Connection, now: float, limit: int, max_bytes: int) -> list[Removed]:
    """The first that have expired, as many as fit in `max_bytes`, but at least one."""
    rows = gather(connection, _COLUMNS, _EXPIRED, (now, max(limit, 0)))
    fitting: list[list[Any]] = []
    for row in rows:
        max_bytes -= row[3]
        if fitting and max_bytes < 0:
            break
        fitting.append(row)
    return take_out(connection, _read(connection, known_queues(connection), fitting), "ttl")


def find_waiting(connection: Connection, known: KnownQueues, ids: Sequence[str]) -> dict[str, Waiting]:
    """What there is with these ids."""
    rows = gather_in(connection, _COLUMNS, "FROM message WHERE id IN ({})", ids)
    return {one.id: one for one in _read(connection, known, rows)}


def take_out(connection: Connection, messages: Sequence[Waiting], reason: Reason | None = None) -> list[Removed]:
    """Delete them and count them out."""
    counts = Counts()
    removed = [one.removed(reason) for one in messages]
    delete(connection, messages)
    for one in messages:
        counts.add(one.queue, -1, -one.size)
    counts.write(connection)
    return removed


def delete(connection: Connection, messages: Sequence[Waiting]) -> None:
    """Delete them; whoever does that counts them out."""
    change_in(connection, "DELETE FROM message WHERE seq IN ({})", [one.seq for one in messages])


def insert_all(connection: Connection, rows: Sequence[tuple[Queue, Deposit, Payload]]) -> None:
    """Append messages in this order, where there is room for them."""
    insert_rows(connection, _INSERT, [_values(*row) for row in rows])


def _victims(
    connection: Connection, limits: QueueLimits, queue: Queue, messages: int, size: int
) -> list[tuple[Waiting, Reason]]:
    """The oldest, until so many messages of so many bytes fit beside the rest."""
    messages += queue.messages
    size += queue.size
    victims: list[tuple[Waiting, Reason]] = []
    after = -1
    while messages > limits.max_messages or size > limits.max_bytes:
        number = max(messages - limits.max_messages, 1 if size <= limits.max_bytes else _OLDEST_AT_A_TIME)
        rows = gather(connection, _COLUMNS, _OLDEST, (queue.recipient_id, after, number))
        if not rows:
            break
        for row in rows:
            if messages > limits.max_messages:
                reason: Reason = "fifo_count"
            elif size > limits.max_bytes:
                reason = "fifo_bytes"
            else:
                break
            victims.append((_waiting(queue, row), reason))
            messages -= 1
            size -= row[3]
        after = rows[-1][0]
    return victims


def _read(connection: Connection, known: KnownQueues, rows: Sequence[list[Any]]) -> list[Waiting]:
    queues = known.numbered(connection, [row[2] for row in rows])
    return [_waiting(queues[row[2]], row) for row in rows]


def _waiting(queue: Queue, row: list[Any]) -> Waiting:
    seq, id_, _, size, seconds, fraction, pushes = row
    return Waiting(queue, seq, id_, size, seconds + fraction, pushes)


def _values(queue: Queue, order: Deposit, payload: Payload) -> tuple[Any, ...]:
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
        head(digest),
        digest,
        data,
    )


def head(digest: bytes) -> int:
    """What stands for a digest in the index."""
    return int.from_bytes(digest[:8], "big", signed=True)
