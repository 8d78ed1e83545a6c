"""What changes the messages, in SQL; each function runs inside a transaction of the caller."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from sqlite3 import Connection
from typing import Any

from mediatord.errors import RecipientUnknown
from mediatord.interfaces import Deposited, Payload, QueueLimits, Reason, Removed, StoredMessage
from mediatord.store.books import Entry
from mediatord.store.known_queues import KnownQueues, Queue, known_queues
from mediatord.store.shares import Amount
from mediatord.store.sql_cluster import NO_NODE, enter_node
from mediatord.store.sql_ledger import enter
from mediatord.store.sql_queue_counts import Counts
from mediatord.store.sql_room import check_room, victims
from mediatord.store.sql_rows import change_in, gather, gather_in, insert_rows
from mediatord.store.sql_waiting import COLUMNS, ORIGIN, Waiting, read_waiting

_INSERT = """
    INSERT OR ROLLBACK INTO message (
        id, recipient_id, account_id, form, size, received_at, expires_at, due_at, digest_head, digest, payload,
        origin
    )
"""
_PARTS = "seq, id, recipient_id, size, received_at, pushes"
_EXPIRED = f"FROM (SELECT {_PARTS} FROM message WHERE expires_at <= ? ORDER BY expires_at, seq LIMIT ?) some"


@dataclass(slots=True)
class Deposit:
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


def deposit(connection: Connection, limits: QueueLimits, order: Deposit) -> Deposited:
    """
    Append to a queue and make room in it; too large ones are out again at once.

    :raise RecipientUnknown: nobody has registered the DID.
    :raise QueueFull: it is to be refused.
    """
    counts = Counts()
    queue = known_queues(connection).find(connection, [order.recipient_did]).get(order.recipient_did)
    if queue is None:
        raise RecipientUnknown()
    if limits.when_full == "refuse":
        check_room(connection, limits, [(queue, order.origin, len(order.payloads), order.size)])
    deposited = deposit_in(connection, limits, queue, order, counts)
    counts.write(connection)
    return deposited


def deposit_in(
    connection: Connection, limits: QueueLimits, queue: Queue, order: Deposit, counts: Counts
) -> Deposited:
    """As :func:`deposit`, for a queue whose messages are all in the table; what changed is in `counts`."""
    fitting = [payload for payload in order.payloads if len(payload.data) <= limits.max_bytes]
    size = sum([len(payload.data) for payload in fitting])
    gone = victims(connection, limits, queue, order.origin, Amount(len(fitting), size))
    insert_all(connection, [(queue, order, payload) for payload in fitting])
    delete(connection, [one for one, _, _ in gone])
    for one, origin, _ in gone:
        counts.add(queue, -1, -one.size, origin)
    counts.add(queue, len(fitting), size, order.origin)
    evicted = [one.removed(reason) for one, _, reason in gone]
    if len(fitting) < len(order.payloads):
        evicted += [order.oversize(p, queue.account) for p in order.payloads if len(p.data) > limits.max_bytes]
    enter(connection, "didcomm", "accepted", len(order.payloads))
    enter(connection, "didcomm", "evicted", len(evicted))
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


def purge(connection: Connection, ids: Iterable[str]) -> list[Removed]:
    """Remove by id, whoever it belongs to, because the operator wants it."""
    wanted = list(dict.fromkeys(ids))
    found = find_waiting(connection, known_queues(connection), wanted)
    return take_out(connection, [found[id] for id in wanted if id in found], "removed")


def expire(connection: Connection, now: float, limit: int, max_bytes: int) -> list[Removed]:
    """The first that have expired, as many as fit in `max_bytes`, but at least one."""
    rows = gather(connection, COLUMNS, _EXPIRED, (now, max(limit, 0)))
    fitting: list[list[Any]] = []
    for row in rows:
        max_bytes -= row[3]
        if fitting and max_bytes < 0:
            break
        fitting.append(row)
    return take_out(connection, _read(connection, known_queues(connection), fitting), "expired", "ttl")


def find_waiting(connection: Connection, known: KnownQueues, ids: Sequence[str]) -> dict[str, Waiting]:
    """What there is with these ids, with its origin."""
    rows = gather_in(connection, f"{COLUMNS}, {ORIGIN}", "FROM message WHERE id IN ({})", ids)
    return {one.id: one for one in _read(connection, known, rows)}


def take_out(
    connection: Connection, messages: Sequence[Waiting], entry: Entry, reason: Reason | None = None
) -> list[Removed]:
    """Delete them and count them out."""
    counts = Counts()
    removed = [one.removed(reason) for one in messages]
    delete(connection, messages)
    for one in messages:
        counts.add(one.queue, -1, -one.size)
    counts.write(connection)
    enter(connection, "didcomm", entry, len(messages))
    return removed


def delete(connection: Connection, messages: Sequence[Waiting]) -> None:
    """Delete them; whoever does that counts them out."""
    change_in(connection, "DELETE FROM message WHERE seq IN ({})", [one.seq for one in messages])


def insert_all(connection: Connection, rows: Sequence[tuple[Queue, Deposit, Payload]]) -> None:
    """Append messages in this order, where there is room for them."""
    insert_rows(connection, _INSERT, [_values(*row) for row in rows])


def _read(connection: Connection, known: KnownQueues, rows: Sequence[list[Any]]) -> list[Waiting]:
    queues = known.numbered(connection, [row[2] for row in rows])
    return [read_waiting(queues[row[2]], row) for row in rows]


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
        order.origin,
    )


def head(digest: bytes) -> int:
    """What stands for a digest in the index."""
    return int.from_bytes(digest[:8], "big", signed=True)
